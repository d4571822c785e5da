//! Fills a profile from the records of a `perf.data` file.

use std::collections::HashMap;
use std::io::{BufReader, Read, Seek};
use std::rc::Rc;

use linux_perf_data::linux_perf_event_reader::{
    AttrFlags, CpuMode, EventRecord, Mmap2FileId, PerfEventType, RawData, RawEventRecord, RecordType, SampleFormat,
    SampleRecord, SamplingPolicy, SoftwareCounterType,
};
use linux_perf_data::{AttributeDescription, DsoKey, PerfFile, PerfFileReader, PerfFileRecord};
use vpmu_perf::record::{OWN_TYPE_BASE, TYPE_KSYMBOL};
use vpmu_symbols::printable;

use crate::bounds::{self, BoundsError, number};
use crate::model::{Event, EventKind, Packet, Profile, Rate, Sample, Task};
use crate::names::{NAME_MAX, Names};
use crate::resolver::{Place, Resolver};
use crate::stacks::{Frame, FrameId, Mode, StackId};

/// perf's `PERF_RECORD_LOST_SAMPLES`.
const TYPE_LOST_SAMPLES: u32 = 13;
/// perf's `PERF_RECORD_MISC_MMAP_BUILD_ID`.
const MISC_BUILD_ID: u16 = 1 << 14;
/// perf's `PERF_RECORD_KSYMBOL_FLAGS_UNREGISTER`.
const UNREGISTER: u64 = 1;
/// perf's `PERF_CONTEXT_MAX`: in a call chain, this value and all higher values are not addresses.
const FIRST_CONTEXT: u64 = u64::MAX - 4094;
const CONTEXT_KERNEL: u64 = u64::MAX - 127;
const CONTEXT_USER: u64 = u64::MAX - 511;
/// The kernel's functions that end it.
const PANIC: [&str; 2] = ["panic", "vpanic"];

/// Errors of a recording.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The file is of another kind, is damaged, or is too large.
    #[error(transparent)]
    Bounds(#[from] BoundsError),
    /// The file is damaged.
    #[error("the recording is damaged, or from a perf that is not supported: try 'perf report -i FILE'")]
    Parse(#[source] linux_perf_data::Error),
    /// A record is damaged.
    #[error("the recording is damaged: record {number} does not have the fields of its event; copy the file again")]
    Record {
        /// The record's position in the order of time.
        number: u64,
        /// The cause, if the parser has one.
        #[source]
        source: Option<std::io::Error>,
    },
    /// The event samples counts, which the parser misreads.
    #[error("the samples of `{0}` contain counts: record without ':S' and 'PERF_SAMPLE_READ'")]
    Counts(String),
    /// There are too many different stacks.
    #[error("the recording has too many different stacks: record for a shorter time or with fewer callers")]
    Stacks,
    /// There are too many mappings.
    #[error("the recording has too many mappings of forked processes: record for a shorter time")]
    Mappings,
}

/// Reads a file.
///
/// # Errors
/// [`ReadError`].
pub(crate) fn read(mut file: impl Read + Seek, names: Names) -> Result<Profile, ReadError> {
    bounds::check(&mut file)?;
    let PerfFileReader { mut perf_file, mut record_iter } =
        PerfFileReader::parse_file(BufReader::new(file)).map_err(ReadError::Parse)?;
    let mut reader = Reader::new(&perf_file, names)?;
    let mut number = 0;
    while let Some(record) = record_iter.next_record(&mut perf_file).map_err(ReadError::Parse)? {
        number += 1;
        if let PerfFileRecord::EventRecord { attr_index, record } = record {
            reader.record(attr_index, &record, number)?;
        }
    }
    Ok(reader.finish())
}

/// Events of the file, with the profile's event for each of the file's attributes.
fn events(attributes: &[AttributeDescription]) -> (Vec<Event>, Vec<usize>) {
    let described: Vec<(String, String)> = attributes
        .iter()
        .map(|description| {
            let kind = format!("{:?}", description.attributes().type_);
            let name = printable(description.name().unwrap_or("event"), NAME_MAX);
            (name, kind)
        })
        .collect();
    // The events of several vCPUs are one event: their names differ in the number at the end.
    let mut sharing: HashMap<(&str, &str), u64> = HashMap::new();
    for (name, kind) in &described {
        *sharing.entry((stem(name), kind)).or_default() += 1;
    }
    let mut events = Vec::new();
    let mut known: HashMap<(&str, &str), usize> = HashMap::new();
    let mut of_attribute = Vec::new();
    for ((name, kind), description) in described.iter().zip(attributes) {
        let shared = sharing.get(&(stem(name), kind)).is_some_and(|&count| count > 1);
        let name = if shared { stem(name) } else { name };
        let index = *known.entry((name, kind)).or_insert_with(|| {
            events.push(event(name, description));
            events.len() - 1
        });
        of_attribute.push(index);
    }
    (events, of_attribute)
}

/// Returns a name without the number of a vCPU at its end.
fn stem(name: &str) -> &str {
    match name.rsplit_once('-') {
        Some((stem, cpu)) if !stem.is_empty() && !cpu.is_empty() && cpu.bytes().all(|byte| byte.is_ascii_digit()) => {
            stem
        }
        _ => name,
    }
}

fn event(name: &str, description: &AttributeDescription) -> Event {
    let attributes = description.attributes();
    let own = match attributes.type_ {
        PerfEventType::DynamicPmu(kind, ..) if kind & 0xffff_0000 == OWN_TYPE_BASE => kind - OWN_TYPE_BASE,
        _ => 0,
    };
    let kind = match own {
        vpmu_abi::KIND_MARK => EventKind::Mark,
        vpmu_abi::KIND_EXITS | vpmu_abi::KIND_HALTS | vpmu_abi::KIND_EXIT_TRACE => EventKind::Exit,
        _ => EventKind::Sampled,
    };
    let is_clock = matches!(
        attributes.type_,
        PerfEventType::Software(SoftwareCounterType::CpuClock | SoftwareCounterType::TaskClock)
    );
    let is_time = is_clock || own == vpmu_abi::KIND_GUEST_TIME;
    let rate = match attributes.sampling_policy {
        SamplingPolicy::Frequency(hertz) => Some(Rate::Frequency(hertz)),
        SamplingPolicy::Period(period) => Some(Rate::Period(period.get())),
        SamplingPolicy::NoSampling => None,
    };
    Event {
        name: name.to_owned(),
        kind,
        rate,
        is_time,
        is_guest_only: attributes.flags.contains(AttrFlags::EXCLUDE_HOST),
        is_newest_only: attributes.flags.contains(AttrFlags::WRITE_BACKWARD),
        has_packets: kind == EventKind::Exit && attributes.sample_format.contains(SampleFormat::RAW),
        samples: 0,
        lost: 0,
        throttled: 0,
    }
}

/// A task's process, thread, vCPU and name.
type TaskKey = (Option<u32>, Option<u32>, Option<u32>, Option<Rc<str>>);

struct Reader {
    profile: Profile,
    resolver: Resolver,
    /// The profile's event of each attribute.
    of_attribute: Vec<usize>,
    /// The profile's event of each id.
    of_id: HashMap<u64, usize>,
    build_ids: HashMap<DsoKey, Vec<u8>>,
    tasks: HashMap<TaskKey, usize>,
    /// Frames of addresses in the kernel, until its functions change.
    kernel_frames: HashMap<u64, FrameId>,
    /// Frames of other places, by the offset in the file.
    frames: HashMap<(Place, u64), FrameId>,
    now: u64,
}

impl Reader {
    fn new(file: &PerfFile, names: Names) -> Result<Self, ReadError> {
        let attributes = file.event_attributes();
        let (events, of_attribute) = events(attributes);
        let mut of_id = HashMap::new();
        for (description, &event) in attributes.iter().zip(&of_attribute) {
            if description.attributes().sample_format.contains(SampleFormat::READ) {
                let name = description.name().unwrap_or("event");
                return Err(ReadError::Counts(printable(name, NAME_MAX)));
            }
            of_id.extend(description.ids().iter().map(|&id| (id, event)));
        }
        let build_ids = file.build_ids().map_err(ReadError::Parse)?;
        let build_ids: HashMap<_, _> = build_ids.into_iter().map(|(key, info)| (key, info.build_id)).collect();
        let mut resolver = Resolver::new(names);
        if let Some(build_id) = build_ids.get(&DsoKey::Kernel) {
            resolver.recorded_kernel(build_id);
        }
        let is_guest = file.perf_version().map_err(ReadError::Parse)?.is_none();
        let command = file.cmdline().map_err(ReadError::Parse)?.unwrap_or_default().join(" ");
        let cpu_id = file.cpu_id().map_err(ReadError::Parse)?.unwrap_or_default();
        let profile = Profile {
            events,
            is_guest,
            command: printable(command, NAME_MAX),
            cpu_id: printable(cpu_id, NAME_MAX),
            ..Profile::default()
        };
        Ok(Self {
            profile,
            resolver,
            of_attribute,
            of_id,
            build_ids,
            tasks: HashMap::new(),
            kernel_frames: HashMap::new(),
            frames: HashMap::new(),
            now: 0,
        })
    }

    fn record(&mut self, attribute: usize, record: &RawEventRecord<'_>, number: u64) -> Result<(), ReadError> {
        let damaged = |source| ReadError::Record { number, source };
        if !is_sound(record) {
            return Err(damaged(None));
        }
        let event = self.of_attribute.get(attribute).copied().unwrap_or_default();
        match record.record_type {
            RecordType(TYPE_KSYMBOL) => return self.kernel_symbol(&record.data).ok_or_else(|| damaged(None)),
            RecordType(TYPE_LOST_SAMPLES) => {
                let lost = bounds::number::<8>(&record.data.as_slice(), 0).ok_or_else(|| damaged(None))?;
                self.lose(Some(event), lost);
                return Ok(());
            }
            _ => {}
        }
        match record.parse().map_err(|source| damaged(Some(source)))? {
            EventRecord::Sample(sample) => self.sample(event, &sample).ok_or(ReadError::Stacks)?,
            EventRecord::Lost(lost) => self.lose(self.of_id.get(&lost.id).copied(), lost.count),
            EventRecord::Comm(comm) => self.resolver.comm(comm.pid, comm.tid, &text(&comm.name), comm.is_execve),
            EventRecord::Throttle(throttle) => {
                let event = self.of_id.get(&throttle.id).and_then(|&event| self.profile.events.get_mut(event));
                event.into_iter().for_each(|event| event.throttled += 1);
            }
            EventRecord::Fork(fork) => {
                let is_within = self.resolver.fork((fork.ppid, fork.ptid), (fork.pid, fork.tid));
                return is_within.then_some(()).ok_or(ReadError::Mappings);
            }
            EventRecord::Exit(exit) if exit.pid == exit.tid => self.resolver.exit(exit.pid),
            EventRecord::Mmap(map) => {
                let place = (map.pid, map.address, map.length, map.page_offset);
                self.map(place, map.cpu_mode, &map.path, None);
            }
            EventRecord::Mmap2(map) => {
                let place = (map.pid, map.address, map.length, map.page_offset);
                let build_id = match map.file_id {
                    Mmap2FileId::BuildId(id) => Some(id),
                    Mmap2FileId::InodeAndVersion(_) => None,
                };
                self.map(place, map.cpu_mode, &map.path, build_id);
            }
            _ => {}
        }
        Ok(())
    }

    fn lose(&mut self, event: Option<usize>, lost: u64) {
        let counter = match event.and_then(|event| self.profile.events.get_mut(event)) {
            Some(event) => &mut event.lost,
            None => &mut self.profile.lost,
        };
        *counter = counter.saturating_add(lost);
    }

    /// Adds or removes a function of the kernel.
    fn kernel_symbol(&mut self, data: &RawData<'_>) -> Option<()> {
        let bytes = data.as_slice();
        let (start, size) = (number::<8>(&bytes, 0)?, number::<4>(&bytes, 8)?);
        let flags = number::<2>(&bytes, 14)?;
        self.kernel_frames = HashMap::new();
        if flags & UNREGISTER != 0 {
            self.resolver.remove_function(start);
            return Some(());
        }
        let name = bytes.get(16..)?;
        let name = name.split(|&byte| byte == 0).next()?;
        self.resolver.add_function(start, size, &String::from_utf8_lossy(name));
        Some(())
    }

    fn map(
        &mut self,
        (pid, start, length, offset): (i32, u64, u64, u64),
        mode: CpuMode,
        path: &RawData<'_>,
        build_id: Option<Vec<u8>>,
    ) {
        let path = text(path);
        match mode {
            CpuMode::User => {}
            CpuMode::Kernel => {
                // perf notes where the kernel's first symbol is.
                if let Some(reference) = path.strip_prefix("[kernel.kallsyms]")
                    && self.resolver.kernel_is_at(reference, offset)
                {
                    self.kernel_frames = HashMap::new();
                }
                return;
            }
            _ => return,
        }
        let known = || {
            let key = DsoKey::detect(path.as_bytes(), mode)?;
            self.build_ids.get(&key).cloned()
        };
        let build_id = build_id.or_else(known);
        self.resolver.map_file(pid, (start, length, offset), (path, build_id));
    }

    /// Adds a sample; `None` if there are too many stacks.
    fn sample(&mut self, event: usize, sample: &SampleRecord<'_>) -> Option<()> {
        let stack = self.stack(sample)?;
        // Samples of an unknown task have the number -1.
        let positive = |id: Option<i32>| id.and_then(|id| u32::try_from(id).ok());
        let (pid, tid) = (positive(sample.pid), positive(sample.tid));
        let own_cpu = sample.cpu.filter(|_| matches!(tid, None | Some(0)));
        let name =
            tid.zip(sample.tid).and_then(|(_, tid)| self.resolver.comm_of(sample.pid.unwrap_or(tid), tid)).cloned();
        let tasks = &mut self.profile.tasks;
        let task = *self.tasks.entry((pid, tid, own_cpu, name)).or_insert_with_key(|(.., name)| {
            tasks.push(Task::new(pid, tid, own_cpu, name.as_deref()));
            tasks.len() - 1
        });
        self.now = sample.timestamp.unwrap_or(self.now);
        let mut packet = None;
        if let Some(event) = self.profile.events.get_mut(event) {
            event.samples += 1;
            if let Some(raw) = sample.raw.filter(|_| event.has_packets) {
                let bytes = raw.as_slice();
                packet = Some(Packet { at: self.profile.packets.len(), size: bytes.len() });
                self.profile.packets.extend_from_slice(&bytes);
            }
        }
        self.profile.samples.push(Sample {
            event,
            task,
            cpu: sample.cpu,
            time: self.now,
            period: sample.period.unwrap_or(1),
            value: sample.addr.unwrap_or(0),
            stack,
            packet,
        });
        Some(())
    }

    /// Stores the stack of a sample, outermost frame first; `None` if there are too many stacks.
    fn stack(&mut self, sample: &SampleRecord<'_>) -> Option<Option<StackId>> {
        let pid = sample.pid.unwrap_or(-1);
        let mut mode = sample.cpu_mode;
        let mut addresses = Vec::new();
        if let Some(chain) = sample.callchain {
            // The first address after a change of mode is where the code is; the others are where it returns to.
            let mut is_exact = true;
            for address in (0..chain.len()).filter_map(|index| chain.get(index)) {
                match address {
                    CONTEXT_KERNEL => mode = CpuMode::Kernel,
                    CONTEXT_USER => mode = CpuMode::User,
                    FIRST_CONTEXT.. => mode = CpuMode::GuestKernel,
                    _ => {
                        addresses.push((mode, if is_exact { address } else { address.saturating_sub(1) }));
                        is_exact = false;
                        continue;
                    }
                }
                is_exact = true;
            }
        }
        if addresses.is_empty() {
            addresses.extend(sample.ip.map(|ip| (sample.cpu_mode, ip)));
        }
        let mut stack = None;
        for (mode, address) in addresses.into_iter().rev() {
            let frame = self.frame(pid, mode, address)?;
            stack = Some(self.profile.stacks.push(stack, frame)?);
        }
        Some(stack)
    }

    /// Stores the frame of an address.
    fn frame(&mut self, pid: i32, mode: CpuMode, address: u64) -> Option<FrameId> {
        let mode = match mode {
            CpuMode::Kernel => Mode::Kernel,
            CpuMode::Unknown if address >> 63 != 0 => Mode::Kernel,
            CpuMode::User | CpuMode::Unknown => Mode::User,
            _ => Mode::Other,
        };
        let (place, at) = self.resolver.place(pid, mode, address);
        let found = match place {
            Place::Kernel => self.kernel_frames.get(&at).copied(),
            _ => self.frames.get(&(place, at)).copied(),
        };
        let id = match found {
            Some(id) => id,
            None => {
                let id = self.profile.stacks.frame(self.resolver.frame_at(place, at))?;
                match place {
                    Place::Kernel => self.kernel_frames.insert(at, id),
                    _ => self.frames.insert((place, at), id),
                };
                id
            }
        };
        if let Some(frame) = self.profile.stacks.all_frames().get(id as usize)
            && frame.name.starts_with('[')
        {
            match place {
                Place::Kernel => self.profile.nameless.0 += 1,
                _ => self.profile.nameless.1 += 1,
            }
        }
        Some(id)
    }

    fn finish(self) -> Profile {
        let mut profile = self.profile;
        // The parser sorts each round; rounds of a damaged file can overlap.
        profile.samples.sort_by_key(|sample| sample.time);
        let is_panic = |frame: &Frame| frame.mode == Mode::Kernel && PANIC.contains(&frame.name.as_str());
        let frames = profile.stacks.all_frames();
        let panics: Vec<bool> = frames.iter().map(is_panic).collect();
        // A caller precedes its callees.
        let mut dead: Vec<bool> = Vec::with_capacity(profile.stacks.all().len());
        for &(caller, frame) in profile.stacks.all() {
            let caller = caller.and_then(|caller| dead.get(caller.index())).copied().unwrap_or(false);
            dead.push(caller || panics.get(frame as usize).copied().unwrap_or(false));
        }
        let in_panic =
            |sample: &Sample| sample.stack.and_then(|stack| dead.get(stack.index())).copied().unwrap_or(false);
        profile.panic = profile.samples.iter().position(in_panic);
        profile
    }
}

/// Checks the lengths in a record that the parser uses unchecked.
fn is_sound(record: &RawEventRecord<'_>) -> bool {
    let data = record.data.as_slice();
    match record.record_type {
        RecordType::SAMPLE if record.parse_info.sample_format.contains(SampleFormat::CALLCHAIN) => {
            let before = SampleFormat::IDENTIFIER
                | SampleFormat::IP
                | SampleFormat::TID
                | SampleFormat::TIME
                | SampleFormat::ADDR
                | SampleFormat::ID
                | SampleFormat::STREAM_ID
                | SampleFormat::CPU
                | SampleFormat::PERIOD;
            let words = record.parse_info.sample_format.intersection(before).bits().count_ones() as usize;
            number::<8>(&data, 8 * words).is_some_and(|length| length <= (data.len() / 8) as u64)
        }
        RecordType::MMAP2 if record.misc & MISC_BUILD_ID != 0 => data.get(32).is_some_and(|&length| length <= 20),
        _ => true,
    }
}

/// The text of a name, without control characters.
fn text(name: &RawData<'_>) -> String {
    printable(String::from_utf8_lossy(&name.as_slice()), NAME_MAX)
}
