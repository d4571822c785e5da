//! Formats an error and its causes as one line. All programs of the project print errors in this format.

use std::error::Error;

/// Returns the messages of `error` and its causes on one line, joined by ": ".
#[must_use]
pub fn chain(error: &dyn Error) -> String {
    let mut line = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let text = error.to_string();
        // If an error only wraps its source, both have the same message, and `line` already ends with `text`.
        if !line.ends_with(&text) {
            line.push_str(": ");
            line.push_str(&text);
        }
        cause = error.source();
    }
    line.replace('\n', " ")
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[derive(Debug, thiserror::Error)]
    enum Outer {
        #[error("reading the event")]
        Read(#[source] io::Error),
        #[error("{0}")]
        Same(#[source] Box<Outer>),
    }

    fn read(cause: &str) -> Outer {
        Outer::Read(io::Error::other(cause.to_owned()))
    }

    #[test]
    fn chain_names_each_cause_once() {
        assert_eq!(chain(&read("gone")), "reading the event: gone");
        let same = Outer::Same(Box::new(read("gone")));
        assert_eq!(chain(&same), "reading the event: gone");
    }

    #[test]
    fn causes_of_several_lines_make_one_line() {
        assert_eq!(chain(&read("a\nb")), "reading the event: a b");
        assert_eq!(chain(&io::Error::other("alone")), "alone");
    }
}
