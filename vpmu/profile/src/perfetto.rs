//! Trace events in JSON, as Chrome writes them and Perfetto reads them. Every sample, exit and mark of every event is an
//! instant on the track of its task or vCPU.

use std::collections::HashMap;
use std::io::Write;

use serde::Serialize;

use crate::model::{EventKind, Sample};
use crate::selection::{Selection, Thread};

/// An event of a trace.
#[derive(Serialize)]
struct TraceEvent<'a, A> {
    name: &'a str,
    /// The phase: `i` is an instant, `M` describes a track.
    ph: &'static str,
    pid: u32,
    tid: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    cat: Option<&'a str>,
    /// The scope of an instant: `t` is a thread, `g` the whole trace.
    #[serde(skip_serializing_if = "Option::is_none")]
    s: Option<&'static str>,
    /// Microseconds.
    ts: f64,
    args: A,
}

#[derive(Serialize)]
struct Name<'a> {
    name: &'a str,
}

#[derive(Serialize)]
struct Lost<'a> {
    event: &'a str,
    lost: u64,
}

#[derive(Serialize)]
struct Instant<'a> {
    /// Innermost first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    stack: Vec<&'a str>,
    weight: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    value: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cpu: Option<u32>,
    task: &'a str,
}

/// Writes the trace event by event, so that memory does not depend on the number of samples.
struct Trace<'a, W> {
    out: &'a mut W,
    is_first: bool,
}

impl<W: Write> Trace<'_, W> {
    fn put(&mut self, event: &impl Serialize) -> serde_json::Result<()> {
        let separator = if self.is_first { "\n" } else { ",\n" };
        self.is_first = false;
        self.out.write_all(separator.as_bytes()).map_err(serde_json::Error::io)?;
        serde_json::to_writer(&mut *self.out, event)
    }
}

/// Microseconds after `first`.
fn micros(time: u64, first: u64) -> f64 {
    // Exact for recordings shorter than 104 days.
    #[expect(clippy::cast_precision_loss, reason = "the format has floating-point times")]
    let nanos = time.saturating_sub(first) as f64;
    nanos / 1000.0
}

/// Writes a selection; the event that it selects does not matter.
///
/// # Errors
/// Errors of `out`.
pub(crate) fn write(selection: &Selection<'_>, out: &mut impl Write) -> serde_json::Result<()> {
    let profile = selection.profile;
    out.write_all(b"{\"displayTimeUnit\":\"ns\",\"traceEvents\":[").map_err(serde_json::Error::io)?;
    let mut trace = Trace { out, is_first: true };
    let mut tracks: HashMap<Thread, u32> = HashMap::new();
    let first = profile.samples.first().map_or(0, |sample| sample.time);
    for sample in &profile.samples {
        let thread = selection.thread(sample);
        // Tracks are numbered from one, because viewers treat thread 0 as an idle processor.
        let next = u32::try_from(tracks.len() + 1).unwrap_or(u32::MAX);
        let tid = match tracks.get(&thread) {
            Some(&tid) => tid,
            None => {
                describe(&mut trace, &thread, next)?;
                tracks.insert(thread.clone(), next);
                next
            }
        };
        trace.put(&instant(selection, sample, &thread, tid, micros(sample.time, first)))?;
    }
    let last = profile.samples.last().map_or(0, |sample| sample.time);
    let instant =
        |name, ts| TraceEvent { name, ph: "i", pid: 0, tid: 0, cat: Some("vpmu"), s: Some("g"), ts, args: () };
    if let Some(panic) = profile.panic.and_then(|index| profile.samples.get(index)) {
        trace.put(&instant("panic", micros(panic.time, first)))?;
    }
    let lost = profile.events.iter().map(|event| (event.name.as_str(), event.lost));
    for (event, lost) in lost.chain([("unknown", profile.lost)]).filter(|&(_, lost)| lost > 0) {
        let TraceEvent { name, ph, pid, tid, cat, s, ts, .. } = instant("lost samples", micros(last, first));
        trace.put(&TraceEvent { name, ph, pid, tid, cat, s, ts, args: Lost { event, lost } })?;
    }
    out.write_all(b"\n]}\n").map_err(serde_json::Error::io)
}

fn describe(trace: &mut Trace<'_, impl Write>, thread: &Thread, tid: u32) -> serde_json::Result<()> {
    for (what, name) in [("process_name", &thread.process), ("thread_name", &thread.name)] {
        let pid = thread.pid;
        trace.put(&TraceEvent { name: what, ph: "M", pid, tid, cat: None, s: None, ts: 0.0, args: Name { name } })?;
    }
    Ok(())
}

fn instant<'a>(
    selection: &Selection<'a>,
    sample: &Sample,
    thread: &Thread,
    tid: u32,
    ts: f64,
) -> TraceEvent<'a, Instant<'a>> {
    let profile = selection.profile;
    let event = profile.events.get(sample.event);
    let kind = event.map_or(EventKind::Sampled, |event| event.kind);
    let event = event.map_or("", |event| event.name.as_str());
    let stack: Vec<&str> = profile.stacks.frames(sample.stack).map(|frame| frame.name.as_str()).collect();
    let name = match kind {
        EventKind::Sampled => stack.first().copied().unwrap_or(event),
        EventKind::Mark | EventKind::Exit => event,
    };
    TraceEvent {
        name,
        ph: "i",
        pid: thread.pid,
        tid,
        cat: Some(event),
        s: Some("t"),
        ts,
        args: Instant {
            stack,
            weight: sample.period,
            value: Some(sample.value).filter(|_| kind == EventKind::Mark),
            cpu: sample.cpu,
            task: profile.tasks.get(sample.task).map_or("", |task| &task.name),
        },
    }
}
