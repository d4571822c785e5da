//! Control requests about persistent events: which there are, and what makes an event one.

use zerocopy::FromBytes;

use crate::abi::{
    CONTROL_ATTACH, CONTROL_CLOSE, CONTROL_DETACH, CONTROL_LINK, CONTROL_MAP, CONTROL_MAP_AUX,
    CONTROL_PAUSE, CONTROL_REDIRECT, CONTROL_UNMAP, CONTROL_UNMAP_AUX, DetachRequest,
    PersistentEvent, PersistentRequest,
};
use crate::errno::Errno;
use crate::persistent::Name;
use crate::state::State;

/// Whether an operation changes the event that its header names.
pub(super) fn changes(op: u32) -> bool {
    matches!(
        op,
        CONTROL_CLOSE
            | CONTROL_MAP
            | CONTROL_UNMAP
            | CONTROL_REDIRECT
            | CONTROL_PAUSE
            | CONTROL_MAP_AUX
            | CONTROL_UNMAP_AUX
            | CONTROL_DETACH
            | CONTROL_ATTACH
            | CONTROL_LINK
    )
}

impl State {
    /// Makes an event persistent, under the name that the request has.
    pub(super) fn detach_as(&mut self, request: &[u8]) -> Result<(), Errno> {
        let (request, _) = DetachRequest::read_from_prefix(request).map_err(|_| Errno::EINVAL)?;
        let name = match request.name.iter().all(|&byte| byte == 0) {
            true => None,
            false => Some(Name::from_wire(&request.name).ok_or(Errno::EINVAL)?),
        };
        self.detach(request.header.event.get(), name)
    }

    /// The persistent events that are asked for, `fit` at most.
    pub(super) fn list_part(
        &self,
        request: &[u8],
        fit: usize,
    ) -> Result<Vec<PersistentEvent>, Errno> {
        let (request, _) =
            PersistentRequest::read_from_prefix(request).map_err(|_| Errno::EINVAL)?;
        if request.header.event.get() != 0 || request.reserved.get() != 0 {
            return Err(Errno::EINVAL);
        }
        let most = fit.min(request.count.get() as usize);
        Ok(self.list(request.after.get(), most))
    }
}
