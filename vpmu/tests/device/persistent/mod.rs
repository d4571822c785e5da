//! How persistent events start, live and end, and which permissions apply to them.

mod attaching;
mod detaching;
mod histories;
mod listing;
mod operators;
mod resets;
mod windows;

use vm_memory::{GuestAddress, GuestMemoryMmap};
use vpmu::abi::*;
use vpmu::source::Rate;
use vpmu::{Engines, Limits, Persist};
use zerocopy::{FromBytes, IntoBytes};

use crate::fixture::{ALL_FEATURES, Errno, Fixture, VCPUS, limits, open_of, sampling};
use crate::reader::{Reader, SAMPLE};

/// Guest physical address of the window, above guest RAM.
pub(crate) const WINDOW: u64 = 0xd010_0000;
/// Features of a driver that supports the window.
pub(crate) const WINDOW_FEATURES: u64 = ALL_FEATURES | 1 << F_WINDOW;

/// Memory for a window of `pages` pages.
pub(crate) fn window(pages: usize) -> GuestMemoryMmap {
    let range = (GuestAddress(WINDOW), pages * PAGE_SIZE);
    GuestMemoryMmap::from_ranges(&[range]).expect("memory")
}

impl Fixture {
    /// Returns a device that has a window and does not throttle, and a driver that supports the window.
    pub(crate) fn windowed(window: &GuestMemoryMmap) -> Self {
        let limits = limits().with(|limits| limits.max_sample_rate = u32::MAX);
        Self::windowed_with(limits, window)
    }

    pub(crate) fn windowed_with(limits: Limits, window: &GuestMemoryMmap) -> Self {
        let mut fixture = Self::bare(Engines::Auto, limits, Some(window));
        (0..VCPUS).for_each(|vcpu| fixture.attach(vcpu));
        fixture.activate(WINDOW_FEATURES);
        fixture
    }

    pub(crate) fn detach(&mut self, event: u64, name: &str) -> Result<(), Errno> {
        self.detach_raw(event, name.as_bytes())
    }

    pub(crate) fn detach_raw(&mut self, event: u64, name: &[u8]) -> Result<(), Errno> {
        let mut request = DetachRequest { header: Self::header(CONTROL_DETACH, event), ..DetachRequest::default() };
        request.name[..name.len()].copy_from_slice(name);
        self.control(&request)
    }

    pub(crate) fn reattach(&mut self, event: u64) -> Result<(), Errno> {
        self.control(&Self::header(CONTROL_ATTACH, event))
    }

    /// Every persistent event.
    pub(crate) fn listed(&mut self) -> Vec<PersistentEvent> {
        self.list(0, u32::MAX, 0x1_0000).expect("a list")
    }

    /// Lists at most `count` persistent events whose ids are greater than `after`. The buffer for the answer has `room`
    /// bytes.
    pub(crate) fn list(&mut self, after: u64, count: u32, room: usize) -> Result<Vec<PersistentEvent>, Errno> {
        let request = PersistentRequest {
            header: Self::header(CONTROL_PERSISTENT, 0),
            after: after.into(),
            count: count.into(),
            reserved: 0.into(),
        };
        let answer = self.control_bytes(request.as_bytes(), room);
        let (reply, rest) = ControlReply::read_from_prefix(&answer).expect("a reply");
        let entries: Vec<_> = rest
            .chunks(size_of::<PersistentEvent>())
            .map(|entry| PersistentEvent::read_from_bytes(entry).expect("whole"))
            .collect();
        assert_eq!(entries.len(), reply.value.get() as usize);
        match reply.status.get() {
            0 => Ok(entries),
            errno => Err(Errno::try_from(errno).expect("an errno")),
        }
    }

    /// Maps a ring with `data` data pages in the window. Returns the number of the ring's first page.
    pub(crate) fn map_window(&mut self, event: u64, data: u32, flags: u32) -> Result<u32, Errno> {
        let request = MapRequest {
            header: Self::header(CONTROL_MAP, event),
            pages: (data + 1).into(),
            flags: (MAP_WINDOW | flags).into(),
        };
        let answer = self.control_bytes(request.as_bytes(), size_of::<ControlReply>());
        let reply = ControlReply::read_from_bytes(&answer).expect("a reply");
        match reply.status.get() {
            0 => Ok(reply.value.get()),
            errno => Err(Errno::try_from(errno).expect("an errno")),
        }
    }
}

/// Returns a reader of the ring that starts with page `first` of the window.
pub(crate) fn reader(window: &GuestMemoryMmap, first: u32, data: u32) -> Reader {
    let pages: Vec<u64> = (first..=first + data).map(|page| WINDOW + u64::from(page) * PAGE_SIZE as u64).collect();
    Reader::new(window, &pages)
}

/// Returns an operator's request for an event that samples with period 1. Its samples have the fields of [`sampling`],
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
    OpenRequest { flags: OPEN_ENABLED.into(), ..sampling(open_of(KIND_MARK, 5, vcpu), 1) }
}

/// The name in an entry.
pub(crate) fn name(event: &PersistentEvent) -> String {
    let text = String::from_utf8(event.name.to_vec()).expect("letters");
    text.trim_end_matches('\0').to_owned()
}
