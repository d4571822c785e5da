//! Reads and writes the lines of a recording.

use std::fs::File;
use std::io::{self, BufRead, BufReader, BufWriter, Read, Write};
use std::path::Path;

use super::{Header, Line, OLDEST, VERSION};

/// An error of the file.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DataError {
    #[error("cannot create the file")]
    Create(#[source] io::Error),
    #[error("cannot rename the existing file to {0:?}")]
    Keep(std::path::PathBuf, #[source] io::Error),
    #[error("cannot write the file")]
    Write(#[source] io::Error),
    #[error("cannot open the file")]
    Open(#[source] io::Error),
    #[error("cannot read the file")]
    Read(#[source] io::Error),
    #[error("not a recording of `vperf record` or `vperf exits`")]
    NotOurs,
    #[error(
        "the recording has the unknown format {0}; this vperf reads formats {OLDEST} to {VERSION}: use the vperf that recorded it"
    )]
    Version(u32),
    #[error("line {0} states how many bytes follow it, but this number is wrong")]
    Aux(usize),
    #[error("line {line} cannot be read")]
    Line { line: usize, source: serde_json::Error },
}

/// Writes a recording.
#[derive(Debug)]
pub(crate) struct Writer(BufWriter<File>);

impl Writer {
    /// Creates the file; an existing one is renamed to `path` with `.old` appended.
    pub(crate) fn create(path: &Path, target: &str) -> Result<Self, DataError> {
        if path.is_file() {
            let mut old = path.as_os_str().to_owned();
            old.push(".old");
            std::fs::rename(path, &old).map_err(|error| DataError::Keep(old.into(), error))?;
        }
        let mut writer = Self(BufWriter::new(File::create(path).map_err(DataError::Create)?));
        writer.line(&Line::Header(Header { version: VERSION, target: target.into() }))?;
        Ok(writer)
    }

    pub(crate) fn line(&mut self, line: &Line) -> Result<(), DataError> {
        serde_json::to_writer(&mut self.0, line).map_err(|error| DataError::Write(error.into()))?;
        let mut write = |bytes: &[u8]| self.0.write_all(bytes).map_err(DataError::Write);
        write(b"\n")?;
        if let Line::Aux(aux) = line {
            write(&aux.data)?;
            write(b"\n")?;
        }
        Ok(())
    }

    pub(crate) fn flush(&mut self) -> Result<(), DataError> {
        self.0.flush().map_err(DataError::Write)
    }
}

/// Passes the lines to `each`, the header first. Returns true if the file ends in the middle of a
/// line, or in the middle of the bytes that follow an `aux` line.
pub(crate) fn read(path: &Path, mut each: impl FnMut(Line)) -> Result<bool, DataError> {
    let mut file = BufReader::new(File::open(path).map_err(DataError::Open)?);
    let mut bytes = Vec::new();
    let mut number = 0;
    loop {
        bytes.clear();
        if file.read_until(b'\n', &mut bytes).map_err(DataError::Read)? == 0 {
            return if number == 0 { Err(DataError::NotOurs) } else { Ok(false) };
        }
        number += 1;
        let mut line = match serde_json::from_slice(&bytes) {
            Ok(line) => line,
            Err(_) if number == 1 => return Err(DataError::NotOurs),
            Err(_) if bytes.last() != Some(&b'\n') => return Ok(true),
            Err(source) => {
                return Err(DataError::Line { line: number, source });
            }
        };
        match &line {
            Line::Header(header) if !(OLDEST..=VERSION).contains(&header.version) => {
                return Err(DataError::Version(header.version));
            }
            _ if number == 1 && !matches!(line, Line::Header(_)) => {
                return Err(DataError::NotOurs);
            }
            _ => {}
        }
        if let Line::Aux(aux) = &mut line {
            let mut follows = (&mut file).take(aux.bytes.saturating_add(1));
            follows.read_to_end(&mut aux.data).map_err(DataError::Read)?;
            if aux.data.len() as u64 <= aux.bytes {
                return Ok(true);
            }
            if aux.data.pop() != Some(b'\n') {
                return Err(DataError::Aux(number));
            }
        }
        each(line);
    }
}
