//! Boots a guest for one command: builds the parts that are missing, selects the machine, runs the command, and
//! returns the command's output and exit code.

use std::fs::{self, File};
use std::io::Write;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::arch::Arch;
use crate::cache::Cache;
use crate::cpio::Archive;
use crate::digest::Key;
use crate::error::BootError;
use crate::initramfs;
use crate::kernel::{Kernel, Sources};
use crate::kvm_host::{self, KvmHost, KvmHostChoice};
use crate::lab::Lab;
use crate::module;
use crate::post_run::{self, PostRun};
use crate::programs::Programs;
use crate::run::{self, Outcome};

/// The shell command with which a guest's /init reports its start to the VMM.
fn tells_of_init(arch: Arch) -> &'static str {
    match arch {
        Arch::X86_64 => "outb 0x504 1",
        Arch::Aarch64 => "devmem 0x0a002000 8 1",
    }
}
const CMDLINE: &str = "console=ttyS0 quiet nokaslr mitigations=off reboot=t panic=-1 \
    random.trust_cpu=on cryptomgr.notests";
/// The script that the lab's /init runs if a command, rather than the VMM, is to run on the lab's host.
const HOST_JOB: &str = r#"printf '\n@@vpmu:%s begin\n' "$MARK"
sh /run/command 2>&1
printf '\n@@vpmu:%s exit %s\n' "$MARK" $?
echo null > /tmp/report
"#;
const REPORT: &str = "/tmp/report";

/// One command in one guest.
#[derive(Clone, Debug)]
pub struct Boot {
    /// The command, for the guest's shell.
    pub command: String,
    /// Number of vCPUs.
    pub vcpus: u32,
    /// The guest's memory.
    pub memory_mib: u32,
    /// Programs of the `tests` crate that the guest gets in /bin, in addition to the project's programs.
    pub programs: Vec<String>,
    /// More files for the guest: path without the leading slash, contents.
    pub files: Vec<(String, Vec<u8>)>,
    /// The machine to run on.
    pub kvm_host: KvmHostChoice,
    /// Maximum run time of the machine.
    pub timeout: Duration,
    /// More arguments for `vmm run`.
    pub vmm_args: Vec<String>,
    /// More words for the guest kernel's command line.
    pub append: String,
    /// A command to run after the guest has ended, on the machine that ran the VMM. If this is set, it is not an error
    /// if the guest's kernel panics before `command` ends.
    pub post_run: Option<PostRun>,
    /// Whether the output also goes to our stdout as it arrives.
    pub echo: bool,
    /// The guest's architecture, kernel and additional initramfs.
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
            kvm_host: KvmHostChoice::Auto,
            timeout: Duration::from_secs(180),
            vmm_args: Vec::new(),
            append: String::new(),
            post_run: None,
            echo: false,
            sources: Sources::default(),
        }
    }
}

/// The parts of a guest, made before it boots.
struct Parts {
    cache: &'static Cache,
    kernel: Kernel,
    programs: Programs,
    initramfs: PathBuf,
}

impl Boot {
    /// Runs the command.
    ///
    /// # Errors
    /// [`BootError`]. A command that fails is not an error: see [`Outcome::status`].
    pub fn run(&self) -> Result<Outcome, BootError> {
        let arch = self.sources.arch;
        if self.kvm_host == KvmHostChoice::Exact && self.vcpus > 1 && !arch.exact_with_vcpus() {
            return Err(BootError::ExactVcpus(self.vcpus));
        }
        if self.kvm_host == KvmHostChoice::Direct && !arch.is_native() {
            return Err(BootError::ForeignDirect(arch));
        }
        let parts = self.prepare()?;
        let mark = self.mark();
        let guest = self.guest_archive(&parts, &mark)?;
        let direct = match self.kvm_host {
            KvmHostChoice::Direct => true,
            KvmHostChoice::Auto | KvmHostChoice::AutoExact if !arch.is_native() => false,
            KvmHostChoice::Auto | KvmHostChoice::AutoExact => {
                kvm_host::stock_kernel_boots(parts.cache, parts.programs.vmm()?)?
            }
            KvmHostChoice::Lab | KvmHostChoice::Exact => false,
        };
        if direct { self.run_direct(&parts, &mark, &guest) } else { self.run_lab(&parts, &mark, &guest) }
    }

    fn prepare(&self) -> Result<Parts, BootError> {
        let cache = Cache::user()?;
        let kernel = Kernel::get(cache, &self.sources)?;
        let driver = module::build(cache, &kernel)?;
        let programs = Programs::build(cache, kernel.arch, &self.programs)?;
        let initramfs = initramfs::guest(cache, &kernel, &driver, &programs, &self.programs)?;
        Ok(Parts { cache, kernel, programs, initramfs })
    }

    /// Returns the token that marks this run's lines on the console. Runs with the same command and files have
    /// equal tokens, so that runs of the exact lab repeat bit for bit.
    fn mark(&self) -> String {
        let mut key = Key::new("run").text("command", &self.command);
        for (name, contents) in &self.files {
            key = key.bytes(name, contents);
        }
        key.hex()
    }

    /// The guest's initramfs, with the files of this run.
    fn guest_archive(&self, parts: &Parts, mark: &str) -> Result<Vec<u8>, BootError> {
        let tell = quote(tells_of_init(parts.kernel.arch));
        let settings = format!("MARK={mark}\nTELL={tell}\n");
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
        let cmdline = [CMDLINE, &self.append].join(" ");
        let ours = [
            ["--kernel", kernel],
            ["--initramfs", initramfs],
            ["--cmdline", cmdline.trim_end()],
            ["--vcpus", &vcpus],
            ["--memory", &memory],
            ["--report", report],
        ];
        let ours = ours.iter().flatten().map(|argument| (*argument).to_owned());
        ["run".to_owned()].into_iter().chain(ours).chain(self.vmm_args.iter().cloned()).collect()
    }

    fn run_direct(&self, parts: &Parts, mark: &str, guest: &[u8]) -> Result<Outcome, BootError> {
        let initramfs = Unnamed::new(guest)?;
        let report = tempfile::NamedTempFile::new().map_err(BootError::Temporary)?;
        let kernel = parts.kernel.image.to_string_lossy();
        let report_path = report.path().to_string_lossy();
        let mut command = Command::new(parts.programs.vmm()?);
        command.args(self.vmm_arguments(&kernel, &initramfs.path(), &report_path));
        let directory = tempfile::tempdir().map_err(BootError::Temporary)?;
        if self.post_run.is_some() {
            command.current_dir(directory.path());
        }
        let run = run::watch(self, &mut command, mark, &KvmHost::Direct)?;
        let mut transcript = run.transcript;
        transcript.vmm = run.ended.status.code();
        transcript.log = run.ended.stderr.into_bytes();
        transcript.report = fs::read(report.path()).map_err(BootError::Temporary)?;
        if let Some(post_run) = &self.post_run {
            let result = post_run.run(directory.path())?;
            transcript.host = result.output.into_bytes();
            transcript.host_status = Some(result.status);
        }
        run::outcome(self, transcript, KvmHost::Direct, run.wall, run.console)
    }

    fn run_lab(&self, parts: &Parts, mark: &str, guest: &[u8]) -> Result<Outcome, BootError> {
        let arguments = self.vmm_arguments("/guest/kernel", "/guest/initramfs", REPORT);
        let words: Vec<String> = arguments.iter().map(|argument| quote(argument)).collect();
        let mut run = Archive::new();
        let vmm = format!("vmm {}", words.join(" "));
        let job = match &self.post_run {
            None => format!("exec {vmm}\n"),
            Some(post_run) => {
                run.file("run/post-run", 0o644, post_run.command.as_bytes())?;
                for (name, contents) in &post_run.files {
                    run.file(name, 0o755, contents)?;
                }
                post_run::job(&vmm)
            }
        };
        run.file("run/job", 0o644, job.as_bytes())?;
        run.file("guest/initramfs", 0o644, guest)?;
        self.emulate(parts, mark, run)
    }

    /// Runs the command on the lab's own KVM host, with the guest's kernel and initramfs in /guest. No guest
    /// runs unless the command starts it.
    ///
    /// # Errors
    /// [`BootError`].
    pub fn run_on_lab_host(&self) -> Result<Outcome, BootError> {
        let parts = self.prepare()?;
        let mark = self.mark();
        let mut run = Archive::new();
        run.file("run/job", 0o644, HOST_JOB.as_bytes())?;
        run.file("run/command", 0o644, self.command.as_bytes())?;
        run.file("guest/initramfs", 0o644, &self.guest_archive(&parts, &mark)?)?;
        for (name, program) in parts.programs.guest(&self.programs) {
            run.file(&format!("bin/{name}"), 0o755, &initramfs::concatenate(&[program], &[])?)?;
        }
        for (name, contents) in &self.files {
            run.file(name, 0o755, contents)?;
        }
        self.emulate(&parts, &mark, run)
    }

    /// Boots the lab with the files of `run`, which the lab's kernel unpacks after the files in the lab's own
    /// initramfs.
    fn emulate(&self, parts: &Parts, mark: &str, mut run: Archive) -> Result<Outcome, BootError> {
        let arch = parts.kernel.arch;
        let exact = matches!(self.kvm_host, KvmHostChoice::Exact | KvmHostChoice::AutoExact);
        let lab = Lab::get(parts.cache, arch, exact)?;
        let kvm_host = KvmHost::Lab { arch, qemu: lab.version(), exact };
        let host = Kernel::stock_of(parts.cache, arch, lab.series())?;
        let base = initramfs::lab(parts.cache, &host, &parts.kernel, &parts.programs)?;
        let settings = format!("MARK={mark}\nEND={}\n", quote(&lab.end()));
        run.file("run/settings", 0o644, settings.as_bytes())?;
        let initramfs = Unnamed::new(&initramfs::concatenate(&[&base], &run.finish()?)?)?;
        let mut command = lab.command(&host.image, Path::new(&initramfs.path()), self.memory_mib);
        let _slot = parts.cache.slot()?;
        let run = run::watch(self, &mut command, mark, &kvm_host)?;
        if run.transcript.vmm.is_none() {
            let error = run.ended.stderr.lines().rfind(|line| !line.contains("TCG doesn't support"));
            let error = error.map(|line| format!(": {line}")).unwrap_or_default();
            let what = format!("the lab ended before its script did (QEMU: {}){error}", run.ended.status);
            return Err(BootError::Ended {
                kvm_host,
                what,
                console: run.console.keep()?,
                output: String::from_utf8_lossy(&run.transcript.output).into_owned(),
            });
        }
        run::outcome(self, run.transcript, kvm_host, run.wall, run.console)
    }
}

/// A file without a name, which disappears with this process. Children open it through /proc.
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

/// Quotes one word for a shell.
fn quote(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exact_lab_refuses_several_vcpus() {
        let boot = Boot { kvm_host: KvmHostChoice::Exact, vcpus: 2, ..Boot::default() };
        assert!(matches!(boot.run(), Err(BootError::ExactVcpus(2))));
    }

    #[test]
    fn quoted_words_survive_the_shell() {
        let word = "it's \"$HOME\" `x` \\ \n;";
        let script = format!("printf %s {}", quote(word));
        let output = Command::new("sh").args(["-c", &script]).output().unwrap();
        assert_eq!(output.stdout, word.as_bytes());
    }

    #[test]
    fn unnamed_file_opens_in_child() {
        let file = Unnamed::new(b"contents").unwrap();
        let output = Command::new("cat").arg(file.path()).output().unwrap();
        assert_eq!(output.stdout, b"contents");
    }
}
