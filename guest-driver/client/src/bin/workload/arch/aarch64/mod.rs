//! aarch64.

mod ports;
mod tree;

pub(crate) use ports::Port;
pub(crate) use tree::{begin, exact_loop};
