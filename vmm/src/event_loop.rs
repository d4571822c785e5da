//! The loop of the main thread while vCPUs run. It serves the console, the PMU's queues and snapshot requests, and
//! handles signals and the end of the run.
//!
//! This module only moves bytes and dispatches events to the devices. It contains no device logic.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use event_manager::{EventManager, EventOps, EventSet, Events, MutEventSubscriber, SubscriberId, SubscriberOps};
use vmm_sys_util::eventfd::EventFd;
use vpmu::{Turn, Vpmu, abi};

use crate::devices::console::Keys;
use crate::devices::serial::{Console, Serial};
use crate::exit::{Ending, StopLatch};
use crate::signal::EndingSignals;
use crate::snapshot::mailbox::Mailbox;

/// Delay before console output is written, so that one write can include many bytes.
const BATCH_TIME: Duration = Duration::from_millis(2);
/// Maximum number of bytes of input per read.
const INPUT: usize = 64;

const END: u32 = 0;
const SIGNALS: u32 = 1;
const KEYS: u32 = 2;
const ROOM: u32 = 3;
const OUTPUT: u32 = 4;
const CONTROL: u32 = 5;
const NOTICES: u32 = 6;
const MAILBOX: u32 = 7;

/// Errors of the event loop.
#[derive(Debug, thiserror::Error)]
pub enum LoopError {
    /// Standard input is closed, or the host has no free descriptors.
    #[error("cannot read standard input")]
    Input(#[source] io::Error),
    /// The host has no free descriptors, or a call failed.
    #[error("the event loop failed")]
    Loop(#[source] event_manager::Error),
}

/// The queues whose notifications KVM signals through eventfds.
#[derive(Debug, Clone)]
pub struct Queues {
    /// The device.
    pub vpmu: Arc<Vpmu>,
    /// The control queue's eventfd.
    pub control: Arc<EventFd>,
    /// The event queue's eventfd.
    pub notices: Arc<EventFd>,
}

#[derive(Debug)]
struct Wakeups {
    end: Arc<StopLatch>,
    signals: EndingSignals,
    console: Console,
    queues: Option<Queues>,
    mailbox: Arc<Mailbox>,
    keyboard: Keyboard,
    write_at: Option<Instant>,
    failed: Option<event_manager::Error>,
}

/// The main thread's loop. It serves the console, the PMU's control and event queues, and snapshot requests, and
/// handles signals. The same loop is used for all boots of the guest.
#[expect(missing_debug_implementations, reason = "the event manager has nothing to show")]
pub struct EventLoop {
    manager: EventManager<Wakeups>,
    wakeups: SubscriberId,
    end: Arc<StopLatch>,
    serial: Arc<Serial>,
    mailbox: Arc<Mailbox>,
}

/// Why the loop stopped serving.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stopped {
    /// The end is announced.
    Ended,
    /// A client has requested a snapshot, or has finished one.
    HasMail,
}

impl EventLoop {
    /// Creates the loop. [`EventLoop::run`] returns when the end is announced through `end`, or when `mailbox` has a
    /// request.
    ///
    /// # Errors
    /// [`LoopError`].
    pub(crate) fn new(
        end: &Arc<StopLatch>,
        signals: EndingSignals,
        console: Console,
        queues: Option<Queues>,
        mailbox: Arc<Mailbox>,
    ) -> Result<Self, LoopError> {
        let serial = Arc::clone(&console.serial);
        let wakeups = Wakeups {
            end: Arc::clone(end),
            signals,
            console,
            queues,
            mailbox: Arc::clone(&mailbox),
            keyboard: Keyboard::new().map_err(LoopError::Input)?,
            write_at: None,
            failed: None,
        };
        let mut manager = EventManager::new().map_err(LoopError::Loop)?;
        Ok(Self { wakeups: manager.add_subscriber(wakeups), manager, end: Arc::clone(end), serial, mailbox })
    }

    /// Serves until the end is announced, or the mailbox has a request.
    ///
    /// # Errors
    /// [`LoopError`]; the end is then not announced.
    pub(crate) fn run(&mut self) -> Result<Stopped, LoopError> {
        let mut stopped = Stopped::Ended;
        while !self.end.reached() {
            if self.mailbox.has_mail() {
                stopped = Stopped::HasMail;
                break;
            }
            self.serve(None)?;
        }
        self.serial.write_out();
        Ok(stopped)
    }

    /// Serves for `time`, or until the end is announced.
    ///
    /// # Errors
    /// [`LoopError`]; the end is then not announced.
    pub fn run_for(&mut self, time: Duration) -> Result<(), LoopError> {
        let until = Instant::now().checked_add(time);
        while !self.end.reached() && until.is_none_or(|until| Instant::now() < until) {
            self.serve(until)?;
        }
        Ok(())
    }

    /// Serves the next events, if they arrive before `until`.
    fn serve(&mut self, until: Option<Instant>) -> Result<(), LoopError> {
        let wakeups = self.manager.subscriber_mut(self.wakeups);
        let wakeups = wakeups.map_err(LoopError::Loop)?;
        if let Some(error) = wakeups.failed.take() {
            return Err(LoopError::Loop(error));
        }
        wakeups.write_due();
        let until = wakeups.write_at.into_iter().chain(until).min();
        self.manager.run_with_timeout(until.map_or(-1, milliseconds_to)).map_err(LoopError::Loop)?;
        Ok(())
    }
}

/// Milliseconds until `moment`, rounded up.
fn milliseconds_to(moment: Instant) -> i32 {
    let left = moment.saturating_duration_since(Instant::now());
    i32::try_from(left.as_millis()).map_or(i32::MAX, |millis| millis.saturating_add(1))
}

impl Wakeups {
    /// Writes output whose delay has passed.
    fn write_due(&mut self) {
        if self.write_at.is_some_and(|at| at <= Instant::now()) {
            self.write_at = None;
            self.console.serial.write_out();
        }
    }

    fn watch(&self, ops: &mut EventOps<'_>) -> Result<(), event_manager::Error> {
        let mut add = |fd, data| ops.add(Events::with_data_raw(fd, data, EventSet::IN));
        add(self.end.event().as_raw_fd(), END)?;
        add(self.signals.as_raw_fd(), SIGNALS)?;
        add(self.console.room.as_raw_fd(), ROOM)?;
        add(self.console.waiting.as_raw_fd(), OUTPUT)?;
        add(self.mailbox.as_raw_fd(), MAILBOX)?;
        if let Some(queues) = &self.queues {
            add(queues.control.as_raw_fd(), CONTROL)?;
            add(queues.notices.as_raw_fd(), NOTICES)?;
        }
        Ok(())
    }

    /// Passes input to the guest while the serial port has free space. Watches standard input only while there is free
    /// space. Ctrl-A x ends the run.
    fn feed(&mut self, readable: bool, ops: &mut EventOps<'_>) {
        if self.keyboard.feed(&self.console.serial, readable, ops) {
            self.end.announce(Ok(Ending::ByHand));
        }
    }
}

/// Clears an eventfd. Call this before handling the event, so that a write to the eventfd during the handling is not
/// lost.
fn take(event: &EventFd) {
    if let Err(error) = event.read()
        && error.kind() != io::ErrorKind::WouldBlock
    {
        log::error!("an event descriptor failed: {error}");
    }
}

impl MutEventSubscriber for Wakeups {
    fn process(&mut self, events: Events, ops: &mut EventOps<'_>) {
        match events.data() {
            SIGNALS => {
                if let Some(signal) = self.signals.read() {
                    self.end.announce(Ok(Ending::Signal(signal)));
                }
            }
            KEYS => self.feed(true, ops),
            ROOM => {
                take(&self.console.room);
                self.feed(false, ops);
            }
            OUTPUT => {
                take(&self.console.waiting);
                self.write_at.get_or_insert_with(|| Instant::now() + BATCH_TIME);
            }
            CONTROL => {
                if let Some(queues) = &self.queues {
                    take(&queues.control);
                    if queues.vpmu.notify(abi::QUEUE_CONTROL) == Turn::Unfinished
                        && let Err(error) = queues.control.write(1)
                    {
                        log::error!("control requests wait for the driver's next notification: {error}");
                    }
                }
            }
            NOTICES => {
                if let Some(queues) = &self.queues {
                    take(&queues.notices);
                    let _ = queues.vpmu.notify(abi::QUEUE_EVENT);
                }
            }
            MAILBOX => self.mailbox.clear(),
            // `END` needs no action here, because `run` checks for the end.
            _ => {}
        }
    }

    fn init(&mut self, ops: &mut EventOps<'_>) {
        if let Err(error) = self.watch(ops) {
            self.failed = Some(error);
        }
        self.feed(false, ops);
    }
}

/// Passes standard input to the serial port.
#[derive(Debug)]
struct Keyboard {
    input: File,
    keys: Keys,
    /// Input for which the serial port has no room yet.
    pending: Vec<u8>,
    watched: bool,
    /// Whether epoll can watch the input. Regular files and the null device cannot be watched, but they are always
    /// readable.
    watchable: bool,
    ended: bool,
}

impl Keyboard {
    fn new() -> io::Result<Self> {
        Ok(Self {
            input: File::from(io::stdin().as_fd().try_clone_to_owned()?),
            keys: Keys::default(),
            pending: Vec::new(),
            watched: false,
            watchable: true,
            ended: false,
        })
    }

    /// Called when input is readable, and when the guest's serial port has free space. Returns whether Ctrl-A x was
    /// typed.
    fn feed(&mut self, serial: &Serial, mut readable: bool, ops: &mut EventOps<'_>) -> bool {
        loop {
            let taken = serial.input(&self.pending);
            self.pending.drain(..taken.min(self.pending.len()));
            let room = serial.room().min(INPUT);
            if self.ended || room == 0 || !self.pending.is_empty() {
                self.unwatch(ops);
                return false;
            }
            if self.watchable && !readable {
                self.watch(ops);
                if self.watchable {
                    return false;
                }
            }
            let mut bytes = [0; INPUT];
            let bytes = bytes.get_mut(..room).unwrap_or_default();
            match self.input.read(bytes) {
                Ok(0) => self.ended = true,
                Ok(count) => {
                    let typed = self.keys.typed(bytes.get(..count).unwrap_or_default());
                    self.pending.extend(typed.guest);
                    if typed.end {
                        return true;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return false,
                Err(error) => {
                    log::warn!("console input ends: {error}");
                    self.ended = true;
                }
            }
            readable = false;
        }
    }

    fn watch(&mut self, ops: &mut EventOps<'_>) {
        if !self.watched {
            let fd = self.input.as_raw_fd();
            self.watched = ops.add(Events::with_data_raw(fd, KEYS, EventSet::IN)).is_ok();
            self.watchable = self.watched;
        }
    }

    fn unwatch(&mut self, ops: &mut EventOps<'_>) {
        if std::mem::take(&mut self.watched) {
            let fd = self.input.as_raw_fd();
            if let Err(error) = ops.remove(Events::with_data_raw(fd, KEYS, EventSet::IN)) {
                log::error!("console input cannot be paused: {error}");
            }
        }
    }
}
