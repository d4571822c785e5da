//! What an operator has done with persistent events: by flags before the first instruction, by
//! `vmm ctl` while the guest runs, and at every end of it.

use std::fs::File;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use vpmu::{FlushError, PersistError, PersistentStatus, Vpmu};

use crate::bucket::Bucket;
use crate::config::Config;
use crate::ctl::{Answer, Entry, Recorded, Reply, Request};
use crate::persistent::{Spec, SpecError};
use crate::policy;
use crate::recording::{Recorder, RecordingError};
use crate::report;

/// Where recordings go unless that is said.
const DEFAULT_RECORDING: &str = "perf.data";

/// Why it is not done.
#[derive(Debug, thiserror::Error)]
pub enum OperatorError {
    /// An event that cannot be.
    #[error("cannot start the persistent event `{name}`")]
    Start {
        /// Which.
        name: String,
        /// The device's reason.
        #[source]
        source: PersistError,
    },
    /// The same, of which is known what to do about it.
    #[error("cannot start the persistent event `{name}`: {remedy}")]
    Mistake {
        /// Which.
        name: String,
        /// What to do.
        remedy: &'static str,
        /// The device's reason.
        #[source]
        source: PersistError,
    },
    /// What is asked for is none.
    #[error("`{spec}` is no persistent event")]
    Spec {
        /// What it said.
        spec: String,
        /// What is wrong with it.
        #[source]
        source: SpecError,
    },
    /// Nothing has that name or id.
    #[error("there is no persistent event `{0}`: 'vmm ctl list' shows those that there are")]
    NoSuch(String),
    /// An event that cannot be ended.
    #[error("cannot end the persistent event")]
    End(#[source] PersistError),
    /// A flush that is not whole.
    #[error("not everything is flushed")]
    Flush(#[source] FlushError),
    /// A file to write to that did not come along.
    #[error("the request has no file with it that could be written to: ask with 'vmm ctl'")]
    NoFile,
    /// Another part of the machine does that.
    #[error("the PMU cannot save the machine: this is a bug")]
    Machine,
    /// A recording that cannot be written.
    #[error(transparent)]
    Recording(#[from] RecordingError),
}

/// The operator's hand in one machine.
#[derive(Debug)]
pub struct Operator {
    vpmu: Arc<Vpmu>,
    vcpus: u32,
    /// Whether hardware events may be opened.
    hardware: bool,
    /// --recording was given: the guest's own events are recorded too, without anybody asking then.
    asked: bool,
    /// Bytes that a recording takes out of rings in guest memory.
    most_of_guests: u64,
    /// One recording at a time, for they may go to one file.
    recorder: Mutex<Recorder>,
    /// What recordings may take that the guest brings about.
    room: Mutex<Bucket>,
    /// Recordings that were left out for it.
    left_out: AtomicU64,
}

/// Why a recording is written without anybody asking.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Occasion {
    /// The guest resets, and will boot again: it can do so as often as it likes.
    Reset,
    /// The run ends.
    End,
}

impl Operator {
    /// What writes the recordings of the machine that `config` describes: its directory and its
    /// symbols are opened now.
    ///
    /// # Errors
    /// [`OperatorError::Recording`].
    pub fn recorder(config: &Config) -> Result<Recorder, OperatorError> {
        let path = config.recording.as_deref();
        let path = path.unwrap_or_else(|| Path::new(DEFAULT_RECORDING));
        Ok(Recorder::new(path, config.symbols.as_deref())?)
    }

    /// The operator whom `config` describes, the events that it names started.
    ///
    /// # Errors
    /// [`OperatorError`]; a recording that could not be written in the end is told now.
    pub fn new(
        config: &Config,
        vpmu: &Arc<Vpmu>,
        recorder: Recorder,
    ) -> Result<Self, OperatorError> {
        let asked = config.recording.is_some();
        // Those of a machine that goes on are there already.
        let known = vpmu.persistent().iter().any(|event| event.operator);
        if asked || known || !config.persistent.is_empty() {
            recorder.check()?;
        }
        let operator = Self {
            vpmu: Arc::clone(vpmu),
            vcpus: config.vcpus.into(),
            hardware: config.hardware.events,
            asked,
            most_of_guests: config.limits.guest_recording,
            recorder: Mutex::new(recorder),
            room: Mutex::new(Bucket::per_minute(config.limits.recordings)),
            left_out: AtomicU64::new(0),
        };
        for spec in &config.persistent {
            operator.start(spec)?;
        }
        Ok(operator)
    }

    /// No vCPU runs, and the guest's memory is still there: writes the recording, if there is anything
    /// to be recorded. The guest's own events are recorded only if --recording was given. What goes wrong
    /// is logged, and changes nothing about how the run ends.
    pub fn record(&self, occasion: Occasion) -> Option<Recorded> {
        let wanted = |event: &PersistentStatus| event.operator || self.asked;
        if !self.vpmu.persistent().iter().any(wanted) {
            return None;
        }
        let mut room = self.room.lock().unwrap_or_else(PoisonError::into_inner);
        if occasion == Occasion::Reset && !room.wait(Instant::now()).is_zero() {
            self.left_out.fetch_add(1, Ordering::Relaxed);
            log::warn!(
                "a reset is not recorded: recordings take more than --max-recordings allows"
            );
            return None;
        }
        let recorded = self
            .dump(None, wanted)
            .inspect_err(|error| log::error!("{}", report::chain(error)))
            .ok()?;
        room.spend(recorded.bytes, Instant::now());
        Some(recorded)
    }

    /// Recordings that were left out because resets brought about too many.
    #[must_use]
    pub fn left_out(&self) -> u64 {
        self.left_out.load(Ordering::Relaxed)
    }

    /// Does what was asked on the control socket; `file` came with it.
    pub fn serve(&self, request: Request, file: Option<File>) -> Reply {
        match self.done(request, file) {
            Ok(answer) => Reply::Ok(answer),
            Err(error) => Reply::Error(report::chain(&error)),
        }
    }

    fn done(&self, request: Request, file: Option<File>) -> Result<Answer, OperatorError> {
        match request {
            Request::List {} => Ok(Answer::Events(self.entries(|_| true))),
            Request::Dump { file: None } => {
                let recorded = self.dump(None, |_| true)?;
                Ok(Answer::Recording(recorded))
            }
            Request::Dump { file: Some(path) } => {
                // Anything else could keep the socket's thread waiting.
                let is_file = |file: &File| file.metadata().is_ok_and(|status| status.is_file());
                let file = file.filter(is_file).ok_or(OperatorError::NoFile)?;
                let recorded = self.dump(Some((&file, &path)), |_| true)?;
                Ok(Answer::Recording(recorded))
            }
            Request::Flush { event } => {
                let id = event.map(|event| self.find(&event)).transpose()?;
                self.vpmu.flush(id).map_err(OperatorError::Flush)?;
                Ok(Answer::Done)
            }
            Request::Start { spec } => {
                let parsed = spec
                    .parse()
                    .map_err(|source| OperatorError::Spec { spec, source })?;
                let started = self.start(&parsed)?;
                Ok(Answer::Events(self.entries(|id| started.contains(&id))))
            }
            // The whole machine's, not the PMU's.
            Request::Snapshot { .. } => Err(OperatorError::Machine),
            Request::End { event } => {
                let id = self.find(&event)?;
                self.vpmu.end(id).map_err(OperatorError::End)?;
                Ok(Answer::Done)
            }
        }
    }

    fn entries(&self, wanted: impl Fn(u64) -> bool) -> Vec<Entry> {
        let events = self.vpmu.persistent().into_iter();
        let wanted = events.filter(|event| wanted(event.id));
        wanted.map(Entry::from).collect()
    }

    /// The id behind a name, or behind the digits of an id: no name begins with one.
    fn find(&self, event: &str) -> Result<u64, OperatorError> {
        let id: Option<u64> = event.parse().ok();
        let events = self.vpmu.persistent().into_iter();
        events
            .filter(|known| known.name == event || Some(known.id) == id)
            .map(|known| known.id)
            .next()
            .ok_or_else(|| OperatorError::NoSuch(event.to_owned()))
    }

    /// Starts the events of `spec`, all or none; their ids.
    fn start(&self, spec: &Spec) -> Result<Vec<u64>, OperatorError> {
        let mut started = Vec::new();
        for persist in spec.events(self.vcpus) {
            match self.vpmu.persist(&persist) {
                Ok(id) => started.push(id),
                Err(source) => {
                    for id in started {
                        if let Err(error) = self.vpmu.end(id) {
                            log::warn!("event {id} does not end: {error}");
                        }
                    }
                    let remedy = match &source {
                        PersistError::NoEvent(_)
                            if !self.hardware && policy::is_hardware(spec.event_name()) =>
                        {
                            Some(
                                "this machine opens no hardware event; --hardware-events has it do so",
                            )
                        }
                        source => remedy(source),
                    };
                    let name = persist.name.unwrap_or(persist.event);
                    return Err(match remedy {
                        Some(remedy) => OperatorError::Mistake {
                            name,
                            remedy,
                            source,
                        },
                        None => OperatorError::Start { name, source },
                    });
                }
            }
        }
        Ok(started)
    }

    /// Writes a recording of the events that are `wanted`: to `file` of that path, or where recordings
    /// go.
    fn dump(
        &self,
        file: Option<(&File, &Path)>,
        wanted: impl Fn(&PersistentStatus) -> bool,
    ) -> Result<Recorded, OperatorError> {
        // What an event in error had until then is recorded too.
        if let Err(error) = self.vpmu.flush(None) {
            log::warn!("the recording may lack samples: {}", report::chain(&error));
        }
        let histories = vpmu_perfdata::histories(&self.vpmu, wanted, self.most_of_guests);
        // A recorder that panicked has left no half of a file.
        let recorder = self.recorder.lock().unwrap_or_else(PoisonError::into_inner);
        let (path, summary) = match file {
            Some((file, path)) => (path, recorder.write_to(file, path, &histories)?),
            None => (recorder.path(), recorder.write(&histories)?),
        };
        Ok(Recorded {
            file: path.to_owned(),
            events: u64::try_from(summary.events).unwrap_or(u64::MAX),
            samples: summary.samples,
            lost: summary.lost,
            bytes: summary.bytes,
        })
    }
}

/// What the operator can do about an event that is refused.
fn remedy(error: &PersistError) -> Option<&'static str> {
    match error {
        PersistError::NoEvent(_) => Some("'vmm check --pmu full' names those that there are"),
        PersistError::NameTaken(_) | PersistError::ReservedName(_) => {
            Some("give it another name with name=")
        }
        PersistError::Pages { .. } => Some("give it another size"),
        PersistError::NoRoom(_) | PersistError::NoWindow => {
            Some("give it a smaller size, or the machine more with --window")
        }
        _ => None,
    }
}
