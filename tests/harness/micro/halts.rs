//! A program that halts a known number of times. Its own timer wakes it each time.

use super::code::Code;

/// Free memory for the program's tables.
const TABLE: u32 = 0x81_0000;
const HANDLER: u32 = 0x82_0000;
const POINTER: u32 = 0x83_0000;

/// Local APIC registers.
const END_OF_INTERRUPT: u32 = 0xfee0_00b0;
const SPURIOUS: u32 = 0xfee0_00f0;
const TIMER: u32 = 0xfee0_0320;
const TIMER_START: u32 = 0xfee0_0380;
const TIMER_DIVIDE: u32 = 0xfee0_03e0;

const VECTOR: u32 = 0x20;
const ENABLED: u32 = 0x1ff;
const UNDIVIDED: u32 = 0xb;
/// Number of timer ticks until the wakeup. The code before the halt takes far fewer ticks. Even if the host delays that
/// code, the vCPU halts, because it enables interrupts only at the halt.
const TICKS: u32 = 1_000_000;

/// Returns code that halts `times` times. Only the boot vCPU can run it, because the code needs long mode.
#[must_use]
pub fn halts(times: u32) -> Code {
    // mov ebx, END_OF_INTERRUPT; mov dword [rbx], 0; iretq
    let handler = Code::new().store(END_OF_INTERRUPT, 0).raw(&[0x48, 0xcf, 0x90, 0x90, 0x90]);
    let mut code = Code::new();
    for (at, word) in (HANDLER..).step_by(4).zip(handler.bytes().chunks(4)) {
        let word: [u8; 4] = word.try_into().expect("padded to words");
        code = code.store(at, u32::from_le_bytes(word));
    }
    let gate = TABLE + VECTOR * 16;
    let once = Code::new()
        .store(TIMER_START, TICKS)
        // sti; hlt; cli
        .raw(&[0xfb, 0xf4, 0xfa]);
    code.store(gate, HANDLER & 0xffff)
        // mov eax, cs; mov [rbx + 2], ax
        .raw(&[0x8c, 0xc8, 0x66, 0x89, 0x43, 0x02])
        .store(gate + 4, HANDLER & 0xffff_0000 | 0x8e00)
        .store(POINTER, (TABLE & 0xffff) << 16 | 0xfff)
        .store(POINTER + 4, TABLE >> 16)
        .store(POINTER + 8, 0)
        // mov ebx, POINTER; lidt [rbx]
        .raw(&[0xbb])
        .raw(&POINTER.to_le_bytes())
        .raw(&[0x0f, 0x01, 0x1b])
        .store(SPURIOUS, ENABLED)
        .store(TIMER, VECTOR)
        .store(TIMER_DIVIDE, UNDIVIDED)
        .repeat(times, &once)
}
