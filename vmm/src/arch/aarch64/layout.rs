//! Guest-physical addresses and interrupt lines.
//!
//! A table and nothing else; the guest learns these numbers from its device tree. Devices are lowest, then
//! comes the window, then memory, which has no upper limit.

/// The distributor of the interrupt controller.
pub const GIC_DISTRIBUTOR: u64 = 0x0800_0000;
/// Bytes of it.
pub const GIC_DISTRIBUTOR_SIZE: u64 = 0x1_0000;
/// The redistributors, one per vCPU.
pub const GIC_REDISTRIBUTORS: u64 = GIC_DISTRIBUTOR + GIC_DISTRIBUTOR_SIZE;
/// Bytes of each.
pub const GIC_REDISTRIBUTOR_SIZE: u64 = 0x2_0000;
/// Most vCPUs: the redistributors of more would overlap the devices.
pub const MAX_VCPUS: u32 = 254;

/// The serial console.
pub const SERIAL: u64 = 0x0a00_0000;
/// The panic device.
pub const PVPANIC: u64 = 0x0a00_1000;
/// Boot progress: a byte written here reports that init runs.
pub const DEBUG: u64 = 0x0a00_2000;
/// Bytes of the page that each of these devices takes.
pub const DEVICE_SIZE: u64 = 0x1000;

/// Registers of the virtio-mmio transport.
pub const VIRTIO: u64 = 0x0a01_0000;
/// Bytes of them.
pub const VIRTIO_SIZE: u64 = 0x1000;
/// The doorbell page of the paravirtual PMU.
pub const DOORBELL: u64 = VIRTIO + VIRTIO_SIZE;
/// Bytes of it.
pub const DOORBELL_SIZE: u64 = 0x1000;
/// The window: memory that the VMM owns and the guest can access. The guest's memory map does not include
/// it. It has its own 2 MiB pages, and room up to the guest's memory.
pub const WINDOW: u64 = 0x2000_0000;
/// Most bytes of it.
pub const WINDOW_MAX: u64 = 512 << 20;

/// Guest memory starts here.
pub const RAM: u64 = 0x4000_0000;
/// The device tree.
pub const FDT: u64 = RAM;
/// Most bytes of it: Linux maps no more.
pub const FDT_MAX: u64 = 2 << 20;
/// Kernels are loaded from here up; arm64 Linux requires a multiple of 2 MiB.
pub const KERNEL: u64 = FDT + FDT_MAX;
/// arm64 Linux requires its initramfs within this many bytes of its kernel, counted from a multiple of 1
/// GiB.
pub const INITRAMFS_REACH: u64 = 32 << 30;
/// Most bytes of a command line, the final zero included; Linux on arm64 takes no more.
pub const CMDLINE_MAX: usize = 2048;

/// Interrupt lines: shared peripheral interrupts of the controller, in KVM's and the device tree's
/// numbers.
pub const SERIAL_GSI: u32 = 0;
/// The virtio device's.
pub const VIRTIO_GSI: u32 = 1;
/// Interrupts of the controller: 32 private ones per vCPU, and 32 shared ones, the fewest that KVM allows.
pub const INTERRUPTS: u32 = 64;

/// Private interrupts of each vCPU's timers (secure and normal physical, virtual, hypervisor), in the
/// device tree's numbers.
pub const TIMER_PPIS: [u32; 4] = [13, 14, 11, 10];
/// The private interrupt of each vCPU's PMU, likewise.
pub const PMU_PPI: u32 = 7;
/// KVM's number of the first private interrupt.
pub const FIRST_PPI: u32 = 16;

/// The address ranges of `bytes` of memory: start and size.
#[must_use]
pub fn ram(bytes: u64) -> Vec<(u64, u64)> {
    vec![(RAM, bytes)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn largest_machine_has_no_overlapping_devices() {
        const {
            let redistributors = MAX_VCPUS as u64 * GIC_REDISTRIBUTOR_SIZE;
            assert!(GIC_REDISTRIBUTORS + redistributors <= SERIAL);
            assert!(DEBUG + DEVICE_SIZE <= VIRTIO);
            assert!(DOORBELL + DOORBELL_SIZE <= WINDOW);
            assert!(WINDOW + WINDOW_MAX <= RAM);
        }
    }

    #[test]
    fn memory_is_one_piece() {
        assert_eq!(ram(8 << 30), [(RAM, 8 << 30)]);
    }
}
