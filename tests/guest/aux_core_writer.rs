//! AUX areas that perf core manages and the device writes: records of chunks, readers that stall, and snapshots.

use crate::aux_core::{Kept, P, attr, port_trace};
use std::thread;

use crate::arch::Known;
use crate::arch::mmio_pio;
use crate::areas::{self, OVERWRITE, PARTIAL, TRUNCATED, reported};
use crate::aux_mapping::ports;
use crate::ensure::{ensure, ensure_eq};
use crate::known_code;
use crate::packets::{EXIT_BYTES, SYNC_LOSS, exits, samples, syncs};
use crate::pages::{AUX_TAIL, Pages, READ as READ_ONLY, READ_WRITE};
use crate::raw::{Device, How, KIND_SAMPLE_TRACE, PACE_EXITS, aux_watermark, kernels, refused, sampling};
use crate::{Outcome, cpu};

const GROUP: &str = "aux";

const LONG: i32 = 10_000;

#[apply(guest_test)]
fn perfs_reader_keeps_up() -> Outcome {
    let device = Device::open()?;
    cpu::allow_ports()?;
    cpu::pin(1)?;
    let attr = port_trace(&device)?;
    let mut kept = Kept::open(attr, How::on_cpu(1), 2, READ_WRITE)?;
    let mut made = 0;
    for burst in (0..60).map(|round| 1 + round * 29 % 100) {
        kept.event.enable(0)?;
        ports(burst);
        kept.event.disable(0)?;
        made += burst;
        let (exits, flags) = kept.take()?;
        ensure_eq!(exits.len() as u64, burst, "exits of a burst");
        ensure!(flags.iter().all(|&flags| flags == 0), "a chunk has flags: {flags:x?}");
    }
    ensure_eq!(kept.ledger.packets, made, "exits");
    ensure_eq!(kept.event.count()?, areas::head(&kept.ring), "bytes counted");
    ensure!(kept.reported > 10 * kept.area.size(), "the area wrapped at most ten times");
    Ok(())
}

#[apply(guest_test)]
fn watermark_wakes_perfs_reader() -> Outcome {
    let device = Device::open()?;
    cpu::allow_ports()?;
    cpu::pin(1)?;
    let attr = aux_watermark(port_trace(&device)?, 2048);
    let mut kept = Kept::open(attr, How::on_cpu(1), 4, READ_WRITE)?;
    kept.event.enable(0)?;
    let mut made = 0;
    for _ in 0..20 {
        // The watermark is the size of 32 packets, so 40 exits reach it regardless of where the previous chunk ended.
        ports(40);
        made += 40;
        ensure_eq!(kept.event.poll(LONG)?, libc::POLLIN, "poll past the watermark");
        let (exits, flags) = kept.take()?;
        ensure!(!exits.is_empty(), "a wakeup without new exits");
        ensure!(flags.iter().all(|&flags| flags == 0), "a chunk has flags: {flags:x?}");
    }
    kept.event.disable(0)?;
    kept.take()?;
    ensure_eq!(kept.ledger.packets, made, "exits");
    Ok(())
}

#[apply(guest_test)]
fn stalled_reader_disables_perfs_event() -> Outcome {
    let device = Device::open()?;
    cpu::allow_ports()?;
    cpu::pin(1)?;
    let attr = port_trace(&device)?;
    let mut kept = Kept::open(attr, How::on_cpu(1), 1, READ_WRITE)?;
    kept.event.enable(0)?;
    ports(300);
    ensure_eq!(kept.event.poll(LONG)?, libc::POLLIN, "poll of a full area");
    let (exits, flags) = kept.take()?;
    ensure!(exits.len() as u64 >= P / EXIT_BYTES / 2, "only {} exits in a full area", exits.len());
    ensure_eq!(flags.last().map(|flags| flags & TRUNCATED), Some(TRUNCATED), "flags {flags:x?} of the last chunk");
    // perf core has disabled the event, so nothing is written even though the area has room again.
    ports(50);
    let count = kept.event.count()?;
    ports(50);
    ensure_eq!(kept.event.count()?, count, "bytes of a disabled event");
    ensure_eq!(areas::head(&kept.ring), kept.reported, "the head of a disabled event's area");
    kept.event.enable(0)?;
    ports(5);
    kept.event.disable(0)?;
    let packets = kept.area.take(&kept.ring)?;
    kept.ledger.follow(&packets)?;
    ensure_eq!(crate::packets::exits(&packets).len(), 5, "exits after the event was enabled again");
    let lost = syncs(&packets).iter().any(|sync| sync.flags & SYNC_LOSS != 0);
    ensure!(lost && kept.ledger.lost > 0, "nothing was lost, or no sync reports the loss");
    let reported = reported(&kept.ring.take()?, &kept.attr)?;
    ensure!(reported.flags().iter().any(|flags| flags & PARTIAL != 0), "no chunk has the flag PARTIAL: {reported:x?}");
    let produced = areas::head(&kept.ring) + kept.ledger.lost;
    ensure_eq!(kept.event.count()?, produced, "bytes written and lost");
    Ok(())
}

#[apply(guest_test)]
fn area_found_full_disables_perfs_event() -> Outcome {
    const PACKET: u64 = 64;
    let device = Device::open()?;
    cpu::allow_ports()?;
    cpu::pin(1)?;
    // The trace writes fewer bytes than this watermark, so only a full area can wake the reader.
    let attr = aux_watermark(port_trace(&device)?, 1 << 20);
    let mut kept = Kept::open(attr, How::OWN, 1, READ_WRITE)?;
    for round in 0..3 {
        // The remaining space has the size of a packet, but perf core keeps one byte free, so no packet fits.
        let full = kept.reported.wrapping_add(PACKET).wrapping_sub(P);
        kept.ring.store_release(AUX_TAIL, full);
        kept.event.enable(0)?;
        ensure_eq!(kept.event.poll(LONG)?, libc::POLLIN, "round {round}: poll of a full area");
        kept.ring.store_release(AUX_TAIL, kept.reported);
        ports(10);
        let (exits, flags) = kept.take()?;
        ensure_eq!(exits.len(), 0, "round {round}: exits of a disabled event");
        ensure_eq!(flags, [TRUNCATED], "round {round}: flags of the only chunk");
        kept.event.enable(0)?;
        ports(5);
        kept.event.disable(0)?;
        let (exits, flags) = kept.take()?;
        ensure_eq!(exits.len(), 5, "round {round}: exits after the area has room again");
        ensure!(flags.iter().all(|&flags| flags == 0), "a chunk has flags: {flags:x?}");
    }
    ensure_eq!(kept.event.count()?, areas::head(&kept.ring), "bytes counted");
    Ok(())
}

#[apply(guest_test)]
fn perfs_snapshot_keeps_the_newest() -> Outcome {
    const MADE: u64 = 500;
    let device = Device::open()?;
    cpu::allow_ports()?;
    cpu::pin(1)?;
    let attr = port_trace(&device)?;
    let mut kept = Kept::open(attr, How::on_cpu(1), 2, READ_ONLY)?;
    kept.event.enable(0)?;
    ports(MADE);
    kept.event.disable(0)?;
    let head = areas::head(&kept.ring);
    ensure_eq!(kept.event.count()?, head, "bytes counted");
    let newest = kept.area.newest(&kept.ring)?;
    let numbers: Vec<u64> = exits(&newest).iter().map(|exit| exit.sequence).collect();
    let held = numbers.len() as u64;
    ensure!((60..=126).contains(&held), "{held} exits in two pages");
    ensure_eq!(numbers, (MADE - held..MADE).collect::<Vec<u64>>(), "numbers of the exits");
    let reported = reported(&kept.ring.take()?, &attr)?;
    ensure!(
        !reported.chunks.is_empty() && reported.flags().iter().all(|&flags| flags == OVERWRITE),
        "no chunk, or one whose flags are not OVERWRITE alone: {reported:x?}"
    );
    Ok(())
}

#[apply(guest_test)]
fn perfs_children_write_into_the_area() -> Outcome {
    const EACH: u64 = 60;
    let device = Device::open()?;
    cpu::pin(1)?;
    let mut attr = port_trace(&device)?;
    attr.set_inherit(1);
    // perf core refuses to map an inherited event that follows a task on every CPU.
    let anywhere = kernels(&attr, How::OWN)?;
    ensure_eq!(
        refused(Pages::map(&anywhere, 1, READ_WRITE)),
        Some(libc::EINVAL),
        "a ring of an inherited event on any CPU"
    );
    drop(anywhere);
    let how = How { cpu: 1, ..How::OWN };
    let mut kept = Kept::open(attr, how, 64, READ_WRITE)?;
    kept.event.enable(0)?;
    let threads = (0..3)
        .map(|_| {
            let child = thread::spawn(|| -> std::io::Result<u32> {
                cpu::allow_ports()?;
                ports(EACH);
                Ok(cpu::thread_id())
            });
            child.join().map_err(|_| "a child panicked")?.map_err(|_| "a child's ports")
        })
        .collect::<Result<Vec<u32>, _>>()?;
    kept.event.disable(0)?;
    let packets = kept.area.take(&kept.ring)?;
    let exits = exits(&packets);
    for tid in &threads {
        let own = exits.iter().filter(|exit| exit.pid_tid.1 == *tid);
        let numbers: Vec<u64> = own.map(|exit| exit.sequence).collect();
        ensure_eq!(numbers, (0..EACH).collect::<Vec<u64>>(), "numbers of thread {tid}'s exits");
    }
    ensure_eq!(exits.len() as u64, 3 * EACH, "exits of the family");
    ensure_eq!(kept.event.count()?, areas::head(&kept.ring), "bytes counted");
    Ok(())
}

#[apply(guest_test)]
fn perf_traces_samples() -> Outcome {
    const MADE: u64 = 100;
    let device = Device::open()?;
    cpu::allow_ports()?;
    cpu::pin(1)?;
    let mut attr = sampling(attr(&device, KIND_SAMPLE_TRACE, PACE_EXITS)?, 1, 0);
    attr.set_exclude_kernel(1);
    let mut kept = Kept::open(attr, How::OWN, 16, READ_WRITE)?;
    kept.event.enable(0)?;
    let stacks: Vec<u64> = (0..MADE).map(|_| known_code::out_known()).collect();
    kept.event.disable(0)?;
    let packets = kept.area.take(&kept.ring)?;
    kept.ledger.follow(&packets)?;
    let own: Vec<_> = samples(&packets).into_iter().filter(|sample| sample.ip == known_code::out_known_ip()).collect();
    ensure_eq!(own.len() as u64, MADE, "packets");
    for (sample, sp) in own.iter().zip(stacks) {
        for (place, &value) in sample.regs.iter().enumerate() {
            if let Known::Is(known) = known_code::in_packet(place, sp) {
                ensure_eq!(value, known, "register {place}");
            }
        }
    }
    // The ring has only records about the area, and no samples.
    let reported = reported(&kept.ring.take()?, &attr)?;
    ensure_eq!(reported.bytes(), areas::head(&kept.ring), "bytes in the chunks");
    Ok(())
}

#[apply(guest_test)]
fn both_interfaces_trace_at_once() -> Outcome {
    const MADE: u64 = 200;
    let device = Device::open()?;
    cpu::allow_ports()?;
    cpu::pin(1)?;
    let core = port_trace(&device)?;
    let mut kept = Kept::open(core, How::OWN, 8, READ_WRITE)?;
    let mut shared =
        crate::traced::Traced::open(&device, crate::aux_mapping::io_trace(&device), How::OWN, 8, READ_WRITE)?;
    shared.event.enable(0)?;
    kept.event.enable(0)?;
    mmio_pio::out_loop(MADE);
    kept.event.disable(0)?;
    shared.event.disable(0)?;
    let (core, _) = kept.take()?;
    let own = shared.take()?;
    let what = |exits: &[crate::packets::Exit]| -> Vec<(u64, u64)> {
        exits.iter().map(|exit| (exit.time, exit.outside)).collect()
    };
    ensure_eq!(core.len() as u64, MADE, "exits through perf core");
    ensure_eq!(what(&core), what(&own), "exits through perf core, compared with those through /dev/vpmu");
    Ok(())
}
