//! The device's interrupt, as the guest's kernel counts and routes it.

use std::fs;

use crate::fields::IP;
use crate::pages::{Pages, READ_WRITE};
use crate::raw::{Device, How, MARK_ANY, waking};
use crate::{Fallible, Outcome};

/// Returns the number of the interrupt that wakes readers up, and the number of times that each CPU has taken it.
fn line() -> Fallible<(u32, Vec<u64>)> {
    // The vPMU is the virtio device that is bound to the driver `virtio_pmu`.
    let drivers = fs::read_dir("/sys/bus/virtio/drivers/virtio_pmu")?;
    let device = drivers
        .filter_map(Result::ok)
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .find(|name| name.starts_with("virtio"))
        .ok_or("no device is bound to the driver")?;
    let table = fs::read_to_string("/proc/interrupts")?;
    // On PCI, each queue has its own interrupt, and that of the event queue wakes readers up.
    let names = [device.clone(), format!("{device}-event")];
    let line = table
        .lines()
        .find(|line| line.split_whitespace().last().is_some_and(|last| names.iter().any(|name| name == last)))
        .ok_or_else(|| format!("{device} is not in:\n{table}"))?;
    let (number, rest) = line.split_once(':').ok_or("no number")?;
    let counts = rest.split_whitespace().map_while(|word| word.parse::<u64>().ok());
    Ok((number.trim().parse()?, counts.collect()))
}

/// Returns the number of the device's interrupts so far, on all CPUs.
pub(crate) fn taken() -> Fallible<u64> {
    line().map(|(_, taken)| taken.iter().sum())
}

/// Like [`bind`], but also causes interrupts until one of them is taken on `cpu`. The first interrupt after a change is
/// still taken on the old CPU, and others wait until it is handled there.
pub(crate) fn move_to(cpu: usize) -> Outcome {
    const ATTEMPTS: usize = 1000;
    bind(cpu)?;
    let device = Device::open()?;
    let attr = waking(device.marks(MARK_ANY, 1, IP), 1);
    let event = device.open_event(&attr, How::OWN)?;
    let mut ring = Pages::map(&event, 1, READ_WRITE)?;
    event.enable(0)?;
    let taken_there = || -> Fallible<u64> {
        let (_, taken) = line()?;
        Ok(taken.get(cpu).copied().unwrap_or(0))
    };
    let before = taken_there()?;
    for _ in 0..ATTEMPTS {
        device.mark(0)?;
        event.poll(-1)?;
        ring.skip();
        if taken_there()? > before {
            return Ok(());
        }
    }
    Err(format!("CPU {cpu} took none of {ATTEMPTS} interrupts").into())
}

/// Binds the interrupt to `cpu`. The interrupt handler then causes exits only on that CPU, two for each interrupt.
pub(crate) fn bind(cpu: usize) -> Outcome {
    let (number, _) = line()?;
    let mask = format!("{:x}", 1 << cpu);
    Ok(fs::write(format!("/proc/irq/{number}/smp_affinity"), mask)?)
}
