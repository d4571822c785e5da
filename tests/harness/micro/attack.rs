//! Guests that attack the device directly, with many events, buffers full of commands, and malformed chains.

use super::code::Code;
use super::device::{AVAILABLE, Device, ENTRIES, NOTIFY, USED, queue};

/// The address of the commands in a full buffer, and the address of the room for their replies.
const COMMANDS: u32 = 0xa0_0000;
const REPLIES: u32 = 0xb0_0000;
/// Maximum number of commands in one notification.
pub const MOST_COMMANDS: u32 = 2048;
/// Size of a command and size of its reply, in bytes.
const COMMAND: u32 = 32;
const REPLY: u32 = 40;

/// Sends the last control request of `device` again, `times` times. Does not check the replies.
#[must_use]
pub fn again(device: &mut Device, times: u32) -> Code {
    let control = queue(0);
    let (given, wanted) = device.give_again(0, times);
    // mov ebp, given; next: add ebp, 1 << 16
    let code =
        Code::new().raw(&[0xbd]).raw(&(given << 16).to_le_bytes()).raw(&[0x81, 0xc5]).raw(&(1_u32 << 16).to_le_bytes());
    // mov ebx, AVAILABLE; mov [ebx], ebp; mov ebx, NOTIFY; mov dword [ebx], 0
    let body = Code::new()
        .raw(&[0xbb])
        .raw(&(control + AVAILABLE).to_le_bytes())
        .raw(&[0x89, 0x2b])
        .store(NOTIFY, 0)
        // mov ebx, USED; wait: pause; cmp [ebx], ebp; jne wait
        .raw(&[0xbb])
        .raw(&(control + USED).to_le_bytes())
        .raw(&[0xf3, 0x90, 0x39, 0x2b, 0x75, 0xfa])
        // cmp ebp, wanted
        .raw(&[0x81, 0xfd])
        .raw(&(wanted << 16).to_le_bytes());
    // jne next
    let back = i32::try_from(body.bytes().len() + 6 + 6).expect("a short loop");
    code.then(&body).raw(&[0x0f, 0x85]).raw(&(-back).to_le_bytes())
}

/// Opens and closes members of a group forever, with as many requests in each notification as the queue has entries.
/// The last control request of `device` must have opened a member. `next` is the id of the next event. Also returns the
/// code of the first notification, which must run once, right before.
#[must_use]
pub fn open_and_close_for_ever(device: &mut Device, next: u32) -> (Code, Code) {
    const CLOSE: u64 = 2;
    const CLOSES: u32 = 0xd0_0000;
    const LENGTH: u32 = 16;
    const PAIRS: u32 = ENTRIES / 2;
    let control = queue(0);
    let (given, _) = device.give_again(0, 0);
    assert!(given.is_multiple_of(2), "a pair starts at an even entry");
    let mut code = Code::new();
    for pair in 0..PAIRS {
        // Descriptors 0 and 1 are the request that opens a member, and the room for replies. All requests share it.
        let (close, descriptor) = (CLOSES + pair * LENGTH, 2 + pair);
        let entry = control + AVAILABLE + 4 + (given + 2 * pair) % ENTRIES * 2;
        code = code
            .store(close, u32::try_from(CLOSE).expect("small"))
            .store(close + 8, next + pair - PAIRS)
            .store(entry, descriptor << 16);
        let at = control + descriptor * 16;
        code = descriptors(code, at, &[(close, LENGTH, 1 | 1 << 16)]);
    }
    // mov ebp, given
    let code = code.raw(&[0xbd]).raw(&(given << 16).to_le_bytes());
    // mov ebx, CLOSES + 8; mov ecx, PAIRS; event: add dword [ebx], PAIRS; add ebx, LENGTH; dec ecx; jnz event
    let round = Code::new()
        .raw(&[0xbb])
        .raw(&(CLOSES + 8).to_le_bytes())
        .raw(&[0xb9])
        .raw(&PAIRS.to_le_bytes())
        .raw(&[0x81, 0x03])
        .raw(&PAIRS.to_le_bytes())
        .raw(&[0x83, 0xc3, 0x10, 0xff, 0xc9, 0x75, 0xf3])
        // add ebp, ENTRIES; mov ebx, AVAILABLE; mov [ebx], ebp
        .raw(&[0x81, 0xc5])
        .raw(&(ENTRIES << 16).to_le_bytes())
        .raw(&[0xbb])
        .raw(&(control + AVAILABLE).to_le_bytes())
        .raw(&[0x89, 0x2b])
        .store(NOTIFY, 0)
        // mov ebx, USED; wait: pause; cmp [ebx], ebp; jne wait
        .raw(&[0xbb])
        .raw(&(control + USED).to_le_bytes())
        .raw(&[0xf3, 0x90, 0x39, 0x2b, 0x75, 0xfa]);
    (code.then(&round), for_ever(Code::new(), &round))
}

/// Fills a buffer with commands that toggle `event`, and writes the buffer's descriptor chain to vCPU 0's queue.
#[must_use]
pub fn fill_with_switches(event: u32) -> Code {
    const ENABLE: u32 = 2;
    const DISABLE: u32 = 3;
    let of_vcpu = queue(2);
    let mut code = Code::new();
    for (at, op) in [(COMMANDS, ENABLE), (COMMANDS + COMMAND, DISABLE)] {
        code = code.store(at, op).store(at + 8, event);
    }
    let rest = (MOST_COMMANDS - 2) * COMMAND / 4;
    // mov esi, COMMANDS; mov edi, COMMANDS + 2 * COMMAND; mov ecx, rest; cld; rep movsd
    let code = code
        .raw(&[0xbe])
        .raw(&COMMANDS.to_le_bytes())
        .raw(&[0xbf])
        .raw(&(COMMANDS + 2 * COMMAND).to_le_bytes())
        .raw(&[0xb9])
        .raw(&rest.to_le_bytes())
        .raw(&[0xfc, 0xf3, 0xa5]);
    descriptors(code, of_vcpu, &[(COMMANDS, MOST_COMMANDS * COMMAND, 1 | 1 << 16), (REPLIES, MOST_COMMANDS * REPLY, 2)])
}

/// Writes descriptors into the table of `queue`: address, length, flags and next.
fn descriptors(code: Code, queue: u32, table: &[(u32, u32, u32)]) -> Code {
    let places = (queue..).step_by(16).zip(table);
    places.fold(code, |code, (at, &(address, length, flags))| {
        code.store(at, address).store(at + 4, 0).store(at + 8, length).store(at + 12, flags)
    })
}

/// Makes descriptor 0 of a queue indirect. The indirect table is valid: it has a request and its reply.
#[must_use]
pub fn make_indirect(index: u32) -> Code {
    const TABLE: u32 = 0xc0_0000;
    const INDIRECT: u32 = 4;
    let code = descriptors(Code::new(), TABLE, &[(COMMANDS, COMMAND, 1 | 1 << 16), (REPLIES, REPLY, 2)]);
    descriptors(code, queue(index), &[(TABLE, 32, INDIRECT)])
}

/// Makes descriptor 0 of a queue available for the `number`th time, and notifies the device.
#[must_use]
pub fn kick(index: u32, number: u32) -> Code {
    Code::new().store(queue(index) + AVAILABLE, number << 16).store(NOTIFY, index)
}

/// Repeatedly makes descriptor 0 of a queue available and notifies the device, forever.
#[must_use]
pub fn kick_for_ever(index: u32) -> Code {
    // xor ebp, ebp
    let code = Code::new().raw(&[0x31, 0xed]);
    // add ebp, 1 << 16; mov ebx, AVAILABLE; mov [ebx], ebp
    let body = Code::new()
        .raw(&[0x81, 0xc5])
        .raw(&(1_u32 << 16).to_le_bytes())
        .raw(&[0xbb])
        .raw(&(queue(index) + AVAILABLE).to_le_bytes())
        .raw(&[0x89, 0x2b])
        .store(NOTIFY, index);
    for_ever(code, &body)
}

/// Repeats `body` forever after `code`.
#[must_use]
pub fn for_ever(code: Code, body: &Code) -> Code {
    // jmp body
    let back = i32::try_from(body.bytes().len() + 5).expect("a short loop");
    code.then(body).raw(&[0xe9]).raw(&(-back).to_le_bytes())
}

/// Address of the used index of a queue.
#[must_use]
pub fn used(index: u32) -> u32 {
    queue(index) + USED
}
