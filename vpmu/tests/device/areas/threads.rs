//! Areas that are mapped and unmapped while vCPUs run on their threads.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use vm_memory::{Bytes, GuestAddress};
use vpmu::ExitReason;
use vpmu::abi::*;
use vpmu_testkit::{AreaReader, At, Fields, Fixture, VCPUS, command, header, open_of};
use zerocopy::{FromBytes, IntoBytes};

use super::pages;

const MINE: [u8; 4096] = [0xa5; 4096];

fn map_request(event: u64, area: &[u64]) -> Vec<u8> {
    let request = MapRequest {
        header: header(CONTROL_MAP_AUX, event),
        pages: u32::try_from(area.len()).expect("few").into(),
        flags: MAP_WRITABLE.into(),
    };
    let addresses = area.iter().flat_map(|page| page.to_le_bytes());
    request.as_bytes().iter().copied().chain(addresses).collect()
}

#[test]
fn area_is_not_written_after_its_unmap_while_vcpus_run() {
    let mut fixture = Fixture::new();
    let parent = OpenRequest {
        flags: OPEN_ENABLED.into(),
        // Each packet is published immediately.
        aux_watermark: 64.into(),
        ..open_of(KIND_EXIT_TRACE, EXIT_IO, CONTEXT_TASK)
    };
    let trace = fixture.opened(&parent);
    let child = fixture.opened(&parent.parent(trace));
    let metadata = fixture.next_ring;
    fixture.map(trace, 1);
    let area = pages(&mut fixture, 2);
    let reader = AreaReader::new(&fixture, metadata, area.clone());
    for (vcpu, event) in [(0, trace), (1, child)] {
        fixture.command(vcpu, COMMAND_IN, event);
    }
    let (over, made) = (AtomicBool::new(false), [const { AtomicU64::new(0) }; VCPUS as usize]);
    let mut grown = 0;
    let Fixture { vpmu, vcpus, memory, queues, .. } = &mut fixture;
    let (vpmu, vcpus) = (&*vpmu, &*vcpus);
    let mut control = |request: &[u8]| {
        queues[0].request(request, size_of::<ControlReply>());
        let _ = vpmu.notify(QUEUE_CONTROL);
        let answer = queues[0].answer().expect("answered immediately");
        let reply = ControlReply::read_from_bytes(&answer).expect("a reply");
        assert_eq!(reply.status.get(), 0);
    };
    thread::scope(|scope| {
        for (vcpu, made) in (0..).zip(&made) {
            let over = &over;
            scope.spawn(move || {
                while !over.load(Ordering::Relaxed) {
                    vcpus.leave(vcpu, ExitReason::Io, &mut At(1));
                    vcpus.enter(vcpu);
                    made.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        let exits = || made.each_ref().map(|made| made.load(Ordering::Relaxed));
        for _ in 0..100 {
            control(&map_request(trace, &area));
            while reader.head() == 0 {
                thread::yield_now();
            }
            control(header(CONTROL_UNMAP_AUX, trace).as_bytes());
            grown += reader.head();
            for &page in &area {
                let page = GuestAddress(page);
                memory.write_slice(&MINE, page).expect("in memory");
            }
            let before = exits();
            while exits().iter().zip(before).any(|(now, then)| *now < then + 3) {
                thread::yield_now();
            }
            for &page in &area {
                let mut bytes = [0; 4096];
                let page = GuestAddress(page);
                memory.read_slice(&mut bytes, page).expect("in memory");
                assert!(bytes == MINE, "the device wrote to the area after the unmap");
            }
        }
        over.store(true, Ordering::Relaxed);
    });
    let replies = [(0, trace), (1, child)].map(|(vcpu, event)| {
        let out = [command(COMMAND_OUT, event)];
        fixture.commands(vcpu, &out)[0]
    });
    let counted: u64 = replies.iter().map(|reply| reply.value.get()).sum();
    let lost: u64 = replies.iter().map(|reply| reply.lost.get()).sum();
    assert_eq!(counted, grown + lost);
}
