//! Instructions at which a function that uses a frame pointer has no frame: it has not set up its frame yet, or has
//! already removed it.

/// Number of bytes that [`return_address`] looks at.
pub(crate) const LOOKED_AT: usize = 16;

const ENDBR64: &[u8] = &[0xf3, 0x0f, 0x1e, 0xfa];
/// The room for a tracer's call at the beginning of each function of the kernel.
const FENTRY: &[u8] = &[0x0f, 0x1f, 0x44, 0x00, 0x00];
const PUSH_BP: u8 = 0x55;
const MOVE_SP_TO_BP: &[u8] = &[0x48, 0x89, 0xe5];
const RETURN: u8 = 0xc3;
/// The bytes of a return address.
const WORD: u64 = 8;

/// Returns the return address's offset from the stack pointer, if the next instruction begins or ends a function.
/// `code` begins with that instruction, and `before` is the byte before it. Code can be anything: a wrong guess yields a
/// wrong caller, as a wrong frame pointer does.
pub(crate) fn return_address(before: Option<u8>, code: &[u8]) -> Option<u64> {
    if code.first() == Some(&RETURN) {
        return Some(0);
    }
    if code.starts_with(MOVE_SP_TO_BP) {
        return (before == Some(PUSH_BP)).then_some(WORD);
    }
    let code = code.strip_prefix(ENDBR64).unwrap_or(code);
    let code = code.strip_prefix(FENTRY).unwrap_or(code);
    let (&first, rest) = code.split_first()?;
    (first == PUSH_BP && rest.starts_with(MOVE_SP_TO_BP)).then_some(0)
}
