//! The processed profile of the Firefox Profiler. Tasks and vCPUs are threads, frames are labels with the colour of their
//! mode; marks, exits, a panic and losses are markers.

use std::collections::HashMap;
use std::io::Write;

use fxprof_processed_profile::{
    CategoryColor, CategoryHandle, CpuDelta, Frame as FxFrame, FrameFlags, FrameInfo, MarkerFieldFlags,
    MarkerFieldFormat, MarkerTiming, ProcessHandle, Profile as FxProfile, ReferenceTimestamp, SamplingInterval,
    StackHandle, StaticSchemaMarker, StaticSchemaMarkerField, StringHandle, ThreadHandle, Timestamp,
};

use crate::model::{Event, EventKind, Sample};
use crate::selection::{Selection, Thread};
use crate::stacks::{Mode, StackId};

/// The time between samples if the recording does not say it.
const UNKNOWN_INTERVAL: u64 = 1_000_000;

/// A mark, an exit, a panic or a loss.
struct Marker {
    name: StringHandle,
    category: CategoryHandle,
    text: StringHandle,
}

impl StaticSchemaMarker for Marker {
    const UNIQUE_MARKER_TYPE_NAME: &'static str = "vpmu";
    const DESCRIPTION: Option<&'static str> = Some("Marks, exits, panics and lost samples of the recording");
    const CHART_LABEL: Option<&'static str> = Some("{marker.data.value}");
    const TABLE_LABEL: Option<&'static str> = Some("{marker.name} {marker.data.value}");
    const FIELDS: &'static [StaticSchemaMarkerField] = &[StaticSchemaMarkerField {
        key: "value",
        label: "Value",
        format: MarkerFieldFormat::String,
        flags: MarkerFieldFlags::SEARCHABLE,
    }];

    fn name(&self, _: &mut FxProfile) -> StringHandle {
        self.name
    }

    fn category(&self, _: &mut FxProfile) -> CategoryHandle {
        self.category
    }

    fn string_field_value(&self, _: u32) -> StringHandle {
        self.text
    }

    fn number_field_value(&self, _: u32) -> f64 {
        0.0
    }
}

struct Writer<'a> {
    selection: Selection<'a>,
    out: FxProfile,
    first: u64,
    kernel: CategoryHandle,
    user: CategoryHandle,
    marks: CategoryHandle,
    /// The last name of each process's main thread: it changes when the process executes another program.
    mains: HashMap<u32, &'a str>,
    processes: HashMap<u32, ProcessHandle>,
    threads: HashMap<Thread, ThreadHandle>,
    stacks: HashMap<(ThreadHandle, StackId), StackHandle>,
}

/// Writes a selection.
///
/// # Errors
/// Errors of `out`.
pub(crate) fn write(selection: &Selection<'_>, out: &mut impl Write) -> serde_json::Result<()> {
    serde_json::to_writer(out, &Writer::new(*selection).profile())
}

impl<'a> Writer<'a> {
    fn new(selection: Selection<'a>) -> Self {
        let event = selection.profile.events.get(selection.event_index());
        let interval = event.and_then(Event::interval).unwrap_or(UNKNOWN_INTERVAL);
        let product = format!("{} ({})", if selection.profile.is_guest { "guest" } else { "perf" }, selection.event());
        // Recordings have no date.
        let epoch = ReferenceTimestamp::from_millis_since_unix_epoch(0.0);
        let mut out = FxProfile::new(&product, epoch, SamplingInterval::from_nanos(interval));
        out.set_os_name("Linux");
        out.set_symbolicated(true);
        // Later tasks replace earlier ones.
        let mains = selection.profile.tasks.iter().filter(|task| task.pid == task.tid);
        let mains = mains.filter_map(|task| Some((task.pid.filter(|&pid| pid != 0)?, task)));
        Self {
            first: selection.profile.samples.first().map_or(0, |sample| sample.time),
            kernel: out.add_category("Kernel", CategoryColor::Orange),
            user: out.add_category("User", CategoryColor::Yellow),
            marks: out.add_category("Marks and exits", CategoryColor::Blue),
            mains: mains.map(|(pid, task)| (pid, task.name.as_str())).collect(),
            selection,
            out,
            processes: HashMap::new(),
            threads: HashMap::new(),
            stacks: HashMap::new(),
        }
    }

    fn profile(mut self) -> FxProfile {
        let profile = self.selection.profile;
        for (index, sample) in profile.samples.iter().enumerate() {
            let event = profile.events.get(sample.event);
            let is_selected = sample.event == self.selection.event_index();
            let is_marker = event.is_some_and(|event| event.kind != EventKind::Sampled);
            if is_selected {
                self.sample(sample);
            }
            if let Some(event) = event.filter(|_| is_marker) {
                let value = match event.kind {
                    EventKind::Mark => sample.value.to_string(),
                    EventKind::Exit | EventKind::Sampled => String::new(),
                };
                self.marker(sample, &event.name, &value);
            }
            if profile.panic == Some(index) {
                self.marker(sample, "panic", "");
            }
        }
        if let Some(last) = profile.samples.last() {
            let lost = profile.events.iter().map(|event| (event.name.as_str(), event.lost));
            for (event, lost) in lost.chain([("unknown event", profile.lost)]).filter(|&(_, lost)| lost > 0) {
                self.marker(last, "lost samples", &format!("{lost} of {event}"));
            }
        }
        self.out
    }

    fn time(&self, sample: &Sample) -> Timestamp {
        Timestamp::from_nanos_since_reference(sample.time.saturating_sub(self.first))
    }

    fn sample(&mut self, sample: &Sample) {
        let thread = self.thread(sample);
        let stack = self.stack(thread, sample.stack);
        let weight = i32::try_from(self.selection.weight(sample)).unwrap_or(i32::MAX);
        self.out.add_sample(thread, self.time(sample), stack, CpuDelta::ZERO, weight);
    }

    fn marker(&mut self, sample: &Sample, name: &str, value: &str) {
        let thread = self.thread(sample);
        let stack = self.stack(thread, sample.stack);
        let marker =
            Marker { name: self.out.intern_string(name), category: self.marks, text: self.out.intern_string(value) };
        let marker = self.out.add_marker(thread, MarkerTiming::Instant(self.time(sample)), marker);
        self.out.set_marker_stack(thread, marker, stack);
    }

    fn thread(&mut self, sample: &Sample) -> ThreadHandle {
        let thread = self.selection.thread(sample);
        if let Some(&handle) = self.threads.get(&thread) {
            return handle;
        }
        let start = self.time(sample);
        let out = &mut self.out;
        let process = self.processes.entry(thread.pid);
        let process = *process.or_insert_with(|| out.add_process(&thread.process, thread.pid, start));
        // The viewer shows a main thread with the name of its process.
        let is_main = thread.pid == thread.tid && self.mains.get(&thread.pid) == Some(&thread.name.as_str());
        if is_main {
            out.set_process_name(process, &thread.name);
        }
        let handle = out.add_thread(process, thread.tid, start, is_main);
        out.set_thread_name(handle, &thread.name);
        out.set_thread_show_markers_in_timeline(handle, true);
        self.threads.insert(thread, handle);
        handle
    }

    /// Stores a stack of a thread.
    fn stack(&mut self, thread: ThreadHandle, stack: Option<StackId>) -> Option<StackHandle> {
        let stacks = &self.selection.profile.stacks;
        // The callers that are not stored yet, innermost first.
        let (mut missing, mut next, mut handle) = (Vec::new(), stack, None);
        while let Some(id) = next {
            handle = self.stacks.get(&(thread, id)).copied();
            if handle.is_some() {
                break;
            }
            let &(caller, frame) = stacks.all().get(id.index())?;
            missing.push((id, frame));
            next = caller;
        }
        for (id, frame) in missing.into_iter().rev() {
            let frame = stacks.all_frames().get(frame as usize)?;
            let category = match frame.mode {
                Mode::Kernel => self.kernel,
                Mode::User => self.user,
                Mode::Other => CategoryHandle::OTHER,
            };
            let name = self.out.intern_string(&frame.name);
            let info =
                FrameInfo { frame: FxFrame::Label(name), category_pair: category.into(), flags: FrameFlags::empty() };
            let frame = self.out.intern_frame(thread, info);
            let stored = self.out.intern_stack(thread, handle, frame);
            self.stacks.insert((thread, id), stored);
            handle = Some(stored);
        }
        handle
    }
}
