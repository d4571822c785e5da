//! Shared code of the device's tests, benchmarks, examples and fuzz targets: a driver, a host whose events and times
//! the caller sets, a guest on KVM, and readers of the guest's buffers.
//!
//! [`Fixture`] is a device with a driver on the simulated [`FakeHost`]. [`Driver`] is the driver of a device that its
//! caller creates. Both use [`DriverQueue`].
#![expect(clippy::expect_used, reason = "tests fail by panicking")]
#![expect(clippy::new_without_default, reason = "tests say what they create")]
#![expect(missing_docs, reason = "SPEC.md and vpmu-abi describe the requests, commands and fields")]

mod accounts;
mod area;
mod driver;
mod fake_host;
mod fixture;
mod forgery;
#[cfg(target_arch = "x86_64")]
mod guest;
mod host;
mod queue;
mod reader;
mod requests;
mod window;

pub use accounts::{Accounted, account_for_exits, account_for_samples};
pub use area::{AreaReader, Packet, map_area, map_aux};
pub use driver::{Driver, replies, size_of_replies};
pub use fake_host::{At, CLOCK, CYCLES, FAULTS, FakeHost, FakeMachine, FakeSource, Nowhere, RAW, SHORTEST};
pub use fixture::{
    ALL_FEATURES, Fixture, MEMORY, MEMORY_LEN, QUEUES, TSC_OFFSET, VCPUS, Vcpus, limits, make_queues, thread,
};
pub use forgery::{Forgery, forge, leaves};
#[cfg(target_arch = "x86_64")]
pub use guest::{Exited, Guest, PROGRAM};
pub use host::{Bare, Silent, alone, ignore_signals, selects};
pub use queue::{Descriptor, DriverQueue, Layout, QUEUE_SIZE};
pub use reader::{LOST, READ, Raw, Reader, Record, SAMPLE, Sample, THROTTLE, UNTHROTTLE};
pub use requests::{Errno, Fields, command, commands, header, map_request, open_of, outcome, structs};
pub use window::{WINDOW, WINDOW_FEATURES, window};
