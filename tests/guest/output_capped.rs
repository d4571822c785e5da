//! The limit on the sampling rate, in a machine that was started with a low limit. Overflows above the limit make no
//! samples, and do not count as lost. Records in the ring mark the beginning and the end of each throttled period.

use crate::ensure::{ensure, ensure_eq};
use crate::fields::{self, CPU, ID, READ, SAMPLE, STREAM_ID, THROTTLE, TIME, UNTHROTTLE};
use crate::pages::{Pages, READ_WRITE};
use crate::raw::{Device, How, silent};
use crate::{Outcome, cpu};

const GROUP: &str = "output-capped";

const VALUE: u64 = 120;
/// Length of a window in nanoseconds. The cap limits the samples in each window.
const WINDOW: u64 = 10_000_000;

#[apply(guest_test)]
fn cap_throttles_and_unthrottles() -> Outcome {
    let device = Device::open()?;
    let share = u64::from(device.info.max_sample_rate) / 100;
    ensure!(share > 0 && share < 50, "a cap of {share} samples a window: not the low cap that the test needs");
    cpu::pin(0)?;
    let mut attr = silent(device.marks(VALUE, 1, TIME | ID | STREAM_ID | CPU | READ));
    attr.set_sample_id_all(1);
    let event = device.start(&attr, How::on_cpu(0))?;
    let mut ring = Pages::map(&event, 16, READ_WRITE)?;
    let id = event.id()?;
    let (mut placed, mut throttles, mut in_run, mut samples) = (0, 0, Vec::new(), 0);
    let mut throttled = false;
    while throttles < 5 || throttled {
        device.place(VALUE, 10)?;
        placed += 10;
        for record in ring.take()? {
            match record.kind {
                SAMPLE => {
                    ensure!(!throttled, "the ring has a sample from a throttled event");
                    let time = fields::sample(&record, &attr)?.time.unwrap_or(0);
                    in_run.push(time);
                    samples += 1;
                }
                THROTTLE | UNTHROTTLE => {
                    ensure_eq!(
                        throttled,
                        record.kind == UNTHROTTLE,
                        "whether the event was throttled before the record"
                    );
                    let (own, trailer) = fields::trailer(&record, 3, &attr)?;
                    ensure_eq!(own[1..], [id, id], "the ids in the record");
                    ensure_eq!(trailer.id, Some(id), "the trailer's id");
                    throttled = record.kind == THROTTLE;
                    if throttled {
                        throttles += 1;
                        let full = in_run.len() >= share as usize;
                        ensure!(full, "throttled after {} samples of {share}", in_run.len());
                        let first = in_run[in_run.len() - share as usize];
                        let took = in_run[in_run.len() - 1] - first;
                        ensure!(took < WINDOW, "throttled for {share} samples in {took} ns");
                        in_run.clear();
                    }
                }
                other => return Err(format!("a record of type {other}").into()),
            }
        }
        ensure!(placed < 100_000, "{placed} marks throttled the event only {throttles} times");
    }
    ensure!(samples < placed, "{samples} samples of {placed} marks: none was left out");
    ensure_eq!(event.count()?, placed, "the count, throttled marks included");
    Ok(())
}

#[apply(guest_test)]
fn below_the_cap_nothing_is_throttled() -> Outcome {
    let device = Device::open()?;
    let share = u64::from(device.info.max_sample_rate) / 100;
    cpu::pin(0)?;
    let attr = silent(device.marks(VALUE, 1, TIME | READ));
    let event = device.start(&attr, How::on_cpu(0))?;
    let mut ring = Pages::map(&event, 16, READ_WRITE)?;
    device.place(VALUE, share - 1)?;
    let (samples, lost) = fields::samples(&ring.take()?, &attr)?;
    ensure_eq!((samples.len() as u64, lost), (share - 1, 0), "samples and losses");
    Ok(())
}
