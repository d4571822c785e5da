//! The file of `vperf record`: one JSON object per line, in the order in which things were
//! seen, so that a recording that was cut off can be read as far as it goes.
//!
//! | line | says |
//! |---|---|
//! | `header` | the format's version, what was measured |
//! | `event` | an event, numbered from 0 in the file's order |
//! | `process` | name and executable mappings of a process, from `time` on |
//! | `task` | what a process does at `time`: fork, exec, map, change its name |
//! | `sample` | `[event, ip, pid, tid, time, cpu, period, user, [kernel, user]]`, the last the call chain's addresses, the innermost first; left out if there is none |
//! | `lost` | records of an event that the ring had no room for |
//! | `throttle` | from `time` on an event was not sampled, for it overflowed too often |
//! | `kernel` | the kernel's functions in which samples lie |
//! | `end` | sums; a file without it was cut off |

use std::fs::File;
use std::io::{self, BufRead, BufReader, BufWriter, Write};
use std::path::Path;

use serde::{Deserialize, Serialize};

/// Of this format.
pub(crate) const VERSION: u32 = 2;
/// The oldest that is read: its samples have no chains, and nothing else is missing.
const OLDEST: u32 = 1;

/// One line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Line {
    Header(Header),
    Event(EventLine),
    Process(Process),
    Task(Task),
    Sample(Sample),
    Lost(Lost),
    Throttle(Throttle),
    Kernel(Kernel),
    End(End),
}

/// First line.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Header {
    pub(crate) version: u32,
    pub(crate) target: String,
}

/// An event that was sampled.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct EventLine {
    pub(crate) name: String,
    pub(crate) unit: String,
    /// A sample every so many, or so many a second.
    pub(crate) period: u64,
    #[serde(default)]
    pub(crate) freq: bool,
    pub(crate) source: String,
    pub(crate) guest_only: bool,
}

/// A process, as it was when samples from `time` on were read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Process {
    pub(crate) pid: u32,
    pub(crate) comm: String,
    pub(crate) time: u64,
    pub(crate) maps: Vec<Map>,
}

/// An executable mapping.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Map {
    pub(crate) start: u64,
    pub(crate) end: u64,
    /// In the file, of `start`.
    pub(crate) offset: u64,
    pub(crate) path: String,
}

/// Something that changes what a process is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Task {
    pub(crate) pid: u32,
    pub(crate) time: u64,
    #[serde(flatten)]
    pub(crate) action: Action,
}

/// What it is that it does.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Action {
    Map(Map),
    /// Its new name.
    Exec(String),
    Name(String),
    /// Its parent.
    Fork(u32),
}

/// The addresses of a call chain, those of each mode with the innermost first.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Chain(pub(crate) Vec<u64>, pub(crate) Vec<u64>);

impl Chain {
    fn is_empty(&self) -> bool {
        self.0.is_empty() && self.1.is_empty()
    }

    /// There is more than where the sample was.
    pub(crate) fn has_callers(&self) -> bool {
        self.0.len() + self.1.len() > 1
    }
}

/// Event, ip, pid, tid, time, cpu, period, user mode, call chain.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Sample(
    pub(crate) usize,
    pub(crate) u64,
    pub(crate) u32,
    pub(crate) u32,
    pub(crate) u64,
    pub(crate) u32,
    pub(crate) u64,
    pub(crate) bool,
    #[serde(default, skip_serializing_if = "Chain::is_empty")] pub(crate) Chain,
);

/// A loss.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Lost {
    pub(crate) event: usize,
    pub(crate) lost: u64,
}

/// An event that was not sampled any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Throttle {
    pub(crate) event: usize,
    pub(crate) time: u64,
}

/// Functions of the kernel.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Kernel {
    pub(crate) symbols: Vec<Symbol>,
    /// The kernel shows this user no addresses.
    pub(crate) hidden: bool,
}

/// A function: from `start` up to the next one's.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Symbol {
    pub(crate) start: u64,
    pub(crate) end: u64,
    pub(crate) name: String,
}

/// Last line.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct End {
    pub(crate) samples: u64,
    pub(crate) lost: u64,
    #[serde(default)]
    pub(crate) throttled: u64,
    pub(crate) wakeups: u64,
    pub(crate) elapsed_ns: u64,
    pub(crate) exit_code: u8,
}

/// What is wrong with the file.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DataError {
    #[error("creating the file")]
    Create(#[source] io::Error),
    #[error("keeping the file that was there as {0:?}")]
    Keep(std::path::PathBuf, #[source] io::Error),
    #[error("writing the file")]
    Write(#[source] io::Error),
    #[error("opening the file")]
    Open(#[source] io::Error),
    #[error("reading the file")]
    Read(#[source] io::Error),
    #[error("it was not written by `vperf record`")]
    NotOurs,
    #[error(
        "it has format {0}, this vperf reads {OLDEST} to {VERSION}: take the vperf that recorded it"
    )]
    Version(u32),
    #[error("line {line} cannot be read")]
    Line {
        line: usize,
        source: serde_json::Error,
    },
}

/// Writes a recording.
#[derive(Debug)]
pub(crate) struct Writer(BufWriter<File>);

impl Writer {
    /// A file that is there already is kept, as `path` with `.old` after it.
    pub(crate) fn create(path: &Path, target: &str) -> Result<Self, DataError> {
        if path.is_file() {
            let mut old = path.as_os_str().to_owned();
            old.push(".old");
            std::fs::rename(path, &old).map_err(|error| DataError::Keep(old.into(), error))?;
        }
        let mut writer = Self(BufWriter::new(
            File::create(path).map_err(DataError::Create)?,
        ));
        writer.line(&Line::Header(Header {
            version: VERSION,
            target: target.into(),
        }))?;
        Ok(writer)
    }

    pub(crate) fn line(&mut self, line: &Line) -> Result<(), DataError> {
        serde_json::to_writer(&mut self.0, line).map_err(|error| DataError::Write(error.into()))?;
        self.0.write_all(b"\n").map_err(DataError::Write)
    }

    pub(crate) fn flush(&mut self) -> Result<(), DataError> {
        self.0.flush().map_err(DataError::Write)
    }
}

/// Hands the lines, the header first, to `each`; true if the file was cut off in the middle of
/// a line.
pub(crate) fn read(path: &Path, mut each: impl FnMut(Line)) -> Result<bool, DataError> {
    let mut file = BufReader::new(File::open(path).map_err(DataError::Open)?);
    let mut bytes = Vec::new();
    let mut number = 0;
    loop {
        bytes.clear();
        if file
            .read_until(b'\n', &mut bytes)
            .map_err(DataError::Read)?
            == 0
        {
            return if number == 0 {
                Err(DataError::NotOurs)
            } else {
                Ok(false)
            };
        }
        number += 1;
        let line = match serde_json::from_slice(&bytes) {
            Ok(line) => line,
            Err(_) if number == 1 => return Err(DataError::NotOurs),
            Err(_) if bytes.last() != Some(&b'\n') => return Ok(true),
            Err(source) => {
                return Err(DataError::Line {
                    line: number,
                    source,
                });
            }
        };
        match line {
            Line::Header(header) if !(OLDEST..=VERSION).contains(&header.version) => {
                return Err(DataError::Version(header.version));
            }
            _ if number == 1 && !matches!(line, Line::Header(_)) => {
                return Err(DataError::NotOurs);
            }
            line => each(line),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn lines(text: &str) -> Result<(Vec<Line>, bool), DataError> {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), text).unwrap();
        let mut lines = Vec::new();
        let cut = read(file.path(), |line| lines.push(line))?;
        Ok((lines, cut))
    }

    const HEADER: &str = "{\"header\":{\"version\":1,\"target\":\"'x'\"}}\n";
    const CHAIN: &str = "{\"sample\":[0,4096,1,2,3,0,1000,true,[[],[4096,8192]]]}\n";
    const SAMPLE: &str = "{\"sample\":[0,4096,1,2,3,0,1000,true]}\n";

    #[test]
    fn what_is_written_can_be_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("vperf.data");
        fs::write(&path, "before").unwrap();
        let mut writer = Writer::create(&path, "'x'").unwrap();
        let sample = Line::Sample(Sample(0, 4096, 1, 2, 3, 0, 1000, true, Chain::default()));
        let map = Map {
            start: 1,
            end: 2,
            offset: 3,
            path: "/bin/\u{e9}".into(),
        };
        let process = Process {
            pid: 1,
            comm: "a\"b".into(),
            time: 0,
            maps: vec![map],
        };
        writer.line(&Line::Process(process.clone())).unwrap();
        writer.line(&sample).unwrap();
        writer.flush().unwrap();
        let mut lines = Vec::new();
        assert!(!read(&path, |line| lines.push(line)).unwrap());
        let header = Header {
            version: 2,
            target: "'x'".into(),
        };
        assert_eq!(
            lines,
            [Line::Header(header), Line::Process(process), sample]
        );
        assert_eq!(
            fs::read_to_string(dir.path().join("vperf.data.old")).unwrap(),
            "before"
        );
    }

    #[test]
    fn a_file_that_was_cut_off_is_read_as_far_as_it_goes() {
        let cut = format!("{HEADER}{SAMPLE}{}", &SAMPLE[..20]);
        let (lines, cut) = lines(&cut).unwrap();
        assert!(cut);
        assert_eq!(lines.len(), 2);
    }

    #[test]
    fn chains_are_kept_and_files_without_any_are_read() {
        let (old, _) = lines(&format!("{HEADER}{SAMPLE}")).unwrap();
        assert!(matches!(&old[1], Line::Sample(sample) if sample.8.is_empty()));
        let header = HEADER.replace(":1,", ":2,");
        let (new, _) = lines(&format!("{header}{CHAIN}{SAMPLE}")).unwrap();
        let chain = Chain(vec![], vec![4096, 8192]);
        assert!(matches!(&new[1], Line::Sample(sample) if sample.8 == chain));
        assert_eq!(serde_json::to_string(&new[1]).unwrap() + "\n", CHAIN);
        assert_eq!(serde_json::to_string(&new[2]).unwrap() + "\n", SAMPLE);
    }

    #[test]
    fn other_files_are_refused() {
        for text in [
            "",
            "\n",
            "hello\n",
            SAMPLE,
            "{}\n",
            "\u{7f}ELF",
            "PERFILE2\n",
        ] {
            assert!(matches!(lines(text), Err(DataError::NotOurs)), "{text:?}");
        }
        for version in [0, 3] {
            let other = HEADER.replace(":1,", &format!(":{version},"));
            assert!(matches!(lines(&other), Err(DataError::Version(v)) if v == version));
        }
        let broken = format!("{HEADER}{SAMPLE}garbage\n{SAMPLE}");
        assert!(matches!(
            lines(&broken),
            Err(DataError::Line { line: 3, .. })
        ));
    }
}
