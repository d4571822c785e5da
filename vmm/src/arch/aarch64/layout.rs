//! Where everything lies: guest-physical addresses and interrupt lines.
//!
//! A table and nothing else; the guest learns these numbers from its device tree. Devices, then the
//! window, then memory, which has no end.

/// The distributor of the interrupt controller.
pub const GIC_DISTRIBUTOR: u64 = 0x0800_0000;
/// Bytes of it.
pub const GIC_DISTRIBUTOR_SIZE: u64 = 0x1_0000;
/// The redistributors, one per vCPU.
pub const GIC_REDISTRIBUTORS: u64 = GIC_DISTRIBUTOR + GIC_DISTRIBUTOR_SIZE;
/// Bytes of each.
pub const GIC_REDISTRIBUTOR_SIZE: u64 = 0x2_0000;
/// More vCPUs than this would have redistributors where devices lie.
pub const MAX_VCPUS: u32 = 254;

/// The serial console.
pub const SERIAL: u64 = 0x0a00_0000;
/// The panic device.
pub const PVPANIC: u64 = 0x0a00_1000;
/// Boot progress: a byte written here says that init is reached.
pub const DEBUG: u64 = 0x0a00_2000;
/// Bytes of the page that each of these has for itself.
pub const DEVICE_SIZE: u64 = 0x1000;

/// Registers of the virtio-mmio transport.
pub const VIRTIO: u64 = 0x0a01_0000;
/// Bytes of them.
pub const VIRTIO_SIZE: u64 = 0x1000;
/// The doorbell page of the paravirtual PMU.
pub const DOORBELL: u64 = VIRTIO + VIRTIO_SIZE;
/// Bytes of it.
pub const DOORBELL_SIZE: u64 = 0x1000;
/// The window: memory of the VMM's own that the guest reaches, and that no memory map names. It has
/// its own 2 MiB pages, and room up to the guest's memory.
pub const WINDOW: u64 = 0x2000_0000;
/// Most bytes of it.
pub const WINDOW_MAX: u64 = 512 << 20;
/// Bytes of a page.
pub const PAGE: u64 = 4096;

/// Guest memory starts here.
pub const RAM: u64 = 0x4000_0000;
/// The device tree.
pub const FDT: u64 = RAM;
/// Most bytes of it: Linux maps no more.
pub const FDT_MAX: u64 = 2 << 20;
/// Kernels are loaded from here up; they want a multiple of 2 MiB.
pub const KERNEL: u64 = FDT + FDT_MAX;
/// Linux wants its initramfs within so many bytes of its kernel, from a multiple of 1 GiB on.
pub const INITRAMFS_REACH: u64 = 32 << 30;
/// Most bytes of a command line, the final zero included; Linux on arm64 takes no more.
pub const CMDLINE_MAX: usize = 2048;

/// Interrupt lines: shared peripheral interrupts of the controller, in KVM's and the device tree's
/// numbers.
pub const SERIAL_GSI: u32 = 0;
/// The virtio device's.
pub const VIRTIO_GSI: u32 = 1;
/// Interrupts that the controller has: 32 of each vCPU's own, and as many shared ones, KVM's least.
pub const INTERRUPTS: u32 = 64;

/// Interrupts of each vCPU's own, in the device tree's numbers: of the timers (secure and normal
/// physical, virtual, hypervisor) and of the PMU.
pub const TIMER_PPIS: [u32; 4] = [13, 14, 11, 10];
/// As above.
pub const PMU_PPI: u32 = 7;
/// What KVM adds to the number of such an interrupt.
pub const FIRST_PPI: u32 = 16;

/// Where `bytes` of memory lie.
#[must_use]
pub fn ram(bytes: u64) -> Vec<(u64, u64)> {
    vec![(RAM, bytes)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn largest_machine_has_nothing_at_two_places() {
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
