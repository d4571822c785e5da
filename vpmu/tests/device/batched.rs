//! The batched engine: the host records overflows, and the device turns the records into samples later.

mod bounds;
mod who;

use std::sync::atomic::Ordering;

use vm_memory::{Bytes, GuestAddress};
use vpmu::abi::*;
use vpmu::source::{Mode, Overflow};
use vpmu::{Engines, ExitReason};
use vpmu_testkit::{
    ALL_FEATURES, At, CYCLES, Fields, Fixture, Reader, Sample, TSC_OFFSET, command, limits, open_of, thread,
};
use zerocopy::{FromBytes, IntoBytes};

/// The device holds back records that are younger than this number of ticks.
const HOLD_BACK: u64 = 1_000_000;
const TASK_PAGE: u64 = 0x8000;

fn fixture() -> Fixture {
    let fixture = Fixture::new();
    fixture.host.know_ips();
    // Advance the clock, so that the tests can create records with times in the past.
    fixture.host.pass(10 * HOLD_BACK);
    fixture
}

fn cycles(context: u32) -> OpenRequest {
    open_of(CYCLES.0, CYCLES.1, context).sampled(100)
}

fn overflow(tsc: u64, ip: u64, mode: Mode) -> Overflow {
    Overflow { tsc, ip, mode, period: 100 }
}

/// Opens an event of the batched engine, maps its ring, and enables the event.
fn batched(fixture: &mut Fixture, request: &OpenRequest) -> (u64, Reader) {
    let reply = fixture.open_reply(request);
    assert_eq!((reply.status.get(), reply.engine.get()), (0, ENGINE_BATCHED));
    let event = reply.id.get();
    let ring = fixture.map(event, 16);
    fixture.command(0, COMMAND_ENABLE, event);
    (event, ring)
}

fn ips(samples: &[Sample]) -> Vec<u64> {
    samples.iter().map(|sample| sample.ip).collect()
}

/// Makes the host record one overflow for each number in `ago`. The number is both the overflow's age in ticks and its
/// IP.
fn record(fixture: &Fixture, vcpu: u32, ago: &[u64]) {
    for &ago in ago {
        let tsc = fixture.host.now() - ago;
        fixture.host.record(thread(vcpu), overflow(tsc, ago, Mode::Guest));
    }
}

#[test]
fn vcpus_run_while_the_host_is_probed() {
    let mut fixture = fixture();
    let trial = fixture.host.try_slowly();
    fixture.queues[0].request(cycles(0).as_bytes(), size_of::<OpenReply>());
    std::thread::scope(|scope| {
        let control = scope.spawn(|| fixture.vpmu.notify(QUEUE_CONTROL));
        trial.wait();
        let seen = format!("{:?}", fixture.vpmu);
        trial.wait();
        let _ = control.join().expect("no panic");
        assert!(!seen.contains("<locked>"), "the device holds a lock while it probes the host");
    });
    let answer = fixture.queues[0].answer().expect("answered");
    let (reply, _) = OpenReply::read_from_prefix(&answer).expect("whole");
    assert_eq!((reply.status.get(), reply.engine.get()), (0, ENGINE_BATCHED));
    assert_eq!(fixture.queues[0].answer(), None, "the request is answered only once");
}

#[test]
fn engine_is_chosen_by_host_event_and_operator() {
    const CALLCHAIN: u64 = 1 << 5;
    const READ: u64 = 1 << 4;
    let plain = cycles(0);
    let with = |sample_type: u64| plain.sample_type(plain.sample_type.get() | sample_type);
    let each = plain.wakeup(1);
    let mark = open_of(KIND_MARK, 5, 0).sampled(1);
    let no = Err(libc::EOPNOTSUPP);
    let (exit, batched) = (Ok(ENGINE_EXIT), Ok(ENGINE_BATCHED));
    let requests = [plain, with(READ), each, mark];
    // One row for each request. The columns are the engine or errno in the replies for `ENGINE_ANY`, `ENGINE_EXIT` and
    // `ENGINE_BATCHED`.
    let expected = [
        (Engines::Auto, false, [[exit, exit, no]; 4]),
        (Engines::Auto, true, [[batched, exit, batched], [exit, exit, no], [exit, exit, batched], [exit, exit, no]]),
        (Engines::Exit, true, [[exit, exit, no]; 4]),
        (Engines::Batched, false, [[batched, no, batched], [no, no, no], [batched, no, batched], [exit, exit, no]]),
    ];
    for (engines, knows, rows) in expected {
        let mut fixture = Fixture::with_engines(engines, limits(), ALL_FEATURES);
        if knows {
            fixture.host.know_ips();
        }
        for (request, row) in requests.iter().zip(rows) {
            for (engine, outcome) in (0..).zip(row) {
                let reply = fixture.open_reply(&request.engine(engine));
                let got = match i32::try_from(reply.status.get()).expect("an errno") {
                    0 => Ok(reply.engine.get()),
                    errno => Err(errno),
                };
                assert_eq!(got, outcome, "{engines:?} {knows} {engine} {request:?}");
            }
        }
        let chain = fixture.open_reply(&with(CALLCHAIN).engine(ENGINE_BATCHED));
        assert_eq!(chain.status.get(), libc::EOPNOTSUPP.unsigned_abs());
        let count = fixture.open_reply(&open_of(CYCLES.0, CYCLES.1, 0));
        assert_eq!((count.status.get(), count.engine.get()), (0, ENGINE_ANY));
    }
}

/// VPMU-D-6.6-4, VPMU-D-6.6-8, VPMU-D-6.6-9.
#[test]
fn records_become_samples_when_they_are_collected() {
    let mut fixture = fixture();
    let (event, mut ring) = batched(&mut fixture, &cycles(0));
    assert!(fixture.host.draining());
    assert!(!fixture.vcpus.wants_registers(0), "the vCPU wants registers, but no event needs them");
    fixture.host.pass(10 * HOLD_BACK);
    let now = fixture.host.now();
    let moments = [
        overflow(now - 5_000_000, 0x10, Mode::Guest),
        overflow(now - 4_000_000, 0xffff_8000_0000_0000, Mode::Guest),
        overflow(now - 3_000_000, 0x30, Mode::Host),
        Overflow { period: 77, ..overflow(now - 2_000_000, 0x40, Mode::Guest) },
    ];
    for moment in moments {
        fixture.host.record(thread(0), moment);
    }
    fixture.exit(0, ExitReason::Signal, &mut At(0x9999));
    assert_eq!(ring.samples(), [], "an exit collects nothing");
    fixture.vpmu.drain();
    let samples = ring.samples();
    let seen: Vec<_> = samples.iter().map(|s| (s.time, s.ip, s.user, s.period)).collect();
    let at = |ago: u64| now - ago + TSC_OFFSET;
    assert_eq!(
        seen,
        [
            (at(5_000_000), 0x10, true, 100),
            (at(4_000_000), 0xffff_8000_0000_0000, false, 100),
            (at(2_000_000), 0x40, true, 77),
        ]
    );
    assert!(samples.iter().all(|s| (s.id, s.stream_id, s.cpu) == (event, event, 0)));
    let metrics = fixture.vpmu.metrics();
    assert_eq!((metrics.host_overflows, metrics.drains), (1, 1));
    assert_eq!((metrics.samples_lost, metrics.overflow_exits), (0, 0));
}

#[test]
fn youngest_records_wait_for_the_next_drain() {
    let mut fixture = fixture();
    let (_, mut ring) = batched(&mut fixture, &cycles(0));
    fixture.host.pass(10 * HOLD_BACK);
    record(&fixture, 0, &[3 * HOLD_BACK, HOLD_BACK + 1000, HOLD_BACK / 2]);
    fixture.vpmu.drain();
    assert_eq!(ips(&ring.samples()), [3 * HOLD_BACK, HOLD_BACK + 1000]);
    fixture.host.pass(HOLD_BACK);
    fixture.vpmu.drain();
    assert_eq!(ips(&ring.samples()), [HOLD_BACK / 2]);
}

/// VPMU-D-6.6-7.
#[test]
fn samples_of_each_vcpu_are_in_order_of_time() {
    let mut fixture = fixture();
    let (parent, mut ring) = batched(&mut fixture, &cycles(0));
    let child = fixture.opened(&cycles(1).parent(parent).flags(OPEN_ENABLED));
    fixture.host.pass(100 * HOLD_BACK);
    record(&fixture, 0, &[90_000_000, 70_000_000, 50_000_000]);
    record(&fixture, 1, &[80_000_000, 60_000_000, 40_000_000]);
    fixture.vpmu.drain();
    let samples = ring.samples();
    for (event, vcpu) in [(parent, 0), (child, 1)] {
        let own = || samples.iter().filter(|sample| sample.cpu == vcpu);
        assert!(own().all(|sample| (sample.id, sample.stream_id) == (parent, event)));
        assert!(own().is_sorted_by_key(|sample| sample.time));
        assert_eq!(own().count(), 3);
    }
}

/// VPMU-D-6.6-6.
#[test]
fn samples_before_a_command_are_written_when_it_is_answered() {
    for op in [COMMAND_READ, COMMAND_DISABLE, COMMAND_RESET, COMMAND_PERIOD, COMMAND_OUT] {
        let mut fixture = fixture();
        let event = fixture.opened(&cycles(CONTEXT_TASK).flags(OPEN_ENABLED));
        let mut ring = fixture.map(event, 2);
        fixture.command(0, COMMAND_IN, event);
        // Younger than HOLD_BACK.
        record(&fixture, 0, &[30, 20, 10]);
        let value = if op == COMMAND_PERIOD { 1000 } else { 0 };
        let asked = Command { value: value.into(), ..command(op, event) };
        assert_eq!(fixture.commands(0, &[asked])[0].status.get(), 0, "{op}");
        assert_eq!(ips(&ring.samples()), [30, 20, 10], "{op}");
    }
}

/// VPMU-D-6.6-6.
#[test]
fn samples_before_the_close_are_written_when_it_is_answered() {
    let mut fixture = fixture();
    let (event, mut ring) = batched(&mut fixture, &cycles(0));
    record(&fixture, 0, &[20, 10]);
    fixture.close(event).expect("closed");
    assert_eq!(ips(&ring.samples()), [20, 10]);

    let (event, mut ring) = batched(&mut fixture, &cycles(0));
    record(&fixture, 0, &[20, 10]);
    fixture.unmap(event).expect("unmapped");
    assert_eq!(ips(&ring.samples()), [20, 10]);
}

#[test]
fn fast_clock_delays_no_sample_before_a_command() {
    let mut fixture = fixture();
    let (event, mut ring) = batched(&mut fixture, &cycles(0));
    let ahead = fixture.host.now() + 500_000;
    fixture.host.record(thread(0), overflow(ahead, 0x10, Mode::Guest));
    fixture.read(0, event);
    let samples = ring.samples();
    assert_eq!(ips(&samples), [0x10]);
    assert!(samples[0].time <= fixture.host.now() + TSC_OFFSET);
}

/// VPMU-D-6.6-13.
#[test]
fn samples_of_both_engines_keep_their_order() {
    let mut fixture = fixture();
    let mark = fixture.opened(&open_of(KIND_MARK, 5, 0).sampled(1).flags(OPEN_ENABLED));
    let mut ring = fixture.map(mark, 2);
    fixture.opened(&cycles(0).parent(mark).flags(OPEN_ENABLED));
    for _ in 0..10 {
        fixture.host.pass(100);
        record(&fixture, 0, &[3]);
        fixture.mark(0, 5, 0x5000);
    }
    let samples = ring.samples();
    assert_eq!(ips(&samples), [3, 0x5000].repeat(10));
    assert!(samples.is_sorted_by_key(|sample| sample.time));
}

#[test]
fn no_drain_is_requested_without_records() {
    let mut fixture = fixture();
    fixture.opened(&open_of(CYCLES.0, CYCLES.1, 0).flags(OPEN_ENABLED));
    assert!(!fixture.host.draining(), "the device drains, but the event only counts");
    let (event, _ring) = batched(&mut fixture, &cycles(0));
    for _ in 0..3 {
        fixture.command(0, COMMAND_DISABLE, event);
        assert!(fixture.host.draining(), "a task switch stopped the drain");
        fixture.command(0, COMMAND_ENABLE, event);
    }
    fixture.vpmu.drain();
    assert!(fixture.host.draining());
    fixture.command(0, COMMAND_DISABLE, event);
    fixture.vpmu.drain();
    assert!(!fixture.host.draining());
    fixture.command(0, COMMAND_ENABLE, event);
    assert!(fixture.host.draining());
    fixture.vpmu.reset();
    assert!(!fixture.host.draining());
    fixture.vpmu.drain();
}

#[test]
fn one_drain_raises_one_interrupt() {
    let mut fixture = fixture();
    let request = cycles(0).wakeup(10);
    let (event, mut ring) = batched(&mut fixture, &request);
    fixture.post_notice(0, 16);
    fixture.host.pass(10 * HOLD_BACK);
    let before = fixture.host.interrupts();
    record(&fixture, 0, &[5_000_000; 35]);
    fixture.vpmu.drain();
    assert_eq!(fixture.host.interrupts(), before + 1);
    assert_eq!(fixture.notice(), Some((NOTICE_WAKEUP, event)));
    assert_eq!(fixture.vpmu.metrics().wakeups, 3);
    assert_eq!(ring.samples().len(), 35);
    record(&fixture, 0, &[4_000_000; 4]);
    fixture.vpmu.drain();
    assert_eq!(fixture.host.interrupts(), before + 1, "the fourth interval of 10 is not complete");
}
