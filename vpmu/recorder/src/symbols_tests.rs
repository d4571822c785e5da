#![allow(clippy::expect_used, clippy::unwrap_used, reason = "tests fail by panicking")]

use std::fs;

use object::{Object, ObjectSymbol};

use super::*;

fn file(bytes: &[u8]) -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), bytes).unwrap();
    file
}

fn found(text: &str, addresses: &[u64]) -> Vec<(String, u64, u32)> {
    let file = file(text.as_bytes());
    let symbols = Symbols::open(file.path()).unwrap();
    symbols
        .covering(&addresses.iter().copied().collect())
        .unwrap()
        .into_iter()
        .map(|function| (function.name, function.start, function.size))
        .collect()
}

const KALLSYMS: &str = "\
0000000000000000 A fixed_percpu_data
ffffffff81000000 T _text
ffffffff81000000 T startup_64
ffffffff81000100 t helper
ffffffff81000180 D some_data
ffffffff81000200 W weak_one
ffffffffc0000000 t module_function\t[virtio_pmu]
";
const BASE: u64 = 0xffff_ffff_8100_0000;

#[test]
fn function_ends_at_the_next_symbol() {
    let name = |name: &str, start, size| (name.to_owned(), start, size);
    assert_eq!(
        found(KALLSYMS, &[BASE, BASE + 5, BASE + 0x17f, BASE + 0x1f0, BASE + 0x201]),
        [name("_text", BASE, 0x100), name("helper", BASE + 0x100, 0x80), name("weak_one", BASE + 0x200, 0x3eff_fe00),]
    );
    let module = 0xffff_ffff_c000_0000;
    assert_eq!(
        found(KALLSYMS, &[1, BASE - 1, module + 4095, module + 4096, u64::MAX]),
        [name("module_function", module, 4096)]
    );
}

#[test]
fn functions_of_an_elf_program_are_found() {
    let own = std::env::current_exe().unwrap();
    let symbols = Symbols::open(&own).unwrap();
    let bytes = fs::read(&own).unwrap();
    let elf = object::File::parse(bytes.as_slice()).unwrap();
    let main = elf.symbols().find(|symbol| symbol.name() == Ok("main")).unwrap();
    let inside = BTreeSet::from([main.address() + 1]);
    let found = symbols.covering(&inside).unwrap();
    assert_eq!((found.len(), found[0].name.as_str()), (1, "main"));
    assert_eq!(u64::from(found[0].size), main.size());
}

#[test]
fn file_without_functions_is_refused_with_a_remedy() {
    let stub = "ffffffffffffffff B The real System.map is in the linux-image-dbg package\n";
    let hidden = "0000000000000000 T _text\n0000000000000000 t helper\n";
    for (contents, words) in [
        (&b""[..], "unstripped"),
        (stub.as_bytes(), "System.map"),
        (b"\xff\xfe\0", "unstripped"),
        (hidden.as_bytes(), "as root"),
        (b"\x7fELF and no more", "ELF"),
    ] {
        let file = file(contents);
        let error = Symbols::open(file.path()).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
    let error = Symbols::open(Path::new("/nonexistent/System.map")).unwrap_err();
    assert!(error.to_string().contains("/nonexistent"), "{error}");
}

#[test]
fn name_is_shortened_and_loses_control_characters() {
    let long = "x".repeat(1000);
    let text = format!("ffffffff81000000 T {long}\nffffffff81000100 T a\x1bb\n");
    let names = found(&text, &[BASE, BASE + 0x100]);
    assert_eq!((names[0].0.len(), names[1].0.as_str()), (255, "ab"));
}
