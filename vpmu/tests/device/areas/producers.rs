//! Traces of the VMM's producers: how a guest opens them and reads their data.

use std::sync::Arc;

use vm_memory::{Bytes, GuestAddress};
use vpmu::abi::*;
use vpmu::{AuxError, AuxPlace, AuxProducer, Engines, Error};
use vpmu_testkit::{ALL_FEATURES, Fields, Fixture, header, limits, map_aux, open_of};

use super::{AUX, ITRACE_START, Traced, chunks, exits, pages, trace};

const PAGE: u64 = 4096;
const TRUNCATED: u64 = 1;
const OVERWRITE: u64 = 2;
const PARTIAL: u64 = 4;

const WATCHDOG: AuxProducer =
    AuxProducer { name: "watchdog", counts: "frames of 64 bytes, one for each watchdog check", format: 130 };
const NETWORK: AuxProducer = AuxProducer { name: "net-trace", format: 131, ..WATCHDOG };

fn fixture() -> Fixture {
    Fixture::producing(&[WATCHDOG, NETWORK])
}

fn request(vcpu: u32) -> OpenRequest {
    open_of(KIND_VMM_TRACE, 0, vcpu)
}

/// Opens and enables a trace of the watchdog on vCPU 0, with an area of 2 pages. Also returns the area's address.
fn traced(fixture: &mut Fixture, flags: u32) -> (Traced, u64) {
    let traced = Traced::new(fixture, &request(0), 2, flags);
    fixture.command(0, COMMAND_ENABLE, traced.event);
    // The area was allocated last. Its two pages are followed by an unused page.
    let area = fixture.next_ring - 3 * PAGE;
    (traced, area)
}

/// Returns `count` words of the area, starting at `position`.
fn words(fixture: &Fixture, area: u64, position: u64, count: u64) -> Vec<u64> {
    (0..count)
        .map(|word| {
            let at = area + (position + word * 8) % (2 * PAGE);
            fixture.memory.read_obj(GuestAddress(at)).expect("in memory")
        })
        .collect()
}

/// `bytes` of data, each word `value`.
fn filled(value: u64, bytes: u64) -> Vec<u64> {
    vec![value; usize::try_from(bytes / 8).expect("small")]
}

fn write(fixture: &Fixture, event: u64, value: u64, bytes: u64) -> Result<(), AuxError> {
    let mut writer = fixture.vpmu.aux_begin(event)?;
    writer.put(&filled(value, bytes))?;
    writer.end(bytes)
}

#[test]
fn producer_is_listed_and_opened_by_its_number() {
    let mut fixture = fixture();
    let listed: Vec<_> = fixture.catalogue().into_iter().filter(|entry| entry.kind.get() == KIND_VMM_TRACE).collect();
    for (entry, (number, producer)) in listed.iter().zip([(0, WATCHDOG), (1, NETWORK)]) {
        assert!(entry.name.starts_with(producer.name.as_bytes()));
        assert!(entry.counts.starts_with(producer.counts.as_bytes()));
        assert!(entry.source.starts_with(b"vmm\0") && entry.unit.starts_with(b"bytes\0"));
        let flags = CATALOGUE_AUX | CATALOGUE_GUEST_ONLY | u32::from(producer.format) << CATALOGUE_FORMAT_SHIFT;
        assert_eq!((entry.config.get(), entry.flags.get()), (number, flags));
    }
    assert_eq!(listed.len(), 2);
    let open = |fixture: &mut Fixture, number| fixture.open(&open_of(KIND_VMM_TRACE, number, 0));
    assert_eq!(open(&mut fixture, 2), Err(libc::ENOENT));
    open(&mut fixture, 1).expect("open");
    let sampling = request(0).period(1);
    assert_eq!(fixture.open(&sampling), Err(libc::EOPNOTSUPP));
    let excluding = request(0).flags(OPEN_EXCLUDE_USER);
    assert_eq!(fixture.open(&excluding), Err(libc::EOPNOTSUPP));
    let event = fixture.opened(&request(0));
    let area = pages(&mut fixture, 2);
    let driven = map_aux(&mut fixture, event, MAP_DRIVER_OWNED | MAP_WRITABLE, &area);
    assert_eq!(driven, Err(libc::EOPNOTSUPP), "an area that the driver owns");
    // Without producers, this kind does not exist.
    let refused = Fixture::new().open(&request(0));
    assert_eq!(refused, Err(libc::ENOENT));
}

#[test]
fn invalid_producers_are_refused() {
    let long = "a-name-that-is-longer-than-thirty-nine-bytes";
    for wrong in [
        AuxProducer { name: "", ..WATCHDOG },
        AuxProducer { name: long, ..WATCHDOG },
        AuxProducer { format: 127, ..WATCHDOG },
        WATCHDOG,
    ] {
        let fixture = Fixture::bare(Engines::Auto, limits(), None);
        let vpmu = Arc::into_inner(fixture.vpmu).expect("the only reference");
        let made = vpmu.with_aux_producers(vec![WATCHDOG, wrong]);
        assert!(matches!(made, Err(Error::Producer(name)) if name == wrong.name));
    }
}

#[test]
fn second_list_of_producers_is_refused() {
    let fixture = Fixture::bare(Engines::Auto, limits(), None);
    let vpmu = Arc::into_inner(fixture.vpmu).expect("the only reference");
    let vpmu = vpmu.with_aux_producers(vec![WATCHDOG]).expect("the first");
    let other = AuxProducer { name: "other", ..WATCHDOG };
    let made = vpmu.with_aux_producers(vec![other]);
    assert!(matches!(made, Err(Error::ProducersTwice)));
}

#[test]
fn span_has_the_size_that_its_writer_ended_with() {
    let mut fixture = fixture();
    let (mut traced, area) = traced(&mut fixture, MAP_WRITABLE);
    let event = traced.event;
    assert_eq!(fixture.vpmu.aux_traces(0, 0), [event]);
    let vpmu = Arc::clone(&fixture.vpmu);
    let mut writer = vpmu.aux_begin(event).expect("begun");
    let place = |position, room| Some(AuxPlace { position, room });
    assert_eq!(writer.get(), place(0, 2 * PAGE));
    writer.put(&filled(7, 128)).expect("room");
    writer.skip(64).expect("room");
    writer.put(&filled(8, 64)).expect("room");
    writer.put(&filled(9, 64)).expect("room");
    assert_eq!(writer.written(), 320);
    assert_eq!(writer.get(), place(320, 2 * PAGE - 320));
    assert_eq!(traced.area.head(), 0, "nothing is published before the end");
    // Commands publish the data of the device's own traces, but not the data that a producer is still writing.
    assert_eq!(fixture.read(0, event).value.get(), 0);
    assert_eq!(traced.area.head(), 0);
    writer.end(256).expect("ended");
    assert_eq!(traced.area.head(), 256);
    let raw = traced.ring.raw();
    assert_eq!(raw[0].kind, ITRACE_START);
    assert_eq!((raw[1].kind, raw.len()), (AUX, 2));
    assert_eq!(chunks(&raw), [[0, 256, 0]]);
    let shown = [filled(7, 128), filled(0, 64), filled(8, 64)].concat();
    assert_eq!(words(&fixture, area, 0, 32), shown);
    assert_eq!(fixture.read(0, event).value.get(), 256, "bytes counted");
    // The next write overwrites discarded data.
    write(&fixture, event, 10, 64).expect("written");
    assert_eq!(words(&fixture, area, 256, 8), filled(10, 64));
    assert_eq!(traced.chunks(), [[256, 64, 0]]);
    assert!(traced.area.is_alone(&fixture));
}

/// VPMU-D-6.8-4.
#[test]
fn unread_data_is_not_overwritten() {
    let mut fixture = fixture();
    let (mut traced, area) = traced(&mut fixture, MAP_WRITABLE);
    let event = traced.event;
    write(&fixture, event, 1, 6000).expect("room");
    let mut writer = fixture.vpmu.aux_begin(event).expect("begun");
    assert_eq!(writer.get().map(|place| place.room), Some(2192));
    let refused = writer.put(&filled(2, 2200));
    assert!(matches!(refused, Err(AuxError::NoRoom)), "a write beyond the room returns {refused:?}");
    writer.lose(2200);
    writer.put(&filled(3, 2192)).expect("less fits");
    assert!(matches!(writer.skip(8), Err(AuxError::NoRoom)));
    // The guest makes room during the write.
    traced.area.set_tail(4096);
    writer.put(&filled(4, 4096)).expect("room again");
    writer.end(2192 + 4096).expect("ended");
    let size = 2192 + 4096;
    let flags = TRUNCATED | PARTIAL;
    assert_eq!(traced.chunks(), [[0, 6000, 0], [6000, size, flags]]);
    assert_eq!(words(&fixture, area, 4096, 1), [1], "the first word that the reader has not consumed");
    assert_eq!(words(&fixture, area, 6000, 274), filled(3, 2192));
    assert_eq!(words(&fixture, area, 2 * PAGE, 512), filled(4, 4096));
    let reply = fixture.read(0, event);
    assert_eq!(reply.lost.get(), 2200);
    assert_eq!(reply.value.get(), 6000 + size + 2200);
    // If the tail is outside the area, the area counts as full.
    traced.area.set_tail(u64::MAX / 2);
    let mut writer = fixture.vpmu.aux_begin(event).expect("begun");
    assert_eq!(writer.get().map(|place| place.room), Some(0));
    assert!(matches!(writer.put(&[5]), Err(AuxError::NoRoom)));
    writer.end(0).expect("ended");
    assert_eq!(traced.area.head(), 6000 + size);
    assert!(traced.area.is_alone(&fixture));
}

#[test]
fn overwritten_snapshot_area_flags_its_spans() {
    let mut fixture = fixture();
    let (mut traced, area) = traced(&mut fixture, 0);
    for value in 0..5 {
        write(&fixture, traced.event, value, PAGE).expect("always room");
    }
    assert_eq!(words(&fixture, area, 4 * PAGE, 512), filled(4, PAGE));
    let reported = (0..5).map(|n| [n * PAGE, PAGE, OVERWRITE]);
    assert_eq!(traced.chunks(), reported.collect::<Vec<_>>());
}

/// VPMU-D-6.8-11.
#[test]
fn second_writer_is_refused_until_the_first_ends() {
    let mut fixture = fixture();
    let (mut traced, _) = traced(&mut fixture, MAP_WRITABLE);
    let event = traced.event;
    // The device's own trace writes to the same area.
    let exit_trace = fixture.opened(&trace());
    fixture.redirect(exit_trace, event).expect("redirected");
    fixture.command(0, COMMAND_ENABLE, exit_trace);
    exits(&fixture, 0, 1);
    let mut writer = fixture.vpmu.aux_begin(event).expect("begun");
    let begun = writer.get().expect("a place").position;
    assert_eq!(begun, 128, "the write begins after a sync packet and an exit packet");
    assert!(matches!(fixture.vpmu.aux_begin(event), Err(AuxError::Nested)));
    exits(&fixture, 0, 3);
    assert_eq!(writer.get().expect("a place").position, begun);
    writer.put(&filled(5, 64)).expect("room");
    writer.end(64).expect("ended");
    let lost = fixture.read(0, exit_trace).lost.get();
    assert_eq!(lost, 3 * 64, "packets made during the write are lost");
    exits(&fixture, 0, 1);
    assert_eq!(fixture.read(0, exit_trace).lost.get(), lost, "nothing is lost after the write");
    let reported = traced.chunks();
    assert_eq!(reported[..2], [[0, 128, 0], [128, 64, PARTIAL]]);
    write(&fixture, event, 6, 64).expect("the next write may begin");
}

/// VPMU-D-6.8-11.
#[test]
fn writer_without_an_end_publishes_nothing() {
    let mut fixture = fixture();
    let (mut traced, _) = traced(&mut fixture, MAP_WRITABLE);
    let event = traced.event;
    let mut writer = fixture.vpmu.aux_begin(event).expect("begun");
    writer.put(&filled(1, 64)).expect("room");
    drop(writer);
    for size in [72, 4] {
        let mut writer = fixture.vpmu.aux_begin(event).expect("begun");
        writer.put(&filled(2, 64)).expect("room");
        assert!(matches!(writer.skip(4), Err(AuxError::Words(4))));
        let ended = writer.end(size);
        let refused = matches!(ended, Err(AuxError::NoRoom | AuxError::Words(4)));
        assert!(refused, "a write with a wrong size ends with {ended:?}");
    }
    assert_eq!((traced.area.head(), traced.chunks()), (0, vec![]));
    write(&fixture, event, 3, 64).expect("written");
    assert_eq!(traced.chunks(), [[0, 64, 0]]);
}

#[test]
fn only_active_producer_traces_are_written() {
    let mut fixture = fixture();
    let (traced, _) = traced(&mut fixture, MAP_WRITABLE);
    let begin = |fixture: &Fixture, event| fixture.vpmu.aux_begin(event).map(drop);
    let exit_trace = fixture.opened(&trace());
    for other in [exit_trace, 77] {
        assert!(matches!(begin(&fixture, other), Err(AuxError::NoEvent(id)) if id == other));
    }
    let bare = fixture.opened(&request(1));
    assert!(matches!(begin(&fixture, bare), Err(AuxError::Inactive(id)) if id == bare));
    fixture.command(1, COMMAND_ENABLE, bare);
    assert!(matches!(begin(&fixture, bare), Err(AuxError::NoArea)));
    assert_eq!(fixture.vpmu.aux_traces(0, 1), [bare]);
    assert_eq!(fixture.vpmu.aux_traces(1, 0), [0; 0]);
    fixture.command(0, COMMAND_DISABLE, traced.event);
    assert!(matches!(begin(&fixture, traced.event), Err(AuxError::Inactive(_))));
    assert_eq!(fixture.vpmu.aux_traces(0, 0), [0; 0]);
    // If a trace is opened paused, a producer can write to it only after the trace is resumed.
    let paused = fixture.opened(&request(0).flags(OPEN_ENABLED | OPEN_AUX_START_PAUSED));
    assert!(matches!(begin(&fixture, paused), Err(AuxError::Inactive(_))));
    assert_eq!(fixture.vpmu.aux_traces(0, 0), [0; 0]);
}

#[test]
fn unmapped_area_is_not_written_by_a_producer() {
    let unmap = |fixture: &mut Fixture, event: u64| {
        let header = header(CONTROL_UNMAP_AUX, event);
        fixture.control(&header).expect("unmapped");
    };
    let close = |fixture: &mut Fixture, event: u64| fixture.close(event).expect("closed");
    let reset = |fixture: &mut Fixture, _: u64| fixture.vpmu.reset();
    for take in [unmap, close, reset as fn(&mut Fixture, u64)] {
        let mut fixture = fixture();
        let (traced, area) = traced(&mut fixture, MAP_WRITABLE);
        let vpmu = Arc::clone(&fixture.vpmu);
        let mut writer = vpmu.aux_begin(traced.event).expect("begun");
        writer.put(&filled(1, 64)).expect("room");
        take(&mut fixture, traced.event);
        assert_eq!(writer.get(), None);
        assert!(matches!(writer.put(&filled(2, 64)), Err(AuxError::NoArea)));
        let ended = writer.end(64);
        let gone = matches!(ended, Err(AuxError::NoArea | AuxError::NoEvent(_)));
        assert!(gone, "a write to a removed area ends with {ended:?}");
        assert_eq!(traced.area.head(), 0);
        assert_eq!(words(&fixture, area, 64, 8), filled(0, 64));
        // A new area can be written.
        fixture.activate(ALL_FEATURES);
        let next = Traced::new(&mut fixture, &request(0), 2, MAP_WRITABLE);
        fixture.command(0, COMMAND_ENABLE, next.event);
        write(&fixture, next.event, 3, 64).expect("written");
        assert_eq!(next.area.head(), 64);
    }
}

#[test]
fn watermark_and_first_loss_wake_the_reader() {
    let mut fixture = fixture();
    let (traced, _) = traced(&mut fixture, MAP_WRITABLE);
    let woken = |fixture: &Fixture| fixture.vpmu.metrics().wakeups;
    let before = woken(&fixture);
    write(&fixture, traced.event, 1, PAGE - 8).expect("room");
    assert_eq!(woken(&fixture), before, "less than half of the area is full");
    write(&fixture, traced.event, 1, 8).expect("room");
    assert_eq!(woken(&fixture), before + 1, "half of the area is full");
    write(&fixture, traced.event, 1, PAGE - 8).expect("room");
    for round in 0..2 {
        let refused = write(&fixture, traced.event, 1, 16);
        assert!(matches!(refused, Err(AuxError::NoRoom)), "a write beyond the room returns {refused:?}");
        let mut writer = fixture.vpmu.aux_begin(traced.event).expect("begun");
        assert!(matches!(writer.put(&[0; 2]), Err(AuxError::NoRoom)));
        writer.end(0).expect("ended");
        assert_eq!(woken(&fixture), before + 2, "round {round}: one wakeup");
    }
    fixture.post_notice(0, 16);
    let reported = Some((NOTICE_WAKEUP, traced.event, 2));
    assert_eq!(fixture.counted_notice(), reported);
}
