//! A minimal driver of the device. It sets up queues, sends requests and commands, and causes a triple fault if a reply
//! has an unexpected status.

use super::code::Code;

/// The device's registers in the machine's layout.
pub const REGISTERS: u32 = 0xd000_0000;
/// The notification register of queues.
pub const NOTIFY: u32 = REGISTERS + 0x50;

/// Address of the queues. Each queue has its own rings, requests and replies.
const QUEUES: u32 = 0x90_0000;
const QUEUE: u32 = 0x8000;
/// Number of entries of each queue. The descriptors fill one page.
pub(super) const ENTRIES: u32 = 256;
pub(super) const AVAILABLE: u32 = 0x1000;
pub(super) const USED: u32 = 0x2000;
const ASKED: u32 = 0x3000;
/// Each reply has its own address, so no reply overwrites an earlier one.
const ANSWERED: u32 = 0x5000;
const ANSWER: u32 = 0x40;
const SERIAL: u16 = 0x3f8;

/// Bytes of the reply to a command.
pub const REPLY: u32 = 40;

/// Returns the address of a queue's descriptors. The queue's rings follow them.
pub(super) fn queue(index: u32) -> u32 {
    QUEUES + index * QUEUE
}

/// The driver's state: the number of buffers sent on each queue. The generated code runs in 32-bit and in 64-bit mode.
#[derive(Debug, Clone)]
pub struct Device {
    /// Number of buffers sent on each queue.
    given: Vec<u32>,
}

impl Device {
    /// Returns a device with `vcpus` vCPUs, and the code that initializes it. The code accepts the device's feature
    /// bits 0 to 3, and sets up the control queue and one queue per vCPU.
    #[must_use]
    pub fn bring_up(vcpus: u32) -> (Self, Code) {
        Self::bring_up_with(vcpus, 0xf)
    }

    /// Like [`Device::bring_up`], but with `features` instead of feature bits 0 to 3. The device must offer all of
    /// them.
    #[must_use]
    pub fn bring_up_with(vcpus: u32, features: u32) -> (Self, Code) {
        let write = |code: Code, offset: u32, value: u32| code.store(REGISTERS + offset, value);
        let mut code = Code::new();
        // The order is: reset, ACKNOWLEDGE, DRIVER, the features and VERSION_1, FEATURES_OK.
        for (offset, value) in
            [(0x70, 0), (0x70, 1), (0x70, 3), (0x24, 0), (0x20, features), (0x24, 1), (0x20, 1), (0x70, 0xb)]
        {
            code = write(code, offset, value);
        }
        for index in (0..2 + vcpus).filter(|&index| index != 1) {
            let queue = QUEUES + index * QUEUE;
            for (offset, value) in [
                (0x30, index),
                (0x38, ENTRIES),
                (0x80, queue),
                (0x90, queue + AVAILABLE),
                (0xa0, queue + USED),
                (0x44, 1),
            ] {
                code = write(code, offset, value);
            }
        }
        let given = vec![0; (2 + vcpus) as usize];
        (Self { given }, write(code, 0x70, 0xf))
    }

    /// Sends a control request, waits for its reply and requires success.
    #[must_use]
    pub fn request(&mut self, words: &[u64]) -> Code {
        self.request_with(words, 0)
    }

    /// Like [`Device::request`], but requires the error `status`; 0 is success.
    #[must_use]
    pub fn request_with(&mut self, words: &[u64], status: u32) -> Code {
        const OPEN_REPLY: u32 = 16;
        self.give(0, words, OPEN_REPLY, status).0
    }

    /// Returns code that sends a command on the queue of `vcpu` and checks that it succeeds. Also returns the address
    /// of the reply. `vcpu` itself must run the code.
    #[must_use]
    pub fn command(&mut self, vcpu: u32, op: u64, event: u64) -> (Code, u32) {
        self.give(2 + vcpu, &[op, event, 0, 0], REPLY, 0)
    }

    /// Adds `times` to the number of buffers sent on a queue. The caller's code sends the queue's last buffer again
    /// `times` times. Returns the numbers before and after the addition.
    pub(super) fn give_again(&mut self, index: u32, times: u32) -> (u32, u32) {
        let given = self.given.get_mut(index as usize).expect("such a queue");
        let before = *given;
        *given += times;
        (before, *given)
    }

    fn give(&mut self, index: u32, words: &[u64], room: u32, status: u32) -> (Code, u32) {
        let given = self.given.get_mut(index as usize).expect("such a queue");
        let queue = QUEUES + index * QUEUE;
        let answer = queue + ANSWERED + *given * ANSWER;
        *given += 1;
        let number = *given;
        assert!(answer < queue + QUEUE, "few requests");
        let length = u32::try_from(words.len() * 8).expect("a short request");
        let mut code = Code::new();
        for (at, word) in (queue + ASKED..).step_by(8).zip(words) {
            for (at, half) in [(at, *word), (at + 4, word >> 32)] {
                code = code.store(at, u32::try_from(half & 0xffff_ffff).expect("a half"));
            }
        }
        // Descriptor 0 is the request, and links to descriptor 1, which is the reply. The available ring's entries stay
        // zero, so each entry names descriptor 0.
        for (at, value) in [(0, queue + ASKED), (8, length), (12, 1 | 1 << 16), (16, answer), (24, room), (28, 2)] {
            code = code.store(queue + at, value);
        }
        let code = code
            .store(queue + AVAILABLE, number << 16)
            .store(NOTIFY, index)
            .wait_for(queue + USED, number << 16)
            .load(answer)
            .require(status);
        (code, answer)
    }
}

/// Writes memory to the serial port.
#[must_use]
pub fn send(address: u32, length: u32) -> Code {
    // mov esi, address; mov ecx, length; mov dx, SERIAL; again: lodsb; out dx, al; dec ecx; jnz again
    Code::new()
        .raw(&[0xbe])
        .raw(&address.to_le_bytes())
        .raw(&[0xb9])
        .raw(&length.to_le_bytes())
        .raw(&[0x66, 0xba])
        .raw(&SERIAL.to_le_bytes())
        .raw(&[0xac, 0xee, 0xff, 0xc9, 0x75, 0xfa])
}
