//! A client of the control socket that sends arbitrary bytes in arbitrary pieces. Each line must get at most one
//! answer, a line of JSON that this project's client can parse. At the end, the device must free everything.
#![no_main]
#![allow(dead_code, clippy::expect_used, reason = "not every target uses all of the shared module")]

mod shared;

use std::cell::{Cell, RefCell};
use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::path::PathBuf;
use std::rc::Rc;

use libfuzzer_sys::arbitrary::{Result, Unstructured};
use libfuzzer_sys::fuzz_target;
use tempfile::TempDir;
use vmm::config::{Config, RunArgs};
use vmm::ctl::{Reply, Request};
use vmm::operator::Operator;
use vpmu_testkit::VCPUS;

use crate::shared::stage::{Stage, features};
use crate::shared::{driver_ops, host_ops};

thread_local! {
    /// The directory to which `dump` writes recordings, whatever path a request names.
    static DIRECTORY: TempDir = directory().expect("a directory");
}

/// Creates a temporary directory, in memory if the host supports that.
fn directory() -> io::Result<TempDir> {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir())
}

/// Whole requests and parts of requests.
const PIECES: [&str; 24] = [
    r#"{"do":"list"}"#,
    r#"{"do":"dump"}"#,
    r#"{"do":"dump","file":"/a"}"#,
    r#"{"do":"flush"}"#,
    r#"{"do":"flush","event":"ours"}"#,
    r#"{"do":"start","spec":"mark=7,name=ours,period=1"}"#,
    r#"{"do":"start","spec":"cycles,freq=100,size=4K"}"#,
    r#"{"do":"start","spec":""#,
    r#"{"do":"end","event":""#,
    r#""}"#,
    "marks",
    "exits-user",
    ",name=",
    ",period=",
    ",freq=",
    ",size=",
    ",vcpu=",
    "4K",
    "ours",
    "all",
    "1",
    ":u",
    r#"\u0000"#,
    "\n",
];

/// The server's end of the connection. The server reads the bytes of `sends` from it in pieces. `gets` keeps the bytes
/// that the server writes.
struct Client {
    sends: Vec<u8>,
    at: usize,
    /// The maximum number of bytes that one call transfers.
    piece: usize,
    pause: Cell<bool>,
    gets: Rc<RefCell<Vec<u8>>>,
}

impl Client {
    /// Returns the number of bytes to transfer, at most `most`. Every second call returns `WouldBlock` instead.
    fn turn(&self, most: usize) -> io::Result<usize> {
        if self.pause.replace(!self.pause.get()) { Err(ErrorKind::WouldBlock.into()) } else { Ok(most.min(self.piece)) }
    }
}

impl Read for Client {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let rest = &self.sends[self.at..];
        let count = self.turn(rest.len().min(into.len()))?;
        into[..count].copy_from_slice(&rest[..count]);
        self.at += count;
        Ok(count)
    }
}

impl Write for Client {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        let count = self.turn(from.len())?;
        self.gets.borrow_mut().extend(&from[..count]);
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Makes lines with requests, some of them invalid.
fn lines(input: &mut Unstructured<'_>) -> Result<Vec<u8>> {
    let mut lines = Vec::new();
    while !input.is_empty() && lines.len() < 1 << 15 {
        match input.int_in_range(0..=7)? {
            0 => {
                let len = input.int_in_range(0..=40)?.min(input.len());
                lines.extend(input.bytes(len)?);
            }
            // Longer than the limit for a request.
            1 if input.ratio(1, 20)? => lines.resize(lines.len() + (17 << 10), b'x'),
            2..=3 => lines.push(b'\n'),
            _ => lines.extend(input.choose(&PIECES)?.as_bytes()),
        }
    }
    Ok(lines)
}

fn operator(stage: &Stage) -> Operator {
    let arguments = RunArgs { kernel: Some(PathBuf::from("none")), vcpus: Some(VCPUS), ..RunArgs::default() };
    let config = Config::try_from(&arguments).expect("a configuration");
    let recorder = Operator::recorder(&config).expect("a recorder");
    Operator::new(&config, &stage.fixture.vpmu, recorder).expect("an operator")
}

fn recording() -> PathBuf {
    DIRECTORY.with(|directory| directory.path().join("perf.data"))
}

/// Runs steps of the driver and the host, so that the device has events to list.
fn work(stage: &mut Stage, input: &mut Unstructured<'_>) -> Result<()> {
    stage.activate(features(input)?);
    for _ in 0..input.int_in_range(0..=6)? {
        match input.int_in_range(0..=3)? {
            0 => driver_ops::step(stage, input)?,
            1 => host_ops::persist(stage, input)?,
            _ => host_ops::step(stage, input)?,
        }
    }
    Ok(())
}

/// Serves a client that sends `sends` in pieces of at most `piece` bytes. Returns what the client receives.
fn converse(stage: &Stage, sends: Vec<u8>, piece: usize) -> Vec<u8> {
    let gets = Rc::new(RefCell::new(Vec::new()));
    let client = Client { sends, at: 0, piece, pause: Cell::new(false), gets: Rc::clone(&gets) };
    let (operator, file) = (operator(stage), recording());
    let mut serve = move |request, _: Vec<File>| match request {
        Request::Dump { .. } => {
            let opened = File::create(&file).expect("a file");
            let path = Some(file.clone());
            operator.serve(Request::Dump { file: path }, vec![opened])
        }
        other => operator.serve(other, Vec::new()),
    };
    vmm::internals::converse(client, &mut serve);
    gets.take()
}

fuzz_target!(|input: &[u8]| {
    let mut input = Unstructured::new(input);
    let Ok(mut stage) = Stage::new(&mut input) else {
        return;
    };
    // Ends when the bytes run out.
    let _ = work(&mut stage, &mut input);
    let piece = *input.choose(&[4096, 1, 7, 100]).unwrap_or(&1);
    let sends = lines(&mut input).unwrap_or_default();
    // Limit the number of pieces, because the server searches for the end of a line after each piece.
    let piece = piece.max(sends.len() / 16);
    stage.leave_all();
    // Add one: if a line is too long, the server answers before the end of the line arrives, and then stops reading.
    let asked = sends.iter().filter(|byte| **byte == b'\n').count() + 1;
    let answers = converse(&stage, sends, piece);
    assert!(answers.is_empty() || answers.ends_with(b"\n"), "the last answer is not a whole line");
    let mut answered = 0;
    for line in answers.split_inclusive(|byte| *byte == b'\n') {
        let _: Reply = serde_json::from_slice(line).expect("an answer");
        let text = &line[..line.len() - 1];
        assert!(text.iter().all(|byte| *byte >= b' '), "control characters");
        answered += 1;
    }
    assert!(answered <= asked, "{answered} answers to {asked} lines");
    stage.finish();
});
