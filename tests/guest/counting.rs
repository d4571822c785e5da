//! Tests of counts. If the device itself counts an event, the count must be exact. If the host measures it, the count
//! must be within bounds.

use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use perf_event_open_sys::bindings::{self, perf_event_attr};
use vpmu_abi::{EXIT_OTHER, EXIT_USER};
use vpmu_client::trace::Format;
use vpmu_client::{Entry, Event, EventAttr, Vpmu};

use crate::arch::UNREACHABLE_EXITS;
use crate::cpu;
use crate::ensure::{ensure, ensure_eq, errno};
use crate::raw::{How, KIND_EXIT_TRACE, KIND_EXITS, refused};
use crate::{Fallible, Outcome, raw};

const GROUP: &str = "counting";

/// An event of this thread, enabled.
pub(crate) fn counting(vpmu: &Vpmu, spec: &str) -> Fallible<Event> {
    let event = vpmu.open_event(&vpmu.attr(spec)?)?;
    event.enable()?;
    Ok(event)
}

#[apply(guest_test)]
fn marks_count_exactly() -> Outcome {
    let vpmu = Vpmu::open()?;
    for times in [1, 7, 1000] {
        let event = counting(&vpmu, "mark=5")?;
        for _ in 0..times {
            vpmu.mark(5)?;
            vpmu.mark(6)?;
        }
        event.disable()?;
        ensure_eq!(event.read()?.value, times, "marks of value 5");
    }
    Ok(())
}

#[apply(guest_test)]
fn port_writes_count_exactly() -> Outcome {
    let vpmu = Vpmu::open()?;
    cpu::allow_ports()?;
    for times in [1, 500] {
        let event = counting(&vpmu, &cpu::own_port_exits())?;
        for _ in 0..times {
            cpu::port_write();
        }
        event.disable()?;
        ensure_eq!(event.read()?.value, times, "exits of port writes");
    }
    Ok(())
}

#[apply(guest_test)]
fn two_vcpus_never_mix() -> Outcome {
    let vpmu = Vpmu::open()?;
    let attr = vpmu.attr("mark=1")?;
    let events = [vpmu.open_event(&attr.clone().on_cpu(0))?, vpmu.open_event(&attr.on_cpu(1))?];
    for event in &events {
        event.enable()?;
    }
    thread::scope(|scope| {
        let placers = [(0, 300), (1, 500)].map(|(cpu, times)| {
            let vpmu = &vpmu;
            scope.spawn(move || -> Result<(), String> {
                cpu::pin(cpu).map_err(|e| e.to_string())?;
                (0..times).try_for_each(|_| vpmu.mark(1).map_err(|e| e.to_string()))
            })
        });
        placers.into_iter().try_for_each(|p| p.join().map_err(|_| "a placer panicked".to_owned())?)
    })?;
    ensure_eq!(events[0].read()?.value, 300, "marks on CPU 0");
    ensure_eq!(events[1].read()?.value, 500, "marks on CPU 1");
    Ok(())
}

#[apply(guest_test)]
fn disabled_events_stand_still() -> Outcome {
    let vpmu = Vpmu::open()?;
    let event = vpmu.open_event(&vpmu.attr("mark=5")?)?;
    vpmu.mark(5)?;
    ensure_eq!(event.read()?.value, 0, "an event that was never enabled");
    ensure_eq!(event.read()?.time_enabled, 0, "the time of an event that was never enabled");
    event.enable()?;
    vpmu.mark(5)?;
    event.disable()?;
    let first = event.read()?;
    vpmu.mark(5)?;
    thread::sleep(Duration::from_millis(2));
    ensure_eq!(event.read()?, first, "the reading of a disabled event");
    event.enable()?;
    vpmu.mark(5)?;
    event.disable()?;
    let second = event.read()?;
    ensure_eq!(second.value, 2, "marks while enabled");
    ensure!(second.time_enabled > first.time_enabled, "the enabled time did not grow");
    ensure!(second.time_running <= second.time_enabled, "the event ran longer than it was enabled: {second:?}");
    Ok(())
}

#[apply(guest_test)]
fn reset_zeroes_the_count_alone() -> Outcome {
    let vpmu = Vpmu::open()?;
    let event = counting(&vpmu, "mark=5")?;
    vpmu.mark(5)?;
    let before = event.read()?;
    event.reset()?;
    vpmu.mark(5)?;
    vpmu.mark(5)?;
    let after = event.read()?;
    ensure_eq!(after.value, 2, "marks after the reset");
    ensure!(after.time_enabled > before.time_enabled, "the enabled time did not continue after the reset");
    ensure_eq!(after.id, event.perf_id()?, "the id that read returns");
    Ok(())
}

#[apply(guest_test)]
fn tsc_agrees_with_rdtsc() -> Outcome {
    let vpmu = Vpmu::open()?;
    cpu::pin(0)?;
    let event = vpmu.open_event(&vpmu.attr("tsc")?.on_cpu(0))?;
    let before = cpu::tsc();
    event.enable()?;
    let enabled = cpu::tsc();
    while cpu::tsc() < enabled + u64::from(vpmu.info().tsc_khz) * 200 {}
    let reading = cpu::tsc();
    let count = event.read()?.value;
    let after = cpu::tsc();
    // Counting started between the first two timestamps, and the count was read between the last two.
    let (least, most) = (reading - enabled, after - before);
    ensure!((least..=most).contains(&count), "{count} ticks counted, but {least} to {most} passed");
    Ok(())
}

#[apply(guest_test)]
fn task_clock_agrees_with_guest_time() -> Outcome {
    let vpmu = Vpmu::open()?;
    cpu::pin(0)?;
    let on_cpu = |name: &str| -> Fallible<Event> { Ok(vpmu.open_event(&vpmu.attr(name)?.on_cpu(0))?) };
    // The clocks keep running if the host stalls between two calls. Therefore, `around` is enabled first and read last,
    // and `within` is enabled last and read first. Nevertheless, `guest` can exceed `around`. The scheduler charges a
    // task switch to the thread that runs next, but perf's clock of that thread resumes only after the switch.
    let [around, guest, within] = [on_cpu("task-clock")?, on_cpu("guest-time")?, on_cpu("task-clock")?];
    for event in [&around, &guest, &within] {
        event.enable()?;
    }
    let until = cpu::tsc() + u64::from(vpmu.info().tsc_khz) * 300;
    while cpu::tsc() < until {}
    let within = within.read()?.value;
    let guest = guest.read()?.value;
    let around = around.read()?.value;
    // Both clocks are the host's. One is perf's clock of the vCPU's thread, and the other is the CPU time that the
    // scheduler charges to that thread inside the run call. The guest is in its loop all the time.
    ensure!(
        (within - within / 20..=around + around / 20).contains(&guest),
        "perf reports {within} to {around} ns, the scheduler {guest} ns"
    );
    Ok(())
}

/// A thread that keeps CPU 1 busy halts it only when it sleeps.
#[apply(guest_test)]
fn halts_are_counted() -> Outcome {
    const SLEEPS: u64 = 20;
    let vpmu = Vpmu::open()?;
    cpu::pin(0)?;
    let event = vpmu.open_event(&vpmu.attr("halts")?.on_cpu(1))?;
    let (tell, reported) = channel();
    let busy = AtomicBool::new(true);
    thread::scope(|scope| -> Outcome {
        let busy = &busy;
        let sleeper = scope.spawn(move || -> std::io::Result<()> {
            cpu::pin(1)?;
            cpu::keep()?;
            // Sending fails only if the test has failed.
            let _ = tell.send(());
            while busy.load(Ordering::Relaxed) {}
            (0..SLEEPS).for_each(|_| thread::sleep(Duration::from_millis(1)));
            Ok(())
        });
        let counted = (|| -> Fallible<u64> {
            reported.recv()?;
            event.enable()?;
            let begun = cpu::tsc();
            while cpu::tsc() < begun + u64::from(vpmu.info().tsc_khz) * 20 {}
            Ok(event.read()?.value)
        })();
        busy.store(false, Ordering::Relaxed);
        sleeper.join().map_err(|_| "the sleeper panicked")??;
        ensure_eq!(counted?, 0, "halts of a busy CPU");
        let count = event.read()?.value;
        ensure!(count >= SLEEPS, "{count} halts for {SLEEPS} sleeps");
        Ok(())
    })
}

#[apply(guest_test)]
fn all_exits_hold_those_of_the_vmm() -> Outcome {
    let vpmu = Vpmu::open()?;
    cpu::pin(0)?;
    cpu::allow_ports()?;
    let open = |name: &str| -> Fallible<Event> { Ok(vpmu.open_event(&vpmu.attr(name)?.on_cpu(0))?) };
    let (all, user) = (open("exits")?, open("exits-user")?);
    // `all` is enabled first and read last, so that it counts every exit that `user` counts.
    all.enable()?;
    user.enable()?;
    let first = user.read()?.value;
    let second = user.read()?.value;
    for _ in 0..100 {
        cpu::port_write();
    }
    let user = user.read()?.value;
    let all = all.read()?.value;
    // Each reading exits, too.
    ensure_eq!(user - second, 100 + (second - first), "exits that reached the VMM, of 100 port writes and a reading");
    ensure!(all >= user, "{all} exits, of which {user} reached the VMM");
    Ok(())
}

/// On `cpu`, writes `times` times to a word that has a data breakpoint, and places `times` marks. Returns the counts of
/// both events.
fn break_on_writes(cpu: usize, times: u64) -> Result<(u64, u64), String> {
    let counts = || -> Fallible<(u64, u64)> {
        cpu::pin(cpu)?;
        let device = raw::Device::open()?;
        let word = AtomicU64::new(0);
        let mut attr = perf_event_attr {
            type_: bindings::PERF_TYPE_BREAKPOINT,
            size: u32::try_from(size_of::<perf_event_attr>())?,
            bp_type: bindings::HW_BREAKPOINT_W,
            ..perf_event_attr::default()
        };
        attr.__bindgen_anon_3.bp_addr = ptr::from_ref(&word).expose_provenance() as u64;
        attr.__bindgen_anon_4.bp_len = bindings::HW_BREAKPOINT_LEN_8.into();
        attr.set_disabled(1);
        let writes = raw::kernels_own(&attr)?;
        let marks = device.open_event(&device.attr(raw::KIND_MARK, 5), raw::How::OWN)?;
        for event in [&writes, &marks] {
            event.enable(0)?;
        }
        for value in 0..times {
            word.store(value, Ordering::Relaxed);
            device.mark(5)?;
        }
        for event in [&writes, &marks] {
            event.disable(0)?;
        }
        Ok((writes.count()?, marks.count()?))
    };
    counts().map_err(|error| error.to_string())
}

/// Uses data breakpoints of the guest's kernel on two vCPUs at the same time. A host CPU must load the debug registers
/// of the vCPU that it runs.
#[apply(guest_test)]
fn data_breakpoints_count_beside_marks() -> Outcome {
    let threads = [0, 1].map(|cpu| thread::spawn(move || break_on_writes(cpu, 500)));
    for thread in threads {
        let counts = thread.join().map_err(|_| "a thread ended by a panic")??;
        ensure_eq!(counts, (500, 500), "traps of writes and marks on a CPU");
    }
    Ok(())
}

#[apply(guest_test)]
fn every_listed_event_opens() -> Outcome {
    let vpmu = Vpmu::open()?;
    let entries = vpmu.catalogue().entries();
    ensure!(entries.len() >= 8, "only {} events listed", entries.len());
    for entry in entries {
        let attr = vpmu.attr(&entry.name)?;
        // A trace of samples needs a period.
        let attr = match entry.trace {
            Some(Format::Samples) => attr.sampling(1_000_000),
            _ => attr,
        };
        let event = vpmu.open_event(&attr).map_err(|error| format!("{}: {error}", entry.name))?;
        event.enable()?;
        event.disable()?;
        event.read()?;
    }
    Ok(())
}

#[apply(guest_test)]
fn open_of_unlisted_event_is_refused() -> Outcome {
    let vpmu = Vpmu::open()?;
    let refused = |attr: EventAttr| match vpmu.open_event(&attr) {
        Ok(_) => 0,
        Err(error) => errno(&error),
    };
    let pmu = vpmu.info().pmu_type;
    ensure_eq!(refused(EventAttr::new(pmu, 0x7f << 48)), libc::ENOENT, "an unknown kind");
    ensure_eq!(refused(EventAttr::new(pmu, 0x101 << 48 | 99)), libc::ENOENT, "an unknown reason");
    let mark = vpmu.attr("mark=1")?;
    ensure_eq!(refused(mark.clone().on_cpu(4096)), libc::EINVAL, "no such CPU");
    let nobody = mark.clone().of_task(0x3f_ffff);
    ensure_eq!(refused(nobody), libc::ESRCH, "no such task");
    let fields = mark.clone().with(|attr| {
        attr.period = 1;
        attr.sample_type = 1 << 11;
    });
    ensure!(
        [libc::EINVAL, libc::EOPNOTSUPP].contains(&refused(fields)),
        "wrong errno for a sample field that is not supported"
    );
    let listed = |name: &str| vpmu.catalogue().get(name).is_some();
    for (config, name) in [(0, "cycles"), (1, "instructions")] {
        let expected = if listed(name) { 0 } else { libc::ENOENT };
        ensure_eq!(refused(EventAttr::new(0, config)), expected, "perf's {name}");
    }
    Ok(())
}

#[apply(guest_test)]
fn exits_that_the_architecture_lacks_are_refused() -> Outcome {
    let vpmu = Vpmu::open()?;
    let device = raw::Device::open()?;
    let entries = vpmu.catalogue().entries();
    for kind in [KIND_EXITS, KIND_EXIT_TRACE] {
        for reason in EXIT_USER..=EXIT_OTHER {
            let lacks = UNREACHABLE_EXITS.contains(&reason);
            let is_it = |entry: &Entry| (u64::from(entry.kind), entry.config) == (kind, reason);
            ensure_eq!(entries.iter().any(is_it), !lacks, "whether reason {reason} of kind {kind:#x} is listed");
            let opened = device.open_event(&device.attr(kind, reason), How::OWN);
            let expected = lacks.then_some(libc::ENOENT);
            ensure_eq!(refused(opened), expected, "reason {reason} of kind {kind:#x}");
        }
    }
    Ok(())
}

#[apply(guest_test)]
fn short_buffer_is_refused() -> Outcome {
    use std::os::fd::AsFd;
    let vpmu = Vpmu::open()?;
    let event = counting(&vpmu, "mark=5")?;
    // Value, two times, id.
    ensure_eq!(cpu::read(event.as_fd(), 32)?, 32, "bytes read");
    let error = cpu::read(event.as_fd(), 31).err().and_then(|e| e.raw_os_error());
    ensure_eq!(error, Some(libc::ENOSPC), "31 bytes of room");
    Ok(())
}
