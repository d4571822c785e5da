//! The machine code of the probes, as bytes. At the start of each probe, `rdi` holds the base of the device window.

pub(super) use vpmu_kvm::micro::code::*;

/// The port of [`PORT_WRITE`]. No PC device uses it.
pub(super) const PORT: u16 = 0x5f0;
/// The value that [`PORT_WRITE`] writes there.
pub(super) const PORT_VALUE: u8 = 0xa5;
/// Length of the `out` of [`PORT_WRITE`].
pub(super) const OUT_LENGTH: u64 = 1;
/// `out dx, al; hlt`
pub(super) const PORT_WRITE: &[u8] = &[0xee, 0xf4];

/// The value that [`STORE`] stores.
pub(super) const STORE_VALUE: u32 = 0x1234_5678;
/// `mov dword [rdi], STORE_VALUE; hlt`
pub(super) const STORE: &[u8] = &[0xc7, 0x07, 0x78, 0x56, 0x34, 0x12, 0xf4];

/// In ring 3: `syscall; mov eax, cs; mov [rdi + RETURNED], eax; jmp $`
pub(super) const CALL: &[u8] = &[0x0f, 0x05, 0x8c, 0xc8, 0x89, 0x47, 0x08, 0xeb, 0xfe];
/// `int3; hlt`
pub(super) const BREAKPOINT: &[u8] = &[0xcc, 0xf4];

/// `cmpxchg16b [rsi]; mov rax, [rsi]; mov [rdi], rax; hlt`
pub(super) const EXCHANGE: &[u8] = &[0x48, 0x0f, 0xc7, 0x0e, 0x48, 0x8b, 0x06, 0x48, 0x89, 0x07, 0xf4];

/// `vmcall; mov [rdi], rax; hlt`
pub(super) const VMCALL: &[u8] = &[0x0f, 0x01, 0xc1, 0x48, 0x89, 0x07, 0xf4];
/// `vmmcall; mov [rdi], rax; hlt`
pub(super) const VMMCALL: &[u8] = &[0x0f, 0x01, 0xd9, 0x48, 0x89, 0x07, 0xf4];

/// `rdtsc; shl rdx, 32; or rax, rdx; mov [rdi], rax; hlt`
pub(super) const READ_TSC: &[u8] = &[0x0f, 0x31, 0x48, 0xc1, 0xe2, 0x20, 0x48, 0x09, 0xd0, 0x48, 0x89, 0x07, 0xf4];
