//! What an exit trace holds: each exit of the guest once, in order, as the guest made it.

use std::sync::Barrier;
use std::thread;

use perf_event_open_sys::bindings::perf_event_attr;

use crate::accesses::{self, Access, IdleMemory};
use crate::aux_mapping::{io_trace, ports};
use crate::aux_writer::{Traced, start};
use crate::cpu::IDLE_PORT;
use crate::ensure::{ensure, ensure_eq};
use crate::packets::{CUT, Exit, HAS_IP, USER};
use crate::pages::READ_WRITE;
use crate::raw::{
    Device, EXIT_ALL, EXIT_IO, EXIT_MMIO, EXIT_SIGNAL, EXIT_USER, How, KIND_EXIT_TRACE, KIND_EXITS,
    aux_watermark, refused, sampling, silent,
};
use crate::{Outcome, Test, cpu};

pub(crate) const TESTS: &[Test] = &[
    (
        "each_port_write_stands_in_the_trace_once",
        each_port_write_stands_in_the_trace_once,
    ),
    ("accesses_are_told_as_made", accesses_are_told_as_made),
    (
        "each_mark_stands_in_the_trace_once",
        each_mark_stands_in_the_trace_once,
    ),
    (
        "time_outside_is_part_of_the_time",
        time_outside_is_part_of_the_time,
    ),
    ("a_task_is_traced_alone", a_task_is_traced_alone),
    ("a_cpu_is_traced_whole", a_cpu_is_traced_whole),
    ("each_vcpu_has_its_own_trace", each_vcpu_has_its_own_trace),
    (
        "the_exit_that_ends_a_trace_is_cut",
        the_exit_that_ends_a_trace_is_cut,
    ),
    ("a_trace_follows_its_task", a_trace_follows_its_task),
    ("a_trace_makes_no_exits", a_trace_makes_no_exits),
    (
        "a_trace_of_all_is_the_traces_of_each",
        a_trace_of_all_is_the_traces_of_each,
    ),
    (
        "a_mode_that_is_left_out_is_not_traced",
        a_mode_that_is_left_out_is_not_traced,
    ),
    (
        "traces_that_cannot_be_are_refused",
        traces_that_cannot_be_are_refused,
    ),
];

pub(crate) fn trace(device: &Device, exits: u64) -> perf_event_attr {
    silent(device.attr(KIND_EXIT_TRACE, exits))
}

/// What a program's access must look like, but for the moment and the number.
fn is(exit: &Exit, reason: u64, access: &Access, vcpu: u32) -> Outcome {
    ensure_eq!(
        Access {
            ip: exit.ip,
            qualification: exit.qualification,
            detail: exit.detail
        },
        *access,
        "the access"
    );
    ensure_eq!(u64::from(exit.reason), reason, "the reason");
    ensure_eq!(exit.flags, USER | HAS_IP, "the flags");
    ensure_eq!(exit.vcpu, vcpu, "the vCPU");
    let own = (std::process::id(), cpu::thread_id());
    ensure_eq!(exit.pid_tid, own, "who");
    ensure!(exit.outside > 0, "no time outside");
    Ok(())
}

fn each_port_write_stands_in_the_trace_once() -> Outcome {
    const MADE: u64 = 1_000;
    let device = Device::open()?;
    let mut traced = start(&device, io_trace(&device), 32, READ_WRITE)?;
    let before = device.time_of(cpu::tsc());
    accesses::out_loop(MADE);
    let after = device.time_of(cpu::tsc());
    traced.event.disable(0)?;
    traced.balance()?;
    let exits = traced.take()?;
    ensure_eq!(exits.len() as u64, MADE, "exits");
    let access = Access {
        ip: accesses::out_loop_ip(),
        qualification: IDLE_PORT.into(),
        detail: 1 << 32 | 1 << 8 | 1,
    };
    let mut at = before;
    for (number, exit) in (0..).zip(&exits) {
        is(exit, EXIT_IO, &access, 1).map_err(|error| format!("{error}: {exit:x?}"))?;
        ensure_eq!(exit.sequence, number, "the number");
        ensure!(
            exit.time > at && exit.time + exit.outside <= after,
            "{exit:?} from {at} to {after}"
        );
        at = exit.time + exit.outside;
    }
    Ok(())
}

fn accesses_are_told_as_made() -> Outcome {
    let device = Device::open()?;
    cpu::allow_ports()?;
    cpu::pin(1)?;
    let mut io = start(&device, io_trace(&device), 2, READ_WRITE)?;
    let made = accesses::ports();
    io.event.disable(0)?;
    compare(&io.take()?, EXIT_IO, &made)?;
    let memory = IdleMemory::map()?;
    // The page is there before anything is traced.
    memory.access();
    let mut mmio = start(&device, trace(&device, EXIT_MMIO), 2, READ_WRITE)?;
    let made = memory.access();
    mmio.event.disable(0)?;
    let exits = mmio.take()?;
    let (end, own) = exits.split_last().ok_or("an empty trace")?;
    compare(own, EXIT_MMIO, &made)?;
    ensure!(end.flags & CUT != 0, "the command that ended it: {end:x?}");
    Ok(())
}

fn compare(exits: &[Exit], reason: u64, made: &[Access]) -> Outcome {
    let told: Vec<Access> = exits
        .iter()
        .map(|exit| Access {
            ip: exit.ip,
            qualification: exit.qualification,
            detail: exit.detail,
        })
        .collect();
    ensure_eq!(told.len(), made.len(), "exits {told:x?} of {made:x?}");
    for (number, (exit, access)) in exits.iter().zip(made).enumerate() {
        is(exit, reason, access, 1).map_err(|error| format!("access {number}: {error}"))?;
    }
    Ok(())
}

fn each_mark_stands_in_the_trace_once() -> Outcome {
    const MADE: u64 = 300;
    const VALUE: u64 = 9;
    let device = Device::open()?;
    let mut traced = start(&device, trace(&device, EXIT_MMIO), 16, READ_WRITE)?;
    device.place(VALUE, MADE)?;
    traced.event.disable(0)?;
    let exits = traced.take()?;
    let (end, marks) = exits.split_last().ok_or("an empty trace")?;
    ensure_eq!(marks.len() as u64, MADE, "exits of marks");
    let own = (std::process::id(), cpu::thread_id());
    for mark in marks {
        ensure_eq!(
            (mark.ip, mark.qualification, mark.detail),
            (marks[0].ip, marks[0].qualification, 1 << 8 | 4),
            "where and what"
        );
        ensure_eq!(mark.pid_tid, own, "who");
        // The driver writes it, for the program.
        ensure_eq!(mark.flags, HAS_IP, "flags of a mark in the kernel");
    }
    ensure!(marks[0].ip >> 63 == 1, "a kernel at {:#x}", marks[0].ip);
    // The command that disabled: another register of the same device.
    ensure_eq!(end.flags, HAS_IP | CUT, "flags of the end");
    ensure!(
        end.qualification != marks[0].qualification,
        "a command where marks are"
    );
    Ok(())
}

fn time_outside_is_part_of_the_time() -> Outcome {
    const MADE: u64 = 500;
    let device = Device::open()?;
    let mut traced = start(&device, io_trace(&device), 16, READ_WRITE)?;
    let before = device.time_of(cpu::tsc());
    ports(MADE);
    let took = device.time_of(cpu::tsc()) - before;
    traced.event.disable(0)?;
    let exits = traced.take()?;
    ensure_eq!(exits.len() as u64, MADE, "exits");
    let outside: u64 = exits.iter().map(|exit| exit.outside).sum();
    ensure!(exits.iter().all(|exit| exit.outside > 0), "no time outside");
    ensure!(outside < took, "{outside} of {took} ns outside");
    // The guest was in between: no exit begins before the one before has ended.
    ensure!(
        exits
            .windows(2)
            .all(|pair| pair[0].time + pair[0].outside < pair[1].time),
        "exits that overlap"
    );
    Ok(())
}

/// Makes exits on `cpu` while `body` runs.
fn beside<R>(cpu: usize, body: impl FnOnce() -> R) -> Result<(R, u32, u64), String> {
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
    let (stop, made) = (AtomicBool::new(false), AtomicU64::new(0));
    thread::scope(|scope| {
        let other = scope.spawn(|| -> std::io::Result<u32> {
            cpu::pin(cpu)?;
            cpu::allow_ports()?;
            while !stop.load(Ordering::Relaxed) {
                cpu::port_write();
                made.fetch_add(1, Ordering::Relaxed);
            }
            Ok(cpu::thread_id())
        });
        while made.load(Ordering::Relaxed) == 0 && !other.is_finished() {
            thread::yield_now();
        }
        let result = body();
        stop.store(true, Ordering::Relaxed);
        let tid = other.join().map_err(|_| "the other panicked")?;
        let tid = tid.map_err(|error| error.to_string())?;
        Ok((result, tid, made.load(Ordering::Relaxed)))
    })
}

fn a_task_is_traced_alone() -> Outcome {
    const MADE: u64 = 400;
    let device = Device::open()?;
    cpu::allow_ports()?;
    cpu::pin(1)?;
    let mut traced = Traced::open(&device, io_trace(&device), How::OWN, 64, READ_WRITE)?;
    // Another thread on the same CPU makes the same exits all the time.
    let (done, _, others) = beside(1, || -> std::io::Result<()> {
        traced.event.enable(0)?;
        for _ in 0..MADE / 10 {
            ports(10);
            crate::os::yield_cpu();
        }
        traced.event.disable(0)?;
        Ok(())
    })?;
    done?;
    ensure!(
        others > 10,
        "{others} exits of the other: nothing was shown"
    );
    traced.balance()?;
    let exits = traced.take()?;
    let own = (std::process::id(), cpu::thread_id());
    ensure!(
        exits.iter().all(|exit| exit.pid_tid == own),
        "another's exit"
    );
    ensure_eq!(exits.len() as u64, MADE, "exits");
    Ok(())
}

fn a_cpu_is_traced_whole() -> Outcome {
    const MADE: u64 = 400;
    let device = Device::open()?;
    cpu::allow_ports()?;
    cpu::pin(1)?;
    let mut traced = Traced::open(&device, io_trace(&device), How::on_cpu(1), 512, READ_WRITE)?;
    traced.event.enable(0)?;
    let ((), tid, others) = beside(1, || {
        for _ in 0..MADE / 10 {
            ports(10);
            crate::os::yield_cpu();
        }
    })?;
    traced.event.disable(0)?;
    traced.balance()?;
    let exits = traced.take()?;
    let lost = traced.read()?.1 / 64;
    let of = |tid| exits.iter().filter(|exit| exit.pid_tid.1 == tid).count() as u64;
    let (own, other) = (of(cpu::thread_id()), of(tid));
    ensure_eq!(own + other, exits.len() as u64, "exits of third ones");
    ensure_eq!(
        own + other + lost,
        MADE + others,
        "exits of both, {lost} lost"
    );
    ensure!(own > 0 && other > 0, "{own} and {other} exits");
    Ok(())
}

fn each_vcpu_has_its_own_trace() -> Outcome {
    const EACH: [u64; 2] = [700, 900];
    let device = Device::open()?;
    let mut traces = [0, 1]
        .into_iter()
        .map(|cpu| Traced::open(&device, io_trace(&device), How::on_cpu(cpu), 32, READ_WRITE))
        .collect::<Result<Vec<_>, _>>()?;
    traces
        .iter()
        .try_for_each(|traced| traced.event.enable(0).map(drop))?;
    let together = Barrier::new(2);
    let threads = thread::scope(|scope| -> Result<Vec<u32>, Box<dyn std::error::Error>> {
        let makers: Vec<_> = (0..2)
            .map(|cpu| {
                let together = &together;
                scope.spawn(move || -> std::io::Result<u32> {
                    let pinned = cpu::pin(cpu).and_then(|()| cpu::allow_ports());
                    together.wait();
                    pinned?;
                    accesses::out_loop(EACH[cpu]);
                    Ok(cpu::thread_id())
                })
            })
            .collect();
        makers
            .into_iter()
            .map(|maker| Ok(maker.join().map_err(|_| "a maker panicked")??))
            .collect()
    })?;
    for (vcpu, (traced, tid)) in (0..).zip(traces.iter_mut().zip(threads)) {
        traced.event.disable(0)?;
        traced.balance()?;
        let exits = traced.take()?;
        // The kernel may have had something to say on its console.
        let own: Vec<&Exit> = exits
            .iter()
            .filter(|exit| exit.ip == accesses::out_loop_ip())
            .collect();
        ensure_eq!(
            own.len() as u64,
            EACH[vcpu as usize],
            "exits of vCPU {vcpu}"
        );
        ensure!(
            exits.iter().all(|exit| exit.vcpu == vcpu),
            "another vCPU's exit in the trace of vCPU {vcpu}"
        );
        ensure!(
            own.iter()
                .all(|exit| exit.pid_tid == (std::process::id(), tid)),
            "another's exit on vCPU {vcpu}"
        );
    }
    Ok(())
}

fn the_exit_that_ends_a_trace_is_cut() -> Outcome {
    let device = Device::open()?;
    let mut traced = start(&device, trace(&device, EXIT_MMIO), 2, READ_WRITE)?;
    for round in 0..20 {
        // The command that starts a trace is not in it, the one that ends it is.
        traced.event.enable(0)?;
        traced.event.disable(0)?;
        let exits = traced.take()?;
        ensure!(
            !exits.is_empty() && exits.len() <= 2,
            "round {round}: {} exits",
            exits.len()
        );
        let (end, rest) = exits.split_last().ok_or("no exit")?;
        ensure!(end.flags & CUT != 0, "the end: {end:x?}");
        ensure!(rest.iter().all(|exit| exit.flags & CUT == 0), "{rest:x?}");
        traced.balance()?;
    }
    Ok(())
}

fn a_trace_follows_its_task() -> Outcome {
    let device = Device::open()?;
    cpu::allow_ports()?;
    let mut traced = Traced::open(&device, io_trace(&device), How::OWN, 16, READ_WRITE)?;
    traced.event.enable(0)?;
    let mut expected = Vec::new();
    for hop in 0..40_u32 {
        let vcpu = hop % 2;
        cpu::pin(vcpu as usize)?;
        ports(u64::from(hop % 5 + 1));
        expected.extend((0..=hop % 5).map(|_| vcpu));
    }
    traced.event.disable(0)?;
    traced.balance()?;
    let exits = traced.take()?;
    let vcpus: Vec<u32> = exits.iter().map(|exit| exit.vcpu).collect();
    ensure_eq!(vcpus, expected, "vCPUs of the exits");
    ensure!(
        exits.windows(2).all(|pair| pair[0].time < pair[1].time),
        "exits out of order"
    );
    Ok(())
}

/// Exits of CPU 1 by kind while `body` runs there.
fn counted(device: &Device, body: impl FnOnce()) -> Result<[u64; 3], Box<dyn std::error::Error>> {
    let counters = [EXIT_IO, EXIT_MMIO, EXIT_SIGNAL]
        .map(|exits| device.start(&device.attr(KIND_EXITS, exits), How::on_cpu(1)));
    let [io, mmio, signal] = counters;
    let counters = [io?, mmio?, signal?];
    let before = counters.each_ref().map(|counter| counter.count());
    body();
    let mut counts = [0; 3];
    for ((count, counter), before) in counts.iter_mut().zip(&counters).zip(before) {
        *count = counter.count()? - before?;
    }
    Ok(counts)
}

fn a_trace_makes_no_exits() -> Outcome {
    const MADE: u64 = 2_000;
    let device = Device::open()?;
    cpu::pin(1)?;
    cpu::allow_ports()?;
    let without = counted(&device, || ports(MADE))?;
    // Nobody asks to be woken: an interrupt that is taken is exits, too.
    let attr = aux_watermark(trace(&device, EXIT_USER), u32::MAX);
    let mut traced = start(&device, attr, 64, READ_WRITE)?;
    let with = counted(&device, || ports(MADE))?;
    traced.event.disable(0)?;
    ensure_eq!(without[0], MADE, "exits of port writes");
    ensure_eq!(with, without, "exits (I/O, MMIO, signals) with the trace");
    let exits = traced.take()?;
    let io = exits.iter().filter(|e| u64::from(e.reason) == EXIT_IO);
    ensure_eq!(io.count() as u64, MADE, "exits in the trace");
    Ok(())
}

fn a_trace_of_all_is_the_traces_of_each() -> Outcome {
    const VALUE: u64 = 7;
    let device = Device::open()?;
    let mut all = start(&device, trace(&device, EXIT_USER), 16, READ_WRITE)?;
    let mut one = start(&device, trace(&device, EXIT_IO), 16, READ_WRITE)?;
    let mut other = start(&device, trace(&device, EXIT_MMIO), 16, READ_WRITE)?;
    for _ in 0..100 {
        ports(1);
        device.mark(VALUE)?;
    }
    other.event.disable(0)?;
    one.event.disable(0)?;
    all.event.disable(0)?;
    let (all, one, other) = (all.take()?, one.take()?, other.take()?);
    ensure_eq!(one.len(), 100, "port writes");
    let alike = |exits: &[Exit], reason: u64| -> Vec<(u64, u64, u64)> {
        let own = exits.iter().filter(|e| u64::from(e.reason) == reason);
        own.map(|e| (e.time, e.ip, e.qualification)).collect()
    };
    ensure_eq!(
        alike(&all, EXIT_IO),
        alike(&one, EXIT_IO),
        "port writes of all"
    );
    let (wide, narrow) = (alike(&all, EXIT_MMIO), alike(&other, EXIT_MMIO));
    ensure!(narrow.len() > 100, "{} exits by memory", narrow.len());
    ensure!(
        wide.windows(narrow.len()).any(|part| part == narrow),
        "exits by memory: {} of all, {} alone",
        wide.len(),
        narrow.len()
    );
    Ok(())
}

fn a_mode_that_is_left_out_is_not_traced() -> Outcome {
    const VALUE: u64 = 8;
    let device = Device::open()?;
    for user in [true, false] {
        let mut attr = trace(&device, EXIT_USER);
        attr.set_exclude_kernel(user.into());
        attr.set_exclude_user((!user).into());
        let mut traced = start(&device, attr, 16, READ_WRITE)?;
        for _ in 0..50 {
            ports(1);
            device.mark(VALUE)?;
        }
        traced.event.disable(0)?;
        traced.balance()?;
        let exits = traced.take()?;
        ensure!(
            exits.iter().all(|exit| (exit.flags & USER != 0) == user),
            "an exit of the mode that was left out"
        );
        let reason = if user { EXIT_IO } else { EXIT_MMIO };
        let of = exits.iter().filter(|e| u64::from(e.reason) == reason);
        let least = if user { 50 } else { 51 };
        ensure_eq!(of.count(), least, "exits, user {user}");
    }
    Ok(())
}

fn traces_that_cannot_be_are_refused() -> Outcome {
    let device = Device::open()?;
    let open = |attr: &perf_event_attr| refused(device.open_event(attr, How::OWN));
    ensure_eq!(open(&trace(&device, EXIT_USER)), None, "the plain one");
    let all = open(&trace(&device, EXIT_ALL));
    ensure!(
        all.is_none() || all == Some(libc::ENOENT),
        "every exit: {all:?}"
    );
    ensure_eq!(
        open(&trace(&device, 7)),
        Some(libc::ENOENT),
        "an exit of no kind"
    );
    ensure_eq!(
        open(&sampling(trace(&device, EXIT_IO), 100, 0)),
        Some(libc::EOPNOTSUPP),
        "a period"
    );
    let mut frequency = sampling(trace(&device, EXIT_IO), 100, 0);
    frequency.set_freq(1);
    ensure!(open(&frequency).is_some(), "a frequency");
    let mut output = trace(&device, EXIT_IO);
    output.set_aux_output(1);
    ensure!(open(&output).is_some(), "aux_output");
    let sampled = perf_event_attr {
        aux_sample_size: 4096,
        ..trace(&device, EXIT_IO)
    };
    ensure!(open(&sampled).is_some(), "aux_sample_size");
    let marks = perf_event_attr {
        aux_watermark: 4096,
        ..device.marks(3, 1, 0)
    };
    // As perf, which looks at it where there is an area.
    ensure_eq!(open(&marks), None, "aux_watermark of marks");
    let host = silent(device.attr(crate::raw::KIND_HOST_TRACE, 0));
    ensure_eq!(open(&host), Some(libc::EOPNOTSUPP), "the host's own trace");
    Ok(())
}
