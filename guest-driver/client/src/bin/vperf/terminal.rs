//! The terminal while a live view has it: its own screen, keys as they are pressed, and all of
//! that undone on every way out.
#![expect(unsafe_code, reason = "the edge to the terminal")]

use std::fs::File;
use std::io::{self, IsTerminal, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

const ENTER: &[u8] = b"\x1b[?1049h\x1b[?25l";
const LEAVE: &[u8] = b"\x1b[?25h\x1b[?1049l";
const HOME: &str = "\x1b[H";
const CLEAR_LINE: &str = "\x1b[K";
const CLEAR_BELOW: &str = "\x1b[J";

/// Where its size cannot be asked for.
const USUAL_SIZE: (usize, usize) = (24, 80);

/// A terminal in live mode. Dropped, it is as before.
#[derive(Debug)]
pub(crate) struct Terminal {
    input: File,
    output: File,
    before: libc::termios,
}

impl Terminal {
    /// Takes over the terminal of standard input and output; `None` if they are not both one.
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
        let before = attributes(&input)?;
        let mut terminal = Self {
            input,
            output,
            before,
        };
        let mut live = before;
        // Ctrl-C stays a signal, which is waited for; those that would stop or dump this
        // program where it stands do not.
        live.c_lflag &= !(libc::ICANON | libc::ECHO);
        for key in [libc::VSUSP, libc::VQUIT] {
            live.c_cc[key] = libc::_POSIX_VDISABLE;
        }
        set_attributes(&terminal.input, &live)?;
        terminal.output.write_all(ENTER)?;
        Ok(terminal)
    }

    /// Shows `text` from the top of the screen, as much of it as there is room for.
    pub(crate) fn show(&mut self, text: &str) -> io::Result<()> {
        let frame = frame(text, size(&self.output));
        self.output.write_all(frame.as_bytes())
    }

    /// Rows of the screen.
    pub(crate) fn rows(&self) -> usize {
        size(&self.output).0
    }

    /// Takes the keys that were pressed; true if one of them asks for the end. To be called
    /// when a key was pressed: it waits for one.
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
        // Where the terminal is gone there is nothing to restore.
        let _ = self.output.write_all(LEAVE);
        let _ = set_attributes(&self.input, &self.before);
    }
}

/// The bytes that put `text` on a screen of (rows, columns): no line wraps, nothing scrolls.
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

fn checked(result: libc::c_int) -> io::Result<()> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}

fn attributes(terminal: &File) -> io::Result<libc::termios> {
    // SAFETY: a termios is plain numbers, for which zeros are valid.
    let mut attributes = unsafe { std::mem::zeroed() };
    // SAFETY: writes one termios, which `attributes` has room for.
    checked(unsafe { libc::tcgetattr(terminal.as_raw_fd(), &raw mut attributes) })?;
    Ok(attributes)
}

fn set_attributes(terminal: &File, attributes: &libc::termios) -> io::Result<()> {
    // SAFETY: reads one termios.
    checked(unsafe { libc::tcsetattr(terminal.as_raw_fd(), libc::TCSADRAIN, attributes) })
}

fn size(terminal: &File) -> (usize, usize) {
    let mut size = libc::winsize {
        ws_row: 0,
        ws_col: 0,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    // SAFETY: the request writes one winsize, which `size` has room for.
    let result = unsafe { libc::ioctl(terminal.as_raw_fd(), libc::TIOCGWINSZ, &raw mut size) };
    match (result, size.ws_row, size.ws_col) {
        (0, rows @ 1.., columns @ 1..) => (rows.into(), columns.into()),
        _ => USUAL_SIZE,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::FromRawFd;

    #[test]
    fn frames_fit_the_screen_and_control_nothing() {
        let text = "12345\na\x1b[31mb\nthird\n";
        assert_eq!(
            frame(text, (2, 4)),
            "\x1b[H1234\x1b[K\r\na[31\x1b[K\x1b[J",
            "cut to two lines of four characters, without the escape"
        );
        assert_eq!(frame("", (2, 4)), "\x1b[H\x1b[J");
    }

    /// A pseudo terminal: its master, and it.
    fn pty() -> (File, File) {
        let (mut master, mut slave) = (0, 0);
        // SAFETY: writes two descriptors; the null pointers ask for nothing more.
        let result = unsafe {
            libc::openpty(
                &raw mut master,
                &raw mut slave,
                std::ptr::null_mut(),
                std::ptr::null(),
                std::ptr::null(),
            )
        };
        checked(result).unwrap();
        // SAFETY: both descriptors are new and nobody else's.
        [master, slave]
            .map(|fd| unsafe { File::from_raw_fd(fd) })
            .into()
    }

    fn flags(terminal: &File) -> (libc::tcflag_t, libc::cc_t) {
        let attributes = attributes(terminal).unwrap();
        (attributes.c_lflag, attributes.c_cc[libc::VSUSP])
    }

    #[test]
    fn the_terminal_is_given_back_as_it_was() {
        let (mut master, slave) = pty();
        let before = flags(&slave);
        assert_ne!(before.0 & libc::ICANON, 0);
        let take = || Terminal::take_over(slave.try_clone().unwrap(), slave.try_clone().unwrap());
        let mut terminal = take().unwrap();
        let live = flags(&slave);
        assert_eq!(live.0 & (libc::ICANON | libc::ECHO), 0);
        assert_eq!(live.1, libc::_POSIX_VDISABLE);
        assert_ne!(live.0 & libc::ISIG, 0, "Ctrl-C stays a signal");
        terminal.show("hello\n").unwrap();
        drop(terminal);
        assert_eq!(flags(&slave), before);
        let expected = [ENTER, b"\x1b[Hhello\x1b[K\x1b[J", LEAVE].concat();
        // What was written at once need not come so.
        let mut shown = vec![0; expected.len()];
        master.read_exact(&mut shown).unwrap();
        assert_eq!(shown, expected);
    }

    #[test]
    fn q_ends_and_other_keys_do_not() {
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
