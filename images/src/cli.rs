//! Parses the command line, and converts the arguments to the library's types.

use std::ffi::OsString;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use images::size::{self, Size};
use images::{Arch, Boot, Carrier, Debug, KvmHostChoice, Sources, third_party};
use vpmu_errors::chain;

/// Builds guests and boots them.
///
/// Everything is fetched or built when it is first needed, and kept in a cache that all clones
/// of the project share. A guest runs on this machine's KVM if a stock kernel boots there.
/// Otherwise it runs in the lab, where QEMU emulates a CPU with SVM, and a stock kernel on
/// this CPU provides a standard /dev/kvm.
#[derive(Debug, Parser)]
#[command(name = "images", version, after_help = EXAMPLES)]
pub(crate) struct Cli {
    /// The cache's directory [default: $VPMU_CACHE, else $XDG_CACHE_HOME/vpmu, else ~/.cache/vpmu]
    #[arg(long, value_name = "DIR", global = true)]
    pub(crate) cache: Option<PathBuf>,
    /// The size of the results in the cache. Beyond it, those that were used longest ago are removed
    /// [default: $VPMU_CACHE_SIZE, else 20G]
    #[arg(long, value_name = "SIZE", global = true)]
    pub(crate) cache_size: Option<Size>,
    #[command(subcommand)]
    pub(crate) action: Action,
}

/// Drops the `--` of `cargo demo -- --lab`. This `--` is redundant, because cargo's alias already ends in `--`.
pub(crate) fn arguments(given: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut arguments: Vec<OsString> = given.collect();
    if arguments.get(1..3).is_some_and(|two| two == ["demo", "--"]) {
        arguments.remove(2);
    }
    arguments
}

const EXAMPLES: &str = "Examples:
  images boot -- vperf list              what can be counted in a guest
  images boot --vcpus 4 -- 'cat /proc/cpuinfo | grep MHz'
  images boot --lab --exact -- vperf stat true
  images boot --lab aarch64 -- vperf list
  images boot --qemu -- vperf stat true  the device beside a stock QEMU
  images boot --with perf -- perf record -e vpmu/cpu-clock/ -- workload hot
  images lab -- vmm check                what the lab can do
  images kernel --kernel-version 6.12    only fetch a kernel, print where it is
  images kernel --kernel-debug lockdep   build a kernel that checks its locks
  images boot --kernel-debug kasan --memory 1024 -- 'dmesg | grep KASAN'
  images boot --append 'slub_debug=FZPU' -- 'cat /proc/cmdline'

Exit codes: 0 success, 1 failure, 2 wrong usage; `boot` and `lab` exit with the command's exit code.";

/// The command.
#[derive(Debug, Subcommand)]
pub(crate) enum Action {
    /// Fetch a stock kernel with its headers and make its System.map; print where they are
    Kernel(ArchKernelArgs),
    /// Build the guest's driver for a kernel; print where it is
    Module(ArchKernelArgs),
    /// Have Debian's DKMS build the driver for a kernel and install it in a separate directory
    Dkms(KernelArgs),
    /// Check the driver's style with the kernel's checkpatch.pl; print its messages
    Style,
    /// Build our programs statically; print where they are
    Programs {
        #[command(flatten)]
        arch: ArchArgs,
        /// Programs of the tests crate to build as well
        #[arg(long = "program", value_name = "NAME")]
        programs: Vec<String>,
    },
    /// Pack the guest's initramfs; print where it is
    Initramfs {
        #[command(flatten)]
        kernel: ArchKernelArgs,
        /// Programs of the tests crate to put in as well
        #[arg(long = "program", value_name = "NAME")]
        programs: Vec<String>,
    },
    /// Run a command in a guest; exit with the command's exit code
    Boot(BootArgs),
    /// Run a command on the lab's own KVM host, with a guest's kernel and initramfs in /guest
    Lab(BootArgs),
    /// Boot a guest, profile a program in it, and print the costs
    Demo(KvmHostArgs),
    /// Empty the cache, which all clones of the project share, and print what was removed
    Clean,
}

/// The choice of an architecture.
#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct ArchArgs {
    /// The architecture of guests
    #[arg(long, value_name = "ARCH", value_enum, default_value_t)]
    pub(crate) arch: Arch,
}

/// The choice of a kernel and its architecture.
#[derive(Args, Clone, Debug)]
pub(crate) struct ArchKernelArgs {
    #[command(flatten)]
    arch: ArchArgs,
    #[command(flatten)]
    kernel: KernelArgs,
}

impl ArchKernelArgs {
    pub(crate) fn sources(self) -> Sources {
        self.kernel.sources(self.arch.arch)
    }
}

/// The choice of a kernel.
#[derive(Args, Clone, Debug)]
pub(crate) struct KernelArgs {
    /// Series or release of Debian's cloud kernel [default: the newest 6.1]
    #[arg(long, value_name = "VERSION", conflicts_with = "kernel")]
    kernel_version: Option<String>,
    /// Build the kernel from Debian's source, with this checker in it; the first build takes many minutes
    #[arg(long, value_name = "CHECKER", value_enum, conflicts_with = "kernel")]
    kernel_debug: Option<Debug>,
    /// A kernel of your own: vmlinux or bzImage; needs --headers
    #[arg(long, value_name = "FILE", requires = "headers")]
    kernel: Option<PathBuf>,
    /// Build directory of your own kernel, like /lib/modules/VERSION/build
    #[arg(long, value_name = "DIR", requires = "kernel")]
    headers: Option<PathBuf>,
    /// Modules of your own kernel, in a directory such as /lib/modules/VERSION [default: none; all drivers
    /// are built in]
    #[arg(long, value_name = "DIR", requires = "kernel")]
    modules: Option<PathBuf>,
    /// An initramfs of your own; ours is unpacked after it and replaces files of the same names
    #[arg(long, value_name = "FILE")]
    initramfs: Option<PathBuf>,
}

impl KernelArgs {
    pub(crate) fn sources(self, arch: Arch) -> Sources {
        Sources {
            arch,
            version: self.kernel_version,
            debug: self.kernel_debug,
            kernel: self.kernel,
            headers: self.headers,
            modules: self.modules,
            initramfs: self.initramfs,
        }
    }
}

/// The machine to run on; by default one where a stock kernel boots.
#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct KvmHostArgs {
    /// Run in the lab of this architecture, even if this machine has KVM; the aarch64 lab is exact and
    /// has hardware counters
    #[arg(long, value_name = "ARCH", value_enum, num_args = 0..=1,
          default_missing_value = "x86_64", conflicts_with = "direct")]
    lab: Option<Arch>,
    /// Run on this machine's KVM, even if `vmm check` advises against it
    #[arg(long)]
    direct: bool,
    /// Run in the exact lab: its time advances only with executed instructions, so runs repeat bit for bit
    #[arg(long, conflicts_with = "direct")]
    exact: bool,
}

impl KvmHostArgs {
    pub(crate) fn arch(self) -> Arch {
        self.lab.unwrap_or_default()
    }

    /// The machine that the arguments select. `--lab aarch64` always selects the exact lab, because QEMU's PMU
    /// counts instructions only there.
    pub(crate) fn choice(self) -> KvmHostChoice {
        let exact = self.exact || self.lab == Some(Arch::Aarch64);
        match (exact, self.lab.is_some(), self.direct) {
            (true, ..) => KvmHostChoice::Exact,
            (_, true, _) => KvmHostChoice::Lab,
            (.., true) => KvmHostChoice::Direct,
            _ => KvmHostChoice::Auto,
        }
    }
}

/// Arguments of `images boot`.
#[derive(Args, Debug)]
pub(crate) struct BootArgs {
    #[command(flatten)]
    kernel: KernelArgs,
    #[command(flatten)]
    kvm_host: KvmHostArgs,
    /// Let a stock QEMU run the guest: Debian's newest, fetched when first needed, on this machine's KVM if a
    /// stock kernel boots there, else emulated; with --lab or --exact on a lab's KVM. The device is in a process of its
    /// own, `vmm serve`, which QEMU reaches by vfio-user. Prints what to type to do the same by hand
    #[arg(long, conflicts_with_all = ["direct", "report"])]
    qemu: bool,
    /// Let this program of Cloud Hypervisor run the guest, on this machine's KVM if a stock kernel boots there, else on
    /// the lab's. The device is in a process of its own, as with --qemu
    #[arg(long, value_name = "PROGRAM", conflicts_with_all = ["qemu", "direct", "report"])]
    cloud_hypervisor: Option<PathBuf>,
    /// Number of vCPUs [default: 2, in the exact lab 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=255))]
    vcpus: Option<u32>,
    /// The guest's memory in MiB, or with a suffix: 512, 512M, 4G [default: 256, and room for what
    /// --with and --file add]
    #[arg(long, value_name = "SIZE", value_parser = memory)]
    memory: Option<u32>,
    /// Seconds after which a guest that is still running is killed
    #[arg(long, value_name = "SECONDS", default_value_t = 180,
          value_parser = clap::value_parser!(u64).range(1..))]
    timeout: u64,
    /// Programs of the tests crate to put into the guest
    #[arg(long = "program", value_name = "NAME")]
    programs: Vec<String>,
    /// A program of this host to put into the guest with its libraries, such as perf, bpftrace or
    /// strace; a name or a path; may be given again
    #[arg(long, value_name = "PROGRAM")]
    with: Vec<String>,
    /// A file to put into the guest, with its path in the guest
    #[arg(long = "file", value_name = "PATH=FILE")]
    files: Vec<String>,
    /// One more argument for `vmm run`, or beside another VMM for `vmm serve`; may be given again
    #[arg(long = "vmm-arg", value_name = "ARG", allow_hyphen_values = true)]
    vmm_args: Vec<String>,
    /// Give the VMM the ORC tables of the guest's kernel, so that call chains have the kernel's callers
    #[arg(long)]
    orc: bool,
    /// More words for the guest kernel's command line
    #[arg(long, value_name = "WORDS", default_value = "")]
    append: String,
    /// Write the VMM's report (JSON) to this file
    #[arg(long, value_name = "FILE")]
    pub(crate) report: Option<PathBuf>,
    /// The command for the guest's shell; its words are joined by spaces
    #[arg(required = true, last = true, value_name = "COMMAND")]
    command: Vec<String>,
}

/// Parses a guest's memory in MiB.
fn memory(text: &str) -> Result<u32, String> {
    let mib = size::mebibytes(text).map_err(|error| error.to_string())?;
    let mib = u32::try_from(mib).ok().filter(|mib| (64..=65536).contains(mib));
    mib.ok_or_else(|| "must be 64M to 64G".to_owned())
}

impl BootArgs {
    /// The boot that the arguments describe, or an error in one line.
    pub(crate) fn boot(&self) -> Result<Boot, String> {
        let with: Vec<&str> = self.with.iter().map(String::as_str).collect();
        let programs = third_party::programs(self.kvm_host.arch(), &with);
        let mut files = programs.map_err(|error| format!("--with: {}", chain(&error)))?;
        for file in &self.files {
            let (inside, outside) =
                file.split_once('=').ok_or_else(|| format!("--file {file}: write PATH=FILE, like root/data=./data"))?;
            let contents = fs::read(outside).map_err(|e| format!("cannot read {outside}: {e}"))?;
            files.push((inside.trim_start_matches('/').to_owned(), contents));
        }
        let kvm_host = self.kvm_host.choice();
        let vcpus = if kvm_host == KvmHostChoice::Exact { 1 } else { 2 };
        Ok(Boot {
            command: self.command.join(" "),
            vcpus: self.vcpus.unwrap_or(vcpus),
            memory_mib: self
                .memory
                .unwrap_or_else(|| Boot::default().memory_mib.saturating_add(third_party::memory_mib(&files))),
            programs: self.programs.clone(),
            files,
            kvm_host,
            carrier: match &self.cloud_hypervisor {
                Some(program) => Carrier::BesideCloudHypervisor(program.clone()),
                None if self.qemu => Carrier::BesideQemu,
                None => Carrier::Vmm,
            },
            timeout: Duration::from_secs(self.timeout),
            vmm_args: self.vmm_args.clone(),
            orc: self.orc,
            other_args: Vec::new(),
            append: self.append.clone(),
            post_run: None,
            echo: true,
            sources: self.kernel.clone().sources(self.kvm_host.arch()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn boot(arguments: &[&str]) -> Result<Boot, String> {
        let cli = Cli::try_parse_from(["images", "boot"].iter().chain(arguments));
        match cli.map_err(|error| error.to_string())?.action {
            Action::Boot(arguments) => arguments.boot(),
            other => Err(format!("{other:?}")),
        }
    }

    #[test]
    fn demo_takes_its_options_behind_the_separator_of_cargo() {
        let of = |line: &str| arguments(line.split(' ').map(OsString::from));
        assert_eq!(of("images demo -- --lab aarch64"), of("images demo --lab aarch64"));
        for same in ["images boot -- true", "images demo", "images"] {
            let words: Vec<OsString> = same.split(' ').map(OsString::from).collect();
            assert_eq!(of(same), words);
        }
    }

    #[test]
    fn cache_options_stand_before_or_behind_the_command() {
        let of = |line: &str| {
            let cli = Cli::try_parse_from(line.split(' ')).map_err(|error| error.to_string())?;
            Ok::<_, String>((cli.cache, cli.cache_size))
        };
        let expected = Ok((Some(PathBuf::from("mine")), Some(Size::gib(2))));
        assert_eq!(of("images --cache mine --cache-size 2G clean"), expected);
        assert_eq!(of("images boot --cache mine --cache-size 2G -- true"), expected);
        assert_eq!(of("images clean"), Ok((None, None)));
        assert!(of("images clean --cache-size much").unwrap_err().contains("much"));
    }

    #[test]
    fn words_become_a_boot() {
        let boot = boot(&["--lab", "--vcpus", "3", "--memory", "1G", "--vmm-arg", "--no-vpmu", "--", "echo", "hi"]);
        let boot = boot.unwrap();
        assert_eq!((boot.command.as_str(), boot.vcpus, boot.memory_mib), ("echo hi", 3, 1024));
        assert_eq!((boot.kvm_host, boot.vmm_args), (KvmHostChoice::Lab, vec!["--no-vpmu".to_owned()]));
    }

    #[test]
    fn lab_option_takes_architecture_and_aarch64_is_exact() {
        let arch = |arguments: &[&str]| {
            let boot = boot(arguments).unwrap();
            (boot.kvm_host, boot.sources.arch)
        };
        let exact = (KvmHostChoice::Exact, Arch::Aarch64);
        assert_eq!(arch(&["--lab", "aarch64", "--exact", "--", "true"]), exact);
        assert_eq!(arch(&["--lab", "aarch64", "--", "true"]), exact);
        let lab = (KvmHostChoice::Lab, Arch::X86_64);
        assert_eq!(arch(&["--lab", "--", "true"]), lab);
        assert_eq!(arch(&["--", "true"]), (KvmHostChoice::Auto, Arch::X86_64));
    }

    #[test]
    fn other_vmms_carry_no_device() {
        let carrier = |arguments: &[&str]| boot(arguments).unwrap().carrier;
        assert_eq!(carrier(&["--qemu", "--", "true"]), Carrier::BesideQemu);
        assert_eq!(carrier(&["--", "true"]), Carrier::Vmm);
        let cloud = Carrier::BesideCloudHypervisor("c".into());
        assert_eq!(carrier(&["--cloud-hypervisor", "c", "--lab", "--", "true"]), cloud);
        assert_eq!(carrier(&["--qemu", "--lab", "--", "true"]), Carrier::BesideQemu);
        for other in ["--direct", "--report=file", "--cloud-hypervisor=c"] {
            let error = boot(&["--qemu", other, "--", "true"]).unwrap_err();
            assert!(error.contains("'--qemu' cannot be used with"), "{error}");
        }
    }

    #[test]
    fn wrong_words_are_refused() {
        for wrong in [
            &["--vcpus", "0", "--", "true"][..],
            &["--memory", "1", "--", "true"],
            &["--memory", "65G", "--", "true"],
            &["--lab", "--direct", "--", "true"],
            &["--lab", "m68k", "--", "true"],
            &["--exact", "--direct", "--", "true"],
            &["--kernel", "x", "--", "true"],
            &["--kernel", "x", "--headers", "y", "--kernel-version", "6.1", "--", "true"],
            &["--file", "nonsense", "--", "true"],
            &["--file", "a=/no/such/file", "--", "true"],
            &["--frobnicate", "--", "true"],
            &[],
        ] {
            assert!(boot(wrong).is_err(), "{wrong:?}");
        }
    }
}
