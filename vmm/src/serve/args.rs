//! The flags of `vmm serve` and their `--help` texts.

use std::path::PathBuf;

use clap::Args;

use crate::config::DeviceArgs;

/// Arguments of `vmm serve`.
#[derive(Debug, Clone, Args)]
#[command(after_help = HELP)]
pub struct ServeArgs {
    /// Wait for the VMM on a new Unix socket at this path
    #[arg(long, value_name = "SOCKET")]
    pub socket: PathBuf,

    /// The VMM's number of vCPUs, with those that can be plugged later
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub vcpus: u32,

    /// Options of the PMU.
    #[command(flatten)]
    pub device: DeviceArgs,
}

const HELP: &str = "\
One process carries the PMU of one virtual machine, which another VMM runs. Start it before the VMM, with the VMM's number \
of vCPUs. Both run on this host, as the same user, or this process as root.

QEMU 10.1 or newer:
  vmm serve --socket pmu.sock --vcpus 2
  qemu-system-x86_64 -M q35 -accel kvm -cpu host -smp 2 -m 1G -name vm,debug-threads=on \\
    -object memory-backend-memfd,id=ram,size=1G,share=on -machine memory-backend=ram \\
    -device '{\"driver\": \"vfio-user-pci\", \"socket\": {\"type\": \"unix\", \"path\": \"pmu.sock\"}}' ...

Cloud Hypervisor:
  vmm serve --socket pmu.sock --vcpus 2
  cloud-hypervisor --cpus boot=2 --memory size=1G,shared=on --user-device socket=pmu.sock ...

The guest needs the drivers virtio_pci and virtio_pmu. 'cargo run -p images -- boot --qemu' tries all of this.

What a device in the VMM's own process has, and this one lacks: samples with call chains, registers or stacks; an \
interrupt at each overflow; guest-time; events that count or trace exits to the VMM by reason; snapshots. The guest does \
not find these events. Each notification takes two switches of threads more than in 'vmm run', while the vCPU waits.

The socket takes one connection, of a process of the same user or of root, and is then removed. When the VMM ends or \
unplugs the device, the records of persistent events are written, and this process ends. If this process ends first, the \
guest continues without a PMU: unbind its driver, and plug a second device with a new process. Do not unplug the first \
one from QEMU: version 11.1.3 aborts.

Exit status:
  0  the VMM has ended the connection      6  ended by a signal
  1  this process failed                   7  a seccomp filter refused a system call
  2  wrong usage";
