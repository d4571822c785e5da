//! The terminal in live mode: it shows the alternate screen, and delivers each key immediately instead of at the end of
//! a line.

use std::fs::File;
use std::io::{self, IsTerminal, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};

use rustix::termios::{LocalModes, OptionalActions, SpecialCodeIndex, Termios, tcgetattr, tcgetwinsize, tcsetattr};

const ENTER: &[u8] = b"\x1b[?1049h\x1b[?25l";
const LEAVE: &[u8] = b"\x1b[?25h\x1b[?1049l";
const HOME: &str = "\x1b[H";
const CLEAR_LINE: &str = "\x1b[K";
const CLEAR_BELOW: &str = "\x1b[J";

/// Rows and columns to assume if the terminal does not report its size.
const USUAL_SIZE: (usize, usize) = (24, 80);

/// Disables the signal of a special key.
const NO_KEY: u8 = 0;

/// A terminal in live mode. Dropping it restores the previous mode.
#[derive(Debug)]
pub(crate) struct Terminal {
    input: File,
    output: File,
    before: Termios,
}

impl Terminal {
    /// Takes over the terminal of standard input and output; `None` unless both are terminals.
    pub(crate) fn take() -> io::Result<Option<Self>> {
        let (input, output) = (io::stdin(), io::stdout());
        if !input.is_terminal() || !output.is_terminal() {
            return Ok(None);
        }
        let input = input.as_fd().try_clone_to_owned()?;
        let output = output.as_fd().try_clone_to_owned()?;
        Self::take_over(input.into(), output.into()).map(Some)
    }

    fn take_over(input: File, output: File) -> io::Result<Self> {
        let before = tcgetattr(&input)?;
        let mut terminal = Self { input, output, before: before.clone() };
        let mut live = before;
        // Ctrl-C stays enabled: the view handles its signal. The keys that stop the program or make
        // it dump core are disabled: they would leave the terminal in live mode.
        live.local_modes &= !(LocalModes::ICANON | LocalModes::ECHO);
        for key in [SpecialCodeIndex::VSUSP, SpecialCodeIndex::VQUIT] {
            live.special_codes[key] = NO_KEY;
        }
        tcsetattr(&terminal.input, OptionalActions::Drain, &live)?;
        terminal.output.write_all(ENTER)?;
        Ok(terminal)
    }

    /// Shows `text` from the top of the screen; cuts lines and columns that do not fit.
    pub(crate) fn show(&mut self, text: &str) -> io::Result<()> {
        let frame = frame(text, size(&self.output));
        self.output.write_all(frame.as_bytes())
    }

    /// Rows of the screen.
    pub(crate) fn rows(&self) -> usize {
        size(&self.output).0
    }

    /// Reads the pressed keys; waits for one if none was pressed. Returns true if the view should
    /// end: `q` was pressed, or the terminal is gone.
    pub(crate) fn wants_end(&mut self) -> io::Result<bool> {
        let mut keys = [0; 64];
        let got = self.input.read(&mut keys)?;
        let keys = &keys[..got];
        // No key at all: the terminal is gone.
        Ok(keys.is_empty() || keys.iter().any(|key| matches!(key, b'q' | b'Q')))
    }

    /// Readable when keys were pressed.
    pub(crate) fn keys(&self) -> BorrowedFd<'_> {
        self.input.as_fd()
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        // A terminal that is gone needs no restoring.
        let _ = self.output.write_all(LEAVE);
        let _ = tcsetattr(&self.input, OptionalActions::Drain, &self.before);
    }
}

/// The bytes that display `text` on a screen of (rows, columns) such that no line wraps and nothing
/// scrolls.
fn frame(text: &str, (rows, columns): (usize, usize)) -> String {
    let lines: Vec<String> = text
        .lines()
        .take(rows)
        .map(|line| {
            let visible = line.chars().filter(|c| !c.is_control());
            visible.take(columns).collect::<String>() + CLEAR_LINE
        })
        .collect();
    format!("{HOME}{}{CLEAR_BELOW}", lines.join("\r\n"))
}

fn size(terminal: &File) -> (usize, usize) {
    match tcgetwinsize(terminal).map(|size| (size.ws_row, size.ws_col)) {
        Ok((rows @ 1.., columns @ 1..)) => (rows.into(), columns.into()),
        _ => USUAL_SIZE,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::pty::{OpenptFlags, ioctl_tiocgptpeer, openpt, unlockpt};

    #[test]
    fn frame_fits_screen_without_control_characters() {
        let text = "12345\na\x1b[31mb\nthird\n";
        assert_eq!(
            frame(text, (2, 4)),
            "\x1b[H1234\x1b[K\r\na[31\x1b[K\x1b[J",
            "cut to two lines of four characters, the escape character removed"
        );
        assert_eq!(frame("", (2, 4)), "\x1b[H\x1b[J");
    }

    /// Both ends of a pseudo terminal, the master first.
    fn pty() -> (File, File) {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        unlockpt(&master).unwrap();
        let slave = ioctl_tiocgptpeer(&master, OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        (master.into(), slave.into())
    }

    fn flags(terminal: &File) -> (LocalModes, u8) {
        let attributes = tcgetattr(terminal).unwrap();
        (attributes.local_modes, attributes.special_codes[SpecialCodeIndex::VSUSP])
    }

    #[test]
    fn dropped_terminal_restores_its_mode() {
        let (mut master, slave) = pty();
        let before = flags(&slave);
        assert!(before.0.contains(LocalModes::ICANON));
        let take = || Terminal::take_over(slave.try_clone().unwrap(), slave.try_clone().unwrap());
        let mut terminal = take().unwrap();
        let live = flags(&slave);
        assert!(!live.0.intersects(LocalModes::ICANON | LocalModes::ECHO));
        assert_eq!(live.1, NO_KEY);
        assert!(live.0.contains(LocalModes::ISIG), "Ctrl-C sends a signal");
        terminal.show("hello\n").unwrap();
        drop(terminal);
        assert_eq!(flags(&slave), before);
        let expected = [ENTER, b"\x1b[Hhello\x1b[K\x1b[J", LEAVE].concat();
        // The output may arrive in several reads.
        let mut shown = vec![0; expected.len()];
        master.read_exact(&mut shown).unwrap();
        assert_eq!(shown, expected);
    }

    #[test]
    fn only_q_ends_the_view() {
        let (mut master, slave) = pty();
        let mut terminal = Terminal::take_over(slave.try_clone().unwrap(), slave).unwrap();
        let mut ends = |keys: &[u8]| {
            master.write_all(keys).unwrap();
            terminal.wants_end().unwrap()
        };
        assert!(!ends(b"x"));
        assert!(ends(b"xq"));
        assert!(ends(b"Q"));
    }
}
