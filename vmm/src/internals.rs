//! What this project's fuzz targets drive without a machine around it. No contract.

use std::fs::File;
use std::io::{Read, Write};

use crate::ctl::{self, Reply, Request};

/// Serves a client of the control socket whose end is `stream`, until it is gone. `stream` never waits:
/// it reports `WouldBlock`, and goes on when it is asked again.
pub fn converse(
    stream: impl Read + Write,
    serve: &mut (dyn FnMut(Request, Option<File>) -> Reply + Send + 'static),
) {
    ctl::converse(stream, serve);
}
