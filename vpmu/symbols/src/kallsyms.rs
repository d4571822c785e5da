//! Parses the text of `/proc/kallsyms` and of `System.map`.

use std::fmt;

use crate::{Functions, Symbol};

/// The name of a kernel function; displays as `name [module]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Name<'a> {
    /// The function.
    pub function: &'a str,
    /// The module; `None` for the kernel image.
    pub module: Option<&'a str>,
}

impl fmt::Display for Name<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.function)?;
        match self.module {
            Some(module) => write!(f, " [{module}]"),
            None => Ok(()),
        }
    }
}

/// Parses the functions in lines of the form `address type name [module]`; skips other lines.
#[must_use]
pub fn kallsyms(text: &str) -> Functions<Name<'_>> {
    text.lines().filter_map(symbol).collect()
}

fn symbol(line: &str) -> Option<Symbol<Name<'_>>> {
    let mut words = line.split_ascii_whitespace();
    let address = address(words.next()?)?;
    let kind = words.next().filter(|kind| kind.len() == 1)?;
    let is_code = matches!(kind, "t" | "T" | "w" | "W");
    let function = words.next()?;
    let module = words.next().and_then(module);
    Some(Symbol { address, size: None, name: is_code.then_some(Name { function, module }) })
}

fn address(word: &str) -> Option<u64> {
    // `from_str_radix` accepts a sign.
    let is_plain = word.bytes().all(|byte| byte.is_ascii_hexdigit());
    let address = u64::from_str_radix(word, 16).ok()?;
    is_plain.then_some(address)
}

fn module(word: &str) -> Option<&str> {
    let name = word.strip_prefix('[')?.strip_suffix(']')?;
    Some(name).filter(|name| !name.is_empty())
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

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
    const MODULE: u64 = 0xffff_ffff_c000_0000;

    fn at(text: &str, address: u64) -> Option<(String, u64)> {
        let functions = kallsyms(text);
        let found = functions.at(address);
        found.map(|(name, offset)| (name.to_string(), offset))
    }

    #[test]
    fn address_has_name_module_and_offset() {
        let named = |name: &str, offset| Some((name.to_owned(), offset));
        assert_eq!(at(KALLSYMS, BASE + 5), named("_text", 5));
        assert_eq!(at(KALLSYMS, BASE + 0x17f), named("helper", 0x7f));
        assert_eq!(at(KALLSYMS, BASE + 0x180), None, "data");
        assert_eq!(at(KALLSYMS, BASE + 0x200), named("weak_one", 0));
        assert_eq!(at(KALLSYMS, MODULE + 4095), named("module_function [virtio_pmu]", 4095));
        for outside in [0, 1, BASE - 1, MODULE + 4096, u64::MAX] {
            assert_eq!(at(KALLSYMS, outside), None, "{outside:#x}");
        }
        let functions = kallsyms(KALLSYMS);
        let (name, _) = functions.at(MODULE).unwrap();
        assert_eq!((name.function, name.module), ("module_function", Some("virtio_pmu")));
    }

    #[test]
    fn zero_addresses_are_hidden() {
        let zeros = kallsyms("0000000000000000 T _text\n0000000000000000 t helper [a]\n");
        assert!(zeros.are_hidden() && zeros.is_empty());
        let data = kallsyms("ffffffff81000180 D some_data\n");
        assert!(!data.are_hidden() && data.is_empty());
    }

    #[test]
    fn undefined_weak_function_has_no_addresses() {
        let text = "0000000000000000 w undefined\nffffffff81000000 T _text\n";
        assert_eq!(at(text, 0), None);
        assert_eq!(at(text, 0x1000), None);
        assert!(at(text, BASE).is_some());
    }

    #[test]
    fn malformed_lines_are_skipped() {
        for line in [
            "",
            " ",
            "ffffffff81000100",
            "ffffffff81000100 T",
            "ffffffff81000100 T ",
            "ffffffff81000100T helper",
            "+ffffffff81000100 T sign",
            "-1 T sign",
            "0xffffffff81000100 T prefix",
            "1ffffffff81000100 T too_large",
            "                 U undefined",
            "                 w undefined",
            "ffffffff81000100 \u{fffd} T",
            "ffffffff81000100 helper [module]",
            "é T é",
            "\0\0\0 T \0",
        ] {
            let text = format!("{line}\nffffffff81000000 T _text\r\n{line}\n{line}");
            assert_eq!(at(&text, BASE + 0x101), Some(("_text".to_owned(), 0x101)), "{line:?}");
            assert!(kallsyms(line).is_empty(), "{line:?}");
        }
    }

    #[test]
    fn malformed_module_is_none() {
        for module in ["", "[]", "[", "]", "[open", "closed]", "bare", "( [a]"] {
            let text = format!("ffffffff81000000 T f\t{module}");
            assert_eq!(at(&text, BASE), Some(("f".to_owned(), 0)), "{module}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_read(words in vec(prop_oneof![
            Just("ffffffff81000000".to_owned()),
            "[0-9a-f]{0,18}",
            "[tTwWdDbA]",
            "[ \t\r\n]",
            "\\[[a-z]{0,3}\\]?",
            ".{0,4}",
        ], 0..64)) {
            let text = words.concat();
            let functions = kallsyms(&text);
            for address in [0, 1, BASE, u64::MAX] {
                if let Some((name, offset)) = functions.at(address) {
                    prop_assert!(offset <= address);
                    prop_assert!(text.contains(name.function));
                }
            }
        }
    }
}
