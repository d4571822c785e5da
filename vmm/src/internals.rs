//! Entry points for this project's fuzz targets, without a machine. Not a stable interface.

use std::fs::File;
use std::io::{Read, Write};

use crate::ctl::{self, Reply, Request};

/// Serves a client of the control socket at `stream` until it is gone. `stream` must not
/// block: a call that would block returns `WouldBlock`, and is repeated.
pub fn converse(
    stream: impl Read + Write,
    serve: &mut (dyn FnMut(Request, Option<File>) -> Reply + Send + 'static),
) {
    ctl::converse(stream, serve);
}
