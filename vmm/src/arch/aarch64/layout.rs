//! Guest-physical addresses and interrupt lines.
//!
//! The device tree tells the guest these addresses and lines. The devices have the lowest addresses. The window
//! follows, and then memory, which has no upper limit.

/// The distributor of the interrupt controller.
pub const GIC_DISTRIBUTOR: u64 = 0x0800_0000;
/// Size of the distributor in bytes.
pub const GIC_DISTRIBUTOR_SIZE: u64 = 0x1_0000;
/// The redistributors, one per vCPU.
pub const GIC_REDISTRIBUTORS: u64 = GIC_DISTRIBUTOR + GIC_DISTRIBUTOR_SIZE;
/// Size of a redistributor in bytes.
pub const GIC_REDISTRIBUTOR_SIZE: u64 = 0x2_0000;
/// Maximum number of vCPUs, the same as on x86-64. Up to 255 redistributors fit below the serial console.
pub const MAX_VCPUS: u32 = 254;

/// The serial console.
pub const SERIAL: u64 = 0x0a00_0000;
/// The panic device.
pub const PVPANIC: u64 = 0x0a00_1000;
/// Boot progress: a byte written here reports that init runs.
pub const DEBUG: u64 = 0x0a00_2000;
/// Size in bytes of the page that each of these devices takes.
pub const DEVICE_SIZE: u64 = 0x1000;

/// Registers of the virtio-mmio transport.
pub const VIRTIO: u64 = 0x0a01_0000;
/// Size of the transport's registers in bytes.
pub const VIRTIO_SIZE: u64 = 0x1000;
/// The doorbell page of the paravirtual PMU.
pub const DOORBELL: u64 = VIRTIO + VIRTIO_SIZE;
/// Size of the doorbell page in bytes.
pub const DOORBELL_SIZE: u64 = 0x1000;
/// The window: memory that the VMM owns and the guest can access. The guest's memory map does not include
/// it. The window shares no 2 MiB page with a device, and has room to extend up to the guest's memory.
pub const WINDOW: u64 = 0x2000_0000;
/// Maximum size of the window in bytes.
pub const WINDOW_MAX: u64 = 512 << 20;

/// Guest memory starts here.
pub const RAM: u64 = 0x4000_0000;
/// The device tree.
pub const FDT: u64 = RAM;
/// Maximum size of the device tree in bytes: Linux maps no more.
pub const FDT_MAX: u64 = 2 << 20;
/// The lowest address at which kernels are loaded. arm64 Linux requires a multiple of 2 MiB.
pub const KERNEL: u64 = FDT + FDT_MAX;
/// Size in bytes of the range that must contain both the kernel and the initramfs, as arm64 Linux requires. The range
/// begins at a multiple of 1 GiB.
pub const INITRAMFS_REACH: u64 = 32 << 30;
/// Maximum length of the command line, with its terminating zero. Linux on arm64 accepts no more.
pub const CMDLINE_MAX: usize = 2048;

/// The serial console's interrupt line. Lines are shared peripheral interrupts (SPIs) of the controller,
/// numbered as in KVM and the device tree.
pub const SERIAL_GSI: u32 = 0;
/// The virtio device's interrupt line.
pub const VIRTIO_GSI: u32 = 1;
/// [`VIRTIO_GSI`] as KVM numbers it to raise the line: the type of a shared interrupt (`KVM_ARM_IRQ_TYPE_SPI`), and its
/// number, the first of which is 32.
pub const VIRTIO_LINE: u32 = 1 << 24 | (32 + VIRTIO_GSI);
/// Number of interrupts that the controller has: 32 private to each vCPU, and 32 shared. KVM allows no fewer.
pub const INTERRUPTS: u32 = 64;

/// Private interrupts of each vCPU's timers (secure and non-secure physical, virtual, hypervisor), numbered as in the
/// device tree.
pub const TIMER_PPIS: [u32; 4] = [13, 14, 11, 10];
/// The private interrupt of each vCPU's PMU, numbered as in the device tree.
pub const PMU_PPI: u32 = 7;
/// KVM's number of the first private interrupt.
pub const FIRST_PPI: u32 = 16;

/// The address ranges of a guest memory of `bytes` bytes: the start and the size of each range.
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
