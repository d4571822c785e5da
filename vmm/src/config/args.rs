//! The flags of `vmm run` and their `--help` texts.

use std::path::PathBuf;

use clap::Args;
use vpmu::{PersistSpec, SizeError, parse_bytes, parse_scaled};

use super::{CountMode, Engine, OnReset};
use crate::arch::board::DEFAULT_CMDLINE;
use crate::arch::kernel;
use crate::confine::User;
use crate::limits::LimitArgs;
use crate::policy::PolicyArgs;

/// Arguments of `vmm run`.
#[derive(Debug, Clone, Default, Args)]
#[command(after_help = RUN_HELP)]
pub struct RunArgs {
    /// Kernel to boot
    #[arg(long, value_name = "FILE", help = kernel_help())]
    pub kernel: Option<PathBuf>,

    /// Initial RAM file system
    #[arg(long, value_name = "FILE")]
    pub initramfs: Option<PathBuf>,

    /// Kernel command line
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true, help = cmdline_help())]
    pub cmdline: Option<String>,

    /// Restore the machine that 'vmm ctl snapshot DIR' saved, instead of booting a kernel. See below
    #[arg(long, value_name = "DIR")]
    pub restore: Option<PathBuf>,

    /// A snapshot that the restored one is based on, if it does not lie beside its diff; can be repeated
    #[arg(long, value_name = "DIR", requires = "restore")]
    pub base: Vec<PathBuf>,

    /// Number of vCPUs, 1 to 254 [default: 1]
    #[arg(long, value_name = "N")]
    pub vcpus: Option<u32>,

    /// Guest memory in MiB, or with a suffix: 512, 512M, 4G [default: 256]
    #[arg(long, value_name = "SIZE", value_parser = parse_memory)]
    pub memory: Option<u64>,

    /// Read options from a JSON file; flags override it
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,

    /// Disable the paravirtual PMU, like --pmu off
    #[arg(long)]
    pub no_vpmu: bool,

    /// Also give the guest's processors KVM's own PMU; needs a KVM that has one for guests. On aarch64,
    /// its counters stand still after a restore until the guest programs them again
    #[arg(long)]
    pub guest_pmu: bool,

    /// Action after a guest reset or triple fault: exit (end the run), or restart (boot again, with
    /// the persistent events still running) [default: exit]
    #[arg(long, value_enum, value_name = "WHAT")]
    pub on_reset: Option<OnReset>,

    /// Track which pages are written, for 'vmm ctl snapshot --diff'. See below
    #[arg(long)]
    pub track_dirty: bool,

    /// Let the guest trace how long the VMM's devices take to handle its accesses: the trace 'handlers'
    #[arg(long)]
    pub trace_handlers: bool,

    /// Engine for samples of host events: batched (the host takes the samples, without an exit per
    /// sample), exit (one exit per sample), or auto (batched if the host's samples have guest
    /// addresses, else exit) [default: auto]
    #[arg(long, value_enum, value_name = "ENGINE")]
    pub engine: Option<Engine>,

    /// vmlinux of the guest's kernel, for call chains in a kernel without frame pointers. A stripped file will do. See
    /// below [default: the file of --kernel, if a persistent event has call-graph]
    #[arg(long, value_name = "FILE")]
    pub vmlinux: Option<PathBuf>,

    /// Write the result to a JSON file, however the run ends
    #[arg(long, value_name = "FILE")]
    pub report: Option<PathBuf>,

    /// Print a short summary on standard error at the end
    #[arg(long)]
    pub summary: bool,

    /// Options of the PMU.
    #[command(flatten)]
    pub device: DeviceArgs,
}

/// Options of the PMU, of its operator and of the process that carries it. `vmm run` and `vmm serve` have them.
#[derive(Debug, Clone, Default, Args)]
pub struct DeviceArgs {
    /// Work that hardware events count: guest (only the guest's), or vcpu (also the host's work for
    /// the vCPU, which KVM and this VMM do on the vCPU's thread). Sampling events exclude the
    /// host's work in both modes [default: guest]
    #[arg(long, value_enum, value_name = "MODE")]
    pub count_mode: Option<CountMode>,

    /// Pin hardware events on the host: pinned events do not share a counter, and an event without a counter is in the
    /// error state. Without this option the host may multiplex counters: an event then runs for less time than it is
    /// enabled
    #[arg(long)]
    pub pin_hardware: bool,

    /// Size of the window (VMM memory for rings that survive a guest reset), in bytes or with K or M; 0 means no window
    /// [default: 16M]
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    pub window: Option<u64>,

    /// Start a persistent event before the guest's first instruction; can be repeated. See below
    #[arg(long, value_name = "EVENT[,OPTION...]")]
    pub persistent: Vec<PersistSpec>,

    /// Write the records of persistent events to this file, for 'perf script', whenever the guest
    /// ends or resets; an older file is kept as FILE.old. The guest's own events are recorded only
    /// if this option is given [default: perf.data]
    #[arg(long, value_name = "FILE")]
    pub recording: Option<PathBuf>,

    /// File with the names of the guest kernel's functions, for the recording: a System.map, a copy of the
    /// guest's /proc/kallsyms, or a vmlinux that is not stripped
    #[arg(long, value_name = "FILE")]
    pub symbols: Option<PathBuf>,

    /// Accept 'vmm ctl' commands on a new Unix socket at this path
    #[arg(long, value_name = "SOCKET")]
    pub ctl: Option<PathBuf>,

    /// Change to this numeric user and group before the guest runs; start as root to use this. See below
    #[arg(long, value_name = "UID:GID")]
    pub user: Option<User>,

    /// Make this directory the VMM's root directory before the guest runs; start as root to use this. See
    /// below
    #[arg(long, value_name = "DIR")]
    pub chroot: Option<PathBuf>,

    /// Run without seccomp filters, to debug the VMM
    #[arg(long)]
    pub no_seccomp: bool,

    /// Events that the guest may open.
    #[command(flatten)]
    pub policy: PolicyArgs,

    /// Limits of the guest's resource use.
    #[command(flatten)]
    pub limits: LimitArgs,
}

const RUN_HELP: &str = "\
Examples:
  vmm run --kernel vmlinux --initramfs rootfs.cpio.gz --vcpus 2 --memory 512
  vmm run --kernel bzImage --cmdline 'console=ttyS0 root=/dev/ram0' --summary
  vmm run --kernel bzImage --persistent marks --persistent exits-io,cpu=0,size=1M,name=io
  vmm run --kernel bzImage --persistent marks --on-reset restart --ctl vm.sock
  vmm run --kernel bzImage --pmu clocks --allow-event instructions,cycles
  vmm run --config vm.json --report report.json

A configuration file has these keys. \"memory\" is in MiB; \"limits\" has the names of the flags for limits:
  {\"kernel\": \"vmlinux\", \"initramfs\": \"rootfs.cpio.gz\", \"cmdline\": \"console=ttyS0\",
   \"vcpus\": 2, \"memory\": 512, \"vpmu\": true, \"guest-pmu\": false, \"pmu\": \"standard\",
   \"allow-events\": [\"raw:0x11\"], \"deny-events\": [\"exits-*\"], \"hardware-events\": true,
   \"count-mode\": \"guest\", \"raw-events\": \"0x11,0x40-0x4f\", \"pin-hardware\": false, \"window\": \"16M\",
   \"limits\": {\"max-sample-rate\": 10000, \"max-console\": \"1M\"}, \"on-reset\": \"restart\", \"ctl\": \"vm.sock\",
   \"track-dirty\": true, \"trace-handlers\": false, \"persistent\": [\"marks\"], \"recording\": \"perf.data\", \"symbols\": \"System.map\",
   \"vmlinux\": \"vmlinux\",
   \"engine\": \"auto\", \"user\": \"1000:1000\", \"chroot\": \"/srv/vm\", \"seccomp\": true,
   \"report\": \"report.json\", \"summary\": true}

Console: standard input and output are the guest's first serial port. Ctrl-A x ends the run, \
Ctrl-A Ctrl-A sends one Ctrl-A.

Resets: with --on-reset restart the guest boots again from the same files, in zeroed memory. Its \
clock and the persistent events with rings in the window continue. A power-off, a kernel panic and a \
signal still end the run.

Snapshots: 'vmm ctl --socket vm.sock snapshot DIR' saves a machine that runs with --ctl. --restore DIR \
continues it, on this host or on another one with the same processor, KVM and TSC frequency. vCPUs, memory, \
window and PMU come from the snapshot: omit --vcpus, --memory, --window and --no-vpmu, or give the same \
values. All other options work as for a machine that boots. The guest's clock continues from the moment of \
the snapshot. The machine reads memory from DIR on first access and never writes there, so many machines \
can run from one snapshot; don't change the files in DIR meanwhile. With --on-reset restart, --kernel names \
the kernel to boot after a reset. The guest's events keep their counts; an event that this host cannot count, \
or that --pmu or --deny-event denies, is in the error state. The operator's persistent events continue, too; \
--persistent starts more events; no event of the snapshot may have the same name. A snapshot that is \
damaged, or does not fit this host, is refused before the guest runs, with status 1 and the reason. DIR, its \
files and its bases must belong to you or to the user of --user, and must not be symbolic links.

Diffs: with --track-dirty KVM and the PMU record which pages are written, and 'vmm ctl snapshot DIR \
--diff BASE' saves only the pages written since BASE. After each snapshot, the guest's first write to a page \
costs a fault that KVM handles. --restore DIR of a diff reads BASE, too: the directory beside DIR that has \
BASE's name, or the directory of --base.

Persistent events: --persistent EVENT[,OPTION...] starts an event that the guest can read but not stop. \
EVENT is a name that 'vmm check --pmu full' lists. marks counts every mark, mark=7 only marks with the value 7, and \
exits-io:k only port accesses in kernel mode. Options:
  period=N    take a sample every N events
  freq=N      take about N samples a second
  cpu=N|all   count on this vCPU [default: all, one event for each]
  size=BYTES  size of the ring in the window, 4K times a power of two; it keeps the newest records.
              0: only count [default: 64K]
  name=NAME   name of the event; with several vCPUs, -0, -1 and so on are added [default: EVENT]
  call-graph  record the callers of each sampled function. Each sample then costs an exit, and is larger
Without period and freq, every mark and every exit is sampled, clocks and hardware events take 1000 samples \
a second, and events that cannot sample only count. The recording describes only the guest: it has \
neither the host's name nor any of its paths.

Callers: the callers of a program's functions are found by frame pointers. So are those of the kernel's functions, \
but stock kernels for x86-64 have no frame pointers. Instead, they have tables (CONFIG_UNWINDER_ORC), which \
this VMM reads from the file of --vmlinux. It must belong to the kernel that the guest runs. The tables of a bzImage are \
compressed: extract the vmlinux, with the kernel's scripts/extract-vmlinux or from the package with debug \
information. A kernel that is loaded at a random address (KASLR) is found. Code in modules ends a chain.

Events of the guest: --pmu selects a list of events that the guest may open.
  --pmu off       the machine has no PMU device, and no exits caused by one
  --pmu clocks    cpu-clock, task-clock, tsc, guest-time, marks, and exits that reach the VMM, by
                  reason; no hardware event is opened, unless --persistent names one
  --pmu standard  every event of clocks; also the CPU's generic and cache events, page-faults,
                  context-switches, cpu-migrations, exits, halts, and traces
  --pmu full      every event of standard; also every raw event of the host's CPU
--allow-event adds to the list. Without --pmu the list starts empty, and the guest has only the allowed events.
--deny-event removes an event from the list, even if another option allows it. It also removes each trace whose \
packets contain the event's data, or whose samples the event's overflows trigger. Both options take names that \
'vmm check --pmu full' lists (instructions), patterns (exits-*), kinds (hardware, hw-cache, software, raw, \
vmm-traces), and numbers (raw:0x11/0xff: KIND:CONFIG/MASK, the events whose config equals CONFIG in the bits of \
MASK). A denied event is absent: the catalogue does not list it, and opening it fails like opening an event that \
the host does not have. The list applies only to the guest: --persistent and 'vmm ctl start' take any event of \
the host, and the guest may read those events.

Raw events: --raw-events 0x11,0x40-0x4f lets the guest count these event numbers of the host's CPU \
('perf stat -e r11' in the guest). A number is an event and its unit mask; flags (any thread, edge and the \
like) are never passed to the host. A raw event can count shared resources, such as a last-level cache, or \
reveal the activity of the host and of other guests: allow only events that you know from the manual of this \
CPU model. The catalogue lists the events that the host can open, as raw-0x11. 'all' lets the guest open every \
raw event.

Control: --ctl creates a socket that only the machine's owner and root can use. Through it, 'vmm ctl' lists, \
starts, flushes, records and ends persistent events while the guest runs, and saves the machine. The socket is \
removed when the run ends; a stale socket is replaced.

Confinement: before the guest's first instruction the VMM opens the files that it needs, closes inherited \
descriptors, drops every capability except CAP_PERFMON, and installs a seccomp filter on each thread. All paths \
are opened before the root directory changes, so --report, --recording and --ctl may name files outside it. \
The directory of recordings stays open: choose one inside the new root, so that the VMM can reach nothing outside. \
The user of --user needs write access to the directory of recordings, and becomes the owner of the control \
socket. A system call that a filter refuses ends the VMM immediately, without a report; the message names the \
call. 'vmm check' and 'vmm ctl' are not confined.

Debug port: if the guest's init writes a byte to port 0x504, or on aarch64 to address 0xa002000, the report \
has the time from the first instruction to that write.

Exit status:
  0  the guest powered off         4  the guest triple-faulted
  1  the VMM failed                5  the guest kernel panicked
  2  wrong usage                   6  ended by Ctrl-A x, a signal or 'snapshot --then-exit'
  3  the guest asked for a reset   7  a seccomp filter refused a system call
                                   8  KVM cannot continue the guest, for example
                                      after an instruction that it cannot emulate";

fn kernel_help() -> String {
    format!("Kernel to boot: {}", kernel::KINDS)
}

fn cmdline_help() -> String {
    format!("Kernel command line [default: \"{DEFAULT_CMDLINE}\"]")
}

/// Parses `512`, `512M` or `4G` to mebibytes.
fn parse_memory(text: &str) -> Result<u64, String> {
    parse_scaled(text, &[('M', 1), ('G', 1024)]).map_err(|error| match error {
        SizeError::Number => "must be a number of MiB, or one with M or G".to_owned(),
        SizeError::TooLarge => error.to_string(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_has_units() {
        assert_eq!(parse_memory("512"), Ok(512));
        assert_eq!(parse_memory("512M"), Ok(512));
        assert_eq!(parse_memory("4g"), Ok(4096));
        for bad in ["", "G", "1.5G", "-1", "4T", "é", "99999999999999999999"] {
            assert!(parse_memory(bad).is_err(), "{bad}");
        }
        assert!(parse_memory(&format!("{}G", u64::MAX)).is_err());
    }
}
