//! AUX areas of traces that were opened with `perf_event_open(2)`. For these traces, perf core writes the AUX records,
//! not the device.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread;

use perf_event_open_sys::bindings::perf_event_attr;

use crate::arch::{OWN_IN_USER_MODE, mmio_pio};
use crate::areas::{self, Area, announce, contiguous, reported};
use crate::aux_mapping::ports;
use crate::beside::{making_exits, work_beside};
use crate::ensure::{ensure, ensure_eq};
use crate::output_mapping::untouched;
use crate::packets::{Ledger, exits};
use crate::pages::{Pages, READ_WRITE};
use crate::raw::{
    Device, EXIT_PORT, Event, How, KIND_EXIT_TRACE, KIND_MARK, KIND_SAMPLE_TRACE, PACE_EXITS, PAGE, aux_watermark,
    kernels, refused, sampling, silent,
};
use crate::{Fallible, Outcome, cpu};

const GROUP: &str = "aux";

pub(crate) const P: u64 = PAGE as u64;

fn sysfs(pmu: &str) -> PathBuf {
    Path::new("/sys/bus/event_source/devices").join(pmu)
}

fn pmu_type(pmu: &str) -> Fallible<u32> {
    Ok(fs::read_to_string(sysfs(pmu).join("type"))?.trim().parse()?)
}

/// Returns an attr for the PMU `vpmu_trace`. The event starts disabled.
pub(crate) fn attr(device: &Device, kind: u64, config: u64) -> Fallible<perf_event_attr> {
    Ok(perf_event_attr { type_: pmu_type("vpmu_trace")?, ..silent(device.attr(kind, config)) })
}

/// Returns the attr for a trace of port accesses by programs. The trace starts disabled.
pub(crate) fn port_trace(device: &Device) -> Fallible<perf_event_attr> {
    let mut attr = attr(device, KIND_EXIT_TRACE, EXIT_PORT)?;
    attr.set_exclude_kernel(OWN_IN_USER_MODE.into());
    Ok(attr)
}

/// A trace whose ring and AUX area are managed by perf core.
pub(crate) struct Kept {
    pub(crate) event: Event,
    pub(crate) ring: Pages,
    pub(crate) area: Area,
    pub(crate) ledger: Ledger,
    pub(crate) attr: perf_event_attr,
    pub(crate) reported: u64,
}

impl Kept {
    pub(crate) fn open(attr: perf_event_attr, how: How<'_>, pages: usize, protection: i32) -> std::io::Result<Self> {
        let event = kernels(&attr, how)?;
        let ring = Pages::map(&event, 4, READ_WRITE)?;
        let area = Area::map(&event, &ring, pages, protection)?;
        Ok(Self { event, ring, area, ledger: Ledger::default(), attr, reported: 0 })
    }

    /// Takes the exits from the area, and the records about the area's chunks from the ring. Each chunk must begin
    /// where the previous one ended, and the last must end at the head. If a chunk ends during this call, the head
    /// moves. Returns the exits, and the flags of the chunks. The caller must run on the trace's CPU, because perf core
    /// writes a chunk's record before it moves the head. So a reader on another CPU could see the record before the new
    /// head.
    pub(crate) fn take(&mut self) -> Result<(Vec<crate::packets::Exit>, Vec<u64>), String> {
        let before = areas::head(&self.ring);
        let packets = self.area.take(&self.ring)?;
        self.ledger.follow(&packets)?;
        let reported = reported(&self.ring.take()?, &self.attr)?;
        self.reported = contiguous(&reported.chunks, self.reported)?;
        let heads = before..=areas::head(&self.ring);
        if !heads.contains(&self.reported) {
            return Err(format!("the chunks end at {}, the head is in {heads:?}", self.reported));
        }
        Ok((exits(&packets), reported.flags()))
    }
}

#[apply(guest_test)]
fn perf_lists_the_traces() -> Outcome {
    let pmu = sysfs("vpmu_trace");
    let kinds = |pmu: &str| -> Fallible<Vec<u64>> {
        let mut kinds = Vec::new();
        for file in fs::read_dir(sysfs(pmu).join("events"))? {
            let file = file?;
            let terms = fs::read_to_string(file.path())?;
            // The directory also contains an event's unit and scale files, which have no `kind` term.
            let kind = terms.trim().split(',').find_map(|term| term.strip_prefix("kind=0x"));
            if let Some(kind) = kind {
                kinds.push(u64::from_str_radix(kind, 16)?);
            }
        }
        Ok(kinds)
    };
    let traces = kinds("vpmu_trace")?;
    ensure!(
        traces.contains(&KIND_EXIT_TRACE) && traces.contains(&KIND_SAMPLE_TRACE),
        "vpmu_trace lacks a kind of trace: {traces:x?}"
    );
    ensure!(
        traces.iter().all(|kind| (0x105..=0x107).contains(kind)),
        "vpmu_trace has a kind that is not a trace: {traces:x?}"
    );
    let others = kinds("vpmu")?;
    ensure!(
        !others.is_empty() && others.iter().all(|kind| !traces.contains(kind)),
        "vpmu has no kinds, or a kind of vpmu_trace: {others:x?}"
    );
    for format in ["event", "kind"] {
        let text = fs::read_to_string(pmu.join("format").join(format))?;
        ensure!(text.starts_with("config:"), "format/{format} is {text:?}");
    }
    Ok(())
}

#[apply(guest_test)]
fn each_pmu_takes_its_own_events() -> Outcome {
    let device = Device::open()?;
    let open = |attr: &perf_event_attr| refused(kernels(attr, How::OWN));
    ensure_eq!(open(&port_trace(&device)?), None, "errno of a valid trace");
    ensure_eq!(open(&attr(&device, KIND_MARK, 3)?), Some(libc::ENOENT), "an event of marks of the PMU vpmu_trace");
    ensure_eq!(open(&device.attr(KIND_EXIT_TRACE, EXIT_PORT)), Some(libc::ENOENT), "a trace of the PMU vpmu");
    ensure!(open(&attr(&device, KIND_EXIT_TRACE, 77)?).is_some(), "a trace with an unknown config was accepted");
    ensure!(
        open(&attr(&device, KIND_SAMPLE_TRACE, PACE_EXITS)?).is_some(),
        "a trace of samples without a period was accepted"
    );
    let mut frequency = sampling(attr(&device, KIND_SAMPLE_TRACE, PACE_EXITS)?, 100, 0);
    frequency.set_freq(1);
    ensure!(open(&frequency).is_some(), "a trace with a frequency was accepted");
    // perf core never runs a trace without an area.
    let event = kernels(&port_trace(&device)?, How::OWN)?;
    cpu::allow_ports()?;
    event.enable(0)?;
    ports(10);
    event.disable(0)?;
    ensure_eq!(event.count()?, 0, "bytes counted by a trace without an area");
    Ok(())
}

#[apply(guest_test)]
fn perf_traces_a_task() -> Outcome {
    const MADE: u64 = 500;
    let device = Device::open()?;
    cpu::allow_ports()?;
    let attr = port_trace(&device)?;
    let mut kept = Kept::open(attr, How::OWN, 32, READ_WRITE)?;
    // A disabled trace records nothing.
    ports(3);
    kept.event.enable(0)?;
    for hop in 0..10 {
        cpu::pin(hop % 2)?;
        mmio_pio::out_loop(MADE / 10);
    }
    kept.event.disable(0)?;
    ports(3);
    let packets = kept.area.take(&kept.ring)?;
    kept.ledger.follow(&packets)?;
    let own = exits(&packets);
    ensure_eq!(own.len() as u64, MADE, "exits");
    let who = (std::process::id(), cpu::thread_id());
    for (number, exit) in own.iter().enumerate() {
        ensure_eq!(exit.ip, mmio_pio::out_loop_ip(), "the IP");
        ensure_eq!(exit.qualification, u64::from(cpu::IDLE_PORT), "the port");
        ensure_eq!(exit.pid_tid, who, "the task");
        ensure_eq!(exit.vcpu as usize, number / 50 % 2, "the vCPU of exit {number}");
    }
    let reported = reported(&kept.ring.take()?, &attr)?;
    let head = areas::head(&kept.ring);
    ensure_eq!(contiguous(&reported.chunks, 0)?, head, "the end of the last chunk");
    ensure!(reported.flags().iter().all(|&flags| flags == 0), "a chunk has flags: {reported:x?}");
    ensure_eq!(reported.starts, [who], "the tasks whose traces started");
    ensure_eq!(kept.event.count()?, head, "bytes counted");
    Ok(())
}

#[apply(guest_test)]
fn perf_traces_a_cpu() -> Outcome {
    const MADE: u64 = 300;
    let device = Device::open()?;
    let attr = port_trace(&device)?;
    let mut both =
        [Kept::open(attr, How::on_cpu(0), 32, READ_WRITE)?, Kept::open(attr, How::on_cpu(1), 32, READ_WRITE)?];
    both[0].event.enable(0)?;
    both[1].event.enable(0)?;
    let made = thread::scope(|scope| {
        let makers = [0, 1].map(|cpu| {
            scope.spawn(move || -> std::io::Result<()> {
                cpu::pin(cpu)?;
                cpu::allow_ports()?;
                mmio_pio::out_loop(MADE + cpu as u64);
                Ok(())
            })
        });
        makers.into_iter().try_for_each(|maker| {
            maker.join().map_err(|_| "a maker panicked".to_owned())?.map_err(|error| error.to_string())
        })
    });
    made?;
    for (vcpu, kept) in (0..).zip(&mut both) {
        kept.event.disable(0)?;
        let (exits, _) = kept.take()?;
        ensure!(exits.iter().all(|exit| exit.vcpu == vcpu), "the trace of vCPU {vcpu} has an exit of another vCPU");
        let own = exits.iter().filter(|e| e.ip == mmio_pio::out_loop_ip());
        ensure_eq!(own.count() as u64, MADE + u64::from(vcpu), "exits of vCPU {vcpu}");
        ensure_eq!(kept.event.count()?, areas::head(&kept.ring), "bytes counted");
    }
    Ok(())
}

#[apply(guest_test)]
fn perfs_maps_are_refused_as_ever() -> Outcome {
    let device = Device::open()?;
    let attr = port_trace(&device)?;
    let event = kernels(&attr, How::OWN)?;
    ensure_eq!(
        refused(Area::map_raw(&event, PAGE, READ_WRITE, 2 * P)),
        Some(libc::EINVAL),
        "an area mapped before the ring"
    );
    let ring = Pages::map(&event, 1, READ_WRITE)?;
    let most = u64::from(device.info.max_aux_pages);
    // (what, offset announced, bytes announced, pages, offset, error)
    let cases = [
        ("nothing announced", 0, 0, 4, 2 * P, libc::EINVAL),
        ("in the data", P, 4 * P, 4, P, libc::EINVAL),
        ("a different size", 2 * P, 4 * P, 2, 2 * P, libc::EINVAL),
        ("three pages", 2 * P, 3 * P, 3, 2 * P, libc::EINVAL),
        ("too many", 2 * P, 2 * most * P, 2 * most, 2 * P, libc::ENOMEM),
    ];
    for (what, offset, bytes, pages, at, errno) in cases {
        announce(&ring, offset, bytes);
        let map = Area::map_raw(&event, usize::try_from(pages * P)?, READ_WRITE, at);
        ensure_eq!(refused(map), Some(errno), "{what}");
    }
    let first = Area::map(&event, &ring, 4, READ_WRITE)?;
    drop(Area::map(&event, &ring, 4, READ_WRITE)?);
    announce(&ring, 2 * P, 8 * P);
    ensure_eq!(
        refused(Area::map_raw(&event, 8 * PAGE, READ_WRITE, 2 * P)),
        Some(libc::EINVAL),
        "a second map of a different size"
    );
    drop(first);
    Area::map(&event, &ring, 8, READ_WRITE)?;
    Ok(())
}

#[apply(guest_test)]
fn perfs_area_is_unmapped_while_the_host_writes() -> Outcome {
    let device = Device::open()?;
    let attr = aux_watermark(port_trace(&device)?, 512);
    cpu::pin(0)?;
    work_beside(1, making_exits, |other| {
        (0..24_usize).try_for_each(|round| -> Outcome {
            let pages = 1 << (round % 4);
            let Kept { event, ring, area, .. } = Kept::open(attr, How::on_cpu(1), pages, READ_WRITE)?;
            event.enable(0)?;
            while area.word(0) == 0 && !other.has_ended() {
                std::hint::spin_loop();
            }
            ensure!(area.word(0) != 0, "round {round}: the host did not write to the area");
            match round % 3 {
                0 => drop((event, ring, area)),
                1 => drop((area, event, ring)),
                _ => drop((ring, area, event)),
            }
            untouched(pages, round)
        })
    })?;
    Ok(())
}
