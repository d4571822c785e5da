//! The control request that makes an event the starter or stopper of another.

use zerocopy::FromBytes;

use crate::abi::{LINK_STARTER, LINK_STOPPER, LinkRequest};
use crate::errno::Errno;
use crate::links::{Refused, Role};
use crate::state::State;

impl State {
    /// Links two events, from the next overflow of the first on.
    pub(super) fn link(&mut self, request: &[u8]) -> Result<(), Errno> {
        let (request, _) = LinkRequest::read_from_prefix(request).map_err(|_| Errno::EINVAL)?;
        let role = match request.role.get() {
            LINK_STARTER => Role::Starter,
            LINK_STOPPER => Role::Stopper,
            _ => return Err(Errno::EINVAL),
        };
        if request.reserved.get() != 0 {
            return Err(Errno::EINVAL);
        }
        let (id, target) = (request.header.event.get(), request.target.get());
        let trigger = self.events.get(&id).ok_or(Errno::ENOENT)?;
        let other = self.events.get(&target).ok_or(Errno::ENOENT)?;
        if other.is_operators() {
            return Err(Errno::EPERM);
        }
        // Which tasks they are of, the driver alone knows.
        if id == target || !trigger.context.is_like(other.context) || trigger.period.is_none() {
            return Err(Errno::EINVAL);
        }
        if trigger.is_batched() {
            // Its overflows are found when the guest has run on.
            return Err(Errno::EOPNOTSUPP);
        }
        let linked = self.links.link(id, target, role);
        linked.map_err(|refused| match refused {
            Refused::Linked => Errno::EEXIST,
            Refused::Taken => Errno::EBUSY,
        })
    }
}
