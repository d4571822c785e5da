//! x86-64.

pub(crate) mod accesses;
mod attacks;
mod hardware;
mod ports;
pub(crate) mod stubs;

pub(crate) use attacks::ATTACKS;
pub(crate) use ports::{
    COMMAND_EXITS, EXIT_PORT, IDLE_PORT, PORT_EXITS, allow_ports, port_write, ticks,
};

use crate::Test;

/// Tests of exits that the hardware makes, by its own numbers for them.
pub(crate) fn hardware() -> Option<Vec<Test>> {
    Some(hardware::TESTS.to_vec())
}
