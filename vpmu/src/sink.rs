//! A sink is a ring, an AUX area, or both. Several events may write to it. A writer holds the sink's lock for one
//! record or one burst of records.

use std::sync::Arc;

use vm_memory::GuestAddress;

use crate::area::{Appended, Area, Refused, SavedArea, Window};
use crate::clock::Clock;
use crate::error::SaveError;
use crate::locks::{Lock, SINK};
use crate::memory::{Memory, View};
use crate::notices::Woken;
use crate::pages::GuestPages;
use crate::record::{Chunk, Layout, Record, SampleId};
use crate::ring::{CountSnapshot, Outcome, Ring, SavedRing, Session, WriteContext};
use crate::saved::saved;
use crate::spec::{EventSpec, Wakeups};
use crate::trace::{Packet, Trace};

/// A ring, an AUX area, or both. The alignment keeps other data out of the sink's cache lines.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct Sink {
    /// The event for which the sink was mapped. That event may already be closed.
    id: u64,
    state: Lock<State, SINK>,
}

#[derive(Debug, Default)]
struct State {
    ring: Option<Mapped<Ring>>,
    area: Option<Mapped<Area>>,
    pending: Option<PendingAuxRecord>,
}

/// A ring or area, and the memory that contains it.
#[derive(Debug)]
struct Mapped<T> {
    what: T,
    memory: Memory,
}

/// A chunk of AUX data that has ended but has no record in the ring yet.
#[derive(Debug, Clone, Copy)]
struct PendingAuxRecord {
    chunk: Chunk,
    /// The record uses the layout and the sample id of the event that was the last to write to the chunk.
    layout: Layout,
    sample_id: SampleId,
}

/// The result of writing a packet.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Produced {
    pub(crate) appended: Appended,
    /// Whether the driver manages the area. If so, `wake` means that the driver must be notified.
    pub(crate) driven: bool,
    /// Whether the reader must be woken.
    pub(crate) wake: bool,
    /// Number of AUX records written to the ring.
    pub(crate) records: u64,
}

/// The extent of a flush.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Flush {
    /// Write pending records.
    Owed,
    /// Write pending records, and wake the reader if there are records or data for which it was not woken yet.
    Rouse,
    /// Write pending records, and remove the area in the same step.
    CloseArea,
}

/// The parts of a sink.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shape {
    /// Number of data pages of the ring. `None` if there is no ring.
    pub(crate) data_pages: Option<u32>,
    pub(crate) writable: bool,
    pub(crate) metadata: Option<GuestAddress>,
    pub(crate) has_area: bool,
    /// Whether the driver manages the area.
    pub(crate) driven: bool,
    /// Number of pages of the ring, including the metadata page.
    pub(crate) ring_pages: usize,
    pub(crate) area_pages: usize,
}

/// A copy of a ring's bytes.
#[derive(Debug)]
pub(crate) struct HeldBytes {
    /// `None` if the position of the first record is unknown.
    pub(crate) bytes: Option<Vec<u8>>,
    pub(crate) newest_first: bool,
}

/// Where an event's records and packets go.
#[derive(Debug)]
pub(crate) struct Output {
    /// The destination of the records and packets of the event's family.
    pub(crate) sink: Option<Arc<Sink>>,
    pub(crate) wakeups: Wakeups,
}

impl Output {
    pub(crate) fn new(wakeups: Wakeups) -> Self {
        Self { sink: None, wakeups }
    }

    pub(crate) fn sink(&self) -> Option<&Sink> {
        self.sink.as_deref()
    }

    /// The readers for whom a wakeup is counted if an event of the family of `owner` writes.
    pub(crate) fn woken(&self, owner: u64) -> Woken {
        match &self.sink {
            Some(sink) if !self.wakeups.own_notices => Woken::Ring(sink.id()),
            _ => Woken::Family(owner),
        }
    }

    /// The context in which the event that `spec` describes writes a record with `sample_id`.
    pub(crate) fn context<'a>(&self, spec: &'a EventSpec, sample_id: &'a SampleId) -> WriteContext<'a> {
        let Wakeups { every, prompt, .. } = self.wakeups;
        WriteContext { layout: &spec.request.layout, sample_id, wakeup: every, prompt }
    }
}

saved! {
    /// A ring, an AUX area, or both.
    pub(crate) struct SavedSink {
        /// The event through which they were mapped.
        pub(crate) id: u64,
        /// The page of the window where the sink's ring begins. `None` if the ring is not in the window.
        pub(crate) window_page: Option<u32>,
        pub(crate) ring: Option<SavedRing>,
        pub(crate) area: Option<SavedArea>,
        pub(crate) pending: Option<SavedPendingAux>,
    }

    /// A chunk of AUX data that has ended but has no record in the ring yet.
    pub(crate) struct SavedPendingAux {
        pub(crate) chunk: Chunk,
        pub(crate) layout: Layout,
        pub(crate) origin: SampleId,
    }
}

impl Sink {
    /// Creates a sink without ring and area.
    pub(crate) fn new(id: u64) -> Self {
        Self { id, state: Lock::new(State::default()) }
    }

    /// The event for which the sink was mapped.
    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    /// Whether the metadata page shows the counts of `event`.
    pub(crate) fn shows(&self, event: u64) -> bool {
        self.id == event
    }

    pub(crate) fn set_ring(&self, ring: Ring, memory: &Memory) {
        self.state.lock().ring = Some(Mapped { what: ring, memory: memory.clone() });
    }

    pub(crate) fn set_area(&self, area: Area, memory: &Memory) {
        self.state.lock().area = Some(Mapped { what: area, memory: memory.clone() });
    }

    /// Saves the sink. `window_page` is the page of the window where the sink's ring begins; `None` if the ring is
    /// not in the window.
    ///
    /// # Errors
    /// [`SaveError::Producing`]: a producer in the VMM writes to the area.
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
                origin: pending.sample_id,
            }),
        })
    }

    /// Restores a pending AUX record.
    pub(crate) fn set_pending(&self, saved: &SavedPendingAux) {
        self.state.lock().pending =
            Some(PendingAuxRecord { chunk: saved.chunk, layout: saved.layout, sample_id: saved.origin });
    }

    /// Writes the time conversion of `clock` to the metadata page of a restored ring.
    pub(crate) fn retime(&self, clock: Clock) {
        if let Some(Mapped { what, memory }) = &mut self.state.lock().ring {
            what.retime(&memory.view(), clock);
        }
    }

    /// Removes the ring and the area. Afterwards, the device no longer writes to their pages.
    pub(crate) fn close(&self) {
        *self.state.lock() = State::default();
    }

    /// The current parts of the sink.
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

    /// The addresses of all pages of the ring.
    pub(crate) fn ring_addresses(&self) -> Vec<GuestAddress> {
        let state = self.state.lock();
        let ring = state.ring.iter();
        ring.flat_map(|mapped| mapped.what.addresses()).collect()
    }

    /// Pauses or resumes writing to the ring.
    pub(crate) fn pause(&self, paused: bool) {
        if let Some(ring) = &mut self.state.lock().ring {
            ring.what.pause(paused);
        }
    }

    /// Resets to zero the counts of records and bytes since the last wakeup.
    pub(crate) fn restart_wakeups(&self) {
        if let Some(ring) = &mut self.state.lock().ring {
            ring.what.restart_wakeups();
        }
    }

    /// Returns a copy of the records in the ring. `None` if there is no ring.
    pub(crate) fn held(&self) -> Option<HeldBytes> {
        let state = self.state.lock();
        let ring = state.ring.as_ref()?;
        Some(HeldBytes { bytes: ring.what.held(&ring.memory.view()), newest_first: ring.what.is_backward() })
    }

    /// Writes counts to the metadata page.
    pub(crate) fn update_page(&self, counts: &CountSnapshot) {
        if let Some(Mapped { what, memory }) = &mut self.state.lock().ring {
            what.update_page(&memory.view(), counts);
        }
    }

    /// Calls `act` with the ring. If the sink has no ring, returns the default outcome, which means that nothing was
    /// written.
    pub(crate) fn write(&self, act: impl FnOnce(&mut Ring, &View<'_>) -> Outcome) -> Outcome {
        match &mut self.state.lock().ring {
            Some(Mapped { what, memory }) => act(what, &memory.view()),
            None => Outcome::default(),
        }
    }

    /// Calls `act` to write a burst of records, which is published as a whole at the end. Returns `None` if the sink
    /// has no ring, or the metadata page is no longer in guest memory.
    pub(crate) fn burst<T>(&self, act: impl FnOnce(&mut Session<'_, GuestPages<'_>>) -> T) -> Option<T> {
        let mut state = self.state.lock();
        let Mapped { what, memory } = state.ring.as_mut()?;
        let view = memory.view();
        let mut session = what.session(&view).ok()?;
        Some(act(&mut session))
    }

    /// Returns whether [`Sink::flush`] has anything to do. It does if a record of lost samples or of AUX data is
    /// pending, or if a chunk is still open and `is_trace` is true.
    pub(crate) fn owes(&self, is_trace: bool) -> bool {
        let state = self.state.lock();
        let lost = state.ring.as_ref().is_some_and(|ring| ring.what.has_loss());
        lost || state.owes_aux(is_trace)
    }

    /// Writes the pending records that fit.
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
            // If the AUX record could not be written, drop it together with the area.
            state.area = None;
            state.pending = None;
        }
        produced
    }

    /// Writes the next packet of a trace; `None` if the sink has no area, or if the driver manages the area and has not
    /// granted space to the event.
    pub(crate) fn produce(
        &self,
        record: &mut Record,
        (spec, context): (&EventSpec, &WriteContext<'_>),
        tsc: u64,
        trace: &Trace,
        packet: Packet<'_>,
    ) -> Option<Produced> {
        let mut state = self.state.lock();
        let Mapped { what: area, memory } = state.area.as_mut()?;
        let position = area.position(spec.id)?;
        let laid = trace.lay(spec, context.sample_id, tsc, packet, position);
        let appended = area.append(&memory.view(), spec.id, &laid.entry());
        let mut produced = Produced { appended, driven: area.is_driven(), wake: appended.wake, records: 0 };
        if !produced.driven && (appended.chunk.is_some() || appended.wake) {
            produced.add(state.report(record, context, appended.chunk));
        }
        Some(produced)
    }

    /// Records that a packet for the area was lost.
    pub(crate) fn miss(&self) {
        if let Some(area) = &mut self.state.lock().area {
            area.what.miss();
        }
    }

    /// Begins a write to the area for a trace whose producer is in the VMM.
    ///
    /// # Errors
    /// See [`Area::claim`]. Also [`Refused::NotBegun`] if the sink has no area that the device manages.
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

    /// The producer's next position; `None` if the write has ended, or if the area is gone.
    pub(crate) fn claimed(&self, token: u64) -> Option<Window> {
        let state = self.state.lock();
        state.area.as_ref()?.what.claimed(token)
    }

    /// Skips `skip` bytes, then writes the producer's `words`.
    ///
    /// # Errors
    /// As [`Area::put`].
    pub(crate) fn put(&self, token: u64, skip: u64, words: &[u64]) -> Result<(), Refused> {
        let mut state = self.state.lock();
        let Mapped { what, memory } = state.area.as_mut().ok_or(Refused::NotBegun)?;
        what.put(&memory.view(), token, skip, words)
    }

    /// Ends the producer's write, and publishes its first `size` bytes.
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
        let mut produced = Produced { appended, wake: appended.wake, ..Produced::default() };
        if appended.chunk.is_some() {
            produced.add(state.report(record, context, appended.chunk));
        }
        Ok(produced)
    }

    /// Ends the producer's write without publishing the written bytes. The trace may already be closed.
    pub(crate) fn give_up(&self, token: u64) {
        // If another area has been mapped since, that area ignores the token.
        if let Some(area) = &mut self.state.lock().area {
            area.what.give_up(token);
        }
    }

    /// Grants an event `room` bytes of space, starting at `head`, in an area that the driver manages.
    ///
    /// # Errors
    /// See [`Area::begin`]. Also [`Refused::NotBegun`] if the sink has no area.
    pub(crate) fn begin(&self, event: u64, head: u64, room: u64) -> Result<(), Refused> {
        let area = &mut self.state.lock().area;
        let area = area.as_mut().ok_or(Refused::NotBegun)?;
        area.what.begin(event, head, room)
    }

    /// Withdraws the space granted to an event. Returns the head that the event reached, and the number of bytes that
    /// did not fit.
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
    /// Returns whether an AUX record or an update of the reader's head is pending.
    fn owes_aux(&self, is_trace: bool) -> bool {
        let area = self.area.as_ref().map(|mapped| &mapped.what);
        self.pending.is_some() || is_trace && area.is_some_and(Area::is_begun)
    }

    /// Writes a single record, which covers the chunk `ended` and the earlier chunks that are pending. If the record
    /// does not fit in the ring, all of these chunks stay pending.
    fn report(&mut self, record: &mut Record, context: &WriteContext<'_>, ended: Option<Chunk>) -> Produced {
        let mut produced = Produced::default();
        let before = self.pending.take();
        let pending = match (before, ended) {
            (before, None) => before,
            (before, Some(chunk)) => Some(PendingAuxRecord {
                chunk: before.map_or(chunk, |before| before.chunk.with(chunk)),
                layout: *context.layout,
                sample_id: *context.sample_id,
            }),
        };
        if let (Some(pending), Some(Mapped { what, memory })) = (pending, &mut self.ring) {
            let own = WriteContext {
                layout: &pending.layout,
                sample_id: &pending.sample_id,
                wakeup: context.wakeup,
                prompt: context.prompt,
            };
            let aux = record.aux(&pending.layout, &pending.sample_id, &pending.chunk);
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
