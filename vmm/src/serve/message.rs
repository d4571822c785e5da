//! Messages of the vfio-user protocol, version 0: the header, the requests that a VMM sends to a device, and the
//! answers. `docs/interop/vfio-user.rst` of QEMU specifies them.

use std::fs::File;

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Maximum number of bytes after the header. This end offers it to the VMM as `max_data_xfer_size`, which has room for
/// the fields before the data.
pub(super) const MAX_BODY: usize = MAX_DATA + 64;
/// Maximum number of bytes of data in one access to a region.
pub(super) const MAX_DATA: usize = 4096;
/// Maximum number of descriptors with one message.
pub(super) const MAX_FILES: usize = 16;

const VERSION: u16 = 1;
const DMA_MAP: u16 = 2;
const DMA_UNMAP: u16 = 3;
const DEVICE_GET_INFO: u16 = 4;
const DEVICE_GET_REGION_INFO: u16 = 5;
const DEVICE_GET_IRQ_INFO: u16 = 7;
const DEVICE_SET_IRQS: u16 = 8;
const REGION_READ: u16 = 9;
const REGION_WRITE: u16 = 10;
const DEVICE_RESET: u16 = 13;

const TYPE_MASK: u32 = 0xf;
const TYPE_REPLY: u32 = 1;
const NO_REPLY: u32 = 1 << 4;
const ERROR: u32 = 1 << 5;

/// The header of each message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct Header {
    /// The VMM's number of the request. The answer has the same number.
    id: u16,
    command: u16,
    /// Bytes of the message, including the header.
    size: u32,
    flags: u32,
    error: u32,
}

pub(super) const HEADER: usize = size_of::<Header>();

impl Header {
    /// Bytes after the header. `None` if the header is not one of a request, or the message is too long.
    pub(super) fn body(&self) -> Option<usize> {
        let body = usize::try_from(self.size).ok()?.checked_sub(HEADER)?;
        (self.flags & TYPE_MASK == 0 && body <= MAX_BODY).then_some(body)
    }

    pub(super) fn wants_reply(&self) -> bool {
        self.flags & NO_REPLY == 0
    }

    /// The header of the answer with `body` bytes after the header.
    pub(super) fn reply(&self, body: usize) -> Self {
        let size = u32::try_from(HEADER + body).unwrap_or(u32::MAX);
        Self { size, flags: TYPE_REPLY, error: 0, ..*self }
    }

    /// The header of the answer to a request that failed.
    pub(super) fn refusal(&self, error: Refused) -> Self {
        Self { flags: TYPE_REPLY | ERROR, error: error.errno(), ..self.reply(0) }
    }
}

/// Why a request has failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Refused {
    /// The device does not have what the request names.
    Invalid,
    /// This end does not have the command.
    Unsupported,
    /// The host could not map the memory.
    Memory,
}

impl Refused {
    fn errno(self) -> u32 {
        let errno = match self {
            Self::Invalid => libc::EINVAL,
            Self::Unsupported => libc::EOPNOTSUPP,
            Self::Memory => libc::ENOMEM,
        };
        errno.cast_unsigned()
    }
}

/// A request of the VMM.
#[derive(Debug)]
pub(super) enum Request<'a> {
    /// The versions that the VMM speaks.
    Version {
        major: u16,
    },
    /// A range of the guest's memory.
    DmaMap {
        range: Range,
        writable: bool,
        offset: u64,
        file: Option<File>,
    },
    /// A range of memory that the guest no longer has. `None` for all ranges.
    DmaUnmap {
        range: Option<Range>,
    },
    DeviceInfo,
    RegionInfo {
        index: u32,
    },
    IrqInfo {
        index: u32,
    },
    /// Eventfds for vectors from `start` on. Without files, `count` vectors lose theirs.
    SetIrqs {
        index: u32,
        start: u32,
        count: u32,
        files: Vec<File>,
    },
    Read {
        access: Access,
    },
    Write {
        access: Access,
        data: &'a [u8],
    },
    Reset,
}

/// A range of guest-physical addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Range {
    pub(super) address: u64,
    pub(super) size: u64,
}

/// An access to a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct Access {
    pub(super) offset: u64,
    pub(super) region: u32,
    /// Bytes.
    pub(super) count: u32,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct DmaMap {
    argsz: u32,
    flags: u32,
    offset: u64,
    address: u64,
    size: u64,
}

const DMA_READ: u32 = 1;
const DMA_WRITE: u32 = 1 << 1;

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct DmaUnmap {
    argsz: u32,
    flags: u32,
    address: u64,
    size: u64,
}

const UNMAP_ALL: u32 = 1 << 1;

/// The bytes of a structure, as its field `argsz` has them.
#[expect(clippy::cast_possible_truncation, reason = "the structures have a few bytes")]
pub(super) const fn argsz<T>() -> u32 {
    size_of::<T>() as u32
}

/// `struct vfio_device_info` without capabilities.
#[derive(Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct DeviceInfo {
    pub(super) argsz: u32,
    pub(super) flags: u32,
    pub(super) regions: u32,
    pub(super) irqs: u32,
}

/// `struct vfio_region_info`.
#[derive(Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct RegionInfo {
    pub(super) argsz: u32,
    pub(super) flags: u32,
    pub(super) index: u32,
    pub(super) cap_offset: u32,
    pub(super) size: u64,
    pub(super) offset: u64,
}

/// `struct vfio_irq_info`.
#[derive(Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct IrqInfo {
    pub(super) argsz: u32,
    pub(super) flags: u32,
    pub(super) index: u32,
    pub(super) count: u32,
}

/// `struct vfio_irq_set` without data.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct IrqSet {
    argsz: u32,
    flags: u32,
    index: u32,
    start: u32,
    count: u32,
}

const IRQ_DATA_EVENTFD: u32 = 1 << 2;
const IRQ_ACTION_TRIGGER: u32 = 1 << 5;

/// The head of `body`, as a `T`.
fn head<T: FromBytes + KnownLayout + Immutable>(body: &[u8]) -> Result<(T, &[u8]), Refused> {
    T::read_from_prefix(body).map_err(|_| Refused::Invalid)
}

impl<'a> Request<'a> {
    /// Reads the request with this `header` and `body`, and the `files` that came with it.
    ///
    /// # Errors
    /// [`Refused::Unsupported`] for an unknown command, [`Refused::Invalid`] for a body that does not fit the command.
    pub(super) fn parse(header: &Header, body: &'a [u8], mut files: Vec<File>) -> Result<Self, Refused> {
        Ok(match header.command {
            VERSION => {
                let (major, _) = head(body)?;
                Self::Version { major }
            }
            DMA_MAP => {
                let (map, _) = head::<DmaMap>(body)?;
                let range = Range { address: map.address, size: map.size };
                let access = map.flags & (DMA_READ | DMA_WRITE);
                if access & DMA_READ == 0 {
                    return Err(Refused::Invalid);
                }
                Self::DmaMap { range, writable: access & DMA_WRITE != 0, offset: map.offset, file: files.pop() }
            }
            DMA_UNMAP => {
                let (unmap, _) = head::<DmaUnmap>(body)?;
                let range = Range { address: unmap.address, size: unmap.size };
                Self::DmaUnmap { range: (unmap.flags & UNMAP_ALL == 0).then_some(range) }
            }
            DEVICE_GET_INFO => Self::DeviceInfo,
            DEVICE_GET_REGION_INFO => Self::RegionInfo { index: head::<RegionInfo>(body)?.0.index },
            DEVICE_GET_IRQ_INFO => Self::IrqInfo { index: head::<IrqInfo>(body)?.0.index },
            DEVICE_SET_IRQS => {
                let (set, _) = head::<IrqSet>(body)?;
                let triggers = set.flags & IRQ_ACTION_TRIGGER != 0;
                if triggers && set.flags & IRQ_DATA_EVENTFD == 0 && set.count > 0 {
                    // The VMM wants to raise an interrupt itself, or to test one.
                    return Err(Refused::Unsupported);
                }
                // Masks are the VMM's own matter.
                let count = if triggers { set.count } else { 0 };
                Self::SetIrqs { index: set.index, start: set.start, count, files }
            }
            REGION_READ => {
                let (access, _) = head::<Access>(body)?;
                Self::Read { access: access.bounded()? }
            }
            REGION_WRITE => {
                let (access, data) = head::<Access>(body)?;
                let data = data.get(..access.bounded()?.count as usize).ok_or(Refused::Invalid)?;
                Self::Write { access, data }
            }
            DEVICE_RESET => Self::Reset,
            _ => return Err(Refused::Unsupported),
        })
    }
}

impl Access {
    fn bounded(self) -> Result<Self, Refused> {
        if self.count as usize > MAX_DATA { Err(Refused::Invalid) } else { Ok(self) }
    }
}

/// The answer to [`Request::Version`]: the version, and what this end takes, as JSON.
pub(super) fn version() -> Vec<u8> {
    let limits = serde_json::json!({
        "capabilities": { "max_msg_fds": MAX_FILES, "max_data_xfer_size": MAX_DATA }
    });
    let mut body = [MAJOR, MINOR].map(u16::to_ne_bytes).concat();
    body.extend_from_slice(limits.to_string().as_bytes());
    body.push(0);
    body
}

/// The answer to [`Request::DmaUnmap`]: the request again.
pub(super) fn unmapped(range: Option<Range>) -> Vec<u8> {
    let all = if range.is_none() { UNMAP_ALL } else { 0 };
    let Range { address, size } = range.unwrap_or(Range { address: 0, size: 0 });
    DmaUnmap { argsz: argsz::<DmaUnmap>(), flags: all, address, size }.as_bytes().to_vec()
}

/// The version that this end speaks. QEMU accepts no higher minor version than its own.
pub(super) const MAJOR: u16 = 0;
const MINOR: u16 = 0;

#[cfg(test)]
mod tests {
    use super::*;

    fn header(command: u16, body: usize) -> Header {
        Header { id: 7, command, size: u32::try_from(HEADER + body).expect("small"), flags: 0, error: 0 }
    }

    #[test]
    fn access_has_its_data() {
        let access = Access { offset: 0x3000, region: 0, count: 2 };
        let body = [access.as_bytes(), &[5, 0, 9]].concat();
        let request = Request::parse(&header(REGION_WRITE, body.len()), &body, Vec::new());
        let Ok(Request::Write { access: read, data }) = request else { panic!("{request:?}") };
        assert_eq!((read, data), (access, &[5, 0][..]));
    }

    #[test]
    fn access_beyond_its_data_is_refused() {
        for (count, data) in [(3, 2), (u32::MAX, 0), (5000, 5000)] {
            let access = Access { offset: 0, region: 0, count };
            let body = [access.as_bytes(), &vec![0; data]].concat();
            let refused = Request::parse(&header(REGION_WRITE, body.len()), &body, Vec::new());
            assert_eq!(refused.err(), Some(Refused::Invalid), "{count} {data}");
        }
    }

    #[test]
    fn short_bodies_are_refused() {
        for command in [VERSION, DMA_MAP, DMA_UNMAP, DEVICE_GET_REGION_INFO, DEVICE_SET_IRQS, REGION_READ, REGION_WRITE]
        {
            let refused = Request::parse(&header(command, 1), &[0], Vec::new());
            assert_eq!(refused.err(), Some(Refused::Invalid), "{command}");
        }
        let unknown = Request::parse(&header(99, 0), &[], Vec::new());
        assert_eq!(unknown.err(), Some(Refused::Unsupported));
    }

    #[test]
    fn header_bounds_the_message() {
        assert_eq!(header(REGION_READ, 16).body(), Some(16));
        let with = |size, flags| Header { size, flags, ..header(REGION_READ, 0) };
        for bad in [with(15, 0), with(u32::MAX, 0), with(16, TYPE_REPLY)] {
            assert_eq!(bad.body(), None, "{bad:?}");
        }
    }

    #[test]
    fn answer_has_the_number_of_its_request() {
        let request = header(REGION_READ, 16);
        let answer = request.reply(20);
        assert_eq!((answer.id, answer.command, answer.size, answer.flags), (7, REGION_READ, 36, TYPE_REPLY));
        let refusal = request.refusal(Refused::Unsupported);
        assert_eq!((refusal.size, refusal.error), (16, 95));
    }
}
