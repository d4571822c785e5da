//! Runs the examples of an embedding VMM with `cargo run`. Checks the table in EMBEDDING.md that counts their lines.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::process::Command;

const EMBED: &str = include_str!("../examples/embed.rs");
const OWN_TYPES: &str = include_str!("../examples/own_types.rs");
const GUIDE: &str = include_str!("../EMBEDDING.md");

/// The output of `cargo run --example`.
fn printed(example: &str) -> io::Result<String> {
    let output = Command::new(env!("CARGO"))
        .args(["run", "--quiet", "--example", example])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()?;
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "the example {example} failed: {errors}");
    String::from_utf8(output.stdout).map_err(io::Error::other)
}

/// Returns the numbers in the line that starts with `what`.
fn numbers<const N: usize>(text: &str, what: &str) -> [u64; N] {
    let line = text.lines().find(|line| line.starts_with(what));
    let line = line.unwrap_or_else(|| panic!("no {what} in {text}"));
    let words = line.split([' ', ',', ':']).filter_map(|word| word.parse().ok());
    let numbers: Vec<u64> = words.collect();
    numbers.try_into().unwrap_or_else(|_| panic!("{line}"))
}

#[test]
fn bare_vmm_counts_traces_samples_and_records_its_guest() {
    assert!(Path::new("/dev/kvm").exists(), "this test runs a guest and needs /dev/kvm");
    let text = printed("embed").expect("the example runs");
    let [marks, rings] = numbers(&text, "counted");
    assert!(rings > 0 && marks == rings, "the numbers of records and marks differ, or are zero: {text}");
    assert_eq!(numbers(&text, "traced"), [rings], "{text}");
    for clock in ["sampled", "flight recorder"] {
        let [samples, hot] = numbers(&text, clock);
        assert!(samples >= 20 && hot > 0 && hot <= samples, "too few samples, or none of the hot function: {text}");
    }
}

#[test]
fn own_memory_queues_and_vectors_carry_the_device() {
    let text = printed("own_types").expect("the example runs");
    assert_eq!(
        text.lines().collect::<Vec<_>>(),
        [
            // The pages are, in order: the event queue's used ring, the notice's buffer, and the metadata page and data
            // page of the event's ring.
            "a sample and its notice: pages 0x2000 0x140000 0x300000 0x301000",
            "two samples, one in a plugged region: pages 0x2000 0x160000 0x300000 0x301000 0x40000000 0x40001000",
            "unplugged: 4 samples written, 1 lost",
            "queue 0: 4 interrupts, next_avail 4, next_used 4",
            "queue 1: 2 interrupts, next_avail 2, next_used 2",
            "queue 2: 0 interrupts, next_avail 0, next_used 0",
        ]
    );
}

/// Returns the number of lines of code in each section of an example. Comments and blank lines do not count.
fn sections(source: &str) -> BTreeMap<&str, usize> {
    let mut sections = BTreeMap::new();
    let mut name = "";
    for line in source.lines().map(str::trim) {
        if let Some(heading) = line.strip_prefix("// -- ") {
            name = heading.split(':').next().unwrap_or_default();
        } else if !line.is_empty() && !line.starts_with("//") {
            *sections.entry(name).or_default() += 1;
        }
    }
    sections.remove("");
    sections.remove("end of the VMM.");
    sections
}

#[test]
fn guide_counts_the_lines_of_the_examples() {
    let rows = GUIDE.lines().skip_while(|line| *line != "<!-- lines -->").skip(3);
    let rows = rows.take_while(|line| line.starts_with('|'));
    let mut tabled = [BTreeMap::new(), BTreeMap::new()];
    for row in rows {
        let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
        for (column, table) in cells[1..3].iter().zip(&mut tabled) {
            if let Ok(lines) = column.parse::<usize>() {
                table.insert(cells[0], lines);
            }
        }
    }
    let counted = [EMBED, OWN_TYPES].map(|source| {
        let mut sections = sections(source);
        let all = sections.values().sum();
        sections.insert("total", all);
        sections
    });
    assert_eq!(tabled, counted);
    let lines = EMBED.lines().map(str::trim);
    let code = lines.filter(|line| !line.is_empty() && !line.starts_with("//"));
    assert!(code.count() < 200, "the example has 200 lines or more");
}
