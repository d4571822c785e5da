//! An area that the driver manages, for example through perf's AUX interface in the guest kernel. The driver grants
//! space to the device, fetches the device's position, and notifies the reader.

use super::writer::{Refused, Writer};
use super::{Appended, Entry, SavedKeeper, SavedSpan};
use crate::pages::{GuestPages, Pages};
use crate::saved::Fault;

#[derive(Debug)]
pub(super) struct DriverOwned {
    writer: Writer,
    /// Outside overwrite mode, the driver is notified at multiples of this many bytes and when half of the granted
    /// space is used. In every mode, the driver is notified when an entry is lost.
    watermark: u64,
    span: Option<Span>,
}

/// An event's permission to write, from COMMAND_AUX_BEGIN to COMMAND_AUX_END.
#[derive(Debug, Clone, Copy)]
struct Span {
    event: u64,
    /// Bytes of room that the driver granted.
    room: u64,
    /// Number of bytes lost because there was no room or the pages were not writable.
    lost: u64,
    /// Whether the driver was notified in this span.
    notified: bool,
}

impl DriverOwned {
    pub(super) fn new(size: u64, overwrite: bool, watermark: u64) -> Self {
        Self { writer: Writer::new(size, overwrite), watermark, span: None }
    }

    pub(super) fn writer(&self) -> &Writer {
        &self.writer
    }

    pub(super) fn watermark(&self) -> u64 {
        self.watermark
    }

    /// The current state, to be saved.
    pub(super) fn save(&self) -> SavedKeeper {
        let span = self.span.map(|span| SavedSpan {
            event: span.event,
            room: span.room,
            lost: span.lost,
            told: span.notified,
        });
        SavedKeeper::Driver { span }
    }

    /// Restores a saved area.
    ///
    /// # Errors
    /// The saved state is not valid.
    pub(super) fn restore(writer: Writer, watermark: u64, span: Option<&SavedSpan>) -> Result<Self, Fault> {
        if span.is_some() != writer.begun().is_some() {
            return Err("the area has an open write without a span of the driver, or a span without an open write");
        }
        if span.is_some_and(|span| span.room > writer.size()) {
            return Err("the driver's span is larger than the area");
        }
        let span = span.map(|span| Span { event: span.event, room: span.room, lost: span.lost, notified: span.told });
        Ok(Self { writer, watermark, span })
    }

    pub(super) fn position(&self, event: u64) -> Option<u64> {
        self.span.filter(|span| span.event == event).map(|_| self.writer.head())
    }

    pub(super) fn begin(&mut self, event: u64, head: u64, room: u64) -> Result<(), Refused> {
        if room > self.writer.size() {
            return Err(Refused::NoRoom);
        }
        self.writer.begin_at(head, room)?;
        self.span = Some(Span { event, room, lost: 0, notified: false });
        Ok(())
    }

    pub(super) fn finish(&mut self, event: u64) -> Result<(u64, u64), Refused> {
        let span = self.span.filter(|span| span.event == event).ok_or(Refused::NotBegun)?;
        self.span = None;
        self.writer.end(None::<&GuestPages<'_>>)?;
        Ok((self.writer.head(), span.lost))
    }

    /// Writes an entry of `event`. The driver is notified at most once per grant of space.
    pub(super) fn append(&mut self, pages: &mut impl Pages, event: u64, entry: &Entry<'_>) -> Appended {
        let Some(span) = self.span.as_mut().filter(|span| span.event == event) else {
            return Appended::default();
        };
        let before = self.writer.head();
        let placed = self.writer.write(pages, entry);
        let head = self.writer.head();
        let due = match &placed {
            Ok(()) => {
                let marked = before / self.watermark != head / self.watermark;
                // The next multiple of the watermark may lie beyond the granted space, so the driver is also notified
                // when half of that space is used.
                !self.writer.overwrites() && (marked || self.writer.room() <= span.room / 2)
            }
            Err(refused) => {
                if !matches!(refused, Refused::NoRoom) {
                    log::debug!("AUX area: {refused}");
                }
                let packet = size_of_val(entry.parts[1]) as u64;
                span.lost = span.lost.saturating_add(packet);
                true
            }
        };
        let wake = due && !std::mem::replace(&mut span.notified, true);
        Appended { whole: placed.is_ok(), written: head.wrapping_sub(before), chunk: None, wake }
    }
}
