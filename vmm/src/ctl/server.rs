//! The VMM's side of the control socket. It has its own thread, so that long requests do not delay the guest. This
//! module handles connections and parses requests. The function passed to `Server::start` executes them.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, ErrorKind};
#[cfg(feature = "internals")]
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use event_manager::{EventManager, EventOps, EventSet, Events, MutEventSubscriber, SubscriberOps};
use vmm_sys_util::eventfd::EventFd;

use super::descriptor::Peer;
use super::protocol::{MAX_REQUEST, Reply, Request};
use super::socket::{self, Socket};
use crate::confine::{ConfineError, Confinement, ThreadKind};

/// Maximum number of simultaneous clients. If another client connects, the oldest client is disconnected.
const MAX_CLIENTS: usize = 16;

/// Errors from serving the control socket.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// The host has no free descriptors or threads.
    #[error("the host has no more {0} for the control socket")]
    Host(&'static str, #[source] io::Error),
    /// The thread could not be started.
    #[error("cannot serve the control socket")]
    Thread(#[source] ConfineError),
    /// The event loop could not be set up.
    #[error("the event loop of the control socket failed")]
    Loop(#[source] event_manager::Error),
}

/// A function that executes a request. It gets the files that accompanied the request.
pub(crate) type Serve = dyn FnMut(Request, Vec<File>) -> Reply + Send;

/// Serves a control socket. Dropping the value ends the service and removes the socket.
#[derive(Debug)]
pub struct Server {
    stop: Arc<Stop>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Stop {
    wanted: AtomicBool,
    event: EventFd,
}

impl Server {
    /// Starts a thread that serves `socket`, with the privileges of `confinement`. The thread calls `serve`
    /// for one request at a time.
    ///
    /// # Errors
    /// [`ServerError`].
    pub(crate) fn start(socket: Socket, serve: Box<Serve>, confinement: &Confinement) -> Result<Self, ServerError> {
        let event = EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)
            .map_err(|source| ServerError::Host("event descriptors", source))?;
        let stop = Arc::new(Stop { wanted: AtomicBool::new(false), event });
        let clients = Clients {
            socket,
            serve,
            stop: Arc::clone(&stop),
            clients: BTreeMap::new(),
            next: FIRST_CLIENT,
            failed: None,
        };
        let mut manager = EventManager::new().map_err(ServerError::Loop)?;
        let id = manager.add_subscriber(clients);
        let clients = manager.subscriber_mut(id).map_err(ServerError::Loop)?;
        if let Some(error) = clients.failed.take() {
            return Err(ServerError::Loop(error));
        }
        let stopped = Arc::clone(&stop);
        let thread = confinement.spawn(ThreadKind::Ctl, "ctl".to_owned(), move || {
            while !stopped.wanted.load(Ordering::SeqCst) {
                if let Err(error) = manager.run() {
                    log::error!("the control socket is no longer served: {error}");
                    break;
                }
            }
        });
        let thread = thread.map_err(ServerError::Thread)?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.wanted.store(true, Ordering::SeqCst);
        if let Err(error) = self.stop.event.write(1) {
            // The thread was not notified, so it does not end. Do not join it.
            log::error!("the control socket cannot be closed: {error}");
            return;
        }
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            log::error!("the control socket's thread panicked");
        }
    }
}

const STOP: u32 = 0;
const LISTENER: u32 = 1;
const FIRST_CLIENT: u32 = 2;

struct Clients {
    socket: Socket,
    serve: Box<Serve>,
    stop: Arc<Stop>,
    /// The clients, in order of arrival.
    clients: BTreeMap<u32, Client>,
    next: u32,
    failed: Option<event_manager::Error>,
}

impl Clients {
    fn accept(&mut self, ops: &mut EventOps<'_>) {
        let stream = match self.socket.listener.accept() {
            Ok((stream, _)) => stream,
            Err(error) if error.kind() == ErrorKind::WouldBlock => return,
            Err(error) => {
                log::warn!("cannot accept a client of the control socket: {error}");
                // Most likely the process has no free descriptor. Disconnect the oldest client to get one.
                self.drop_first(ops);
                return;
            }
        };
        match socket::is_ours(&stream).and_then(|ours| {
            stream.set_nonblocking(true)?;
            Ok(ours)
        }) {
            Ok(true) => {}
            Ok(false) => return log::warn!("refused another user's client on the control socket"),
            Err(error) => {
                return log::warn!("cannot set up a client of the control socket: {error}");
            }
        }
        if self.clients.len() >= MAX_CLIENTS {
            self.drop_first(ops);
        }
        let id = self.next;
        let watched = ops.add(Events::with_data(&stream, id, EventSet::IN));
        if let Err(error) = watched {
            return log::warn!("cannot watch a client of the control socket: {error}");
        }
        self.next = id.checked_add(1).unwrap_or(FIRST_CLIENT);
        self.clients.insert(id, Client::new(stream));
    }

    fn drop_first(&mut self, ops: &mut EventOps<'_>) {
        if let Some((id, client)) = self.clients.pop_first() {
            client.unwatch(id, ops);
        }
    }

    fn turn(&mut self, id: u32, ops: &mut EventOps<'_>) {
        let Some(client) = self.clients.get_mut(&id) else {
            return;
        };
        let before = client.wants();
        let stays = client.turn(&mut *self.serve);
        let after = client.wants();
        let watched = match stays {
            true if before != after => ops.modify(Events::with_data(&client.stream, id, after)).is_ok(),
            stays => stays,
        };
        if !watched && let Some(client) = self.clients.remove(&id) {
            client.unwatch(id, ops);
        }
    }
}

impl MutEventSubscriber for Clients {
    fn process(&mut self, events: Events, ops: &mut EventOps<'_>) {
        match events.data() {
            STOP => {
                // The thread checks `wanted` after this.
                let _ = self.stop.event.read();
            }
            LISTENER => self.accept(ops),
            client => self.turn(client, ops),
        }
    }

    fn init(&mut self, ops: &mut EventOps<'_>) {
        let watched = ops.add(Events::with_data(&self.stop.event, STOP, EventSet::IN)).and_then(|()| {
            let listener = &self.socket.listener;
            ops.add(Events::with_data(listener, LISTENER, EventSet::IN))
        });
        self.failed = watched.err();
    }
}

/// The connection of a client. A request is served only after the previous reply has been sent.
struct Client<S = UnixStream> {
    stream: S,
    /// Received bytes that have not been served.
    input: Vec<u8>,
    /// The files that accompanied the request.
    files: Vec<File>,
    /// The unsent part of a reply.
    output: Vec<u8>,
    /// The client will send nothing more, or the server is about to disconnect it.
    last: bool,
}

impl<S: Peer> Client<S> {
    fn new(stream: S) -> Self {
        Self { stream, input: Vec::new(), files: Vec::new(), output: Vec::new(), last: false }
    }

    /// The event after which to call [`Self::turn`] again: `OUT` if part of a reply is not sent yet or a complete
    /// request is in the buffer, otherwise `IN`.
    fn wants(&self) -> EventSet {
        if self.output.is_empty() && !self.input.contains(&b'\n') { EventSet::IN } else { EventSet::OUT }
    }

    /// Reads input, serves a request and writes output, as far as it can without blocking. Executes at most one
    /// request, so that other clients are served, too. Returns whether the client stays connected.
    fn turn(&mut self, serve: &mut Serve) -> bool {
        match self.try_turn(serve) {
            Ok(()) => true,
            Err(error) => error.kind() == ErrorKind::WouldBlock,
        }
    }

    fn try_turn(&mut self, serve: &mut Serve) -> io::Result<()> {
        self.write_out()?;
        if !self.input.contains(&b'\n') && !self.last {
            self.read()?;
        }
        if let Some(end) = self.input.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = self.input.drain(..=end).collect();
            let files = std::mem::take(&mut self.files);
            let reply = match serde_json::from_slice(&line) {
                Ok(request) => serve(request, files),
                Err(error) => Reply::Error(format!("invalid request: {error}")),
            };
            self.answer(&reply);
        } else if self.input.len() >= MAX_REQUEST {
            self.last = true;
            self.input = Vec::new();
            let reported = format!("invalid request: a line of more than {MAX_REQUEST} bytes");
            self.answer(&Reply::Error(reported));
        }
        self.write_out()?;
        if self.last && !self.input.contains(&b'\n') { Err(ErrorKind::UnexpectedEof.into()) } else { Ok(()) }
    }

    fn read(&mut self) -> io::Result<()> {
        let mut bytes = [0; 4096];
        let room = bytes.len().min(MAX_REQUEST - self.input.len());
        let read = bytes.get_mut(..room).unwrap_or_default();
        let (count, files) = self.stream.receive(read)?;
        if !files.is_empty() {
            self.files = files;
        }
        self.input.extend_from_slice(bytes.get(..count).unwrap_or_default());
        self.last = count == 0;
        Ok(())
    }

    fn write_out(&mut self) -> io::Result<()> {
        while !self.output.is_empty() {
            let written = self.stream.write(&self.output)?;
            self.output.drain(..written);
        }
        Ok(())
    }

    fn answer(&mut self, reply: &Reply) {
        let text = serde_json::to_vec(reply).unwrap_or_else(|error| {
            let reported = Reply::Error(format!("no answer: {error}"));
            serde_json::to_vec(&reported).unwrap_or_default()
        });
        self.output.extend_from_slice(&text);
        self.output.push(b'\n');
    }
}

impl Client {
    fn unwatch(&self, id: u32, ops: &mut EventOps<'_>) {
        let fd = self.stream.as_raw_fd();
        if let Err(error) = ops.remove(Events::with_data_raw(fd, id, self.wants())) {
            log::debug!("cannot stop watching a client: {error}");
        }
    }
}

/// A stream without files.
#[cfg(feature = "internals")]
struct Plain<S>(S);

#[cfg(feature = "internals")]
impl<S: Write> Write for Plain<S> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

#[cfg(feature = "internals")]
impl<S: Read + Write> Peer for Plain<S> {
    fn receive(&mut self, bytes: &mut [u8]) -> io::Result<(usize, Vec<File>)> {
        Ok((self.0.read(bytes)?, Vec::new()))
    }
}

/// Serves the client at `stream` until the client disconnects. `stream` must be non-blocking: its calls return
/// `WouldBlock` instead of blocking, and this function then retries them.
#[cfg(feature = "internals")]
pub(crate) fn converse(stream: impl Read + Write, serve: &mut Serve) {
    let mut client = Client::new(Plain(stream));
    while client.turn(serve) {}
}

#[cfg(test)]
mod tests;
