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
use crate::clock;
use crate::cpio::Archive;
use crate::daemon::Daemon;
use crate::digest::Key;
use crate::error::BootError;
use crate::file_error::FileError;
use crate::initramfs;
use crate::kernel::{Kernel, Sources};
use crate::kvm_host::{self, KvmHost, KvmHostChoice, Place};
use crate::lab::{self, Lab};
use crate::module;
use crate::other_vmm::OtherVmm;
use crate::post_run::{self, PostRun};
use crate::process::{quote, shown};
use crate::programs::Programs;
use crate::run::{self, Outcome};
use crate::stock_qemu::{self, Acceleration, Machine};
use crate::third_party;

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
/// The socket of the device's process in the lab.
const LABS_SOCKET: &str = "/tmp/vpmu.sock";

/// The lab's shell script that runs the device's process and the command `other` of another VMM. Its status is that of
/// the VMM, or that of the device's process if only that failed.
fn beside_job(serve: &str, other: &str) -> String {
    format!(
        r#"mount -t debugfs debugfs /sys/kernel/debug
vmm {serve} > /dev/null &
device=$!
until grep -q ' 00010000 .* {LABS_SOCKET}$' /proc/net/unix; do
	kill -0 $device || exit 1
	sleep 0.05
done
{other}
code=$?
wait $device || [ $code != 0 ] || code=1
echo null > {REPORT}
exit $code
"#
    )
}

/// The process that has the device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Carrier {
    /// This project's VMM, which runs the guest: `vmm run`.
    #[default]
    Vmm,
    /// A process of its own, `vmm serve`. A stock QEMU runs the guest: on this machine's KVM if a stock kernel boots
    /// there, else emulated. With [`KvmHostChoice::Lab`] or [`KvmHostChoice::Exact`], on that lab's KVM.
    BesideQemu,
    /// Like [`Carrier::BesideQemu`], but the guest is always emulated.
    BesideEmulation,
    /// `vmm serve`, and this program of Cloud Hypervisor runs the guest: on this machine's KVM if a stock kernel boots
    /// there, else on the lab's.
    BesideCloudHypervisor(PathBuf),
}

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
    /// The process that has the device.
    pub carrier: Carrier,
    /// Maximum run time of the machine.
    pub timeout: Duration,
    /// More arguments for `vmm run`, or for `vmm serve`.
    pub vmm_args: Vec<String>,
    /// Whether the VMM gets the ORC tables of the guest's kernel, if it has any.
    pub orc: bool,
    /// More arguments for the other VMM, if the device is beside one.
    pub other_args: Vec<String>,
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
            carrier: Carrier::Vmm,
            timeout: Duration::from_secs(180),
            vmm_args: Vec::new(),
            orc: false,
            other_args: Vec::new(),
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
        if self.carrier != Carrier::Vmm {
            return self.run_beside();
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

    /// The file with the ORC tables of the guest's kernel, if they are wanted.
    fn tables(&self, parts: &Parts) -> Result<Option<PathBuf>, BootError> {
        Ok(if self.orc { parts.kernel.orc(parts.cache)? } else { None })
    }

    fn vmm_arguments(&self, kernel: &str, initramfs: &str, report: &str, tables: Option<&str>) -> Vec<String> {
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
        let tables = tables.map(|tables| ["--vmlinux", tables]);
        let ours = ours.iter().chain(&tables).flatten().map(|argument| (*argument).to_owned());
        ["run".to_owned()].into_iter().chain(ours).chain(self.vmm_args.iter().cloned()).collect()
    }

    fn run_direct(&self, parts: &Parts, mark: &str, guest: &[u8]) -> Result<Outcome, BootError> {
        let initramfs = Unnamed::new(guest)?;
        let report = tempfile::NamedTempFile::new().map_err(BootError::Temporary)?;
        let kernel = parts.kernel.image.to_string_lossy();
        let report_path = report.path().to_string_lossy();
        let mut command = Command::new(parts.programs.vmm()?);
        let tables = self.tables(parts)?;
        let tables = tables.as_ref().map(|tables| tables.to_string_lossy());
        command.args(self.vmm_arguments(&kernel, &initramfs.path(), &report_path, tables.as_deref()));
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
            let result = post_run.run(directory.path(), parts.programs.vmm()?)?;
            transcript.host = result.output.into_bytes();
            transcript.host_status = Some(result.status);
        }
        run::outcome(self, transcript, KvmHost::Direct, run.wall, run.console)
    }

    fn run_lab(&self, parts: &Parts, mark: &str, guest: &[u8]) -> Result<Outcome, BootError> {
        let tables = self.tables(parts)?;
        let path = tables.as_ref().map(|_| "/guest/orc");
        let arguments = self.vmm_arguments("/guest/kernel", "/guest/initramfs", REPORT, path);
        let words: Vec<String> = arguments.iter().map(|argument| quote(argument)).collect();
        let mut run = Archive::new();
        if let Some(tables) = tables {
            run.file("guest/orc", 0o644, &fs::read(&tables).map_err(FileError::at(&tables))?)?;
        }
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
        self.emulate(parts, mark, run, None)
    }

    /// Runs the command in a guest of another VMM, beside the device's own process.
    fn run_beside(&self) -> Result<Outcome, BootError> {
        let asks_for_lab = match (self.kvm_host, &self.carrier) {
            (KvmHostChoice::Auto, _) => false,
            (KvmHostChoice::Lab | KvmHostChoice::Exact, Carrier::BesideQemu | Carrier::BesideCloudHypervisor(_)) => {
                true
            }
            _ => return Err(BootError::WithOtherVmm("a guest runs here or in the lab: omit --direct")),
        };
        if self.sources.arch != Arch::X86_64 {
            return Err(BootError::WithOtherVmm("a guest is for x86: omit its architecture"));
        }
        if self.post_run.is_some() {
            return Err(BootError::WithOtherVmm("no command runs after the guest: omit it"));
        }
        let parts = self.prepare()?;
        let other = OtherVmm::get(parts.cache, &self.carrier)?;
        let vmm = parts.programs.vmm()?;
        let takes_kvm = !asks_for_lab && self.carrier != Carrier::BesideEmulation;
        let acceleration = if takes_kvm && kvm_host::stock_kernel_boots(parts.cache, vmm)? {
            Acceleration::Kvm
        } else if asks_for_lab || matches!(other, OtherVmm::CloudHypervisor(_)) {
            return self.run_beside_in_lab(&parts, &other);
        } else {
            Acceleration::Tcg
        };
        let mark = self.mark();
        let initramfs = Unnamed::new(&self.guest_archive(&parts, &mark)?)?;
        let directory = tempfile::tempdir().map_err(BootError::Temporary)?;
        let socket = directory.path().join("vpmu.sock");
        let clock = match acceleration {
            Acceleration::Kvm => String::new(),
            Acceleration::Tcg => format!(" {} tsc_early_khz={}", lab::CLOCK, clock::tsc_khz()),
        };
        let cmdline = format!("{CMDLINE}{clock} {}", self.append);
        let machine = Machine {
            acceleration,
            vcpus: self.vcpus,
            memory_mib: self.memory_mib,
            socket: &socket.to_string_lossy(),
            kernel: &parts.kernel.image.to_string_lossy(),
            initramfs: &initramfs.path(),
            cmdline: cmdline.trim_end(),
            more: &self.other_args,
        };
        if self.echo {
            self.explain(vmm, &other, &machine);
        }
        let kvm_host = KvmHost::Beside { vmm: other.to_string(), acceleration, place: Place::Here };
        let _slot = (acceleration == Acceleration::Tcg).then(|| parts.cache.slot()).transpose()?;
        let mut serve = Command::new(vmm);
        serve.args(Daemon::arguments(machine.socket, self.vcpus, &self.vmm_args));
        let daemon = Daemon::start(&mut serve, &socket)?;
        let run = run::watch(self, &mut other.command(&machine), &mark, &kvm_host).and_then(|run| {
            let mut transcript = run.transcript;
            transcript.vmm = run.ended.status.code();
            transcript.log = stock_qemu::errors(&run.ended.stderr).into_bytes();
            // Only `vmm run` writes a report.
            transcript.report = b"null".to_vec();
            run::outcome(self, transcript, kvm_host, run.wall, run.console)
        });
        // The other VMM has ended in any case, and the device's process ends after it.
        match (run, daemon.finish()) {
            (Ok(outcome), Ok(_)) => Ok(outcome),
            (Ok(outcome), Err(source)) => {
                Err(BootError::DaemonFailed { status: outcome.status, output: outcome.output, source })
            }
            (Err(source), daemon) => {
                let daemon = daemon.map_or_else(|error| error.to_string(), |log| format!("log of `vmm serve`: {log}"));
                Err(BootError::Beside { daemon, source: Box::new(source) })
            }
        }
    }

    /// Like [`Boot::run_beside`], on the lab's KVM.
    fn run_beside_in_lab(&self, parts: &Parts, other: &OtherVmm) -> Result<Outcome, BootError> {
        let mark = self.mark();
        let mut run = Archive::new();
        let files = other.files()?;
        for (name, contents) in &files {
            run.file(name, 0o755, contents)?;
        }
        run.file("guest/initramfs", 0o644, &self.guest_archive(parts, &mark)?)?;
        let acceleration = Acceleration::Kvm;
        let cmdline = [CMDLINE, &self.append].join(" ");
        let machine = Machine {
            acceleration,
            vcpus: self.vcpus,
            memory_mib: self.memory_mib,
            socket: LABS_SOCKET,
            kernel: "/guest/kernel",
            initramfs: "/guest/initramfs",
            cmdline: cmdline.trim_end(),
            more: &self.other_args,
        };
        let serve = Daemon::arguments(machine.socket, self.vcpus, &self.vmm_args);
        let serve: Vec<String> = serve.iter().map(|word| quote(word)).collect();
        run.file("run/job", 0o644, beside_job(&serve.join(" "), &other.typed(&machine)).as_bytes())?;
        let place = if self.kvm_host == KvmHostChoice::Exact { Place::ExactLab } else { Place::Lab };
        let kvm_host = KvmHost::Beside { vmm: other.to_string(), acceleration, place };
        let memory_mib = self.memory_mib.saturating_add(third_party::memory_mib(&files));
        Boot { memory_mib, ..self.clone() }.emulate(parts, &mark, run, Some(kvm_host))
    }

    /// Prints what a person types to boot such a guest without this program.
    fn explain(&self, vmm: &Path, other: &OtherVmm, machine: &Machine<'_>) {
        let socket = "/tmp/vpmu.sock";
        let serve = Daemon::arguments(socket, self.vcpus, &self.vmm_args);
        let serve: Vec<String> = serve.iter().map(|word| shown(word)).collect();
        let machine = Machine { socket, initramfs: "INITRAMFS", ..machine.clone() };
        eprintln!(
            "Two commands do the same with an initramfs of your own, which loads virtio_pci.ko and virtio_pmu.ko, and \
             QEMU 10.1 or newer, or Cloud Hypervisor:\n  {} {}\n  {}",
            shown(&vmm.to_string_lossy()),
            serve.join(" "),
            other.typed(&machine)
        );
    }

    /// Runs the command on the lab's own KVM host, with the guest's kernel and initramfs in /guest. No guest
    /// runs unless the command starts it.
    ///
    /// # Errors
    /// [`BootError`].
    pub fn run_on_lab_host(&self) -> Result<Outcome, BootError> {
        if self.carrier != Carrier::Vmm {
            return Err(BootError::WithOtherVmm("no guest runs: omit it"));
        }
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
        self.emulate(&parts, &mark, run, None)
    }

    /// Boots the lab with the files of `run`, which the lab's kernel unpacks after the files in the lab's own
    /// initramfs. The guest runs on `kvm_host`, by default the lab.
    fn emulate(
        &self,
        parts: &Parts,
        mark: &str,
        mut run: Archive,
        kvm_host: Option<KvmHost>,
    ) -> Result<Outcome, BootError> {
        let arch = parts.kernel.arch;
        let exact = matches!(self.kvm_host, KvmHostChoice::Exact | KvmHostChoice::AutoExact);
        let lab = Lab::get(parts.cache, arch, exact)?;
        let kvm_host = kvm_host.unwrap_or_else(|| KvmHost::Lab { arch, qemu: lab.version(), exact });
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exact_lab_refuses_several_vcpus() {
        let boot = Boot { kvm_host: KvmHostChoice::Exact, vcpus: 2, ..Boot::default() };
        assert!(matches!(boot.run(), Err(BootError::ExactVcpus(2))));
    }

    #[test]
    fn other_vmms_refuse_what_only_this_vmm_has() {
        let qemu = Boot { carrier: Carrier::BesideQemu, ..Boot::default() };
        let foreign = Sources { arch: Arch::Aarch64, ..Sources::default() };
        for boot in [
            Boot { kvm_host: KvmHostChoice::Lab, carrier: Carrier::BesideEmulation, ..qemu.clone() },
            Boot { kvm_host: KvmHostChoice::Direct, ..qemu.clone() },
            Boot { sources: foreign, ..qemu.clone() },
            Boot { post_run: Some(PostRun::default()), ..qemu.clone() },
            Boot {
                kvm_host: KvmHostChoice::Direct,
                carrier: Carrier::BesideCloudHypervisor("c".into()),
                ..qemu.clone()
            },
        ] {
            assert!(matches!(boot.run(), Err(BootError::WithOtherVmm(_))), "{boot:?}");
        }
        assert!(matches!(qemu.run_on_lab_host(), Err(BootError::WithOtherVmm(_))));
    }

    #[test]
    fn unnamed_file_opens_in_child() {
        let file = Unnamed::new(b"contents").unwrap();
        let output = Command::new("cat").arg(file.path()).output().unwrap();
        assert_eq!(output.stdout, b"contents");
    }
}
