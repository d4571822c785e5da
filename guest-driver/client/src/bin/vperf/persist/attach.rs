//! `vperf persist attach`: makes a persistent event non-persistent, and shows its records until a
//! signal arrives.

use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use vpmu_client::event::poll;
use vpmu_client::history::HistoryError;
use vpmu_client::ring::RingError;
use vpmu_client::{Event, History, Persistent, Record, Ring, Vpmu};

use super::render::Rendering;
use super::{PersistError, not_operators};
use crate::format::grouped;
use crate::os::Signals;
use crate::recording::say;
use crate::target::{TargetError, is_away};

/// Maximum time that a sample waits in the ring before it is shown.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Take over a persistent event and read it until Ctrl-C.
///
/// The event is no longer persistent: it ends with this program, unless other programs have it
/// open. Until Ctrl-C, vperf shows the event's past and new records, in the format of
/// `vperf persist dump`.
#[derive(Debug, Args)]
pub(super) struct AttachArgs {
    /// Id or name of the event, as `vperf persist ls` shows them.
    #[arg(value_name = "ID|NAME")]
    event: String,
    /// Write a file for `vperf report -i FILE` at the end, instead of printing samples as they
    /// come.
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
}

/// The method of reading the event's ring.
#[derive(Debug)]
enum Reader<'a> {
    /// A ring in overwrite mode, with the position after the last read.
    Newest(History<'a>, Option<u64>),
    /// A ring whose records are consumed.
    Unread(Ring),
    /// An event without a ring.
    None,
}

impl<'a> Reader<'a> {
    fn new(event: &'a Event, listed: &Persistent) -> Result<Self, HistoryError> {
        Ok(match (listed.data_pages, listed.overwrites) {
            (None | Some(0), _) => Self::None,
            (Some(pages), true) => Self::Newest(History::map(event, pages, true)?, None),
            (Some(pages), false) => Self::Unread(event.map(pages.ilog2())?),
        })
    }

    /// Passes new records to `each`; returns the bytes overwritten before they were read.
    fn read(&mut self, mut each: impl FnMut(&Record)) -> Result<u64, HistoryError> {
        match self {
            Self::None => Ok(0),
            Self::Newest(history, position) => {
                let snapshot = match *position {
                    None => history.read()?,
                    Some(position) => history.since(position)?,
                };
                *position = Some(snapshot.position);
                snapshot.records.iter().for_each(each);
                Ok(snapshot.missed)
            }
            Self::Unread(ring) => {
                // Stop at the current head: the ring may fill as fast as it is read.
                let head = ring.head();
                while head.wrapping_sub(ring.tail()).cast_signed() > 0 {
                    match ring.next_record() {
                        Ok(Some(record)) => each(&record),
                        Ok(None) => break,
                        Err(RingError::Record { .. }) => {}
                        Err(error) => return Err(error.into()),
                    }
                }
                Ok(0)
            }
        }
    }
}

pub(super) fn run(args: &AttachArgs) -> Result<(), PersistError> {
    let vpmu = Vpmu::open()?;
    let listed = vpmu.find_persistent(&args.event)?;
    not_operators(&listed)?;
    let signals = Signals::catch(&[]).map_err(TargetError::Signals)?;
    let event = vpmu.reopen(&listed)?;
    let name = || listed.name.clone();
    let history = |source| PersistError::History { name: name(), source };
    let mut reader = Reader::new(&event, &listed).map_err(history)?;
    // If the event's CPU is offline, fail before attaching: an attached event ends with this program, even if a later
    // step fails.
    if let Err(error) = event.flush()
        && is_away(&error)
    {
        return Err(PersistError::Away { name: name(), cpu: listed.cpu });
    }
    event.attach()?;
    let mut rendering = Rendering::new(&vpmu, std::slice::from_ref(&listed));
    let mut missed = 0;
    let mut ended = matches!(reader, Reader::None);
    loop {
        if ended {
            // Have the host write pending samples. Ignore an error: if the event is in the error
            // state, reading its count below fails as well, and that error is reported.
            let _ = event.flush();
        }
        missed += reader.read(|record| rendering.add(0, record)).map_err(history)?;
        if args.output.is_none() {
            write(&vpmu, &mut rendering)?;
        }
        if ended {
            break;
        }
        ended = wait(&signals, &event, &reader)?;
    }
    let sums = rendering.sums();
    if let Some(path) = &args.output {
        rendering.write(&vpmu, path)?;
    }
    let count = event.read().map_err(|source| PersistError::Event { name: name(), source })?;
    say(&format!(
        "{}: counted {}; {} samples shown, {} lost, {missed} bytes overwritten before they were read; the event ends",
        listed.name,
        grouped(count.value),
        grouped(sums.samples),
        grouped(sums.lost),
    ));
    Ok(())
}

fn write(vpmu: &Vpmu, rendering: &mut Rendering) -> Result<(), PersistError> {
    let text = rendering.take_text(vpmu)?;
    let mut stdout = io::stdout();
    stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()).map_err(PersistError::Write)
}

/// Waits for records or a signal, but no longer than [`LOOK_EVERY`]. Returns true if a signal arrived, or if the event
/// makes no more records.
fn wait(signals: &Signals, event: &Event, reader: &Reader<'_>) -> Result<bool, PersistError> {
    let mut fds: Vec<BorrowedFd<'_>> = vec![signals.as_fd()];
    // Do not poll an event whose ring is in overwrite mode. Each read flushes the event and a flush
    // wakes readers, so the poll would return immediately.
    if matches!(reader, Reader::Unread(_)) {
        fds.push(event.as_fd());
    }
    let ready = poll(&fds, Some(LOOK_EVERY)).map_err(TargetError::Wait)?;
    let closed = ready.iter().any(|ready| ready.closed);
    Ok(closed || ready.first().is_some_and(|signals| signals.readable))
}
