//! A small guest with its own driver for the PMU device.

use vmm::arch::layout::VIRTIO;
use vpmu::abi::{CONTROL_OPEN, KIND_SOFTWARE, OpenReply, OpenRequest};
use zerocopy::IntoBytes;

use super::out;

/// The kernel's load address. The queue, the replies and the requests are placed after the kernel's code.
const LOAD: u32 = 0x20_0000;
const DESCRIPTORS: u32 = LOAD + 0x1000;
const AVAILABLE: u32 = LOAD + 0x2000;
const USED: u32 = LOAD + 0x3000;
const REPLIES: u32 = LOAD + 0x4000;
const REQUESTS: u32 = LOAD + 0x6000;
/// A kernel whose driver opens `events` events with `flags`. Each event counts the host's CPU clock, and samples if
/// `period` is not zero. When all requests have been answered, the kernel prints a byte and continues with the code in
/// `then`.
pub(crate) fn opening(events: u16, flags: u32, period: u64, then: &[u8]) -> Vec<u8> {
    let base = u32::try_from(VIRTIO).expect("below 4 GiB");
    let mut code = Vec::new();
    for (register, value) in [
        (0x70, 1),
        (0x70, 3),
        // F_RING and VIRTIO_F_VERSION_1.
        (0x24, 0),
        (0x20, 1),
        (0x24, 1),
        (0x20, 1),
        (0x70, 0xb),
        (0x30, 0),
        (0x38, 256),
        (0x80, DESCRIPTORS),
        (0x90, AVAILABLE),
        (0xa0, USED),
        (0x44, 1),
        (0x70, 0xf),
        (0x50, 0),
    ] {
        // mov ebx, register; mov dword [rbx], value
        code.push(0xbb);
        code.extend((base + register).to_le_bytes());
        code.extend([0xc7, 0x03]);
        code.extend(value.to_le_bytes());
    }
    // mov ebx, used.idx; cmp word [rbx], events; jne back
    code.push(0xbb);
    code.extend((USED + 2).to_le_bytes());
    code.extend([0x66, 0x81, 0x3b]);
    code.extend(events.to_le_bytes());
    code.extend([0x75, 0xf9]);
    code.extend(out(0x3f8, b'!'));
    code.extend(then);
    let mut image = code;
    let mut put = |address: u32, bytes: &[u8]| {
        let at = usize::try_from(address - LOAD).expect("small");
        image.resize(image.len().max(at), 0);
        image.extend(bytes);
    };
    let mut request = OpenRequest {
        kind: KIND_SOFTWARE.into(),
        flags: flags.into(),
        period: period.into(),
        ..OpenRequest::default()
    };
    request.header.op = CONTROL_OPEN.into();
    let (asked, answered) = (size_of::<OpenRequest>(), size_of::<OpenReply>());
    let (mut table, mut heads, mut requests) = (Vec::new(), vec![0, 0], Vec::new());
    heads.extend(events.to_le_bytes());
    for index in 0..events {
        let place = |base: u32, size: usize| base + u32::from(index) * u32::try_from(size).expect("small");
        let mut describe = |address: u32, len: usize, flags: u16, next: u16| {
            table.extend(u64::from(address).to_le_bytes());
            table.extend(u32::try_from(len).expect("small").to_le_bytes());
            table.extend(flags.to_le_bytes());
            table.extend(next.to_le_bytes());
        };
        describe(place(REQUESTS, asked), asked, 1, 2 * index + 1);
        describe(place(REPLIES, answered), answered, 2, 0);
        heads.extend((2 * index).to_le_bytes());
        requests.extend(request.as_bytes());
    }
    put(DESCRIPTORS, &table);
    put(AVAILABLE, &heads);
    put(REQUESTS, &requests);
    image
}
