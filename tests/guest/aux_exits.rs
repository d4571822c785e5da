//! Checks that an exit trace contains each exit of the guest exactly once, in order, with the details of the access.

use perf_event_open_sys::bindings::perf_event_attr;

use crate::arch::mmio_pio::{self, IdleMemory};
use crate::arch::{Access, PORT_DETAIL};
use crate::aux_mapping::{io_trace, ports};
use crate::cpu::IDLE_PORT;
use crate::ensure::{ensure, ensure_eq};
use crate::packets::{CUT, Exit, HAS_IP, USER};
use crate::pages::READ_WRITE;
use crate::raw::{Device, EXIT_ALL, EXIT_MMIO, EXIT_PORT, EXIT_USER, How, KIND_EXIT_TRACE, refused, sampling, silent};
use crate::traced::start;
use crate::{Outcome, cpu};

const GROUP: &str = "aux";

pub(crate) fn trace(device: &Device, exits: u64) -> perf_event_attr {
    silent(device.attr(KIND_EXIT_TRACE, exits))
}

/// Compares an exit with the program's access. Ignores the exit's time and number.
fn is(exit: &Exit, reason: u64, access: &Access, vcpu: u32) -> Outcome {
    ensure_eq!(
        Access { ip: exit.ip, qualification: exit.qualification, detail: exit.detail },
        *access,
        "instruction, address and detail"
    );
    ensure_eq!(u64::from(exit.reason), reason, "the reason");
    ensure_eq!(exit.flags, USER | HAS_IP, "the flags");
    ensure_eq!(exit.vcpu, vcpu, "the vCPU");
    let own = (std::process::id(), cpu::thread_id());
    ensure_eq!(exit.pid_tid, own, "the task");
    ensure!(exit.outside > 0, "an exit took no time outside the guest");
    Ok(())
}

#[apply(guest_test)]
fn each_port_write_is_in_the_trace_once() -> Outcome {
    const MADE: u64 = 1_000;
    let device = Device::open()?;
    let mut traced = start(&device, io_trace(&device), 32, READ_WRITE)?;
    let before = device.time_of(cpu::tsc());
    mmio_pio::out_loop(MADE);
    let after = device.time_of(cpu::tsc());
    traced.event.disable(0)?;
    traced.balance()?;
    let exits = traced.take()?;
    ensure_eq!(exits.len() as u64, MADE, "exits");
    let access = Access { ip: mmio_pio::out_loop_ip(), qualification: IDLE_PORT.into(), detail: PORT_DETAIL };
    let mut at = before;
    for (number, exit) in (0..).zip(&exits) {
        is(exit, EXIT_PORT, &access, 1).map_err(|error| format!("{error}: {exit:x?}"))?;
        ensure_eq!(exit.sequence, number, "the number");
        ensure!(exit.time > at && exit.time + exit.outside <= after, "{exit:?} is not between {at} and {after} ns");
        at = exit.time + exit.outside;
    }
    Ok(())
}

#[apply(guest_test)]
fn accesses_are_recorded_as_made() -> Outcome {
    let device = Device::open()?;
    cpu::allow_ports()?;
    cpu::pin(1)?;
    let mut io = start(&device, io_trace(&device), 2, READ_WRITE)?;
    let made = mmio_pio::ports();
    io.event.disable(0)?;
    compare(&io.take()?, EXIT_PORT, &made)?;
    let memory = IdleMemory::map()?;
    // Faults the page in before the trace.
    memory.access();
    let mut mmio = start(&device, trace(&device, EXIT_MMIO), 2, READ_WRITE)?;
    let made = memory.access();
    mmio.event.disable(0)?;
    let exits = mmio.take()?;
    let (end, own) = exits.split_last().ok_or("an empty trace")?;
    compare(own, EXIT_MMIO, &made)?;
    ensure!(end.flags & CUT != 0, "the exit that ended the trace is not cut: {end:x?}");
    Ok(())
}

fn compare(exits: &[Exit], reason: u64, made: &[Access]) -> Outcome {
    let reported: Vec<Access> = exits
        .iter()
        .map(|exit| Access { ip: exit.ip, qualification: exit.qualification, detail: exit.detail })
        .collect();
    ensure_eq!(reported.len(), made.len(), "exits {reported:x?} of {made:x?}");
    for (number, (exit, access)) in exits.iter().zip(made).enumerate() {
        is(exit, reason, access, 1).map_err(|error| format!("access {number}: {error}"))?;
    }
    Ok(())
}

#[apply(guest_test)]
fn each_mark_is_in_the_trace_once() -> Outcome {
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
            "IP, qualification and detail of a mark"
        );
        ensure_eq!(mark.pid_tid, own, "the task");
        // The driver writes the mark on behalf of the program.
        ensure_eq!(mark.flags, HAS_IP, "flags of a mark in the kernel");
    }
    ensure!(marks[0].ip >> 63 == 1, "the IP of a mark is not in the kernel: {:#x}", marks[0].ip);
    // The last exit is the command that disabled the trace. It wrote to a device register other than the marks'
    // register.
    ensure_eq!(end.flags, HAS_IP | CUT, "flags of the exit that ended the trace");
    ensure!(end.qualification != marks[0].qualification, "the exit that ended the trace wrote to the marks' register");
    Ok(())
}

#[apply(guest_test)]
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
    ensure!(exits.iter().all(|exit| exit.outside > 0), "an exit took no time outside the guest");
    ensure!(outside < took, "{outside} ns outside the guest, of {took} ns");
    // The guest ran between two exits, so no exit begins before the previous exit has ended.
    ensure!(
        exits.windows(2).all(|pair| pair[0].time + pair[0].outside < pair[1].time),
        "an exit begins before the previous one has ended"
    );
    Ok(())
}

#[apply(guest_test)]
fn exit_that_ends_a_trace_is_cut() -> Outcome {
    let device = Device::open()?;
    let mut traced = start(&device, trace(&device, EXIT_MMIO), 2, READ_WRITE)?;
    for round in 0..20 {
        // The exit of the command that starts a trace is not in the trace. The exit of the command that ends the trace
        // is in the trace.
        traced.event.enable(0)?;
        traced.event.disable(0)?;
        let exits = traced.take()?;
        ensure!(!exits.is_empty() && exits.len() <= 2, "round {round}: {} exits, expected one or two", exits.len());
        let (end, rest) = exits.split_last().ok_or("no exit")?;
        ensure!(end.flags & CUT != 0, "the exit that ended the trace is not cut: {end:x?}");
        ensure!(rest.iter().all(|exit| exit.flags & CUT == 0), "an earlier exit is cut: {rest:x?}");
        traced.balance()?;
    }
    Ok(())
}

#[apply(guest_test)]
fn trace_of_all_exits_has_those_of_each_reason() -> Outcome {
    const VALUE: u64 = 7;
    let device = Device::open()?;
    let mut all = start(&device, trace(&device, EXIT_USER), 16, READ_WRITE)?;
    let mut one = start(&device, io_trace(&device), 16, READ_WRITE)?;
    let mut other = start(&device, trace(&device, EXIT_MMIO), 16, READ_WRITE)?;
    for _ in 0..100 {
        ports(1);
        device.mark(VALUE)?;
    }
    other.event.disable(0)?;
    one.event.disable(0)?;
    all.event.disable(0)?;
    let (all, one, other) = (all.take()?, one.take()?, other.take()?);
    ensure_eq!(one.len(), 100, "port writes in the trace of port I/O");
    let alike = |exits: &[Exit], reason: u64, flags: u8| -> Vec<(u64, u64, u64)> {
        let own = exits.iter();
        let own = own.filter(|e| u64::from(e.reason) == reason && e.flags & flags == flags);
        own.map(|e| (e.time, e.ip, e.qualification)).collect()
    };
    ensure_eq!(alike(&all, EXIT_PORT, USER), alike(&one, EXIT_PORT, USER), "port writes in the trace of all exits");
    let (wide, narrow) = (alike(&all, EXIT_MMIO, 0), alike(&other, EXIT_MMIO, 0));
    ensure!(narrow.len() > 100, "only {} MMIO exits", narrow.len());
    ensure!(
        wide.windows(narrow.len()).any(|part| part == narrow),
        "the traces have different MMIO exits: {} of all exits, {} of MMIO",
        wide.len(),
        narrow.len()
    );
    Ok(())
}

#[apply(guest_test)]
fn traces_that_cannot_be_are_refused() -> Outcome {
    let device = Device::open()?;
    let open = |attr: &perf_event_attr| refused(device.open_event(attr, How::OWN));
    ensure_eq!(open(&trace(&device, EXIT_USER)), None, "errno of a valid trace");
    let all = open(&trace(&device, EXIT_ALL));
    ensure!(all.is_none() || all == Some(libc::ENOENT), "errno of a trace of every exit: {all:?}");
    ensure_eq!(open(&trace(&device, 7)), Some(libc::ENOENT), "an unknown exit reason");
    ensure_eq!(
        open(&sampling(trace(&device, EXIT_PORT), 100, 0)),
        Some(libc::EOPNOTSUPP),
        "errno of a trace with a period"
    );
    let mut frequency = sampling(trace(&device, EXIT_PORT), 100, 0);
    frequency.set_freq(1);
    ensure!(open(&frequency).is_some(), "a trace with a frequency was accepted");
    let mut output = trace(&device, EXIT_PORT);
    output.set_aux_output(1);
    ensure!(open(&output).is_some(), "a trace with aux_output was accepted");
    let sampled = perf_event_attr { aux_sample_size: 4096, ..trace(&device, EXIT_PORT) };
    ensure!(open(&sampled).is_some(), "a trace with aux_sample_size was accepted");
    let marks = perf_event_attr { aux_watermark: 4096, ..device.marks(3, 1, 0) };
    // As in perf, events without an area also accept `aux_watermark`, although perf uses it only for events with an
    // area.
    ensure_eq!(open(&marks), None, "marks with aux_watermark");
    let host = silent(device.attr(crate::raw::KIND_HOST_TRACE, 0));
    ensure_eq!(open(&host), Some(libc::EOPNOTSUPP), "errno of a trace of the host's own PMU");
    Ok(())
}
