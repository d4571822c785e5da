//! Records the stores of a vCPU to one address at which the hypervisor emulates each access. A VMM in another process
//! forwards such a store without the number of the vCPU. KVM writes its record on the vCPU's thread before the VMM sees the
//! store, and the vCPU does not run the guest before the VMM has handled it.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::sync::Arc;

use vpmu_perf::bindings::{PERF_SAMPLE_RAW, PERF_TYPE_TRACEPOINT, perf_event_attr};
use vpmu_perf::record::{Records, TYPE_SAMPLE};

use super::format::{Field, Format};
use super::raw::Raw;
use super::{Paranoid, Refusal, permission, read_format};
use crate::host::records::{Notice, notice};
use crate::host::ring::{HostRing, Pool};
use crate::host::sys;

const MMIO: &str = "kvm_mmio";
/// `KVM_TRACE_MMIO_WRITE`, a value of the tracepoint's field `type`.
const WRITE: u64 = 2;
/// Data pages of a ring. A vCPU waits for each of its stores, so there is at most one record for each vCPU.
const PAGES: usize = 1;

/// The tracepoint `kvm:kvm_mmio` of this host.
#[derive(Debug, Clone, Copy)]
pub struct StoreTracepoint {
    layout: Layout,
}

/// Positions of the fields in the raw data.
#[derive(Debug, Clone, Copy)]
struct Layout {
    id: u16,
    length: Field,
    address: Field,
    value: Field,
    /// Bytes of raw data that contain all these fields.
    end: usize,
}

impl StoreTracepoint {
    /// Finds the tracepoint in the host's tracefs.
    ///
    /// # Errors
    /// [`Refusal`].
    pub fn find() -> Result<Self, Refusal> {
        let layout = Layout::parse(&read_format(MMIO)?)?;
        if Paranoid::read().allows_tracepoints() || permission::is_capable() {
            Ok(Self { layout })
        } else {
            Err(Refusal::Permission)
        }
    }
}

impl Layout {
    fn parse(text: &str) -> Result<Self, Refusal> {
        let format = Format::parse(text).ok_or(Refusal::Field("ID"))?;
        let field = |name| format.field(name).ok_or(Refusal::Field(name));
        // The filter names this field, so it must exist.
        field("type")?;
        let (length, address, value) = (field("len")?, field("gpa")?, field("val")?);
        let end = [length, address, value].into_iter().map(Field::end).max().unwrap_or(0);
        Ok(Self { id: format.id, length, address, value, end })
    }

    /// Passes the values of the 32-bit stores to `address` to `found`, in the order in which they were made. Returns the
    /// number of records that are missing or unreadable.
    fn take(
        &self,
        address: u64,
        word: impl Fn(u64) -> u64,
        (size, tail, head): (u64, u64, u64),
        mut found: impl FnMut(u32),
    ) -> u64 {
        let mut missing = 0;
        for record in Records::new(&word, size, tail, head) {
            let raw = match &record {
                Err(_) => None,
                Ok(record) if record.header.kind == TYPE_SAMPLE => Raw::of(record, 0),
                Ok(record) => {
                    if let Some(Notice::Lost(lost)) = notice(record) {
                        missing += lost;
                    }
                    continue;
                }
            };
            let Some(raw) = raw.filter(|raw| raw.bytes().len() >= self.end) else {
                missing += 1;
                continue;
            };
            let of = |field: Field| field.of(raw.bytes());
            if of(self.address) == address && of(self.length) == 4 {
                let [a, b, c, d, ..] = of(self.value).to_le_bytes();
                found(u32::from_le_bytes([a, b, c, d]));
            }
        }
        missing
    }
}

/// The stores of one vCPU's thread.
#[derive(Debug)]
pub struct Stores {
    layout: Layout,
    thread: i32,
    event: File,
    ring: HostRing,
    /// The address in the event's filter, if it has one.
    address: Option<u64>,
}

impl Stores {
    /// Prepares to record the stores of `thread`, which may belong to another process.
    ///
    /// # Errors
    /// The host's error.
    pub fn open(tracepoint: &StoreTracepoint, thread: i32) -> io::Result<Self> {
        let layout = tracepoint.layout;
        let event = sys::open(&attr(layout.id), thread)?;
        let ring = HostRing::long(&event, PAGES, &Arc::new(Pool::new()))?;
        Ok(Self { layout, thread, event, ring, address: None })
    }

    /// From now on, records only the stores to `address`. Drops earlier records.
    ///
    /// # Errors
    /// The host's error; no stores are recorded then.
    pub fn watch(&mut self, address: u64) -> io::Result<()> {
        if self.address == Some(address) {
            self.take(drop);
            return Ok(());
        }
        // The host accepts one filter for an event.
        if self.address.is_some() {
            *self = Self::open(&StoreTracepoint { layout: self.layout }, self.thread)?;
        }
        let filter = CString::new(format!("type == {WRITE} && gpa == {address:#x}")).map_err(io::Error::other)?;
        sys::set_filter(&self.event, &filter)?;
        self.address = Some(address);
        sys::enable(&self.event)
    }

    /// Passes the values of the recorded 32-bit stores to `found`, oldest first, and removes the records. Returns the number
    /// of records that are missing or unreadable.
    pub fn take(&mut self, found: impl FnMut(u32)) -> u64 {
        let Some(stretch) = self.ring.stretch() else {
            return 0;
        };
        let Some(address) = self.address else {
            return 0;
        };
        let bounds = (self.ring.size(), stretch.tail, stretch.head);
        self.layout.take(address, |offset| stretch.word(offset), bounds, found)
    }
}

fn attr(id: u16) -> perf_event_attr {
    let mut attr = perf_event_attr {
        type_: PERF_TYPE_TRACEPOINT,
        config: id.into(),
        sample_type: u64::from(PERF_SAMPLE_RAW),
        ..perf_event_attr::default()
    };
    attr.__bindgen_anon_1.sample_period = 1;
    attr.set_disabled(1);
    // No thread waits for the event's wakeups.
    attr.set_watermark(1);
    attr.__bindgen_anon_2.wakeup_watermark = u32::MAX;
    attr
}

#[cfg(test)]
mod tests {
    use vpmu_perf::record::TYPE_LOST;

    use super::*;

    const FORMAT: &str = "name: kvm_mmio
ID: 1490
format:
\tfield:unsigned short common_type;\toffset:0;\tsize:2;\tsigned:0;
\tfield:int common_pid;\toffset:4;\tsize:4;\tsigned:1;

\tfield:u32 type;\toffset:8;\tsize:4;\tsigned:0;
\tfield:u32 len;\toffset:12;\tsize:4;\tsigned:0;
\tfield:u64 gpa;\toffset:16;\tsize:8;\tsigned:0;
\tfield:u64 val;\toffset:24;\tsize:8;\tsigned:0;
";
    const DOORBELL: u64 = 0x38_0000_1000;

    /// The words of a record of a store.
    fn store(length: u32, address: u64, value: u64) -> Vec<u64> {
        let mut raw = 36_u32.to_le_bytes().to_vec();
        raw.extend([0; 8]);
        raw.extend(2_u32.to_le_bytes());
        raw.extend(length.to_le_bytes());
        raw.extend(address.to_le_bytes());
        raw.extend(value.to_le_bytes());
        raw.resize(40, 0);
        record(TYPE_SAMPLE, raw.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word)).collect())
    }

    fn record(kind: u32, body: Vec<u64>) -> Vec<u64> {
        let size = 8 * (1 + body.len() as u64);
        [vec![u64::from(kind) | size << 48], body].concat()
    }

    fn taken(records: &[Vec<u64>]) -> (Vec<u32>, u64) {
        let words = records.concat();
        let mut ring = words.clone();
        ring.resize(64, 0);
        let mut values = Vec::new();
        let word = |offset: u64| ring[usize::try_from(offset / 8).expect("small")];
        let layout = Layout::parse(FORMAT).expect("a format");
        let missing = layout.take(DOORBELL, word, (512, 0, 8 * words.len() as u64), |value| values.push(value));
        (values, missing)
    }

    #[test]
    fn stores_to_the_address_are_found_in_order() {
        let records =
            [store(4, DOORBELL, 7), store(4, DOORBELL + 4, 8), store(8, DOORBELL, 9), store(4, DOORBELL, 0xffff_ffff)];
        assert_eq!(taken(&records), (vec![7, u32::MAX], 0));
    }

    #[test]
    fn missing_and_unreadable_records_are_counted() {
        let short = record(TYPE_SAMPLE, vec![12, 0]);
        let lying = record(TYPE_SAMPLE, vec![u64::from(u32::MAX), 0]);
        let lost = record(TYPE_LOST, vec![1, 5]);
        assert_eq!(taken(&[short, lost, store(4, DOORBELL, 1), lying]), (vec![1], 7));
    }

    #[test]
    fn format_without_a_field_is_refused() {
        for name in ["type", "len", "gpa", "val"] {
            let text = FORMAT.replace(&format!(" {name};"), " other;");
            assert!(matches!(Layout::parse(&text), Err(Refusal::Field(missing)) if missing == name), "{name}");
        }
    }
}
