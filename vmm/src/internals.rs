//! Entry points for this project's fuzz targets, which run without a machine. This is not a stable interface.

use std::fs::File;
use std::io::{Read, Write};

use crate::ctl::{self, Reply, Request};

/// Serves the client of a control socket at `stream` until the client disconnects. `stream` must be non-blocking: its
/// calls return `WouldBlock` instead of blocking, and this function then retries them.
pub fn converse(stream: impl Read + Write, serve: &mut (dyn FnMut(Request, Vec<File>) -> Reply + Send + 'static)) {
    ctl::converse(stream, serve);
}
