//! Checks that there is one sample for each period, and that each sample has the guest's correct values.

use std::hint::black_box;
use std::io::{self, PipeReader, PipeWriter, Write};
use std::process::{Child, Command};
use std::time::Duration;

use vpmu_client::attr::{SAMPLE_DEFAULT, SAMPLE_IDENTIFIER, SAMPLE_STREAM_ID};
use vpmu_client::{Event, EventAttr, Record, Ring, Sample, Vpmu};

use crate::cpu;
use crate::ensure::{ensure, ensure_eq, errno};
use crate::{Fallible, Outcome};

const GROUP: &str = "sampling";

/// Returns the samples in a ring, and the number of samples that the device reports as lost.
pub(crate) fn drain(ring: &mut Ring) -> Fallible<(Vec<Sample>, u64)> {
    let (mut samples, mut lost) = (Vec::new(), 0);
    for record in ring.records() {
        match record? {
            Record::Sample(sample) => samples.push(sample),
            Record::Lost { lost: more, .. } => lost += more,
            other => return Err(format!("an unexpected record: {other:?}").into()),
        }
    }
    Ok((samples, lost))
}

/// Returns an enabled event and its ring of 2^n pages.
pub(crate) fn sampling(vpmu: &Vpmu, attr: &EventAttr, pages_log2: u32) -> Fallible<(Event, Ring)> {
    let event = vpmu.open_event(attr)?;
    let ring = event.map(pages_log2)?;
    event.enable()?;
    Ok((event, ring))
}

#[apply(guest_test)]
fn sample_for_each_period() -> Outcome {
    let vpmu = Vpmu::open()?;
    for (period, marks) in [(1, 50), (3, 100), (7, 6), (1000, 1999)] {
        let attr = vpmu.attr("mark=9")?.sampling(period);
        let (event, mut ring) = sampling(&vpmu, &attr, 4)?;
        for _ in 0..marks {
            vpmu.mark(9)?;
        }
        event.disable()?;
        let (samples, lost) = drain(&mut ring)?;
        ensure_eq!(samples.len() as u64, marks / period, "records of {marks} marks by {period}");
        ensure_eq!(lost, 0, "lost samples");
        ensure_eq!(event.read()?.value, marks, "marks counted");
        ensure!(samples.iter().all(|s| s.period == period), "a record has a period other than {period}");
    }
    Ok(())
}

#[apply(guest_test)]
fn samples_name_task_and_address() -> Outcome {
    let vpmu = Vpmu::open()?;
    cpu::pin(1)?;
    let attr = vpmu
        .attr("mark=9")?
        .sampling(1)
        .with(|attr| attr.sample_type = SAMPLE_DEFAULT | SAMPLE_STREAM_ID | SAMPLE_IDENTIFIER);
    let (event, mut ring) = sampling(&vpmu, &attr, 2)?;
    for _ in 0..10 {
        vpmu.mark(9)?;
    }
    event.disable()?;
    let (samples, _) = drain(&mut ring)?;
    ensure_eq!(samples.len(), 10, "records");
    let id = event.id()?;
    for sample in samples {
        ensure_eq!((sample.id, sample.stream_id), (id, id), "ids in a record");
        ensure_eq!(sample.cpu, 1, "the CPU in a record");
        ensure_eq!((sample.pid, sample.tid), (std::process::id(), cpu::thread_id()), "the task in a record");
        // The driver places the mark on the caller's behalf.
        ensure!(!sample.user && sample.ip >> 63 == 1, "the IP {:#x} of a sample is not in the kernel", sample.ip);
    }
    Ok(())
}

#[apply(guest_test)]
fn times_increase_and_are_the_guests() -> Outcome {
    let vpmu = Vpmu::open()?;
    cpu::pin(0)?;
    let (event, mut ring) = sampling(&vpmu, &vpmu.attr("mark=9")?.sampling(1), 4)?;
    let before = vpmu.info().time_of(cpu::tsc());
    for _ in 0..200 {
        vpmu.mark(9)?;
    }
    let after = vpmu.info().time_of(cpu::tsc());
    event.disable()?;
    let (samples, _) = drain(&mut ring)?;
    ensure_eq!(samples.len(), 200, "records");
    let times: Vec<u64> = samples.iter().map(|s| s.time).collect();
    ensure!(times.windows(2).all(|pair| pair[0] < pair[1]), "a record is not later than the previous one");
    let (first, last) = (times[0], times[199]);
    ensure!(
        before <= first && last <= after,
        "samples from {first} to {last} ns, but the guest's clock went from {before} to {after}"
    );
    Ok(())
}

#[apply(guest_test)]
fn two_vcpus_samples_never_mix() -> Outcome {
    let vpmu = Vpmu::open()?;
    let attr = vpmu.attr("mark=9")?.sampling(1);
    let mut rings = [sampling(&vpmu, &attr.clone().on_cpu(0), 4)?, sampling(&vpmu, &attr.on_cpu(1), 4)?];
    std::thread::scope(|scope| {
        let placers = [(0, 100), (1, 150)].map(|(cpu, times)| {
            let vpmu = &vpmu;
            scope.spawn(move || -> Result<(), String> {
                cpu::pin(cpu).map_err(|e| e.to_string())?;
                (0..times).try_for_each(|_| vpmu.mark(9).map_err(|e| e.to_string()))
            })
        });
        placers.into_iter().try_for_each(|p| p.join().map_err(|_| "a placer panicked".to_owned())?)
    })?;
    for (cpu, marks) in [(0_usize, 100), (1, 150)] {
        let (event, ring) = &mut rings[cpu];
        event.disable()?;
        let (samples, lost) = drain(ring)?;
        ensure_eq!((samples.len(), lost), (marks, 0), "records and losses of CPU {cpu}");
        let id = event.id()?;
        ensure!(
            samples.iter().all(|s| s.cpu as usize == cpu && s.id == id),
            "the ring of CPU {cpu} has a record of another CPU or event"
        );
    }
    Ok(())
}

#[apply(guest_test)]
fn samples_follow_their_task() -> Outcome {
    let vpmu = Vpmu::open()?;
    let (event, mut ring) = sampling(&vpmu, &vpmu.attr("mark=9")?.sampling(1), 4)?;
    for hop in 0..30 {
        cpu::pin(hop % 2)?;
        vpmu.mark(9)?;
    }
    event.disable()?;
    let (samples, lost) = drain(&mut ring)?;
    ensure_eq!((samples.len(), lost), (30, 0), "records, lost");
    for (hop, sample) in samples.iter().enumerate() {
        ensure_eq!(sample.cpu as usize, hop % 2, "the CPU of hop {hop}");
    }
    Ok(())
}

#[apply(guest_test)]
fn childs_samples_reach_the_parents_ring() -> Outcome {
    let vpmu = Vpmu::open()?;
    let attr = vpmu.attr("mark=3")?.sampling(1).with(|attr| {
        attr.inherit = true;
        attr.sample_type = SAMPLE_DEFAULT | SAMPLE_STREAM_ID;
    });
    let (event, mut ring) = sampling(&vpmu, &attr, 4)?;
    vpmu.mark(3)?;
    let status = Command::new("/proc/self/exe").args(["mark", "3", "20"]).status()?;
    ensure!(status.success(), "the child: {status}");
    event.disable()?;
    let (samples, lost) = drain(&mut ring)?;
    ensure_eq!((samples.len(), lost), (21, 0), "records and losses");
    let id = event.id()?;
    ensure!(samples.iter().all(|s| s.id == id), "a record does not have the parent's id");
    let of_child = samples.iter().filter(|s| s.stream_id != id && s.pid != std::process::id());
    ensure_eq!(of_child.count(), 20, "records of the child's own stream");
    Ok(())
}

fn placer_in_turn(times: usize, before: PipeReader, after: PipeWriter) -> io::Result<Child> {
    Command::new("/proc/self/exe")
        .args(["mark", "3", &times.to_string(), "in-turn"])
        .stdin(before)
        .stdout(after)
        .spawn()
}

#[apply(guest_test)]
fn siblings_are_distinguished() -> Outcome {
    const MARKS: usize = 150;
    let vpmu = Vpmu::open()?;
    // The children inherit this thread's CPU affinity, so they share one CPU. After each mark, this CPU switches to the
    // other child.
    cpu::pin(0)?;
    let attr = vpmu.attr("mark=3")?.sampling(1).with(|attr| attr.inherit = true);
    let (event, mut ring) = sampling(&vpmu, &attr, 4)?;
    let (first_reads, mut second_writes) = io::pipe()?;
    let (second_reads, first_writes) = io::pipe()?;
    // The first child does not read the second child's last byte. With this copy of the pipe's read end, the second
    // child can still write that byte.
    let _end = first_reads.try_clone()?;
    second_writes.write_all(&[0])?;
    let mut children =
        [placer_in_turn(MARKS, first_reads, first_writes)?, placer_in_turn(MARKS, second_reads, second_writes)?];
    for child in &mut children {
        let status = child.wait()?;
        ensure!(status.success(), "a child: {status}");
    }
    event.disable()?;
    let (samples, lost) = drain(&mut ring)?;
    ensure_eq!((samples.len(), lost), (2 * MARKS, 0), "records and losses");
    for child in children {
        let pid = child.id();
        let own = samples.iter().filter(|s| (s.pid, s.tid) == (pid, pid));
        ensure_eq!(own.count(), MARKS, "records of the child {pid}");
    }
    Ok(())
}

#[apply(guest_test)]
fn new_period_starts_at_once() -> Outcome {
    let vpmu = Vpmu::open()?;
    let (event, mut ring) = sampling(&vpmu, &vpmu.attr("mark=9")?.sampling(10), 4)?;
    for _ in 0..15 {
        vpmu.mark(9)?;
    }
    event.set_period(4)?;
    for _ in 0..9 {
        vpmu.mark(9)?;
    }
    event.disable()?;
    let (samples, _) = drain(&mut ring)?;
    let periods: Vec<u64> = samples.iter().map(|s| s.period).collect();
    ensure_eq!(periods, [10, 4, 4], "periods of the records");
    let zero = event.set_period(0).err().map(|e| errno(&e));
    ensure_eq!(zero, Some(libc::EINVAL), "errno for a period of zero");
    let counter = vpmu.open_event(&vpmu.attr("mark=9")?)?;
    let counting = counter.set_period(5).err().map(|e| errno(&e));
    ensure_eq!(counting, Some(libc::EINVAL), "errno for a period of an event that only counts");
    Ok(())
}

#[apply(guest_test)]
fn exits_sample_exactly() -> Outcome {
    let vpmu = Vpmu::open()?;
    cpu::allow_ports()?;
    let (event, mut ring) = sampling(&vpmu, &vpmu.attr(&cpu::own_port_exits())?.sampling(10), 4)?;
    for _ in 0..105 {
        cpu::port_write();
    }
    event.disable()?;
    let (samples, lost) = drain(&mut ring)?;
    ensure_eq!((samples.len(), lost), (10, 0), "records and losses of 105 exits by 10");
    let here = cpu::port_write as fn() as usize as u64;
    for sample in samples {
        // The compiler may inline the function, so the IP may be outside it. But the IP must be in this program.
        ensure!(
            sample.user && sample.ip.abs_diff(here) < 1 << 24,
            "{:#x} is not in this program, near {here:#x}",
            sample.ip
        );
    }
    Ok(())
}

#[inline(never)]
fn busy(vpmu: &Vpmu, millis: u64) {
    let until = cpu::tsc() + u64::from(vpmu.info().tsc_khz) * millis;
    let mut x = 1_u64;
    while cpu::tsc() < until {
        for _ in 0..10_000 {
            x = black_box(x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1));
        }
    }
}

#[apply(guest_test)]
fn clock_samples_the_loop_that_runs() -> Outcome {
    const PERIOD: u64 = 2_000_000;
    const ENOUGH: usize = 20;
    let vpmu = Vpmu::open()?;
    let attr = vpmu.attr("task-clock")?.sampling(PERIOD);
    let (event, mut ring) = sampling(&vpmu, &attr, 6)?;
    let here = busy as fn(&Vpmu, u64) as usize as u64;
    let in_loop = |s: &Sample| s.user && (here..here + 0x400).contains(&s.ip);
    let (mut samples, mut lost) = (Vec::new(), 0);
    // On a busy host, the clock's interrupts are fewer and late, so many samples hit the kernel. The test runs until
    // enough samples are in the loop, but for at most 1000 rounds of 20 ms.
    for _ in 0..1000 {
        busy(&vpmu, 20);
        let (more, missed) = drain(&mut ring)?;
        samples.extend(more);
        lost += missed;
        if samples.iter().filter(|s| in_loop(s)).count() >= ENOUGH {
            break;
        }
    }
    event.disable()?;
    let clock = event.read()?.value;
    let (last, missed) = drain(&mut ring)?;
    samples.extend(last);
    // There is at most one sample for each whole period.
    let taken = samples.len() as u64 + lost + missed;
    ensure!(taken <= clock / PERIOD + 1, "{taken} samples in {clock} ns are too many");
    let inside = samples.iter().filter(|s| in_loop(s)).count();
    let user = samples.iter().filter(|s| s.user).count();
    ensure!(
        inside >= ENOUGH && inside * 2 > user,
        "only {inside} of {user} user samples are in the loop that ran all the time, of {} in all",
        samples.len()
    );
    ensure!(samples.iter().all(|s| s.pid == std::process::id()), "a sample is of another process");
    Ok(())
}

#[apply(guest_test)]
fn every_nth_record_wakes() -> Outcome {
    let vpmu = Vpmu::open()?;
    let attr = vpmu.attr("mark=9")?.sampling(1).wakeup_every(5);
    let (event, _ring) = sampling(&vpmu, &attr, 4)?;
    for round in 0..3 {
        for _ in 0..4 {
            vpmu.mark(9)?;
        }
        let early = event.poll(Some(Duration::from_millis(20)))?;
        ensure!(!early.readable, "round {round}: a wakeup after four records of five");
        vpmu.mark(9)?;
        let woken = event.poll(Some(Duration::from_secs(10)))?;
        ensure!(woken.readable, "round {round}: no wakeup after five records");
    }
    Ok(())
}

#[apply(guest_test)]
fn sampling_by_the_tsc_is_refused() -> Outcome {
    let vpmu = Vpmu::open()?;
    // The device refuses sampling on an event that has no exact overflows.
    let attr = vpmu.attr("tsc")?.sampling(1000);
    let refused = vpmu.open_event(&attr).err().map(|e| errno(&e));
    ensure_eq!(refused, Some(libc::EOPNOTSUPP), "errno for sampling by tsc");
    Ok(())
}
