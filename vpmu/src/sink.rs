//! A sink: one ring in guest memory and the AUX area beside it, held by the events that write there.
//! Whoever writes takes the sink's lock for a record, or for a burst of them.

use vm_memory::GuestAddress;

use crate::aux::{Appended, Area, Chunk, Refused, Window};
use crate::clock::Clock;
use crate::event::EventSpec;
use crate::locks::{Lock, SINK};
use crate::memory::{Memory, View};
use crate::pages::GuestPages;
use crate::record::{Layout, Origin, Record};
use crate::ring::{CountSnapshot, Outcome, Ring, Session, WriteContext};
use crate::save::{SaveError, SavedPendingAux, SavedSink};
use crate::trace::{Packet, Trace};

/// A ring, an AUX area, or both, in cache lines of its own.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct Sink {
    /// The event that they were mapped with, even if it is closed by now.
    id: u64,
    state: Lock<State, SINK>,
}

#[derive(Debug, Default)]
struct State {
    ring: Option<Mapped<Ring>>,
    area: Option<Mapped<Area>>,
    pending: Option<PendingAuxRecord>,
}

/// A ring or area with the memory that it lies in.
#[derive(Debug)]
struct Mapped<T> {
    what: T,
    memory: Memory,
}

/// A piece of the area that has ended, and that no record reports yet.
#[derive(Debug, Clone, Copy)]
struct PendingAuxRecord {
    chunk: Chunk,
    /// The record is that of the event that ended the piece last.
    layout: Layout,
    origin: Origin,
}

/// The result of writing a packet.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Produced {
    pub(crate) appended: Appended,
    /// The driver keeps the area: it is to look there.
    pub(crate) driven: bool,
    /// The reader is to be woken.
    pub(crate) wake: bool,
    /// Records of pieces that were written to the ring.
    pub(crate) records: u64,
}

/// The extent of a flush.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Flush {
    /// Writes what the ring owes its reader.
    Owed,
    /// Also wakes the reader for anything that it was not woken for.
    Rouse,
    /// Also takes the area away, in the same step.
    CloseArea,
}

/// The parts of a sink.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shape {
    /// Data pages of the ring; `None` without a ring.
    pub(crate) data_pages: Option<u32>,
    pub(crate) writable: bool,
    pub(crate) metadata: Option<GuestAddress>,
    pub(crate) has_area: bool,
    /// The driver keeps the area.
    pub(crate) driven: bool,
    /// Pages of the ring, the metadata page included.
    pub(crate) ring_pages: usize,
    pub(crate) area_pages: usize,
}

/// The bytes of a ring, copied.
#[derive(Debug)]
pub(crate) struct HeldBytes {
    /// `None`: the place where a record begins is not known.
    pub(crate) bytes: Option<Vec<u8>>,
    pub(crate) newest_first: bool,
}

impl Sink {
    /// A sink without ring and area.
    pub(crate) fn new(id: u64) -> Self {
        Self {
            id,
            state: Lock::new(State::default()),
        }
    }

    /// The event that its ring, or its area, was mapped with.
    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    /// Whether its metadata page shows the counts of `event`.
    pub(crate) fn shows(&self, event: u64) -> bool {
        self.id == event
    }

    pub(crate) fn set_ring(&self, ring: Ring, memory: &Memory) {
        self.state.lock().ring = Some(Mapped {
            what: ring,
            memory: memory.clone(),
        });
    }

    pub(crate) fn set_area(&self, area: Area, memory: &Memory) {
        self.state.lock().area = Some(Mapped {
            what: area,
            memory: memory.clone(),
        });
    }

    /// As it is now; `window_page` is the first of its ring in the window.
    ///
    /// # Errors
    /// A producer of the VMM's writes to its area.
    pub(crate) fn save(&self, window_page: Option<u32>) -> Result<SavedSink, SaveError> {
        let state = self.state.lock();
        let area = match &state.area {
            Some(mapped) => Some(mapped.what.save().ok_or(SaveError::Producing(self.id))?),
            None => None,
        };
        Ok(SavedSink {
            id: self.id,
            window_page,
            ring: state.ring.as_ref().map(|mapped| mapped.what.save()),
            area,
            pending: state.pending.map(|pending| SavedPendingAux {
                chunk: pending.chunk,
                layout: pending.layout,
                origin: pending.origin,
            }),
        })
    }

    /// A piece of the area had ended before a restore, and no record reports it yet.
    pub(crate) fn set_pending(&self, saved: &SavedPendingAux) {
        self.state.lock().pending = Some(PendingAuxRecord {
            chunk: saved.chunk,
            layout: saved.layout,
            origin: saved.origin,
        });
    }

    /// Shows the conversion of `clock` in the metadata page, which another device began.
    pub(crate) fn retime(&self, clock: Clock) {
        if let Some(Mapped { what, memory }) = &mut self.state.lock().ring {
            what.retime(&memory.view(), clock);
        }
    }

    /// Takes ring and area away: nothing writes to their pages from now on.
    pub(crate) fn close(&self) {
        *self.state.lock() = State::default();
    }

    /// Its parts as they are now.
    pub(crate) fn shape(&self) -> Shape {
        let state = self.state.lock();
        let ring = state.ring.as_ref().map(|mapped| &mapped.what);
        let area = state.area.as_ref().map(|mapped| &mapped.what);
        Shape {
            data_pages: ring.map(Ring::data_pages),
            writable: ring.is_some_and(Ring::is_writable),
            metadata: ring.map(Ring::metadata),
            has_area: area.is_some(),
            driven: area.is_some_and(Area::is_driven),
            ring_pages: ring.map_or(0, Ring::pages),
            area_pages: area.map_or(0, Area::pages),
        }
    }

    /// Every page of the ring.
    pub(crate) fn ring_addresses(&self) -> Vec<GuestAddress> {
        let state = self.state.lock();
        let ring = state.ring.iter();
        ring.flat_map(|mapped| mapped.what.addresses()).collect()
    }

    /// Stops or resumes writing to the ring.
    pub(crate) fn pause(&self, paused: bool) {
        if let Some(ring) = &mut self.state.lock().ring {
            ring.what.pause(paused);
        }
    }

    /// Wakeups by records and by bytes are counted anew.
    pub(crate) fn restart_wakeups(&self) {
        if let Some(ring) = &mut self.state.lock().ring {
            ring.what.restart_wakeups();
        }
    }

    /// A copy of the records in the ring; `None` without a ring.
    pub(crate) fn held(&self) -> Option<HeldBytes> {
        let state = self.state.lock();
        let ring = state.ring.as_ref()?;
        Some(HeldBytes {
            bytes: ring.what.held(&ring.memory.view()),
            newest_first: ring.what.is_backward(),
        })
    }

    /// Shows counts in the metadata page.
    pub(crate) fn show(&self, counts: &CountSnapshot) {
        if let Some(Mapped { what, memory }) = &mut self.state.lock().ring {
            what.show(&memory.view(), counts);
        }
    }

    /// Lets `act` write to the ring; the default without one.
    pub(crate) fn write(&self, act: impl FnOnce(&mut Ring, &View<'_>) -> Outcome) -> Outcome {
        match &mut self.state.lock().ring {
            Some(Mapped { what, memory }) => act(what, &memory.view()),
            None => Outcome::default(),
        }
    }

    /// Lets `act` write a burst of records, which the reader sees at its end. `None`: there is no ring,
    /// or its metadata page is not memory any more.
    pub(crate) fn burst<T>(
        &self,
        act: impl FnOnce(&mut Session<'_, GuestPages<'_>>) -> T,
    ) -> Option<T> {
        let mut state = self.state.lock();
        let Mapped { what, memory } = state.ring.as_mut()?;
        let view = memory.view();
        let mut session = what.session(&view).ok()?;
        Some(act(&mut session))
    }

    /// Whether the ring owes its reader a record of a loss, or of a traced piece.
    pub(crate) fn owes(&self, is_trace: bool) -> bool {
        let state = self.state.lock();
        let lost = state.ring.as_ref().is_some_and(|ring| ring.what.has_loss());
        lost || state.owes_aux(is_trace)
    }

    /// Writes what the ring owes, as far as it fits.
    pub(crate) fn flush(
        &self,
        record: &mut Record,
        is_trace: bool,
        how: Flush,
        context: &WriteContext<'_>,
    ) -> Produced {
        let mut state = self.state.lock();
        let mut produced = Produced::default();
        let mut shown = false;
        if state.owes_aux(is_trace) {
            let ended = match &mut state.area {
                Some(Mapped { what, memory }) if what.is_begun() => what.end(&memory.view()),
                _ => None,
            };
            shown = ended.is_some();
            if shown || state.pending.is_some() {
                produced.add(state.report(record, context, ended));
            }
        }
        if let Some(Mapped { what, memory }) = &mut state.ring {
            let marked = what.flush(&memory.view(), context);
            produced.wake |= marked || how == Flush::Rouse && (what.rouse() | shown);
        }
        if how == Flush::CloseArea {
            // A piece that found no room in the ring stays unreported.
            state.area = None;
            state.pending = None;
        }
        produced
    }

    /// Writes the next packet of a trace; `None`: there is no area, or the event may not write to it
    /// now.
    pub(crate) fn produce(
        &self,
        record: &mut Record,
        spec: &EventSpec,
        origin: &Origin,
        tsc: u64,
        trace: &Trace,
        packet: Packet<'_>,
    ) -> Option<Produced> {
        let mut state = self.state.lock();
        let Mapped { what: area, memory } = state.area.as_mut()?;
        let position = area.position(spec.id)?;
        let laid = trace.lay(spec, origin, tsc, packet, position);
        let appended = area.append(&memory.view(), spec.id, &laid.entry());
        let mut produced = Produced {
            appended,
            driven: area.is_driven(),
            wake: appended.wake,
            records: 0,
        };
        if !produced.driven && (appended.chunk.is_some() || appended.wake) {
            let context = WriteContext {
                layout: &spec.layout,
                origin,
                wakeup: spec.wakeup,
            };
            produced.add(state.report(record, &context, appended.chunk));
        }
        Some(produced)
    }

    /// Something is missing that was to be written to the area next.
    pub(crate) fn miss(&self) {
        if let Some(area) = &mut self.state.lock().area {
            area.what.miss();
        }
    }

    /// A producer of the VMM's begins to write to the area for a trace.
    ///
    /// # Errors
    /// As [`Area::claim`]; [`Refused::NotBegun`] without an area of the device's.
    pub(crate) fn claim(
        &self,
        record: &mut Record,
        token: u64,
        context: &WriteContext<'_>,
    ) -> Result<Produced, Refused> {
        let mut state = self.state.lock();
        let Mapped { what, memory } = state.area.as_mut().ok_or(Refused::NotBegun)?;
        let ended = what.claim(&memory.view(), token)?;
        let mut produced = Produced::default();
        if ended.is_some() {
            produced.add(state.report(record, context, ended));
        }
        Ok(produced)
    }

    /// The place where the producer writes next; `None`: it does not write any more.
    pub(crate) fn claimed(&self, token: u64) -> Option<Window> {
        let state = self.state.lock();
        state.area.as_ref()?.what.claimed(token)
    }

    /// The producer leaves out `skip` bytes, then writes words.
    ///
    /// # Errors
    /// As [`Area::put`].
    pub(crate) fn put(&self, token: u64, skip: u64, words: &[u64]) -> Result<(), Refused> {
        let mut state = self.state.lock();
        let Mapped { what, memory } = state.area.as_mut().ok_or(Refused::NotBegun)?;
        what.put(&memory.view(), token, skip, words)
    }

    /// The producer has ended, and shows the first `size` bytes of what it wrote.
    ///
    /// # Errors
    /// As [`Area::release`].
    pub(crate) fn release(
        &self,
        record: &mut Record,
        token: u64,
        size: u64,
        context: &WriteContext<'_>,
    ) -> Result<Produced, Refused> {
        let mut state = self.state.lock();
        let Mapped { what, memory } = state.area.as_mut().ok_or(Refused::NotBegun)?;
        let appended = what.release(&memory.view(), token, size)?;
        let mut produced = Produced {
            appended,
            wake: appended.wake,
            ..Produced::default()
        };
        if appended.chunk.is_some() {
            produced.add(state.report(record, context, appended.chunk));
        }
        Ok(produced)
    }

    /// The producer has ended, and shows nothing; its event may be gone.
    pub(crate) fn give_up(&self, token: u64) {
        // Nothing of it is left if the area is another by now.
        if let Some(area) = &mut self.state.lock().area {
            area.what.give_up(token);
        }
    }

    /// The driver lets an event write to the area that it keeps, from `head` on.
    ///
    /// # Errors
    /// As [`Area::begin`]; [`Refused::NotBegun`] without an area.
    pub(crate) fn begin(&self, event: u64, head: u64, room: u64) -> Result<(), Refused> {
        let area = &mut self.state.lock().area;
        let area = area.as_mut().ok_or(Refused::NotBegun)?;
        area.what.begin(event, head, room)
    }

    /// The driver lets an event write no longer: the head it reached, and the bytes without room.
    ///
    /// # Errors
    /// [`Refused::NotBegun`].
    pub(crate) fn finish(&self, event: u64) -> Result<(u64, u64), Refused> {
        let area = &mut self.state.lock().area;
        let area = area.as_mut().ok_or(Refused::NotBegun)?;
        area.what.finish(event)
    }
}

impl State {
    /// Whether the area owes the ring a record, or its reader a head.
    fn owes_aux(&self, is_trace: bool) -> bool {
        let area = self.area.as_ref().map(|mapped| &mapped.what);
        self.pending.is_some() || is_trace && area.is_some_and(Area::is_begun)
    }

    /// Writes the record of a piece that has `ended` and of those that found no room before, if it
    /// fits.
    fn report(
        &mut self,
        record: &mut Record,
        context: &WriteContext<'_>,
        ended: Option<Chunk>,
    ) -> Produced {
        let mut produced = Produced::default();
        let before = self.pending.take();
        let pending = match (before, ended) {
            (before, None) => before,
            (before, Some(chunk)) => Some(PendingAuxRecord {
                chunk: before.map_or(chunk, |before| before.chunk.with(chunk)),
                layout: *context.layout,
                origin: *context.origin,
            }),
        };
        if let (Some(pending), Some(Mapped { what, memory })) = (pending, &mut self.ring) {
            let own = WriteContext {
                layout: &pending.layout,
                origin: &pending.origin,
                wakeup: context.wakeup,
            };
            let aux = record.aux(&pending.layout, &pending.origin, &pending.chunk);
            let Outcome { written, wake } = what.note(&memory.view(), aux, &own);
            produced.wake = wake;
            if written {
                produced.records = 1;
            } else {
                self.pending = Some(pending);
            }
        }
        produced
    }
}

impl Produced {
    fn add(&mut self, other: Self) {
        self.wake |= other.wake;
        self.records += other.records;
    }
}
