//! `vperf top`: a live profile of the machine.

use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use clap::Args;
use vpmu_client::Vpmu;
use vpmu_client::device::DeviceError;
use vpmu_client::error::chain;
use vpmu_client::ring::RingError;
use vpmu_client::tasks::TasksError;

use crate::events::EventArgs;
use crate::format::grouped;
use crate::frames::{Frame, FrameCollector};
use crate::labels::Key;
use crate::report::rows_table;
use crate::sampling::{Rings, SamplingArgs, SamplingError};
use crate::session::Session;
use crate::target::{Opened, TargetArgs, TargetError};
use crate::terminal::Terminal;
use crate::workload::WorkloadError;

/// Maximum time that samples wait in a ring before their processes are looked up.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// Number of table rows in a frame that is not shown on a terminal.
const USUAL_ROWS: usize = 20;
/// Number of lines in a frame in addition to the table rows.
const HEAD_LINES: usize = 4;

/// Show live which functions the samples of an event hit.
///
/// Without a target, measures all CPUs. Each refresh shows the samples since the previous one. On
/// a terminal, press q to quit. Elsewhere, or with --batch, the tables are written one after
/// another.
///
/// Examples:
///   vperf top
///   vperf top -p 42 --sort symbol
///   vperf top --batch -n 5 -d 2 -a
#[derive(Debug, Args)]
#[command(verbatim_doc_comment)]
pub(crate) struct TopArgs {
    #[command(flatten)]
    events: EventArgs,
    #[command(flatten)]
    sampling: SamplingArgs,
    /// Seconds between two refreshes.
    #[arg(short, long, value_name = "SECONDS", default_value = "1", value_parser = seconds)]
    delay: Duration,
    /// Write one table after the other, also on a terminal.
    #[arg(long)]
    batch: bool,
    /// End after this many refreshes.
    #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    frames: Option<u64>,
    /// Group samples by these fields.
    #[arg(long, value_enum, value_name = "KEY,...", value_delimiter = ',',
          default_values = ["comm", "object", "symbol"])]
    sort: Vec<Key>,
    /// Show at most this many lines. [default: as many as fit on the terminal, or 20 without one]
    #[arg(long, value_name = "N")]
    limit: Option<usize>,
    /// Write each refresh as one line of JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    pub(crate) target: TargetArgs,
}

/// An error of the view.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TopError {
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error(transparent)]
    Sampling(#[from] SamplingError),
    #[error("top shows one event at a time, not {0}: name one with -e")]
    OneEvent(usize),
    #[error(transparent)]
    Workload(WorkloadError),
    #[error(transparent)]
    Target(TargetError),
    #[error(transparent)]
    Tasks(#[from] TasksError),
    #[error("cannot use the terminal")]
    Terminal(#[source] io::Error),
    #[error("cannot write the table")]
    Write(#[source] io::Error),
}

impl From<TargetError> for TopError {
    fn from(error: TargetError) -> Self {
        match error {
            TargetError::Workload(error) => Self::Workload(error),
            error => Self::Target(error),
        }
    }
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "not a number of seconds")?;
    if (0.1..=3600.0).contains(&seconds) {
        Ok(Duration::from_secs_f64(seconds))
    } else {
        Err("not from 0.1 to 3600 seconds".into())
    }
}

pub(crate) fn run(args: &TopArgs) -> Result<u8, TopError> {
    let vpmu = Vpmu::open()?;
    let chosen = args.sampling.choose(&args.events, &vpmu, |attr| attr)?;
    let [event] = chosen.as_slice() else {
        return Err(TopError::OneEvent(chosen.len()));
    };
    let target_args = args.target.or_all_cpus();
    let target = target_args.prepare()?;
    let (opened, rings) = args.sampling.open(&vpmu, &target, &chosen)?;
    let collector = FrameCollector::new();
    let session = Session::start(target, &opened)?;
    // Take the terminal last, so that no error path leaves it in live mode.
    let terminal = match args.batch || args.json {
        true => None,
        false => Terminal::take().map_err(TopError::Terminal)?,
    };
    let top = Top {
        args,
        heading: format!("{}: {}", target_args.describe(), event.name),
        rings,
        collector,
        terminal,
        unreadable: None,
    };
    top.follow(&opened, session)
}

/// An open view.
struct Top<'a> {
    args: &'a TopArgs,
    heading: String,
    rings: Rings,
    collector: FrameCollector,
    terminal: Option<Terminal>,
    /// The cause of the first unreadable record since the last frame.
    unreadable: Option<String>,
}

/// The cause of a wakeup.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Woken {
    Time,
    Key,
    End,
}

impl Top<'_> {
    fn follow(mut self, opened: &[Opened], mut session: Session) -> Result<u8, TopError> {
        let mut open: Vec<BorrowedFd<'_>> = opened.iter().map(|o| o.event.as_fd()).collect();
        let mut shown = 0;
        let mut started = Instant::now();
        loop {
            let due = started + self.args.delay;
            let woken = self.wait(&mut session, &mut open, due)?;
            if woken == Woken::Key {
                break;
            }
            if woken == Woken::End {
                session.stop(opened)?;
                self.drain()?;
                // Flush each event, so that the device writes the event's pending record of lost
                // samples, for which the ring now has space. Ignore failed flushes: an event in the
                // error state cannot be flushed, but it has no pending record.
                for opened in opened {
                    let _ = opened.event.flush();
                }
                self.drain()?;
            }
            let elapsed = started.elapsed();
            started = Instant::now();
            shown += 1;
            self.show(shown, elapsed)?;
            if woken == Woken::End || Some(shown) == self.args.frames {
                break;
            }
        }
        drop(self.terminal.take());
        Ok(session.end()?)
    }

    /// Reads the rings until `due`, until a key ends the view, or until the measurement ends.
    fn wait(&mut self, session: &mut Session, open: &mut Vec<BorrowedFd<'_>>, due: Instant) -> Result<Woken, TopError> {
        let mut ready = Vec::new();
        loop {
            let left = due.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(Woken::Time);
            }
            let keys = self.terminal.as_ref().map(Terminal::keys);
            let others: Vec<BorrowedFd<'_>> = open.iter().copied().chain(keys).collect();
            let ended = session.wait(&others, Some(left.min(LOOK_EVERY)), &mut ready)?;
            let key = ready.get(open.len()).is_some_and(|r| r.readable || r.closed);
            // Remove closed events, because poll(2) would always report them ready.
            let mut answers = ready.iter();
            open.retain(|_| !answers.next().is_some_and(|ready| ready.closed));
            self.drain()?;
            if ended {
                return Ok(Woken::End);
            }
            if let Some(terminal) = self.terminal.as_mut().filter(|_| key)
                && terminal.wants_end().map_err(TopError::Terminal)?
            {
                return Ok(Woken::Key);
            }
        }
    }

    fn drain(&mut self) -> Result<(), TopError> {
        for (_, ring) in &mut self.rings {
            // Stop at the current head, so that a ring that fills as fast as it is read does not starve the other
            // rings.
            let head = ring.head();
            while head.wrapping_sub(ring.tail()).cast_signed() > 0 {
                match ring.next_record() {
                    Ok(Some(record)) => self.collector.record(&record),
                    Ok(None) => break,
                    Err(error) => {
                        if !matches!(error, RingError::Record { .. }) {
                            ring.skip();
                        }
                        self.unreadable.get_or_insert_with(|| chain(&error));
                    }
                }
            }
        }
        Ok(self.collector.look()?)
    }

    fn show(&mut self, number: u64, elapsed: Duration) -> Result<(), TopError> {
        let mut frame = self.collector.frame(&self.args.sort);
        let room = self.terminal.as_ref().map_or(USUAL_ROWS, |terminal| terminal.rows().saturating_sub(HEAD_LINES));
        frame.rows.truncate(self.args.limit.unwrap_or(room));
        let unreadable = self.unreadable.take();
        if self.args.json {
            let json = serde_json::to_string(&frame).map_err(|error| TopError::Write(error.into()))?;
            return write(&(json + "\n")).map_err(TopError::Write);
        }
        let mut text = self.head(&frame, elapsed, unreadable.as_deref());
        text.push_str(&rows_table(&frame.rows, &self.args.sort, false));
        match &mut self.terminal {
            Some(terminal) => terminal.show(&text).map_err(TopError::Terminal),
            None => {
                let blank = if number > 1 { "\n" } else { "" };
                write(&format!("{blank}{text}")).map_err(TopError::Write)
            }
        }
    }

    fn head(&self, frame: &Frame, elapsed: Duration, unreadable: Option<&str>) -> String {
        let mut text = format!(
            "# {}, {:.1} s: {} samples, {} lost, throttled {} times\n#",
            self.heading,
            elapsed.as_secs_f64(),
            grouped(frame.samples),
            grouped(frame.lost),
            grouped(frame.throttled)
        );
        if self.collector.kernel_is_hidden() {
            text.push_str(" The kernel hides its addresses: run as root, or set kernel.kptr_restrict to 0.");
        }
        if let Some(error) = unreadable {
            text.push_str(&format!(" A record could not be read: {error}"));
        }
        text.push_str("\n\n");
        text
    }
}

fn write(text: &str) -> io::Result<()> {
    let mut output = io::stdout();
    output.write_all(text.as_bytes())?;
    output.flush()
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        args: TopArgs,
    }

    #[test]
    fn options_are_checked_before_anything_runs() {
        let line = Line::try_parse_from(["top", "--batch", "-n", "3", "-d", "0.5", "true", "-n"]);
        let args = line.unwrap().args;
        assert_eq!((args.frames, args.delay), (Some(3), Duration::from_millis(500)));
        assert_eq!(args.target.command, ["true", "-n"]);
        for wrong in [
            ["-d", "0"],
            ["-d", "-1"],
            ["-d", "x"],
            ["-d", "1e9"],
            ["-d", "NaN"],
            ["-n", "0"],
            ["--sort", "colour"],
            ["-p", "0"],
        ] {
            let line = ["top"].into_iter().chain(wrong);
            assert!(Line::try_parse_from(line).is_err(), "{wrong:?}");
        }
    }
}
