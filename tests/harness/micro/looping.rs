//! A guest that samples itself. A program in ring 3 opens an event, and loops without exits until the event's ring
//! holds a given number of bytes. It then closes the event and sends the ring.

use std::ops::Range;

use super::code::Code;
use super::image::{power_off, single};
use super::sampled::{
    AVAILABLE, KERNEL_STACK, KERNEL_STACK_SIZE, LOAD, RING, SP, Sampled, USED, USER, USER_CODE_AT, USER_STACK, VIRTIO,
    enter_user, load, send,
};

/// Address of the head in the ring's metadata page.
const HEAD: u64 = RING + 1024;

/// Address ranges of the program while it is sampled.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Looping {
    /// The loop.
    pub in_loop: Range<u64>,
    /// The program up to the code that closes the event, inclusive.
    pub open: Range<u64>,
}

impl Sampled {
    /// Returns the kernel file of a guest that opens an event with `open`, maps a ring of one page, and loops until the
    /// ring holds `bytes` bytes.
    #[must_use]
    pub fn looping(mut self, open: &[u64], bytes: u32) -> (Vec<u8>, Looping) {
        const CLOSE: u64 = 2;
        self.open_to_all();
        let boot =
            self.set_up().then(&load(SP, KERNEL_STACK + KERNEL_STACK_SIZE)).then(&enter_user(USER_STACK + 0x1000));
        self.request(open);
        self.map();
        self.request(&[CLOSE, 1]);

        let start = serve(1).then(&serve(2));
        // mov ebx, HEAD; again: cmp dword [rbx], bytes; jb again
        let wait = load(3, HEAD).raw(&[0x81, 0x3b]).raw(&bytes.to_le_bytes()).raw(&[0x72, 0xf8]);
        let length = |code: &Code| code.bytes().len() as u64;
        let from = USER + length(&start);
        let in_loop = from..from + length(&wait);
        let program = start.then(&wait).then(&serve(3));
        let open = USER..USER + length(&program);
        let program = program.then(&send()).then(&power_off());
        self.place(LOAD, boot.bytes());
        self.place(USER_CODE_AT, program.bytes());
        let image = single(&Code::new().raw(self.bytes()));
        (image, Looping { in_loop, open })
    }
}

/// Makes request number `number` available and waits for its reply.
fn serve(number: u32) -> Code {
    let low = |address: u64| u32::try_from(address).expect("below 4 GiB");
    Code::new().store(low(AVAILABLE), number << 16).store(VIRTIO + 0x50, 0).wait_for(low(USED), number << 16)
}
