//! The event queue: tells the driver what is due, in the buffers that it posted.

use crate::abi::{Notice, QUEUE_EVENT};
use crate::queues::{BadChain, Chain, put};
use crate::state::State;

/// Whether notices went out that the driver wants an interrupt for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Delivered(pub(crate) bool);

impl State {
    /// Delivers notices while there are buffers; the rest stays due until more are posted.
    pub(crate) fn deliver_notices(&mut self) -> Delivered {
        let index = usize::from(QUEUE_EVENT);
        let mut given = false;
        for _ in 0..self.queues.bound(index) {
            let Some(notice) = self.output.notices.next() else {
                break;
            };
            let Some(chain) = self.queues.take(index) else {
                break;
            };
            let len = match write(&chain, &notice) {
                Ok(len) => {
                    self.output.notices.delivered();
                    self.metrics.notices += 1;
                    len
                }
                Err(BadChain) => {
                    self.metrics.bad_requests += 1;
                    0
                }
            };
            self.queues.give_back(index, &chain, len);
            given = true;
        }
        Delivered(given && self.queues.wants_interrupt(index))
    }
}

fn write(chain: &Chain, notice: &Notice) -> Result<u32, BadChain> {
    let (_, mut writer) = chain.writer()?;
    put(&mut writer, notice)?;
    u32::try_from(size_of::<Notice>()).map_err(|_| BadChain)
}
