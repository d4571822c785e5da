//! Counts the samples in a host ring, by the place that the host reports.
//!
//! Reads only `PERF_SAMPLE_IP`, and skips records other than samples.

use perf_event_open_sys::bindings::{
    PERF_RECORD_MISC_CPUMODE_MASK, PERF_RECORD_MISC_GUEST_KERNEL, PERF_RECORD_MISC_GUEST_USER,
    PERF_RECORD_SAMPLE,
};

use super::Samples;

/// Bytes of a record's header: type, misc, size.
const HEADER: usize = 8;

/// Walks `records`, oldest first, up to the first record that does not fit.
pub(super) fn count(mut records: &[u8], in_loop: impl Fn(u64) -> bool) -> Samples {
    let mut samples = Samples::default();
    while let Some((header, _)) = records.split_first_chunk::<HEADER>() {
        let [t0, t1, t2, t3, m0, m1, s0, s1] = *header;
        let size = usize::from(u16::from_ne_bytes([s0, s1]));
        let Some((record, rest)) = records.split_at_checked(size) else {
            break;
        };
        let Some(body) = record.get(HEADER..) else {
            break;
        };
        if u32::from_ne_bytes([t0, t1, t2, t3]) == PERF_RECORD_SAMPLE {
            let mode = u32::from(u16::from_ne_bytes([m0, m1])) & PERF_RECORD_MISC_CPUMODE_MASK;
            let ip = body.first_chunk().map(|ip| u64::from_ne_bytes(*ip));
            add(&mut samples, mode, ip.is_some_and(&in_loop));
        }
        records = rest;
    }
    samples
}

fn add(samples: &mut Samples, mode: u32, in_loop: bool) {
    samples.total += 1;
    let user = mode == PERF_RECORD_MISC_GUEST_USER;
    if user || mode == PERF_RECORD_MISC_GUEST_KERNEL {
        samples.guest += 1;
        samples.in_loop += u32::from(in_loop);
        samples.labelled_user += u32::from(user);
    }
}

#[cfg(test)]
mod tests {
    use perf_event_open_sys::bindings::{PERF_RECORD_LOST, PERF_RECORD_MISC_KERNEL};

    use super::*;

    fn record(kind: u32, misc: u32, ip: u64) -> Vec<u8> {
        let mut record = kind.to_ne_bytes().to_vec();
        record.extend(u16::try_from(misc).unwrap().to_ne_bytes());
        record.extend(16_u16.to_ne_bytes());
        record.extend(ip.to_ne_bytes());
        record
    }

    #[test]
    fn samples_are_counted_by_their_mode() {
        let ring = [
            record(PERF_RECORD_SAMPLE, PERF_RECORD_MISC_GUEST_KERNEL, 5),
            record(PERF_RECORD_SAMPLE, PERF_RECORD_MISC_GUEST_USER, 5),
            record(PERF_RECORD_SAMPLE, PERF_RECORD_MISC_GUEST_USER, 9),
            record(PERF_RECORD_LOST, 0, 5),
            record(PERF_RECORD_SAMPLE, PERF_RECORD_MISC_KERNEL, 5),
        ]
        .concat();
        let expected = Samples {
            total: 4,
            guest: 3,
            in_loop: 2,
            labelled_user: 2,
        };
        assert_eq!(count(&ring, |ip| ip == 5), expected);
    }

    #[test]
    fn malformed_record_ends_the_walk() {
        let good = record(PERF_RECORD_SAMPLE, PERF_RECORD_MISC_GUEST_USER, 5);
        for size in [0_u16, 7, 17, u16::MAX] {
            let mut bad = good.clone();
            bad[6..8].copy_from_slice(&size.to_ne_bytes());
            let ring = [good.clone(), bad].concat();
            assert_eq!(count(&ring, |_| true).total, 1, "size {size}");
        }
        assert_eq!(count(&good[..15], |_| true).total, 0);
    }
}
