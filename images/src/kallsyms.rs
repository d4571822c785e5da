//! Reads the names of a kernel's functions from the kernel itself: stock kernels come without symbols and
//! without a System.map, but carry a table for their own use (`scripts/kallsyms.c` of Linux).
//!
//! The kernel does not record where the table is. The table's parts are recognised by their form, and used only
//! if they are consistent with each other.

use std::fmt::Write as _;

/// How many tokens there are. A name is a sequence of tokens, and each byte of a name is the number of a token.
const TOKENS: usize = 256;
/// The tokens of the digits. The parser searches for them to find the table of tokens. Each character that occurs in
/// names is also a token by itself. The token's number is the character's ASCII code, so the digits are consecutive.
const DIGITS: &[u8] = b"0\x001\x002\x003\x004\x005\x006\x007\x008\x009\0";
/// Number of the first digit's token.
const FIRST_DIGIT: usize = b'0' as usize;
const LONGEST_TOKEN: usize = 128;
/// Number of names per marker. The markers are the offsets of every 256th name, starting with the first.
const MARKED: usize = 256;
/// Plausible numbers of names.
const NAMES: std::ops::Range<usize> = 512..1 << 21;
/// x86-64 kernels are linked in the last 2 GiB of the address space.
const LOWEST: u64 = 0xffff_ffff_8000_0000;
/// Maximum distance in bytes from the stored number of names to the tokens.
const REACH: usize = 32 << 20;

/// The lines of a `System.map`, with the addresses that the kernel was linked at, in ascending order; `None` if the
/// kernel has no table, or one of an unknown format.
#[must_use]
pub fn system_map(kernel: &[u8]) -> Option<String> {
    let tokens = (0..kernel.len())
        .filter(|&at| kernel[at..].starts_with(DIGITS))
        .find_map(|digits| Tokens::around(kernel, digits))?;
    let names = Names::before(kernel, &tokens)?;
    let addresses = addresses(kernel, &tokens, &names)?;
    let mut lines: Vec<(u64, String)> = addresses.into_iter().zip(names.texts).collect();
    lines.sort_by_key(|&(address, _)| address);
    let mut text = String::new();
    for (address, name) in lines {
        // The type is a name's first character.
        let (kind, name) = name.split_at_checked(1)?;
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{address:016x} {kind} {name}");
    }
    Some(text)
}

/// The tokens, and their offset in the kernel.
struct Tokens {
    start: usize,
    texts: Vec<Vec<u8>>,
    /// The end of the token index, which follows the tokens.
    end: usize,
}

impl Tokens {
    fn around(kernel: &[u8], digits: usize) -> Option<Self> {
        let mut start = digits;
        for _ in 0..FIRST_DIGIT {
            let before = kernel.get(..start.checked_sub(1)?)?;
            let length = before.iter().rev().take(LONGEST_TOKEN).position(|&b| b == 0)?;
            start = before.len() - length;
        }
        let mut texts = Vec::with_capacity(TOKENS);
        let mut at = start;
        let mut index = Vec::with_capacity(2 * TOKENS);
        for _ in 0..TOKENS {
            index.extend(u16::try_from(at - start).ok()?.to_le_bytes());
            let rest = kernel.get(at..)?;
            let length = rest.iter().take(LONGEST_TOKEN).position(|&b| b == 0)?;
            texts.push(rest[..length].to_vec());
            at += length + 1;
        }
        let at = at.next_multiple_of(8);
        kernel.get(at..)?.starts_with(&index).then_some(Self { start, texts, end: at + index.len() })
    }
}

/// The names, and the offset in the kernel at which the number of names is stored.
struct Names {
    number_at: usize,
    texts: Vec<String>,
}

impl Names {
    fn before(kernel: &[u8], tokens: &Tokens) -> Option<Self> {
        let lowest = tokens.start.saturating_sub(REACH).next_multiple_of(8);
        let mut places = (lowest..tokens.start.saturating_sub(8)).step_by(8).rev();
        places.find_map(|at| Self::at(kernel, at, tokens))
    }

    /// Reads the number of names, the names, and the markers; `None` if they are not consistent.
    fn at(kernel: &[u8], number_at: usize, tokens: &Tokens) -> Option<Self> {
        let number = usize::try_from(word(kernel, number_at)?).ok()?;
        if !NAMES.contains(&number) {
            return None;
        }
        let start = number_at + 8;
        let mut at = start;
        let mut markers = Vec::new();
        let mut spans = Vec::new();
        for index in 0..number {
            if index % MARKED == 0 {
                markers.extend(u32::try_from(at - start).ok()?.to_le_bytes());
            }
            let (length, bytes) = length(kernel, at)?;
            let from = at + bytes;
            at = from + length;
            if length == 0 || at > tokens.start {
                return None;
            }
            spans.push(from..at);
        }
        let marked = kernel.get(at.next_multiple_of(8)..tokens.start)?;
        if !marked.starts_with(&markers) {
            return None;
        }
        let text = |span: std::ops::Range<usize>| -> Option<String> {
            let numbers = kernel.get(span)?.iter();
            let bytes: Vec<u8> =
                numbers.filter_map(|&number| tokens.texts.get(usize::from(number))).flatten().copied().collect();
            String::from_utf8(bytes).ok()
        };
        Some(Self { number_at, texts: spans.into_iter().map(text).collect::<Option<_>>()? })
    }
}

/// Reads a name's length: seven bits in one byte, or fourteen bits in two. Returns the length, and the number of
/// bytes that encode it.
fn length(kernel: &[u8], at: usize) -> Option<(usize, usize)> {
    let low = usize::from(*kernel.get(at)?);
    if low < 0x80 {
        return Some((low, 1));
    }
    let high = usize::from(*kernel.get(at + 1)?);
    Some((low & 0x7f | high << 7, 2))
}

/// The addresses, which are stored as offsets from the kernel's base. The offsets follow the tokens or, before
/// Linux 6.4, precede the names.
fn addresses(kernel: &[u8], tokens: &Tokens, names: &Names) -> Option<Vec<u64>> {
    let number = names.texts.len();
    let size = (4 * number).next_multiple_of(8);
    let behind = tokens.end.next_multiple_of(8);
    let before = names.number_at.checked_sub(8 + size);
    let places = [Some(behind), before].into_iter().flatten();
    places.into_iter().find_map(|offsets| {
        let base = word(kernel, offsets + size)?;
        (base >= LOWEST && base % 4096 == 0).then_some(())?;
        let offsets = kernel.get(offsets..offsets + 4 * number)?.chunks_exact(4);
        Some(offsets.map(|bytes| address(bytes, base)).collect())
    })
}

/// Converts a stored offset to an address. An offset of zero or more is itself the address, of a per-CPU variable. A
/// negative offset is relative to `base`.
fn address(offset: &[u8], base: u64) -> u64 {
    let offset = offset.try_into().map_or(0, i32::from_le_bytes);
    match u64::try_from(offset) {
        Ok(absolute) => absolute,
        Err(_) => base.wrapping_add(u64::from(offset.unsigned_abs() - 1)),
    }
}

fn word(kernel: &[u8], at: usize) -> Option<u64> {
    let bytes = kernel.get(at..)?.first_chunk()?;
    Some(u64::from_le_bytes(*bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    const BASE: u64 = 0xffff_ffff_8100_0000;

    /// The text of the token `number` in the test's kernel. If `number` is the ASCII code of a letter, a digit or `_`,
    /// the text is this character. Otherwise it is a word made from `number`.
    fn token(number: u8) -> Vec<u8> {
        match number {
            b'0'..=b'9' | b'a'..=b'z' | b'A'..=b'Z' | b'_' => vec![number],
            other => format!("w{other:x}").into_bytes(),
        }
    }

    fn pad(bytes: &mut Vec<u8>) {
        bytes.resize(bytes.len().next_multiple_of(8), 0);
    }

    /// The stored offsets of `number` symbols, then the base. The first offset is an absolute address; the other
    /// symbols are functions of 16 bytes each.
    fn offsets(number: usize) -> Vec<u8> {
        let offset = |index: i32| if index == 0 { 64 } else { -1 - 16 * index };
        let mut bytes: Vec<u8> =
            (0..i32::try_from(number).unwrap()).flat_map(|index| offset(index).to_le_bytes()).collect();
        pad(&mut bytes);
        bytes.extend(BASE.to_le_bytes());
        bytes
    }

    fn name(index: usize) -> Vec<u8> {
        match index {
            0 => b"Acpu".to_vec(),
            // Too long for a length of one byte.
            7 => [&b"T"[..], &[b'x'; 200]].concat(),
            index => format!("t{index}_").bytes().chain([0x80]).collect(),
        }
    }

    fn kernel(number: usize, behind: bool) -> Vec<u8> {
        let mut bytes = vec![0xcc; 800];
        // Bytes that look like the table at first.
        bytes.extend(DIGITS);
        pad(&mut bytes);
        if !behind {
            bytes.extend(offsets(number));
        }
        bytes.extend((number as u64).to_le_bytes());
        let start = bytes.len();
        let mut markers = Vec::new();
        for index in 0..number {
            if index % MARKED == 0 {
                markers.extend(u32::try_from(bytes.len() - start).unwrap().to_le_bytes());
            }
            let name = name(index);
            match u8::try_from(name.len()) {
                Ok(length @ ..0x80) => bytes.push(length),
                _ => {
                    let [low, high, ..] = name.len().to_le_bytes();
                    bytes.extend([0x80 | low, low >> 7 | high << 1]);
                }
            }
            bytes.extend(name);
        }
        pad(&mut bytes);
        bytes.extend(markers);
        pad(&mut bytes);
        // Later kernels have other data between the markers and the tokens.
        bytes.extend([0xab; 61]);
        pad(&mut bytes);
        bytes.extend([0; 8]);
        let start = bytes.len();
        let mut index = Vec::new();
        for number in 0..=u8::MAX {
            index.extend(u16::try_from(bytes.len() - start).unwrap().to_le_bytes());
            bytes.extend(token(number));
            bytes.push(0);
        }
        pad(&mut bytes);
        bytes.extend(index);
        if behind {
            bytes.extend(offsets(number));
        }
        bytes.extend([0x90; 100]);
        bytes
    }

    #[test]
    fn names_and_addresses_are_read_from_either_layout() {
        for behind in [false, true] {
            let map = system_map(&kernel(1000, behind)).unwrap();
            let lines: Vec<&str> = map.lines().collect();
            assert_eq!(lines.len(), 1000);
            assert_eq!(lines[0], "0000000000000040 A cpu");
            assert_eq!(lines[1], "ffffffff81000010 t 1_w80");
            assert_eq!(lines[7], format!("ffffffff81000070 T {}", "x".repeat(200)));
            assert_eq!(lines[999], "ffffffff81003e70 t 999_w80");
        }
    }

    #[test]
    fn inconsistent_table_is_refused() {
        let whole = kernel(1000, false);
        for length in [0, 100, 900, 5000, whole.len() - 120, whole.len() - 700] {
            assert_eq!(system_map(&whole[..length]), None, "{length}");
        }
        for behind in [false, true] {
            let whole = kernel(1000, behind);
            // Broken parts must not make the parser read beyond the end or loop forever.
            for at in (800..whole.len()).step_by(37) {
                let mut broken = whole.clone();
                broken[at..].iter_mut().take(16).for_each(|byte| *byte ^= 0xff);
                let _ = system_map(&broken);
            }
        }
        let mut elsewhere = kernel(1000, true);
        let base = elsewhere.len() - 108;
        elsewhere[base..base + 8].copy_from_slice(&[0; 8]);
        assert_eq!(system_map(&elsewhere), None);
    }
}
