//! The device tree, which describes the machine to the guest.

use vm_fdt::{Error, FdtWriter};

use super::cpus::mpidr;
use super::layout;
use crate::machine::Machine;

/// The phandle of the interrupt controller, the only node that other nodes refer to.
const GIC: u32 = 1;

/// Interrupt types: devices use shared interrupts (SPI), and each vCPU has private interrupts (PPI).
const SHARED: u32 = 0;
const OWN: u32 = 1;
/// Trigger types of interrupts.
const EDGE: u32 = 1;
const LEVEL: u32 = 4;

/// The input clock of a 16550, in Hz.
const SERIAL_CLOCK: u32 = 1_843_200;

/// Number of 32-bit cells in an address and in a size.
const CELLS: u32 = 2;

/// Builds the device tree of `machine`, which has `memory` bytes of memory. `initramfs` has the address and the size of
/// the initramfs.
pub(super) fn build(
    machine: &Machine,
    memory: u64,
    cmdline: &str,
    initramfs: Option<(u64, u64)>,
) -> Result<Vec<u8>, Error> {
    let mut tree = FdtWriter::new()?;
    let root = tree.begin_node("")?;
    tree.property_string("compatible", "linux,dummy-virt")?;
    tree.property_u32("#address-cells", CELLS)?;
    tree.property_u32("#size-cells", CELLS)?;
    tree.property_u32("interrupt-parent", GIC)?;
    chosen(&mut tree, cmdline, initramfs)?;
    let node = tree.begin_node(&named("memory", layout::RAM))?;
    tree.property_string("device_type", "memory")?;
    tree.property_array_u64("reg", &[layout::RAM, memory])?;
    tree.end_node(node)?;
    processors(&mut tree, machine)?;
    interrupt_controller(&mut tree, machine)?;
    let node = tree.begin_node("psci")?;
    compatible(&mut tree, &["arm,psci-1.0", "arm,psci-0.2"])?;
    tree.property_string("method", "hvc")?;
    tree.end_node(node)?;
    let node = tree.begin_node("timer")?;
    tree.property_string("compatible", "arm,armv8-timer")?;
    let timers = layout::TIMER_PPIS.map(|timer| [OWN, timer, LEVEL]);
    tree.property_array_u32("interrupts", timers.as_flattened())?;
    tree.property_null("always-on")?;
    tree.end_node(node)?;
    if machine.pmu {
        let node = tree.begin_node("pmu")?;
        tree.property_string("compatible", "arm,armv8-pmuv3")?;
        tree.property_array_u32("interrupts", &[OWN, layout::PMU_PPI, LEVEL])?;
        tree.end_node(node)?;
    }
    devices(&mut tree, machine)?;
    tree.end_node(root)?;
    tree.finish()
}

fn named(kind: &str, address: u64) -> String {
    format!("{kind}@{address:x}")
}

fn compatible(tree: &mut FdtWriter, names: &[&str]) -> Result<(), Error> {
    let names = names.iter().map(|&name| name.to_owned());
    tree.property_string_list("compatible", names.collect())
}

fn chosen(tree: &mut FdtWriter, cmdline: &str, initramfs: Option<(u64, u64)>) -> Result<(), Error> {
    let node = tree.begin_node("chosen")?;
    tree.property_string("bootargs", cmdline)?;
    let console = format!("/{}", named("serial", layout::SERIAL));
    tree.property_string("stdout-path", &console)?;
    if let Some((start, size)) = initramfs {
        tree.property_u64("linux,initrd-start", start)?;
        tree.property_u64("linux,initrd-end", start + size)?;
    }
    tree.end_node(node)
}

fn processors(tree: &mut FdtWriter, machine: &Machine) -> Result<(), Error> {
    let all = tree.begin_node("cpus")?;
    tree.property_u32("#address-cells", CELLS)?;
    tree.property_u32("#size-cells", 0)?;
    for index in 0..machine.vcpus {
        let affinity = mpidr(index);
        let node = tree.begin_node(&named("cpu", affinity))?;
        tree.property_string("device_type", "cpu")?;
        tree.property_string("compatible", "arm,armv8")?;
        tree.property_string("enable-method", "psci")?;
        tree.property_u64("reg", affinity)?;
        tree.end_node(node)?;
    }
    tree.end_node(all)
}

fn interrupt_controller(tree: &mut FdtWriter, machine: &Machine) -> Result<(), Error> {
    let node = tree.begin_node(&named("interrupt-controller", layout::GIC_DISTRIBUTOR))?;
    tree.property_string("compatible", "arm,gic-v3")?;
    tree.property_null("interrupt-controller")?;
    tree.property_u32("#interrupt-cells", 3)?;
    let redistributors = u64::from(machine.vcpus) * layout::GIC_REDISTRIBUTOR_SIZE;
    let places =
        [[layout::GIC_DISTRIBUTOR, layout::GIC_DISTRIBUTOR_SIZE], [layout::GIC_REDISTRIBUTORS, redistributors]];
    tree.property_array_u64("reg", places.as_flattened())?;
    tree.property_phandle(GIC)?;
    tree.end_node(node)
}

fn devices(tree: &mut FdtWriter, machine: &Machine) -> Result<(), Error> {
    let node = tree.begin_node(&named("serial", layout::SERIAL))?;
    tree.property_string("compatible", "ns16550a")?;
    tree.property_array_u64("reg", &[layout::SERIAL, layout::DEVICE_SIZE])?;
    tree.property_array_u32("interrupts", &[SHARED, layout::SERIAL_GSI, EDGE])?;
    tree.property_u32("clock-frequency", SERIAL_CLOCK)?;
    tree.end_node(node)?;

    let node = tree.begin_node(&named("pvpanic", layout::PVPANIC))?;
    tree.property_string("compatible", "qemu,pvpanic-mmio")?;
    tree.property_array_u64("reg", &[layout::PVPANIC, layout::DEVICE_SIZE])?;
    tree.end_node(node)?;

    if machine.virtio {
        let node = tree.begin_node(&named("virtio_mmio", layout::VIRTIO))?;
        tree.property_string("compatible", "virtio,mmio")?;
        tree.property_array_u64("reg", &[layout::VIRTIO, layout::VIRTIO_SIZE])?;
        tree.property_array_u32("interrupts", &[SHARED, layout::VIRTIO_GSI, EDGE])?;
        tree.property_null("dma-coherent")?;
        tree.end_node(node)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(machine: Machine) -> Vec<u8> {
        build(&machine, 1 << 30, "quiet", Some((layout::KERNEL, 5))).expect("a tree")
    }

    const LARGEST: Machine = Machine { vcpus: 254, virtio: true, window: layout::WINDOW_MAX, pmu: true };

    fn has(tree: &[u8], text: &str) -> bool {
        tree.windows(text.len()).any(|bytes| bytes == text.as_bytes())
    }

    #[test]
    fn largest_machine_has_room_for_its_tree() {
        assert!((tree(LARGEST).len() as u64) < layout::FDT_MAX);
    }

    #[test]
    fn tree_names_exactly_the_devices_of_the_machine() {
        let all = tree(LARGEST);
        let least = tree(Machine { vcpus: 1, virtio: false, window: 0, pmu: false });
        for (name, always) in [
            ("ns16550a", true),
            ("arm,gic-v3", true),
            ("qemu,pvpanic-mmio", true),
            ("virtio,mmio", false),
            ("arm,armv8-pmuv3", false),
        ] {
            assert!(has(&all, name), "{name}");
            assert_eq!(has(&least, name), always, "{name}");
        }
    }
}
