//! Unpacks the LZ4 "legacy" stream that kernels are compressed with: a magic number, then chunks. Each chunk
//! is a length, followed by an independent LZ4 block.

use lz4_flex::block::{DecompressError, decompress_into};
use thiserror::Error;

/// First four bytes of an LZ4 legacy stream.
pub const MAGIC: [u8; 4] = 0x184c_2102_u32.to_le_bytes();

/// A chunk unpacks to at most this many bytes.
const CHUNK: usize = 8 << 20;

/// Errors of unpacking a stream.
#[derive(Debug, Error)]
pub enum Lz4Error {
    /// The first bytes are not [`MAGIC`].
    #[error("not an LZ4 legacy stream")]
    Magic,
    /// The stream ends inside a chunk.
    #[error("the LZ4 stream is cut short")]
    Truncated,
    /// A chunk is not an LZ4 block, or it unpacks to more than 8 MiB.
    #[error("the LZ4 stream is damaged")]
    Damaged(#[source] DecompressError),
}

/// Unpacks `input` up to its end, or up to its last four bytes. In kernels, these four bytes are the unpacked size,
/// which is not part of the stream.
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
        let length = usize::try_from(u32::from_le_bytes(*length)).map_err(|_| Lz4Error::Truncated)?;
        let (chunk, after) = after.split_at_checked(length).ok_or(Lz4Error::Truncated)?;
        let start = output.len();
        output.resize(start + CHUNK, 0);
        let unpacked = decompress_into(chunk, &mut output[start..]).map_err(Lz4Error::Damaged)?;
        output.truncate(start + unpacked);
        rest = after;
    }
    Ok(output)
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
    fn overlapping_match_with_long_length_repeats_literals() {
        // "ab", then a match that begins 2 bytes back, then "z". The match has 22 bytes: the minimum of 4, plus 15
        // from the token, plus 3 from the byte after the offset.
        let packed = stream(&[&[0x2f, b'a', b'b', 2, 0, 3, 0x10, b'z']]);
        let expected = format!("{}z", "ab".repeat(12));
        assert_eq!(unpack(&packed).unwrap(), expected.as_bytes());
    }

    #[test]
    fn chunks_join_and_trailing_size_is_ignored() {
        let mut packed = stream(&[&[0x10, b'x'], &[0x10, b'y']]);
        packed.extend(2_u32.to_le_bytes());
        assert_eq!(unpack(&packed).unwrap(), b"xy");
    }

    #[test]
    fn damage_and_truncation_are_different_errors() {
        assert!(matches!(unpack(b"ELF"), Err(Lz4Error::Magic)));
        // A match that begins 9 bytes back, where only one byte precedes it.
        let damaged = unpack(&stream(&[&[0x10, b'x', 9, 0, 0x10, b'y']]));
        assert!(matches!(damaged, Err(Lz4Error::Damaged(DecompressError::OffsetOutOfBounds))));
        let whole = stream(&[&[0x30, b'x', b'y', b'z']]);
        let truncated = unpack(&whole[..whole.len() - 1]);
        assert!(matches!(truncated, Err(Lz4Error::Truncated)));
    }

    #[test]
    fn chunk_beyond_eight_mebibytes_is_damaged() {
        // One literal, then a match that begins 1 byte back. Each length byte with the value 255 adds 255 to the
        // length of the match, so the match becomes longer than a chunk may be.
        let mut chunk = vec![0x1f, b'x', 1, 0];
        chunk.resize(chunk.len() + CHUNK / 255 + 1, 255);
        chunk.extend([0, 0x10, b'y']);
        let long = unpack(&stream(&[&chunk]));
        assert!(matches!(long, Err(Lz4Error::Damaged(DecompressError::OutputTooSmall { .. }))));
    }
}
