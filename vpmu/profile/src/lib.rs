//! Reads `perf.data` files into a [`Profile`], and writes profiles in the formats of other profilers.
//!
//! [`Profile::read`] reads the recordings of `vmm`, `vperf` and stock `perf record`. [`Format`] lists the formats. A
//! [`Selection`] chooses what to write: the event, its weights, and the meaning of a thread. A [`Resolver`] names the
//! functions at addresses; it also serves live views, which have no file.
//!
//! The file may be forged. Its sizes are checked before `linux-perf-data` parses it, so memory and time are
//! bounded by the size of the file, and by limits on its records and stacks. Names lose their control characters, and each
//! format escapes them.
//!
//! ```no_run
//! # fn export() -> Result<(), Box<dyn std::error::Error>> {
//! use vpmu_profile::{Format, Names, Options, Profile, Selection};
//!
//! let mut file = std::fs::File::open("perf.data")?;
//! let profile = Profile::read(&mut file, Names::none())?;
//! let selection = Selection::new(&profile, &Options::default())?;
//! Format::Folded.write(&selection, &mut std::io::stdout())?;
//! # Ok(())
//! # }
//! ```

mod bounds;
mod firefox;
mod folded;
mod format;
mod maps;
mod model;
mod names;
mod perfetto;
mod pprof;
mod read;
mod resolver;
mod selection;
mod stacks;
mod svg;

pub use bounds::BoundsError;
pub use format::{ExportError, Format};
pub use model::{Event, EventKind, Packet, Profile, Rate, Sample, Task};
pub use names::{Names, NamesError};
pub use read::ReadError;
pub use resolver::Resolver;
pub use selection::{By, Options, Selection, SelectionError, Weight};
pub use stacks::{Frame, Mode, StackId, Stacks};
