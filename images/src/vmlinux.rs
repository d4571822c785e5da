//! Extracts the kernel proper, an ELF file, from the bzImage that packages contain. A guest that starts from
//! the ELF file does not have to unpack itself first.

use std::io;
use std::io::Write;
use std::process::{Command, Stdio};

use thiserror::Error;

use crate::lz4::{self, Lz4Error};
use crate::prerequisites::{self, Prerequisite, PrerequisiteError};
use crate::sys;

const SECTOR: usize = 512;
const SETUP_SECTORS: usize = 0x1f1;
const SIGNATURE: std::ops::Range<usize> = 0x202..0x206;
const VERSION: usize = 0x206;
const PAYLOAD_OFFSET: usize = 0x248;
const PAYLOAD_LENGTH: usize = 0x24c;
/// The first version of the boot protocol that has the payload fields.
const PAYLOAD_VERSION: u16 = 0x208;

/// Errors of extracting the kernel.
#[derive(Debug, Error)]
pub enum VmlinuxError {
    /// The file is not a bzImage.
    #[error("not a bzImage")]
    NotBzImage,
    /// A bzImage that ends too early.
    #[error("the bzImage is cut short")]
    Truncated,
    /// The kernel is compressed in an unknown format.
    #[error("the kernel is compressed in an unknown format (it begins with {0:02x?})")]
    Compression(Vec<u8>),
    /// The LZ4 data cannot be unpacked.
    #[error("cannot unpack the kernel")]
    Lz4(#[from] Lz4Error),
    /// The program that unpacks the kernel is missing.
    #[error(transparent)]
    Prerequisite(#[from] PrerequisiteError),
    /// The program that unpacks the kernel failed.
    #[error("{program} cannot unpack the kernel")]
    Unpack {
        /// Its name.
        program: &'static str,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The unpacked payload is not an ELF file.
    #[error("the bzImage does not contain an ELF kernel")]
    NotElf,
}

/// The ELF file in `image`.
///
/// # Errors
/// [`VmlinuxError`].
pub fn extract(image: &[u8]) -> Result<Vec<u8>, VmlinuxError> {
    let payload = payload(image)?;
    let kernel = match payload {
        [0x02, 0x21, ..] => lz4::unpack(payload)?,
        [0x1f, 0x8b, ..] => pipe("gzip", None, payload)?,
        [0xfd, b'7', b'z', ..] => pipe("xz", Some(Prerequisite::Xz), payload)?,
        [0x28, 0xb5, 0x2f, ..] => pipe("zstd", Some(Prerequisite::Zstd), payload)?,
        [0x7f, b'E', b'L', b'F', ..] => payload.to_vec(),
        other => {
            return Err(VmlinuxError::Compression(other[..other.len().min(4)].to_vec()));
        }
    };
    if kernel.starts_with(b"\x7fELF") { Ok(kernel) } else { Err(VmlinuxError::NotElf) }
}

fn payload(image: &[u8]) -> Result<&[u8], VmlinuxError> {
    if image.get(SIGNATURE) != Some(b"HdrS") {
        return Err(VmlinuxError::NotBzImage);
    }
    let number = |at: usize| {
        let bytes = image.get(at..at + 4).and_then(|b| b.first_chunk::<4>());
        bytes.map(|b| u32::from_le_bytes(*b) as usize).ok_or(VmlinuxError::Truncated)
    };
    if number(VERSION)? & 0xffff < usize::from(PAYLOAD_VERSION) {
        return Err(VmlinuxError::NotBzImage);
    }
    let setup = match image[SETUP_SECTORS] {
        0 => 4,
        sectors => usize::from(sectors),
    };
    let start = (setup + 1) * SECTOR + number(PAYLOAD_OFFSET)?;
    let end = start + number(PAYLOAD_LENGTH)?;
    image.get(start..end).ok_or(VmlinuxError::Truncated)
}

/// Returns the output of `program -dc` for the input `bytes`. The last four bytes of the input are the length of the
/// output: gzip's format ends with this length, and the kernel's build appends it to other formats. Programs other than
/// gzip write all of the output and then fail on these four bytes, so their exit status is ignored and only the length
/// is checked.
fn pipe(program: &'static str, need: Option<Prerequisite>, bytes: &[u8]) -> Result<Vec<u8>, VmlinuxError> {
    prerequisites::ensure(need.as_slice())?;
    let failed = |source| VmlinuxError::Unpack { program, source };
    let mut command = Command::new(program);
    command.arg("-dc").stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = sys::dies_with_us(&mut command).spawn().map_err(failed)?;
    let output = std::thread::scope(|scope| {
        if let Some(mut input) = child.stdin.take() {
            // Ignore errors: the program may close its input before the trailing bytes.
            scope.spawn(move || input.write_all(bytes));
        }
        child.wait_with_output()
    });
    let output = output.map_err(failed)?;
    let (status, output) = (output.status, output.stdout);
    if program == "gzip" && !status.success() {
        return Err(failed(io::Error::other(status.to_string())));
    }
    let length = bytes.last_chunk().map(|bytes| u32::from_le_bytes(*bytes));
    if length.is_some_and(|length| length as usize == output.len()) {
        Ok(output)
    } else {
        Err(failed(io::ErrorKind::UnexpectedEof.into()))
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A bzImage.
    pub(crate) fn image(payload: &[u8]) -> Vec<u8> {
        let mut image = vec![0; 2 * SECTOR];
        image[SETUP_SECTORS] = 1;
        image[SIGNATURE].copy_from_slice(b"HdrS");
        image[VERSION..VERSION + 2].copy_from_slice(&PAYLOAD_VERSION.to_le_bytes());
        image[PAYLOAD_OFFSET] = 16;
        let length = u32::try_from(payload.len()).unwrap().to_le_bytes();
        image[PAYLOAD_LENGTH..PAYLOAD_LENGTH + 4].copy_from_slice(&length);
        image.extend([0; 16]);
        image.extend(payload);
        image
    }

    #[test]
    fn lz4_and_plain_kernels_unpack() {
        let lz4 = [2, 0x21, 0x4c, 0x18, 6, 0, 0, 0, 0x50, 0x7f, b'E', b'L', b'F', b'!', 5, 0, 0, 0];
        assert_eq!(extract(&image(&lz4)).unwrap(), b"\x7fELF!");
        assert_eq!(extract(&image(b"\x7fELF!")).unwrap(), b"\x7fELF!");
    }

    #[test]
    fn gzip_kernel_unpacks() {
        let packed = pipe_through_gzip(b"\x7fELFgz");
        assert_eq!(extract(&image(&packed)).unwrap(), b"\x7fELFgz");
    }

    #[test]
    fn damaged_gzip_kernel_is_refused() {
        let mut packed = pipe_through_gzip(b"\x7fELFgz");
        // The position of the checksum, which precedes the length.
        let checksum = packed.len() - 8;
        packed[checksum] ^= 1;
        assert!(matches!(extract(&image(&packed)), Err(VmlinuxError::Unpack { program: "gzip", .. })));
    }

    fn pipe_through_gzip(bytes: &[u8]) -> Vec<u8> {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("f");
        std::fs::write(&file, bytes).unwrap();
        Command::new("gzip").arg("-c").arg(&file).output().unwrap().stdout
    }

    #[test]
    fn file_that_is_not_a_kernel_is_refused() {
        let refused = |bytes: &[u8]| extract(bytes).unwrap_err();
        assert!(matches!(refused(b""), VmlinuxError::NotBzImage));
        assert!(matches!(refused(&[0; 4096]), VmlinuxError::NotBzImage));
        let whole = image(b"\x7fELF!");
        assert!(matches!(refused(&whole[..whole.len() - 1]), VmlinuxError::Truncated));
        assert!(matches!(refused(&image(b"plain text")), VmlinuxError::Compression(_)));
        let no_elf = [2, 0x21, 0x4c, 0x18, 2, 0, 0, 0, 0x10, b'x'];
        assert!(matches!(refused(&image(&no_elf)), VmlinuxError::NotElf));
    }
}
