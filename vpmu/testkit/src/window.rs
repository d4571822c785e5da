//! A device with a window, and requests about persistent events.

use vm_memory::{GuestAddress, GuestMemoryMmap};
use vpmu::abi::*;
use vpmu::{Engines, Limits};
use zerocopy::{FromBytes, IntoBytes};

use crate::fixture::{ALL_FEATURES, Fixture, VCPUS, limits};
use crate::requests::{Errno, header, outcome, structs};

/// Guest physical address of the window, above guest RAM.
pub const WINDOW: u64 = 0xd010_0000;
/// Features of a driver that supports the window.
pub const WINDOW_FEATURES: u64 = ALL_FEATURES | 1 << F_WINDOW;

/// Memory for a window of `pages` pages.
pub fn window(pages: usize) -> GuestMemoryMmap {
    let range = (GuestAddress(WINDOW), pages * PAGE_SIZE);
    GuestMemoryMmap::from_ranges(&[range]).expect("memory")
}

impl Fixture {
    /// Returns a device that has a window and does not throttle, and a driver that supports the window.
    pub fn windowed(window: &GuestMemoryMmap) -> Self {
        let limits = limits().with(|limits| limits.max_sample_rate = u32::MAX);
        Self::windowed_with(limits, window)
    }

    pub fn windowed_with(limits: Limits, window: &GuestMemoryMmap) -> Self {
        let mut fixture = Self::bare(Engines::Auto, limits, Some(window));
        (0..VCPUS).for_each(|vcpu| fixture.attach(vcpu));
        fixture.activate(WINDOW_FEATURES);
        fixture
    }

    pub fn detach(&mut self, event: u64, name: &str) -> Result<(), Errno> {
        self.detach_raw(event, name.as_bytes())
    }

    pub fn detach_raw(&mut self, event: u64, name: &[u8]) -> Result<(), Errno> {
        let mut request = DetachRequest { header: header(CONTROL_DETACH, event), ..DetachRequest::default() };
        request.name[..name.len()].copy_from_slice(name);
        self.control(&request)
    }

    pub fn reattach(&mut self, event: u64) -> Result<(), Errno> {
        self.control(&header(CONTROL_ATTACH, event))
    }

    /// Every persistent event.
    pub fn listed(&mut self) -> Vec<PersistentEvent> {
        self.list(0, u32::MAX, 0x1_0000).expect("a list")
    }

    /// Lists at most `count` persistent events whose ids are greater than `after`. The buffer for the answer has `room`
    /// bytes.
    pub fn list(&mut self, after: u64, count: u32, room: usize) -> Result<Vec<PersistentEvent>, Errno> {
        let request = PersistentRequest {
            header: header(CONTROL_PERSISTENT, 0),
            after: after.into(),
            count: count.into(),
            reserved: 0.into(),
        };
        let answer = self.control_bytes(request.as_bytes(), room);
        let (reply, rest) = ControlReply::read_from_prefix(&answer).expect("a reply");
        let entries: Vec<PersistentEvent> = structs(rest);
        assert_eq!(entries.len(), reply.value.get() as usize);
        outcome(reply.status.get()).map(|()| entries)
    }

    /// Maps a ring with `data` data pages in the window. Returns the number of the ring's first page.
    pub fn map_window(&mut self, event: u64, data: u32, flags: u32) -> Result<u32, Errno> {
        let request = MapRequest {
            header: header(CONTROL_MAP, event),
            pages: (data + 1).into(),
            flags: (MAP_WINDOW | flags).into(),
        };
        let answer = self.control_bytes(request.as_bytes(), size_of::<ControlReply>());
        let reply = ControlReply::read_from_bytes(&answer).expect("a reply");
        outcome(reply.status.get()).map(|()| reply.value.get())
    }
}
