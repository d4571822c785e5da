//! Unpacks the LZ4 "legacy" stream that kernels are compressed with. Decompression only: only kernel images
//! have this format here.

use thiserror::Error;

/// First four bytes of such a stream.
pub const MAGIC: [u8; 4] = 0x184c_2102_u32.to_le_bytes();

/// A chunk unpacks to at most this much.
const CHUNK: usize = 8 << 20;
const SHORTEST_MATCH: usize = 4;

/// Why a stream does not unpack.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum Lz4Error {
    /// The first bytes are not [`MAGIC`].
    #[error("not an LZ4 legacy stream")]
    Magic,
    /// The stream ends too early.
    #[error("the LZ4 stream is cut short")]
    Truncated,
    /// A reference to bytes before the beginning, or a chunk beyond its limit.
    #[error("the LZ4 stream is damaged")]
    Damaged,
}

/// Unpacks `input` up to its end, or up to the first chunk that cannot be one: kernels carry
/// their unpacked size there, four bytes that are no part of the stream.
///
/// # Errors
/// [`Lz4Error`].
pub fn unpack(input: &[u8]) -> Result<Vec<u8>, Lz4Error> {
    let mut rest = input.strip_prefix(&MAGIC).ok_or(Lz4Error::Magic)?;
    let mut output = Vec::new();
    while let Some((length, after)) = rest.split_first_chunk::<4>() {
        if after.is_empty() {
            break;
        }
        let length = usize::try_from(u32::from_le_bytes(*length)).map_err(|_| Lz4Error::Damaged)?;
        let (chunk, after) = after.split_at_checked(length).ok_or(Lz4Error::Truncated)?;
        block(chunk, &mut output)?;
        rest = after;
    }
    Ok(output)
}

fn block(mut input: &[u8], output: &mut Vec<u8>) -> Result<(), Lz4Error> {
    let start = output.len();
    while let Some((&token, rest)) = input.split_first() {
        input = rest;
        let literals = length(token >> 4, &mut input)?;
        let (bytes, rest) = input
            .split_at_checked(literals)
            .ok_or(Lz4Error::Truncated)?;
        output.extend_from_slice(bytes);
        input = rest;
        if input.is_empty() {
            break; // the last sequence has no match
        }
        let (offset, rest) = input.split_first_chunk::<2>().ok_or(Lz4Error::Truncated)?;
        input = rest;
        let offset = usize::from(u16::from_le_bytes(*offset));
        let size = length(token & 15, &mut input)? + SHORTEST_MATCH;
        if offset == 0 || offset > output.len() - start || output.len() - start + size > CHUNK {
            return Err(Lz4Error::Damaged);
        }
        repeat(output, offset, size);
    }
    if output.len() - start > CHUNK {
        Err(Lz4Error::Damaged)
    } else {
        Ok(())
    }
}

fn length(nibble: u8, input: &mut &[u8]) -> Result<usize, Lz4Error> {
    let mut length = usize::from(nibble);
    if nibble == 15 {
        loop {
            let (&more, rest) = input.split_first().ok_or(Lz4Error::Truncated)?;
            *input = rest;
            length += usize::from(more);
            if more != 255 {
                break;
            }
        }
    }
    Ok(length)
}

/// Appends `size` bytes from `offset` back; they may overlap what they produce.
fn repeat(output: &mut Vec<u8>, offset: usize, mut size: usize) {
    let from = output.len() - offset;
    while size > 0 {
        let available = (output.len() - from).min(size);
        output.extend_from_within(from..from + available);
        size -= available;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stream(blocks: &[&[u8]]) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        for block in blocks {
            bytes.extend(u32::try_from(block.len()).unwrap().to_le_bytes());
            bytes.extend(*block);
        }
        bytes
    }

    #[test]
    fn literals_overlapping_matches_and_long_lengths() {
        // "ab", then 4 + 15 + 3 bytes from 2 back, then "z".
        let packed = stream(&[&[0x2f, b'a', b'b', 2, 0, 3, 0x10, b'z']]);
        let expected = format!("{}z", "ab".repeat(12));
        assert_eq!(unpack(&packed).unwrap(), expected.as_bytes());
    }

    #[test]
    fn chunks_join_and_the_size_at_the_end_is_ignored() {
        let mut packed = stream(&[&[0x10, b'x'], &[0x10, b'y']]);
        packed.extend(2_u32.to_le_bytes());
        assert_eq!(unpack(&packed).unwrap(), b"xy");
    }

    #[test]
    fn damage_and_truncation_are_different_errors() {
        assert_eq!(unpack(b"ELF"), Err(Lz4Error::Magic));
        assert_eq!(
            unpack(&stream(&[&[0x10, b'x', 9, 0]])),
            Err(Lz4Error::Damaged)
        );
        let whole = stream(&[&[0x30, b'x', b'y', b'z']]);
        assert_eq!(unpack(&whole[..whole.len() - 1]), Err(Lz4Error::Truncated));
    }
}
