//! Opens both tracepoints on one vCPU's thread, and lets them write to one host ring.

use std::fs::File;
use std::io::{self, Read};
use std::sync::Arc;

use vpmu_perf::bindings::{PERF_SAMPLE_RAW, PERF_SAMPLE_TIME, PERF_TYPE_TRACEPOINT, perf_event_attr};

use super::pairs::{Pairs, TracedItem};
use super::{Layout, Tracepoints};
use crate::host::clock::Clock;
use crate::host::ring::{HostRing, Pool};
use crate::host::sys;
use crate::source::{Counter, HostExit, Overflows, Rate, Reading, Recorded};

/// Data pages of the ring. They hold 7,000 exits, which is as many as a busy vCPU causes in 10 ms.
const PAGES: usize = 256;

/// Records the exits of one vCPU.
#[derive(Debug)]
pub(in crate::host) struct Recorder {
    layout: Layout,
    exits: File,
    /// The tracepoint of entries. It is enabled together with `exits`, and its records go to the ring of `exits`.
    _entries: File,
    ring: HostRing,
    clock: Arc<Clock>,
    pairs: Pairs,
    running: bool,
    /// Number of exits reported so far, including lost ones.
    reported: u64,
    /// Number of exits that were already reported as lost, but are not yet in a loss record of the ring.
    ahead: u64,
    /// The latest reported time. Each drain converts the host's times with a new [`Clock::line`], but reported times
    /// must not decrease.
    newest: u64,
}

impl Recorder {
    /// Opens both tracepoints, stopped, on `thread`.
    pub(in crate::host) fn open(
        tracepoints: &Tracepoints,
        thread: i32,
        clock: &Arc<Clock>,
        pool: &Arc<Pool>,
    ) -> io::Result<Box<dyn Counter>> {
        let layout = tracepoints.layout;
        let exits = sys::open(&attr(layout.exit, true), thread)?;
        let entries = sys::open_member(&attr(layout.entry, false), thread, &exits)?;
        let ring = HostRing::long(&exits, PAGES, pool)?;
        sys::redirect(&entries, &exits)?;
        Ok(Box::new(Self {
            layout,
            exits,
            _entries: entries,
            ring,
            clock: Arc::clone(clock),
            pairs: Pairs::default(),
            running: false,
            reported: 0,
            ahead: 0,
            newest: 0,
        }))
    }

    fn count(&mut self) -> io::Result<u64> {
        let mut count = [0; 8];
        self.exits.read_exact(&mut count)?;
        Ok(u64::from_ne_bytes(count))
    }
}

/// Opens both tracepoints on the calling thread, and closes them again.
pub(super) fn probe(layout: &Layout) -> io::Result<()> {
    let exits = sys::open(&attr(layout.exit, true), 0)?;
    sys::open_member(&attr(layout.entry, false), 0, &exits)?;
    Ok(())
}

/// Returns the host's attributes for a tracepoint. They make the host record each hit with all of its raw data.
fn attr(id: u16, disabled: bool) -> perf_event_attr {
    let mut attr = perf_event_attr {
        type_: PERF_TYPE_TRACEPOINT,
        config: id.into(),
        sample_type: u64::from(PERF_SAMPLE_TIME | PERF_SAMPLE_RAW),
        clockid: libc::CLOCK_MONOTONIC_RAW,
        ..perf_event_attr::default()
    };
    attr.__bindgen_anon_1.sample_period = 1;
    attr.set_disabled(disabled.into());
    attr.set_use_clockid(1);
    // No thread waits for the event's wakeups. The largest watermark makes them as rare as possible.
    attr.set_watermark(1);
    attr.__bindgen_anon_2.wakeup_watermark = u32::MAX;
    attr
}

impl Counter for Recorder {
    fn start(&mut self) -> io::Result<()> {
        self.running = true;
        sys::enable(&self.exits)
    }

    fn stop(&mut self) -> io::Result<()> {
        self.running = false;
        sys::disable(&self.exits)
    }

    fn read(&mut self) -> io::Result<Reading> {
        Ok(Reading { value: self.count()?, ..Reading::default() })
    }

    fn set_rate(&mut self, _rate: Rate) -> io::Result<()> {
        Err(io::Error::from_raw_os_error(libc::EINVAL))
    }

    fn drain(&mut self, into: &mut Overflows) {
        let line = self.clock.line();
        let (reported, ahead, newest) = (&mut self.reported, &mut self.ahead, &mut self.newest);
        let mut tsc = |time| {
            *newest = line.tsc(time).max(*newest);
            *newest
        };
        let mut found = |found| {
            let recorded = match found {
                TracedItem::Exit(exit) => {
                    *reported += 1;
                    let [qualification, detail] = exit.info;
                    Recorded::Exit(HostExit {
                        tsc: tsc(exit.time),
                        back: exit.back.map(&mut tsc),
                        ip: exit.ip,
                        reason: exit.reason,
                        qualification,
                        detail,
                    })
                }
                TracedItem::Lost(exits) => {
                    let known = exits.min(*ahead);
                    *ahead -= known;
                    *reported = reported.saturating_add(exits - known);
                    if exits == known {
                        return;
                    }
                    Recorded::Lost(exits - known)
                }
            };
            into.exits.push(recorded);
        };
        if let Some(stretch) = self.ring.stretch() {
            let word = |offset| stretch.word(offset);
            let (tail, head) = (stretch.tail, stretch.head);
            let size = self.ring.size();
            self.pairs.take(&self.layout, word, size, tail, head, &mut found);
        }
        if self.running {
            return;
        }
        self.pairs.finish(&mut found);
        // The host writes a loss record only before the next record that fits in the ring. Until then, only the
        // event's count includes the lost exits.
        let silent = self.count().unwrap_or(0).saturating_sub(self.reported);
        if silent > 0 {
            self.reported += silent;
            self.ahead += silent;
            into.exits.push(Recorded::Lost(silent));
        }
    }
}
