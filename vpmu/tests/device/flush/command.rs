//! Flushes by the guest.

use vpmu::ExitReason;
use vpmu::abi::*;
use vpmu::source::{Mode, Overflow};
use vpmu_testkit::{At, CYCLES, Errno, Fields, Fixture, LOST, SAMPLE, command, map_area, open_of, thread};

use super::{cycles, listen};

/// Opens an event that samples every mark of value 5 on vCPU 0.
fn marks(fixture: &mut Fixture, flags: u32) -> u64 {
    let request = open_of(KIND_MARK, 5, 0).sampled(1).flags(flags);
    fixture.opened(&request)
}

fn statuses(fixture: &mut Fixture, vcpu: u32, events: &[u64]) -> Vec<Errno> {
    let commands: Vec<Command> = events.iter().map(|&event| command(COMMAND_FLUSH, event)).collect();
    let replies = fixture.commands(vcpu, &commands);
    let status = |reply: &Reply| Errno::try_from(reply.status.get()).expect("an errno");
    replies.iter().map(status).collect()
}

/// VPMU-D-6.12-2.
#[test]
fn flush_wakes_the_reader_once_for_new_records() {
    let mut fixture = Fixture::new();
    listen(&mut fixture);
    let event = marks(&mut fixture, OPEN_ENABLED);
    let mut ring = fixture.map(event, 4);
    assert_eq!(fixture.flush(0, event), 0);
    assert_eq!(fixture.notice(), None, "a flush without records wakes nobody");
    fixture.mark(0, 5, 1);
    assert_eq!(fixture.notice(), None, "no page is full");
    assert_eq!(fixture.flush(0, event), 0);
    assert_eq!(fixture.notice(), Some((NOTICE_WAKEUP, event)));
    assert_eq!(fixture.flush(0, event), 0);
    assert_eq!(fixture.notice(), None, "a flush without new records wakes nobody");
    assert_eq!(ring.samples().len(), 1);
    // A flush after a regular wakeup does not wake the reader again.
    let frequent = fixture.opened(&open_of(KIND_MARK, 6, 0).sampled(1).wakeup(1).flags(OPEN_ENABLED));
    fixture.map(frequent, 4);
    fixture.mark(0, 6, 1);
    assert_eq!(fixture.notice(), Some((NOTICE_WAKEUP, frequent)));
    assert_eq!(fixture.flush(0, frequent), 0);
    assert_eq!(fixture.notice(), None);
}

#[test]
fn flush_reply_is_the_current_state() {
    let mut fixture = Fixture::new();
    let event = marks(&mut fixture, OPEN_ENABLED);
    let page = fixture.map(event, 0);
    fixture.mark(0, 5, 1);
    let reply = fixture.command(0, COMMAND_FLUSH, event);
    assert_eq!((reply.status.get(), reply.value.get()), (0, 1));
    assert_eq!(reply.state.get(), STATE_ACTIVE);
    assert_eq!(page.field(24), reply.time_enabled.get());
}

/// VPMU-D-6.12-1.
#[test]
fn overflows_of_the_exit_engine_are_written() {
    let mut fixture = Fixture::new();
    listen(&mut fixture);
    let event = cycles(&mut fixture, 0, ENGINE_EXIT);
    let mut ring = fixture.map(event, 4);
    // For the first flush, the counter overflows before the exit. For the second flush, it overflows after the exit but
    // before the flush command.
    fixture.host.work(thread(0), 250, 4);
    assert_eq!(fixture.flush(0, event), 0);
    assert_eq!(ring.samples().len(), 2);
    fixture.vcpus.leave(0, ExitReason::Mmio, &mut At(7));
    fixture.host.work(thread(0), 100, 4);
    fixture.queues[2].request(zerocopy::IntoBytes::as_bytes(&command(COMMAND_FLUSH, event)), size_of::<Reply>());
    fixture.vcpus.kick(0, QUEUE_VCPU);
    fixture.queues[2].answer().expect("answered immediately");
    let ips: Vec<u64> = ring.samples().iter().map(|sample| sample.ip).collect();
    assert_eq!(ips, [7]);
    assert_eq!(fixture.notice(), Some((NOTICE_WAKEUP, event)));
}

/// VPMU-D-6.12-1.
#[test]
fn overflows_of_the_batched_engine_are_written() {
    let mut fixture = Fixture::new();
    fixture.host.know_ips();
    listen(&mut fixture);
    let event = cycles(&mut fixture, 0, ENGINE_BATCHED);
    let mut ring = fixture.map(event, 4);
    fixture.host.pass(1000);
    for ip in 1..=3 {
        fixture.host.record(thread(0), Overflow { tsc: fixture.host.now(), ip, mode: Mode::Guest, period: 100 });
    }
    assert_eq!(fixture.flush(0, event), 0);
    let ips: Vec<u64> = ring.samples().iter().map(|sample| sample.ip).collect();
    assert_eq!(ips, [1, 2, 3]);
    assert_eq!(fixture.notice(), Some((NOTICE_WAKEUP, event)));
}

#[test]
fn event_in_any_state_is_flushed() {
    let mut fixture = Fixture::new();
    let off = marks(&mut fixture, 0);
    let paused = marks(&mut fixture, OPEN_ENABLED | OPEN_PAUSED);
    let ringless = marks(&mut fixture, OPEN_ENABLED);
    let task = fixture.opened(&open_of(KIND_MARK, 5, CONTEXT_TASK).sampled(1));
    let counting = fixture.opened(&open_of(KIND_TSC, 0, 0));
    fixture.map(off, 1);
    fixture.map(paused, 1);
    let events = [off, paused, ringless, task, counting];
    assert_eq!(statuses(&mut fixture, 0, &events), [0; 5]);
    // Any vCPU can flush an event that is not active.
    assert_eq!(statuses(&mut fixture, 1, &[off, task, counting]), [0; 3]);
    let elsewhere = [libc::EXDEV, libc::EXDEV];
    assert_eq!(statuses(&mut fixture, 1, &[paused, ringless]), elsewhere);
    fixture.command(1, COMMAND_ENABLE, task);
    fixture.command(1, COMMAND_IN, task);
    assert_eq!(fixture.flush(0, task), libc::EXDEV);
    assert_eq!(fixture.flush(1, task), 0);
    assert_eq!(fixture.flush(0, 999), libc::ENOENT);
}

#[test]
fn flush_of_an_event_in_error_publishes_its_records() {
    let mut fixture = Fixture::new();
    listen(&mut fixture);
    let event = cycles(&mut fixture, 0, ENGINE_EXIT);
    let mut ring = fixture.map(event, 4);
    fixture.host.work(thread(0), 100, 4);
    fixture.exit(0, ExitReason::Signal, &mut At(1));
    fixture.host.break_host();
    // The flush detects the lost counter.
    assert_eq!(fixture.flush(0, event), libc::EIO);
    assert_eq!(fixture.notice(), Some((NOTICE_ERROR, event)));
    assert_eq!(fixture.notice(), Some((NOTICE_WAKEUP, event)));
    assert_eq!(fixture.flush(0, event), libc::EIO, "a further flush fails, too");
    assert_eq!(fixture.notice(), None);
    assert_eq!(ring.samples().len(), 1);
}

#[test]
fn pending_loss_is_written_if_it_fits() {
    let mut fixture = Fixture::new();
    listen(&mut fixture);
    let event = marks(&mut fixture, OPEN_ENABLED);
    let mut ring = fixture.map(event, 1);
    // After 56 samples of 72 bytes each, 64 bytes of the data page are free.
    (0..60).for_each(|_| fixture.mark(0, 5, 1));
    assert_eq!(fixture.notice(), Some((NOTICE_WAKEUP, event)), "the first lost sample wakes the reader");
    let head = ring.head();
    assert_eq!(head, 56 * 72);
    assert_eq!(fixture.flush(0, event), 0);
    // The LOST record fits into these 64 bytes.
    let kinds: Vec<u64> = ring.raw().iter().map(|record| record.kind).collect();
    assert_eq!(kinds.len(), 57);
    assert_eq!(kinds.last(), Some(&LOST));
    assert_eq!(fixture.notice(), Some((NOTICE_WAKEUP, event)));
    (0..100).for_each(|_| fixture.mark(0, 5, 1));
    ring.set_tail(ring.head() - 4096);
    let full = ring.head();
    assert_eq!(fixture.flush(0, event), 0, "a flush works if the ring is full");
    assert!(ring.head() - full < 72);
}

#[test]
fn paused_ring_is_unchanged_by_a_flush() {
    let mut fixture = Fixture::new();
    listen(&mut fixture);
    let event = marks(&mut fixture, OPEN_ENABLED);
    let mut ring = fixture.map(event, 1);
    fixture.mark(0, 5, 1);
    fixture.pause(event, 1).expect("paused");
    fixture.mark(0, 5, 1);
    assert_eq!(fixture.flush(0, event), 0);
    assert_eq!(fixture.notice(), Some((NOTICE_WAKEUP, event)), "the flush wakes the reader for the first sample");
    let kinds: Vec<u64> = ring.raw().iter().map(|record| record.kind).collect();
    assert_eq!(kinds, [SAMPLE]);
    fixture.pause(event, 0).expect("resumed");
    assert_eq!(fixture.flush(0, event), 0);
    let kinds: Vec<u64> = ring.raw().iter().map(|record| record.kind).collect();
    assert_eq!(kinds, [LOST]);
}

/// VPMU-D-6.12-1.
#[test]
fn flush_ends_the_span_of_an_area() {
    let mut fixture = Fixture::new();
    listen(&mut fixture);
    let trace = fixture.opened(&open_of(KIND_EXIT_TRACE, EXIT_IO, 0).flags(OPEN_ENABLED));
    let mut area = map_area(&mut fixture, trace, 4);
    for ip in 1..=3 {
        fixture.exit(0, ExitReason::Io, &mut At(ip));
    }
    assert_eq!(area.head(), 0);
    assert_eq!(fixture.flush(0, trace), 0);
    let ips: Vec<u64> = area.exits().iter().map(|exit| exit.ip.get()).collect();
    assert_eq!(ips, [1, 2, 3]);
    assert_eq!(fixture.notice(), Some((NOTICE_WAKEUP, trace)));
    assert_eq!(fixture.flush(0, trace), 0);
    assert_eq!(fixture.notice(), None);
}

#[test]
fn exits_that_the_host_recorded_are_written() {
    let mut fixture = Fixture::new();
    let trace = fixture.opened(&open_of(KIND_EXIT_TRACE, EXIT_ALL, 0).flags(OPEN_ENABLED));
    let mut area = map_area(&mut fixture, trace, 4);
    for ip in 1..=3 {
        let tsc = fixture.host.now();
        let exit = vpmu::source::HostExit { tsc, back: Some(tsc), ip, reason: 1, qualification: 0, detail: 0 };
        let recorded = vpmu::source::Recorded::Exit(exit);
        fixture.host.record_exit(thread(0), recorded);
    }
    assert_eq!(fixture.flush(0, trace), 0);
    let ips: Vec<u64> = area.exits().iter().map(|exit| exit.ip.get()).collect();
    assert_eq!(ips, [1, 2, 3]);
}

#[test]
fn flush_of_zero_covers_every_persistent_event_of_the_vcpu() {
    let mut fixture = Fixture::new();
    listen(&mut fixture);
    let open = |fixture: &mut Fixture, vcpu: u32, persistent: u32| {
        let request = open_of(KIND_MARK, 5, vcpu).sampled(1).flags(OPEN_ENABLED | persistent);
        let event = fixture.opened(&request);
        fixture.map(event, 4);
        event
    };
    let one = open(&mut fixture, 0, OPEN_PERSISTENT);
    let other = open(&mut fixture, 0, OPEN_PERSISTENT);
    let elsewhere = open(&mut fixture, 1, OPEN_PERSISTENT);
    open(&mut fixture, 0, 0);
    (0..2).for_each(|vcpu| fixture.mark(vcpu, 5, 1));
    let reply = fixture.command(0, COMMAND_FLUSH, 0);
    assert_eq!(reply, Reply::default(), "the reply has only a status");
    let woken = [(); 3].map(|()| fixture.notice());
    assert_eq!(woken, [Some((NOTICE_WAKEUP, one)), Some((NOTICE_WAKEUP, other)), None]);
    assert_eq!(fixture.flush(1, 0), 0);
    assert_eq!(fixture.notice(), Some((NOTICE_WAKEUP, elsewhere)));
}

#[test]
fn flush_of_all_continues_after_an_error() {
    let mut fixture = Fixture::new();
    listen(&mut fixture);
    let request = open_of(CYCLES.0, CYCLES.1, 0).sampled(100).flags(OPEN_ENABLED | OPEN_PERSISTENT).engine(ENGINE_EXIT);
    fixture.opened(&request);
    let mark = marks(&mut fixture, OPEN_ENABLED | OPEN_PERSISTENT);
    fixture.map(mark, 4);
    fixture.mark(0, 5, 1);
    fixture.host.break_host();
    assert_eq!(fixture.flush(0, 0), libc::EIO);
    let notices = [(); 2].map(|()| fixture.notice());
    assert!(notices.contains(&Some((NOTICE_WAKEUP, mark))), "no notice wakes the reader of the marks: {notices:?}");
}
