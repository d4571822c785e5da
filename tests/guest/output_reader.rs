//! Tests a reader that is a separate program in C. It uses only the interfaces in the kernel's header and the driver's
//! header.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use crate::ensure::{ensure, ensure_eq};
use crate::raw::Device;
use crate::{Outcome, cpu};

const GROUP: &str = "output";

const VALUE: u64 = 130;

/// Places the marks of one round while the reader reads, and checks its output.
fn round(device: &Device, marks: u64, together: bool) -> Outcome {
    let thread = cpu::thread_id().to_string();
    // The reader inherits CPU 0.
    cpu::pin(0)?;
    let mut reader = Command::new("reader")
        .args([&thread, &VALUE.to_string(), &marks.to_string()])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let mut lines = BufReader::new(reader.stdout.take().ok_or("no pipe")?).lines();
    ensure_eq!(lines.next().transpose()?.as_deref(), Some("ready"), "the first line");
    // Places the marks on the reader's CPU or on the other CPU.
    cpu::pin(if together { 0 } else { 1 })?;
    let before = device.time_of(cpu::tsc());
    device.place(VALUE, marks)?;
    let after = device.time_of(cpu::tsc());
    let said: Vec<String> = lines.collect::<Result<_, _>>()?;
    let output = reader.wait_with_output()?;
    ensure!(output.status.success(), "the reader: {}", String::from_utf8_lossy(&output.stderr));
    let (last, records) = said.split_last().ok_or("the reader printed nothing")?;
    ensure_eq!(*last, format!("count {marks}"), "the count");
    let who = format!("{} {thread}", std::process::id());
    let (mut number, mut time) = (0, before);
    for line in records {
        if let Some(lost) = line.strip_prefix("lost ") {
            number += lost.parse::<u64>()?;
            continue;
        }
        let rest = line.strip_prefix("sample ").and_then(|rest| rest.strip_prefix(&who));
        let rest = rest.ok_or_else(|| format!("{line:?} is not of {who}"))?;
        let words: Vec<u64> = rest.split_whitespace().map(str::parse).collect::<Result<_, _>>()?;
        number += 1;
        // The count in each record must be the number of records and losses up to this record.
        ensure_eq!(words[1], number, "the mark of {line:?}");
        ensure!(words[0] > time || number == 1, "{line:?} is not later than {time}");
        time = words[0];
    }
    ensure_eq!(number, marks, "records and losses");
    ensure!((before..=after).contains(&time), "the last record's time {time} is after {after}, or before the marks");
    Ok(())
}

#[apply(guest_test)]
fn program_built_on_perfs_header_reads_all() -> Outcome {
    let device = Device::open()?;
    for marks in [1, 100, 700] {
        for together in [false, true] {
            round(&device, marks, together).map_err(|error| format!("{marks} marks, together {together}: {error}"))?;
        }
    }
    Ok(())
}
