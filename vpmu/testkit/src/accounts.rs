//! Checks that a device accounts for everything that a new event produces, whatever else the device does. Tests use them
//! on a new device, fuzz targets after all other operations.

use vpmu::ExitReason;
use vpmu::abi::*;

use crate::area::{AreaReader, Packet, map_aux};
use crate::fake_host::At;
use crate::fixture::Fixture;
use crate::reader::{LOST, Reader, SAMPLE, THROTTLE, UNTHROTTLE};
use crate::requests::{Fields, header, open_of};

/// Value of the marks. No other event of a test or fuzz target counts only this value.
const VALUE: u32 = 0xacc0;
/// Marks between two overflows.
const PERIOD: u64 = 3;

/// The sum of an event's overflows, or of a trace's bytes, and its parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Accounted {
    pub happened: u64,
    pub written: u64,
    pub lost: u64,
}

/// Places marks on `vcpu` while a new event samples them: with a ring of these pages, with a paused ring, and without a
/// ring. Checks that each overflow is written, lost or throttled. Returns `None` if the device refuses the event.
pub fn account_for_samples(fixture: &mut Fixture, vcpu: u32, rings: &[[u64; 2]]) -> Option<Accounted> {
    let request = open_of(KIND_MARK, VALUE.into(), vcpu).sampled(PERIOD).flags(OPEN_ENABLED);
    let event = fixture.open(&request).ok()?;
    let throttled = fixture.vpmu.metrics().samples_throttled;
    let (mut marks, mut written, mut reported) = (0, 0, 0);
    let mut place = |fixture: &mut Fixture, count: u64| {
        (0..count).for_each(|ip| fixture.mark(vcpu, VALUE, ip));
        marks += count;
    };
    for pages in rings {
        let mapped = fixture.map_pages(event, MAP_WRITABLE, pages).is_ok();
        place(fixture, 10);
        if mapped {
            fixture.pause(event, 1).expect("paused");
            place(fixture, 7);
            fixture.pause(event, 0).expect("resumed");
            place(fixture, 8);
            for record in Reader::new(&fixture.memory, pages).raw() {
                let (id, stream) = match record.kind {
                    SAMPLE => {
                        written += 1;
                        assert_eq!(record.words.len(), 8, "a sample has every field");
                        (record.words[0], record.words[5])
                    }
                    LOST => {
                        reported += record.words[1];
                        (record.words[0], record.words[0])
                    }
                    THROTTLE | UNTHROTTLE => (record.words[1], record.words[2]),
                    other => panic!("unexpected record of type {other}"),
                };
                assert_eq!((id, stream), (event, event), "a record of another event");
            }
            fixture.unmap(event).expect("unmapped");
        }
        place(fixture, 5);
    }
    let lost = fixture.read(vcpu, event).lost.get();
    assert_eq!(fixture.value(vcpu, event), marks, "every mark is counted");
    fixture.close(event).expect("closed");
    let overflows = Accounted { happened: marks / PERIOD, written, lost };
    // Another event can be throttled at the same marks.
    let throttled = fixture.vpmu.metrics().samples_throttled - throttled;
    let accounted = written + lost;
    assert!(reported <= lost, "records report {reported} lost samples: {overflows:?}");
    assert!(accounted <= overflows.happened, "{overflows:?}");
    assert!(overflows.happened <= accounted + throttled, "{overflows:?}, at most {throttled} throttled");
    Some(overflows)
}

/// Makes `vcpu` exit while a new trace records the exits: with areas of these pages, and without an area. Checks that the
/// packets are whole and numbered, that AUX records report each byte once, and that each byte is written or lost. Returns
/// `None` if the device refuses the trace.
pub fn account_for_exits(fixture: &mut Fixture, vcpu: u32, ring: &[u64], areas: &[u64]) -> Option<Accounted> {
    const AUX: u64 = 11;
    // The commands below are exits for another reason.
    let request = open_of(KIND_EXIT_TRACE, EXIT_IO, vcpu).aux_watermark(640).flags(OPEN_ENABLED);
    let event = fixture.open(&request).ok()?;
    let mapped = fixture.map_pages(event, MAP_WRITABLE, ring).is_ok();
    let mut records = Reader::new(&fixture.memory, ring);
    let (mut exits, mut traced, mut written) = (0, 0, 0);
    let mut exit = |fixture: &mut Fixture, count: u64| {
        (0..count).for_each(|ip| fixture.exit(vcpu, ExitReason::Io, &mut At(ip)));
        exits += count;
    };
    for &page in areas {
        let mapped = mapped && map_aux(fixture, event, MAP_WRITABLE, &[page]).is_ok();
        let mut area = AreaReader::new(fixture, ring[0], vec![page]);
        let mut packets = Vec::new();
        // The reader takes some packets first, so that the area is full in the middle of its page. Then the only sync
        // packet after the loss is the one that reports it.
        for count in [30, 70, 10] {
            exit(fixture, count);
            if mapped {
                packets.extend(area.take());
            }
        }
        if mapped {
            fixture.control(&header(CONTROL_UNMAP_AUX, event)).expect("unmapped");
            packets.extend(area.take());
            traced += numbered(event, &packets);
            written += area.head();
            let chunks = records.raw().into_iter().filter(|record| record.kind == AUX);
            let reported = chunks.fold(0, |reported, record| {
                assert_eq!(record.words[0], reported, "every byte is reported once");
                reported + record.words[1]
            });
            assert_eq!(reported, area.head(), "AUX records report every byte");
        }
        exit(fixture, 5);
    }
    let reply = fixture.read(vcpu, event);
    fixture.close(event).expect("closed");
    let bytes = Accounted { happened: reply.value.get(), written, lost: reply.lost.get() };
    assert_eq!(bytes.happened, bytes.written + bytes.lost, "{bytes:?}");
    let packet = size_of::<ExitPacket>() as u64;
    assert!(traced * packet <= written && (exits - traced) * packet <= bytes.lost, "{traced} of {exits}: {bytes:?}");
    Some(bytes)
}

/// Checks that the packets of an exit trace are numbered. Returns how many exits they have.
fn numbered(trace: u64, packets: &[Packet]) -> u64 {
    let (mut exits, mut next) = (0, None);
    for packet in packets {
        match packet {
            Packet::Sync(sync) => {
                assert_eq!(sync.event.get(), trace, "a packet of another trace");
                assert!(next.is_none_or(|next| sync.sequence.get() >= next), "{sync:?} after packet {next:?}");
                next = Some(sync.sequence.get());
            }
            Packet::Exit(exit) => {
                assert_eq!(Some(exit.sequence.get()), next, "every gap has a sync packet");
                next = Some(exit.sequence.get() + 1);
                exits += 1;
            }
            Packet::Sample(sample) => panic!("{sample:?} in an exit trace"),
        }
    }
    exits
}
