//! Exits that only this architecture has: this VMM uses none of them.

use super::emulation::VcpuEmulation;
use crate::bus::{Bus, Caller};
use crate::vcpu::RunPage;

/// The reason of an exit.
#[derive(Debug)]
pub(crate) enum Exit {}

impl From<&Exit> for vpmu::Exit {
    fn from(exit: &Exit) -> Self {
        match *exit {}
    }
}

/// The exit in `page`, if it is one that only this architecture has.
pub(crate) fn decode(_page: &RunPage) -> Option<Exit> {
    None
}

/// Handles `exit`.
pub(crate) fn serve(
    exit: Exit,
    _page: &mut RunPage,
    _caller: &mut Caller<'_>,
    _emulation: Option<&mut VcpuEmulation>,
    _ports: &Bus,
) {
    match exit {}
}
