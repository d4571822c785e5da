//! The terminal while a live view has it: its own screen, keys as they are pressed, and all of
//! that undone on every way out.
#![expect(unsafe_code, reason = "the edge to the terminal")]

use std::io::{self, IsTerminal, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

const ENTER: &[u8] = b"\x1b[?1049h\x1b[?25l";
const LEAVE: &[u8] = b"\x1b[?25h\x1b[?1049l";
const HOME: &str = "\x1b[H";
const CLEAR_LINE: &str = "\x1b[K";
const CLEAR_BELOW: &str = "\x1b[J";

/// Where its size cannot be asked for.
const USUAL_SIZE: (usize, usize) = (24, 80);

/// Standard input and output, both terminals, in live mode. Dropped, they are as before.
#[derive(Debug)]
pub(crate) struct Terminal {
    before: libc::termios,
}

impl Terminal {
    /// Takes the terminal over; `None` if there is none at both ends.
    pub(crate) fn take() -> io::Result<Option<Self>> {
        if !io::stdin().is_terminal() || !io::stdout().is_terminal() {
            return Ok(None);
        }
        let terminal = Self {
            before: attributes()?,
        };
        let mut live = terminal.before;
        // Ctrl-C stays a signal, which is waited for; those that would stop or dump this
        // program where it stands do not.
        live.c_lflag &= !(libc::ICANON | libc::ECHO);
        for key in [libc::VSUSP, libc::VQUIT] {
            live.c_cc[key] = libc::_POSIX_VDISABLE;
        }
        set_attributes(&live)?;
        write_all(ENTER)?;
        Ok(Some(terminal))
    }

    /// Shows `text` from the top of the screen, as much of it as there is room for.
    pub(crate) fn show(&self, text: &str) -> io::Result<()> {
        write_all(frame(text, size()).as_bytes())
    }

    /// Rows of the screen.
    pub(crate) fn rows(&self) -> usize {
        size().0
    }

    /// Takes the keys that were pressed; true if one of them asks for the end. To be called
    /// when standard input is readable: it waits for a key.
    pub(crate) fn wants_end(&self) -> io::Result<bool> {
        let mut keys = [0; 64];
        let got = io::stdin().read(&mut keys)?;
        let keys = &keys[..got];
        // No key at all: the terminal is gone.
        Ok(keys.is_empty() || keys.iter().any(|key| matches!(key, b'q' | b'Q')))
    }

    /// Readable when keys were pressed.
    pub(crate) fn keys(&self) -> BorrowedFd<'static> {
        // SAFETY: descriptor 0 was open in `take`, and nothing in this program closes it.
        unsafe { BorrowedFd::borrow_raw(libc::STDIN_FILENO) }
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        // Where the terminal is gone there is nothing to restore.
        let _ = write_all(LEAVE);
        let _ = set_attributes(&self.before);
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

fn write_all(bytes: &[u8]) -> io::Result<()> {
    let mut output = io::stdout();
    output.write_all(bytes)?;
    output.flush()
}

fn checked(result: libc::c_int) -> io::Result<()> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}

fn attributes() -> io::Result<libc::termios> {
    let stdin = io::stdin();
    // SAFETY: a termios is plain numbers, for which zeros are valid.
    let mut attributes = unsafe { std::mem::zeroed() };
    // SAFETY: writes one termios, which `attributes` has room for.
    checked(unsafe { libc::tcgetattr(stdin.as_fd().as_raw_fd(), &raw mut attributes) })?;
    Ok(attributes)
}

fn set_attributes(attributes: &libc::termios) -> io::Result<()> {
    let stdin = io::stdin();
    let fd = stdin.as_fd().as_raw_fd();
    // SAFETY: reads one termios.
    checked(unsafe { libc::tcsetattr(fd, libc::TCSAFLUSH, attributes) })
}

fn size() -> (usize, usize) {
    let mut size = libc::winsize {
        ws_row: 0,
        ws_col: 0,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    let stdout = io::stdout();
    let fd = stdout.as_fd().as_raw_fd();
    // SAFETY: the request writes one winsize, which `size` has room for.
    let result = unsafe { libc::ioctl(fd, libc::TIOCGWINSZ, &raw mut size) };
    match (result, size.ws_row, size.ws_col) {
        (0, rows @ 1.., columns @ 1..) => (rows.into(), columns.into()),
        _ => USUAL_SIZE,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
