//! `vmm ctl`: a running machine and its persistent events, from outside.
//!
//! A Unix socket carries one request of JSON in a line, and one answer in a line. Whoever may open it
//! has the operator's power over this machine's PMU, so that it is the owner's alone.

mod client;
mod descriptor;
mod protocol;
mod server;
mod socket;
mod table;

pub use self::client::{CtlArgs, CtlError, run};
pub use self::protocol::{Answer, Entry, Recorded, Reply, Request, Ring, Taken};
#[cfg(feature = "internals")]
pub(crate) use self::server::converse;
pub use self::server::{Server, ServerError};
pub use self::socket::{Socket, SocketError};
