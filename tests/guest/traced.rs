//! A trace with its ring and its area, as the tests of AUX areas read it.

use perf_event_open_sys::bindings::perf_event_attr;

use crate::areas::{self, Area, Chunk, contiguous, told};
use crate::ensure::ensure_eq;
use crate::packets::{Exit, Ledger, exits};
use crate::pages::{Pages, READ_WRITE};
use crate::raw::{Device, Event, FORMAT_LOST, How};
use crate::{Outcome, cpu};

/// A trace with its ring and its area.
pub(crate) struct Traced {
    pub(crate) event: Event,
    pub(crate) ring: Pages,
    pub(crate) area: Area,
    pub(crate) ledger: Ledger,
    /// The end of the last chunk that the ring reported.
    pub(crate) told: u64,
    attr: perf_event_attr,
}

impl Traced {
    /// Opens a trace with its ring and area, disabled.
    pub(crate) fn open(
        device: &Device,
        attr: perf_event_attr,
        how: How<'_>,
        pages: usize,
        protection: i32,
    ) -> std::io::Result<Self> {
        let attr = perf_event_attr {
            read_format: FORMAT_LOST,
            ..attr
        };
        let event = device.open_event(&attr, how)?;
        let ring = Pages::map(&event, 1, READ_WRITE)?;
        let area = Area::map(&event, &ring, pages, protection)?;
        Ok(Self {
            event,
            ring,
            area,
            ledger: Ledger::default(),
            told: 0,
            attr,
        })
    }

    /// Bytes produced and bytes lost, by read(2), which also publishes what was written.
    pub(crate) fn read(&self) -> Result<(u64, u64), Box<dyn std::error::Error>> {
        match self.event.read()?[..] {
            [count, lost] => Ok((count, lost)),
            ref words => Err(format!("a reading of {words:?}").into()),
        }
    }

    /// Takes the published packets, which must follow the earlier ones. Returns their exits.
    pub(crate) fn take(&mut self) -> Result<Vec<Exit>, String> {
        let packets = self.area.take(&self.ring)?;
        self.ledger.follow(&packets)?;
        Ok(exits(&packets))
    }

    /// Takes the ring's records: chunks, which must follow the earlier ones.
    pub(crate) fn chunks(&mut self) -> Result<Vec<Chunk>, String> {
        let told = told(&self.ring.take()?, &self.attr)?;
        self.told = contiguous(&told.chunks, self.told)?;
        Ok(told.chunks)
    }

    /// Checks an invariant of every trace: the bytes produced are those in the area and those
    /// lost, and the ring reports all that are in the area.
    pub(crate) fn balance(&mut self) -> Outcome {
        let (count, lost) = self.read()?;
        let head = areas::head(&self.ring);
        ensure_eq!(
            count,
            head + lost,
            "produced, of {head} written and {lost} lost"
        );
        self.chunks()?;
        // If the ring was full, it now reports the pieces that it had no room for.
        self.read()?;
        self.chunks()?;
        ensure_eq!(self.told, head, "where the chunks end");
        Ok(())
    }
}

/// Returns an enabled trace of CPU 1, where it pins this thread, so that no task switch publishes data early.
pub(crate) fn start(
    device: &Device,
    attr: perf_event_attr,
    pages: usize,
    protection: i32,
) -> std::io::Result<Traced> {
    cpu::allow_ports()?;
    cpu::pin(1)?;
    let traced = Traced::open(device, attr, How::on_cpu(1), pages, protection)?;
    traced.event.enable(0)?;
    Ok(traced)
}
