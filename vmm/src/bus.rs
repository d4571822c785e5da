//! Dispatches accesses to devices by address, for both ports and memory.

use std::fmt::Debug;
use std::sync::Arc;

use vpmu::{Registers, VcpuSession};

/// The vCPU that makes an access. Devices handle the access on this vCPU's thread.
#[expect(missing_debug_implementations, reason = "holds a borrowed trait object")]
pub struct Caller<'a> {
    /// The vCPU's index.
    pub vcpu: u32,
    /// The vCPU's registers. They are fetched only if a device needs them.
    pub registers: &'a mut dyn Registers,
    /// The vCPU's session with the paravirtual PMU; `None` if the PMU is disabled.
    pub pmu: Option<&'a mut VcpuSession>,
}

/// A device on a [`Bus`]. vCPU threads access it concurrently.
pub trait Device: Send + Sync + Debug {
    /// Reads `data` from `offset`.
    fn read(&self, offset: u64, data: &mut [u8]);
    /// Writes `data` at `offset`.
    fn write(&self, offset: u64, data: &[u8], caller: &mut Caller<'_>);
}

#[derive(Debug)]
struct Range {
    start: u64,
    end: u64,
    device: Arc<dyn Device>,
}

/// Devices by address. Reads of an address that no device claims return all ones, and writes to it are dropped,
/// as on a PC.
#[derive(Debug, Default)]
pub struct Bus {
    ranges: Vec<Range>,
}

/// Two devices claim the same address. This is an error in the layout, which is detected when the machine is built.
#[derive(Debug, thiserror::Error)]
#[error("the device at {0:#x} overlaps another device")]
pub struct Overlap(u64);

impl Bus {
    /// A bus without devices.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds `device`, which claims `size` addresses starting at `start`.
    ///
    /// # Errors
    /// [`Overlap`] if another device claims one of the addresses, or an address exceeds 64 bits.
    pub fn insert(&mut self, start: u64, size: u64, device: Arc<dyn Device>) -> Result<(), Overlap> {
        let end = start.checked_add(size).ok_or(Overlap(start))?;
        let place = self.ranges.partition_point(|range| range.start < start);
        let below = place.checked_sub(1).and_then(|i| self.ranges.get(i));
        let above = self.ranges.get(place);
        if below.is_some_and(|range| range.end > start) || above.is_some_and(|range| range.start < end) {
            return Err(Overlap(start));
        }
        self.ranges.insert(place, Range { start, end, device });
        Ok(())
    }

    /// The device that claims the whole range `[address, address + size)`, and the offset of `address` in that device.
    fn find(&self, address: u64, size: usize) -> Option<(&dyn Device, u64)> {
        let place = self.ranges.partition_point(|range| range.start <= address);
        let range = self.ranges.get(place.checked_sub(1)?)?;
        let end = address.checked_add(size as u64)?;
        (end <= range.end).then(|| (&*range.device, address - range.start))
    }

    /// Reads `data` from `address`.
    pub fn read(&self, address: u64, data: &mut [u8]) {
        match self.find(address, data.len()) {
            Some((device, offset)) => device.read(offset, data),
            None => data.fill(0xff),
        }
    }

    /// Writes `data` to `address`.
    pub fn write(&self, address: u64, data: &[u8], caller: &mut Caller<'_>) {
        if let Some((device, offset)) = self.find(address, data.len()) {
            device.write(offset, data, caller);
        }
    }
}

/// The buses of a machine that is being built.
#[derive(Debug, Default)]
pub struct Buses {
    /// Devices by port; empty on an architecture without ports.
    pub ports: Bus,
    /// Devices by address.
    pub memory: Bus,
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use std::sync::Mutex;
    use vpmu::GuestRegs;

    /// A vCPU whose registers cannot be read.
    #[derive(Debug)]
    pub(crate) struct NoRegisters;

    impl Registers for NoRegisters {
        fn registers(&mut self) -> Option<GuestRegs> {
            None
        }
    }

    /// Calls `f` with a [`Caller`] for vCPU `vcpu`.
    pub(crate) fn as_vcpu<R>(vcpu: u32, f: impl FnOnce(&mut Caller<'_>) -> R) -> R {
        f(&mut Caller { vcpu, registers: &mut NoRegisters, pmu: None })
    }

    #[derive(Debug, Default)]
    struct Log(Mutex<Vec<(u64, Vec<u8>)>>);

    impl Device for Log {
        fn read(&self, offset: u64, data: &mut [u8]) {
            data.fill(u8::try_from(offset).expect("small"));
        }
        fn write(&self, offset: u64, data: &[u8], _caller: &mut Caller<'_>) {
            self.0.lock().expect("whole").push((offset, data.to_vec()));
        }
    }

    #[test]
    fn accesses_reach_the_device_that_covers_them() {
        let mut bus = Bus::new();
        let (a, b) = (Arc::new(Log::default()), Arc::new(Log::default()));
        bus.insert(0x100, 8, a.clone()).expect("free");
        bus.insert(0x108, 8, b.clone()).expect("free");
        let mut data = [0];
        bus.read(0x107, &mut data);
        assert_eq!(data, [7]);
        bus.read(0x108, &mut data);
        assert_eq!(data, [0]);
        as_vcpu(0, |caller| bus.write(0x10c, &[1, 2], caller));
        assert_eq!(*b.0.lock().expect("whole"), [(4, vec![1, 2])]);
        assert!(a.0.lock().expect("whole").is_empty());
    }

    #[test]
    fn nothing_answers_outside_or_across() {
        let mut bus = Bus::new();
        let device = Arc::new(Log::default());
        bus.insert(0x100, 8, device.clone()).expect("free");
        for address in [0xff, 0x107, 0x108, u64::MAX] {
            let mut data = [0; 2];
            bus.read(address, &mut data);
            assert_eq!(data, [0xff; 2], "{address:#x}");
            as_vcpu(0, |caller| bus.write(address, &data, caller));
        }
        assert!(device.0.lock().expect("whole").is_empty());
    }

    #[test]
    fn devices_cannot_overlap() {
        let mut bus = Bus::new();
        bus.insert(0x100, 8, Arc::new(Log::default())).expect("free");
        for (start, size) in [(0x100, 8), (0x107, 1), (0xff, 2), (0x80, 0x100)] {
            assert!(bus.insert(start, size, Arc::new(Log::default())).is_err());
        }
        bus.insert(0xff, 1, Arc::new(Log::default())).expect("free");
    }
}
