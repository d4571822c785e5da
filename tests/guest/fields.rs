//! Parses a sample's fields in the order of `<linux/perf_event.h>`. A record that is even one word too long or too
//! short is an error.
#![expect(clippy::cast_possible_truncation, reason = "splits words into fields; usize has 64 bits")]

use crate::pages::Record;
use crate::raw::{FORMAT_ENABLED, FORMAT_GROUP, FORMAT_ID, FORMAT_LOST, FORMAT_RUNNING};
use perf_event_open_sys::bindings::perf_event_attr;

pub(crate) const IP: u64 = 1 << 0;
pub(crate) const TID: u64 = 1 << 1;
pub(crate) const TIME: u64 = 1 << 2;
pub(crate) const ADDR: u64 = 1 << 3;
pub(crate) const READ: u64 = 1 << 4;
pub(crate) const CALLCHAIN: u64 = 1 << 5;
pub(crate) const ID: u64 = 1 << 6;
pub(crate) const CPU: u64 = 1 << 7;
pub(crate) const PERIOD: u64 = 1 << 8;
pub(crate) const STREAM_ID: u64 = 1 << 9;
pub(crate) const REGS_USER: u64 = 1 << 12;
pub(crate) const STACK_USER: u64 = 1 << 13;
pub(crate) const IDENTIFIER: u64 = 1 << 16;
pub(crate) const REGS_INTR: u64 = 1 << 18;
/// Every field that the device supports.
pub(crate) const ALL: [u64; 14] =
    [IP, TID, TIME, ADDR, READ, CALLCHAIN, ID, CPU, PERIOD, STREAM_ID, REGS_USER, STACK_USER, IDENTIFIER, REGS_INTR];

pub(crate) const LOST: u32 = 2;
pub(crate) const THROTTLE: u32 = 5;
pub(crate) const UNTHROTTLE: u32 = 6;
pub(crate) const READ_RECORD: u32 = 8;
pub(crate) const SAMPLE: u32 = 9;

pub(crate) const CONTEXT_KERNEL: u64 = -128_i64 as u64;
pub(crate) const CONTEXT_USER: u64 = -512_i64 as u64;
pub(crate) const MISC_MODE: u16 = 7;
pub(crate) const MISC_KERNEL: u16 = 1;
pub(crate) const MISC_USER: u16 = 2;

/// One event's part of a reading.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Value {
    pub(crate) value: u64,
    pub(crate) id: Option<u64>,
    pub(crate) lost: Option<u64>,
}

/// A reading of any format.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Reading {
    pub(crate) values: Vec<Value>,
    pub(crate) enabled: Option<u64>,
    pub(crate) running: Option<u64>,
}

/// Registers: abi and values.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Regs {
    pub(crate) abi: u64,
    pub(crate) values: Vec<u64>,
}

/// The fields of a sample. A field that was not requested is `None`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Sample {
    pub(crate) misc: u16,
    pub(crate) identifier: Option<u64>,
    pub(crate) ip: Option<u64>,
    pub(crate) pid_tid: Option<(u32, u32)>,
    pub(crate) time: Option<u64>,
    pub(crate) addr: Option<u64>,
    pub(crate) id: Option<u64>,
    pub(crate) stream_id: Option<u64>,
    pub(crate) cpu: Option<u32>,
    pub(crate) period: Option<u64>,
    pub(crate) read: Option<Reading>,
    pub(crate) chain: Option<Vec<u64>>,
    pub(crate) regs_user: Option<Regs>,
    /// The words of the stack dump, which has the requested size, and the number of bytes that were copied into it.
    pub(crate) stack: Option<(Vec<u64>, u64)>,
    pub(crate) regs_intr: Option<Regs>,
}

/// The trailer that all records except samples have if `sample_id_all` is set.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Trailer {
    pub(crate) pid_tid: Option<(u32, u32)>,
    pub(crate) time: Option<u64>,
    pub(crate) id: Option<u64>,
    pub(crate) stream_id: Option<u64>,
    pub(crate) cpu: Option<u32>,
    pub(crate) identifier: Option<u64>,
}

/// Words, taken one after the other.
struct Words<'a>(std::slice::Iter<'a, u64>);

impl Words<'_> {
    fn next(&mut self) -> Result<u64, String> {
        self.0.next().copied().ok_or_else(|| "the words end before the last field".into())
    }

    fn when(&mut self, asked: bool) -> Result<Option<u64>, String> {
        asked.then(|| self.next()).transpose()
    }

    fn some(&mut self, count: u64) -> Result<Vec<u64>, String> {
        (0..count).map(|_| self.next()).collect()
    }

    fn end(mut self) -> Result<(), String> {
        match self.0.next() {
            None => Ok(()),
            Some(_) => Err(format!("{} words follow the last field", 1 + self.0.len())),
        }
    }

    fn reading(&mut self, format: u64) -> Result<Reading, String> {
        let group = format & FORMAT_GROUP != 0;
        let mut reading = Reading::default();
        let mut count = 1;
        if group {
            count = self.next()?;
        } else {
            reading.values.push(Value { value: self.next()?, ..Value::default() });
        }
        reading.enabled = self.when(format & FORMAT_ENABLED != 0)?;
        reading.running = self.when(format & FORMAT_RUNNING != 0)?;
        for index in 0..count {
            if group {
                let value = self.next()?;
                reading.values.push(Value { value, ..Value::default() });
            }
            let id = self.when(format & FORMAT_ID != 0)?;
            let lost = self.when(format & FORMAT_LOST != 0)?;
            let value = &mut reading.values[index as usize];
            (value.id, value.lost) = (id, lost);
        }
        Ok(reading)
    }

    fn regs(&mut self, mask: u64) -> Result<Regs, String> {
        let abi = self.next()?;
        let count = if abi == 0 { 0 } else { mask.count_ones() };
        Ok(Regs { abi, values: self.some(count.into())? })
    }

    fn stack(&mut self) -> Result<(Vec<u64>, u64), String> {
        let size = self.next()?;
        if size == 0 {
            return Ok((Vec::new(), 0));
        }
        if !size.is_multiple_of(8) {
            return Err(format!("{size} bytes of stack are not whole words"));
        }
        let words = self.some(size / 8)?;
        Ok((words, self.next()?))
    }
}

fn halves(word: u64) -> (u32, u32) {
    (word as u32, (word >> 32) as u32)
}

/// Parses a reading that read(2) returned. `words` must have exactly the words of the format.
pub(crate) fn reading(words: &[u64], format: u64) -> Result<Reading, String> {
    let mut words = Words(words.iter());
    let reading = words.reading(format)?;
    words.end()?;
    Ok(reading)
}

/// Parses a sample of an event with this attr.
pub(crate) fn sample(record: &Record, attr: &perf_event_attr) -> Result<Sample, String> {
    if record.kind != SAMPLE {
        return Err(format!("not a sample: {record:?}"));
    }
    let asked = |bit| attr.sample_type & bit != 0;
    let mut words = Words(record.words.iter());
    // Rust evaluates the fields in the order in which they are written here, which is also the order of the words.
    let sample = Sample {
        misc: record.misc,
        identifier: words.when(asked(IDENTIFIER))?,
        ip: words.when(asked(IP))?,
        pid_tid: words.when(asked(TID))?.map(halves),
        time: words.when(asked(TIME))?,
        addr: words.when(asked(ADDR))?,
        id: words.when(asked(ID))?,
        stream_id: words.when(asked(STREAM_ID))?,
        cpu: words.when(asked(CPU))?.map(|word| halves(word).0),
        period: words.when(asked(PERIOD))?,
        read: asked(READ).then(|| words.reading(attr.read_format)).transpose()?,
        chain: match words.when(asked(CALLCHAIN))? {
            Some(count) => Some(words.some(count)?),
            None => None,
        },
        regs_user: asked(REGS_USER).then(|| words.regs(attr.sample_regs_user)).transpose()?,
        stack: asked(STACK_USER).then(|| words.stack()).transpose()?,
        regs_intr: asked(REGS_INTR).then(|| words.regs(attr.sample_regs_intr)).transpose()?,
    };
    words.end()?;
    Ok(sample)
}

/// Returns the first `body` words of a record that is not a sample, and the trailer that follows them.
pub(crate) fn trailer(record: &Record, body: usize, attr: &perf_event_attr) -> Result<(Vec<u64>, Trailer), String> {
    let mut words = Words(record.words.iter());
    let own = words.some(body as u64)?;
    let asked = |bit| attr.sample_id_all() == 1 && attr.sample_type & bit != 0;
    let trailer = Trailer {
        pid_tid: words.when(asked(TID))?.map(halves),
        time: words.when(asked(TIME))?,
        id: words.when(asked(ID))?,
        stream_id: words.when(asked(STREAM_ID))?,
        cpu: words.when(asked(CPU))?.map(|word| halves(word).0),
        identifier: words.when(asked(IDENTIFIER))?,
    };
    words.end()?;
    Ok((own, trailer))
}

/// Returns the samples in the records, and the number of lost samples. Records of any other type are an error.
pub(crate) fn samples(records: &[Record], attr: &perf_event_attr) -> Result<(Vec<Sample>, u64), String> {
    let (mut samples, mut lost) = (Vec::new(), 0);
    for record in records {
        if record.kind == LOST {
            let (own, _) = trailer(record, 2, attr)?;
            lost += own[1];
        } else {
            samples.push(sample(record, attr)?);
        }
    }
    Ok((samples, lost))
}
