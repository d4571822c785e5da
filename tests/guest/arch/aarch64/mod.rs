//! aarch64.

pub(crate) mod accesses;
mod attacks;
mod ports;
pub(crate) mod stubs;

pub(crate) use attacks::ATTACKS;
pub(crate) use ports::{
    EXIT_PORT, IDLE_PORT, OWN_IN_USER_MODE, PORT_DETAIL, PORT_EXITS, PORT_REASON, PORT_WRITTEN,
    STORE_EXITS, allow_ports, port_write, ticks,
};

use crate::Test;

/// Tests of exits that the hardware makes: KVM has a trace of them on other machines alone.
pub(crate) fn hardware() -> Option<Vec<Test>> {
    None
}
