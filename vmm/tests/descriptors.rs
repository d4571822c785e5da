//! A guest that uses up its VMM's descriptors keeps nobody from what is the operator's.

#![allow(clippy::expect_used, reason = "a test that cannot go on fails")]

#[allow(dead_code, reason = "the other tests use the rest")]
mod common;

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;

use common::{Bench, SPIN, TRIPLE_FAULT, kill, messages, out, running, vmm};
use vmm::arch::layout::VIRTIO;
use vpmu::abi::{CONTROL_OPEN, KIND_SOFTWARE, OpenReply, OpenRequest};
use zerocopy::IntoBytes;

/// Where the kernel loads, and from there on where its queue lies.
const LOAD: u32 = 0x20_0000;
const DESCRIPTORS: u32 = LOAD + 0x1000;
const AVAILABLE: u32 = LOAD + 0x2000;
const USED: u32 = LOAD + 0x3000;
const REPLIES: u32 = LOAD + 0x4000;
const REQUESTS: u32 = LOAD + 0x6000;
/// More events than descriptors that the VMM may have.
const EVENTS: u16 = 100;
const DESCRIPTORS_ALLOWED: u32 = 120;

/// A kernel whose driver opens counters of the host's until there are no descriptors left, tells so, and
/// goes on with `then`.
fn greedy(then: &[u8]) -> Vec<u8> {
    let base = u32::try_from(VIRTIO).expect("below 4 GiB");
    let mut code = Vec::new();
    for (register, value) in [
        (0x70, 1),
        (0x70, 3),
        // VIRTIO_F_VERSION_1 alone.
        (0x24, 1),
        (0x20, 1),
        (0x70, 0xb),
        (0x30, 0),
        (0x38, 256),
        (0x80, DESCRIPTORS),
        (0x90, AVAILABLE),
        (0xa0, USED),
        (0x44, 1),
        (0x70, 0xf),
        (0x50, 0),
    ] {
        // mov ebx, register; mov dword [rbx], value
        code.push(0xbb);
        code.extend((base + register).to_le_bytes());
        code.extend([0xc7, 0x03]);
        code.extend(value.to_le_bytes());
    }
    // mov ebx, used.idx; cmp word [rbx], EVENTS; jne back
    code.push(0xbb);
    code.extend((USED + 2).to_le_bytes());
    code.extend([0x66, 0x81, 0x3b]);
    code.extend(EVENTS.to_le_bytes());
    code.extend([0x75, 0xf9]);
    code.extend(out(0x3f8, b'!'));
    code.extend(then);
    let mut image = code;
    let mut put = |address: u32, bytes: &[u8]| {
        let at = usize::try_from(address - LOAD).expect("small");
        image.resize(image.len().max(at), 0);
        image.extend(bytes);
    };
    let mut request = OpenRequest {
        kind: KIND_SOFTWARE.into(),
        ..OpenRequest::default()
    };
    request.header.op = CONTROL_OPEN.into();
    let (asked, answered) = (size_of::<OpenRequest>(), size_of::<OpenReply>());
    let (mut table, mut heads, mut requests) = (Vec::new(), vec![0, 0], Vec::new());
    heads.extend(EVENTS.to_le_bytes());
    for index in 0..EVENTS {
        let place =
            |base: u32, size: usize| base + u32::from(index) * u32::try_from(size).expect("small");
        let mut describe = |address: u32, len: usize, flags: u16, next: u16| {
            table.extend(u64::from(address).to_le_bytes());
            table.extend(u32::try_from(len).expect("small").to_le_bytes());
            table.extend(flags.to_le_bytes());
            table.extend(next.to_le_bytes());
        };
        describe(place(REQUESTS, asked), asked, 1, 2 * index + 1);
        describe(place(REPLIES, answered), answered, 2, 0);
        heads.extend((2 * index).to_le_bytes());
        requests.extend(request.as_bytes());
    }
    put(DESCRIPTORS, &table);
    put(AVAILABLE, &heads);
    put(REQUESTS, &requests);
    image
}

/// `vmm run` of `kernel`, which may have few descriptors.
fn poor(kernel: &Path) -> Command {
    let run = vmm(["run", "--memory", "16", "--kernel"]);
    let mut command = Command::new("sh");
    command
        .args([
            "-c",
            &format!("ulimit -n {DESCRIPTORS_ALLOWED}; exec \"$@\""),
        ])
        .arg("sh")
        .arg(run.get_program())
        .args(run.get_args())
        .arg(kernel)
        .env_remove("RUST_LOG");
    command
}

#[test]
fn its_flight_recorder_is_written_all_the_same() {
    let bench = Bench::new();
    let recording = bench.path("perf.data");
    let output = poor(&bench.kernel(&greedy(&TRIPLE_FAULT)))
        .args(["--persistent", "exits-io", "--recording"])
        .arg(&recording)
        .output()
        .expect("vmm starts");
    assert_eq!(output.status.code(), Some(4), "{}", messages(&output));
    assert_eq!(output.stdout, b"!");
    assert_eq!(messages(&output), "");
    assert!(recording.exists());
}

#[test]
fn the_control_socket_is_served_all_the_same() {
    let bench = Bench::new();
    let socket = bench.path("vm.sock");
    let mut command = poor(&bench.kernel(&greedy(&SPIN)));
    let mut machine = running(command.arg("--ctl").arg(&socket));
    let waiting: Vec<_> = (0..15)
        .map(|_| UnixStream::connect(&socket).expect("answers"))
        .collect();
    let dumped = bench.path("now.data");
    let dumped = dumped.to_str().expect("a plain path");
    for words in [&["list"] as &[&str], &["dump", dumped]] {
        let mut ask = vmm(["ctl", "--socket"]);
        let output = ask.arg(&socket).args(words).output().expect("vmm starts");
        assert_eq!(output.status.code(), Some(0), "{}", messages(&output));
    }
    drop(waiting);
    kill("-TERM", &machine);
    assert_eq!(machine.wait().expect("a child").code(), Some(6));
}
