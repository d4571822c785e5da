//! A malicious guest gets an errno or no answer. It cannot cause a panic or a stray write.

use proptest::prelude::*;
use vpmu::abi::*;
use vpmu_testkit::{Descriptor, Fields, Fixture, MEMORY, command, header, open_of};
use zerocopy::IntoBytes;

/// VPMU-D-6.4-1.
#[test]
fn invalid_commands_are_refused() {
    let mut fixture = Fixture::new();
    let event = fixture.opened(&open_of(KIND_MARK, 5, 0));
    let good = command(COMMAND_READ, event);
    let batch = [
        (Command { reserved: 1.into(), ..good }, libc::EINVAL),
        (Command { room: 1.into(), ..good }, libc::EINVAL),
        (Command { value: 1.into(), ..good }, libc::EINVAL),
        (Command { op: 99.into(), ..good }, libc::EINVAL),
        (Command { event: 99.into(), ..good }, libc::ENOENT),
        (Command { op: COMMAND_VCPU.into(), ..good }, libc::EINVAL),
        (Command { op: COMMAND_PERIOD.into(), value: 5.into(), ..good }, libc::EINVAL),
        (good, 0),
    ];
    let replies = fixture.commands(0, &batch.map(|(command, _)| command));
    for (reply, (command, errno)) in replies.iter().zip(batch) {
        assert_eq!(reply.status.get(), errno.unsigned_abs(), "{command:?}");
    }
}

/// VPMU-D-2-3, VPMU-D-6.4-2.
#[test]
fn buffers_without_room_are_returned_empty() {
    let mut fixture = Fixture::new();
    let open = open_of(KIND_MARK, 5, 0);
    assert_eq!(fixture.control_bytes(open.as_bytes(), 15), [0_u8; 0]);
    assert_eq!(fixture.control_bytes(open.as_bytes(), 0), [0_u8; 0]);
    assert_eq!(fixture.vpmu.metrics().events_opened, 0, "not executed, because there is no room for the reply");
    // These requests are invalid. In the first the reply buffer is too short, in the second a command is incomplete,
    // and the third has more commands than one notification may have.
    for (request, room) in [(32, 31), (33, 64), (32 * 2049, 32 * 2049)] {
        fixture.queues[2].request(&vec![0; request], room);
        fixture.vcpus.kick(0, QUEUE_VCPU);
        assert_eq!(fixture.queues[2].answer().expect("returned"), [0_u8; 0]);
    }
    assert_eq!(fixture.vpmu.metrics().bad_requests, 5);
    fixture.open(&open).expect("the device still works");
}

/// VPMU-D-2-3.
#[test]
fn short_notice_buffer_is_skipped() {
    let mut fixture = Fixture::new();
    let event = fixture.opened(&open_of(KIND_MARK, 5, 0).sampled(1).wakeup(1).flags(OPEN_ENABLED));
    fixture.map(event, 1);
    fixture.post_notice(0, 15);
    fixture.post_notice(1, 16);
    fixture.mark(0, 5, 1);
    assert_eq!(fixture.queues[1].reclaim(), Some((0, 0)));
    assert_eq!(fixture.notice(), Some((NOTICE_WAKEUP, event)));
}

/// VPMU-D-2-3, VPMU-D-7-2.
#[test]
fn chains_that_loop_or_leave_memory_are_dropped() {
    let mut fixture = Fixture::new();
    let queue = &mut fixture.queues[0];
    let looped = Descriptor { address: queue.buffer(0), len: 16, writable: false, next: Some(0) };
    queue.describe(0, looped);
    queue.offer(0);
    queue.describe(3, Descriptor { address: MEMORY - 8, next: None, ..looped });
    queue.offer(3);
    queue.describe(4, Descriptor { address: u64::MAX - 4, next: None, ..looped });
    queue.offer(4);
    queue.describe(5, Descriptor { next: Some(999), ..looped });
    queue.offer(5);
    let _ = fixture.vpmu.notify(QUEUE_CONTROL);
    let returned: Vec<_> = std::iter::from_fn(|| fixture.queues[0].reclaim()).collect();
    assert_eq!(returned, [(0, 0), (3, 0), (4, 0), (5, 0)]);
    fixture.open(&open_of(KIND_MARK, 5, 0)).expect("the device still works");
}

/// VPMU-D-2-6.
#[test]
fn invalid_queue_is_not_served() {
    for break_it in
        [|fixture: &mut Fixture| fixture.queues[0].claim(1000), |fixture: &mut Fixture| fixture.queues[0].offer(16)]
    {
        let mut fixture = Fixture::new();
        break_it(&mut fixture);
        let _ = fixture.vpmu.notify(QUEUE_CONTROL);
        assert_eq!(fixture.queues[0].reclaim(), None);
        fixture.queues[0].claim(0);
        let _ = fixture.vpmu.notify(QUEUE_CONTROL);
        assert_eq!(fixture.queues[0].reclaim(), None);
        let replies = fixture.commands(0, &[command(COMMAND_VCPU, 0)]);
        assert_eq!(replies[0].status.get(), 0, "the other queues still work");
    }
}

/// VPMU-D-2-8.
#[test]
fn notifications_of_unknown_queues_or_vcpus_are_ignored() {
    let mut fixture = Fixture::new();
    fixture.queues[2].request(command(COMMAND_VCPU, 0).as_bytes(), 32);
    let _ = fixture.vpmu.notify(QUEUE_VCPU);
    fixture.vcpus.kick(0, QUEUE_VCPU + 2);
    fixture.vcpus.kick(0, u16::MAX);
    assert_eq!(fixture.queues[2].reclaim(), None);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// VPMU-D-7-1.
    #[test]
    fn random_requests_do_no_harm(
        requests in prop::collection::vec((0_u32..9, prop::collection::vec(any::<u8>(), 0..120), 0_usize..40), 1..40),
        batches in prop::collection::vec(prop::collection::vec((0_u32..11, 0_u64..6, 0_u64..3), 1..20), 1..10),
    ) {
        let mut fixture = Fixture::new();
        for vcpu in 0..2 {
            fixture.opened(&open_of(KIND_MARK, 1, vcpu).sampled(2));
        }
        fixture.opened(&open_of(KIND_EXITS, EXIT_USER, CONTEXT_TASK).sampled(3));
        for (op, mut bytes, room) in requests {
            if let Some(head) = bytes.get_mut(..8) {
                head.copy_from_slice(header(op, 0).as_bytes()[..8].as_ref());
            }
            if !bytes.is_empty() {
                fixture.control_bytes(&bytes, room);
            }
        }
        for (index, batch) in (0..).zip(batches) {
            let commands: Vec<Command> = batch
                .iter()
                .map(|&(op, event, value)| Command { value: value.into(), ..command(op, event) })
                .collect();
            prop_assert_eq!(fixture.commands(index % 2, &commands).len(), commands.len());
            fixture.mark(index % 2, 1, 1);
        }
    }
}
