//! Sample packets. The *pace* of a trace is the event that drives it. Each time this event has counted one period, the
//! trace makes one packet with the current registers.

use perf_event_open_sys::bindings::perf_event_attr;

use crate::arch::Known;
use crate::areas::{self, Area, reported};
use crate::aux_mapping::ports;
use crate::ensure::{ensure, ensure_eq};
use crate::known_code;
use crate::packets::{COLLISION, HAS_IP, HAS_REGS, Ledger, Sample, USER, samples, syncs};
use crate::pages::{Pages, READ_WRITE};
use crate::raw::{
    Device, EXIT_USER, FORMAT_LOST, How, KIND_EXITS, KIND_SAMPLE_TRACE, PACE_CPU_CLOCK, PACE_EXITS, refused, sampling,
    silent,
};
use crate::{Outcome, cpu};

const GROUP: &str = "aux";

/// Returns the attr of a trace that makes a packet after every `period` units of `pace`, in user mode.
fn paced(device: &Device, pace: u64, period: u64) -> perf_event_attr {
    let mut attr = sampling(silent(device.attr(KIND_SAMPLE_TRACE, pace)), period, 0);
    attr.set_exclude_kernel(1);
    attr.read_format = FORMAT_LOST;
    attr
}

#[apply(guest_test)]
fn each_period_makes_a_packet() -> Outcome {
    const MADE: u64 = 500;
    let device = Device::open()?;
    cpu::allow_ports()?;
    cpu::pin(1)?;
    for period in [1, 2, 7, 100] {
        // Counts the exits that pace the trace: the port writes, and perhaps exits for a signal.
        let mut counting = device.attr(KIND_EXITS, EXIT_USER);
        counting.set_exclude_kernel(1);
        let counter = device.open_event(&counting, How::on_cpu(1))?;
        let event = device.open_event(&paced(&device, PACE_EXITS, period), How::on_cpu(1))?;
        let ring = Pages::map(&event, 1, READ_WRITE)?;
        let mut area = Area::map(&event, &ring, 64, READ_WRITE)?;
        event.enable(0)?;
        counter.enable(0)?;
        ports(MADE);
        counter.disable(0)?;
        event.disable(0)?;
        let exits = counter.count()?;
        ensure!(exits >= MADE, "only {exits} exits for {MADE} port writes");
        let packets = area.take(&ring)?;
        let mut ledger = Ledger::default();
        ledger.follow(&packets)?;
        let own = samples(&packets);
        ensure_eq!(own.len() as u64, exits / period, "packets of {exits} exits");
        ensure!(own.iter().all(|sample| sample.period == period), "a packet has a period other than {period}");
        ensure!(
            syncs(&packets).iter().all(|sync| sync.format == 2 && sync.config == PACE_EXITS),
            "a sync has another format or config than the trace"
        );
        let reading = event.read()?;
        ensure_eq!(reading, [areas::head(&ring), 0], "bytes produced and lost");
        let chunks = reported(&{ ring }.take()?, &paced(&device, PACE_EXITS, period))?;
        ensure_eq!(chunks.bytes(), reading[0], "bytes that the ring reports");
        ensure!(chunks.flags().iter().all(|&flags| flags == 0), "a chunk has flags: {chunks:x?}");
    }
    Ok(())
}

#[apply(guest_test)]
fn packet_holds_all_registers() -> Outcome {
    const MADE: usize = 40;
    let device = Device::open()?;
    cpu::allow_ports()?;
    cpu::pin(0)?;
    let event = device.open_event(&paced(&device, PACE_EXITS, 1), How::OWN)?;
    let ring = Pages::map(&event, 1, READ_WRITE)?;
    let mut area = Area::map(&event, &ring, 16, READ_WRITE)?;
    event.enable(0)?;
    let before = device.time_of(cpu::tsc());
    let stacks: Vec<u64> = (0..MADE).map(|_| known_code::out_known()).collect();
    let after = device.time_of(cpu::tsc());
    event.disable(0)?;
    let packets = area.take(&ring)?;
    // A signal between two writes is also an exit.
    let own: Vec<Sample> =
        samples(&packets).into_iter().filter(|sample| sample.ip == known_code::out_known_ip()).collect();
    ensure_eq!(own.len(), MADE, "packets from user mode, of {} in total", packets.len());
    for (sample, sp) in own.iter().zip(stacks) {
        known(sample, sp).map_err(|error| format!("{error}: {sample:x?}"))?;
        ensure!(
            (before..=after).contains(&sample.time),
            "the time {} is not between {before} and {after}",
            sample.time
        );
    }
    Ok(())
}

/// Checks that a packet has the values that [`known_code::out_known`] sets.
fn known(sample: &Sample, sp: u64) -> Outcome {
    ensure_eq!(sample.flags, USER | HAS_IP | HAS_REGS, "flags");
    ensure_eq!(sample.pid_tid, (std::process::id(), cpu::thread_id()), "the task");
    ensure_eq!(sample.vcpu, 0, "the vCPU");
    for (place, &value) in sample.regs.iter().enumerate() {
        match known_code::in_packet(place, sp) {
            Known::Is(is) => ensure_eq!(value, is, "register {place}"),
            Known::Has(bits) => ensure_eq!(value & bits, bits, "register {place}, {value:#x}"),
            Known::Write => ensure_eq!(value, known_code::out_known_ip(), "register {place}"),
            Known::Unknown => {}
        }
    }
    Ok(())
}

#[apply(guest_test)]
fn clock_paces_packets() -> Outcome {
    // The clock also runs while the device makes a packet, which takes long on an emulated host. The period must be
    // much longer than this time.
    const PERIOD: u64 = 5_000_000;
    let device = Device::open()?;
    cpu::pin(1)?;
    // The host's clocks run in both modes.
    let mut attr = paced(&device, PACE_CPU_CLOCK, PERIOD);
    attr.set_exclude_kernel(0);
    let event = device.open_event(&attr, How::OWN)?;
    ensure_eq!(event.engine()?, crate::raw::ENGINE_EXIT, "the engine");
    let mut ring = Pages::map(&event, 1, READ_WRITE)?;
    let mut area = Area::map(&event, &ring, 256, READ_WRITE)?;
    let spun = known_code::loops()[0].clone();
    let before = device.time_of(cpu::tsc());
    let mut own = Vec::new();
    let mut ledger = Ledger::default();
    while own.len() < 20 {
        event.enable(0)?;
        spun.run(20_000_000);
        event.disable(0)?;
        let packets = area.take(&ring)?;
        ledger.follow(&packets)?;
        let reported = reported(&ring.take()?, &attr)?;
        let some = samples(&packets);
        ensure_eq!(
            reported.flags().iter().any(|flags| flags & areas::COLLISION != 0),
            some.iter().any(|sample| sample.flags & COLLISION != 0),
            "whether the chunks report collisions, as the packets do"
        );
        own.extend(some);
    }
    let took = device.time_of(cpu::tsc()) - before;
    let most = took / PERIOD + 1;
    ensure!(own.len() as u64 <= most, "{} packets in {took} ns are more than {most}", own.len());
    let elsewhere: Vec<_> =
        own.iter().filter(|sample| !spun.code.contains(&sample.ip)).map(|sample| format!("{:#x}", sample.ip)).collect();
    ensure!(elsewhere.len() * 2 < own.len(), "too many of {} packets are not in the loop: {elsewhere:?}", own.len());
    for sample in &own {
        let user = if sample.ip >> 63 == 0 { USER } else { 0 };
        ensure_eq!(sample.flags & !COLLISION, user | HAS_IP | HAS_REGS, "flags");
        ensure_eq!(
            sample.regs[known_code::PACKET_IP],
            sample.ip,
            "the IP among the registers, compared with the packet's IP"
        );
        ensure_eq!(sample.vcpu, 1, "the vCPU");
    }
    Ok(())
}

#[apply(guest_test)]
fn stalled_readers_samples_are_counted() -> Outcome {
    const MADE: u64 = 100;
    let device = Device::open()?;
    cpu::allow_ports()?;
    cpu::pin(1)?;
    let event = device.open_event(&paced(&device, PACE_EXITS, 1), How::on_cpu(1))?;
    let ring = Pages::map(&event, 1, READ_WRITE)?;
    let mut area = Area::map(&event, &ring, 2, READ_WRITE)?;
    event.enable(0)?;
    ports(MADE);
    event.disable(0)?;
    let [count, lost] = event.read()?[..] else {
        return Err("no reading".into());
    };
    let head = areas::head(&ring);
    // A page holds a sync packet and 15 sample packets. If another page follows, padding fills the rest of the page.
    // Packets that do not fit into the two pages are lost.
    ensure_eq!(count, head + lost, "bytes produced");
    ensure!(lost % 256 == 0 && lost >= (MADE - 30) * 256, "{lost} lost bytes are too few, or not whole packets");
    let mut ledger = Ledger::default();
    let packets = area.take(&ring)?;
    ledger.follow(&packets)?;
    ensure_eq!(ledger.packets, 30, "packets of two pages");
    event.enable(0)?;
    ports(1);
    event.disable(0)?;
    ledger.follow(&area.take(&ring)?)?;
    ensure_eq!(ledger.lost, lost, "lost bytes that the sync reports");
    Ok(())
}

#[apply(guest_test)]
fn sample_traces_that_cannot_be_are_refused() -> Outcome {
    let device = Device::open()?;
    let open = |attr: &perf_event_attr| refused(device.open_event(attr, How::OWN));
    let plain = device.attr(KIND_SAMPLE_TRACE, PACE_EXITS);
    ensure_eq!(open(&plain), Some(libc::EINVAL), "errno of a trace without a period");
    ensure_eq!(open(&paced(&device, 17, 1)), Some(libc::ENOENT), "an unknown pace");
    let mut clock = paced(&device, PACE_CPU_CLOCK, 1_000_000);
    clock.set_exclude_kernel(0);
    ensure_eq!(open(&clock), None, "a clock");
    let batched = How { engine: crate::raw::ENGINE_BATCHED, ..How::OWN };
    ensure_eq!(refused(device.open_event(&clock, batched)), Some(libc::EOPNOTSUPP), "the batched engine");
    clock = sampling(clock, 1, 0);
    ensure_eq!(open(&clock), Some(libc::EOPNOTSUPP), "a clock of a nanosecond");
    Ok(())
}
