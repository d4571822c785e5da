//! The terminal is raw while a guest uses it, and restored afterwards.

#![allow(clippy::expect_used, reason = "tests fail by panicking")]
#![allow(unsafe_code)]

#[allow(dead_code, reason = "the other tests use the rest")]
mod common;

use std::fs::File;
use std::io::{Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, FromRawFd};
use std::process::{Child, Stdio};
use std::ptr;

use common::{Bench, Running, SPIN, out, run};

/// Both ends of a pseudo-terminal: the user's end, and the program's end.
fn pseudo_terminal() -> (File, File) {
    let (mut person, mut program) = (-1, -1);
    // SAFETY: the C library fills in both descriptors, and the other arguments may be null.
    let result = unsafe { libc::openpty(&raw mut person, &raw mut program, ptr::null_mut(), ptr::null(), ptr::null()) };
    assert_eq!(result, 0, "a pseudo-terminal");
    // SAFETY: the kernel has just made this descriptor, and nothing else owns it.
    let person = unsafe { File::from_raw_fd(person) };
    // SAFETY: as above.
    (person, unsafe { File::from_raw_fd(program) })
}

/// The mode flags of a terminal that raw mode changes.
fn modes(terminal: &File) -> (u32, u32, u32) {
    let mut modes = MaybeUninit::<libc::termios>::uninit();
    // SAFETY: the kernel fills the structure, or returns an error.
    let result = unsafe { libc::tcgetattr(terminal.as_raw_fd(), modes.as_mut_ptr()) };
    assert_eq!(result, 0, "a terminal");
    // SAFETY: filled above.
    let modes = unsafe { modes.assume_init() };
    (modes.c_iflag, modes.c_oflag, modes.c_lflag)
}

/// Starts a guest on a terminal, and ends it with `end`.
fn ends(status: i32, end: impl FnOnce(&mut File, &Child)) {
    let bench = Bench::new();
    let kernel = bench.kernel(&[out(0x3f8, b'!'), SPIN.to_vec()].concat());
    let (mut person, program) = pseudo_terminal();
    let before = modes(&program);
    let mut child = Running::start(
        run(&kernel)
            .stdin(Stdio::from(program.try_clone().expect("a clone")))
            .stdout(Stdio::from(program.try_clone().expect("a clone"))),
    );
    let mut byte = [0];
    person.read_exact(&mut byte).expect("the guest runs");
    assert_eq!(&byte, b"!");
    let (_, _, local) = modes(&program);
    assert_eq!(local & (libc::ICANON | libc::ECHO | libc::ISIG), 0, "raw");
    end(&mut person, &child);
    assert_eq!(child.wait().expect("a child").code(), Some(status));
    assert_eq!(modes(&program), before);
}

#[test]
fn ctrl_a_x_gives_the_terminal_back() {
    ends(6, |person, _| person.write_all(b"\x01x").expect("the keys"));
}

#[test]
fn signal_restores_the_terminal() {
    ends(6, |_, child| {
        let status = std::process::Command::new("kill").args(["-TERM", &child.id().to_string()]).status();
        assert!(status.expect("kill starts").success());
    });
}
