//! Groups of events of `/dev/vpmu`: when members count, whether all counts of one read are from the same moment, and
//! which events may join.

use std::io;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use vpmu_client::{Event, EventAttr, Vpmu};

use crate::beside::work_beside;
use crate::cpu;
use crate::ensure::{ensure, ensure_eq, errno};
use crate::{Fallible, Outcome};

const GROUP: &str = "counting";

/// Returns the attr of an event that counts marks of `value`. A read of the event returns the counts of the event's
/// whole group.
fn marks(vpmu: &Vpmu, value: u32) -> Fallible<EventAttr> {
    Ok(vpmu.attr(&format!("mark={value}"))?.reading_group())
}

fn values(event: &Event) -> Fallible<Vec<u64>> {
    Ok(event.read_group()?.iter().map(|r| r.value).collect())
}

/// Both contexts an event can have.
fn contexts(attr: &EventAttr) -> Fallible<[EventAttr; 2]> {
    cpu::pin(0)?;
    Ok([attr.clone().of_task(0), attr.clone().on_cpu(0)])
}

#[apply(guest_test)]
fn sibling_counts_while_its_leader_does() -> Outcome {
    let vpmu = Vpmu::open()?;
    for attr in contexts(&marks(&vpmu, 3)?)? {
        let leader = vpmu.open_event(&attr)?;
        let sibling = vpmu.open_member(&attr, &leader)?;
        sibling.enable()?;
        vpmu.mark(3)?;
        ensure_eq!(values(&sibling)?, [0, 0], "both counts, the leader off");
        leader.enable()?;
        vpmu.mark(3)?;
        ensure_eq!(values(&sibling)?, [1, 1], "both counts, both on");
        sibling.disable()?;
        vpmu.mark(3)?;
        ensure_eq!(values(&leader)?, [2, 1], "both counts, the sibling off");
        sibling.enable()?;
        leader.disable()?;
        vpmu.mark(3)?;
        ensure_eq!(values(&leader)?, [2, 1], "both counts, the leader off again");
        let readings = leader.read_group()?;
        ensure_eq!(
            (readings[0].id, readings[1].id),
            (leader.perf_id()?, sibling.perf_id()?),
            "the ids of the two counts"
        );
    }
    Ok(())
}

#[apply(guest_test)]
fn group_is_switched_and_reset_as_one() -> Outcome {
    let vpmu = Vpmu::open()?;
    for attr in contexts(&marks(&vpmu, 3)?)? {
        let leader = vpmu.open_event(&attr)?;
        let siblings = [vpmu.open_member(&attr, &leader)?, vpmu.open_member(&attr, &leader)?];
        // The call accepts any event of the group.
        siblings[1].enable_group()?;
        vpmu.mark(3)?;
        ensure_eq!(values(&leader)?, [1, 1, 1], "all counts, all on");
        siblings[0].disable_group()?;
        vpmu.mark(3)?;
        ensure_eq!(values(&siblings[0])?, [1, 1, 1], "all counts, all off");
        siblings[0].reset()?;
        ensure_eq!(values(&leader)?, [1, 0, 1], "all counts, one reset");
        leader.reset_group()?;
        ensure_eq!(values(&leader)?, [0, 0, 0], "all counts, all reset");
    }
    Ok(())
}

#[apply(guest_test)]
fn group_is_read_at_one_moment() -> Outcome {
    let vpmu = Vpmu::open()?;
    let stop = AtomicBool::new(false);
    // Reads the group of a CPU while it counts there, and the group of a task while the task moves between CPUs.
    thread::scope(|scope| -> Outcome {
        let (tell, reported) = std::sync::mpsc::channel();
        let placer = scope.spawn({
            let (vpmu, stop) = (&vpmu, &stop);
            move || -> Result<u64, String> {
                let mut placed = 0;
                tell.send(cpu::thread_id()).map_err(|e| e.to_string())?;
                while !stop.load(Ordering::Relaxed) {
                    if placed % 64 == 0 {
                        cpu::pin((placed / 64 % 2) as usize).map_err(|e| e.to_string())?;
                    }
                    vpmu.mark(3).map_err(|e| e.to_string())?;
                    placed += 1;
                }
                Ok(placed)
            }
        });
        let tid = reported.recv()?.cast_signed();
        let attr = marks(&vpmu, 3)?;
        let both = [attr.clone().of_task(tid), attr.on_cpu(1)];
        let read = both.iter().try_for_each(|attr| -> Outcome {
            let leader = vpmu.open_event(attr)?;
            let sibling = vpmu.open_member(attr, &leader)?;
            leader.enable_group()?;
            sibling.disable()?;
            sibling.enable()?;
            let first = values(&leader)?;
            let (mut last, mut turn) = (0, 0);
            // Continues until there have been at least 300 reads, and at least 64 marks between the first and the last
            // read.
            while turn < 300 || last < first[0] + 64 {
                turn += 1;
                let now = values(if turn % 2 == 0 { &leader } else { &sibling })?;
                ensure_eq!(
                    now[0] - first[0],
                    now[1] - first[1],
                    "reading {turn}: increase of the leader's count, compared with the sibling's"
                );
                ensure!(now[0] >= last, "reading {turn}: the count fell");
                last = now[0];
            }
            Ok(())
        });
        stop.store(true, Ordering::Relaxed);
        placer.join().map_err(|_| "the placer panicked")??;
        read
    })
}

#[apply(guest_test)]
fn closed_leader_frees_its_siblings() -> Outcome {
    let vpmu = Vpmu::open()?;
    for attr in contexts(&marks(&vpmu, 3)?)? {
        let leader = vpmu.open_event(&attr)?;
        let siblings = [vpmu.open_member(&attr, &leader)?, vpmu.open_member(&attr, &leader)?];
        siblings[0].enable()?;
        vpmu.mark(3)?;
        ensure_eq!(values(&leader)?, [0, 0, 0], "all counts, the leader off");
        drop(leader);
        // As in perf, an enabled member of a leader that was off starts when perf core next schedules it.
        siblings[0].disable()?;
        siblings[0].enable()?;
        vpmu.mark(3)?;
        ensure_eq!(values(&siblings[0])?, [1], "the count of a member that was on");
        ensure_eq!(values(&siblings[1])?, [0], "the count of a member that was off");
        // The sibling is no longer in a group, so it can become a leader.
        let next = vpmu.open_member(&attr, &siblings[0])?;
        next.enable()?;
        vpmu.mark(3)?;
        ensure_eq!(values(&next)?, [2, 1], "counts of the new group");
        drop(next);
        ensure_eq!(values(&siblings[0])?, [2], "the count of the leader without its sibling");
    }
    Ok(())
}

/// Closes enabled leaders. Each sibling must count the next mark.
pub(crate) fn close_leaders() -> Outcome {
    let vpmu = Vpmu::open()?;
    for round in 0..50 {
        for attr in contexts(&marks(&vpmu, 3)?)? {
            let leader = vpmu.open_event(&attr)?;
            let sibling = vpmu.open_member(&attr, &leader)?;
            sibling.enable()?;
            leader.enable()?;
            drop(leader);
            vpmu.mark(3)?;
            ensure_eq!(values(&sibling)?, [1], "round {round}: the sibling's count");
        }
    }
    Ok(())
}

/// Closes leaders while another thread places marks. The siblings must count all marks.
pub(crate) fn close_leaders_under_marks() -> Outcome {
    let vpmu = Vpmu::open()?;
    let attr = marks(&vpmu, 3)?.on_cpu(0);
    cpu::pin(1)?;
    for round in 0..20 {
        let alone = vpmu.open_event(&attr)?;
        let leader = vpmu.open_event(&attr)?;
        let sibling = vpmu.open_member(&attr, &leader)?;
        for event in [&alone, &sibling, &leader] {
            event.enable()?;
        }
        let marking = || Ok(|| vpmu.mark(3).map_err(io::Error::other));
        let ((), placed) = work_beside(0, marking, |other| {
            other.wait_for(10);
            drop(leader);
            other.wait_for(other.calls() + 10);
            Ok(())
        })?;
        ensure_eq!(
            (values(&alone)?, values(&sibling)?),
            (vec![placed], vec![placed]),
            "round {round}: counts of a single event and of the sibling"
        );
    }
    Ok(())
}

/// Each event becomes the leader of the next event, and is then closed. The last event must not keep the others alive.
#[apply(guest_test)]
fn leaders_follow_each_other_without_end() -> Outcome {
    let vpmu = Vpmu::open()?;
    let attr = marks(&vpmu, 3)?.of_task(0);
    let mut last = vpmu.open_event(&attr)?;
    // If all events were kept and then freed recursively, this many events would overflow the kernel stack.
    for _ in 0..1_000 {
        last = vpmu.open_member(&attr, &last)?;
    }
    last.enable()?;
    vpmu.mark(3)?;
    ensure_eq!(values(&last)?, [1], "counts of the last event's group");
    Ok(())
}

#[apply(guest_test)]
fn group_of_unlike_events_is_refused() -> Outcome {
    let vpmu = Vpmu::open()?;
    let attr = marks(&vpmu, 3)?;
    let leader = vpmu.open_event(&attr)?;
    let sibling = vpmu.open_member(&attr, &leader)?;
    let mut child = Command::new("cat").stdin(Stdio::piped()).spawn()?;
    let with = |change: fn(&mut EventAttr)| {
        let mut attr = attr.clone();
        change(&mut attr);
        attr
    };
    let cases = [
        ("a sibling for a leader", attr.clone(), &sibling),
        ("another task's leader", attr.clone().of_task(child.id().cast_signed()), &leader),
        ("a task's leader", attr.clone().on_cpu(0), &leader),
        ("one event pinned", with(|a| a.pinned = true), &leader),
        ("one event not inherited", with(|a| a.inherit = true), &leader),
    ];
    for (what, attr, leader) in cases {
        let refused = vpmu.open_member(&attr, leader).err();
        let code = refused.map_or(0, |error| errno(&error));
        ensure_eq!(code, libc::EINVAL, "errno for a group with {what}");
    }
    drop(child.stdin.take());
    child.wait()?;
    Ok(())
}

/// A child of this process places marks of value 3.
fn child_places(times: u32) -> Outcome {
    let status = Command::new("/proc/self/exe").args(["mark", "3", &times.to_string()]).status()?;
    ensure!(status.success(), "the child: {status}");
    Ok(())
}

#[apply(guest_test)]
fn inherited_group_is_read_with_its_children() -> Outcome {
    let vpmu = Vpmu::open()?;
    let attr = marks(&vpmu, 3)?.with(|attr| attr.inherit = true);
    let leader = vpmu.open_event(&attr)?;
    let sibling = vpmu.open_member(&attr, &leader)?;
    leader.enable()?;
    child_places(5)?;
    ensure_eq!(values(&leader)?, [5, 0], "both counts, the sibling off");
    sibling.enable()?;
    vpmu.mark(3)?;
    child_places(40)?;
    ensure_eq!(values(&leader)?, [46, 41], "both counts, both on");
    leader.disable()?;
    child_places(7)?;
    ensure_eq!(values(&sibling)?, [46, 41], "both counts, the leader off");
    Ok(())
}

#[apply(guest_test)]
fn group_waits_for_its_leaders_exec() -> Outcome {
    let vpmu = Vpmu::open()?;
    let group = |inherit| -> Fallible<(Event, Event)> {
        let attr = marks(&vpmu, 3)?.with(|attr| attr.inherit = inherit);
        let leader = vpmu.open_event(&attr.clone().with(|attr| attr.enable_on_exec = true))?;
        let enabled = attr.with(|attr| attr.disabled = false);
        let sibling = vpmu.open_member(&enabled, &leader)?;
        Ok((leader, sibling))
    };
    let (leader, sibling) = group(true)?;
    vpmu.mark(3)?;
    ensure_eq!(values(&leader)?, [0, 0], "both counts before an exec");
    child_places(5)?;
    ensure_eq!(values(&leader)?, [5, 5], "both counts of a child from its exec on");
    vpmu.mark(3)?;
    ensure_eq!(values(&leader)?, [5, 5], "both counts after marks of the parent, without an exec");
    drop((leader, sibling));

    let (leader, sibling) = group(false)?;
    vpmu.mark(3)?;
    ensure_eq!(values(&leader)?, [0, 0], "both counts before an exec, not inherited");
    leader.enable()?;
    vpmu.mark(3)?;
    ensure_eq!(values(&leader)?, [1, 1], "both counts, the leader enabled by ioctl");
    leader.disable()?;
    vpmu.mark(3)?;
    ensure_eq!(values(&leader)?, [1, 1], "both counts, the leader disabled by ioctl");
    sibling.disable()?;
    leader.enable()?;
    vpmu.mark(3)?;
    ensure_eq!(values(&leader)?, [2, 1], "both counts, the sibling off");
    Ok(())
}

/// Longer than any wakeup takes.
const LONG: Duration = Duration::from_secs(10);

#[apply(guest_test)]
fn limit_continues_after_a_pause() -> Outcome {
    let vpmu = Vpmu::open()?;
    for attr in contexts(&vpmu.attr("mark=3")?.sampling(1))? {
        let event = vpmu.open_event(&attr)?;
        let mut ring = event.map(2)?;
        let mut samples = || -> Fallible<usize> {
            let mut count = 0;
            while ring.next_record()?.is_some() {
                count += 1;
            }
            Ok(count)
        };
        let place = |times: u32| (0..times).try_for_each(|_| vpmu.mark(3));
        event.refresh(3)?;
        place(1)?;
        event.disable()?;
        place(1)?;
        event.enable()?;
        place(5)?;
        ensure_eq!(samples()?, 3, "samples of a limit of three, with a pause");
        // Opening another event makes perf core reschedule this event. It must stay off.
        drop(vpmu.open_event(&attr)?);
        place(1)?;
        ensure_eq!((samples()?, event.read()?.value), (0, 3), "samples and count after the limit is used up");
        ensure!(event.poll(Some(LONG))?.readable, "no wakeup by the last overflow");
        event.refresh(2)?;
        event.refresh(2)?;
        place(9)?;
        ensure_eq!(samples()?, 4, "samples of two limits of two");
        ensure!(event.poll(Some(LONG))?.readable, "no wakeup by the last overflow");
        event.enable()?;
        place(9)?;
        ensure_eq!(samples()?, 9, "samples without a limit");
    }
    Ok(())
}

#[apply(guest_test)]
fn groups_come_and_go_while_tasks_fork() -> Outcome {
    let vpmu = Vpmu::open()?;
    let stop = AtomicBool::new(false);
    let attr = marks(&vpmu, 3)?.with(|attr| {
        attr.inherit = true;
        attr.disabled = false;
    });
    thread::scope(|scope| -> Outcome {
        let (tell, reported) = std::sync::mpsc::channel();
        let forker = scope.spawn({
            let stop = &stop;
            move || -> Result<u32, String> {
                tell.send(cpu::thread_id()).map_err(|e| e.to_string())?;
                let mut forked = 0;
                while !stop.load(Ordering::Relaxed) {
                    child_places(2).map_err(|e| e.to_string())?;
                    forked += 1;
                }
                Ok(forked)
            }
        });
        let attr = attr.of_task(reported.recv()?.cast_signed());
        let mut whole = 0;
        let turns = (0..60).try_for_each(|turn| -> Outcome {
            let leader = vpmu.open_event(&attr)?;
            let open = || vpmu.open_member(&attr, &leader);
            let siblings = match (open(), open()) {
                (Ok(one), Ok(other)) => [one, other],
                // At a task switch, perf core may have swapped the contexts of the task and its child. The leader and
                // the member would then belong to different tasks. The open then fails, as it would in perf.
                (Err(error), _) | (_, Err(error)) if errno(&error) == libc::EINVAL => {
                    return Ok(());
                }
                (Err(error), _) | (_, Err(error)) => return Err(error.into()),
            };
            whole += 1;
            for _ in 0..4 {
                siblings[0].disable_group()?;
                siblings[1].enable_group()?;
                // As in perf, a group that a task has inherited only in part cannot be read.
                let read = match values(&siblings[0]) {
                    Ok(counts) => counts.len(),
                    Err(error) if errno(error.as_ref()) == libc::ECHILD => 3,
                    Err(error) => return Err(error),
                };
                ensure_eq!(read, 3, "turn {turn}: counts read");
            }
            drop(leader);
            // A child before its exec may still hold the leader open.
            let left = match values(&siblings[1]) {
                Ok(counts) => counts.len(),
                Err(error) if errno(error.as_ref()) == libc::ECHILD => 1,
                Err(error) => return Err(error),
            };
            ensure!(left == 1 || left == 3, "turn {turn}: {left} counts are left, expected one or three");
            Ok(())
        });
        stop.store(true, Ordering::Relaxed);
        let forked = forker.join().map_err(|_| "the forker panicked")??;
        turns?;
        ensure!(forked > 0 && whole > 0, "{forked} forks, {whole} whole groups: one number is zero");
        Ok(())
    })
}
