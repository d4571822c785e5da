//! The formats.

use std::io::{self, Write};

use crate::selection::Selection;
use crate::{firefox, folded, perfetto, pprof, svg};

/// A format of profiles.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// Folded stacks: one line for each stack, with its weight.
    Folded,
    /// A flame graph that a browser shows.
    Svg,
    /// The processed profile of the Firefox Profiler.
    Firefox,
    /// The profile of pprof: a protobuf, compressed with gzip.
    Pprof,
    /// Trace events of Perfetto and Chrome.
    Perfetto,
}

/// Errors of an export.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    /// The output cannot be written.
    #[error("cannot write the profile")]
    Write(#[from] io::Error),
    /// The JSON cannot be written.
    #[error("cannot write the profile as JSON")]
    Json(#[from] serde_json::Error),
}

impl Format {
    /// Writes a selection in this format.
    ///
    /// # Errors
    /// [`ExportError`].
    pub fn write(self, selection: &Selection<'_>, out: &mut impl Write) -> Result<(), ExportError> {
        match self {
            Self::Folded => folded::write(selection, out)?,
            Self::Svg => svg::write(selection, out)?,
            Self::Firefox => firefox::write(selection, out)?,
            Self::Pprof => pprof::write(selection, out)?,
            Self::Perfetto => perfetto::write(selection, out)?,
        }
        Ok(out.flush()?)
    }
}
