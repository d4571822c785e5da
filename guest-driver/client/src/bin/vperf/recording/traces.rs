//! Traces in a recording: copies packets from AUX areas to the file, each as a sample.

use std::io::{self, IsTerminal, Write};

use vpmu_client::ring::RingError;
use vpmu_client::trace::{Exit, Format, Packets, TraceSample};
use vpmu_client::{Packet, Sample};

use super::{Recording, RecordingError, say};
use crate::format::grouped;
use crate::tracing::{Mapped, TraceBuffer};

/// Totals of the packets written.
#[derive(Debug, Default)]
pub(super) struct Taken {
    exits: u64,
    samples: u64,
    bytes: u64,
    /// Lost bytes, from the readings of the traces.
    lost: u64,
    /// The value of `bytes` when the progress was last shown.
    shown: u64,
}

impl Recording<'_> {
    /// Writes the contents of all areas except snapshot areas.
    pub(super) fn drain_areas(&mut self) -> Result<(), RecordingError> {
        // Moved out during the loop, which borrows the rest of `self`.
        let mut buffers = std::mem::take(&mut self.sources.buffers);
        for buffer in &mut buffers {
            self.drain_notices(buffer);
            let Mapped::Emptied(area) = &mut buffer.area else {
                continue;
            };
            // Stop at the current head, so that an area that fills as fast as it is read does not starve the other
            // areas.
            let head = area.head();
            while head.wrapping_sub(area.tail()).cast_signed() > 0 {
                match area.read(&mut self.chunk) {
                    Ok(true) => {}
                    Ok(false) => break,
                    Err(error) => {
                        area.skip();
                        self.unreadable(buffer.opened.index, &error);
                        break;
                    }
                }
                self.chunk(buffer.opened.index)?;
            }
        }
        self.sources.buffers = buffers;
        Ok(())
    }

    /// Discards the records of a trace's ring, so that the ring does not fill. They only report that the area has new
    /// bytes, which the area's head shows, too.
    fn drain_notices(&mut self, buffer: &mut TraceBuffer<'_>) {
        let head = buffer.ring.head();
        while head.wrapping_sub(buffer.ring.tail()).cast_signed() > 0 {
            match buffer.ring.next_record() {
                Ok(Some(_)) => {}
                Ok(None) => break,
                Err(error) => {
                    if !matches!(error, RingError::Record { .. }) {
                        buffer.ring.skip();
                    }
                    self.unreadable(buffer.opened.index, &error);
                }
            }
        }
    }

    /// Writes the newest part of snapshot areas, except bytes that are in the file already.
    pub(super) fn take_snapshots(&mut self) -> Result<(), RecordingError> {
        let mut buffers = std::mem::take(&mut self.sources.buffers);
        for buffer in &mut buffers {
            let Mapped::Newest(snapshot) = &buffer.area else {
                continue;
            };
            match snapshot.take() {
                Ok(chunk) => self.chunk = chunk,
                Err(error) => {
                    self.unreadable(buffer.opened.index, &error);
                    continue;
                }
            }
            let known = buffer.until.saturating_sub(self.chunk.position);
            let known = usize::try_from(known).unwrap_or(usize::MAX);
            let known = known.min(self.chunk.bytes.len());
            self.chunk.bytes.drain(..known);
            self.chunk.position += known as u64;
            buffer.until = self.chunk.position.saturating_add(self.chunk.bytes.len() as u64);
            self.chunk(buffer.opened.index)?;
        }
        self.sources.buffers = buffers;
        self.news()
    }

    /// Writes the packets of the current chunk as samples of the event with the index `event`.
    fn chunk(&mut self, event: usize) -> Result<(), RecordingError> {
        let data = std::mem::take(&mut self.chunk.bytes);
        let mut packets = Packets::new(self.chunk.position, &data);
        let mut at = 0;
        while let Some(packet) = packets.next() {
            let sample = match packet {
                Ok(Packet::Exit(exit)) => {
                    self.taken.exits += 1;
                    Some(exit_sample(exit))
                }
                Ok(Packet::Sample(sample)) => {
                    self.taken.samples += 1;
                    Some(trace_sample(sample))
                }
                Ok(_) => None,
                Err(error) => {
                    self.unreadable(event, &error);
                    None
                }
            };
            let next = usize::try_from(packets.position() - self.chunk.position).unwrap_or(usize::MAX);
            if let (Some(sample), Some(packet)) = (sample, data.get(at..next)) {
                self.processes.saw(sample.pid, sample.time);
                self.now = self.now.max(sample.time);
                self.output.sample(event, &sample, packet)?;
            }
            at = next;
        }
        self.taken.bytes += data.len() as u64;
        Ok(())
    }

    /// Writes how many packets of each trace were lost, once all its other packets are in the file.
    pub(super) fn account(&mut self) -> Result<(), RecordingError> {
        for buffer in std::mem::take(&mut self.sources.buffers) {
            let event = buffer.opened.index;
            let reading = match buffer.opened.event.read() {
                Ok(reading) => reading,
                Err(error) => {
                    self.unreadable(event, &error);
                    continue;
                }
            };
            self.taken.lost = self.taken.lost.saturating_add(reading.lost);
            let trace = self.sources.traced.get(buffer.trace).and_then(|trace| trace.entry.trace);
            let packet = match trace {
                Some(Format::Samples) => size_of::<TraceSample>(),
                _ => size_of::<Exit>(),
            };
            let lost = reading.lost / packet as u64;
            if lost > 0 {
                self.output.lost(event, lost, self.now)?;
            }
        }
        Ok(())
    }

    /// Shows the progress on one line of a terminal.
    pub(super) fn show_progress(&mut self) {
        if self.taken.bytes == self.taken.shown || !io::stderr().is_terminal() {
            return;
        }
        self.taken.shown = self.taken.bytes;
        let _ = write!(io::stderr(), "\rvperf: {}", self.taken.describe());
    }

    /// Reports a requested snapshot.
    pub(super) fn report_snapshot(&self) {
        say(&format!("snapshot taken: so far {}", self.taken.describe()));
    }

    pub(super) fn report_traces(&self) {
        if self.sources.traced.is_empty() {
            return;
        }
        if self.taken.shown > 0 {
            let _ = writeln!(io::stderr());
        }
        let lost = grouped(self.taken.lost);
        say(&format!(
            "{} written to {}, {lost} bytes lost, {} wakeups",
            self.taken.describe(),
            self.output.path().display(),
            grouped(self.totals.wakeups)
        ));
        if self.taken.lost > 0 {
            say("packets were lost because the AUX areas were full: enlarge them (--aux-size)");
        }
    }
}

/// An exit as a sample. The address is that of the access that caused the exit, where it is known.
pub(crate) fn exit_sample(exit: &Exit) -> Sample {
    Sample {
        ip: exit.ip().unwrap_or(0),
        pid: exit.pid(),
        tid: exit.tid(),
        time: exit.time(),
        addr: exit.access().map_or(0, |access| access.address),
        cpu: exit.vcpu(),
        period: 1,
        user: exit.user(),
        ..Sample::default()
    }
}

fn trace_sample(sample: &TraceSample) -> Sample {
    Sample {
        ip: sample.ip().unwrap_or(0),
        pid: sample.pid(),
        tid: sample.tid(),
        time: sample.time(),
        cpu: sample.vcpu(),
        period: sample.period(),
        user: sample.user(),
        ..Sample::default()
    }
}

impl Taken {
    fn describe(&self) -> String {
        let mut what = Vec::new();
        if self.exits > 0 || self.samples == 0 {
            what.push(format!("{} exits", grouped(self.exits)));
        }
        if self.samples > 0 {
            what.push(format!("{} samples with registers", grouped(self.samples)));
        }
        format!("{} in {} bytes", what.join(", "), grouped(self.bytes))
    }
}
