//! The error of an operation on a file, which many other errors contain.

use std::io;
use std::path::{Path, PathBuf};

/// A file or a directory that could not be read or written.
#[derive(Debug, thiserror::Error)]
#[error("cannot read or write {path}")]
pub struct FileError {
    path: PathBuf,
    source: io::Error,
}

impl FileError {
    /// For `map_err`: makes the error of a failed operation on `path`.
    pub(crate) fn at(path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| Self { path: path.to_owned(), source }
    }
}
