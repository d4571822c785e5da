//! Links that are added and removed while the vCPU makes marks.

use std::sync::Barrier;
use std::thread;

use vpmu::ExitReason;
use vpmu::abi::*;
use vpmu_testkit::{At, Fixture, header};
use zerocopy::{FromBytes, IntoBytes};

use super::{START, STOP, paused, trigger};

const ROUNDS: u64 = 2000;

#[test]
fn links_change_while_marks_are_placed() {
    let mut fixture = Fixture::new();
    // This event keeps its links, while links of other events are added and removed.
    let steady = fixture.opened(&paused(KIND_MARK, 5));
    let starter = trigger(&mut fixture, START, 1);
    let stopper = trigger(&mut fixture, STOP, 1);
    fixture.link(starter, steady, LINK_STARTER).expect("linked");
    fixture.link(stopper, steady, LINK_STOPPER).expect("linked");
    let start = &Barrier::new(2);
    let Fixture { vpmu, vcpus, queues, .. } = &mut fixture;
    let (vpmu, vcpus, control) = (&*vpmu, &*vcpus, &mut queues[0]);
    let mark = |value| {
        vcpus.leave(0, ExitReason::Mmio, &mut At(1));
        vcpus.mark(0, value, &mut At(1));
        vcpus.enter(0);
    };
    thread::scope(|scope| {
        scope.spawn(move || {
            start.wait();
            for _ in 0..ROUNDS {
                for value in [5, START, 5, 5, STOP, 5] {
                    mark(value);
                }
            }
        });
        scope.spawn(move || {
            let mut ask = move |request: &[u8], room| {
                control.request(request, room);
                let _ = vpmu.notify(QUEUE_CONTROL);
                control.answer().expect("answered immediately")
            };
            start.wait();
            for round in 0..ROUNDS {
                let request = paused(KIND_MARK, 5);
                let answer = ask(request.as_bytes(), size_of::<OpenReply>());
                let reply = OpenReply::read_from_bytes(&answer).expect("a reply");
                assert_eq!(reply.status.get(), 0);
                let target = reply.id.get();
                for (event, role) in [(starter, LINK_STARTER), (stopper, LINK_STOPPER)] {
                    let link = LinkRequest {
                        header: header(CONTROL_LINK, event),
                        target: target.into(),
                        role: role.into(),
                        reserved: 0.into(),
                    };
                    let answer = ask(link.as_bytes(), size_of::<ControlReply>());
                    let reply = ControlReply::read_from_bytes(&answer).expect("a reply");
                    assert_eq!(reply.status.get(), 0, "round {round}");
                }
                let close = header(CONTROL_CLOSE, target);
                let answer = ask(close.as_bytes(), size_of::<ControlReply>());
                let reply = ControlReply::read_from_bytes(&answer).expect("a reply");
                assert_eq!(reply.status.get(), 0);
            }
        });
    });
    assert_eq!(vpmu.metrics().marks, 6 * ROUNDS);
    assert_eq!(fixture.value(0, steady), 2 * ROUNDS);
}
