//! x86-64.

pub(crate) mod accesses;
mod attacks;
mod hardware;
mod ports;
pub(crate) mod stubs;

pub(crate) use attacks::ATTACKS;
pub(crate) use ports::{
    EXIT_PORT, IDLE_PORT, OWN_IN_USER_MODE, PORT_DETAIL, PORT_EXITS, PORT_REASON, PORT_WRITTEN,
    STORE_EXITS, allow_ports, port_write, ticks,
};

use crate::Test;

/// Tests of exits that the hardware makes, by its own numbers for them.
pub(crate) fn hardware() -> Option<Vec<Test>> {
    Some(hardware::TESTS.to_vec())
}
