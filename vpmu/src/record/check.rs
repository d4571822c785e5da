//! Checks whether bytes from guest-writable memory form a valid record of an event. A record is valid if the
//! device writes records of this kind for the event, if the record's length matches the fields that the event
//! requests, and if the record has the event's id.

use vpmu_perf::field::{FORMAT_GROUP, PARTS, Part, WORDS, Word};
use vpmu_perf::record::{Header, Words};

use super::{Layout, MASKS, TYPE_LOST, TYPE_SAMPLE, TYPE_THROTTLE, TYPE_UNTHROTTLE, read_size};

/// Whether `record` can be a record of the event `id` with this layout. The length of `record` must equal the size
/// field in its header.
pub(crate) fn admits(layout: &Layout, record: &[u8], id: u64) -> bool {
    let (words, cut) = record.as_chunks();
    let words: Vec<u64> = words.iter().map(|word| u64::from_le_bytes(*word)).collect();
    let mut words = Words::new(&words);
    let header = words.next().map(Header::from_word);
    let fits = header.and_then(|header| match header.kind {
        TYPE_SAMPLE => admits_sample(layout, &mut words, id),
        // The event's id, and the number of lost samples.
        TYPE_LOST => (words.next()? == id).then_some(()).and_then(|()| words.skip(1 + trailer_words(layout))),
        // The time, the id and the stream id come first, and then the trailer.
        TYPE_THROTTLE | TYPE_UNTHROTTLE => {
            words.skip(1)?;
            (words.next()? == id).then_some(())?;
            words.skip(1 + trailer_words(layout))
        }
        _ => None,
    });
    fits.is_some() && words.is_empty() && cut.is_empty()
}

fn trailer_words(layout: &Layout) -> u64 {
    let trailer = if layout.sample_id_all { layout.sample_type & MASKS.trailer } else { 0 };
    trailer.count_ones().into()
}

/// Consumes the fields of a sample from `words`.
fn admits_sample(layout: &Layout, words: &mut Words<'_>, id: u64) -> Option<()> {
    for (_, word) in WORDS.into_iter().filter(|&(bit, _)| layout.has(bit)) {
        let value = words.next()?;
        match word {
            Word::Identifier | Word::Id => (value == id).then_some(())?,
            Word::Ip | Word::Tid | Word::Time | Word::Addr | Word::StreamId | Word::Cpu | Word::Period => {}
        }
    }
    for (_, part) in PARTS.into_iter().filter(|&(bit, _)| layout.has(bit)) {
        match part {
            Part::Counts => skip_reading(layout, words)?,
            Part::Callchain => {
                let callers = words.next()?;
                words.skip(callers)?;
            }
            Part::RegsUser => skip_registers(words, layout.regs_user)?,
            Part::StackUser => skip_stack(words)?,
            Part::RegsIntr => skip_registers(words, layout.regs_intr)?,
        }
    }
    Some(())
}

fn skip_reading(layout: &Layout, words: &mut Words<'_>) -> Option<()> {
    let members = match layout.read_format & FORMAT_GROUP {
        0 => return words.skip(read_size(layout.read_format, 1) as u64 / 8),
        _ => words.next()?,
    };
    let (none, one) = (read_size(layout.read_format, 0), read_size(layout.read_format, 1));
    let each = (one - none) as u64 / 8;
    words.skip(none as u64 / 8 - 1)?;
    words.skip(members.checked_mul(each)?)
}

fn skip_stack(words: &mut Words<'_>) -> Option<()> {
    let size = words.next()?;
    if !size.is_multiple_of(8) {
        return None;
    }
    if size > 0 {
        words.skip(size / 8)?;
        (words.next()? <= size).then_some(())?;
    }
    Some(())
}

fn skip_registers(words: &mut Words<'_>, mask: u64) -> Option<()> {
    match words.next()? {
        0 => Some(()),
        1 | 2 => words.skip(u64::from(mask.count_ones())),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use zerocopy::IntoBytes;

    use super::super::{Member, Reading, Record, Regs, SAMPLE_CALLCHAIN, SAMPLE_ID, SAMPLE_TIME, Sample, SampleId};
    use super::*;

    const ALL: u64 = crate::abi::SAMPLE_ALLOWED;

    fn layout(sample_type: u64, read_format: u64, sample_id_all: bool) -> Layout {
        Layout { sample_type, read_format, regs_user: 0xff, regs_intr: 0x3, stack_user: 64, sample_id_all }
    }

    fn sample_id() -> SampleId {
        SampleId { id: 7, stream_id: 8, ..SampleId::default() }
    }

    fn records(layout: &Layout) -> Vec<Vec<u8>> {
        let (sample_id, mut record) = (sample_id(), Record::default());
        let members = [Member::default(); 3];
        let regs = Some(Regs { abi: 2, values: &[1, 2] });
        let sample = Sample {
            chain: &[1, 2, 3],
            read: Reading { members: &members, ..Reading::default() },
            regs_user: regs,
            regs_intr: None,
            stack: Some(&[5; 24]),
            ..Sample::default()
        };
        vec![
            record.sample(layout, &sample_id, &sample).expect("short").as_bytes().to_vec(),
            record.lost(layout, &sample_id, 3).as_bytes().to_vec(),
            record.throttle(layout, &sample_id).as_bytes().to_vec(),
            record.unthrottle(layout, &sample_id).as_bytes().to_vec(),
        ]
    }

    proptest! {
        #[test]
        fn records_of_the_device_are_admitted(sample_type in 0..=ALL, read_format in 0..=0x1f_u64, all: bool) {
            let layout = layout(sample_type & ALL, read_format, all);
            for record in records(&layout) {
                prop_assert!(admits(&layout, &record, 7));
                prop_assert!(!admits(&layout, &record[..record.len() - 8], 7), "shorter");
                let longer = [&record[..], &[0; 8]].concat();
                prop_assert!(!admits(&layout, &longer, 7), "longer");
            }
        }

        #[test]
        fn any_bytes_are_checked_without_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..512), sample_type in 0..=ALL, read_format in 0..=0x1f_u64) {
            let mut bytes = bytes;
            if let Some(first) = bytes.first_mut() {
                *first = 9;
            }
            admits(&layout(sample_type & ALL, read_format, true), &bytes, 7);
        }
    }

    #[test]
    fn records_of_another_event_are_not_admitted() {
        let layout = layout(SAMPLE_ID | SAMPLE_TIME, 0, false);
        for record in records(&layout) {
            assert!(!admits(&layout, &record, 6));
        }
        let of_read = Record::default().itrace_start(&layout, &sample_id()).as_bytes().to_vec();
        assert!(!admits(&layout, &of_read, 7), "a record of another kind");
        assert!(!admits(&layout, &[], 7));
    }

    #[test]
    fn lengths_that_are_lies_are_found_out() {
        let layout = layout(SAMPLE_CALLCHAIN, 0, false);
        let chain = |callers: u64| {
            let words = [9 | 24 << 48, callers, 0];
            admits(&layout, words.as_bytes(), 7)
        };
        assert!(chain(1));
        for lie in [0, 2, u64::MAX, 1 << 61] {
            assert!(!chain(lie), "{lie}");
        }
    }
}
