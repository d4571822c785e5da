//! Readings of groups that have members scheduled in on another vCPU.

use vpmu::ExitReason;
use vpmu::abi::*;
use vpmu_testkit::{At, CYCLES, FAULTS, Fields, Fixture, Reader, SAMPLE, command, thread};
use zerocopy::IntoBytes;

use super::{done, led, task_event};

const SAMPLE_READ: u64 = 1 << 4;
/// `read_format` with GROUP, ID and LOST.
const FORMAT: u64 = 0x1c;

/// Opens a leader that samples its group's counts at each mark of value 5, and maps its ring.
fn leader(fixture: &mut Fixture) -> (u64, Reader) {
    let leader = fixture.opened(&task_event(KIND_MARK, 5).period(1).sample_type(SAMPLE_READ).read_format(FORMAT));
    let ring = fixture.map(leader, 4);
    (leader, ring)
}

/// Returns one entry per sample: the count, id and losses of each event in the group.
fn groups(ring: &mut Reader) -> Vec<Vec<[u64; 3]>> {
    let records = ring.raw();
    let groups = records.iter().map(|record| {
        assert_eq!(record.kind, SAMPLE);
        let events = record.words[1..].as_chunks::<3>().0.to_vec();
        assert_eq!(record.words[0], events.len() as u64);
        events
    });
    groups.collect()
}

#[test]
fn sample_has_the_count_at_the_last_command_of_a_member_elsewhere() {
    let mut fixture = Fixture::new();
    let (leader, mut ring) = leader(&mut fixture);
    let member = led(leader, task_event(FAULTS.0, FAULTS.1));
    let [far, near] = [(); 2].map(|()| fixture.opened(&member));
    for (vcpu, event) in [(0, leader), (0, near), (1, far)] {
        done(&mut fixture, vcpu, COMMAND_IN, event);
    }
    let mut sample = |fixture: &Fixture| {
        fixture.mark(0, 5, 1);
        let groups = groups(&mut ring);
        assert_eq!(groups.len(), 1);
        let ids: Vec<_> = groups[0].iter().map(|event| event[1]).collect();
        assert_eq!(ids, [leader, far, near]);
        groups[0].iter().map(|event| event[0]).collect::<Vec<_>>()
    };
    assert_eq!(sample(&fixture), [1, 0, 0]);
    fixture.host.work(thread(1), 10, 4);
    fixture.host.work(thread(0), 3, 4);
    assert_eq!(sample(&fixture), [2, 0, 3], "only the count of the member on this vCPU is current");
    assert_eq!(fixture.value(1, far), 10);
    assert_eq!(sample(&fixture), [3, 10, 3]);
    fixture.host.work(thread(1), 10, 4);
    assert_eq!(fixture.value(0, far), 20, "any vCPU reads the current count");
    assert_eq!(sample(&fixture), [4, 20, 3]);
    fixture.host.work(thread(1), 10, 4);
    done(&mut fixture, 1, COMMAND_OUT, far);
    assert_eq!(sample(&fixture), [5, 30, 3], "the count is that at `COMMAND_OUT`");
    done(&mut fixture, 0, COMMAND_IN, far);
    fixture.host.work(thread(0), 2, 4);
    assert_eq!(sample(&fixture), [6, 32, 5], "both members are on this vCPU now");
}

#[test]
fn sample_has_the_zero_of_a_member_that_was_reset_elsewhere() {
    let mut fixture = Fixture::new();
    let (leader, mut ring) = leader(&mut fixture);
    let member = fixture.opened(&led(leader, task_event(FAULTS.0, FAULTS.1)));
    done(&mut fixture, 0, COMMAND_IN, leader);
    done(&mut fixture, 1, COMMAND_IN, member);
    fixture.host.work(thread(1), 10, 4);
    assert_eq!(done(&mut fixture, 1, COMMAND_RESET, member).value.get(), 0);
    fixture.mark(0, 5, 1);
    assert_eq!(groups(&mut ring), [[[1, leader, 0], [0, member, 0]]]);
}

#[test]
fn sample_has_the_losses_of_a_member_scheduled_out_elsewhere() {
    let mut fixture = Fixture::new();
    let (leader, mut ring) = leader(&mut fixture);
    // The member has no ring, so each of its overflows is lost. The device finds these overflows when the member is
    // scheduled out.
    let member = fixture.opened(&led(leader, task_event(CYCLES.0, CYCLES.1)).period(100).engine(ENGINE_EXIT));
    done(&mut fixture, 0, COMMAND_IN, leader);
    done(&mut fixture, 1, COMMAND_IN, member);
    fixture.vcpus.leave(1, ExitReason::Mmio, &mut At(1));
    // The counter overflows after the notification's exit, so the device finds the overflows when it executes the
    // command.
    fixture.host.work(thread(1), 250, 4);
    fixture.queues[3].request(command(COMMAND_OUT, member).as_bytes(), size_of::<Reply>());
    fixture.vcpus.kick(1, QUEUE_VCPU + 1);
    let lost = fixture.read(0, member).lost.get();
    assert_eq!(lost, 2);
    fixture.mark(0, 5, 1);
    assert_eq!(groups(&mut ring), [[[1, leader, 0], [250, member, lost]]]);
}

#[test]
fn sample_has_the_marks_that_a_member_elsewhere_has_counted() {
    let mut fixture = Fixture::new();
    let (leader, mut ring) = leader(&mut fixture);
    let member = fixture.opened(&led(leader, task_event(KIND_MARK, 6)).period(2));
    // The member writes to another event's ring. If the member had its own ring, the device would update that ring's
    // metadata page at each mark.
    let other = fixture.opened(&task_event(KIND_TSC, 0));
    let mut records = fixture.map(other, 1);
    fixture.redirect(member, other).expect("redirected");
    done(&mut fixture, 0, COMMAND_IN, leader);
    done(&mut fixture, 1, COMMAND_IN, member);
    (0..5).for_each(|_| fixture.mark(1, 6, 1));
    assert_eq!(records.raw().len(), 2);
    fixture.mark(0, 5, 1);
    assert_eq!(groups(&mut ring), [[[1, leader, 0], [5, member, 0]]]);
}
