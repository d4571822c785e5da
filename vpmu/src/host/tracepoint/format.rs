//! Parses a tracepoint's `format` file: the tracepoint's id, and the positions of the fields in its raw data.
//! This module does not depend on a particular tracepoint, and does not open files.

/// A tracepoint according to its `format` file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Format {
    /// The tracepoint's id. It is the `config` of the tracepoint's perf event, and the `common_type` in its raw data.
    pub(super) id: u16,
    fields: Vec<(String, Field)>,
}

/// Position of a number in the raw data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Field {
    offset: usize,
    size: usize,
}

impl Format {
    /// Parses `text`. Returns `None` if it is not a format file.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let id = text.lines().find_map(|line| line.strip_prefix("ID:"))?;
        let fields =
            text.lines().filter_map(|line| line.trim_start().strip_prefix("field:")).filter_map(field).collect();
        Some(Self { id: id.trim().parse().ok()?, fields })
    }

    /// The field `name`, if it exists and is a number.
    pub(super) fn field(&self, name: &str) -> Option<Field> {
        let (_, field) = self.fields.iter().find(|(named, _)| named == name)?;
        [1, 2, 4, 8].contains(&field.size).then_some(*field)
    }
}

impl Field {
    /// Returns the field's value in `raw`. Zero if `raw` is too short.
    pub(super) fn of(self, raw: &[u8]) -> u64 {
        let bytes = raw.get(self.offset..).and_then(|raw| raw.get(..self.size));
        let mut word = [0; 8];
        let Some((bytes, word_bytes)) = bytes.zip(word.get_mut(..self.size)) else {
            return 0;
        };
        word_bytes.copy_from_slice(bytes);
        u64::from_le_bytes(word)
    }

    /// Number of bytes of raw data up to the end of this field.
    pub(super) fn end(self) -> usize {
        self.offset.saturating_add(self.size)
    }
}

/// Parses a line such as `unsigned int reason; offset:8; size:4; signed:0;`, in which each semicolon is followed by a
/// tab instead of a space.
fn field(line: &str) -> Option<(String, Field)> {
    let mut parts = line.split(';').map(str::trim);
    let name = parts.next()?.rsplit([' ', '*']).next()?;
    let mut number = |key: &str| parts.next()?.strip_prefix(key)?.parse().ok();
    let (offset, size) = (number("offset:")?, number("size:")?);
    Some((name.to_owned(), Field { offset, size }))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TEXT: &str = "name: some_exit
ID: 1473
format:
\tfield:unsigned short common_type;\toffset:0;\tsize:2;\tsigned:0;
\tfield:int common_pid;\toffset:4;\tsize:4;\tsigned:1;

\tfield:unsigned int exit_reason;\toffset:8;\tsize:4;\tsigned:0;
\tfield:unsigned long guest_rip;\toffset:16;\tsize:8;\tsigned:0;
\tfield:char name[16];\toffset:24;\tsize:16;\tsigned:0;

print fmt: \"ID: %u field:x; offset:1; size:1;\", REC->exit_reason
";

    #[test]
    fn fields_are_at_the_offsets_of_the_file() {
        let format = Format::parse(TEXT).expect("a format");
        assert_eq!(format.id, 1473);
        let raw: Vec<u8> = (0..24).collect();
        let of = |name| format.field(name).map(|field| field.of(&raw));
        assert_eq!(of("common_type"), Some(0x0100));
        assert_eq!(of("exit_reason"), Some(0x0b0a_0908));
        assert_eq!(of("guest_rip"), Some(0x1716_1514_1312_1110));
        assert_eq!(of("name[16]"), None, "no number");
        assert_eq!(of("x"), None);
        let rip = format.field("guest_rip").expect("there");
        assert_eq!((rip.end(), rip.of(&raw[..23])), (24, 0));
    }

    #[test]
    fn text_without_a_format_is_refused() {
        for text in ["", "ID: many\n", "ID: 70000\n", "format:\n"] {
            assert_eq!(Format::parse(text), None, "{text}");
        }
    }

    proptest! {
        #[test]
        fn any_text_has_fields_that_can_be_asked_for(
            text in "(ID: [0-9]{1,6}\n)?(\tfield:[a-z ;:0-9]{0,40}\n){0,4}",
            offset in any::<usize>(),
            raw in prop::collection::vec(any::<u8>(), 0..64),
        ) {
            if let Some(format) = Format::parse(&text) {
                for (name, field) in &format.fields {
                    prop_assert!(format.field(name).is_none() || field.of(&raw) < 1 << 63 || field.size == 8);
                }
            }
            let beyond = Field { offset, size: 8 };
            prop_assert!(beyond.end() >= offset);
            prop_assert!(offset < raw.len() || beyond.of(&raw) == 0);
        }
    }
}
