//! The device in the view of its driver: real queues in guest memory, and a simulated host.
#![expect(
    clippy::expect_used,
    reason = "a test that cannot set itself up ends there"
)]

mod areas;
mod batched;
mod budgets;
mod children;
mod contention;
mod contract;
mod counting;
mod driver;
mod errors;
mod features;
mod flush;
mod forgery;
mod groups;
mod hostile;
mod life;
mod limits;
mod links;
mod lives;
mod loss;
mod marks;
mod memory;
mod modes;
mod opening;
mod page;
mod persistent;
mod places;
mod policy;
mod policy_events;
mod random;
mod rates;
mod reader;
mod rig;
mod rings;
mod rooms;
mod sampling;
mod sampling_time;
mod saving;
mod traces;
mod vcpus;
mod wakeups;
mod world;
