//! Makes the `newc` archives that Linux unpacks as an initramfs. The callers choose the entries.

use std::collections::BTreeSet;

use thiserror::Error;

const MAGIC: &str = "070701";
const TRAILER: &str = "TRAILER!!!";
const DIRECTORY: u32 = 0o040_755;
const REGULAR: u32 = 0o100_000;
const LINK: u32 = 0o120_777;
const CHARACTER_DEVICE: u32 = 0o020_600;

/// Errors from adding an entry to an archive.
#[derive(Debug, Error)]
pub enum CpioError {
    /// The file is too long: the format stores its length in 32 bits.
    #[error("{name} is {size} bytes long; a file in an initramfs must be smaller than 4 GiB")]
    TooBig {
        /// Path in the archive.
        name: String,
        /// Its length in bytes.
        size: usize,
    },
    /// The name is empty, absolute, or has a part like `..`.
    #[error("{0:?} is not a valid path in an initramfs: must be relative, without `.` and `..`")]
    BadName(String),
}

/// An archive under construction. Parent directories are added automatically. Times are zero and inode numbers count
/// up, so archives with equal contents have equal bytes.
#[derive(Debug, Default)]
pub struct Archive {
    bytes: Vec<u8>,
    directories: BTreeSet<String>,
    inode: u32,
}

impl Archive {
    /// An archive without entries.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a directory and its parent directories.
    ///
    /// # Errors
    /// [`CpioError::BadName`].
    pub fn directory(&mut self, name: &str) -> Result<(), CpioError> {
        self.parents(check(name)?)?;
        if self.directories.insert(name.to_owned()) {
            self.entry(name, DIRECTORY, (0, 0), &[])?;
        }
        Ok(())
    }

    /// Adds a regular file with the permission bits `mode`.
    ///
    /// # Errors
    /// [`CpioError`].
    pub fn file(&mut self, name: &str, mode: u32, contents: &[u8]) -> Result<(), CpioError> {
        self.parents(check(name)?)?;
        self.entry(name, REGULAR | (mode & 0o7777), (0, 0), contents)
    }

    /// Adds a symbolic link to `target`.
    ///
    /// # Errors
    /// [`CpioError`].
    pub fn link(&mut self, name: &str, target: &str) -> Result<(), CpioError> {
        self.parents(check(name)?)?;
        self.entry(name, LINK, (0, 0), target.as_bytes())
    }

    /// Adds a character device.
    ///
    /// # Errors
    /// [`CpioError`].
    pub fn device(&mut self, name: &str, major: u32, minor: u32) -> Result<(), CpioError> {
        self.parents(check(name)?)?;
        self.entry(name, CHARACTER_DEVICE, (major, minor), &[])
    }

    /// The finished archive. Its length is a multiple of four, so that another archive may follow directly.
    ///
    /// # Errors
    /// None in practice: the trailer always fits.
    pub fn finish(mut self) -> Result<Vec<u8>, CpioError> {
        self.inode = u32::MAX; // the trailer's inode number wraps round to zero
        self.entry(TRAILER, 0, (0, 0), &[])?;
        Ok(self.bytes)
    }

    fn parents(&mut self, name: &str) -> Result<(), CpioError> {
        for (end, _) in name.match_indices('/') {
            let parent = &name[..end];
            if self.directories.insert(parent.to_owned()) {
                self.entry(parent, DIRECTORY, (0, 0), &[])?;
            }
        }
        Ok(())
    }

    fn entry(&mut self, name: &str, mode: u32, (major, minor): (u32, u32), contents: &[u8]) -> Result<(), CpioError> {
        let too_big = || CpioError::TooBig { name: name.to_owned(), size: contents.len() };
        let size = u32::try_from(contents.len()).map_err(|_| too_big())?;
        let name_size = u32::try_from(name.len() + 1).map_err(|_| too_big())?;
        self.inode = self.inode.wrapping_add(1);
        let links = if mode & DIRECTORY == DIRECTORY { 2 } else { 1 };
        let fields = [self.inode, mode, 0, 0, links, 0, size, 0, 0, major, minor, name_size, 0];
        self.bytes.extend_from_slice(MAGIC.as_bytes());
        for field in fields {
            self.bytes.extend_from_slice(format!("{field:08X}").as_bytes());
        }
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        pad(&mut self.bytes);
        self.bytes.extend_from_slice(contents);
        pad(&mut self.bytes);
        Ok(())
    }
}

/// Pads with zeroes to a multiple of four: the kernel expects the next archive there.
pub fn pad(bytes: &mut Vec<u8>) {
    bytes.resize(bytes.len().next_multiple_of(4), 0);
}

fn check(name: &str) -> Result<&str, CpioError> {
    let sound = !name.contains('\0') && name.split('/').all(|p| !matches!(p, "" | "." | ".."));
    if sound { Ok(name) } else { Err(CpioError::BadName(name.to_owned())) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Name, mode and contents of every entry, read as the kernel reads them.
    fn read(mut bytes: &[u8]) -> Vec<(String, u32, Vec<u8>)> {
        let mut entries = Vec::new();
        loop {
            assert_eq!(&bytes[..6], MAGIC.as_bytes());
            let field = |n: usize| {
                let at = 6 + 8 * n;
                let text = std::str::from_utf8(&bytes[at..at + 8]).unwrap();
                u32::from_str_radix(text, 16).unwrap()
            };
            let (mode, size, name_size) = (field(1), field(6) as usize, field(11) as usize);
            let name = String::from_utf8(bytes[110..110 + name_size - 1].to_vec()).unwrap();
            let start = (110 + name_size).next_multiple_of(4);
            let contents = bytes[start..start + size].to_vec();
            bytes = &bytes[(start + size).next_multiple_of(4)..];
            if name == TRAILER {
                assert!(bytes.is_empty());
                return entries;
            }
            entries.push((name, mode, contents));
        }
    }

    #[test]
    fn entries_come_back_with_their_parents_before_them() {
        let mut archive = Archive::new();
        archive.file("bin/tool", 0o755, b"12345").unwrap();
        archive.link("bin/sh", "tool").unwrap();
        archive.file("bin/deep/er", 0o644, b"").unwrap();
        archive.directory("bin").unwrap();
        archive.device("dev/console", 5, 1).unwrap();
        let bytes = archive.finish().unwrap();
        assert_eq!(bytes.len() % 4, 0);
        let expected = [
            ("bin", DIRECTORY, &b""[..]),
            ("bin/tool", 0o100_755, b"12345"),
            ("bin/sh", LINK, b"tool"),
            ("bin/deep", DIRECTORY, b""),
            ("bin/deep/er", 0o100_644, b""),
            ("dev", DIRECTORY, b""),
            ("dev/console", CHARACTER_DEVICE, b""),
        ];
        let expected: Vec<_> = expected.iter().map(|(n, m, c)| ((*n).to_owned(), *m, c.to_vec())).collect();
        assert_eq!(read(&bytes), expected);
    }

    #[test]
    fn equal_contents_give_equal_bytes() {
        let build = || {
            let mut archive = Archive::new();
            archive.file("a", 0o600, &[7; 33]).unwrap();
            archive.finish().unwrap()
        };
        assert_eq!(build(), build());
    }

    #[test]
    fn names_outside_the_root_are_refused() {
        for name in ["", "/etc/passwd", "a/../b", "./a", "a//b", "a/", "a\0b"] {
            let refused = Archive::new().file(name, 0o644, b"");
            assert!(matches!(refused, Err(CpioError::BadName(_))), "{name:?}");
        }
    }
}
