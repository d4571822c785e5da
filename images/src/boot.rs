//! Boots a guest for one command: makes what is missing, picks the place, runs the command,
//! brings back what it said and how it went.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use thiserror::Error;

use crate::cache::{Cache, CacheError};
use crate::cpio::{Archive, CpioError};
use crate::digest::Key;
use crate::frame::{Frames, Transcript};
use crate::initramfs::{self, InitramfsError};
use crate::kernel::{Kernel, KernelError, Sources};
use crate::lab::{self, Lab, LabError};
use crate::machine::{self, Ended, MachineError};
use crate::module::{self, ModuleError};
use crate::place::{self, Place, PlaceChoice, PlaceError};
use crate::programs::{ProgramError, Programs};

/// Where a guest's /init says that it runs: the VMM's debug port.
const INIT_PORT: u16 = 0x504;
const CMDLINE: &str = "console=ttyS0 quiet nokaslr mitigations=off reboot=t panic=-1 \
    random.trust_cpu=on cryptomgr.notests";
/// What the lab's /init runs in place of the VMM for a command of its own.
const HOST_JOB: &str = r#"printf '\n@@vpmu:%s begin\n' "$MARK"
sh /run/command 2>&1
printf '\n@@vpmu:%s exit %s\n' "$MARK" $?
echo null > /tmp/report
"#;
const REPORT: &str = "/tmp/report";

/// Why a command did not run in a guest from its beginning to its end.
#[derive(Debug, Error)]
pub enum BootError {
    /// No kernel.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// No driver.
    #[error(transparent)]
    Module(#[from] ModuleError),
    /// No programs.
    #[error(transparent)]
    Program(#[from] ProgramError),
    /// No initramfs.
    #[error(transparent)]
    Initramfs(#[from] InitramfsError),
    /// A file that the caller added cannot go in.
    #[error(transparent)]
    File(#[from] CpioError),
    /// No lab.
    #[error(transparent)]
    Lab(#[from] LabError),
    /// No choice of place.
    #[error(transparent)]
    Place(#[from] PlaceError),
    /// The cache cannot be used.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// A temporary file could not be written.
    #[error("cannot write a temporary file; is there space?")]
    Temporary(#[source] io::Error),
    /// The machine did not start, or did not end in time.
    #[error("{place}: the guest did not run; its console is in {console}")]
    Machine {
        /// Where it ran.
        place: Place,
        /// Its console's bytes.
        console: PathBuf,
        /// What went wrong.
        #[source]
        source: MachineError,
    },
    /// The machine ended, but not because the command did.
    #[error("{place}: {what}; its console is in {console}")]
    Ended {
        /// Where it ran.
        place: Place,
        /// What ended, and how.
        what: String,
        /// Its console's bytes.
        console: PathBuf,
    },
}

/// One command in one guest.
#[derive(Clone, Debug)]
pub struct Boot {
    /// For the guest's shell.
    pub command: String,
    /// Number of vCPUs.
    pub vcpus: u32,
    /// The guest's memory.
    pub memory_mib: u32,
    /// Programs of the `tests` crate that the guest gets in /bin, besides ours.
    pub programs: Vec<String>,
    /// More files for the guest: path without the leading slash, contents.
    pub files: Vec<(String, Vec<u8>)>,
    /// Where to run.
    pub place: PlaceChoice,
    /// How long the machine may run.
    pub timeout: Duration,
    /// More arguments for `vmm run`.
    pub vmm_args: Vec<String>,
    /// Whether the output also goes to our stdout while it comes.
    pub echo: bool,
    /// The user's own kernel and so on.
    pub sources: Sources,
}

impl Default for Boot {
    fn default() -> Self {
        Self {
            command: "true".to_owned(),
            vcpus: 2,
            memory_mib: 256,
            programs: Vec::new(),
            files: Vec::new(),
            place: PlaceChoice::Auto,
            timeout: Duration::from_secs(180),
            vmm_args: Vec::new(),
            echo: false,
            sources: Sources::default(),
        }
    }
}

/// How a command went.
#[derive(Debug)]
pub struct Outcome {
    /// What it wrote to the console: lines end in `\n`.
    pub output: String,
    /// Its exit code.
    pub status: i32,
    /// Where it ran.
    pub place: Place,
    /// The VMM's report.
    pub report: serde_json::Value,
    /// How long the machine ran, the lab included.
    pub wall: Duration,
}

/// What is made before a guest can boot.
struct Parts {
    cache: Cache,
    kernel: Kernel,
    programs: Programs,
    initramfs: PathBuf,
}

impl Boot {
    /// Runs the command.
    ///
    /// # Errors
    /// [`BootError`]. A command that fails is no error: see [`Outcome::status`].
    pub fn run(&self) -> Result<Outcome, BootError> {
        let parts = self.prepare()?;
        let mark = self.mark();
        let guest = self.guest_archive(&parts, &mark)?;
        let direct = match self.place {
            PlaceChoice::Direct => true,
            PlaceChoice::Auto => place::stock_kernel_boots(&parts.cache, parts.programs.vmm()?)?,
            PlaceChoice::Lab | PlaceChoice::Exact => false,
        };
        if direct {
            self.run_direct(&parts, &mark, &guest)
        } else {
            self.run_lab(&parts, &mark, &guest)
        }
    }

    fn prepare(&self) -> Result<Parts, BootError> {
        let cache = Cache::project();
        let kernel = Kernel::get(&cache, &self.sources)?;
        let driver = module::build(&cache, &kernel)?;
        let programs = Programs::build(&self.programs)?;
        let initramfs = initramfs::guest(&cache, &kernel, &driver, &programs, &self.programs)?;
        Ok(Parts {
            cache,
            kernel,
            programs,
            initramfs,
        })
    }

    /// Marks this run's lines on the console: the same for the same run, as the exact lab needs.
    fn mark(&self) -> String {
        let mut key = Key::new("run").text("command", &self.command);
        for (name, contents) in &self.files {
            key = key.bytes(name, contents);
        }
        key.hex()
    }

    /// The guest's initramfs, with what belongs to this run only.
    fn guest_archive(&self, parts: &Parts, mark: &str) -> Result<Vec<u8>, BootError> {
        let settings = format!("MARK={mark}\nINIT_PORT={INIT_PORT:#x}\nINIT_BYTE=1\n");
        let mut run = Archive::new();
        run.file("run/settings", 0o644, settings.as_bytes())?;
        run.file("run/command", 0o644, self.command.as_bytes())?;
        for (name, contents) in &self.files {
            run.file(name, 0o755, contents)?;
        }
        let own = self.sources.initramfs.as_deref();
        let archives: Vec<&Path> = own.into_iter().chain([parts.initramfs.as_path()]).collect();
        Ok(initramfs::concatenate(&archives, &run.finish()?)?)
    }

    fn vmm_arguments(&self, kernel: &str, initramfs: &str, report: &str) -> Vec<String> {
        let (vcpus, memory) = (self.vcpus.to_string(), self.memory_mib.to_string());
        let ours = [
            ["--kernel", kernel],
            ["--initramfs", initramfs],
            ["--cmdline", CMDLINE],
            ["--vcpus", &vcpus],
            ["--memory", &memory],
            ["--report", report],
        ];
        let ours = ours.iter().flatten().map(|argument| (*argument).to_owned());
        ["run".to_owned()]
            .into_iter()
            .chain(ours)
            .chain(self.vmm_args.iter().cloned())
            .collect()
    }

    fn run_direct(&self, parts: &Parts, mark: &str, guest: &[u8]) -> Result<Outcome, BootError> {
        let initramfs = Unnamed::new(guest)?;
        let report = tempfile::NamedTempFile::new().map_err(BootError::Temporary)?;
        let kernel = parts.kernel.image.to_string_lossy();
        let report_path = report.path().to_string_lossy();
        let mut command = Command::new(parts.programs.vmm()?);
        command.args(self.vmm_arguments(&kernel, &initramfs.path(), &report_path));
        let run = self.watch(&parts.cache, &mut command, mark, &Place::Direct)?;
        let mut transcript = run.transcript;
        transcript.vmm = run.ended.status.code();
        transcript.log = run.ended.stderr.into_bytes();
        transcript.report = fs::read(report.path()).map_err(BootError::Temporary)?;
        outcome(transcript, Place::Direct, run.wall, run.console)
    }

    fn run_lab(&self, parts: &Parts, mark: &str, guest: &[u8]) -> Result<Outcome, BootError> {
        let arguments = self.vmm_arguments("/guest/kernel", "/guest/initramfs", REPORT);
        let words: Vec<String> = arguments.iter().map(|argument| quote(argument)).collect();
        let mut run = Archive::new();
        run.file(
            "run/job",
            0o644,
            format!("exec vmm {}\n", words.join(" ")).as_bytes(),
        )?;
        run.file("guest/initramfs", 0o644, guest)?;
        self.emulate(parts, mark, run)
    }

    /// Runs the command on the lab's own KVM host, with the guest's kernel and initramfs in
    /// /guest, and no guest but those that it starts.
    ///
    /// # Errors
    /// [`BootError`].
    pub fn run_on_lab_host(&self) -> Result<Outcome, BootError> {
        let parts = self.prepare()?;
        let mark = self.mark();
        let mut run = Archive::new();
        run.file("run/job", 0o644, HOST_JOB.as_bytes())?;
        run.file("run/command", 0o644, self.command.as_bytes())?;
        run.file(
            "guest/initramfs",
            0o644,
            &self.guest_archive(&parts, &mark)?,
        )?;
        for (name, program) in parts.programs.guest(&self.programs) {
            run.file(
                &format!("bin/{name}"),
                0o755,
                &initramfs::concatenate(&[program], &[])?,
            )?;
        }
        for (name, contents) in &self.files {
            run.file(name, 0o755, contents)?;
        }
        self.emulate(&parts, &mark, run)
    }

    /// Boots the lab with `run` over its archive.
    fn emulate(&self, parts: &Parts, mark: &str, mut run: Archive) -> Result<Outcome, BootError> {
        let exact = self.place == PlaceChoice::Exact;
        let lab = Lab::find(exact)?;
        let place = Place::Lab {
            qemu: lab.version(),
            exact,
        };
        let host = Kernel::stock(&parts.cache, crate::kernel::DEFAULT_SERIES)?;
        let base = initramfs::lab(&parts.cache, &host, &parts.kernel, &parts.programs)?;
        let settings = format!("MARK={mark}\nEXIT_PORT={:#x}\n", lab::EXIT_PORT);
        run.file("run/settings", 0o644, settings.as_bytes())?;
        let initramfs = Unnamed::new(&initramfs::concatenate(&[&base], &run.finish()?)?)?;
        let mut command = lab.command(&host.image, Path::new(&initramfs.path()), self.memory_mib);
        // An emulated machine fills a processor: several at once would only slow each other.
        let _turn = parts.cache.lock("run")?;
        let run = self.watch(&parts.cache, &mut command, mark, &place)?;
        if run.transcript.vmm.is_none() {
            let said = run
                .ended
                .stderr
                .lines()
                .rfind(|line| !line.contains("TCG doesn't support"));
            let said = said.map(|line| format!(": {line}")).unwrap_or_default();
            let what = format!(
                "the lab ended before its job did (QEMU: {}){said}",
                run.ended.status
            );
            return Err(BootError::Ended {
                place,
                what,
                console: run.console.keep()?,
            });
        }
        outcome(run.transcript, place, run.wall, run.console)
    }

    /// Runs the machine and takes its console apart.
    fn watch(
        &self,
        cache: &Cache,
        command: &mut Command,
        mark: &str,
        place: &Place,
    ) -> Result<Run, BootError> {
        let mut frames = Frames::new(mark);
        let mut console = Console {
            directory: cache.directory().to_owned(),
            bytes: Vec::new(),
        };
        let started = Instant::now();
        let ended = machine::run(command, self.timeout, |bytes| {
            console.bytes.extend_from_slice(bytes);
            let output = frames.push(bytes);
            if self.echo {
                let mut stdout = io::stdout().lock();
                // Whoever closed our stdout does not want to hear of it.
                let _ = stdout.write_all(&output).and_then(|()| stdout.flush());
            }
        });
        let wall = started.elapsed();
        match ended {
            Ok(ended) => Ok(Run {
                ended,
                transcript: frames.finish(),
                console,
                wall,
            }),
            Err(source) => {
                let console = console.keep()?;
                Err(BootError::Machine {
                    place: place.clone(),
                    console,
                    source,
                })
            }
        }
    }
}

struct Run {
    ended: Ended,
    transcript: Transcript,
    console: Console,
    wall: Duration,
}

/// A machine's console, kept for when something goes wrong.
struct Console {
    directory: PathBuf,
    bytes: Vec<u8>,
}

impl Console {
    fn keep(self) -> Result<PathBuf, BootError> {
        let path = self.directory.join("console.log");
        let written = tempfile::NamedTempFile::new_in(&self.directory).and_then(|mut file| {
            file.write_all(&self.bytes)?;
            file.persist(&path).map_err(|error| error.error)
        });
        written.map_err(BootError::Temporary)?;
        Ok(path)
    }
}

/// A file without a name: it is gone when we are. Children open it by way of /proc.
struct Unnamed(File);

impl Unnamed {
    fn new(contents: &[u8]) -> Result<Self, BootError> {
        let mut file = tempfile::tempfile().map_err(BootError::Temporary)?;
        file.write_all(contents).map_err(BootError::Temporary)?;
        Ok(Self(file))
    }

    fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.0.as_raw_fd())
    }
}

/// What a run amounts to: only one whose command ended and whose VMM was content is an outcome.
fn outcome(
    transcript: Transcript,
    place: Place,
    wall: Duration,
    console: Console,
) -> Result<Outcome, BootError> {
    let log = String::from_utf8_lossy(&transcript.log);
    let report = serde_json::from_slice(&transcript.report);
    let what = match (transcript.status, transcript.vmm, report) {
        (Some(status), Some(0), Ok(report)) => {
            let output = String::from_utf8_lossy(&transcript.output).into_owned();
            return Ok(Outcome {
                output,
                status,
                place,
                report,
                wall,
            });
        }
        (Some(_), Some(0), Err(error)) => format!("the VMM's report cannot be read ({error})"),
        (_, code, _) => {
            let when = match (transcript.status, transcript.begun) {
                (Some(_), _) => "after the command had ended",
                (None, true) => "before the command had ended",
                (None, false) => "before the command began",
            };
            let said = log
                .lines()
                .last()
                .map(|line| format!(": {line}"))
                .unwrap_or_default();
            format!("{} {when}{said}", ending(code))
        }
    };
    Err(BootError::Ended {
        place,
        what,
        console: console.keep()?,
    })
}

/// The VMM's exit codes in words.
fn ending(code: Option<i32>) -> String {
    match code {
        Some(0) => "the guest powered off".to_owned(),
        Some(3) => "the guest asked for a reset".to_owned(),
        Some(4) => "the guest's processor shut down (triple fault)".to_owned(),
        Some(5) => "the guest's kernel panicked".to_owned(),
        Some(6) => "the guest was ended by hand".to_owned(),
        Some(code) => format!("the VMM failed (exit code {code})"),
        None => "the VMM was killed".to_owned(),
    }
}

/// One word for a shell.
fn quote(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn console(directory: &Path) -> Console {
        Console {
            directory: directory.to_owned(),
            bytes: b"console\n".to_vec(),
        }
    }

    fn outcome_of(transcript: Transcript) -> Result<Outcome, BootError> {
        let directory = tempfile::tempdir().unwrap();
        outcome(
            transcript,
            Place::Direct,
            Duration::ZERO,
            console(directory.path()),
        )
    }

    fn good() -> Transcript {
        let (status, vmm) = (Some(3), Some(0));
        let output = b"hello\n".to_vec();
        Transcript {
            output,
            status,
            vmm,
            report: b"{\"a\": 1}".to_vec(),
            begun: true,
            ..Transcript::default()
        }
    }

    #[test]
    fn a_command_that_fails_is_an_outcome() {
        let outcome = outcome_of(good()).unwrap();
        assert_eq!((outcome.status, outcome.output.as_str()), (3, "hello\n"));
        assert_eq!(outcome.report["a"], 1);
    }

    #[test]
    fn what_went_wrong_is_said_in_one_line() {
        let cases = [
            (
                Transcript {
                    status: None,
                    ..good()
                },
                "powered off before the command had ended",
            ),
            (
                Transcript {
                    vmm: Some(5),
                    status: None,
                    ..good()
                },
                "panicked before the command had",
            ),
            (
                Transcript {
                    vmm: Some(1),
                    log: b"a\nno memory\n".to_vec(),
                    ..good()
                },
                "no memory",
            ),
            (
                Transcript {
                    report: Vec::new(),
                    ..good()
                },
                "report cannot be read",
            ),
            (
                Transcript {
                    vmm: None,
                    ..Transcript::default()
                },
                "killed before the command began",
            ),
        ];
        for (transcript, expected) in cases {
            let error = outcome_of(transcript).unwrap_err().to_string();
            assert!(error.contains(expected) && !error.contains('\n'), "{error}");
        }
    }

    #[test]
    fn the_shell_reads_back_what_was_quoted() {
        let word = "it's \"$HOME\" `x` \\ \n;";
        let script = format!("printf %s {}", quote(word));
        let output = Command::new("sh").args(["-c", &script]).output().unwrap();
        assert_eq!(output.stdout, word.as_bytes());
    }

    #[test]
    fn a_file_without_a_name_can_be_opened_by_a_child() {
        let file = Unnamed::new(b"contents").unwrap();
        let output = Command::new("cat").arg(file.path()).output().unwrap();
        assert_eq!(output.stdout, b"contents");
    }
}
