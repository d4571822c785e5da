//! Checks that each requirement of SPEC.md has a test, and that the comment before the test gives the requirement
//! number.
#![expect(clippy::expect_used, reason = "tests fail by panicking")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

const SPECIFICATION: &str = include_str!("../SPEC.md");
/// Directories whose tests check requirements.
const TESTED: [&str; 4] = ["vpmu", "vmm", "tests", "guest-driver/client"];

/// Returns every `.rs` file below `dir`, except files in build directories.
fn sources(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).expect("a directory");
    let mut found = Vec::new();
    for path in entries.map(|entry| entry.expect("an entry").path()) {
        if path.is_dir() && !path.ends_with("target") {
            found.extend(sources(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
    found
}

/// Returns the requirement numbers in a text, such as `VPMU-D-6.3-1`.
fn numbers(text: &str) -> Vec<String> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '-' && c != '.');
    let words = words.map(|word| word.trim_end_matches('.'));
    let numbers = words.filter(|word| word.starts_with("VPMU-D-") || word.starts_with("VPMU-G-"));
    numbers.map(str::to_owned).collect()
}

/// Returns the number and the text of each requirement in the specification.
fn requirements() -> BTreeMap<String, String> {
    let mut all = BTreeMap::new();
    for item in SPECIFICATION.split("\n- **VPMU-").skip(1) {
        let (number, text) = item.split_once("** ").expect("a number and a text");
        let end = text.find("\n\n").unwrap_or(text.len());
        let text = text[..end].to_owned();
        let number = format!("VPMU-{number}");
        assert_eq!(all.insert(number.clone(), text), None, "{number} twice");
    }
    all
}

/// Returns the requirement numbers in the comments before tests. Each entry consists of the test's file, the test's
/// name and the number.
fn named() -> Vec<(PathBuf, String, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let files = TESTED.iter().flat_map(|dir| sources(&root.join(dir)));
    let mut named = Vec::new();
    for file in files.filter(|file| !file.ends_with("tests/specification.rs")) {
        let text = fs::read_to_string(&file).expect("a source");
        let mut due: Vec<String> = Vec::new();
        let mut is_test = file.components().any(|part| part.as_os_str() == "guest");
        let of_guest = is_test;
        for line in text.lines().map(str::trim) {
            if let Some(comment) = line.strip_prefix("///") {
                due.extend(numbers(comment));
                continue;
            }
            is_test |= ["#[test]", "#[apply(tests::host_test)]"].contains(&line);
            if line.starts_with("#[") {
                continue;
            }
            let function = line.trim_start_matches("pub(crate) ").strip_prefix("fn ");
            if !due.is_empty() {
                let test = function.and_then(|function| function.split('(').next());
                let test = test.filter(|_| is_test);
                let test = test.unwrap_or_else(|| panic!("{}: no test after {due:?}", file.display()));
                let all = due.drain(..).map(|number| (file.clone(), test.to_owned(), number));
                named.extend(all);
            }
            is_test = of_guest;
        }
    }
    named
}

#[test]
fn requirement_with_must_is_named_by_a_test() {
    let named: BTreeSet<String> = named().into_iter().map(|(.., number)| number).collect();
    let missing: Vec<_> = requirements()
        .into_iter()
        .filter(|(number, text)| text.contains("MUST") && !named.contains(number))
        .map(|(number, _)| number)
        .collect();
    assert_eq!(missing, Vec::<String>::new());
}

#[test]
fn requirement_that_a_test_names_exists() {
    let known = requirements();
    let unknown: Vec<_> = named().into_iter().filter(|(.., number)| !known.contains_key(number)).collect();
    assert_eq!(unknown, []);
}

/// A requirement number consists of the section number and a serial number. The serial number starts at one in each
/// section.
#[test]
fn requirements_are_numbered_by_their_sections() {
    let mut section = String::new();
    let mut last: BTreeMap<String, u32> = BTreeMap::new();
    let mut seen = 0;
    for line in SPECIFICATION.lines() {
        if let Some(heading) = line.strip_prefix('#') {
            let number = heading.trim_start_matches('#').trim().split(' ').next();
            let parts: Vec<&str> = number.expect("a word").split('.').collect();
            let depth = if parts[0] == "6" { 2 } else { 1 };
            section = parts[..parts.len().min(depth)].join(".");
        }
        let Some(item) = line.strip_prefix("- **VPMU-") else {
            continue;
        };
        let (number, _) = item.split_once("**").expect("an end");
        let (of, index) = number.rsplit_once('-').expect("a number");
        let before = last.entry(of.to_owned()).or_default();
        assert_eq!(index.parse(), Ok(*before + 1), "the index of VPMU-{number}");
        *before += 1;
        assert_eq!(&of[2..], section, "the section of VPMU-{number}");
        seen += 1;
    }
    assert_eq!(seen, requirements().len());
}

/// Each requirement uses a keyword of the virtio specification, such as MUST.
#[test]
fn requirement_has_a_keyword() {
    for (number, text) in requirements() {
        let binding = ["MUST", "SHOULD", "MAY"];
        assert!(binding.iter().any(|word| text.contains(word)), "{number} has no keyword");
    }
}
