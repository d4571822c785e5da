//! What this project's fuzz targets drive without a machine around it. No contract.

use std::fs::File;
use std::io::{self, Read, Write};

use vpmu::History;

use crate::ctl::{self, Reply, Request};
use crate::recording::{Recorder, Summary};

/// Serves a client of the control socket whose end is `stream`, until it is gone. `stream` never waits:
/// it reports `WouldBlock`, and goes on when it is asked again.
pub fn converse(
    stream: impl Read + Write,
    serve: &mut (dyn FnMut(Request, Option<File>) -> Reply + Send + 'static),
) {
    ctl::converse(stream, serve);
}

/// Writes the bytes of a recording to `out`.
///
/// # Errors
/// Those of `out`.
pub fn record(
    recorder: &Recorder,
    histories: &[History],
    out: &mut impl Write,
) -> io::Result<Summary> {
    recorder.compose(histories, out)
}
