//! The thread that does what no vCPU waits for: control requests, signals to this process, and vCPUs' threads that end.

use std::io;
use std::net::Shutdown;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::thread::JoinHandle;

use event_manager::{EventManager, EventOps, EventSet, Events, MutEventSubscriber, SubscriberOps};
use rustix::process::{Pid, PidfdFlags};
use vmm_sys_util::eventfd::EventFd;
use vpmu::{Turn, Vpmu, abi};

use super::carried::Vcpus;
use super::threads::VcpuThreads;
use crate::confine::{ConfineError, Confinement, ThreadKind};
use crate::signal::EndingSignals;

const STOP: u32 = 0;
const SIGNALS: u32 = 1;
const CONTROL: u32 = 2;
const NOTICES: u32 = 3;
/// The thread of vCPU n is `FIRST_THREAD` + n.
const FIRST_THREAD: u32 = 4;

/// `PIDFD_THREAD` of Linux 6.9: the descriptor is of a thread, not of its process.
const OF_THREAD: PidfdFlags = PidfdFlags::from_bits_retain(libc::O_EXCL.cast_unsigned());

/// A queue that the thread serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Calls {
    Control,
    Notices,
}

/// State that the thread shares with the others.
#[derive(Debug)]
struct Shared {
    stop: EventFd,
    control: EventFd,
    notices: EventFd,
    stopped: AtomicBool,
    /// The signal that has ended the connection. Zero if none has.
    signal: AtomicI32,
}

/// The running thread. Dropping the value ends it.
#[derive(Debug)]
pub(super) struct Service {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// The descriptors of the thread, opened before this process drops its privileges.
#[derive(Debug)]
pub(super) struct Waiting {
    shared: Arc<Shared>,
    signals: EndingSignals,
    stream: UnixStream,
    /// Descriptors of the vCPUs' threads. `None` before Linux 6.9.
    threads: Vec<Option<OwnedFd>>,
}

struct Subscriber {
    waiting: Waiting,
    vpmu: Arc<Vpmu>,
    vcpus: Arc<Vcpus>,
    failed: Option<event_manager::Error>,
}

fn event() -> io::Result<EventFd> {
    EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)
}

impl Service {
    /// Opens the descriptors.
    ///
    /// # Errors
    /// The host's error.
    pub(super) fn prepare(threads: &VcpuThreads, signals: EndingSignals, stream: UnixStream) -> io::Result<Waiting> {
        let watched = threads.ids.iter().map(|&id| {
            let opened = Pid::from_raw(id).map(|id| rustix::process::pidfd_open(id, OF_THREAD));
            // Without the descriptor, the thread of a vCPU that is unplugged goes unnoticed.
            opened.and_then(Result::ok)
        });
        let shared = Shared {
            stop: event()?,
            control: event()?,
            notices: event()?,
            stopped: AtomicBool::new(false),
            signal: AtomicI32::new(0),
        };
        Ok(Waiting { shared: Arc::new(shared), signals, stream, threads: watched.collect() })
    }

    /// Makes the thread serve the driver.
    pub(super) fn call(&self, calls: Calls) {
        let event = match calls {
            Calls::Control => &self.shared.control,
            Calls::Notices => &self.shared.notices,
        };
        if let Err(error) = event.write(1) {
            log::error!("requests wait for the driver's next notification: {error}");
        }
    }

    /// The signal that has ended the connection, if one has.
    pub(super) fn signal(&self) -> Option<i32> {
        Some(self.shared.signal.load(Ordering::Acquire)).filter(|&signal| signal != 0)
    }
}

impl Waiting {
    /// Starts the thread.
    ///
    /// # Errors
    /// [`ConfineError`].
    pub(super) fn start(
        self,
        vpmu: Arc<Vpmu>,
        vcpus: Arc<Vcpus>,
        confinement: &Confinement,
    ) -> Result<Service, ConfineError> {
        let shared = Arc::clone(&self.shared);
        let mut manager = EventManager::new().map_err(|error| ConfineError::Thread(io::Error::other(error)))?;
        let ends = Arc::clone(&shared);
        let subscriber = Subscriber { waiting: self, vpmu, vcpus, failed: None };
        let id = manager.add_subscriber(subscriber);
        if let Some(error) = manager.subscriber_mut(id).ok().and_then(|it| it.failed.take()) {
            return Err(ConfineError::Thread(io::Error::other(error)));
        }
        let thread = confinement.spawn(ThreadKind::Service, "vpmu service".to_owned(), move || {
            while !ends.stopped.load(Ordering::Acquire) {
                if let Err(error) = manager.run() {
                    log::error!("control requests are no longer served: {error}");
                    break;
                }
            }
        })?;
        Ok(Service { shared, thread: Some(thread) })
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.shared.stopped.store(true, Ordering::Release);
        if let Err(error) = self.shared.stop.write(1) {
            log::error!("the service thread cannot be ended: {error}");
            return;
        }
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            log::error!("the service thread panicked");
        }
    }
}

impl Subscriber {
    fn watch(&self, ops: &mut EventOps<'_>) -> Result<(), event_manager::Error> {
        let mut add = |fd: RawFd, data| ops.add(Events::with_data_raw(fd, data, EventSet::IN));
        let Waiting { shared, signals, threads, .. } = &self.waiting;
        add(shared.stop.as_raw_fd(), STOP)?;
        add(signals.as_raw_fd(), SIGNALS)?;
        add(shared.control.as_raw_fd(), CONTROL)?;
        add(shared.notices.as_raw_fd(), NOTICES)?;
        for (number, thread) in (FIRST_THREAD..).zip(threads) {
            if let Some(thread) = thread {
                add(thread.as_raw_fd(), number)?;
            }
        }
        Ok(())
    }

    fn thread_ended(&mut self, number: u32, ops: &mut EventOps<'_>) {
        let Some(vcpu) = number.checked_sub(FIRST_THREAD).and_then(|vcpu| usize::try_from(vcpu).ok()) else { return };
        let thread = self.waiting.threads.get_mut(vcpu).and_then(Option::take);
        if let Some(thread) = thread {
            if let Err(error) = ops.remove(Events::with_data_raw(thread.as_raw_fd(), number, EventSet::IN)) {
                log::debug!("cannot stop watching a thread: {error}");
            }
            self.vcpus.detach(vcpu);
        }
    }
}

impl MutEventSubscriber for Subscriber {
    fn process(&mut self, events: Events, ops: &mut EventOps<'_>) {
        let shared = &self.waiting.shared;
        match events.data() {
            // The thread checks `stopped` after this.
            STOP => {
                let _ = shared.stop.read();
            }
            SIGNALS => {
                if let Some(signal) = self.waiting.signals.read() {
                    shared.signal.store(signal, Ordering::Release);
                    if let Err(error) = self.waiting.stream.shutdown(Shutdown::Both) {
                        log::debug!("the connection has ended already: {error}");
                    }
                }
            }
            CONTROL => {
                let _ = shared.control.read();
                if self.vpmu.notify(abi::QUEUE_CONTROL) == Turn::Unfinished
                    && let Err(error) = shared.control.write(1)
                {
                    log::error!("control requests wait for the driver's next notification: {error}");
                }
            }
            NOTICES => {
                let _ = shared.notices.read();
                let _ = self.vpmu.notify(abi::QUEUE_EVENT);
            }
            thread => self.thread_ended(thread, ops),
        }
    }

    fn init(&mut self, ops: &mut EventOps<'_>) {
        self.failed = self.watch(ops).err();
    }
}
