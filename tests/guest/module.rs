//! Loading and unloading of the module. Unloading must be refused while the module is in use, and must otherwise
//! succeed without a fault.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use vpmu_client::Vpmu;
use vpmu_client::perf::PerfPmu;

use crate::cpu;
use crate::ensure::{ensure, ensure_eq};
use crate::kernel_log;
use crate::sampling::{drain, sampling};
use crate::{Fallible, Outcome};

const GROUP: &str = "module";

/// The module's file in the guest's initramfs.
pub(crate) const FILE: &str = "/lib/modules/virtio_pmu.ko";

/// Whether a module command succeeded.
pub(crate) fn run(command: &str, what: &str) -> Fallible<bool> {
    let status = Command::new(command).arg(what).stderr(Stdio::null()).status()?;
    Ok(status.success())
}

#[apply(guest_test)]
fn unloading_waits_for_the_last_user() -> Outcome {
    {
        let vpmu = Vpmu::open()?;
        ensure!(!run("rmmod", "virtio_pmu")?, "the module was unloaded while /dev/vpmu was open");
        let event = vpmu.open_event(&vpmu.attr("mark=1")?)?;
        event.enable()?;
        vpmu.mark(1)?;
        drop(vpmu);
        ensure!(!run("rmmod", "virtio_pmu")?, "the module was unloaded while an event was open");
        ensure_eq!(event.read()?.value, 1, "the count after the refused unload");
    }
    {
        let pmu = PerfPmu::open()?;
        let event = pmu.open_event(&pmu.attr(cpu::PORT_EXITS)?)?;
        event.enable()?;
        ensure!(!run("rmmod", "virtio_pmu")?, "the module was unloaded while a perf event was open");
    }
    let ring = {
        let vpmu = Vpmu::open()?;
        let event = vpmu.open_event(&vpmu.attr("mark=1")?.sampling(1))?;
        event.map(1)?
    };
    ensure!(!run("rmmod", "virtio_pmu")?, "the module was unloaded while a ring was mapped");
    drop(ring);
    Ok(())
}

/// Like udev, the test passes only the device's modalias to modprobe.
#[apply(guest_test)]
fn module_is_loaded_by_the_devices_modalias() -> Outcome {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease")?;
    let directory = Path::new("/lib/modules").join(release.trim_end());
    fs::create_dir_all(&directory)?;
    fs::copy(FILE, directory.join("virtio_pmu.ko"))?;
    ensure!(run("depmod", "-a")?, "depmod wrote no index of modules");
    let devices: Vec<_> = fs::read_dir("/sys/bus/virtio/devices")?.collect::<Result<_, _>>()?;
    ensure_eq!(devices.len(), 1, "the machine's virtio devices");
    let modalias = fs::read_to_string(devices[0].path().join("modalias"))?;

    ensure!(run("rmmod", "virtio_pmu")?, "the module was not unloaded");
    ensure!(!run("modprobe", "virtio:d00000099v00000000")?, "a module was loaded for a device that does not exist");
    ensure!(Vpmu::open().is_err(), "the device is still there");
    ensure!(run("modprobe", modalias.trim_end())?, "modprobe loaded no module for {modalias}");
    Vpmu::open()?;
    Ok(())
}

#[apply(guest_test)]
fn module_reloads_clean() -> Outcome {
    for round in 0..3 {
        ensure!(run("rmmod", "virtio_pmu")?, "round {round}: the unused module was not unloaded");
        ensure!(Vpmu::open().is_err(), "round {round}: the device is still there");
        ensure!(run("insmod", FILE)?, "round {round}: the module was not loaded again");
        let vpmu = Vpmu::open()?;
        let (event, mut ring) = sampling(&vpmu, &vpmu.attr("mark=2")?.sampling(2), 1)?;
        for _ in 0..9 {
            vpmu.mark(2)?;
        }
        event.disable()?;
        let (samples, lost) = drain(&mut ring)?;
        ensure_eq!((event.read()?.value, samples.len(), lost), (9, 4, 0), "round {round}: count, samples and losses");
    }
    kernel_log::ensure_no_fault()
}
