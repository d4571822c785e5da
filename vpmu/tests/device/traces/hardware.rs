//! Traces of every exit. The device takes these exits from the host's records.

use std::sync::atomic::Ordering;

use vm_memory::{Bytes, GuestAddress};
use vpmu::abi::*;
use vpmu::source::{HostExit, Recorded};
use vpmu_testkit::{AreaReader, Fields, Fixture, Packet, TSC_OFFSET, map_area, open_of, thread};

const TASK_PAGE: u64 = 0x8000;
const KERNEL_IP: u64 = 0xffff_8000_0000_1000;
const LEN: u64 = size_of::<ExitPacket>() as u64;

fn request(context: u32) -> OpenRequest {
    open_of(KIND_EXIT_TRACE, EXIT_ALL, context)
}

/// Opens a trace of every exit of vCPU 0, maps an area of 4 pages, and enables the trace.
fn traced(fixture: &mut Fixture) -> (u64, AreaReader) {
    let reply = fixture.open_reply(&request(0));
    assert_eq!((reply.status.get(), reply.engine.get()), (0, ENGINE_BATCHED));
    let event = reply.id.get();
    let area = map_area(fixture, event, 4);
    fixture.command(0, COMMAND_ENABLE, event);
    (event, area)
}

/// Returns the host's record of an exit that happened `ago` ticks ago. The vCPU entered the guest again `outside` ticks
/// after the exit. `outside` is `None` if the host did not record the entry.
fn exit(fixture: &Fixture, ip: u64, ago: u64, outside: Option<u64>) -> HostExit {
    let tsc = fixture.host.now() - ago;
    HostExit {
        tsc,
        back: outside.map(|outside| tsc + outside),
        ip,
        reason: 0x7b,
        qualification: 0x3f8_0210,
        detail: 0x1236,
    }
}

fn record(fixture: &Fixture, vcpu: u32, exit: HostExit) {
    fixture.host.record_exit(thread(vcpu), Recorded::Exit(exit));
}

fn ips(area: &mut AreaReader) -> Vec<u64> {
    area.exits().iter().map(|exit| exit.ip.get()).collect()
}

/// Writes entry `n` of the history in vCPU 0's task page. The entry records a switch to task `who` at guest TSC
/// `since`.
fn switch(fixture: &Fixture, n: u64, who: u32, since: u64) {
    let put = |at, value: u64| {
        let stored = fixture.memory.store(value, GuestAddress(at), Ordering::Release);
        stored.expect("in memory");
    };
    let (word, entry) = (u64::from(who) << 32 | 7, TASK_PAGE + 32 + n * 16);
    put(TASK_PAGE, word);
    put(entry, word);
    put(entry + 8, since);
    put(TASK_PAGE + 16, n + 1);
}

#[test]
fn exit_packet_has_the_hosts_record() {
    let mut fixture = Fixture::new();
    fixture.runs(0, 0, 0);
    let (event, mut area) = traced(&mut fixture);
    fixture.host.pass(10_000);
    switch(&fixture, 0, 100, 0);
    switch(&fixture, 1, 101, fixture.host.now() + TSC_OFFSET - 500);
    let first = exit(&fixture, 0x1234, 1000, Some(300));
    record(&fixture, 0, first);
    record(&fixture, 0, exit(&fixture, KERNEL_IP, 400, Some(0)));
    let reply = fixture.read(0, event);
    assert_eq!((reply.value.get(), reply.lost.get()), (area.head(), 0));

    let packets = area.take();
    let [Packet::Sync(sync), Packet::Exit(user), Packet::Exit(kernel)] = packets[..] else {
        panic!("{packets:?}");
    };
    assert_eq!((sync.flags, sync.format.get()), (SYNC_START | SYNC_PAGE, FORMAT_EXITS));
    assert_eq!((sync.config.get(), sync.tsc.get()), (EXIT_ALL, first.tsc + TSC_OFFSET));
    assert_eq!(user.flags, PACKET_HARDWARE | PACKET_IP | PACKET_USER);
    assert_eq!((user.reason.get(), user.ip.get()), (0x7b, 0x1234));
    // A tick is a nanosecond.
    assert_eq!(user.time.get(), first.tsc + TSC_OFFSET);
    assert_eq!(user.outside.get(), 300);
    assert_eq!((user.qualification.get(), user.detail.get()), (0x3f8_0210, 0x1236));
    assert_eq!((user.pid.get(), user.tid.get()), (7, 100), "the packet has the ids of the task that ran at the exit");
    assert_eq!((kernel.pid.get(), kernel.tid.get()), (7, 101));
    assert_eq!(kernel.flags, PACKET_HARDWARE | PACKET_IP);
    assert_eq!((user.sequence.get(), kernel.sequence.get()), (0, 1));
    assert_eq!((user.vcpu.get(), kernel.outside.get()), (0, 0));
}

#[test]
fn unfinished_exit_is_cut_at_the_end_of_its_trace() {
    for op in [COMMAND_DISABLE, COMMAND_READ] {
        let mut fixture = Fixture::new();
        let (event, mut area) = traced(&mut fixture);
        fixture.host.pass(10_000);
        // Record an exit whose VM entry was lost, and then the exit during which the trace ends.
        record(&fixture, 0, exit(&fixture, 1, 1000, None));
        record(&fixture, 0, exit(&fixture, 2, 400, None));
        fixture.command(0, op, event);
        let exits = area.exits();
        assert!(exits.iter().all(|exit| exit.flags & PACKET_CUT != 0));
        assert_eq!(exits[0].outside.get(), 0, "the duration of an exit without an end is unknown");
        assert!(
            (400..500).contains(&exits[1].outside.get()),
            "the second exit's time outside is not about 400 ns: {exits:?}"
        );
    }
}

#[test]
fn recorded_exits_are_collected_while_the_vcpu_runs() {
    let mut fixture = Fixture::new();
    let (event, mut area) = traced(&mut fixture);
    assert!(fixture.host.draining());
    fixture.host.pass(10_000);
    for round in 0..3 {
        record(&fixture, 0, exit(&fixture, round, 100, Some(1)));
        fixture.vpmu.drain();
    }
    assert_eq!(fixture.vpmu.metrics().aux_written, LEN * 4, "three exit packets and a sync packet");
    record(&fixture, 0, exit(&fixture, 3, 100, Some(1)));
    fixture.read(0, event);
    assert_eq!(ips(&mut area), [0, 1, 2, 3]);
    // An exit that the host records after the trace was disabled is not part of the trace.
    fixture.command(0, COMMAND_DISABLE, event);
    record(&fixture, 0, exit(&fixture, 4, 100, Some(1)));
    fixture.command(0, COMMAND_ENABLE, event);
    record(&fixture, 0, exit(&fixture, 5, 100, Some(1)));
    fixture.read(0, event);
    assert_eq!(ips(&mut area), [5]);
    fixture.close(event).expect("open");
    assert_eq!(fixture.host.open_counters(), 0, "the counter is closed");
}

#[test]
fn exits_dropped_by_the_host_are_lost_by_the_byte() {
    let mut fixture = Fixture::new();
    let (event, mut area) = traced(&mut fixture);
    fixture.host.pass(10_000);
    record(&fixture, 0, exit(&fixture, 1, 1000, Some(1)));
    fixture.host.record_exit(thread(0), Recorded::Lost(5));
    record(&fixture, 0, exit(&fixture, 2, 400, Some(1)));
    let reply = fixture.read(0, event);
    assert_eq!(reply.lost.get(), 5 * LEN);
    assert_eq!(reply.value.get(), area.head() + 5 * LEN);
    let packets = area.take();
    let [Packet::Sync(_), Packet::Exit(_), Packet::Sync(sync), Packet::Exit(exit)] = packets[..] else {
        panic!("{packets:?}");
    };
    assert_eq!((sync.flags, sync.lost.get()), (SYNC_LOSS, 5 * LEN));
    assert_eq!((sync.sequence.get(), exit.sequence.get()), (6, 6));
    // An impossible number of losses is harmless.
    fixture.host.record_exit(thread(0), Recorded::Lost(u64::MAX));
    fixture.read(0, event);
}

#[test]
fn host_trace_without_an_area_loses_every_byte() {
    let mut fixture = Fixture::new();
    let event = fixture.opened(&request(0));
    fixture.command(0, COMMAND_ENABLE, event);
    fixture.host.pass(10_000);
    for _ in 0..3 {
        record(&fixture, 0, exit(&fixture, 1, 1000, Some(1)));
    }
    let reply = fixture.read(0, event);
    assert_eq!((reply.value.get(), reply.lost.get()), (3 * LEN, 3 * LEN));
}

#[test]
fn host_records_nothing_while_the_trace_is_paused() {
    const PAUSE: u32 = 7;
    const RESUME: u32 = 8;
    let mut fixture = Fixture::new();
    let opened = request(0).flags(OPEN_AUX_START_PAUSED);
    let trace = fixture.opened(&opened);
    let mut area = map_area(&mut fixture, trace, 4);
    for (mark, flag) in [(PAUSE, OPEN_AUX_PAUSE), (RESUME, OPEN_AUX_RESUME)] {
        let member = open_of(KIND_MARK, mark.into(), 0).leader(trace).period(1).flags(OPEN_ENABLED | flag);
        fixture.opened(&member);
    }
    fixture.command(0, COMMAND_ENABLE, trace);
    fixture.host.pass(10_000);
    for region in 0..20 {
        record(&fixture, 0, exit(&fixture, 1000, 10, Some(1)));
        fixture.mark(0, RESUME, 2);
        record(&fixture, 0, exit(&fixture, region, 10, Some(1)));
        // Record the exit that the PAUSE mark below causes. The host has recorded its start, but the exit has not
        // ended.
        record(&fixture, 0, exit(&fixture, 100 + region, 5, None));
        fixture.mark(0, PAUSE, 3);
        let exits = area.exits();
        let reported: Vec<_> = exits.iter().map(|e| (e.ip.get(), e.flags & PACKET_CUT)).collect();
        assert_eq!(reported, [(region, 0), (100 + region, PACKET_CUT)]);
    }
    let reply = fixture.read(0, trace);
    assert_eq!((reply.value.get(), reply.lost.get()), (area.head(), 0));
}

#[test]
fn each_vcpu_has_its_own_host_trace() {
    let mut fixture = Fixture::new();
    let event = fixture.opened(&request(CONTEXT_TASK));
    let mut area = map_area(&mut fixture, event, 4);
    fixture.command(0, COMMAND_ENABLE, event);
    fixture.host.pass(10_000);
    for round in 0..6 {
        let on = round % 2;
        fixture.command(on, COMMAND_IN, event);
        for vcpu in 0..2 {
            record(&fixture, vcpu, exit(&fixture, u64::from(10 * round + vcpu), 10, Some(1)));
        }
        fixture.command(on, COMMAND_OUT, event);
    }
    let exits = area.exits();
    let reported: Vec<_> = exits.iter().map(|e| (e.vcpu.get(), e.ip.get())).collect();
    assert_eq!(reported, [(0, 0), (1, 11), (0, 20), (1, 31), (0, 40), (1, 51)]);
    assert_eq!(fixture.host.open_counters(), 2);
}

/// VPMU-D-6.8-10.
#[test]
fn trace_of_every_exit_needs_the_host_and_no_period() {
    let mut fixture = Fixture::new();
    let no = |fixture: &mut Fixture, request: OpenRequest| fixture.open(&request).expect_err("refused");
    let with = |engine: u32| request(0).engine(engine);
    assert_eq!(no(&mut fixture, with(ENGINE_EXIT)), libc::EOPNOTSUPP);
    fixture.opened(&with(ENGINE_BATCHED));
    let sampled = request(0).period(1);
    assert_eq!(no(&mut fixture, sampled), libc::EOPNOTSUPP);
    let excluding = request(0).flags(OPEN_EXCLUDE_USER);
    assert_eq!(no(&mut fixture, excluding), libc::EOPNOTSUPP);
    assert_eq!(no(&mut fixture, open_of(KIND_HOST_TRACE, 0, 0)), libc::EOPNOTSUPP);
    let entries = fixture.catalogue();
    let listed = |e: &&CatalogueEntry| (e.kind.get(), e.config.get()) == (KIND_EXIT_TRACE, EXIT_ALL);
    let entry = entries.iter().find(listed).expect("listed");
    let format = entry.flags.get() >> CATALOGUE_FORMAT_SHIFT & 0xff;
    assert_eq!(format, u32::from(FORMAT_EXITS));
    let aux = CATALOGUE_AUX | CATALOGUE_GUEST_ONLY;
    assert_eq!(entry.flags.get() & 0xffff, aux);
    assert!(entry.source.starts_with(b"host perf: tracepoints"));
}
