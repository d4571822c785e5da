//! The distribution's own `perf`, as the tests run it and read its output.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Output, Stdio};

use crate::ensure::{ensure, ensure_eq};
use crate::programs::text;
use crate::{Fallible, Outcome};

pub(crate) const MARK_3: &str = "vpmu/mark,event=3/";
pub(crate) const MARK_4: &str = "vpmu/mark,event=4/";

pub(crate) fn command(args: &[&str]) -> Command {
    let mut command = Command::new("perf");
    // perf looks for its configuration there.
    command.args(args).current_dir("/tmp").env("HOME", "/tmp");
    command
}

pub(crate) fn perf(args: &[&str]) -> Fallible<Output> {
    Ok(command(args).output()?)
}

/// Runs perf, which must succeed, and returns what it prints to stdout.
pub(crate) fn shown(args: &[&str]) -> Fallible<String> {
    let output = perf(args)?;
    ensure!(
        output.status.success(),
        "perf {args:?}: {}, after {} bytes: {}",
        output.status,
        output.stdout.len(),
        text(&output.stderr)
    );
    Ok(text(&output.stdout))
}

/// Runs `perf record`, which must succeed, and returns what it prints to stderr.
pub(crate) fn record(file: &str, args: &[&str]) -> Fallible<String> {
    let output = perf(&[&["record", "-o", file], args].concat())?;
    let said = text(&output.stderr);
    ensure!(output.status.success(), "perf record {args:?}: {said}");
    Ok(said)
}

/// Returns the lines that `perf script` prints with these fields, one for each sample.
pub(crate) fn script(file: &str, fields: &str) -> Fallible<Vec<String>> {
    let lines = shown(&["script", "-f", "-i", file, "-F", fields])?;
    Ok(lines.lines().map(|line| line.trim().to_owned()).collect())
}

/// How often each line occurs.
pub(crate) fn tally(lines: &[String]) -> BTreeMap<&str, usize> {
    let mut tally = BTreeMap::new();
    for line in lines {
        *tally.entry(line.as_str()).or_default() += 1;
    }
    tally
}

/// The option for `perf stat` with which [`rows`] can read its output. Names of events contain commas.
pub(crate) const SEPARATED: &str = "-x;";

/// A line of `perf stat` about an event.
#[derive(Debug)]
pub(crate) struct Row {
    /// The CPU or the thread, with options that count them apart.
    pub(crate) subject: Option<String>,
    /// The value as perf prints it: a number, or the reason why there is no number.
    pub(crate) value: String,
    pub(crate) event: String,
    /// The fields after the event. Some options add a field in front of the time.
    pub(crate) rest: Vec<String>,
}

impl Row {
    fn parse(line: &str) -> Option<Self> {
        let is_value = |field: &String| field.starts_with('<') || field.parse::<f64>().is_ok();
        let mut fields = line.split(';').map(str::to_owned).peekable();
        let subject = fields.next_if(|field| !is_value(field));
        let value = fields.next_if(is_value)?;
        let _unit = fields.next()?;
        Some(Self { subject, value, event: fields.next()?, rest: fields.collect() })
    }

    /// The percentage of the time in which the event counted.
    pub(crate) fn share(&self) -> &str {
        self.rest.get(1).map_or("", String::as_str)
    }
}

/// Returns the rows in what `perf stat` with [`SEPARATED`] prints, and skips other lines.
pub(crate) fn rows(said: &str) -> Vec<Row> {
    said.lines().filter_map(Row::parse).collect()
}

/// Runs `perf stat`, which must succeed, and returns its rows.
pub(crate) fn stat(args: &[&str]) -> Fallible<Vec<Row>> {
    let output = perf(&[&["stat", SEPARATED], args].concat())?;
    let said = text(&output.stderr);
    ensure!(output.status.success(), "perf stat {args:?}: {said}");
    let rows = rows(&said);
    ensure!(!rows.is_empty(), "perf stat {args:?} printed no count: {said}");
    Ok(rows)
}

/// Runs `perf stat`, and returns the count of the only event. The event must have run all the time.
pub(crate) fn count(args: &[&str]) -> Fallible<u64> {
    let row = only(stat(args)?)?;
    ensure_eq!(row.share(), "100.00", "the percentage of the time in {row:?}");
    Ok(row.value.parse().map_err(|e| format!("{e}: {row:?}"))?)
}

/// Returns the only row.
pub(crate) fn only(rows: Vec<Row>) -> Result<Row, String> {
    let [row] = <[Row; 1]>::try_from(rows).map_err(|rows| format!("perf printed not one row, but {rows:?}"))?;
    Ok(row)
}

/// Returns the row of an event.
pub(crate) fn row_of<'a>(rows: &'a [Row], event: &str) -> Result<&'a Row, String> {
    rows.iter().find(|row| row.event == event).ok_or_else(|| format!("no {event} in {rows:?}"))
}

/// A process that places a mark of `value` for each byte of input, and then outputs the byte.
pub(crate) struct Marker {
    pub(crate) process: Child,
}

impl Marker {
    pub(crate) fn start(value: &str) -> Fallible<Self> {
        let process = Command::new("guest-tests")
            .args(["mark", value, "1000000", "in-turn"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        Ok(Self { process })
    }

    /// Makes the process place `times` marks, and waits until all of them are placed.
    pub(crate) fn place(&mut self, times: usize) -> Outcome {
        let input = self.process.stdin.as_mut().ok_or("no input")?;
        let output = self.process.stdout.as_mut().ok_or("no output")?;
        for _ in 0..times {
            input.write_all(b"x")?;
            std::io::Read::read_exact(output, &mut [0])?;
        }
        Ok(())
    }
}

impl Drop for Marker {
    fn drop(&mut self) {
        // The process has ended, or ends now.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// `perf record` or `perf stat`, controlled by commands through a FIFO. perf acknowledges each command.
pub(crate) struct Controlled {
    perf: Child,
    control: fs::File,
    acknowledged: BufReader<fs::File>,
}

impl Controlled {
    pub(crate) fn start(file: &str, args: &[&str]) -> Fallible<Self> {
        Self::run(&["record", "-o", file], args)
    }

    /// Starts `perf stat`. [`Controlled::rows`] returns its counts.
    pub(crate) fn stat(args: &[&str]) -> Fallible<Self> {
        Self::run(&["stat", SEPARATED, "-o", "stat"], args)
    }

    fn run(action: &[&str], args: &[&str]) -> Fallible<Self> {
        for fifo in ["/tmp/control", "/tmp/acknowledged"] {
            let _ = fs::remove_file(fifo);
            let status = Command::new("mkfifo").arg(fifo).status()?;
            ensure!(status.success(), "mkfifo {fifo}: {status}");
        }
        let options = ["--delay=-1", "--control=fifo:/tmp/control,/tmp/acknowledged"];
        let perf = command(&[action, &options, args].concat()).stderr(Stdio::null()).spawn()?;
        // Opened for reading and writing, so that opening does not wait for the other end.
        let open = |path| fs::OpenOptions::new().read(true).write(true).open(path);
        Ok(Self { perf, control: open("/tmp/control")?, acknowledged: BufReader::new(open("/tmp/acknowledged")?) })
    }

    pub(crate) fn say(&mut self, word: &str) -> Outcome {
        writeln!(self.control, "{word}")?;
        let mut answer = Vec::new();
        self.acknowledged.read_until(b'\n', &mut answer)?;
        // A zero byte ends the previous answer.
        ensure!(answer.ends_with(b"ack\n"), "no acknowledgement of {word}: {}", text(&answer));
        Ok(())
    }

    pub(crate) fn signal(&self, signal: &str) -> Outcome {
        let process = self.perf.id().to_string();
        let status = Command::new("kill").args([signal, &process]).status()?;
        ensure!(status.success(), "kill {signal}: {status}");
        Ok(())
    }

    /// Ends `perf stat` with SIGINT, and returns its rows. perf writes its counts and then kills itself with the same
    /// signal, so its status is not a success.
    pub(crate) fn rows(mut self) -> Fallible<Vec<Row>> {
        self.signal("-INT")?;
        self.perf.wait()?;
        Ok(rows(&fs::read_to_string("/tmp/stat")?))
    }

    pub(crate) fn stop(mut self) -> Outcome {
        self.say("stop")?;
        let status = self.perf.wait()?;
        ensure!(status.success(), "perf record: {status}");
        Ok(())
    }
}
