//! Records as Linux's perf lays them out; no knowledge of where they go.

use crate::machine::GuestRegs;

pub(crate) const TYPE_LOST: u32 = 2;
pub(crate) const TYPE_SAMPLE: u32 = 9;
pub(crate) const MISC_UNKNOWN: u16 = 0;
pub(crate) const MISC_KERNEL: u16 = 1;
pub(crate) const MISC_USER: u16 = 2;

pub(crate) const SAMPLE_IP: u64 = 1 << 0;
pub(crate) const SAMPLE_TID: u64 = 1 << 1;
pub(crate) const SAMPLE_TIME: u64 = 1 << 2;
pub(crate) const SAMPLE_ID: u64 = 1 << 6;
pub(crate) const SAMPLE_CPU: u64 = 1 << 7;
pub(crate) const SAMPLE_PERIOD: u64 = 1 << 8;
pub(crate) const SAMPLE_STREAM_ID: u64 = 1 << 9;
pub(crate) const SAMPLE_IDENTIFIER: u64 = 1 << 16;

/// `PERF_RECORD_LOST`: header, id, number.
pub(crate) const LOST_SIZE: usize = 24;
const HEADER_SIZE: usize = 8;
/// The fields of a sample that are written.
const SAMPLE_WRITTEN: u64 = 0x1_03c7;
/// A sample with every allowed field.
pub(crate) const SAMPLE_MAX: usize = HEADER_SIZE + 8 * 8;
/// The longest burst that is written at once: a loss, then a sample.
pub(crate) const BURST_MAX: usize = LOST_SIZE + SAMPLE_MAX;

/// One overflow, in guest terms.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Sample {
    /// `None` where the hypervisor would not tell.
    pub(crate) regs: Option<GuestRegs>,
    pub(crate) pid: u32,
    pub(crate) tid: u32,
    /// Guest nanoseconds.
    pub(crate) time: u64,
    /// Of the event that owns the ring.
    pub(crate) id: u64,
    /// Of the event that overflowed.
    pub(crate) stream_id: u64,
    pub(crate) vcpu: u32,
    pub(crate) period: u64,
}

/// Bytes under construction, on the stack.
#[derive(Debug)]
pub(crate) struct Burst {
    bytes: [u8; BURST_MAX],
    len: usize,
}

impl Burst {
    pub(crate) fn new() -> Self {
        Self {
            bytes: [0; BURST_MAX],
            len: 0,
        }
    }

    pub(crate) fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }

    pub(crate) fn lost(&mut self, id: u64, lost: u64) {
        let start = self.begin();
        self.push(id);
        self.push(lost);
        self.end(start, TYPE_LOST, MISC_UNKNOWN);
    }

    /// Appends a sample with the fields of `sample_type`, in perf's order.
    pub(crate) fn sample(&mut self, sample_type: u64, sample: &Sample) {
        let start = self.begin();
        let task = u64::from(sample.tid) << 32 | u64::from(sample.pid);
        let fields = [
            (SAMPLE_IDENTIFIER, sample.id),
            (SAMPLE_IP, sample.regs.map_or(0, |regs| regs.ip)),
            (SAMPLE_TID, task),
            (SAMPLE_TIME, sample.time),
            (SAMPLE_ID, sample.id),
            (SAMPLE_STREAM_ID, sample.stream_id),
            (SAMPLE_CPU, u64::from(sample.vcpu)),
            (SAMPLE_PERIOD, sample.period),
        ];
        for (bit, value) in fields {
            if sample_type & bit != 0 {
                self.push(value);
            }
        }
        let misc = match sample.regs {
            Some(GuestRegs { user: true, .. }) => MISC_USER,
            Some(GuestRegs { user: false, .. }) => MISC_KERNEL,
            None => MISC_UNKNOWN,
        };
        self.end(start, TYPE_SAMPLE, misc);
    }

    fn begin(&mut self) -> usize {
        let start = self.len;
        self.len += HEADER_SIZE;
        start
    }

    fn push(&mut self, value: u64) {
        self.bytes[self.len..self.len + 8].copy_from_slice(&value.to_le_bytes());
        self.len += 8;
    }

    fn end(&mut self, start: usize, kind: u32, misc: u16) {
        // At most BURST_MAX, so 16 bits hold it.
        let size = u16::try_from(self.len - start).unwrap_or(u16::MAX);
        let header = &mut self.bytes[start..start + HEADER_SIZE];
        header[..4].copy_from_slice(&kind.to_le_bytes());
        header[4..6].copy_from_slice(&misc.to_le_bytes());
        header[6..].copy_from_slice(&size.to_le_bytes());
    }
}

/// Size of a sample with the fields of `sample_type`.
pub(crate) fn sample_size(sample_type: u64) -> usize {
    let known = sample_type & SAMPLE_WRITTEN;
    HEADER_SIZE + 8 * known.count_ones() as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAMPLE: Sample = Sample {
        regs: Some(GuestRegs {
            ip: 0x1111,
            user: true,
        }),
        pid: 7,
        tid: 8,
        time: 99,
        id: 3,
        stream_id: 4,
        vcpu: 2,
        period: 10,
    };

    fn words(bytes: &[u8]) -> Vec<u64> {
        bytes
            .chunks_exact(8)
            .map(|word| u64::from_le_bytes(word.try_into().expect("eight bytes")))
            .collect()
    }

    #[test]
    fn every_field_in_perfs_order() {
        let mut burst = Burst::new();
        burst.sample(SAMPLE_WRITTEN, &SAMPLE);
        let header = 9 | 2 << 32 | (SAMPLE_MAX as u64) << 48;
        assert_eq!(
            words(burst.as_bytes()),
            [header, 3, 0x1111, 8 << 32 | 7, 99, 3, 4, 2, 10]
        );
    }

    #[test]
    fn sizes_are_what_is_written() {
        for bits in 0..=0xffff_u64 {
            // Spread sixteen bits over the places that matter.
            let sample_type = (bits & 0x7ff | (bits & 0x800) << 5) & SAMPLE_WRITTEN;
            let mut burst = Burst::new();
            burst.sample(sample_type, &SAMPLE);
            assert_eq!(burst.as_bytes().len(), sample_size(sample_type));
        }
    }

    #[test]
    fn a_loss_then_a_sample_without_registers() {
        let mut burst = Burst::new();
        burst.lost(3, 17);
        burst.sample(
            SAMPLE_TIME,
            &Sample {
                regs: None,
                ..SAMPLE
            },
        );
        assert_eq!(
            words(burst.as_bytes()),
            [2 | 24 << 48, 3, 17, 9 | 16 << 48, 99]
        );
    }
}
