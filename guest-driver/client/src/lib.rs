//! The guest programs' side of the paravirtual PMU.
//!
//! There are two doors into the device, and one [`Event`] behind both:
//! - [`Vpmu`] is the shared-page door, `/dev/vpmu`: events that count and sample, whose rings
//!   the host writes directly into this process's pages.
//! - [`perf::PerfPmu`] is the perf core door, `perf_event_open(2)` on the PMU named `vpmu`:
//!   events that count.
//!
//! Count the caller's own events by reason of exit:
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
//! Take a sample every millisecond of CPU time, and read them from the ring:
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
//! Know where the time went when something odd has happened, by a ring that always holds the
//! latest samples and their callers:
//! ```no_run
//! # fn main() -> Result<(), vpmu_client::Error> {
//! use vpmu_client::{EventAttr, Record, Vpmu};
//! let vpmu = Vpmu::open()?;
//! let attr = vpmu.attr("task-clock")?.sampling(1_000_000).with_call_chains(0);
//! let event = vpmu.open_event(&EventAttr { backward: true, ..attr })?;
//! let ring = event.map_overwrite(4)?;
//! event.enable()?;
//! // ... until it has happened ...
//! for record in ring.snapshot()? {
//!     if let Record::Sample(sample) = record {
//!         println!("{:x?}", sample.frames());
//!     }
//! }
//! # Ok(())
//! # }
//! ```
//! See every exit to the host's user space that a piece of work makes, and how long each took:
//! ```no_run
//! # fn main() -> Result<(), vpmu_client::Error> {
//! use vpmu_client::{Chunk, Packet, Vpmu};
//! let vpmu = Vpmu::open()?;
//! let event = vpmu.open_event(&vpmu.attr("exit-trace-user")?.tracing(64 << 10))?;
//! let ring = event.map(0)?;
//! let mut area = event.map_aux(&ring, 8)?;
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
//! Keep the newest samples of a CPU whatever becomes of this program, and read them in another,
//! while they are written:
//! ```no_run
//! # fn main() -> Result<(), vpmu_client::Error> {
//! use vpmu_client::{EventAttr, Vpmu};
//! let vpmu = Vpmu::open()?;
//! let attr = vpmu.attr("task-clock")?.on_cpu(0).sampling(10_000_000).persistent();
//! let event = vpmu.open_event(&EventAttr { backward: true, ..attr })?;
//! event.map_history(64, true)?;
//! event.detach("flight")?;
//! event.enable()?;
//! // ... elsewhere, later ...
//! let flight = vpmu.find_persistent("flight")?;
//! let event = vpmu.reopen(&flight)?;
//! if let Some(pages) = flight.data_pages {
//!     println!("{:?}", event.map_history(pages, flight.overwrites)?.read()?.records);
//! }
//! # Ok(())
//! # }
//! ```
//! Count between two of a program's own marks: see [`trigger`].

mod arch;
pub mod area;
pub mod attr;
pub mod catalogue;
pub mod device;
pub mod error;
pub mod event;
pub mod history;
mod map;
pub mod marks;
mod metadata;
pub mod overwrite;
pub mod perf;
pub mod persistent;
mod reading;
pub mod record;
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
pub use history::{History, Past};
pub use marks::Marks;
pub use overwrite::Overwrite;
pub use persistent::Persistent;
pub use reading::Reading;
pub use record::{Aux, Frame, Record, Registers, Sample, SampleId, Throttle};
pub use ring::{Metadata, Ring};
pub use trace::{Chunk, Packet};
