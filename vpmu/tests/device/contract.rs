//! Requirements of SPEC.md for the device as a whole.

use vm_memory::{Bytes, GuestAddress};
use vpmu::abi::*;
use vpmu::{Engines, ExitReason};
use vpmu_testkit::{ALL_FEATURES, At, Fields, Fixture, WINDOW, command, header, limits, open_of, structs, window};
use zerocopy::{FromBytes, IntoBytes};

use crate::persistent::asked;

/// An event that wakes its reader for each record.
fn waking() -> OpenRequest {
    open_of(KIND_MARK, 5, 0).sampled(1).wakeup(1).flags(OPEN_ENABLED)
}

/// VPMU-D-2-7.
#[test]
fn queue_without_interrupts_raises_none() {
    let mut fixture = Fixture::new();
    let interrupts = fixture.host.interrupts();
    fixture.commands(0, &[command(COMMAND_VCPU, 0)]);
    assert_eq!(fixture.host.interrupts(), interrupts);
    fixture.catalogue();
    assert_eq!(fixture.host.interrupts(), interrupts + 1, "an interrupt is requested");
    fixture.queues[0].want_no_interrupt();
    fixture.catalogue();
    assert_eq!(fixture.host.interrupts(), interrupts + 1);
}

/// VPMU-D-2-2.
#[test]
fn control_requests_made_available_at_once_are_answered_in_order() {
    let mut fixture = Fixture::new();
    for slot in [4, 0, 2] {
        let open = open_of(KIND_MARK, u64::from(slot), 0);
        fixture.queues[0].request_at(slot, open.as_bytes(), size_of::<OpenReply>());
    }
    let _ = fixture.vpmu.notify(QUEUE_CONTROL);
    for (slot, id) in [(4, 1), (0, 2), (2, 3)] {
        let (head, len) = fixture.queues[0].reclaim().expect("answered");
        assert_eq!((head, len as usize), (slot, size_of::<OpenReply>()));
        let at = fixture.queues[0].buffer(u16::try_from(head).expect("a slot") + 1);
        let mut bytes = [0; size_of::<OpenReply>()];
        let read = fixture.memory.read_slice(&mut bytes, GuestAddress(at));
        read.expect("in memory");
        let reply = OpenReply::read_from_bytes(&bytes).expect("a reply");
        assert_eq!((reply.status.get(), reply.id.get()), (0, id));
    }
}

/// VPMU-D-2-4.
#[test]
fn used_length_is_that_of_the_answer() {
    let mut fixture = Fixture::new();
    let room = 1000;
    let close = header(CONTROL_CLOSE, 77);
    assert_eq!(fixture.control_bytes(close.as_bytes(), room).len(), 8);
    let open = open_of(KIND_MARK, 5, 0);
    assert_eq!(fixture.control_bytes(open.as_bytes(), room).len(), 16);
    let catalogue =
        CatalogueRequest { header: header(CONTROL_CATALOGUE, 0), count: 2.into(), ..CatalogueRequest::default() };
    let entries = 8 + 2 * size_of::<CatalogueEntry>();
    assert_eq!(fixture.control_bytes(catalogue.as_bytes(), room).len(), entries);
    let commands = [command(COMMAND_READ, 1), command(COMMAND_READ, 77)];
    fixture.queues[2].request(commands.as_bytes(), room);
    fixture.vcpus.kick(0, QUEUE_VCPU);
    let answer = fixture.queues[2].answer().expect("answered immediately");
    let replies: Vec<Reply> = structs(&answer);
    let statuses: Vec<u32> = replies.iter().map(|reply| reply.status.get()).collect();
    assert_eq!(statuses, [0, libc::ENOENT.unsigned_abs()]);
}

/// VPMU-D-3-2, VPMU-G-3-2.
#[test]
fn features_of_other_rings_and_of_iommus_are_neither_offered_nor_taken() {
    const INDIRECT: u64 = 28;
    const EVENT_INDEX: u64 = 29;
    const ACCESS_PLATFORM: u64 = 33;
    const PACKED: u64 = 34;
    let mut fixture = Fixture::new();
    for bit in [INDIRECT, EVENT_INDEX, ACCESS_PLATFORM, PACKED] {
        assert_eq!(fixture.vpmu.features() >> bit & 1, 0, "bit {bit}");
        let queues = fixture.make_queues();
        let features = ALL_FEATURES | 1 << bit;
        let memory = fixture.memory.clone();
        let active = fixture.vpmu.activate(memory, features, &queues, fixture.interrupt.clone());
        assert!(active.is_err(), "feature bit {bit} was accepted");
    }
}

/// VPMU-D-4-1.
#[test]
fn configuration_does_not_change() {
    let memory = window(16);
    let mut fixture = Fixture::bare(Engines::Auto, limits(), Some(&memory));
    let before = fixture.config();
    fixture.attach(0);
    fixture.attach(1);
    fixture.vpmu.persist(&asked("mark=5", 0)).expect("started");
    fixture.activate(ALL_FEATURES);
    let event = fixture.opened(&waking());
    fixture.map(event, 1);
    fixture.mark(0, 5, 1);
    assert_eq!(fixture.config(), before);
    fixture.host.break_host();
    fixture.vpmu.reset();
    assert_eq!(fixture.config(), before);
}

/// VPMU-D-6.1-1.
#[test]
fn event_id_is_never_reused() {
    let mut fixture = Fixture::new();
    let mut last = 0;
    for _ in 0..3 {
        for _ in 0..10 {
            let event = fixture.opened(&open_of(KIND_MARK, 5, 0));
            assert!(event > last, "the id {event} follows {last}");
            last = event;
            fixture.close(event).expect("closed");
        }
        fixture.vpmu.reset();
        fixture.activate(ALL_FEATURES);
    }
}

/// VPMU-D-6.7-6.
#[test]
fn map_writes_the_whole_metadata_page() {
    let mut fixture = Fixture::new();
    let event = fixture.opened(&waking());
    let pages = [fixture.next_ring, fixture.next_ring + 0x1000];
    for page in pages {
        let junk = fixture.memory.write_slice(&[0xa5; PAGE_SIZE], GuestAddress(page));
        junk.expect("in memory");
    }
    fixture.command(0, COMMAND_DISABLE, event);
    fixture.map_pages(event, MAP_WRITABLE, &pages).expect("mapped");
    let config = fixture.config();
    let expected = Metadata {
        capabilities: 0x12.into(),
        pmc_width: 64.into(),
        time_shift: config.time_shift,
        time_mult: config.time_mult,
        time_zero: config.time_zero,
        size: 96.into(),
        time_mask: u64::MAX.into(),
        data_offset: 4096.into(),
        data_size: 4096.into(),
        ..Metadata::default()
    };
    let mut bytes = [0; PAGE_SIZE];
    let mut read = |page: u64| {
        let read = fixture.memory.read_slice(&mut bytes, GuestAddress(page));
        read.expect("in memory");
        bytes
    };
    let (mut page, rest) =
        Metadata::read_from_prefix(&read(pages[0])).map(|(page, rest)| (page, rest.to_vec())).expect("a page");
    // The event was enabled only briefly, so the exact times are unknown.
    for field in [&mut page.time_enabled, &mut page.time_running] {
        assert_ne!(field.get(), u64::from_le_bytes([0xa5; 8]));
        *field = 0.into();
    }
    assert_eq!(page.lock.get() & 1, 0);
    page.lock = 0.into();
    assert_eq!(page, expected);
    assert!(rest.iter().all(|&byte| byte == 0));
    assert_eq!(read(pages[1]), [0xa5; PAGE_SIZE], "the data page is not written");
}

/// VPMU-D-6.7-10.
#[test]
fn each_wakeup_with_a_buffer_has_a_notice() {
    let mut fixture = Fixture::new();
    let event = fixture.opened(&waking());
    fixture.map(event, 4);
    (0..10).for_each(|slot| fixture.post_notice(slot, 16));
    for _ in 0..10 {
        fixture.mark(0, 5, 1);
    }
    for _ in 0..10 {
        assert_eq!(fixture.counted_notice(), Some((NOTICE_WAKEUP, event, 1)));
    }
    assert_eq!(fixture.counted_notice(), None);
}

/// VPMU-D-6.10-4.
#[test]
fn new_ring_in_the_window_is_zeroed() {
    let memory = window(4);
    let mut fixture = Fixture::windowed(&memory);
    let event = fixture.opened(&waking());
    fixture.detach(event, "").expect("detached");
    let junk = [0xa5; 4 * PAGE_SIZE];
    let wrote = memory.write_slice(&junk, GuestAddress(WINDOW));
    wrote.expect("in the window");
    assert_eq!(fixture.map_window(event, 2, 0), Ok(0));
    let mut data = [1; 2 * PAGE_SIZE];
    let at = GuestAddress(WINDOW + PAGE_SIZE as u64);
    memory.read_slice(&mut data, at).expect("in the window");
    assert_eq!(data, [0; 2 * PAGE_SIZE]);
    let mut free = [0; PAGE_SIZE];
    let at = GuestAddress(WINDOW + 3 * PAGE_SIZE as u64);
    memory.read_slice(&mut free, at).expect("in the window");
    assert_eq!(free, [0xa5; PAGE_SIZE], "a page outside the ring does not change");
}

/// VPMU-D-2-1.
#[test]
fn notification_is_answered_before_its_instruction_retires() {
    let mut fixture = Fixture::new();
    let event = fixture.opened(&open_of(KIND_MARK, 5, 0));
    fixture.vcpus.leave(0, ExitReason::Mmio, &mut At(1));
    let enable = command(COMMAND_ENABLE, event);
    fixture.queues[2].request(enable.as_bytes(), size_of::<Reply>());
    fixture.vcpus.kick(0, QUEUE_VCPU);
    fixture.vcpus.enter(0);
    // The guest continues at its next instruction, so the reply must already be in the used ring.
    let answer = fixture.queues[2].answer().expect("the answer is in the used ring");
    let reply: Vec<Reply> = structs(&answer);
    assert_eq!(reply[0].state.get(), STATE_ACTIVE);
}
