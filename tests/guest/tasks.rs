//! Per-task events: an event counts its task on every CPU. If `inherit` is set, it also counts the task's children.

use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use vpmu_client::Vpmu;

use crate::Outcome;
use crate::counting::counting;
use crate::cpu;
use crate::ensure::ensure_eq;

const GROUP: &str = "counting";

#[apply(guest_test)]
fn count_follows_its_task() -> Outcome {
    let vpmu = Vpmu::open()?;
    let event = counting(&vpmu, "mark=3")?;
    let stop = AtomicBool::new(false);
    let mut placed = 0;
    thread::scope(|scope| -> Outcome {
        // On each CPU, another thread continuously places marks of the same value.
        let others: Vec<_> = (0..2)
            .map(|cpu| {
                let (vpmu, stop) = (&vpmu, &stop);
                scope.spawn(move || -> Result<u64, String> {
                    cpu::pin(cpu).map_err(|e| e.to_string())?;
                    let mut placed = 0;
                    while !stop.load(Ordering::Relaxed) {
                        vpmu.mark(3).map_err(|e| e.to_string())?;
                        placed += 1;
                    }
                    Ok(placed)
                })
            })
            .collect();
        let own = (0..20).try_for_each(|hop| -> Outcome {
            cpu::pin(hop % 2)?;
            for _ in 0..10 {
                vpmu.mark(3)?;
                placed += 1;
            }
            Ok(())
        });
        stop.store(true, Ordering::Relaxed);
        let mut foreign = 0;
        for other in others {
            foreign += other.join().map_err(|_| "a placer panicked")??;
        }
        own?;
        if foreign == 0 {
            return Err("the others placed no mark".into());
        }
        Ok(())
    })?;
    ensure_eq!(event.read()?.value, placed, "marks of this task on two CPUs");
    Ok(())
}

#[apply(guest_test)]
fn another_tasks_marks_do_not_count() -> Outcome {
    let vpmu = Vpmu::open()?;
    let event = counting(&vpmu, "mark=3")?;
    thread::scope(|scope| scope.spawn(|| (0..50).try_for_each(|_| vpmu.mark(3))).join())
        .map_err(|_| "the placer panicked")??;
    ensure_eq!(event.read()?.value, 0, "another thread's marks counted");
    Ok(())
}

/// Places `times` marks of value 3 in a child of this process.
fn child_places(times: u32) -> Outcome {
    let status = Command::new("/proc/self/exe").args(["mark", "3", &times.to_string()]).status()?;
    if status.success() { Ok(()) } else { Err(format!("the child: {status}").into()) }
}

#[apply(guest_test)]
fn children_are_inherited() -> Outcome {
    let vpmu = Vpmu::open()?;
    let attr = vpmu.attr("mark=3")?.with(|attr| attr.inherit = true);
    let event = vpmu.open_event(&attr)?;
    event.enable()?;
    vpmu.mark(3)?;
    child_places(40)?;
    child_places(2)?;
    ensure_eq!(event.read()?.value, 43, "own marks and two children's");
    Ok(())
}

#[apply(guest_test)]
fn children_are_left_out_unless_asked() -> Outcome {
    let vpmu = Vpmu::open()?;
    let event = counting(&vpmu, "mark=3")?;
    vpmu.mark(3)?;
    child_places(40)?;
    ensure_eq!(event.read()?.value, 1, "own marks alone");
    Ok(())
}

#[apply(guest_test)]
fn many_events_of_one_task() -> Outcome {
    let vpmu = Vpmu::open()?;
    let events = (0..40).map(|value| counting(&vpmu, &format!("mark={value}"))).collect::<Result<Vec<_>, _>>()?;
    for value in 0..40 {
        for _ in 0..=value {
            vpmu.mark(value)?;
        }
        cpu::pin((value % 2) as usize)?;
    }
    for (value, event) in (1_u64..).zip(&events) {
        ensure_eq!(event.read()?.value, value, "marks of event {value}");
    }
    Ok(())
}
