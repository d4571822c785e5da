//! A machine that is saved and restored.

use std::fs::File;
use std::io::{BufReader, IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use rustix::cmsg_space;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

use super::{Bench, Running, ctl, messages, out, read_output, refused, run, terminate, vmm};

/// A guest that prints `!`. Then, for each byte of input, it prints the next letter twice: once from memory, and once
/// from a register. The first letter is `a`.
pub(crate) fn spelling() -> Vec<u8> {
    // mov bl, 'a'; mov ecx, 3 MiB; mov [rcx], bl
    let mut code = vec![0xb3, b'a', 0xb9, 0x00, 0x00, 0x30, 0x00, 0x88, 0x19];
    code.extend(out(0x3f8, b'!'));
    // again: mov dx, 0x3fd; in al, dx; test al, 1; jz again
    code.extend([0x66, 0xba, 0xfd, 0x03, 0xec, 0xa8, 0x01, 0x74, 0xf7]);
    // mov dx, 0x3f8; in al, dx; mov al, [rcx]; out dx, al; mov al, bl; out dx, al
    code.extend([0x66, 0xba, 0xf8, 0x03, 0xec, 0x8a, 0x01, 0xee, 0x88, 0xd8, 0xee]);
    // inc bl; inc byte [rcx]; jmp again
    code.extend([0xfe, 0xc3, 0xfe, 0x01, 0xeb, 0xe6]);
    code
}

/// A guest that prints `!`, and then the same letters as [`spelling`]. Before each letter, it writes to one page of
/// memory and places a mark. After the letter, it writes nothing.
pub(crate) fn marking() -> Vec<u8> {
    // mov bl, '`'; mov ecx, 3 MiB; mov [rcx], bl
    let mut code = vec![0xb3, b'`', 0xb9, 0x00, 0x00, 0x30, 0x00, 0x88, 0x19];
    // mov edi, the doorbell; mov dword [rdi], 1
    code.extend([0xbf, 0x00, 0x10, 0x00, 0xd0, 0xc7, 0x07, 1, 0, 0, 0]);
    code.extend(out(0x3f8, b'!'));
    // again: mov dx, 0x3fd; in al, dx; test al, 1; jz again; mov dx, 0x3f8; in al, dx
    code.extend([0x66, 0xba, 0xfd, 0x03, 0xec, 0xa8, 0x01, 0x74, 0xf7]);
    code.extend([0x66, 0xba, 0xf8, 0x03, 0xec]);
    // inc bl; inc byte [rcx]; mov dword [rdi], 7
    code.extend([0xfe, 0xc3, 0xfe, 0x01, 0xc7, 0x07, 7, 0, 0, 0]);
    // mov al, [rcx]; out dx, al; mov al, bl; out dx, al; jmp again
    code.extend([0x8a, 0x01, 0xee, 0x88, 0xd8, 0xee, 0xeb, 0xe0]);
    code
}

/// A machine whose guest prints a letter twice for each byte of input.
pub(crate) struct Machine {
    pub(crate) child: Running,
    pub(crate) socket: PathBuf,
}

impl Machine {
    pub(crate) fn start(mut command: Command, socket: PathBuf) -> Self {
        // The default path of a recording is relative, so run in the test's own directory.
        let directory = socket.parent().expect("a directory").to_owned();
        let command = command
            .current_dir(directory)
            .arg("--ctl")
            .arg(&socket)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let child = Running::start(command);
        Self { child, socket }
    }

    pub(crate) fn boot(bench: &Bench, args: &[&str]) -> Self {
        Self::boot_of(bench, &spelling(), args)
    }

    pub(crate) fn boot_of(bench: &Bench, code: &[u8], args: &[&str]) -> Self {
        let mut command = run(&bench.kernel(code));
        command.args(args);
        let mut machine = Self::start(command, bench.path("vm.sock"));
        assert_eq!(machine.said(1), "!");
        machine
    }

    pub(crate) fn restore(directory: &Path, socket: PathBuf, args: &[&str]) -> Self {
        let mut command = vmm(["run", "--restore"]);
        command.arg(directory).args(args);
        Self::start(command, socket)
    }

    pub(crate) fn said(&mut self, bytes: usize) -> String {
        read_output(&mut self.child, bytes)
    }

    /// The next letter.
    pub(crate) fn next(&mut self) -> String {
        let input = self.child.stdin.as_mut().expect("piped");
        input.write_all(b"x").expect("the machine reads");
        self.said(2)
    }

    pub(crate) fn snapshot(&self, directory: &Path, args: &[&str]) -> Output {
        let directory = directory.to_str().expect("text");
        ctl(&self.socket, &[&["snapshot", directory], args].concat())
    }

    /// Takes a snapshot whose state cannot be copied. The limit on file sizes applies to `vmm ctl`, which makes the
    /// copy. It does not apply to the machine.
    pub(crate) fn snapshot_without_room(&self, directory: &Path, args: &[&str]) -> Output {
        let mut command = Command::new("sh");
        let script = "trap '' XFSZ; ulimit -f 1; exec \"$@\"";
        command.args(["-c", script, "sh", env!("CARGO_BIN_EXE_vmm"), "ctl"]);
        command.arg("--socket").arg(&self.socket);
        command.arg("snapshot").arg(directory).args(args);
        command.output().expect("sh starts")
    }

    /// Waits until the machine accepts connections on its control socket.
    pub(crate) fn listens(&mut self) {
        while UnixStream::connect(&self.socket).is_err() {
            assert_eq!(self.child.try_wait().expect("a child"), None);
            std::thread::yield_now();
        }
    }

    pub(crate) fn saved_diff(&self, directory: &Path, base: &Path) {
        let output = self.diff(directory, base);
        assert_eq!(output.status.code(), Some(0), "{}", messages(&output));
    }

    pub(crate) fn diff(&self, directory: &Path, base: &Path) -> Output {
        self.snapshot(directory, &["--diff", base.to_str().expect("text")])
    }

    pub(crate) fn saved(&self, directory: &Path) {
        let output = self.snapshot(directory, &[]);
        assert_eq!(output.status.code(), Some(0), "{}", messages(&output));
    }

    /// Requests a snapshot with `then_exit` in `memory` and `state`. Returns the client's connection.
    pub(crate) fn asked(&self, memory: &File, state: &File) -> BufReader<UnixStream> {
        let stream = UnixStream::connect(&self.socket).expect("the machine listens");
        let files = [memory.as_fd(), state.as_fd()];
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(2))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        ancillary.push(SendAncillaryMessage::ScmRights(&files));
        let line = b"{\"do\":\"snapshot\",\"id\":\"00000000000000000000000000000001\",\"then_exit\":true}\n";
        let slices = [IoSlice::new(line)];
        let sent = rustix::net::sendmsg(&stream, &slices, &mut ancillary, SendFlags::empty());
        assert_eq!(sent.expect("sent"), line.len());
        BufReader::new(stream)
    }

    /// Waits until the machine ends. Returns the exit status, the rest of the output, and the messages.
    pub(crate) fn rest(mut self) -> (i32, String, String) {
        let mut text = [String::new(), String::new()];
        let output = self.child.stdout.as_mut().expect("piped");
        output.read_to_string(&mut text[0]).expect("text");
        let log = self.child.stderr.as_mut().expect("piped");
        log.read_to_string(&mut text[1]).expect("text");
        let status = self.child.wait().expect("a child").code();
        let [text, log] = text;
        (status.expect("no signal"), text, log)
    }

    pub(crate) fn end(self) {
        terminate(self.child);
    }
}

/// Runs the machine in `directory` with `input` on its console, until it ends.
pub(crate) fn restored(directory: &Path, args: &[&str], input: &[u8]) -> Output {
    let mut command = vmm(["run", "--restore"]);
    let command = command.arg(directory).args(args).stdin(Stdio::piped());
    let command = command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = Running::start(command);
    // A VMM that refuses the snapshot does not read its input.
    let _ = child.stdin.take().expect("piped").write_all(input);
    child.wait_with_output()
}

/// Checks that `vmm run --restore` fails with the status `code` and a message that contains `words`, before the guest
/// runs.
#[track_caller]
pub(crate) fn restore_refused(directory: &Path, args: &[&str], code: i32, words: &[&str]) {
    // Ctrl-A x ends a machine that runs nevertheless.
    refused(&restored(directory, args, b"\x01x"), code, words);
}
