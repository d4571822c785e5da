//! A device whose vCPUs run in another process: the events that it lists, the threads that it counts, and its marks.

use vm_memory::{GuestAddress, GuestMemoryMmap};
use vpmu::abi::*;
use vpmu::source::Engine;
use vpmu::{Error, RemoteVcpu, Settings, Turn};
use vpmu_testkit::{
    ALL_FEATURES, CYCLES, FakeHost, Fields, Fixture, SAMPLE, TSC_OFFSET, command, limits, open_of, structs, thread,
};
use zerocopy::IntoBytes;

const IP: u64 = 1;
const ADDR: u64 = 1 << 3;
const CALLCHAIN: u64 = 1 << 5;
/// Guest memory of a device: as much as the fixture's buffers take.
const MEMORY: usize = 0x200_0000;

/// A device on a host whose samples have guest addresses.
fn remote() -> (Fixture, Vec<RemoteVcpu>) {
    remote_on(FakeHost::know_ips)
}

fn remote_on(set_up: impl FnOnce(&FakeHost)) -> (Fixture, Vec<RemoteVcpu>) {
    let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), MEMORY)]).expect("memory");
    let settings = Settings::new(2, 1_000_000).with_limits(limits()).remote();
    let mut fixture = Fixture::with_memory(settings, None, memory);
    set_up(&fixture.host);
    let vcpus = (0..2).map(|vcpu| fixture.vpmu.attach_thread(vcpu, thread(vcpu), TSC_OFFSET).expect("a vCPU"));
    let vcpus = vcpus.collect();
    fixture.activate(ALL_FEATURES);
    (fixture, vcpus)
}

/// Sends commands on a vCPU's queue, as this vCPU.
fn commands(fixture: &mut Fixture, vcpu: &mut RemoteVcpu, queue: u16, commands: &[Command]) -> Vec<Reply> {
    let room = size_of_val(commands) / size_of::<Command>() * size_of::<Reply>();
    let driver = &mut fixture.queues[usize::from(queue)];
    driver.request(commands.as_bytes(), room);
    assert_eq!(vcpu.kick(queue), Turn::Done);
    structs(&driver.answer().expect("answered before the vCPU runs"))
}

fn value(fixture: &mut Fixture, vcpu: &mut RemoteVcpu, event: u64) -> u64 {
    commands(fixture, vcpu, QUEUE_VCPU, &[command(COMMAND_READ, event)])[0].value.get()
}

#[test]
fn events_that_need_the_vcpus_exits_are_absent() {
    let (mut fixture, _vcpus) = remote();
    let listed = fixture.catalogue();
    let kinds: Vec<(u32, u64)> = listed.iter().map(|entry| (entry.kind.get(), entry.config.get())).collect();
    for kind in [KIND_GUEST_TIME, KIND_SAMPLE_TRACE] {
        assert!(kinds.iter().all(|(listed, _)| *listed != kind), "kind {kind}");
        assert_eq!(fixture.open(&open_of(kind, 0, 0)), Err(libc::ENOENT));
    }
    for config in [EXIT_USER, EXIT_IO, EXIT_MMIO, EXIT_HLT, EXIT_SIGNAL, EXIT_OTHER] {
        assert!(!kinds.contains(&(KIND_EXITS, config)) && !kinds.contains(&(KIND_EXIT_TRACE, config)));
        assert_eq!(fixture.open(&open_of(KIND_EXITS, config, 0)), Err(libc::ENOENT));
    }
    // The hypervisor's statistics can be read from anywhere.
    assert!(kinds.contains(&(KIND_EXITS, EXIT_ALL)) && kinds.contains(&(KIND_MARK, MARK_ANY)));
    let mark = listed.iter().find(|entry| entry.kind.get() == KIND_MARK).expect("listed");
    assert_eq!(mark.flags.get() & CATALOGUE_EXCLUDES, 0);
}

#[test]
fn counters_count_the_named_thread_and_never_signal_it() {
    let (mut fixture, _vcpus) = remote();
    fixture.opened(&open_of(CYCLES.0, CYCLES.1, 0).flags(OPEN_ENABLED));
    assert_eq!([0, 1].map(|vcpu| fixture.host.running(thread(vcpu))), [1, 0]);
    let samples = open_of(CYCLES.0, CYCLES.1, 0).sampled(100).flags(OPEN_ENABLED);
    assert_eq!(fixture.open(&samples.engine(ENGINE_EXIT)), Err(libc::EOPNOTSUPP));
    let reply = fixture.open_reply(&samples);
    assert_eq!((reply.status.get(), reply.engine.get()), (0, ENGINE_BATCHED));
    assert_eq!(fixture.host.engines(), [Engine::Batched]);
}

#[test]
fn host_without_guest_addresses_takes_no_samples() {
    let (mut fixture, _vcpus) = remote_on(|_| {});
    let listed = fixture.catalogue();
    let cycles = listed.iter().find(|entry| (entry.kind.get(), entry.config.get()) == CYCLES).expect("listed");
    assert_eq!(cycles.flags.get() & CATALOGUE_SAMPLES, 0);
    let count = open_of(CYCLES.0, CYCLES.1, 0);
    assert_eq!(fixture.open(&count.sampled(100)), Err(libc::EOPNOTSUPP));
    fixture.opened(&count);
    fixture.opened(&open_of(KIND_MARK, 5, 0).sampled(1));
}

#[test]
fn mark_counts_for_its_vcpu_and_its_sample_has_no_place() {
    let (mut fixture, mut vcpus) = remote();
    let request = open_of(KIND_MARK, MARK_ANY, 0).period(1).sample_type(IP | ADDR).flags(OPEN_ENABLED);
    let mark = fixture.opened(&request);
    let mut ring = fixture.map(mark, 1);
    vcpus[1].mark(4);
    vcpus[0].mark(7);
    let records = ring.raw();
    assert_eq!(records.len(), 1, "{records:?}");
    assert_eq!((records[0].kind, records[0].words.as_slice()), (SAMPLE, &[0, 7][..]));
    assert_eq!(value(&mut fixture, &mut vcpus[0], mark), 1);
    for fields in [CALLCHAIN, 1 << 12, 1 << 13, 1 << 18] {
        let asks = OpenRequest { regs_user: 1.into(), regs_intr: 1.into(), stack_user: 8.into(), ..request };
        assert_eq!(fixture.open(&asks.sample_type(fields)), Err(libc::EOPNOTSUPP), "{fields:#x}");
    }
    assert_eq!(fixture.open(&request.flags(OPEN_EXCLUDE_KERNEL)), Err(libc::EOPNOTSUPP));
}

#[test]
fn vcpus_are_attached_by_the_side_that_runs_them() {
    let (fixture, vcpus) = remote();
    assert!(matches!(fixture.vpmu.attach(0, 0), Err(Error::Remote)));
    assert!(matches!(fixture.vpmu.attach_thread(0, 7, 0), Err(Error::Attached(0))));
    assert!(matches!(fixture.vpmu.attach_thread(9, 7, 0), Err(Error::NoVcpu(9))));
    drop(vcpus);
    drop(fixture.vpmu.attach_thread(0, 7, 0).expect("free again"));
    let embedded = Fixture::new();
    assert!(matches!(embedded.vpmu.attach_thread(0, 7, 0), Err(Error::Remote)));
}

#[test]
fn events_of_a_vcpu_wait_while_it_has_no_thread() {
    let (mut fixture, mut vcpus) = remote();
    fixture.opened(&open_of(CYCLES.0, CYCLES.1, 0).flags(OPEN_ENABLED));
    drop(vcpus.remove(0));
    let samples = open_of(CYCLES.0, CYCLES.1, 0).sampled(100).flags(OPEN_ENABLED);
    assert_eq!(fixture.open(&samples), Err(libc::ESRCH), "the host may give the thread's id to anybody");
    vcpus.insert(0, fixture.vpmu.attach_thread(0, 300, TSC_OFFSET).expect("free"));
    assert_eq!(fixture.host.running(300), 1, "the event counts on the new thread");
}

/// One notification executes a bounded number of commands, because the guest's VM waits. The rest follows.
#[test]
fn commands_beyond_a_notifications_bound_follow_with_the_next() {
    const EVENTS: u64 = 1000;
    const BATCH: usize = 64;
    let (mut fixture, mut vcpus) = remote();
    let leader = fixture.opened(&open_of(CYCLES.0, CYCLES.1, 0));
    for _ in 1..EVENTS {
        let member = OpenRequest { leader: leader.into(), ..open_of(CYCLES.0, CYCLES.1, 0) };
        fixture.opened(&member);
    }
    // Each command starts or stops the whole group.
    let toggles: Vec<Command> =
        (0..BATCH).flat_map(|_| [command(COMMAND_ENABLE, leader), command(COMMAND_DISABLE, leader)]).collect();
    let room = toggles.len() * size_of::<Reply>();
    fixture.queues[2].request(toggles.as_bytes(), room);
    let mut kicks = 0;
    let answer = loop {
        let turn = vcpus[0].kick(QUEUE_VCPU);
        kicks += 1;
        match fixture.queues[2].answer() {
            Some(answer) => break answer,
            None => assert_eq!(turn, Turn::Unfinished),
        }
    };
    let replies: Vec<Reply> = structs(&answer);
    assert!(replies.iter().all(|reply| reply.status.get() == 0));
    assert!(kicks > 1, "the commands fit into one notification");
}
