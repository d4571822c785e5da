//! The operator's persistent events. Flags start them before the guest's first instruction, `vmm ctl` manages them
//! while the guest runs, and the VMM records them when the run ends.

use std::fs::File;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use vpmu::{FlushError, PersistError, PersistSpec, PersistSpecError, PersistentStatus, Vpmu};

use crate::bucket::Bucket;
use crate::config::Config;
use crate::ctl::{Answer, Entry, Recorded, Reply, Request};
use crate::policy;
use crate::recording::{Recorder, RecordingError};

/// Default file of recordings.
const DEFAULT_RECORDING: &str = "perf.data";

/// Errors of an operator's request.
#[derive(Debug, thiserror::Error)]
pub enum OperatorError {
    /// An event cannot be started.
    #[error("cannot start the persistent event `{name}`")]
    Start {
        /// Its name.
        name: String,
        /// The device's reason.
        #[source]
        source: PersistError,
    },
    /// An event cannot be started, and the remedy is known.
    #[error("cannot start the persistent event `{name}`: {remedy}")]
    Mistake {
        /// Its name.
        name: String,
        /// The remedy.
        remedy: &'static str,
        /// The device's reason.
        #[source]
        source: PersistError,
    },
    /// An invalid description of an event.
    #[error("`{spec}` does not describe a persistent event")]
    Spec {
        /// The description.
        spec: String,
        /// The cause.
        #[source]
        source: PersistSpecError,
    },
    /// An unknown name or id.
    #[error("there is no persistent event `{0}`: 'vmm ctl list' shows all")]
    NoSuch(String),
    /// An event cannot be ended.
    #[error("cannot end the persistent event")]
    End(#[source] PersistError),
    /// A flush that is incomplete.
    #[error("the flush is incomplete")]
    Flush(#[source] FlushError),
    /// A request came without a file to write to.
    #[error("the request came without a file to write to: use 'vmm ctl'")]
    NoFile,
    /// A request for a snapshot reached [`Operator::serve`], which is a bug.
    #[error("the PMU cannot save the machine: this is a bug")]
    Machine,
    /// A recording that cannot be written.
    #[error(transparent)]
    Recording(#[from] RecordingError),
}

/// The operator's access to one machine's persistent events.
#[derive(Debug)]
pub struct Operator {
    vpmu: Arc<Vpmu>,
    vcpus: u32,
    /// Whether hardware events may be opened.
    hardware: bool,
    /// Whether --recording was given. Automatic recordings then include the guest's own events.
    asked: bool,
    /// Maximum number of bytes that one recording copies from rings in guest memory.
    most_of_guests: u64,
    /// The mutex serializes recordings, because they may share a file.
    recorder: Mutex<Recorder>,
    /// Limits the bytes per minute in recordings made at resets (--max-recordings).
    room: Mutex<Bucket>,
    /// Number of recordings skipped because of --max-recordings.
    left_out: AtomicU64,
}

/// Triggers of an automatic recording.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Occasion {
    /// The guest resets and boots again. A guest can reset arbitrarily often, so --max-recordings limits these
    /// recordings.
    Reset,
    /// The run ends.
    End,
}

impl Operator {
    /// Creates the recorder for `config`. Opens the directory of the recordings, and the symbol file.
    ///
    /// # Errors
    /// [`OperatorError::Recording`].
    pub fn recorder(config: &Config) -> Result<Recorder, OperatorError> {
        let path = config.recording.as_deref();
        let path = path.unwrap_or_else(|| Path::new(DEFAULT_RECORDING));
        Ok(Recorder::new(path, config.symbols.as_deref())?)
    }

    /// Starts the events that `config` names.
    ///
    /// # Errors
    /// [`OperatorError`]. If a recording cannot be written, this function returns the error, so that the operator sees
    /// it before the run.
    pub fn new(config: &Config, vpmu: &Arc<Vpmu>, recorder: Recorder) -> Result<Self, OperatorError> {
        let asked = config.recording.is_some();
        // A restored machine already has its events.
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

    /// Writes the recording if there are events to record. At a reset, writes it only if --max-recordings permits
    /// another recording. Call this while the vCPUs are stopped and guest memory still exists. The recording includes
    /// the guest's own events only if --recording was given. Errors are logged, and do not affect the result of the
    /// run.
    pub fn record(&self, occasion: Occasion) -> Option<Recorded> {
        let wanted = |event: &PersistentStatus| event.operator || self.asked;
        if !self.vpmu.persistent().iter().any(wanted) {
            return None;
        }
        let mut room = self.room.lock().unwrap_or_else(PoisonError::into_inner);
        if occasion == Occasion::Reset && !room.wait(Instant::now()).is_zero() {
            self.left_out.fetch_add(1, Ordering::Relaxed);
            log::warn!("a reset is not recorded: recordings already take as many bytes as --max-recordings allows");
            return None;
        }
        let recorded =
            self.dump(None, wanted).inspect_err(|error| log::error!("{}", vpmu_errors::chain(error))).ok()?;
        room.spend(recorded.bytes, Instant::now());
        Some(recorded)
    }

    /// Number of recordings that were skipped at resets because of --max-recordings.
    #[must_use]
    pub fn left_out(&self) -> u64 {
        self.left_out.load(Ordering::Relaxed)
    }

    /// Executes a request from the control socket. `files` are the files that the client sent with the request.
    pub fn serve(&self, request: Request, files: Vec<File>) -> Reply {
        match self.done(request, files) {
            Ok(answer) => Reply::Ok(answer),
            Err(error) => Reply::Error(vpmu_errors::chain(&error)),
        }
    }

    fn done(&self, request: Request, mut files: Vec<File>) -> Result<Answer, OperatorError> {
        match request {
            Request::List {} => Ok(Answer::Events(self.entries(|_| true))),
            Request::Dump { file: None } => {
                let recorded = self.dump(None, |_| true)?;
                Ok(Answer::Recording(recorded))
            }
            Request::Dump { file: Some(path) } => {
                // Accept only a regular file, because a pipe or a device could block the socket's thread.
                let is_file = |file: &File| file.metadata().is_ok_and(|status| status.is_file());
                let file = files.pop().filter(is_file).ok_or(OperatorError::NoFile)?;
                let recorded = self.dump(Some((&file, &path)), |_| true)?;
                Ok(Answer::Recording(recorded))
            }
            Request::Flush { event } => {
                let id = event.map(|event| self.find(&event)).transpose()?;
                self.vpmu.flush(id).map_err(OperatorError::Flush)?;
                Ok(Answer::Done)
            }
            Request::Start { spec } => {
                let parsed = spec.parse().map_err(|source| OperatorError::Spec { spec, source })?;
                let started = self.start(&parsed)?;
                Ok(Answer::Events(self.entries(|id| started.contains(&id))))
            }
            // This request concerns the whole machine, so `vm/snapshot.rs` handles it.
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

    /// Returns the id of the event that `event` names, by name or by id. Names never start with a digit, so the two
    /// cannot be confused.
    fn find(&self, event: &str) -> Result<u64, OperatorError> {
        let id: Option<u64> = event.parse().ok();
        let events = self.vpmu.persistent().into_iter();
        events
            .filter(|known| known.name == event || Some(known.id) == id)
            .map(|known| known.id)
            .next()
            .ok_or_else(|| OperatorError::NoSuch(event.to_owned()))
    }

    /// Starts all events of `spec`, or none if one fails. Returns the ids of the events.
    fn start(&self, spec: &PersistSpec) -> Result<Vec<u64>, OperatorError> {
        let mut started = Vec::new();
        for persist in spec.events(self.vcpus) {
            match self.vpmu.persist(&persist) {
                Ok(id) => started.push(id),
                Err(source) => {
                    for id in started {
                        if let Err(error) = self.vpmu.end(id) {
                            log::warn!("cannot end event {id}: {error}");
                        }
                    }
                    let remedy = match &source {
                        PersistError::NoEvent(_) if !self.hardware && policy::is_hardware(spec.event_name()) => {
                            Some("this machine opens no hardware events; --hardware-events enables them")
                        }
                        source => remedy(source),
                    };
                    let name = persist.name.unwrap_or(persist.event);
                    return Err(match remedy {
                        Some(remedy) => OperatorError::Mistake { name, remedy, source },
                        None => OperatorError::Start { name, source },
                    });
                }
            }
        }
        Ok(started)
    }

    /// Writes a recording of the `wanted` events. `file` is the open file to write to, and its path. `None` means the
    /// file of `--recording`.
    fn dump(
        &self,
        file: Option<(&File, &Path)>,
        wanted: impl Fn(&PersistentStatus) -> bool,
    ) -> Result<Recorded, OperatorError> {
        // Continue after a failed flush, because the earlier records of an event in the error state can still be
        // recorded.
        if let Err(error) = self.vpmu.flush(None) {
            log::warn!("the recording may lack samples: {}", vpmu_errors::chain(&error));
        }
        let histories = vpmu_recorder::histories(&self.vpmu, wanted, self.most_of_guests);
        // A poisoned lock is harmless, because a panic during a recording leaves no partial file.
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

/// The remedy for a refused event.
fn remedy(error: &PersistError) -> Option<&'static str> {
    match error {
        PersistError::NoEvent(_) => Some("'vmm check --pmu full' lists the events of this host"),
        PersistError::NameTaken(_) | PersistError::ReservedName(_) => Some("choose a different name with name="),
        PersistError::Pages { .. } => Some("choose a different size"),
        PersistError::NoRoom(_) | PersistError::NoWindow => Some("reduce the size, or increase --window"),
        _ => None,
    }
}
