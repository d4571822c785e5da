//! A guest that drives the device itself. It opens events, places marks, and sends its ring through the serial port.
//!
//! The guest's image contains only a few instructions. Its tables, stacks and control queue requests are ready for use.
//! So a test knows every byte that a sample can contain.

use super::code::Code;
use super::image::{power_off, single};

/// Load address of the image, which begins with its code.
pub(super) const LOAD: u64 = 0x10_0000;
const IMAGE: usize = 0xb_0000;

/// The control queue: descriptors, available and used ring, then requests and replies.
const QUEUE: u64 = 0x14_0000;
pub(super) const AVAILABLE: u64 = QUEUE + 0x1000;
pub(super) const USED: u64 = QUEUE + 0x2000;
const REQUESTS: u64 = QUEUE + 0x3000;
const ANSWERS: u64 = QUEUE + 0x4000;
/// Room for a request and room for a reply, in bytes.
const SLOT: u64 = 0x100;
const ANSWER: u32 = 16;

/// The ring: its metadata and one page of data.
pub(super) const RING: u64 = 0x15_0000;
/// Number of bytes of the ring's data that the guest sends.
const SENT: u32 = 0x800;
const TASK_PAGE: u64 = 0x15_8000;

const PML4: u64 = 0x16_0000;
const USER_TABLES: u64 = PML4 + 0x6000;
const GDT: u64 = 0x16_a000;
/// For `lgdt`.
const POINTER: u64 = GDT + 0x100;

/// The kernel's stack.
pub const KERNEL_STACK: u64 = 0x18_0000;
/// Bytes of the stack, and its alignment.
pub const KERNEL_STACK_SIZE: u64 = 0x4000;
/// Address of the task's saved registers while the task is in the kernel.
pub const SAVED: u64 = KERNEL_STACK + KERNEL_STACK_SIZE - 21 * 8;

/// Virtual address of the program's pages, in order: code, stack, doorbell, ring data.
pub const USER: u64 = 1 << 39;
/// The program's stack.
pub const USER_STACK: u64 = USER + PAGE;
const USER_DOORBELL: u64 = USER + 2 * PAGE;
const USER_RING: u64 = USER + 3 * PAGE;
pub(super) const USER_CODE_AT: u64 = 0x19_0000;
const USER_STACK_AT: u64 = 0x19_1000;
const PAGE: u64 = 0x1000;

/// The device's registers and its doorbell in the machine's layout.
pub(super) const VIRTIO: u32 = 0xd000_0000;
const DOORBELL: u32 = VIRTIO + 0x1000;
const SERIAL: u16 = 0x3f8;

/// Return addresses of the mark in the kernel and the mark in the program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Marked {
    /// In ring 0.
    pub kernel: u64,
    /// In ring 3.
    pub user: u64,
}

/// A guest under construction.
#[derive(Debug)]
pub struct Sampled {
    bytes: Vec<u8>,
    requests: u16,
}

impl Default for Sampled {
    fn default() -> Self {
        Self::new()
    }
}

impl Sampled {
    /// A guest with tables and empty stacks.
    #[must_use]
    pub fn new() -> Self {
        let mut guest = Self { bytes: vec![0; IMAGE], requests: 0 };
        guest.segments();
        guest.pages();
        guest
    }

    /// Stores a word at `address` of the identity-mapped kernel.
    ///
    /// # Panics
    /// If it is outside the image.
    pub fn word(&mut self, address: u64, word: u64) {
        self.place(address, &word.to_le_bytes());
    }

    /// Stores a word in the program's stack. `address` is the program's virtual address.
    ///
    /// # Panics
    /// See [`Sampled::word`].
    pub fn user_word(&mut self, address: u64, word: u64) {
        self.word(address - USER_STACK + USER_STACK_AT, word);
    }

    /// Appends a request to the control queue.
    ///
    /// # Panics
    /// If it is longer than a slot.
    pub fn request(&mut self, words: &[u64]) {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        assert!(bytes.len() as u64 <= SLOT, "a short request");
        let number = u64::from(self.requests);
        let at = REQUESTS + number * SLOT;
        self.place(at, &bytes);
        // Descriptor 2n is the request, and descriptor 2n + 1 is the room for the reply.
        let first = QUEUE + number * 32;
        let length = bytes.len() as u64;
        self.word(first, at);
        self.word(first + 8, length | 1 << 32 | (2 * number + 1) << 48);
        self.word(first + 16, ANSWERS + number * SLOT);
        self.word(first + 24, u64::from(ANSWER) | 2 << 32);
        let entry = (2 * self.requests).to_le_bytes();
        self.place(AVAILABLE + 4 + 2 * number, &entry);
        self.requests += 1;
    }

    /// Maps a ring for event 1.
    pub fn map(&mut self) {
        let pages_writable = 2 | 1 << 32;
        self.request(&[3, 1, pages_writable, RING, RING + PAGE]);
    }

    /// Registers the task page, which holds the address of the task's saved registers.
    pub fn task_page(&mut self, user_regs: u64) {
        self.word(TASK_PAGE, 41 | 42 << 32);
        self.word(TASK_PAGE + 8, user_regs);
        self.request(&[6, 0, 0, TASK_PAGE]);
    }

    /// Returns the kernel file and the return addresses of its marks. The guest sends the requests and places mark
    /// `value` in ring 0, with frame pointer `kernel_bp` and stack pointer `kernel_sp`. It then enters ring 3, places
    /// the mark again with `user_bp` and `user_sp`, and sends the ring.
    #[must_use]
    pub fn kernel(mut self, value: u32, kernel: [u64; 2], user: [u64; 2]) -> (Vec<u8>, Marked) {
        let [kernel_bp, kernel_sp] = kernel;
        let [user_bp, user_sp] = user;
        let boot = self.set_up().then(&load(SP, kernel_sp)).then(&load(BP, kernel_bp)).store(DOORBELL, value);
        let kernel = LOAD + boot.bytes().len() as u64;
        let boot = boot.then(&load(SP, KERNEL_STACK + KERNEL_STACK_SIZE)).then(&enter_user(user_sp));
        let program = load(BP, user_bp)
            .then(&load(BX, USER_DOORBELL))
            // mov dword [rbx], value
            .raw(&[0xc7, 0x03])
            .raw(&value.to_le_bytes());
        let user = USER + program.bytes().len() as u64;
        let program = program.then(&send()).then(&power_off());
        self.place(LOAD, boot.bytes());
        self.place(USER_CODE_AT, program.bytes());
        let image = single(&Code::new().raw(&self.bytes));
        (image, Marked { kernel, user })
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    pub(super) fn place(&mut self, address: u64, bytes: &[u8]) {
        let at = usize::try_from(address - LOAD).expect("an address of the image");
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
    }

    /// Linux's selectors: 0x10 and 0x18 in ring 0, 0x23, 0x2b and 0x33 in ring 3.
    fn segments(&mut self) {
        let table: [u64; 7] = [
            0,
            0,
            0x00af_9b00_0000_ffff,
            0x00cf_9300_0000_ffff,
            0x00cf_fb00_0000_ffff,
            0x00cf_f300_0000_ffff,
            0x00af_fb00_0000_ffff,
        ];
        for (at, entry) in (GDT..).step_by(8).zip(table) {
            self.word(at, entry);
        }
        self.word(POINTER, (GDT & 0xffff) << 16 | (7 * 8 - 1));
        self.word(POINTER + 4, GDT >> 16);
    }

    /// Identity-maps the first 4 GiB for the kernel. Maps the program's pages for both the kernel and the program.
    fn pages(&mut self) {
        const KERNEL: u64 = 0b011;
        const PROGRAM: u64 = 0b111;
        const LARGE: u64 = 1 << 7;
        self.word(PML4, (PML4 + PAGE) | KERNEL);
        for gib in 0..4 {
            let directory = PML4 + (2 + gib) * PAGE;
            self.word(PML4 + PAGE + gib * 8, directory | KERNEL);
            for entry in 0..512 {
                let address = gib << 30 | entry << 21;
                self.word(directory + entry * 8, address | LARGE | KERNEL);
            }
        }
        self.word(PML4 + 8, USER_TABLES | PROGRAM);
        self.word(USER_TABLES, (USER_TABLES + PAGE) | PROGRAM);
        self.word(USER_TABLES + PAGE, (USER_TABLES + 2 * PAGE) | PROGRAM);
        let pages = [USER_CODE_AT, USER_STACK_AT, u64::from(DOORBELL), RING + PAGE];
        for (at, page) in (USER_TABLES + 2 * PAGE..).step_by(8).zip(pages) {
            self.word(at, page | PROGRAM);
        }
    }

    /// Also maps the kernel's addresses for the program, so that the program can drive the device itself.
    pub(super) fn open_to_all(&mut self) {
        const USER_TOO: u8 = 0b100;
        let entries = [PML4, PML4 + PAGE]
            .into_iter()
            .flat_map(|table| (0..4).map(move |entry| table + entry * 8))
            .chain((0..4 * 512).map(|entry| PML4 + 2 * PAGE + entry * 8));
        for entry in entries {
            let at = usize::try_from(entry - LOAD).expect("an address of the image");
            self.bytes[at] |= USER_TOO;
        }
    }

    /// Loads the tables and initializes the device, one request after another.
    pub(super) fn set_up(&self) -> Code {
        let write = |code: Code, offset: u32, value: u32| code.store(VIRTIO + offset, value);
        let low = |address: u64| u32::try_from(address).expect("below 4 GiB");
        let mut code = load(BX, POINTER)
            // lgdt [rbx]
            .raw(&[0x0f, 0x01, 0x13])
            .then(&load(AX, PML4))
            // mov cr3, rax
            .raw(&[0x0f, 0x22, 0xd8]);
        for (offset, value) in [
            // The order is: reset, ACKNOWLEDGE, DRIVER, features 0 to 2 and VERSION_1, FEATURES_OK.
            (0x70, 0),
            (0x70, 1),
            (0x70, 3),
            (0x24, 0),
            (0x20, 7),
            (0x24, 1),
            (0x20, 1),
            (0x70, 0xb),
            // The size and the rings of queue 0, then ready, then DRIVER_OK.
            (0x30, 0),
            (0x38, 8),
            (0x80, low(QUEUE)),
            (0x90, low(AVAILABLE)),
            (0xa0, low(USED)),
            (0x44, 1),
            (0x70, 0xf),
        ] {
            code = write(code, offset, value);
        }
        for done in 1..=u32::from(self.requests) {
            code = code.store(low(AVAILABLE), done << 16);
            code = write(code, 0x50, 0).wait_for(low(USED), done << 16);
            let answer = ANSWERS + u64::from(done - 1) * SLOT;
            code = code.load(low(answer)).require(0);
        }
        code
    }
}

/// Numbers of registers in instructions.
const AX: u8 = 0;
const BX: u8 = 3;
pub(super) const SP: u8 = 4;
const BP: u8 = 5;

/// `mov register, value`, in 64 bits.
pub(super) fn load(register: u8, value: u64) -> Code {
    Code::new().raw(&[0x48, 0xb8 + register]).raw(&value.to_le_bytes())
}

/// Enters ring 3 at the program, with access to ports.
pub(super) fn enter_user(stack: u64) -> Code {
    const FLAGS: u64 = 3 << 12 | 2;
    let frame = [0x2b, stack, FLAGS, 0x33, USER];
    let pushes = frame.iter().fold(Code::new(), |code, &word| {
        // push rax
        code.then(&load(AX, word)).raw(&[0x50])
    });
    // iretq
    pushes.raw(&[0x48, 0xcf])
}

/// Writes the ring's data to the serial port, from ring 3.
pub(super) fn send() -> Code {
    // mov ecx, SENT; mov dx, SERIAL
    load(6, USER_RING)
        .raw(&[0xb9])
        .raw(&SENT.to_le_bytes())
        .raw(&[0x66, 0xba])
        .raw(&SERIAL.to_le_bytes())
        // again: lodsb; out dx, al; dec ecx; jnz again
        .raw(&[0xac, 0xee, 0xff, 0xc9, 0x75, 0xfa])
}

/// Parses records from a guest's output. Each record is a list of words, the header first.
///
/// # Panics
/// If the output does not consist of complete records.
#[must_use]
pub fn records(sent: &[u8]) -> Vec<Vec<u64>> {
    let mut words = sent.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().expect("eight bytes")));
    let mut records = Vec::new();
    while let Some(header) = words.next().filter(|&header| header != 0) {
        let size = usize::try_from(header >> 48).expect("16 bits");
        let rest = words.by_ref().take(size / 8 - 1);
        let record: Vec<u64> = std::iter::once(header).chain(rest).collect();
        assert_eq!(record.len() * 8, size, "a whole record");
        records.push(record);
    }
    records
}
