//! A tiny assembler. It uses only encodings with the same meaning in 32-bit and 64-bit mode.
//!
//! A program can run on the boot vCPU, which the VMM enters in long mode, and on the other vCPUs, which start in flat
//! protected mode. Addresses are below 4 GiB, and `ebx`, `ecx`, `edx` and `eax` are scratch registers.

/// A program or part of a program.
#[derive(Debug, Clone, Default)]
pub struct Code {
    bytes: Vec<u8>,
}

impl Code {
    /// An empty program.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The machine code.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Appends raw bytes.
    #[must_use]
    pub fn raw(mut self, bytes: &[u8]) -> Self {
        self.bytes.extend_from_slice(bytes);
        self
    }

    /// Appends another part.
    #[must_use]
    pub fn then(self, part: &Code) -> Self {
        self.raw(&part.bytes)
    }

    /// Appends code that runs `body` `times` times. `body` must preserve `ecx`, so it must not contain a loop. If
    /// `times` is zero, nothing is appended.
    #[must_use]
    pub fn repeat(self, times: u32, body: &Code) -> Self {
        if times == 0 {
            return self;
        }
        // dec ecx; jnz body
        let length = i32::try_from(body.bytes.len()).expect("a short loop") + 2 + 6;
        self.raw(&[0xb9])
            .raw(&times.to_le_bytes())
            .then(body)
            .raw(&[0xff, 0xc9, 0x0f, 0x85])
            .raw(&(-length).to_le_bytes())
    }

    /// Writes a byte to a port.
    #[must_use]
    pub fn out8(self, port: u16, value: u8) -> Self {
        // mov dx, port; mov al, value; out dx, al
        self.raw(&[0x66, 0xba]).raw(&port.to_le_bytes()).raw(&[0xb0, value, 0xee])
    }

    /// Reads a byte from a port.
    #[must_use]
    pub fn in8(self, port: u16) -> Self {
        // mov dx, port; in al, dx
        self.raw(&[0x66, 0xba]).raw(&port.to_le_bytes()).raw(&[0xec])
    }

    /// Writes 32 bits to memory or to a device.
    #[must_use]
    pub fn store(self, address: u32, value: u32) -> Self {
        // mov dword [ebx], value
        self.address(address).raw(&[0xc7, 0x03]).raw(&value.to_le_bytes())
    }

    /// Reads 32 bits into `eax`.
    #[must_use]
    pub fn load(self, address: u32) -> Self {
        // mov eax, [ebx]
        self.address(address).raw(&[0x8b, 0x03])
    }

    /// Causes a triple fault unless `eax` holds `value`. The VMM reports the triple fault.
    #[must_use]
    pub fn require(self, value: u32) -> Self {
        // cmp eax, value; je over; ud2
        self.raw(&[0x3d]).raw(&value.to_le_bytes()).raw(&[0x74, 0x02]).die()
    }

    /// Causes a triple fault if there is no interrupt table.
    #[must_use]
    pub fn die(self) -> Self {
        self.raw(&[0x0f, 0x0b])
    }

    /// Stores with an instruction that KVM does not emulate.
    #[must_use]
    pub fn store_unemulated(self, address: u32) -> Self {
        // fnstenv [ebx]
        self.address(address).raw(&[0xd9, 0x33])
    }

    /// Increments a shared word of memory atomically.
    #[must_use]
    pub fn increment(self, address: u32) -> Self {
        // lock inc dword [ebx]
        self.address(address).raw(&[0xf0, 0xff, 0x03])
    }

    /// Spins without exits until a word of memory holds `value`.
    #[must_use]
    pub fn wait_for(self, address: u32, value: u32) -> Self {
        // again: pause; cmp dword [ebx], value; jne again
        self.address(address).raw(&[0xf3, 0x90, 0x81, 0x3b]).raw(&value.to_le_bytes()).raw(&[0x75, 0xf6])
    }

    /// Halts forever.
    #[must_use]
    pub fn halt_for_ever(self) -> Self {
        // cli; again: hlt; jmp again
        self.raw(&[0xfa, 0xf4, 0xeb, 0xfd])
    }

    fn address(self, address: u32) -> Self {
        // mov ebx, address
        self.raw(&[0xbb]).raw(&address.to_le_bytes())
    }
}
