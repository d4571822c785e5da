//! Client library for guest programs of the paravirtual PMU.
//!
//! All events are opened with `perf_event_open(2)`; perf core schedules them and decides who may open them. They differ
//! in who writes their records:
//! - [`Vpmu`] opens events whose records the host writes directly into this process's pages, and traces.
//! - [`perf::PerfPmu`] opens events of the PMU named `vpmu` as any perf program does. Perf core writes their records.
//!
//! Count the caller's exits for one reason:
//! ```no_run
//! # fn main() -> Result<(), vpmu_client::Error> {
//! let vpmu = vpmu_client::Vpmu::open()?;
//! let event = vpmu.open_event(&vpmu.attr("exits-io")?)?;
//! event.enable()?;
//! // ... the work to measure ...
//! event.disable()?;
//! println!("{} exits", event.read()?.value);
//! # Ok(())
//! # }
//! ```
//! Take a sample every millisecond of CPU time, and read the samples from the ring:
//! ```no_run
//! # fn main() -> Result<(), vpmu_client::Error> {
//! use vpmu_client::{Record, Vpmu};
//! let vpmu = Vpmu::open()?;
//! let event = vpmu.open_event(&vpmu.attr("task-clock")?.sampling(1_000_000))?;
//! let mut ring = event.map(4)?;
//! event.enable()?;
//! event.poll(None)?;
//! for record in ring.records() {
//!     if let Record::Sample(sample) = record? {
//!         println!("{:#x} in thread {}", sample.ip, sample.tid);
//!     }
//! }
//! # Ok(())
//! # }
//! ```
//! Keep the latest samples and call chains in a ring, to look back after an incident:
//! ```no_run
//! # fn main() -> Result<(), vpmu_client::Error> {
//! use vpmu_client::{Overwrite, Record, Vpmu};
//! let vpmu = Vpmu::open()?;
//! let attr = vpmu.attr("task-clock")?.sampling(1_000_000).with_call_chains(0);
//! let event = vpmu.open_event(&attr.with(|attr| attr.backward = true))?;
//! let ring = Overwrite::map(&event, 4)?;
//! event.enable()?;
//! // ... until the incident ...
//! for record in ring.snapshot()? {
//!     if let Record::Sample(sample) = record {
//!         println!("{:x?}", sample.frames());
//!     }
//! }
//! # Ok(())
//! # }
//! ```
//! Trace every exit to the host's user space during a piece of work, with its duration:
//! ```no_run
//! # fn main() -> Result<(), vpmu_client::Error> {
//! use vpmu_client::{Area, Chunk, Packet, Vpmu};
//! let vpmu = Vpmu::open()?;
//! let event = vpmu.open_event(&vpmu.attr("exit-trace-user")?.tracing(64 << 10))?;
//! let ring = event.map(0)?;
//! let mut area = Area::map(&event, &ring, 8)?;
//! event.enable()?;
//! // ... the work ...
//! event.disable()?;
//! let mut chunk = Chunk::default();
//! while area.read(&mut chunk)? {
//!     for packet in chunk.packets() {
//!         if let Ok(Packet::Exit(exit)) = packet {
//!             println!("{:?} at {:x?}: {} ns", exit.reason(), exit.ip(), exit.outside());
//!         }
//!     }
//! }
//! # Ok(())
//! # }
//! ```
//! Keep the newest samples of a CPU after this program exits, and read them from another program
//! while they are written:
//! ```no_run
//! # fn main() -> Result<(), vpmu_client::Error> {
//! use vpmu_client::{History, Vpmu};
//! let vpmu = Vpmu::open()?;
//! let attr = vpmu.attr("task-clock")?.on_cpu(0).sampling(10_000_000).persistent();
//! let event = vpmu.open_event(&attr.with(|attr| attr.backward = true))?;
//! History::map(&event, 64, true)?;
//! event.detach("flight")?;
//! event.enable()?;
//! // ... elsewhere, later ...
//! let flight = vpmu.find_persistent("flight")?;
//! let event = vpmu.reopen(&flight)?;
//! if let Some(pages) = flight.data_pages {
//!     println!("{:?}", History::map(&event, pages, flight.overwrites)?.read()?.records);
//! }
//! # Ok(())
//! # }
//! ```
//! To count between two marks of a program, see [`trigger`].

mod arch;
pub mod area;
pub mod attr;
pub mod catalogue;
pub mod device;
pub mod error;
pub mod event;
pub mod history;
pub mod marks;
mod metadata;
pub mod overwrite;
pub mod perf;
pub mod persistent;
mod reading;
pub mod record;
mod register;
pub mod ring;
mod suggest;
mod sys;
pub mod tasks;
pub mod trace;
pub mod trigger;

pub use area::{Area, Snapshot};
pub use attr::{Engine, EventAttr};
pub use catalogue::{Catalogue, Entry};
pub use device::{Info, Vpmu};
pub use error::Error;
pub use event::{Event, Wakeup};
pub use history::{History, RingSnapshot};
pub use marks::Marks;
pub use overwrite::Overwrite;
pub use persistent::Persistent;
pub use reading::Reading;
pub use record::{Aux, Frame, Record, Registers, Sample, SampleId, Throttle};
pub use ring::{Metadata, Ring};
pub use trace::{Chunk, Packet};
