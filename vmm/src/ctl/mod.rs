//! `vmm ctl`: controls a running machine and its persistent events from another process.
//!
//! A Unix socket carries one JSON request per line, and one reply per line. Access to the
//! socket grants control of the machine and its PMU, so only the machine's owner and root can use it.

mod client;
mod connection;
mod descriptor;
mod protocol;
mod server;
mod socket;
mod table;

pub use self::client::{CtlArgs, CtlError, run};
pub use self::connection::ConnectionError;
pub use self::protocol::{Answer, Entry, Recorded, Reply, Request, Ring};
#[cfg(feature = "internals")]
pub(crate) use self::server::converse;
pub use self::server::{Server, ServerError};
pub use self::socket::{Socket, SocketError};
pub(crate) use self::socket::{is_ours, peer};
