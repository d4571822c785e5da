//! Shared code of the tests of AUX areas: opens and reads a trace with its ring and its area.

use perf_event_open_sys::bindings::perf_event_attr;

use crate::areas::{self, Area, Chunk, contiguous, reported};
use crate::ensure::ensure_eq;
use crate::packets::{Exit, Ledger, exits};
use crate::pages::{Pages, READ_WRITE};
use crate::raw::{Device, Event, FORMAT_LOST, How};
use crate::{Fallible, Outcome, cpu};

/// A trace with its ring and its area.
pub(crate) struct Traced {
    pub(crate) event: Event,
    pub(crate) ring: Pages,
    pub(crate) area: Area,
    pub(crate) ledger: Ledger,
    /// The end of the last chunk that the ring reported.
    pub(crate) reported: u64,
    attr: perf_event_attr,
}

impl Traced {
    /// Opens a disabled trace with its ring and area.
    pub(crate) fn open(
        device: &Device,
        attr: perf_event_attr,
        how: How<'_>,
        pages: usize,
        protection: i32,
    ) -> std::io::Result<Self> {
        let attr = perf_event_attr { read_format: FORMAT_LOST, ..attr };
        let event = device.open_event(&attr, how)?;
        let ring = Pages::map(&event, 1, READ_WRITE)?;
        let area = Area::map(&event, &ring, pages, protection)?;
        Ok(Self { event, ring, area, ledger: Ledger::default(), reported: 0, attr })
    }

    /// Returns the number of bytes produced and the number of bytes lost, as reported by read(2). This call also
    /// publishes the data written so far.
    pub(crate) fn read(&self) -> Fallible<(u64, u64)> {
        match self.event.read()?[..] {
            [count, lost] => Ok((count, lost)),
            ref words => Err(format!("a reading of {words:?}").into()),
        }
    }

    /// Takes the published packets, and checks that they continue the packets that were taken before. Returns the exits
    /// among them.
    pub(crate) fn take(&mut self) -> Result<Vec<Exit>, String> {
        let packets = self.area.take(&self.ring)?;
        self.ledger.follow(&packets)?;
        Ok(exits(&packets))
    }

    /// Takes the records in the ring, which report chunks of the area. Each chunk must begin where the previous one
    /// ended.
    pub(crate) fn chunks(&mut self) -> Result<Vec<Chunk>, String> {
        let reported = reported(&self.ring.take()?, &self.attr)?;
        self.reported = contiguous(&reported.chunks, self.reported)?;
        Ok(reported.chunks)
    }

    /// Checks an invariant of every trace: each byte that the trace produced was either written to the area or lost,
    /// and the ring reports all bytes that were written to the area.
    pub(crate) fn balance(&mut self) -> Outcome {
        let (count, lost) = self.read()?;
        let head = areas::head(&self.ring);
        ensure_eq!(count, head + lost, "bytes produced; {head} bytes were written and {lost} lost");
        self.chunks()?;
        // If the ring was full, this read reports the chunks for which the ring had no room.
        self.read()?;
        self.chunks()?;
        // A read of an event that is off does not reach the device, but a flush does.
        if self.reported != head {
            self.event.flush(0)?;
            self.chunks()?;
        }
        ensure_eq!(self.reported, head, "the end of the last chunk");
        Ok(())
    }
}

/// Pins this thread to CPU 1, and returns an enabled trace of that CPU. A trace of the task is not suitable, because
/// each task switch would schedule the trace out and so publish its data early.
pub(crate) fn start(device: &Device, attr: perf_event_attr, pages: usize, protection: i32) -> std::io::Result<Traced> {
    cpu::allow_ports()?;
    cpu::pin(1)?;
    let traced = Traced::open(device, attr, How::on_cpu(1), pages, protection)?;
    traced.event.enable(0)?;
    Ok(traced)
}
