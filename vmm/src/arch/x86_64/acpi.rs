//! The ACPI tables of a hardware-reduced PC.
//!
//! On a hardware-reduced PC, a stock kernel needs no PIT, PIC, PM timer or fixed-event interrupt. Sleep and reset each
//! use one port, and everything else is a device in the DSDT.

use acpi_tables::aml::{self, Path};
use acpi_tables::fadt::{FADTBuilder, Flags, PmProfile};
use acpi_tables::gas::{AccessSize, AddressSpace, GAS};
use acpi_tables::madt::{EnabledStatus, IoApic, LocalInterruptController, MADT, ProcessorLocalApic};
use acpi_tables::rsdp::Rsdp;
use acpi_tables::sdt::Sdt;
use acpi_tables::xsdt::XSDT;
use acpi_tables::{Aml, aml::EISAName};
use vm_memory::{Bytes, GuestAddress, GuestMemoryError, GuestMemoryMmap};

use super::layout;
use crate::machine::Machine;

const OEM: [u8; 6] = *b"VPMU  ";
const OEM_TABLE: [u8; 8] = *b"VPMUVMM ";
const REVISION: u32 = 1;

/// IA-PC boot flags of the FADT: the kernel must not probe for VGA or a CMOS clock.
const BOOT_NO_VGA: u16 = 1 << 2;
const BOOT_NO_RTC: u16 = 1 << 5;

/// Writes the tables at [`layout::ACPI`]; the RSDP comes first.
///
/// # Errors
/// The tables do not fit in guest memory.
pub fn write(memory: &GuestMemoryMmap, machine: &Machine) -> Result<(), GuestMemoryError> {
    let (bytes, _) = build(machine);
    memory.write_slice(&bytes, GuestAddress(layout::ACPI))
}

/// Returns the bytes of all tables, to be written to [`layout::ACPI`], and the tables' offsets. The RSDP is at offset
/// zero, and its offset is not listed.
fn build(machine: &Machine) -> (Vec<u8>, Vec<usize>) {
    let mut bytes = vec![0; Rsdp::len()];
    let mut offsets = Vec::new();
    let mut place = |table: &dyn Aml, bytes: &mut Vec<u8>| {
        bytes.resize(bytes.len().next_multiple_of(16), 0);
        let offset = bytes.len();
        table.to_aml_bytes(bytes);
        offsets.push(offset);
        layout::ACPI + offset as u64
    };
    let dsdt = place(&Raw(dsdt(machine)), &mut bytes);
    let fadt = place(&fadt(dsdt).finalize(), &mut bytes);
    let madt = place(&madt(machine), &mut bytes);
    let mut xsdt = XSDT::new(OEM, OEM_TABLE, REVISION);
    xsdt.add_entry(fadt);
    xsdt.add_entry(madt);
    let xsdt = place(&xsdt, &mut bytes);
    let mut rsdp = Vec::new();
    Rsdp::new(OEM, xsdt).to_aml_bytes(&mut rsdp);
    bytes[..rsdp.len()].copy_from_slice(&rsdp);
    (bytes, offsets)
}

/// A finished table.
struct Raw(Sdt);

impl Aml for Raw {
    fn to_aml_bytes(&self, sink: &mut dyn acpi_tables::AmlSink) {
        sink.vec(self.0.as_slice());
    }
}

fn port(address: u16) -> GAS {
    GAS::new(AddressSpace::SystemIo, 8, 0, AccessSize::ByteAccess, u64::from(address))
}

fn fadt(dsdt: u64) -> FADTBuilder {
    let mut fadt = FADTBuilder::new(OEM, OEM_TABLE, REVISION)
        .dsdt_64(dsdt)
        .flag(Flags::HwReducedAcpi)
        .flag(Flags::ResetRegSup)
        .flag(Flags::Wbinvd)
        .flag(Flags::PwrButton)
        .flag(Flags::SlpButton)
        .flag(Flags::Headless)
        .preferred_pm_profile(PmProfile::Unspecified);
    fadt.reset_reg = port(layout::RESET_PORT);
    fadt.reset_value = layout::RESET_VALUE;
    fadt.sleep_control_reg = port(layout::SLEEP_PORT);
    fadt.sleep_status_reg = port(layout::SLEEP_PORT + 1);
    fadt.iapc_boot_arch = (BOOT_NO_VGA | BOOT_NO_RTC).into();
    fadt.hypervisor_vendor_identity = u64::from_le_bytes(*b"vpmu vmm").into();
    fadt
}

fn madt(machine: &Machine) -> MADT {
    let mut madt = MADT::new(OEM, OEM_TABLE, REVISION, LocalInterruptController::Address(layout::LOCAL_APIC));
    madt.add_structure(IoApic::new(0, layout::IO_APIC, 0));
    for index in 0..machine.vcpus {
        madt.add_structure(ProcessorLocalApic::new(index, index, EnabledStatus::Enabled));
    }
    madt
}

fn dsdt(machine: &Machine) -> Sdt {
    let mut aml = Vec::new();
    let s5 = layout::SLEEP_TYPE_S5;
    aml::Name::new(Path::new("_S5_"), &aml::Package::new(vec![&s5, &0u8, &0u8, &0u8])).to_aml_bytes(&mut aml);
    let serial = serial();
    let panic = panic();
    let virtio = machine.virtio.then(|| virtio(machine.window));
    let mut devices: Vec<&dyn Aml> = vec![&serial, &panic];
    if let Some(virtio) = &virtio {
        devices.push(virtio);
    }
    aml::Scope::new(Path::new("_SB_"), devices).to_aml_bytes(&mut aml);
    let mut table = Sdt::new(*b"DSDT", 36, 6, OEM, OEM_TABLE, REVISION);
    table.append_slice(&aml);
    table
}

/// The AML of one device. It is stored as bytes: the builders in the crate `acpi_tables` borrow their contents, so a
/// function cannot return a builder.
struct Device(Vec<u8>);

impl Aml for Device {
    fn to_aml_bytes(&self, sink: &mut dyn acpi_tables::AmlSink) {
        sink.vec(&self.0);
    }
}

fn device(name: &str, id: &dyn Aml, resources: Vec<&dyn Aml>) -> Device {
    let mut bytes = Vec::new();
    aml::Device::new(
        Path::new(name),
        vec![
            &aml::Name::new(Path::new("_HID"), id),
            &aml::Name::new(Path::new("_UID"), &aml::Zero {}),
            &aml::Name::new(Path::new("_STA"), &0x0fu8),
            &aml::Name::new(Path::new("_CRS"), &aml::ResourceTemplate::new(resources)),
        ],
    )
    .to_aml_bytes(&mut bytes);
    Device(bytes)
}

/// The serial console. Its interrupt is declared shareable, though nothing shares it: Linux then masks the
/// interrupt while it tests whether the port raises its transmit interrupt again. If the interrupt were
/// not masked, a handler on another CPU could clear it during the test, and the driver would then poll
/// the port every 250 ms, with five exits each time.
fn serial() -> Device {
    let interrupt = aml::Interrupt::new(true, true, false, true, layout::SERIAL_GSI);
    device(
        "COM1",
        &EISAName::new("PNP0501"),
        vec![&interrupt, &aml::IO::new(layout::SERIAL_PORT, layout::SERIAL_PORT, 1, 8)],
    )
}

fn panic() -> Device {
    device("PEVT", &"QEMU0001", vec![&aml::IO::new(layout::PVPANIC_PORT, layout::PVPANIC_PORT, 1, 1)])
}

#[expect(clippy::cast_possible_truncation, reason = "the layout puts the device below 4 GiB")]
fn virtio(window: u64) -> Device {
    let registers = aml::Memory32Fixed::new(true, layout::VIRTIO as u32, layout::VIRTIO_SIZE as u32);
    let interrupt = aml::Interrupt::new(true, true, false, false, layout::VIRTIO_GSI);
    let doorbell = aml::Memory32Fixed::new(true, layout::DOORBELL as u32, layout::DOORBELL_SIZE as u32);
    let window = (window != 0).then(|| aml::Memory32Fixed::new(true, layout::WINDOW as u32, window as u32));
    let mut resources: Vec<&dyn Aml> = vec![&registers, &interrupt, &doorbell];
    if let Some(window) = &window {
        resources.push(window);
    }
    device("VPMU", &"LNRO0005", resources)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sum(bytes: &[u8]) -> u8 {
        bytes.iter().fold(0, |sum, byte| sum.wrapping_add(*byte))
    }

    fn u32_at(bytes: &[u8], offset: usize) -> usize {
        let word: [u8; 4] = bytes[offset..offset + 4].try_into().expect("four bytes");
        u32::from_le_bytes(word) as usize
    }

    #[test]
    fn every_table_sums_to_zero() {
        for vcpus in [1, 2, 254] {
            let (bytes, offsets) = build(&Machine { vcpus, virtio: true, window: 4096, pmu: false });
            assert_eq!(sum(&bytes[..20]), 0, "RSDP, first part");
            assert_eq!(sum(&bytes[..Rsdp::len()]), 0, "RSDP");
            assert_eq!(offsets.len(), 4);
            for offset in offsets {
                let length = u32_at(&bytes, offset + 4);
                let name = String::from_utf8_lossy(&bytes[offset..offset + 4]);
                assert_eq!(sum(&bytes[offset..offset + length]), 0, "{name}");
            }
        }
    }

    #[test]
    fn largest_machine_fits_below_the_reset_vector() {
        let (bytes, _) = build(&Machine { vcpus: 254, virtio: true, window: 4096, pmu: false });
        assert!((bytes.len() as u64) < layout::RESET_VECTOR - layout::ACPI);
    }

    #[test]
    fn pointers_lead_to_the_tables() {
        let (bytes, _) = build(&Machine { vcpus: 2, virtio: false, window: 0, pmu: false });
        let base = usize::try_from(layout::ACPI).expect("fits");
        let xsdt = u32_at(&bytes, 24) - base;
        assert_eq!(&bytes[xsdt..xsdt + 4], b"XSDT");
        let fadt = u32_at(&bytes, xsdt + 36) - base;
        assert_eq!(&bytes[fadt..fadt + 4], b"FACP");
        let madt = u32_at(&bytes, xsdt + 44) - base;
        assert_eq!(&bytes[madt..madt + 4], b"APIC");
        let dsdt = u32_at(&bytes, fadt + 140) - base;
        assert_eq!(&bytes[dsdt..dsdt + 4], b"DSDT");
    }

    #[test]
    fn serial_interrupt_is_shareable_and_edge_triggered() {
        let (bytes, _) = build(&Machine { vcpus: 2, virtio: false, window: 0, pmu: false });
        // An extended interrupt descriptor: tag, length, flags, one interrupt (ACPI 6.4.3.6).
        let descriptor = bytes
            .windows(9)
            .find(|at| at[..3] == [0x89, 6, 0] && u32_at(at, 5) == layout::SERIAL_GSI as usize)
            .expect("the DSDT describes the serial interrupt");
        let (consumer, edge, shared) = (1, 1 << 1, 1 << 3);
        assert_eq!(descriptor[3], consumer | edge | shared);
    }

    #[test]
    fn absent_device_is_not_listed() {
        let names = |virtio, window, what: &[u8]| {
            let machine = Machine { vcpus: 1, virtio, window, pmu: false };
            let (bytes, _) = build(&machine);
            bytes.windows(what.len()).any(|part| part == what)
        };
        assert!(names(true, 0, b"LNRO0005"));
        assert!(!names(false, 0, b"LNRO0005"));
        let window = u32::try_from(layout::WINDOW).expect("below 4 GiB");
        let window = window.to_le_bytes();
        assert!(names(true, 4096, &window));
        assert!(!names(true, 0, &window) && !names(false, 4096, &window));
    }
}
