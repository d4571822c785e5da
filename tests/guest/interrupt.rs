//! The device's interrupt, as the guest's kernel counts and routes it.

use std::error::Error;
use std::fs;

/// Returns the interrupt's number, and the number of times that it has been taken on all CPUs.
fn line() -> Result<(u32, u64), Box<dyn Error>> {
    // The vPMU is the virtio device that is bound to the driver `virtio_pmu`.
    let drivers = fs::read_dir("/sys/bus/virtio/drivers/virtio_pmu")?;
    let device = drivers
        .filter_map(Result::ok)
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .find(|name| name.starts_with("virtio"))
        .ok_or("no device is bound to the driver")?;
    let table = fs::read_to_string("/proc/interrupts")?;
    let line = table
        .lines()
        .find(|line| line.split_whitespace().last() == Some(&device))
        .ok_or_else(|| format!("{device} is not in:\n{table}"))?;
    let (number, rest) = line.split_once(':').ok_or("no number")?;
    let counts = rest
        .split_whitespace()
        .map_while(|word| word.parse::<u64>().ok());
    Ok((number.trim().parse()?, counts.sum()))
}

/// Returns the number of the device's interrupts so far, on all CPUs.
pub(crate) fn taken() -> Result<u64, Box<dyn Error>> {
    line().map(|(_, taken)| taken)
}

/// Binds the interrupt to `cpu`. The interrupt handler then causes exits only on that CPU, two for each interrupt.
pub(crate) fn bind(cpu: usize) -> Result<(), Box<dyn Error>> {
    let (number, _) = line()?;
    let mask = format!("{:x}", 1 << cpu);
    Ok(fs::write(format!("/proc/irq/{number}/smp_affinity"), mask)?)
}
