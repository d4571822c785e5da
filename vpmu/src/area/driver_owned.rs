//! An area that the driver manages, as the guest kernel's own perf does: the driver grants room,
//! fetches the device's position, and notifies the reader.

use super::writer::{Refused, Writer};
use super::{Appended, Entry};
use crate::pages::{GuestPages, Pages};
use crate::save::{Fault, SavedKeeper, SavedTurn};

#[derive(Debug)]
pub(super) struct DriverOwned {
    writer: Writer,
    /// The driver is notified at multiples of this many bytes, when half of the room is used, or at a
    /// loss.
    watermark: u64,
    turn: Option<Turn>,
}

/// The driver's grant to an event, from COMMAND_AUX_BEGIN to COMMAND_AUX_END.
#[derive(Debug, Clone, Copy)]
struct Turn {
    event: u64,
    /// Bytes of room that the driver granted.
    room: u64,
    /// Bytes lost for lack of room.
    lost: u64,
    /// Whether the driver was notified.
    told: bool,
}

impl DriverOwned {
    pub(super) fn new(size: u64, overwrite: bool, watermark: u64) -> Self {
        Self {
            writer: Writer::new(size, overwrite),
            watermark,
            turn: None,
        }
    }

    pub(super) fn writer(&self) -> &Writer {
        &self.writer
    }

    pub(super) fn watermark(&self) -> u64 {
        self.watermark
    }

    /// The current state, to be saved.
    pub(super) fn save(&self) -> SavedKeeper {
        let turn = self.turn.map(|turn| SavedTurn {
            event: turn.event,
            room: turn.room,
            lost: turn.lost,
            told: turn.told,
        });
        SavedKeeper::Driver { turn }
    }

    /// Restores a saved area.
    ///
    /// # Errors
    /// The saved state is not valid.
    pub(super) fn restore(
        writer: Writer,
        watermark: u64,
        turn: Option<&SavedTurn>,
    ) -> Result<Self, Fault> {
        if turn.is_some() != writer.begun().is_some() {
            return Err("the open write contradicts the event that may write");
        }
        if turn.is_some_and(|turn| turn.room > writer.size()) {
            return Err("an event has more room than the area");
        }
        let turn = turn.map(|turn| Turn {
            event: turn.event,
            room: turn.room,
            lost: turn.lost,
            told: turn.told,
        });
        Ok(Self {
            writer,
            watermark,
            turn,
        })
    }

    pub(super) fn position(&self, event: u64) -> Option<u64> {
        self.turn
            .filter(|turn| turn.event == event)
            .map(|_| self.writer.head())
    }

    pub(super) fn begin(&mut self, event: u64, head: u64, room: u64) -> Result<(), Refused> {
        if room > self.writer.size() {
            return Err(Refused::NoRoom);
        }
        self.writer.begin_at(head, room)?;
        self.turn = Some(Turn {
            event,
            room,
            lost: 0,
            told: false,
        });
        Ok(())
    }

    pub(super) fn finish(&mut self, event: u64) -> Result<(u64, u64), Refused> {
        let turn = self
            .turn
            .filter(|turn| turn.event == event)
            .ok_or(Refused::NotBegun)?;
        self.turn = None;
        self.writer.end(None::<&GuestPages<'_>>)?;
        Ok((self.writer.head(), turn.lost))
    }

    /// Writes an entry of `event`; the driver is notified once per turn.
    pub(super) fn append(
        &mut self,
        pages: &mut impl Pages,
        event: u64,
        entry: &Entry<'_>,
    ) -> Appended {
        let Some(turn) = self.turn.as_mut().filter(|turn| turn.event == event) else {
            return Appended::default();
        };
        let before = self.writer.head();
        let placed = self.writer.write(pages, entry);
        let head = self.writer.head();
        let due = match &placed {
            Ok(()) => {
                let marked = before / self.watermark != head / self.watermark;
                // If the next mark is beyond the room, the driver must still be notified in time.
                !self.writer.overwrites() && (marked || self.writer.room() <= turn.room / 2)
            }
            Err(refused) => {
                if !matches!(refused, Refused::NoRoom) {
                    log::debug!("AUX area: {refused}");
                }
                let packet = size_of_val(entry.parts[1]) as u64;
                turn.lost = turn.lost.saturating_add(packet);
                true
            }
        };
        let wake = due && !std::mem::replace(&mut turn.told, true);
        Appended {
            whole: placed.is_ok(),
            written: head.wrapping_sub(before),
            chunk: None,
            wake,
        }
    }
}
