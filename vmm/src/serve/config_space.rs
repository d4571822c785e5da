//! The configuration space of the device's PCI function: ids, base address registers and capabilities. Virtio 1.2
//! section 4.1 specifies the ids and the vendor capabilities.

use vpmu::abi;

/// Bytes of configuration space.
pub(super) const SIZE: usize = 256;

/// Offsets in [`REGISTERS`] of the structures that the capabilities name, and the bytes of each.
pub(super) const COMMON: u64 = 0x0000;
pub(super) const ISR: u64 = 0x1000;
pub(super) const CONFIG: u64 = 0x2000;
pub(super) const NOTIFY: u64 = 0x3000;
const STRUCTURE: u32 = 0x1000;
/// Bytes between the notification addresses of two queues.
pub(super) const NOTIFY_STRIDE: u64 = 4;

/// The base address registers: their indices, which are also the regions' in vfio.
pub(super) const REGISTERS: u32 = 0;
pub(super) const MSIX: u32 = 1;
pub(super) const WINDOW: u32 = 2;
pub(super) const DOORBELL: u32 = 4;
const BARS: usize = 6;

const COMMAND: usize = 0x04;
const STATUS: usize = 0x06;
const BAR: usize = 0x10;
const SUBSYSTEM: usize = 0x2c;
const CAPABILITIES: usize = 0x34;
const INTERRUPT_LINE: usize = 0x3c;
const FIRST_CAPABILITY: usize = 0x40;

/// Bit of the status register: there is a list of capabilities.
const HAS_CAPABILITIES: u16 = 1 << 4;
/// Bits of a base address register.
const IS_64_BIT: u32 = 0b0100;
const IS_PREFETCHABLE: u32 = 0b1000;

const VIRTIO_VENDOR: u16 = 0x1af4;
/// Added to a virtio device id.
const VIRTIO_DEVICE: u16 = 0x1040;
/// Signal processing controller, performance counters.
const CLASS: [u8; 3] = [0x00, 0x01, 0x11];
const MODERN_REVISION: u8 = 1;

const CAP_VENDOR: u8 = 0x09;
const CAP_MSIX: u8 = 0x11;
/// Types of virtio's vendor capabilities.
const COMMON_CFG: u8 = 1;
const NOTIFY_CFG: u8 = 2;
const ISR_CFG: u8 = 3;
const DEVICE_CFG: u8 = 4;
const SHARED_MEMORY_CFG: u8 = 8;

/// Bytes of the table's half of [`MSIX`]. The pending bits follow.
const MSIX_TABLE: u32 = 0x8000;
/// The byte of the MSI-X capability that has the upper half of its message control.
const MSIX_CONTROL: usize = 3;
/// Bits of that byte: the vectors are enabled, and all are masked.
const MSIX_ENABLE_AND_MASK: u8 = 0b1100_0000;

/// Configuration space.
#[derive(Debug, Clone)]
pub(super) struct ConfigSpace {
    bytes: [u8; SIZE],
    bars: [u64; BARS],
    /// Offset of the MSI-X capability.
    msix: usize,
}

impl ConfigSpace {
    /// The space of a device with a window of `window` bytes, a power of two, and `vectors` vectors.
    pub(super) fn new(window: u64, vectors: u16) -> Self {
        let mut bars = [0; BARS];
        bars[REGISTERS as usize] = u64::from(4 * STRUCTURE);
        bars[MSIX as usize] = u64::from(2 * MSIX_TABLE);
        bars[WINDOW as usize] = window;
        bars[DOORBELL as usize] = abi::PAGE_SIZE as u64;
        let mut space = Self { bytes: [0; SIZE], bars, msix: 0 };
        let device = VIRTIO_DEVICE + u16::try_from(abi::DEVICE_ID).unwrap_or(0);
        space.put(0, &VIRTIO_VENDOR.to_le_bytes());
        space.put(2, &device.to_le_bytes());
        space.put(STATUS, &HAS_CAPABILITIES.to_le_bytes());
        space.put(8, &[MODERN_REVISION]);
        space.put(9, &CLASS);
        space.put(SUBSYSTEM, &VIRTIO_VENDOR.to_le_bytes());
        space.put(SUBSYSTEM + 2, &device.to_le_bytes());
        space.put(BAR + 4 * WINDOW as usize, &(IS_64_BIT | IS_PREFETCHABLE).to_le_bytes());
        space.put(BAR + 4 * DOORBELL as usize, &IS_64_BIT.to_le_bytes());
        space.add_capabilities(window, vectors);
        space
    }

    fn add_capabilities(&mut self, window: u64, vectors: u16) {
        let register = |kind, offset: u64, more: &[u32]| {
            let [low, _] = halves(offset);
            vendor(kind, REGISTERS, 0, [&[low, STRUCTURE], more].concat())
        };
        let shared = |bar, id, size| {
            let [low, high] = halves(size);
            vendor(SHARED_MEMORY_CFG, bar, id, vec![0, low, 0, high])
        };
        let stride = u32::try_from(NOTIFY_STRIDE).unwrap_or(0);
        let last = vectors.saturating_sub(1).to_le_bytes();
        let msix = [&[CAP_MSIX, 0][..], &last, &MSIX.to_le_bytes(), &(MSIX_TABLE | MSIX).to_le_bytes()].concat();
        let capabilities = [
            register(COMMON_CFG, COMMON, &[]),
            register(ISR_CFG, ISR, &[]),
            register(DEVICE_CFG, CONFIG, &[]),
            register(NOTIFY_CFG, NOTIFY, &[stride]),
            shared(DOORBELL, abi::SHM_DOORBELL, abi::PAGE_SIZE as u64),
            shared(WINDOW, abi::SHM_WINDOW, window),
            msix,
        ];
        let (mut link, mut at) = (CAPABILITIES, FIRST_CAPABILITY);
        for capability in capabilities {
            // Configuration space has 256 bytes, and these capabilities fit.
            self.put(link, &[u8::try_from(at).unwrap_or(0)]);
            self.put(at, &capability[..1]);
            self.put(at + 2, &capability[2..]);
            if capability[0] == CAP_MSIX {
                self.msix = at;
            }
            link = at + 1;
            at += capability.len().next_multiple_of(4);
        }
    }

    fn put(&mut self, at: usize, bytes: &[u8]) {
        if let Some(place) = self.bytes.get_mut(at..at + bytes.len()) {
            place.copy_from_slice(bytes);
        }
    }

    /// Bytes of a region. Zero if the device does not have the region.
    pub(super) fn bar(&self, index: u32) -> u64 {
        usize::try_from(index).ok().and_then(|index| self.bars.get(index)).copied().unwrap_or(0)
    }

    /// Reads from `offset` on. Bytes beyond the end are zero.
    pub(super) fn read(&self, offset: u64, data: &mut [u8]) {
        let start = usize::try_from(offset).unwrap_or(SIZE);
        for (index, byte) in data.iter_mut().enumerate() {
            *byte = self.bytes.get(start.saturating_add(index)).copied().unwrap_or(0);
        }
    }

    /// Writes `data` at `offset`. Only the command register, the interrupt line, addresses, and the two bits of MSI-X
    /// can be written.
    pub(super) fn write(&mut self, offset: u64, data: &[u8]) {
        let start = usize::try_from(offset).unwrap_or(SIZE);
        for (index, &byte) in data.iter().enumerate() {
            let at = start.saturating_add(index);
            let mask = self.writable(at);
            if let Some(place) = self.bytes.get_mut(at) {
                *place = *place & !mask | byte & mask;
            }
        }
    }

    /// The bits of the byte `at` that can be written. An address can be written only in the bits above its size, which
    /// is how software finds out the size.
    fn writable(&self, at: usize) -> u8 {
        match at {
            COMMAND..STATUS | INTERRUPT_LINE => 0xff,
            BAR..0x28 => {
                let (bar, byte) = ((at - BAR) / 4, (at - BAR) % 4);
                let upper = bar.checked_sub(1).filter(|&low| self.is_64_bit(low));
                let size = self.bars[upper.unwrap_or(bar)];
                let mask = if size == 0 { 0 } else { !(size - 1) & !0xf };
                mask.to_le_bytes()[if upper.is_some() { 4 + byte } else { byte }]
            }
            // A VMM may leave these bits to the device: Cloud Hypervisor writes them and reads them here.
            _ if at == self.msix + MSIX_CONTROL => MSIX_ENABLE_AND_MASK,
            _ => 0,
        }
    }

    /// The guest-physical address at which the guest has put a 64-bit region.
    pub(super) fn address(&self, bar: u32) -> u64 {
        let mut bytes = [0; 8];
        self.read(BAR as u64 + 4 * u64::from(bar), &mut bytes);
        u64::from_le_bytes(bytes) & !0xf
    }

    fn is_64_bit(&self, bar: usize) -> bool {
        self.bars[bar] > 0 && u32::from(self.bytes[BAR + 4 * bar]) & IS_64_BIT != 0
    }
}

fn halves(value: u64) -> [u32; 2] {
    let [a, b, c, d, e, f, g, h] = value.to_le_bytes();
    [[a, b, c, d], [e, f, g, h]].map(u32::from_le_bytes)
}

/// A vendor capability of virtio. `words` begins with the offset and the length.
fn vendor(kind: u8, bar: u32, id: u8, words: Vec<u32>) -> Vec<u8> {
    let bar = u8::try_from(bar).unwrap_or(0);
    let mut bytes = vec![CAP_VENDOR, 0, 0, kind, bar, id, 0, 0];
    bytes.extend(words.into_iter().flat_map(u32::to_le_bytes));
    bytes[2] = u8::try_from(bytes.len()).unwrap_or(0);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn space() -> ConfigSpace {
        ConfigSpace::new(16 << 20, 5)
    }

    fn read<const N: usize>(space: &ConfigSpace, at: usize) -> [u8; N] {
        let mut bytes = [0xee; N];
        space.read(at as u64, &mut bytes);
        bytes
    }

    /// The offsets of all capabilities, in the list's order.
    fn capabilities(space: &ConfigSpace) -> Vec<usize> {
        let next = |at: usize| Some(usize::from(read::<1>(space, at)[0])).filter(|&at| at != 0);
        std::iter::successors(next(CAPABILITIES), |&at| next(at + 1)).collect()
    }

    #[test]
    fn ids_are_virtios() {
        assert_eq!(read::<4>(&space(), 0), [0xf4, 0x1a, 0x7f, 0x10]);
        assert_eq!(read::<4>(&space(), 252), [0; 4]);
        assert_eq!(read::<4>(&space(), 254), [0; 4]);
    }

    #[test]
    fn capabilities_name_each_structure_once() {
        let space = space();
        let found = capabilities(&space);
        let kinds: Vec<[u8; 4]> =
            found.iter().map(|&at| read(&space, at)).map(|[id, _, len, kind]| [id, 0, len, kind]).collect();
        let vendor = |len, kind| [CAP_VENDOR, 0, len, kind];
        let expected = [
            vendor(16, COMMON_CFG),
            vendor(16, ISR_CFG),
            vendor(16, DEVICE_CFG),
            vendor(20, NOTIFY_CFG),
            vendor(24, SHARED_MEMORY_CFG),
            vendor(24, SHARED_MEMORY_CFG),
        ];
        assert_eq!(kinds[..6], expected);
        assert_eq!((kinds.len(), kinds[6][0]), (7, CAP_MSIX));
        // 5 vectors: the register has the last one's number.
        assert_eq!(read::<2>(&space, found[6] + 2), [4, 0]);
        assert!(found.iter().all(|at| at % 4 == 0 && *at < SIZE));
    }

    #[test]
    fn size_of_a_region_is_found_by_writing_ones() {
        let mut space = space();
        let bar = |index: u32| BAR + 4 * index as usize;
        for (index, low, high) in [(REGISTERS, 0xffff_c000_u32, 0_u32), (WINDOW, 0xff00_000c, u32::MAX)] {
            space.write(bar(index) as u64, &[0xff; 8]);
            let [a, b] = halves(u64::from_le_bytes(read(&space, bar(index))));
            assert_eq!(a, low, "region {index}");
            assert!(index == REGISTERS || b == high, "region {index}");
        }
        space.write(bar(DOORBELL) as u64, &0x12_3456_7000_u64.to_le_bytes());
        assert_eq!(space.address(DOORBELL), 0x12_3456_7000);
    }

    #[test]
    fn msix_is_enabled_and_masked_by_writing() {
        let mut space = space();
        let at = capabilities(&space)[6] + 2;
        for (written, kept) in [(0xffff_u16, 0xc004_u16), (0x8004, 0x8004), (0, 4)] {
            space.write(at as u64, &written.to_le_bytes());
            assert_eq!(u16::from_le_bytes(read(&space, at)), kept, "{written:#x}");
        }
    }

    #[test]
    fn ids_and_capabilities_cannot_be_written() {
        let mut space = space();
        let before: [u8; SIZE] = read(&space, 0);
        space.write(0, &[0; 4]);
        space.write(FIRST_CAPABILITY as u64, &[0xff; 190]);
        space.write(u64::MAX, &[1, 2]);
        // The two bits that can be written
        space.write((space.msix + MSIX_CONTROL) as u64, &[0]);
        assert_eq!(read::<SIZE>(&space, 0), before);
        space.write(COMMAND as u64, &[6, 0]);
        assert_eq!(read::<2>(&space, COMMAND), [6, 0]);
    }
}
