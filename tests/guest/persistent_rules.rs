//! Refusals of persistent events, and their errno.

use std::os::fd::AsFd;

use perf_event_open_sys::bindings::{self, perf_event_attr};

use crate::ensure::{ensure, ensure_eq};
use crate::pages::{Pages, READ_WRITE};
use crate::persisting::{fresh, persistent, sequence, sweep};
use crate::raw::{Device, ENGINE_EXIT, Event, FLAG_ON_STARTER, FLAG_PERSISTENT, How, refused};
use crate::{Outcome, cpu, os};

const GROUP: &str = "persistent";

#[apply(guest_test)]
fn persistent_event_of_a_task_is_refused() -> Outcome {
    let device = fresh()?;
    let event = device.start(&sequence(&device), How::OWN)?;
    ensure_eq!(refused(event.detach("")), Some(libc::EINVAL), "detaching a task's event");
    ensure_eq!(refused(event.attach()), Some(libc::EINVAL), "attaching a task's event");
    let bound = How { cpu: 0, ..How::OWN };
    let event = device.start(&sequence(&device), bound)?;
    ensure_eq!(refused(event.detach("")), Some(libc::EINVAL), "detaching a task's event on one CPU");
    for how in [How::OWN, bound] {
        let opened = device.open_event(&sequence(&device), how.with(FLAG_PERSISTENT));
        ensure_eq!(refused(opened), Some(libc::EINVAL), "opening a task's event persistent");
    }
    ensure_eq!(device.persistent()?.len(), 0, "events listed");
    Ok(())
}

#[apply(guest_test)]
fn detach_of_group_member_is_einval() -> Outcome {
    let device = fresh()?;
    let how = How::on_cpu(1);
    let leader = device.open_event(&sequence(&device), how)?;
    let member = device.open_event(&sequence(&device), how.led_by(leader.as_fd()))?;
    for (who, event) in [("a member", &member), ("its leader", &leader)] {
        ensure_eq!(refused(event.detach("")), Some(libc::EINVAL), "detaching {who}");
    }
    let opened = device.open_event(&sequence(&device), how.led_by(leader.as_fd()).with(FLAG_PERSISTENT));
    ensure_eq!(refused(opened), Some(libc::EINVAL), "opening a persistent member");
    // After the member is closed, the leader is a single event.
    drop(member);
    leader.detach("leader")?;
    leader.attach()?;
    Ok(())
}

#[apply(guest_test)]
fn detach_of_redirected_event_is_einval() -> Outcome {
    let device = fresh()?;
    let how = How::on_cpu(1);
    let target = device.open_event(&sequence(&device), how)?;
    let _ring = Pages::map(&target, 1, READ_WRITE)?;
    let event = device.open_event(&sequence(&device), how)?;
    event.output_to(target.ring())?;
    ensure_eq!(refused(event.detach("")), Some(libc::EINVAL), "detaching a redirected event");
    event.output_to(-1)?;
    event.detach("back")?;
    event.attach()?;
    Ok(())
}

#[apply(guest_test)]
fn persistent_event_refuses_a_redirect() -> Outcome {
    let device = fresh()?;
    let how = How::on_cpu(1);
    let (event, _) = persistent(&device, &sequence(&device), 1, "single")?;
    let target = device.open_event(&sequence(&device), how)?;
    let _ring = Pages::map(&target, 1, READ_WRITE)?;
    ensure_eq!(refused(event.output_to(target.ring())), Some(libc::EINVAL), "redirecting a persistent event");
    event.attach()?;
    Ok(())
}

#[apply(guest_test)]
fn others_may_write_into_its_ring() -> Outcome {
    let device = fresh()?;
    cpu::pin(1)?;
    let attr = sequence(&device);
    let (event, id) = persistent(&device, &attr, 1, "target")?;
    let mut ring = Pages::map(&event, 1, READ_WRITE)?;
    let other = device.open_event(&attr, How::on_cpu(1))?;
    other.output_to(event.ring())?;
    other.enable(0)?;
    device.place(4, 5)?;
    ensure_eq!(ring.take()?.len(), 10, "records of both events");
    drop(other);
    // Redirection through another handle of the same event also works.
    let again = device.reopen(id, 1)?;
    let other = device.open_event(&attr, How::on_cpu(1))?;
    other.output_to(again.ring())?;
    other.enable(0)?;
    drop(again);
    device.place(4, 5)?;
    ensure_eq!(ring.take()?.len(), 10, "records of both events, redirected by another handle");
    drop(other);
    device.place(4, 5)?;
    ensure_eq!(ring.take()?.len(), 5, "records after the other event is closed");
    event.attach()?;
    Ok(())
}

#[apply(guest_test)]
fn opening_again_takes_the_id_and_no_more() -> Outcome {
    let device = fresh()?;
    let (event, id) = persistent(&device, &sequence(&device), 1, "again")?;
    let open = |attr: &perf_event_attr, how| refused(device.open_event(attr, how));
    let attr = device.reopening(id);
    let here = How::on_cpu(1);
    ensure_eq!(open(&attr, here), None, "errno for a valid request");
    for unknown in [0, id + 1, id << 32, u64::MAX] {
        let unknown = device.reopening(unknown);
        ensure_eq!(open(&unknown, here), Some(libc::ENOENT), "errno for an id that does not exist");
    }
    let other = device.open_event(&sequence(&device), here)?;
    ensure_eq!(
        open(&device.reopening(other.id()?), here),
        Some(libc::ENOENT),
        "errno for an event that is not persistent"
    );
    for (how, what) in [
        (How::on_cpu(0), "another CPU"),
        (How { pid: -1, ..How::OWN }, "no CPU"),
        (How { pid: 0, ..here }, "a task"),
        (here.with(FLAG_PERSISTENT), "persistent again"),
        (here.with(FLAG_ON_STARTER), "waiting for a starter"),
        (here.by(ENGINE_EXIT), "an engine"),
    ] {
        ensure_eq!(open(&attr, how), Some(libc::EINVAL), "errno for {what}");
    }
    let there = open(&attr, How::on_cpu(4096));
    ensure!(
        [Some(libc::EINVAL), Some(libc::ENODEV)].contains(&there),
        "errno for a CPU that does not exist: {there:?}"
    );
    // A view that samples takes the samples of the event's ring, but the event has no ring yet.
    let sampling = perf_event_attr { sample_type: 1, ..attr };
    let sampling =
        perf_event_attr { __bindgen_anon_1: bindings::perf_event_attr__bindgen_ty_1 { sample_period: 1 }, ..sampling };
    ensure_eq!(open(&sampling, here), Some(libc::EOPNOTSUPP), "errno for samples without a ring");
    event.attach()?;
    Ok(())
}

#[apply(guest_test)]
fn persistent_events_beyond_the_limit_are_enospc() -> Outcome {
    let device = fresh()?;
    let most = device.info.max_persistent as usize;
    ensure!(most > 0, "the device allows no persistent events");
    let attr = sequence(&device);
    let mut kept = Vec::new();
    for _ in 0..most {
        kept.push(persistent(&device, &attr, 0, "")?.0);
    }
    let more = device.start(&attr, How::on_cpu(0))?;
    ensure_eq!(refused(more.detach("")), Some(libc::ENOSPC), "detaching one event more than {most}");
    let opened = device.open_event(&attr, How::on_cpu(0).with(FLAG_PERSISTENT));
    ensure_eq!(refused(opened), Some(libc::ENOSPC), "opening one more persistent event");
    // A renamed persistent event still counts only once towards the limit. An attached event no longer counts.
    kept[0].detach("renamed")?;
    kept[1].attach()?;
    more.detach("")?;
    ensure_eq!(device.persistent()?.len(), most, "events listed");
    sweep(&device)
}

#[apply(guest_test)]
fn list_is_read_in_pieces() -> Outcome {
    let device = fresh()?;
    let attr = sequence(&device);
    let kept: Vec<(Event, u64)> =
        (0..5).map(|number| persistent(&device, &attr, number % 2, "")).collect::<Result<_, _>>()?;
    let ids: Vec<u64> = kept.iter().map(|&(_, id)| id).collect();
    let list =
        |after, count| -> std::io::Result<Vec<u64>> { Ok(device.list(after, count)?.iter().map(|e| e.id).collect()) };
    ensure_eq!(list(0, 100)?, ids, "ids of all events");
    ensure_eq!(list(0, 2)?, ids[..2], "ids of the first two events");
    ensure_eq!(list(ids[1], 2)?, ids[2..4], "ids of two events after the second");
    ensure_eq!(list(ids[3], 9)?, ids[4..], "ids after the fourth");
    ensure_eq!(list(ids[4], 9)?, [0; 0], "ids after the last");
    ensure_eq!(list(u64::MAX, 9)?, [0; 0], "ids after the highest possible id");
    ensure_eq!(list(0, 0)?, [0; 0], "ids in a list of no entries");
    ensure_eq!(refused(device.list_raw(0, 1, 1)), Some(libc::EINVAL), "errno for a reserved word");
    for (number, (entry, &id)) in device.persistent()?.iter().zip(&ids).enumerate() {
        let reported = entry.attr();
        ensure_eq!(
            (entry.id, entry.cpu as usize, entry.flags, entry.engine),
            (id, number % 2, 0, ENGINE_EXIT),
            "the entry of event {number}"
        );
        ensure_eq!(
            (reported.type_, reported.config, reported.sample_type, reported.disabled()),
            (attr.type_, attr.config, attr.sample_type, 0),
            "the attr of event {number}"
        );
    }
    kept[2].0.disable(0)?;
    let entry = device.entry(ids[2])?.ok_or("the event is not listed")?;
    ensure_eq!(entry.attr().disabled(), 1, "the attr's disabled bit after the event was disabled");
    sweep(&device)
}

#[apply(guest_test)]
fn refused_detach_changes_nothing() -> Outcome {
    let device = fresh()?;
    cpu::pin(1)?;
    let event = device.start(&sequence(&device), How::OWN)?;
    let mut ring = Pages::map(&event, 1, READ_WRITE)?;
    ensure_eq!(refused(event.detach("x")), Some(libc::EINVAL), "detaching a task's event");
    device.place(3, 4)?;
    ensure_eq!((ring.take()?.len(), event.count()?), (4, 4), "records and count after the refused detach");
    drop((event, ring));
    ensure_eq!(device.persistent()?.len(), 0, "events listed");
    Ok(())
}

#[apply(guest_test)]
fn persistent_calls_of_nobody_are_refused() -> Outcome {
    let device = fresh()?;
    let (kept, id) = persistent(&device, &sequence(&device), 1, "kept")?;
    let other = device.start(&sequence(&device), How::on_cpu(1))?;
    let mine = Device::open()?;
    let code = os::forked(|| {
        if os::become_nobody().is_err() {
            return 1;
        }
        let denied = |errno: Option<i32>| errno == Some(libc::EPERM) || errno == Some(libc::EACCES);
        let calls = [
            refused(other.detach("stolen")),
            refused(kept.detach("")),
            refused(kept.attach()),
            refused(mine.reopen(id, 1)),
            refused(mine.open_event(&sequence(&mine), How::on_cpu(1).with(FLAG_PERSISTENT))),
            refused(mine.flush()),
        ];
        // Returns 10 plus the index of the first call that was not denied, or 0 if all were denied.
        match calls.iter().position(|&errno| !denied(errno)) {
            None => 0,
            Some(call) => 10 + i32::try_from(call).unwrap_or(0),
        }
    })?;
    ensure_eq!(code, 0, "nobody's exit code (10 or more: a call was not denied)");
    ensure_eq!(device.persistent()?.len(), 1, "events listed");
    kept.attach()?;
    Ok(())
}
