//! Counts the samples in a host ring, by the mode and address that the host reports.
//!
//! The samples have only `PERF_SAMPLE_IP`. Records other than samples are skipped.

use vpmu_perf::record::{Header, MODE_GUEST_KERNEL, MODE_GUEST_USER, TYPE_SAMPLE};

use super::Samples;

/// Counts the samples among `records`, each given as its header and the words after the header.
pub(super) fn count(records: &[(Header, Vec<u64>)], in_loop: impl Fn(u64) -> bool) -> Samples {
    let mut samples = Samples::default();
    for (header, body) in records {
        if header.kind == TYPE_SAMPLE {
            let ip = body.first().copied();
            add(&mut samples, header.mode(), ip.is_some_and(&in_loop));
        }
    }
    samples
}

fn add(samples: &mut Samples, mode: u16, in_loop: bool) {
    samples.total += 1;
    let user = mode == MODE_GUEST_USER;
    if user || mode == MODE_GUEST_KERNEL {
        samples.guest += 1;
        samples.in_loop += u32::from(in_loop);
        samples.labelled_user += u32::from(user);
    }
}

#[cfg(test)]
mod tests {
    use vpmu_perf::record::{MODE_KERNEL, TYPE_LOST};

    use super::*;

    fn record(kind: u32, misc: u16, ips: &[u64]) -> (Header, Vec<u64>) {
        let size = 8 * (1 + u16::try_from(ips.len()).unwrap());
        (Header { kind, misc, size }, ips.to_vec())
    }

    #[test]
    fn samples_are_counted_by_their_mode() {
        let ring = [
            record(TYPE_SAMPLE, MODE_GUEST_KERNEL, &[5]),
            record(TYPE_SAMPLE, MODE_GUEST_USER, &[5]),
            record(TYPE_SAMPLE, MODE_GUEST_USER, &[9]),
            record(TYPE_SAMPLE, MODE_GUEST_USER, &[]),
            record(TYPE_LOST, 0, &[5]),
            record(TYPE_SAMPLE, MODE_KERNEL, &[5]),
        ];
        let expected = Samples { total: 5, guest: 4, in_loop: 2, labelled_user: 3 };
        assert_eq!(count(&ring, |ip| ip == 5), expected);
    }
}
