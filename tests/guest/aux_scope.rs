//! The scope of a trace: the exits of a task, of a CPU, or of one mode. Also checks that tracing causes no exits.

use std::sync::Barrier;
use std::thread;

use crate::arch::mmio_pio::{self};
use crate::aux_exits::trace;
use crate::aux_mapping::{io_trace, ports};
use crate::beside::{making_exits, work_beside};
use crate::ensure::{ensure, ensure_eq};
use crate::packets::{Exit, USER};
use crate::pages::READ_WRITE;
use crate::raw::{Device, EXIT_MMIO, EXIT_PORT, EXIT_SIGNAL, EXIT_USER, How, KIND_EXITS, aux_watermark};
use crate::traced::{Traced, start};
use crate::{Fallible, Outcome, cpu};

const GROUP: &str = "aux";

#[apply(guest_test)]
fn trace_of_a_task_excludes_others() -> Outcome {
    const MADE: u64 = 400;
    let device = Device::open()?;
    cpu::allow_ports()?;
    cpu::pin(1)?;
    let mut traced = Traced::open(&device, io_trace(&device), How::OWN, 64, READ_WRITE)?;
    // Another thread on the same CPU makes the same exits all the time.
    let ((), others) = work_beside(1, making_exits, |_| {
        traced.event.enable(0)?;
        for _ in 0..MADE / 10 {
            ports(10);
            crate::os::yield_cpu();
        }
        traced.event.disable(0)?;
        Ok(())
    })?;
    ensure!(others > 10, "{others} exits of the other thread are too few");
    traced.balance()?;
    let exits = traced.take()?;
    let own = (std::process::id(), cpu::thread_id());
    ensure!(exits.iter().all(|exit| exit.pid_tid == own), "the trace has an exit of another thread");
    ensure_eq!(exits.len() as u64, MADE, "exits");
    Ok(())
}

#[apply(guest_test)]
fn trace_of_a_cpu_has_all_its_exits() -> Outcome {
    const MADE: u64 = 400;
    let device = Device::open()?;
    cpu::allow_ports()?;
    cpu::pin(1)?;
    let mut traced = Traced::open(&device, io_trace(&device), How::on_cpu(1), 512, READ_WRITE)?;
    traced.event.enable(0)?;
    let (tid, others) = work_beside(1, making_exits, |other| {
        for _ in 0..MADE / 10 {
            ports(10);
            crate::os::yield_cpu();
        }
        Ok(other.tid)
    })?;
    traced.event.disable(0)?;
    traced.balance()?;
    let exits = traced.take()?;
    let lost = traced.read()?.1 / 64;
    let of = |tid| exits.iter().filter(|exit| exit.pid_tid.1 == tid).count() as u64;
    let (own, other) = (of(cpu::thread_id()), of(tid));
    ensure_eq!(own + other, exits.len() as u64, "exits of the two threads, compared with all exits");
    ensure_eq!(own + other + lost, MADE + others, "exits of both, {lost} lost");
    ensure!(own > 0 && other > 0, "a thread has no exit: {own} and {other}");
    Ok(())
}

#[apply(guest_test)]
fn each_vcpu_has_its_own_trace() -> Outcome {
    const EACH: [u64; 2] = [700, 900];
    let device = Device::open()?;
    let mut traces = [0, 1]
        .into_iter()
        .map(|cpu| Traced::open(&device, io_trace(&device), How::on_cpu(cpu), 32, READ_WRITE))
        .collect::<Result<Vec<_>, _>>()?;
    traces.iter().try_for_each(|traced| traced.event.enable(0).map(drop))?;
    let together = Barrier::new(2);
    let threads = thread::scope(|scope| -> Fallible<Vec<u32>> {
        let makers: Vec<_> = (0..2)
            .map(|cpu| {
                let together = &together;
                scope.spawn(move || -> std::io::Result<u32> {
                    let pinned = cpu::pin(cpu).and_then(|()| cpu::allow_ports());
                    together.wait();
                    pinned?;
                    mmio_pio::out_loop(EACH[cpu]);
                    Ok(cpu::thread_id())
                })
            })
            .collect();
        makers.into_iter().map(|maker| Ok(maker.join().map_err(|_| "a maker panicked")??)).collect()
    })?;
    for (vcpu, (traced, tid)) in (0..).zip(traces.iter_mut().zip(threads)) {
        traced.event.disable(0)?;
        traced.balance()?;
        let exits = traced.take()?;
        // The kernel may have written to its console.
        let own: Vec<&Exit> = exits.iter().filter(|exit| exit.ip == mmio_pio::out_loop_ip()).collect();
        ensure_eq!(own.len() as u64, EACH[vcpu as usize], "exits of vCPU {vcpu}");
        ensure!(exits.iter().all(|exit| exit.vcpu == vcpu), "the trace of vCPU {vcpu} has an exit of another vCPU");
        ensure!(
            own.iter().all(|exit| exit.pid_tid == (std::process::id(), tid)),
            "the trace of vCPU {vcpu} has an exit of another thread"
        );
    }
    Ok(())
}

#[apply(guest_test)]
fn trace_follows_its_task() -> Outcome {
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
    ensure!(exits.windows(2).all(|pair| pair[0].time < pair[1].time), "the exits are out of order");
    Ok(())
}

/// Returns the exits of CPU 1 by kind while `body` runs there.
fn counted(device: &Device, body: impl FnOnce()) -> Fallible<[u64; 3]> {
    let [mmio, signal] = [EXIT_MMIO, EXIT_SIGNAL].map(|exits| device.attr(KIND_EXITS, exits));
    let counters = [device.port_exits(), mmio, signal].map(|attr| device.start(&attr, How::on_cpu(1)));
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

#[apply(guest_test)]
fn trace_causes_no_exits() -> Outcome {
    const MADE: u64 = 2_000;
    let device = Device::open()?;
    cpu::pin(1)?;
    cpu::allow_ports()?;
    let without = counted(&device, || ports(MADE))?;
    // A wakeup needs an interrupt, which also causes exits. So the watermark is too large to be reached.
    let attr = aux_watermark(trace(&device, EXIT_USER), u32::MAX);
    let mut traced = start(&device, attr, 64, READ_WRITE)?;
    let with = counted(&device, || ports(MADE))?;
    traced.event.disable(0)?;
    ensure_eq!(without[0], MADE, "exits of port writes");
    ensure_eq!(with, without, "exits (I/O, MMIO, signals) with the trace, compared with those without");
    let exits = traced.take()?;
    let io = exits.iter();
    let io = io.filter(|e| u64::from(e.reason) == EXIT_PORT && e.flags & USER != 0);
    ensure_eq!(io.count() as u64, MADE, "exits in the trace");
    Ok(())
}

#[apply(guest_test)]
fn excluded_mode_is_not_traced() -> Outcome {
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
            "the trace has an exit in the excluded mode"
        );
        let reason = if user { EXIT_PORT } else { EXIT_MMIO };
        let of = exits.iter().filter(|e| u64::from(e.reason) == reason);
        let least = if user { 50 } else { 51 };
        ensure_eq!(of.count(), least, "exits, user {user}");
    }
    Ok(())
}
