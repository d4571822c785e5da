//! The device as its driver sees it: real queues over guest memory, a host that counts what the
//! test tells it to.
#![expect(
    clippy::expect_used,
    reason = "a test that cannot set itself up ends there"
)]

mod counting;
mod driver;
mod hostile;
mod life;
mod loss;
mod reader;
mod rig;
mod sampling;
mod world;
