//! Sample traces.

use vpmu::abi::*;
use vpmu::{CpuState, ExitReason, GENERAL_REGS, GuestRegs, Registers};
use vpmu_testkit::{
    ALL_FEATURES, AreaReader, At, Fields, Fixture, Packet, TSC_OFFSET, limits, map_area, open_of, thread,
};

const KERNEL_IP: u64 = 0xffff_8000_0000_1000;

/// A vCPU that provides its whole state. The field is its instruction pointer. The value of each register is this
/// address plus the register's number.
#[derive(Debug)]
struct Everything(u64);

impl Registers for Everything {
    fn registers(&mut self) -> Option<GuestRegs> {
        At(self.0).registers()
    }

    fn state(&mut self) -> Option<CpuState> {
        let mut general = [0; GENERAL_REGS];
        for (number, register) in (0..).zip(&mut general) {
            *register = self.0 + number;
        }
        Some(CpuState { general, user: self.0 < 1 << 63, code64: true, cr0: 0, cr3: 0, cr4: 0, efer: 0 })
    }
}

fn paced(pace: u64, period: u64) -> OpenRequest {
    open_of(KIND_SAMPLE_TRACE, pace, 0).period(period)
}

fn traced(fixture: &mut Fixture, request: &OpenRequest) -> (u64, AreaReader) {
    let reply = fixture.open_reply(request);
    assert_eq!((reply.status.get(), reply.engine.get()), (0, ENGINE_EXIT));
    let event = reply.id.get();
    let area = map_area(fixture, event, 16);
    fixture.command(0, COMMAND_ENABLE, event);
    (event, area)
}

#[test]
fn sample_packet_has_every_register() {
    let mut fixture = Fixture::new();
    fixture.runs(0, 21, 22);
    let (event, mut area) = traced(&mut fixture, &paced(PACE_EXITS, 3));
    for ip in [1, 2] {
        fixture.exit(0, ExitReason::Io, &mut At(ip));
    }
    let before = fixture.host.now();
    fixture.exit(0, ExitReason::Hlt, &mut Everything(0x4000));
    fixture.command(0, COMMAND_READ, event);
    let samples = area.samples();
    let [sample] = samples[..] else {
        panic!("{samples:?}");
    };
    assert_eq!(sample.flags, PACKET_USER | PACKET_IP | PACKET_REGS);
    assert_eq!((sample.vcpu.get(), sample.sequence.get()), (0, 0));
    let during = before + TSC_OFFSET..fixture.host.now() + TSC_OFFSET;
    assert!(during.contains(&sample.time.get()));
    assert_eq!((sample.ip.get(), sample.period.get()), (0x4000, 3));
    assert_eq!((sample.pid.get(), sample.tid.get()), (21, 22));
    assert!((0x4000..).zip(sample.regs).all(|(is, reg)| reg.get() == is));
}

/// VPMU-D-6.8-8.
#[test]
fn each_period_of_exits_makes_one_packet() {
    for (exits, period) in [(100, 1), (100, 7), (3, 4)] {
        let mut fixture = Fixture::new();
        let (event, mut area) = traced(&mut fixture, &paced(PACE_EXITS, period));
        for ip in 0..exits {
            fixture.exit(0, ExitReason::Io, &mut Everything(ip));
        }
        let reply = fixture.read(0, event);
        // The command is an exit too.
        let expected = (exits + 1) / period;
        let samples = area.samples();
        assert_eq!(samples.len() as u64, expected);
        let ips = samples.iter().map(|sample| sample.ip.get());
        let whole = (0..).map(|n| (n + 1) * period - 1).take_while(|&ip| ip < exits);
        assert!(whole.eq(ips.filter(|ip| ip >> 63 == 0)));
        assert_eq!(reply.value.get(), area.head());
    }
}

#[test]
fn overflows_found_together_share_a_packet() {
    let mut fixture = Fixture::new();
    let (event, mut area) = traced(&mut fixture, &paced(PACE_CYCLES, 100));
    fixture.host.work(thread(0), 250, 4);
    fixture.exit(0, ExitReason::Signal, &mut Everything(0x10));
    fixture.host.work(thread(0), 60, 4);
    fixture.exit(0, ExitReason::Signal, &mut Everything(0x20));
    fixture.command(0, COMMAND_READ, event);
    let samples = area.samples();
    let reported: Vec<_> = samples.iter().map(|sample| (sample.ip.get(), sample.period.get(), sample.flags)).collect();
    let whole = PACKET_USER | PACKET_IP | PACKET_REGS;
    assert_eq!(reported, [(0x10, 200, whole | PACKET_COLLISION), (0x20, 100, whole),]);
}

#[test]
fn sample_packet_in_an_excluded_mode_is_lost() {
    let mut fixture = Fixture::new();
    let request = paced(PACE_CYCLES, 100).flags(OPEN_EXCLUDE_KERNEL);
    let (event, mut area) = traced(&mut fixture, &request);
    fixture.host.work(thread(0), 100, 4);
    fixture.exit(0, ExitReason::Signal, &mut Everything(KERNEL_IP));
    let reply = fixture.read(0, event);
    assert_eq!((reply.value.get(), reply.lost.get()), (256, 256));
    assert_eq!(area.take(), []);
    fixture.host.work(thread(0), 100, 4);
    fixture.exit(0, ExitReason::Signal, &mut Everything(0x10));
    let reply = fixture.read(0, event);
    let samples = area.samples();
    assert_eq!((samples.len(), samples[0].sequence.get()), (1, 1));
    assert_eq!(reply.value.get(), area.head() + reply.lost.get());
}

#[test]
fn overflows_dropped_by_the_host_are_lost_by_the_packet() {
    let mut fixture = Fixture::new();
    let (event, mut area) = traced(&mut fixture, &paced(PACE_CYCLES, 100));
    fixture.host.drop_overflows(thread(0), 3);
    let reply = fixture.read(0, event);
    assert_eq!((reply.value.get(), reply.lost.get()), (768, 768));
    fixture.host.work(thread(0), 100, 4);
    fixture.exit(0, ExitReason::Signal, &mut Everything(0x10));
    let reply = fixture.read(0, event);
    assert_eq!(reply.value.get(), area.head() + 768);
    let packets = area.take();
    let [Packet::Sync(sync), Packet::Sample(sample)] = packets[..] else {
        panic!("{packets:?}");
    };
    assert_eq!(sync.flags, SYNC_START | SYNC_PAGE | SYNC_LOSS);
    assert_eq!((sync.sequence.get(), sample.sequence.get()), (3, 3));
    assert_eq!(fixture.vpmu.metrics().samples_lost, 0, "lost packets are not lost records of a ring");
}

#[test]
fn sample_trace_has_the_rate_and_limit_of_samples() {
    let limits = limits().with(|limits| {
        // Two samples per 10 ms.
        limits.max_sample_rate = 200;
    });
    let mut fixture = Fixture::with(limits, ALL_FEATURES);
    let (event, mut area) = traced(&mut fixture, &paced(PACE_EXITS, 1));
    for ip in 0..10 {
        fixture.exit(0, ExitReason::Io, &mut Everything(ip));
    }
    fixture.command(0, COMMAND_DISABLE, event);
    assert_eq!(area.samples().len(), 2);
    assert_eq!(fixture.vpmu.metrics().samples_throttled, 9);

    let mut fixture = Fixture::new();
    let (event, mut area) = traced(&mut fixture, &paced(PACE_CYCLES, 100));
    fixture.command(0, COMMAND_DISABLE, event);
    assert_eq!(fixture.valued(0, COMMAND_REFRESH, event, 3), 0);
    fixture.host.work(thread(0), 200, 4);
    fixture.exit(0, ExitReason::Signal, &mut Everything(0x10));
    fixture.host.work(thread(0), 300, 4);
    fixture.exit(0, ExitReason::Signal, &mut Everything(0x20));
    let reply = fixture.read(0, event);
    assert_eq!(reply.state.get(), STATE_OFF);
    let reported: Vec<_> = area.samples().iter().map(|sample| (sample.ip.get(), sample.period.get())).collect();
    // The limit is three overflows, and the first sample represents two of them. The second sample therefore represents
    // only one overflow, although three more happened.
    assert_eq!(reported, [(0x10, 200), (0x20, 100)]);
}
