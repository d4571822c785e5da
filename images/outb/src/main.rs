//! Writes one byte to an I/O port. Stock kernels have no /dev/port, and a shell cannot request I/O permissions.
//! So the /init of a guest or of the lab needs this program to write to the machine's debug ports.
#![allow(unsafe_code)]

use std::arch::asm;
use std::process::ExitCode;

const USAGE: &str = "usage: outb PORT BYTE (decimal or 0x hexadecimal)";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match run(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(complaint) => {
            eprintln!("outb: {complaint}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &[String]) -> Result<(), String> {
    let [port, byte] = arguments else {
        return Err(USAGE.to_owned());
    };
    let port = number(port).and_then(|n| u16::try_from(n).ok()).ok_or(USAGE)?;
    let byte = number(byte).and_then(|n| u8::try_from(n).ok()).ok_or(USAGE)?;
    // SAFETY: the call grants this process a port and touches no memory.
    if unsafe { libc::ioperm(port.into(), 1, 1) } != 0 {
        return Err(format!("no access to port {port:#x}: {}", std::io::Error::last_os_error()));
    }
    // SAFETY: this is one `out` to a port that was granted above; it changes neither memory nor flags.
    unsafe {
        asm!("out dx, al", in("dx") port, in("al") byte, options(nomem, nostack, preserves_flags));
    }
    Ok(())
}

fn number(text: &str) -> Option<u32> {
    match text.strip_prefix("0x") {
        Some(digits) => u32::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bad_arguments_are_refused_before_anything_happens() {
        for arguments in [&[][..], &["1"], &["0x10000", "0"], &["1", "256"], &["x", "1"]] {
            let arguments: Vec<String> = arguments.iter().map(|a| (*a).to_owned()).collect();
            assert_eq!(run(&arguments).unwrap_err(), USAGE);
        }
        assert_eq!((number("0xf4"), number("7")), (Some(0xf4), Some(7)));
    }
}
