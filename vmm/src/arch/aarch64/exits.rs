//! Exits that only this architecture has: none that this VMM asks for.

use super::emulation::VcpuEmulation;
use crate::bus::{Bus, Caller};
use crate::vcpu::RunPage;

/// Why a vCPU came back.
#[derive(Debug)]
pub(crate) enum Exit {}

impl From<&Exit> for vpmu::Exit {
    fn from(exit: &Exit) -> Self {
        match *exit {}
    }
}

/// The exit in `page`, if only this architecture has such.
pub(crate) fn decode(_page: &RunPage) -> Option<Exit> {
    None
}

/// Does what `exit` asks for.
pub(crate) fn serve(
    exit: Exit,
    _page: &mut RunPage,
    _caller: &mut Caller<'_>,
    _emulation: Option<&mut VcpuEmulation>,
    _ports: &Bus,
) {
    match exit {}
}
