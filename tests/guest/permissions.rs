//! The driver's rules for who may open and change events, and how many events. Each test makes a call that a rule
//! refuses, and the most similar call that the rule allows.

use std::fs;
use std::io;

use perf_event_open_sys::bindings::{PERF_COUNT_SW_PAGE_FAULTS, PERF_TYPE_SOFTWARE, perf_event_attr};

use crate::ensure::{ensure, ensure_eq};
use crate::fields::{CALLCHAIN, IP, REGS_INTR, TIME};
use crate::pages::{Pages, READ};
use crate::persisting::{fresh, persistent, sequence};
use crate::raw::{
    Device, EXIT_PORT, Event, FLAG_PERSISTENT, How, KIND_EXIT_TRACE, KIND_MARK, PAGE, kernels, refused, sampling,
    silent,
};
use crate::{Fallible, Outcome, cpu, os};

const GROUP: &str = "permissions";

const VALUE: u64 = 60;
/// The level at which nothing is refused.
const OPEN: i32 = -1;
/// Debian's own level.
const CLOSED: i32 = 3;

const PARAMETERS: &str = "/sys/module/virtio_pmu/parameters";

fn set_parameter(name: &str, value: i32) -> io::Result<()> {
    fs::write(format!("{PARAMETERS}/{name}"), value.to_string())
}

/// Runs `act` in a child process, as the user nobody.
fn as_nobody(act: impl FnOnce() -> Outcome) -> Outcome {
    in_child(os::become_nobody, act)
}

/// Runs `act` in a child, after `become_who`.
fn in_child(become_who: impl FnOnce() -> io::Result<()>, act: impl FnOnce() -> Outcome) -> Outcome {
    os::in_child(|| {
        become_who()?;
        act()
    })
}

fn mark(device: &Device) -> perf_event_attr {
    device.attr(KIND_MARK, VALUE)
}

fn own_of_marks(device: &Device) -> Option<i32> {
    refused(device.open_event(&mark(device), How::OWN))
}

#[apply(guest_test)]
fn open_by_nobody_at_each_level_answers_as_perf_does() -> Outcome {
    let device = Device::open()?;
    let marks = mark(&device);
    // Most kinds of events do not support `exclude_kernel`, but a trace of exits does.
    let mut user_exits = silent(device.attr(KIND_EXIT_TRACE, EXIT_PORT));
    user_exits.set_exclude_kernel(1);
    // perf refuses traces, so an event of its own shows what it allows.
    let mut user_faults = perf_event_attr { config: PERF_COUNT_SW_PAGE_FAULTS.into(), ..silent(marks) };
    user_faults.type_ = PERF_TYPE_SOFTWARE;
    user_faults.set_exclude_kernel(1);
    let init = How { pid: 1, ..How::OWN };
    let here = How::on_cpu(0);
    let all = [OPEN, 0, 1, 2, CLOSED];
    // Each case has an event and the highest level of `perf_event_paranoid` at which the user nobody may open it.
    // `None` means that this user may not open it at any level.
    let cases: [(&str, &perf_event_attr, &perf_event_attr, How<'_>, Option<i32>); 6] = [
        ("marks of its own", &marks, &marks, How::OWN, Some(1)),
        ("exits of its own outside the kernel", &user_exits, &user_faults, How::OWN, Some(2)),
        ("marks of a CPU", &marks, &marks, here, Some(0)),
        ("exits of a CPU outside the kernel", &user_exits, &user_faults, here, Some(0)),
        ("marks of root's task", &marks, &marks, init, None),
        ("exits of root's task outside the kernel", &user_exits, &user_faults, init, None),
    ];
    for level in all {
        os::set_paranoid(level)?;
        as_nobody(|| {
            for (what, attr, perfs, how, highest) in &cases {
                let allowed = highest.is_some_and(|highest| level <= highest);
                let expected = (!allowed).then_some(libc::EACCES);
                ensure_eq!(refused(kernels(perfs, *how)), expected, "errno of perf for {what} at level {level}");
                let ours = refused(device.open_event(attr, *how));
                ensure_eq!(ours, expected, "errno for {what} at level {level}");
            }
            Ok(())
        })?;
        // Every user may open the device and place marks.
        as_nobody(|| Ok(Device::open()?.mark(VALUE)?))?;
        ensure_eq!(own_of_marks(&device), None, "errno for root's own event at level {level}");
    }
    Ok(())
}

#[apply(guest_test)]
fn kernel_sampled_without_perfmon_at_level_2_is_refused() -> Outcome {
    let device = Device::open()?;
    let trace = silent(device.attr(KIND_EXIT_TRACE, EXIT_PORT));
    let telling = [
        ("addresses", device.marks(VALUE, 1, IP)),
        ("call chains", device.marks(VALUE, 1, CALLCHAIN)),
        ("nothing but times", device.marks(VALUE, 1, TIME)),
        ("exits", trace),
    ];
    for (level, expected) in [(2, Some(libc::EACCES)), (1, None)] {
        os::set_paranoid(level)?;
        as_nobody(|| {
            for (what, attr) in &telling {
                let opened = refused(device.open_event(attr, How::OWN));
                ensure_eq!(opened, expected, "errno for {what} of the kernel at level {level}");
            }
            Ok(())
        })?;
    }
    Ok(())
}

#[apply(guest_test)]
fn root_without_perfmon_is_refused() -> Outcome {
    let device = Device::open()?;
    os::set_paranoid(CLOSED)?;
    in_child(
        || os::keep_capabilities(&[]),
        || {
            ensure_eq!(own_of_marks(&device), Some(libc::EACCES), "its own event");
            let opened = device.open_event(&mark(&device), How::on_cpu(0));
            ensure_eq!(refused(opened), Some(libc::EACCES), "a CPU's event");
            Ok(())
        },
    )
}

#[apply(guest_test)]
fn nobody_with_perfmon_opens() -> Outcome {
    let device = Device::open()?;
    // At Debian's own level, perf asks for CAP_SYS_ADMIN.
    os::set_paranoid(2)?;
    let init = How { pid: 1, ..How::OWN };
    in_child(
        || os::become_nobody_with(&[os::CAP_PERFMON]),
        || {
            for (what, how) in
                [("its own event", How::OWN), ("a CPU's event", How::on_cpu(0)), ("an event of root's task", init)]
            {
                let opened = device.open_event(&mark(&device), how);
                ensure_eq!(refused(opened), None, "{what}");
            }
            Ok(())
        },
    )
}

/// Sets up a test of persistent events: one event on CPU 1, named `kept`, and a level of `perf_event_paranoid` at which
/// users without capabilities may open events of CPUs.
fn one_persistent() -> Fallible<(Device, Event, u64)> {
    os::set_paranoid(OPEN)?;
    let device = fresh()?;
    let (event, id) = persistent(&device, &sequence(&device), 1, "kept")?;
    Ok((device, event, id))
}

#[apply(guest_test)]
fn detach_without_perfmon_is_refused() -> Outcome {
    let (device, kept, _) = one_persistent()?;
    let other = device.start(&sequence(&device), How::on_cpu(1))?;
    as_nobody(|| {
        let errno = Some(libc::EPERM);
        ensure_eq!(refused(other.detach("stolen")), errno, "detaching an event");
        ensure_eq!(refused(kept.detach("renamed")), errno, "renaming a persistent event");
        Ok(())
    })?;
    let names: Vec<String> = device.persistent()?.iter().map(|e| e.name()).collect();
    ensure_eq!(names, ["kept"], "names of the persistent events");
    kept.attach()?;
    Ok(())
}

#[apply(guest_test)]
fn persistent_open_without_perfmon_is_refused() -> Outcome {
    os::set_paranoid(OPEN)?;
    let device = fresh()?;
    as_nobody(|| {
        let attr = sequence(&device);
        let how = How::on_cpu(1);
        ensure_eq!(refused(device.open_event(&attr, how)), None, "opening an event that is not persistent");
        let opened = refused(device.open_event(&attr, how.with(FLAG_PERSISTENT)));
        ensure_eq!(opened, Some(libc::EPERM), "opening a persistent event");
        Ok(())
    })?;
    ensure_eq!(device.persistent()?.len(), 0, "persistent events");
    Ok(())
}

#[apply(guest_test)]
fn attach_without_perfmon_is_refused() -> Outcome {
    let (device, kept, _) = one_persistent()?;
    as_nobody(|| {
        ensure_eq!(refused(kept.attach()), Some(libc::EPERM), "attaching");
        Ok(())
    })?;
    ensure_eq!(device.persistent()?.len(), 1, "persistent events");
    kept.attach()?;
    Ok(())
}

#[apply(guest_test)]
fn reopen_without_perfmon_is_refused() -> Outcome {
    let (device, kept, id) = one_persistent()?;
    as_nobody(|| {
        let opened = refused(device.reopen(id, 1));
        ensure_eq!(opened, Some(libc::EPERM), "nobody's handle");
        Ok(())
    })?;
    ensure_eq!(refused(device.reopen(id, 1)), None, "root's handle");
    kept.attach()?;
    Ok(())
}

#[apply(guest_test)]
fn perf_view_without_perfmon_is_refused() -> Outcome {
    let (device, kept, id) = one_persistent()?;
    let attr = device.reopening(id);
    as_nobody(|| {
        let opened = refused(kernels(&attr, How::on_cpu(1)));
        ensure_eq!(opened, Some(libc::EPERM), "nobody's view");
        Ok(())
    })?;
    ensure_eq!(refused(kernels(&attr, How::on_cpu(1))), None, "root's view");
    kept.attach()?;
    Ok(())
}

#[apply(guest_test)]
fn device_flush_without_perfmon_is_refused() -> Outcome {
    os::set_paranoid(OPEN)?;
    let device = Device::open()?;
    as_nobody(|| {
        ensure_eq!(refused(device.flush()), Some(libc::EPERM), "nobody's flush");
        Ok(())
    })?;
    ensure_eq!(refused(device.flush()), None, "root's flush");
    Ok(())
}

#[apply(guest_test)]
fn bpf_query_without_perfmon_is_refused() -> Outcome {
    os::set_paranoid(OPEN)?;
    let device = Device::open()?;
    let event = device.open_event(&mark(&device), How::OWN)?;
    as_nobody(|| {
        ensure_eq!(refused(event.query_bpf()), Some(libc::EPERM), "nobody's query");
        Ok(())
    })?;
    ensure_eq!(refused(event.query_bpf()), Some(libc::EINVAL), "root's query");
    Ok(())
}

#[apply(guest_test)]
fn read_only_map_made_writable_is_refused() -> Outcome {
    let device = Device::open()?;
    let event = device.open_event(&device.marks(VALUE, 1, TIME), How::OWN)?;
    let ring = Pages::map(&event, 1, READ)?;
    let made = os::make_writable(ring.address(), PAGE);
    ensure_eq!(refused(made), Some(libc::EACCES), "making the mapping of a ring writable");
    let (kept_device, kept, _) = one_persistent()?;
    let window = Pages::map(&kept, 1, READ)?;
    let made = os::make_writable(window.address(), PAGE);
    ensure_eq!(refused(made), Some(libc::EACCES), "making the mapping of a ring in the window writable");
    kept.attach()?;
    drop(kept_device);
    Ok(())
}

/// Returns how many more events can be opened on task `pid`. To find out, opens as many as possible and closes them
/// again.
pub(crate) fn room(device: &Device, pid: i32) -> Fallible<u32> {
    let how = How { pid, ..How::OWN };
    let mut kept = Vec::new();
    loop {
        match device.open_event(&mark(device), how) {
            Ok(event) => kept.push(event),
            Err(error) if error.raw_os_error() == Some(libc::ENOSPC) => {
                return Ok(u32::try_from(kept.len())?);
            }
            Err(error) => return Err(error.into()),
        }
    }
}

#[apply(guest_test)]
fn share_used_up_by_nobody_leaves_events_to_root() -> Outcome {
    let device = Device::open()?;
    os::set_paranoid(OPEN)?;
    os::allow_descriptors(4096)?;
    let all = device.info.max_events;
    // The events are on sleeping tasks, so that task switches send no commands for them.
    let roots = os::Sleeper::start(|| Ok(()))?;
    let nobodys = os::Sleeper::start(|| {
        os::become_nobody()?;
        os::set_dumpable(true)
    })?;
    // Two processes of the user nobody use up the share of users without CAP_PERFMON. Each holds its events until it is
    // killed.
    let of_nobody = How { pid: nobodys.pid, ..How::OWN };
    let hold = |events: u32| {
        os::Sleeper::start(|| {
            os::become_nobody()?;
            let open = |_| device.open_event(&mark(&device), of_nobody);
            (0..events).map(open).collect::<io::Result<Vec<_>>>()
        })
    };
    let room_of_nobody = |left: u32| {
        as_nobody(|| {
            let room = room(&device, nobodys.pid)?;
            ensure_eq!(room, left, "events left in nobody's share");
            Ok(())
        })
    };
    let share = all / 4 * 3;
    let first = hold(100)?;
    room_of_nobody(share - 100)?;
    let second = hold(share - 100)?;
    room_of_nobody(0)?;
    ensure_eq!(room(&device, roots.pid)?, all - share, "events left for root");
    drop((first, second));
    ensure_eq!(room(&device, roots.pid)?, all, "events left for root when nobody has none");
    Ok(())
}

/// Limits users without CAP_PERFMON to one percent of the events while `act` runs. Passes the limit to `act`.
fn with_one_percent(device: &Device, act: impl FnOnce(u32) -> Outcome) -> Outcome {
    os::set_paranoid(OPEN)?;
    let shown = fs::read_to_string(format!("{PARAMETERS}/unprivileged_percent"))?;
    ensure_eq!(shown.trim(), "75", "the parameter's default");
    set_parameter("unprivileged_percent", 1)?;
    let done = act(device.info.max_events / 100);
    set_parameter("unprivileged_percent", 75)?;
    done
}

#[apply(guest_test)]
fn inherited_events_of_nobody_count_against_the_share() -> Outcome {
    let device = Device::open()?;
    with_one_percent(&device, |share| {
        as_nobody(|| {
            let mut inherited = mark(&device);
            inherited.set_inherit(1);
            let event = device.start(&inherited, How::OWN)?;
            {
                let _tasks = (1..share).map(|_| os::Sleeper::start(|| Ok(()))).collect::<io::Result<Vec<_>>>()?;
                ensure_eq!(own_of_marks(&device), Some(libc::ENOSPC), "one more event");
                // The fork succeeds, but the limit does not allow the inherited event. So the child's marks are not
                // counted.
                os::in_child(|| Ok(device.place(VALUE, 5)?))?;
            }
            ensure_eq!(own_of_marks(&device), None, "one more event when the tasks are gone");
            device.place(VALUE, 3)?;
            ensure_eq!(event.count()?, 3, "marks counted");
            Ok(())
        })
    })
}

#[apply(guest_test)]
fn perf_core_events_of_nobody_count_against_the_share() -> Outcome {
    let device = Device::open()?;
    with_one_percent(&device, |share| {
        as_nobody(|| {
            let open = || kernels(&mark(&device), How::OWN);
            let _events = (0..share).map(|_| open()).collect::<io::Result<Vec<_>>>()?;
            ensure_eq!(refused(open()), Some(libc::ENOSPC), "one more event by perf");
            ensure_eq!(own_of_marks(&device), Some(libc::ENOSPC), "one more event");
            Ok(())
        })?;
        ensure_eq!(own_of_marks(&device), None, "an event of root's when nobody's are closed");
        Ok(())
    })
}

// Only a reboot undoes a lockdown.
#[apply(guest_test)]
#[last]
fn registers_in_a_locked_down_kernel_are_refused() -> Outcome {
    let device = fresh()?;
    cpu::pin(1)?;
    let mut registers = sampling(mark(&device), 1, REGS_INTR);
    registers.sample_regs_intr = 1;
    let how = How::on_cpu(1);
    let kept = device.open_event(&registers, how)?;
    let id = kept.detach("registers")?;
    ensure_eq!(refused(device.reopen(id, 1)), None, "reopening before the lockdown");
    let plain = device.open_event(&sequence(&device), how)?;
    let plain_id = plain.detach("plain")?;

    os::mount(c"securityfs", c"/sys/kernel/security")?;
    fs::write("/sys/kernel/security/lockdown", "confidentiality")?;
    let opened = refused(device.open_event(&registers, how));
    ensure_eq!(opened, Some(libc::EPERM), "opening an event with registers");
    ensure_eq!(refused(device.reopen(id, 1)), Some(libc::EPERM), "reopening an event with registers");
    ensure_eq!(refused(device.reopen(plain_id, 1)), None, "reopening an event without registers");
    ensure!(own_of_marks(&device).is_none(), "an event that only counts was refused");
    kept.attach()?;
    plain.attach()?;
    Ok(())
}
