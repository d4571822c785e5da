//! Keys of the cache: a digest over everything that a result depends on.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use sha2::{Digest, Sha256};
use thiserror::Error;

/// An input that could not be read.
#[derive(Debug, Error)]
#[error("cannot read {path}")]
pub struct DigestError {
    path: String,
    #[source]
    source: io::Error,
}

/// Collects inputs. Every input is hashed with its length and a label, so that different lists of inputs have
/// different digests.
#[derive(Clone, Debug)]
pub struct Key(Sha256);

impl Key {
    /// Makes a key for results of kind `what`.
    pub fn new(what: &str) -> Self {
        Self(Sha256::new()).bytes("kind", what.as_bytes())
    }

    /// Adds a value.
    #[must_use]
    pub fn text(self, label: &str, value: &str) -> Self {
        self.bytes(label, value.as_bytes())
    }

    /// Adds raw bytes.
    #[must_use]
    pub fn bytes(mut self, label: &str, value: &[u8]) -> Self {
        for part in [label.as_bytes(), value] {
            self.0.update(part.len().to_le_bytes());
            self.0.update(part);
        }
        self
    }

    /// Adds a file's contents.
    ///
    /// # Errors
    /// [`DigestError`] when the file cannot be read.
    pub fn file(self, label: &str, path: &Path) -> Result<Self, DigestError> {
        let contents = fs::read(path).map_err(|source| failed(path, source))?;
        Ok(self.bytes(label, &contents))
    }

    /// Adds the names, sizes and times of change of all files below `directory`, which takes less time than to read them.
    ///
    /// # Errors
    /// [`DigestError`] when a directory below `directory` cannot be read.
    pub fn state(mut self, label: &str, directory: &Path) -> Result<Self, DigestError> {
        let entries = fs::read_dir(directory).and_then(Iterator::collect::<io::Result<Vec<_>>>);
        let mut entries = entries.map_err(|source| failed(directory, source))?;
        entries.sort_by_key(fs::DirEntry::file_name);
        for entry in entries {
            let name = format!("{label}/{}", entry.file_name().to_string_lossy());
            let meta = entry.metadata().map_err(|source| failed(&entry.path(), source))?;
            self = if meta.is_dir() {
                self.state(&name, &entry.path())?
            } else {
                self.text(&name, &format!("{} {}.{:09}", meta.len(), meta.ctime(), meta.ctime_nsec()))
            };
        }
        Ok(self)
    }

    /// Returns the digest as 16 hexadecimal digits.
    pub fn hex(self) -> String {
        self.0.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect()
    }
}

fn failed(path: &Path, source: io::Error) -> DigestError {
    DigestError { path: path.display().to_string(), source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_change_of_any_input_changes_the_key() {
        let key = |a: &str, b: &str| Key::new("x").text("a", a).text("b", b).hex();
        assert_eq!(key("1", "2"), key("1", "2"));
        assert_ne!(key("1", "2"), key("2", "1"));
        assert_ne!(key("12", ""), key("1", "2"));
        assert_ne!(Key::new("x").hex(), Key::new("y").hex());
        assert_eq!(key("1", "2").len(), 16);
    }

    #[test]
    fn state_of_directory_covers_names_and_changes() {
        let directory = tempfile::tempdir().unwrap();
        let hex = || Key::new("t").state("t", directory.path()).unwrap().hex();
        fs::create_dir(directory.path().join("sub")).unwrap();
        fs::write(directory.path().join("sub/a"), "1").unwrap();
        let first = hex();
        assert_eq!(first, hex());
        fs::write(directory.path().join("sub/a"), "22").unwrap();
        let second = hex();
        assert_ne!(first, second);
        fs::rename(directory.path().join("sub/a"), directory.path().join("sub/b")).unwrap();
        assert_ne!(second, hex());
    }

    #[test]
    fn digest_of_missing_file_names_it() {
        let error = Key::new("t").file("f", Path::new("/no/such/file")).unwrap_err();
        assert!(error.to_string().contains("/no/such/file"));
    }
}
