//! How persistent events start, live and end, and which permissions apply to them.

mod attaching;
mod detaching;
mod histories;
mod listing;
mod operators;
mod resets;
mod windows;

use vm_memory::GuestMemoryMmap;
use vpmu::Persist;
use vpmu::abi::*;
use vpmu::source::Rate;
use vpmu_testkit::{Fields, Fixture, Reader, SAMPLE, WINDOW, open_of};

/// Returns a reader of the ring that starts with page `first` of the window.
pub(crate) fn reader(window: &GuestMemoryMmap, first: u32, data: u32) -> Reader {
    let pages: Vec<u64> = (first..=first + data).map(|page| WINDOW + u64::from(page) * PAGE_SIZE as u64).collect();
    Reader::new(window, &pages)
}

/// Returns an operator's request for an event that samples with period 1. Its samples have the fields of `sampled`,
/// and its ring has four data pages.
pub(crate) fn asked(event: &str, vcpu: u32) -> Persist {
    Persist {
        name: Some("recorder".to_owned()),
        event: event.to_owned(),
        vcpu,
        rate: Some(Rate::Period(1)),
        sample_type: 0x1_03c7,
        pages: 4,
    }
}

/// Returns the words of each sample in an event's history: the header, IDENTIFIER, IP, TID, TIME, ID, STREAM_ID, CPU
/// and PERIOD.
pub(crate) fn samples(fixture: &Fixture, event: u64) -> Vec<Vec<u64>> {
    let history = fixture.vpmu.history(event).expect("a history");
    let words = |record: &[u8]| -> Vec<u64> {
        let words = record.chunks(8);
        words.map(|word| u64::from_le_bytes(word.try_into().expect("whole"))).collect()
    };
    history.iter().map(words).filter(|words| words[0] & 0xffff_ffff == SAMPLE).collect()
}

/// A request for an enabled event that samples every mark with value 5 on a vCPU.
pub(crate) fn marks(vcpu: u32) -> OpenRequest {
    open_of(KIND_MARK, 5, vcpu).sampled(1).flags(OPEN_ENABLED)
}

/// The name in an entry.
pub(crate) fn name(event: &PersistentEvent) -> String {
    let text = String::from_utf8(event.name.to_vec()).expect("letters");
    text.trim_end_matches('\0').to_owned()
}
