//! Guest-physical addresses, ports and interrupt lines.
//!
//! The boot parameters and ACPI describe the memory and the devices to the guest.

/// The boot descriptor table (GDT).
pub const GDT: u64 = 0x500;
/// The boot parameters ("zero page").
pub const ZERO_PAGE: u64 = 0x7000;
/// Top of the stack that a guest starts with.
pub const BOOT_STACK: u64 = 0x8ff0;
/// Identity page tables for the first 4 GiB: one PML4, one PDPT, four page directories.
pub const PAGE_TABLES: u64 = 0x9000;
/// The kernel command line.
pub const CMDLINE: u64 = 0x2_0000;
/// Maximum length of the command line, with its terminating zero. Linux on x86 accepts no more.
pub const CMDLINE_MAX: usize = 2048;
/// End of the conventional memory below 1 MiB.
pub const LOW_MEMORY_END: u64 = 0x9_fc00;
/// ACPI tables, the RSDP first.
pub const ACPI: u64 = 0xe_0000;
/// The reset vector. Some kernels jump here to reset the machine.
pub const RESET_VECTOR: u64 = 0xf_fff0;
/// End of the area of a PC's firmware.
pub const FIRMWARE_END: u64 = 0x10_0000;
/// The lowest address at which kernels are loaded.
pub const HIGH_MEMORY: u64 = 0x10_0000;

/// Start of the gap. The guest memory below 4 GiB ends here, and the rest of guest memory starts at [`GAP_END`].
pub const GAP: u64 = 3 << 30;
/// End of the gap: 4 GiB.
pub const GAP_END: u64 = 4 << 30;

/// Registers of the virtio-mmio transport.
pub const VIRTIO: u64 = 0xd000_0000;
/// Size of the transport's registers in bytes.
pub const VIRTIO_SIZE: u64 = 0x1000;
/// The doorbell page of the paravirtual PMU.
pub const DOORBELL: u64 = VIRTIO + VIRTIO_SIZE;
/// Size of the doorbell page in bytes.
pub const DOORBELL_SIZE: u64 = 0x1000;
/// The window: memory that the VMM owns and the guest can access. The guest's memory map does not
/// include it. The window shares no 2 MiB page with a device. The addresses between the window and
/// [`IO_APIC`] are unused.
pub const WINDOW: u64 = 0xd020_0000;
/// Maximum size of the window in bytes.
pub const WINDOW_MAX: u64 = 512 << 20;
/// Maximum number of vCPUs. APIC ids have eight bits here, and id 255 is the broadcast id.
pub const MAX_VCPUS: u32 = 254;
/// The I/O APIC that KVM emulates.
pub const IO_APIC: u32 = 0xfec0_0000;
/// Each vCPU's local APIC.
pub const LOCAL_APIC: u32 = 0xfee0_0000;
/// A page for KVM's identity map, which some Intel processors need to run a guest without paging.
pub const KVM_IDENTITY_MAP: u64 = 0xfeff_c000;
/// Three pages for KVM's task state segment, which some Intel processors need to run a guest in real mode.
pub const KVM_TSS: usize = 0xfeff_d000;

/// The serial console.
pub const SERIAL_PORT: u16 = 0x3f8;
/// The interrupt line of the serial console.
pub const SERIAL_GSI: u32 = 4;
/// The keyboard controller, used only for its reset line.
pub const I8042_PORT: u16 = 0x60;
/// The reset control register. The FADT also refers to it.
pub const RESET_PORT: u16 = 0xcf9;
/// The value that resets the machine when it is written to [`RESET_PORT`].
pub const RESET_VALUE: u8 = 0x06;
/// The debug port: a byte written here reports that init runs.
pub const DEBUG_PORT: u16 = 0x504;
/// The panic device.
pub const PVPANIC_PORT: u16 = 0x505;
/// ACPI sleep control, then sleep status.
pub const SLEEP_PORT: u16 = 0x600;
/// The sleep type for power-off, as in `\_S5`.
pub const SLEEP_TYPE_S5: u8 = 5;
/// The virtio device's interrupt line: the first line that no ISA device owns.
pub const VIRTIO_GSI: u32 = 16;
/// [`VIRTIO_GSI`] as KVM numbers it to raise the line.
pub const VIRTIO_LINE: u32 = VIRTIO_GSI;

/// The address ranges of a guest memory of `bytes` bytes: the start and the size of each range. The first range is
/// below the gap. Memory that does not fit there is in a second range, which starts at [`GAP_END`].
#[must_use]
pub fn ram(bytes: u64) -> Vec<(u64, u64)> {
    if bytes <= GAP { vec![(0, bytes)] } else { vec![(0, GAP), (GAP_END, bytes - GAP)] }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_up_to_the_gap_is_one_range() {
        assert_eq!(ram(64 << 20), [(0, 64 << 20)]);
        assert_eq!(ram(GAP), [(0, GAP)]);
    }

    #[test]
    fn memory_beyond_the_gap_continues_at_four_gib() {
        assert_eq!(ram(GAP + 4096), [(0, GAP), (GAP_END, 4096)]);
        assert_eq!(ram(8 << 30), [(0, GAP), (GAP_END, 5 << 30)]);
    }

    #[test]
    fn largest_window_fits_into_the_gap_beside_the_devices() {
        const {
            assert!(DOORBELL + DOORBELL_SIZE <= WINDOW);
            assert!(WINDOW >= GAP && WINDOW + WINDOW_MAX <= IO_APIC as u64);
        }
    }
}
