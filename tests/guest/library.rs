//! Tests of the client library on the real device, except for counting and sampling.

use vpmu_client::marks::MarksError;
use vpmu_client::{Engine, Overwrite, Record, Sample, Vpmu};

use crate::ensure::{ensure, ensure_eq};
use crate::sampling::{drain, sampling};
use crate::{Fallible, Outcome, cpu};

const GROUP: &str = "vperf";

fn place(vpmu: &Vpmu, value: u32, times: u32) -> Result<(), MarksError> {
    (0..times).try_for_each(|_| vpmu.mark(value))
}

#[apply(guest_test)]
fn page_agrees_with_a_reading() -> Outcome {
    let vpmu = Vpmu::open()?;
    cpu::pin(0)?;
    let event = vpmu.open_event(&vpmu.attr("mark=9")?.on_cpu(0))?;
    let page = event.map_pages(0)?;
    event.enable()?;
    for marks in [0, 1, 17] {
        place(&vpmu, 9, marks)?;
        let reported = page.reading()?;
        let after = event.read()?;
        ensure_eq!(reported.value, after.value, "the page's count after {marks} more marks");
        ensure_eq!(reported.time_running, reported.time_enabled, "time running, compared with time enabled");
    }
    event.disable()?;
    let (reported, read) = (page.reading()?, event.read()?);
    // The page has the device's times, and a reading has perf core's.
    ensure_eq!(reported.value, read.value, "the page of a disabled event, compared with read()");
    Ok(())
}

fn times(records: Vec<Record>) -> Fallible<Vec<u64>> {
    let time = |record| match record {
        Record::Sample(sample) => Ok(sample.time),
        other => Err(format!("an unexpected record: {other:?}").into()),
    };
    records.into_iter().map(time).collect()
}

#[apply(guest_test)]
fn backward_ring_keeps_the_latest_records() -> Outcome {
    // A record has 56 bytes: a header of 8 bytes and six words. So a page has room for 73 records.
    const FIT: usize = 4096 / 56;
    let vpmu = Vpmu::open()?;
    let event = vpmu.open_event(&vpmu.attr("mark=9")?.sampling(1).with(|attr| attr.backward = true))?;
    let ring = Overwrite::map(&event, 0)?;
    event.enable()?;
    ensure_eq!(ring.snapshot()?.len(), 0, "records before the first mark");
    place(&vpmu, 9, 500)?;
    let first = times(ring.snapshot()?)?;
    ensure_eq!(first.len(), FIT, "the latest records of 500 marks");
    ensure!(first.is_sorted(), "the records are not oldest first: {first:?}");
    place(&vpmu, 9, 3)?;
    let second = times(ring.snapshot()?)?;
    ensure_eq!(second.len(), FIT, "records after three more marks");
    ensure_eq!(&second[..FIT - 3], &first[3..], "the records that are still in the ring");
    ensure!(second.is_sorted(), "the records are not oldest first: {second:?}");
    Ok(())
}

#[apply(guest_test)]
fn two_events_share_a_ring() -> Outcome {
    let vpmu = Vpmu::open()?;
    cpu::pin(0)?;
    let (first, mut ring) = sampling(&vpmu, &vpmu.attr("mark=9")?.sampling(1).on_cpu(0), 2)?;
    let second = vpmu.open_event(&vpmu.attr("mark=10")?.sampling(1).on_cpu(0))?;
    second.set_output(Some(&first))?;
    second.enable()?;
    for _ in 0..10 {
        vpmu.mark(9)?;
        vpmu.mark(10)?;
    }
    let (samples, lost) = drain(&mut ring)?;
    let ids: Vec<u64> = samples.iter().map(|sample: &Sample| sample.id).collect();
    ensure_eq!(ids, [first.id()?, second.id()?].repeat(10), "the ids in the records");
    ensure_eq!(lost, 0, "lost records");
    // While the output is paused, records are lost. The loss is reported after the output is resumed.
    first.pause_output(true)?;
    place(&vpmu, 10, 4)?;
    first.pause_output(false)?;
    place(&vpmu, 10, 1)?;
    let (samples, lost) = drain(&mut ring)?;
    ensure_eq!((samples.len(), lost), (1, 4), "records written and lost");
    Ok(())
}

#[apply(guest_test)]
fn group_reads_at_one_moment() -> Outcome {
    let vpmu = Vpmu::open()?;
    cpu::pin(0)?;
    let attr = |name: &str| Ok::<_, vpmu_client::Error>(vpmu.attr(name)?.on_cpu(0).reading_group());
    let leader = vpmu.open_event(&attr("mark=9")?)?;
    let open = |name: &str| {
        let attr = attr(name)?.with(|attr| attr.disabled = false);
        vpmu.open_member(&attr, &leader)
    };
    let (twin, other) = (open("mark=9")?, open("mark=10")?);
    place(&vpmu, 9, 5)?;
    leader.enable()?;
    for round in 1..=20 {
        place(&vpmu, 9, 3)?;
        place(&vpmu, 10, 2)?;
        for event in [&leader, &twin, &other] {
            let counts: Vec<u64> = event.read_group()?.iter().map(|r| r.value).collect();
            ensure_eq!(counts, [3 * round, 3 * round, 2 * round], "counts in round {round}");
        }
    }
    leader.disable()?;
    place(&vpmu, 9, 7)?;
    let group = leader.read_group()?;
    ensure_eq!(group[1].value, 60, "a member's count while its leader is disabled");
    let ids: Vec<u64> = group.iter().map(|reading| reading.id).collect();
    ensure_eq!(ids, [leader.perf_id()?, twin.perf_id()?, other.perf_id()?], "the ids, with the leader first");
    Ok(())
}

#[apply(guest_test)]
fn refresh_lasts_as_long_as_granted() -> Outcome {
    let vpmu = Vpmu::open()?;
    let event = vpmu.open_event(&vpmu.attr("mark=9")?.sampling(2))?;
    let mut ring = event.map(2)?;
    ensure_eq!(event.engine()?, Engine::Exit, "the engine of marks");
    event.refresh(3)?;
    place(&vpmu, 9, 20)?;
    let (samples, lost) = drain(&mut ring)?;
    ensure_eq!((samples.len(), lost), (3, 0), "samples and losses of ten overflows");
    ensure_eq!(event.read()?.value, 6, "the count at the last permitted overflow");
    event.refresh(1)?;
    place(&vpmu, 9, 20)?;
    ensure_eq!(drain(&mut ring)?.0.len(), 1, "samples after one more overflow is permitted");
    Ok(())
}
