//! Requests, drains and actions of other vCPUs that happen at critical moments of a vCPU.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread as threads;

use vpmu::abi::*;
use vpmu::source::{Mode, Overflow};
use vpmu::{ExitReason, GuestRegs, Registers, Vpmu};
use vpmu_testkit::{
    ALL_FEATURES, At, CYCLES, Fields, Fixture, Nowhere, SAMPLE, THROTTLE, UNTHROTTLE, WINDOW_FEATURES, command, header,
    limits, map_area, open_of, thread, window,
};
use zerocopy::IntoBytes;

use crate::persistent::{marks, reader};

fn overflow(tsc: u64) -> Overflow {
    Overflow { tsc, ip: 1, mode: Mode::Guest, period: 100 }
}

/// An enabled event that samples cycles.
fn cycles(context: u32, period: u64) -> OpenRequest {
    open_of(CYCLES.0, CYCLES.1, context).sampled(period).flags(OPEN_ENABLED)
}

/// Sends a command from a vCPU that is outside the guest and stays there.
fn kick(fixture: &mut Fixture, vcpu: u32, op: u32, event: u64) {
    let index = 2 + vcpu as usize;
    fixture.queues[index].request(command(op, event).as_bytes(), size_of::<Reply>());
    fixture.vcpus.kick(vcpu, u16::try_from(index).expect("small"));
    fixture.queues[index].answer().expect("answered immediately");
}

#[test]
fn trace_without_state_at_its_end_is_in_error_once() {
    let mut fixture = Fixture::new();
    let request = open_of(KIND_EXIT_TRACE, EXIT_USER, 0).flags(OPEN_ENABLED | OPEN_EXCLUDE_USER);
    let trace = fixture.opened(&request);
    fixture.vcpus.leave(0, ExitReason::Mmio, &mut Nowhere);
    kick(&mut fixture, 0, COMMAND_DISABLE, trace);
    fixture.vcpus.enter(0);
    assert_eq!(fixture.read(0, trace).state.get(), STATE_ERROR);
    assert!(!fixture.vcpus.wants_registers(0), "the vCPU still wants registers");
}

#[test]
fn new_tsc_offset_moves_neither_count_nor_times() {
    let mut fixture = Fixture::windowed(&window(8));
    fixture.host.pass(1_000_000);
    let event = fixture.opened(&open_of(KIND_TSC, 0, 0).flags(OPEN_ENABLED));
    fixture.detach(event, "tsc").expect("detached");
    fixture.host.pass(500);
    let before = fixture.vpmu.persistent()[0].clone();
    fixture.vpmu.reset();
    fixture.vcpus.set(0, None);
    fixture.host.be_thread(500);
    // Another thread attaches the vCPU, with a TSC offset that makes the guest's TSC zero.
    let offset = 0_u64.wrapping_sub(fixture.host.now());
    let session = fixture.vpmu.attach(0, offset).expect("attached");
    fixture.vcpus.set(0, Some(session));
    fixture.host.pass(1000);
    let after = fixture.vpmu.persistent()[0].clone();
    for (before, after) in [(before.count, after.count), (before.time_enabled, after.time_enabled)] {
        // Each read of the clock advances it by a tick.
        assert!((1000..1100).contains(&(after - before)), "a figure went from {before} to {after} in 1,000 ticks");
    }
}

#[test]
fn window_is_free_after_a_reset_with_redirected_events() {
    let memory = window(8);
    let mut fixture = Fixture::windowed(&memory);
    let event = fixture.opened(&marks(0));
    fixture.detach(event, "").expect("detached");
    fixture.map_window(event, 4, MAP_WRITABLE).expect("mapped");
    let other = fixture.opened(&marks(0));
    fixture.redirect(other, event).expect("redirected");
    fixture.activate(WINDOW_FEATURES);
    fixture.reattach(event).expect("attached");
    fixture.close(event).expect("closed");
    let next = fixture.opened(&marks(0));
    fixture.detach(next, "").expect("detached");
    assert_eq!(fixture.map_window(next, 4, 0), Ok(0), "its pages are free");
}

#[test]
fn new_task_page_does_not_affect_earlier_samples() {
    let memory = window(8);
    let mut fixture = Fixture::windowed(&memory);
    fixture.host.know_ips();
    fixture.host.pass(10_000_000);
    let event = fixture.opened(&cycles(0, 100));
    fixture.detach(event, "").expect("detached");
    let first = fixture.map_window(event, 4, MAP_WRITABLE).expect("mapped");
    let mut ring = reader(&memory, first, 4);
    fixture.host.record(thread(0), overflow(fixture.host.now()));
    fixture.runs(0, 7, 8);
    fixture.host.pass(10_000_000);
    fixture.vpmu.drain();
    let tasks: Vec<_> = ring.samples().iter().map(|s| (s.pid, s.tid)).collect();
    assert_eq!(tasks, [(0, 0)]);
}

#[test]
fn command_of_another_vcpu_keeps_times_exact() {
    let mut fixture = Fixture::new();
    fixture.host.know_ips();
    fixture.host.pass(10_000_000);
    let [stopped, other] = [(); 2].map(|()| fixture.opened(&cycles(1, 100)));
    fixture.map(stopped, 2);
    let mut ring = fixture.map(other, 2);
    fixture.host.pass(20_000_000);
    let now = fixture.host.now();
    let recorded = [now - 8_000_000, now - 2_000_000];
    for tsc in recorded {
        fixture.host.record(thread(1), overflow(tsc));
    }
    fixture.command(0, COMMAND_DISABLE, stopped);
    fixture.vpmu.drain();
    let times: Vec<_> = ring.samples().iter().map(|sample| sample.time).collect();
    assert_eq!(times, recorded.map(|tsc| tsc + vpmu_testkit::TSC_OFFSET));
}

#[test]
fn throttled_event_is_unthrottled_on_its_next_vcpu() {
    let limits = limits().with(|limits| limits.max_sample_rate = 500);
    let mut fixture = Fixture::with(limits, ALL_FEATURES);
    fixture.host.pass(1_000_000_000);
    let event = fixture.opened(&cycles(CONTEXT_TASK, 10));
    let mut ring = fixture.map(event, 2);
    // The event gets a counter on each of the two vCPUs.
    for (vcpu, op) in [(1, COMMAND_IN), (1, COMMAND_OUT), (0, COMMAND_IN)] {
        fixture.command(vcpu, op, event);
    }
    fixture.host.work(thread(0), 100, 4);
    fixture.exit(0, ExitReason::Signal, &mut At(1));
    let kinds = |records: &[vpmu_testkit::Raw]| -> Vec<_> { records.iter().map(|record| record.kind).collect() };
    let mut expected = vec![SAMPLE; 5];
    expected.push(THROTTLE);
    assert_eq!(kinds(&ring.raw()), expected);
    fixture.command(0, COMMAND_OUT, event);
    fixture.command(1, COMMAND_IN, event);
    fixture.host.pass(20_000_000);
    assert!(fixture.host.draining());
    fixture.vpmu.drain();
    assert_eq!(kinds(&ring.raw()), [UNTHROTTLE]);
}

/// Registers that notify the control queue when the device reads them. The device then serves a waiting control
/// request.
struct Meanwhile<'a>(&'a Vpmu);

impl Registers for Meanwhile<'_> {
    fn registers(&mut self) -> Option<GuestRegs> {
        let _ = self.0.notify(QUEUE_CONTROL);
        Some(GuestRegs { ip: 5, user: true })
    }
}

#[test]
fn trace_started_in_an_exit_omits_it_though_another_ended() {
    let mut fixture = Fixture::new();
    let request = open_of(KIND_EXIT_TRACE, EXIT_USER, 0);
    let other = fixture.opened(&request.flags(OPEN_ENABLED));
    let trace = fixture.opened(&request);
    let mut area = map_area(&mut fixture, trace, 4);
    fixture.vcpus.enter(0);
    let close = header(CONTROL_CLOSE, other);
    fixture.queues[0].request(close.as_bytes(), size_of::<ControlReply>());
    let mut registers = Meanwhile(&fixture.vpmu);
    fixture.vcpus.leave(0, ExitReason::Mmio, &mut registers);
    fixture.queues[0].answer().expect("closed");
    kick(&mut fixture, 0, COMMAND_ENABLE, trace);
    fixture.vcpus.enter(0);
    fixture.command(0, COMMAND_READ, trace);
    assert!(area.exits().iter().all(|exit| exit.ip.get() != 5));
}

#[test]
fn woken_reader_finds_the_head() {
    let mut fixture = Fixture::new();
    fixture.host.know_ips();
    fixture.host.pass(10_000_000);
    let event = fixture.opened(&cycles(0, 100));
    let mut ring = fixture.map(event, 64);
    for round in 0..300 {
        fixture.post_notice(0, 64);
        let now = fixture.host.now();
        // The 70 samples cross one or two page boundaries of the ring, so they cause one or two wakeups.
        for tick in 0..70 {
            fixture.host.record(thread(0), overflow(now + tick));
        }
        fixture.host.pass(20_000_000);
        let mut events = fixture.queues.remove(1);
        let (before, over) = (ring.head(), &AtomicBool::new(false));
        let (rig_, ring_) = (&fixture, &ring);
        let heads = threads::scope(|scope| {
            scope.spawn(move || {
                rig_.vpmu.drain();
                over.store(true, Ordering::Release);
            });
            let mut heads = Vec::new();
            loop {
                let last = over.load(Ordering::Acquire);
                // When a vCPU leaves the guest, it delivers waiting notices.
                rig_.exit(1, ExitReason::Hlt, &mut At(1));
                while events.reclaim().is_some() {
                    heads.push(ring_.head());
                }
                if last {
                    break heads;
                }
            }
        });
        fixture.queues.insert(1, events);
        assert_eq!(heads.is_empty(), before == ring.head(), "round {round}");
        assert!(heads.iter().all(|&head| head > before), "round {round}: a reader was woken before the head moved");
        ring.raw();
    }
}

#[test]
fn area_unmapped_during_exits_has_published_every_counted_byte() {
    let mut fixture = Fixture::new();
    let request = open_of(KIND_EXIT_TRACE, EXIT_USER, 0);
    let trace = fixture.opened(&request);
    let mut area = map_area(&mut fixture, trace, 64);
    fixture.command(0, COMMAND_ENABLE, trace);
    let mut shown = 0;
    for _ in 0..500 {
        let Fixture { vpmu, vcpus, queues, .. } = &mut fixture;
        let (over, vcpus, vpmu) = (&AtomicBool::new(false), &*vcpus, &*vpmu);
        threads::scope(|scope| {
            scope.spawn(move || {
                while !over.load(Ordering::Relaxed) {
                    vcpus.leave(0, ExitReason::Hlt, &mut At(1));
                    vcpus.enter(0);
                }
            });
            while area.head() == 0 {
                // The device publishes data only at the watermark. In some rounds, unmap the area before the watermark
                // is reached.
                if vpmu.exits(0).hlt % 50 == 49 {
                    break;
                }
                threads::yield_now();
            }
            let unmap = header(CONTROL_UNMAP_AUX, trace);
            queues[0].request(unmap.as_bytes(), size_of::<ControlReply>());
            let _ = vpmu.notify(QUEUE_CONTROL);
            queues[0].answer().expect("unmapped");
            over.store(true, Ordering::Relaxed);
        });
        shown += area.head();
        area = area.again(&mut fixture, trace);
    }
    let unmap = header(CONTROL_UNMAP_AUX, trace);
    fixture.control(&unmap).expect("unmapped");
    shown += area.head();
    let reply = fixture.read(0, trace);
    assert_eq!(reply.value.get(), shown + reply.lost.get());
}
