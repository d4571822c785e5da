//! Traces guests of a few instructions on this machine's `/dev/kvm`. A trace must have every exit of the guest's
//! programs exactly once, in order, with its instruction and access.
#![expect(clippy::expect_used, reason = "the guest sends a known number of bytes")]

use tests::micro::device::{Device, NOTIFY, REGISTERS, REPLY, send};
use tests::micro::{Code, RunResult, address_of, kernel, run};

/// A port without a device.
const PORT: u16 = 0x5f0;
/// A constant register and a writable register of the device.
const MAGIC: u32 = REGISTERS;
const REGION_SELECT: u32 = REGISTERS + 0xac;

/// Address of the rings and areas. Each vCPU has a ring, followed by its area.
const RINGS: u32 = 0xa0_0000;
const RING_PAGES: u32 = 2;
const PAGE: u32 = 0x1000;
const AUX_HEAD: u32 = 1056;
const AUX_TAIL: u32 = 1064;
/// Flags. The boot vCPU sets `OPEN` when the events are open. The other vCPU sets `OFF` when its trace is disabled.
const OPEN: u32 = 0x84_0000;
const OFF: u32 = 0x84_0004;

const KIND_EXIT_TRACE: u64 = 0x105;
const EXIT_USER: u64 = 1;
const EXIT_IO: u64 = 2;
const EXIT_MMIO: u64 = 3;
const COMMAND_ENABLE: u64 = 2;
const COMMAND_DISABLE: u64 = 3;

const WRITE: u64 = 1 << 8;
const CUT: u8 = 1 << 2;
const PACKET: usize = 64;

/// An exit that the program makes.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Made {
    reason: u64,
    qualification: u64,
    detail: u64,
    /// Start and end of the exit's instruction, in bytes from the start of the [`Part`].
    at: [usize; 2],
}

/// A part of a program, and the exits that it makes.
#[derive(Debug, Clone, Default)]
struct Part {
    code: Code,
    made: Vec<Made>,
}

impl Part {
    fn makes(mut self, before: &Code, instruction: &[u8], made: [u64; 3]) -> Self {
        let code = self.code.then(before);
        let from = code.bytes().len();
        self.code = code.raw(instruction);
        let [reason, qualification, detail] = made;
        self.made.push(Made { reason, qualification, detail, at: [from, from + instruction.len()] });
        self
    }

    fn port(self, port: u16, instruction: &[u8], detail: u64) -> Self {
        // mov dx, port
        let before = Code::new().raw(&[0x66, 0xba]).raw(&port.to_le_bytes());
        let made = [EXIT_IO, port.into(), detail | 1 << 32];
        self.makes(&before, instruction, made)
    }

    fn memory(self, address: u32, instruction: &[u8], detail: u64) -> Self {
        // mov ebx, address
        let before = Code::new().raw(&[0xbb]).raw(&address.to_le_bytes());
        self.makes(&before, instruction, [EXIT_MMIO, address.into(), detail])
    }

    /// Appends reads and writes of every size to ports, and reads and writes of memory.
    fn every_kind(self) -> Self {
        self.port(PORT, &[0xee], WRITE | 1)
            .port(PORT + 1, &[0x66, 0xef], WRITE | 2)
            .port(PORT + 2, &[0xef], WRITE | 4)
            .port(PORT + 3, &[0xec], 1)
            .port(PORT + 4, &[0x66, 0xed], 2)
            .port(PORT + 5, &[0xed], 4)
            // mov eax, [ebx]; mov al, [ebx]; mov dword [ebx], 0
            .memory(MAGIC, &[0x8b, 0x03], 4)
            .memory(MAGIC + 1, &[0x8a, 0x03], 1)
            .memory(REGION_SELECT, &[0xc7, 0x03, 0, 0, 0, 0], WRITE | 4)
    }

    /// Repeats the part.
    fn times(self, times: u32) -> Self {
        let code = Code::new().repeat(times, &self.code);
        // mov ecx, times
        const LOOP: usize = 5;
        let once = self.made.iter().map(|made| Made { at: made.at.map(|at| at + LOOP), ..made.clone() });
        let once: Vec<Made> = once.collect();
        let made = once.iter().cycle().take(once.len() * times as usize);
        Self { code, made: made.cloned().collect() }
    }
}

/// A trace of one vCPU. Its ring is directly before its area.
#[derive(Debug, Clone, Copy)]
struct Trace {
    vcpu: u32,
    event: u64,
    area: u32,
    pages: u32,
}

impl Trace {
    fn new(vcpu: u32, pages: u32) -> Self {
        Self { vcpu, event: u64::from(vcpu) + 1, area: RINGS + vcpu * 0x10_0000 + RING_PAGES * PAGE, pages }
    }

    fn metadata(&self) -> u32 {
        self.area - RING_PAGES * PAGE
    }

    /// Opens the trace in disabled state, and maps its ring and area.
    fn open(&self, device: &mut Device) -> Code {
        const OPEN: u64 = 1;
        const MAP: u64 = 3;
        const MAP_AUX: u64 = 9;
        let kind = KIND_EXIT_TRACE | u64::from(self.vcpu) << 32;
        let mut open = [0; 14];
        open[0] = OPEN;
        open[2] = kind;
        open[3] = EXIT_USER;
        let map = |op: u64, from: u32, pages: u32| {
            let mut words = vec![op, self.event, u64::from(pages) | 1 << 32];
            words.extend((0..pages).map(|page| u64::from(from + page * PAGE)));
            words
        };
        let ring = map(MAP, self.metadata(), RING_PAGES);
        let area = map(MAP_AUX, self.area, self.pages);
        device.request(&open).then(&device.request(&ring)).then(&device.request(&area))
    }

    fn turn(&self, device: &mut Device, on: bool) -> (Code, u32) {
        let op = if on { COMMAND_ENABLE } else { COMMAND_DISABLE };
        device.command(self.vcpu, op, self.event)
    }

    /// Sends the reply at `answer`, the head and the area.
    fn send(&self, answer: u32) -> Code {
        send(answer, REPLY).then(&send(self.metadata() + AUX_HEAD, 8)).then(&send(self.area, self.pages * PAGE))
    }
}

/// The data sent about a vCPU's trace.
#[derive(Debug)]
struct Sent {
    count: u64,
    lost: u64,
    head: u64,
    area: Vec<u8>,
}

fn word(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

/// Removes the output of [`Trace::send`] from the front of `console`, and parses it. The area has `pages` pages.
fn sent(console: &mut &[u8], pages: u32) -> Sent {
    let (fixed, rest) = console.split_at(REPLY as usize + 8);
    let (area, rest) = rest.split_at((pages * PAGE) as usize);
    *console = rest;
    Sent { count: word(fixed, 8), lost: word(fixed, 32), head: word(fixed, REPLY as usize), area: area.to_vec() }
}

/// A packet of an exit.
#[derive(Debug, Clone, Copy)]
struct Exit {
    flags: u8,
    reason: u64,
    vcpu: u64,
    time: u64,
    ip: u64,
    outside: u64,
    qualification: u64,
    detail: u64,
    sequence: u64,
}

impl Sent {
    /// Returns the exit packets between the positions `from` and `to`. The area must still hold all bytes between the
    /// two positions.
    fn exits(&self, from: u64, to: u64) -> Vec<Exit> {
        const EXIT: u8 = 1;
        let size = self.area.len() as u64;
        assert!(to - from <= size && to.is_multiple_of(64));
        let packets = (from..to).step_by(PACKET).map(|position| {
            let at = usize::try_from(position % size).expect("in the area");
            &self.area[at..at + PACKET]
        });
        let exits = packets.filter(|packet| packet[0] == EXIT);
        let exits = exits.map(|packet| Exit {
            flags: packet[1],
            reason: word(packet, 0) >> 16 & 0xffff,
            vcpu: word(packet, 0) >> 32,
            time: word(packet, 8),
            ip: word(packet, 16),
            outside: word(packet, 24),
            qualification: word(packet, 32),
            detail: word(packet, 40),
            sequence: word(packet, 56),
        });
        exits.collect()
    }
}

/// Checks that `exits` has each exit in `made` once and in order, followed by the exit that ended the trace.
fn check(exits: &[Exit], made: &[Made], base: u64, vcpu: u64) {
    // Ignores exits that the host causes, because they can occur at any time.
    let own: Vec<&Exit> = exits.iter().filter(|exit| [EXIT_IO, EXIT_MMIO].contains(&exit.reason)).collect();
    assert_eq!(own.len(), made.len() + 1, "{exits:#x?}");
    for (exit, made) in own.iter().zip(made) {
        assert_eq!(exit.reason, made.reason, "{exit:#x?}");
        assert_eq!(exit.qualification, made.qualification, "{exit:#x?}");
        assert_eq!(exit.detail, made.detail, "{exit:#x?}");
        // KVM reports the address of the exit's instruction, or of the next instruction.
        let at = made.at.map(|at| base + at as u64);
        assert!(at.contains(&exit.ip), "{exit:#x?} {made:x?} at {base:#x}");
        // The exit came from ring 0, has a known address, and is complete.
        assert_eq!(exit.flags, 1 << 1);
        assert!(exit.outside > 0);
    }
    let last = own[made.len()];
    assert_eq!(last.flags & CUT, CUT);
    assert_eq!(last.qualification, u64::from(NOTIFY));
    assert!((0..).zip(exits).all(|(number, exit)| exit.sequence == number));
    assert!(exits.iter().all(|exit| exit.vcpu == vcpu));
    let in_turn = |pair: &[Exit]| pair[0].time + pair[0].outside <= pair[1].time;
    assert!(exits.windows(2).all(in_turn));
}

fn powered_off(ran: &RunResult) {
    assert_eq!(ran.status, 0, "{} {:#}", ran.errors, ran.report);
}

/// Returns a program that runs `part` while the trace is enabled, and the address of the reply to the command that
/// disables the trace.
fn traced(device: &mut Device, trace: &Trace, part: &Code) -> (Code, u32) {
    let (on, _) = trace.turn(device, true);
    let (off, answer) = trace.turn(device, false);
    (on.then(part).then(&off), answer)
}

#[test]
fn every_exit_is_in_the_trace_once_and_in_order() {
    let (mut device, boot) = Device::bring_up(1);
    let trace = Trace::new(0, 16);
    let part = Part::default().every_kind().times(100);
    let open = trace.open(&mut device);
    let (program, answer) = traced(&mut device, &trace, &part.code);
    let whole = boot.then(&open).then(&program).then(&trace.send(answer));
    let kernel = kernel(&[whole]);
    let ran = run(&kernel, 1, &[]);
    powered_off(&ran);
    let sent = sent(&mut &ran.console[..], 16);
    assert_eq!((sent.count, sent.lost), (sent.head, 0));
    let base = address_of(&kernel, &part.code);
    check(&sent.exits(0, sent.head), &part.made, base, 0);
}

#[test]
fn two_vcpus_are_traced_at_once() {
    let (mut device, boot) = Device::bring_up(2);
    let traces = [Trace::new(0, 16), Trace::new(1, 32)];
    let parts = [
        Part::default().every_kind().times(70),
        Part::default().port(PORT + 6, &[0xee], WRITE | 1).memory(MAGIC, &[0x8b, 0x03], 4).times(600),
    ];
    let open = traces.map(|trace| trace.open(&mut device));
    let programs = [0, 1].map(|vcpu| traced(&mut device, &traces[vcpu], &parts[vcpu].code));
    let [(first, answer), (second, other_answer)] = programs;
    let boot = boot
        .then(&open[0])
        .then(&open[1])
        .store(OPEN, 1)
        .then(&first)
        .wait_for(OFF, 1)
        .then(&traces[0].send(answer))
        .then(&traces[1].send(other_answer));
    let other = Code::new().wait_for(OPEN, 1).then(&second).store(OFF, 1);
    let kernel = kernel(&[boot, other]);
    let ran = run(&kernel, 2, &[]);
    powered_off(&ran);
    let console = &mut &ran.console[..];
    for (vcpu, (trace, part)) in (0..).zip(traces.iter().zip(&parts)) {
        let sent = sent(console, trace.pages);
        assert_eq!((sent.count, sent.lost), (sent.head, 0));
        let base = address_of(&kernel, &part.code);
        check(&sent.exits(0, sent.head), &part.made, base, vcpu);
    }
}

#[test]
fn trace_loss_by_stalled_reader_is_counted_in_bytes() {
    /// Number of exits in each of the two rounds, which is more than the area holds. The reader empties the area
    /// between the rounds.
    const EXITS: u32 = 300;
    let (mut device, boot) = Device::bring_up(1);
    let trace = Trace::new(0, 2);
    let part = Part::default().port(PORT, &[0xee], WRITE | 1).times(EXITS);
    let open = trace.open(&mut device);
    let (on, _) = trace.turn(&mut device, true);
    let (off, answer) = trace.turn(&mut device, false);
    // The first round fills the area's 8,192 bytes and loses exits. Then the reader moves the tail, which frees the
    // whole area.
    let whole = boot
        .then(&open)
        .then(&on)
        .then(&part.code)
        .store(trace.metadata() + AUX_TAIL, trace.pages * PAGE)
        .then(&part.code)
        .then(&off)
        .then(&trace.send(answer));
    let ran = run(&kernel(&[whole]), 1, &[]);
    powered_off(&ran);
    let sent = sent(&mut &ran.console[..], trace.pages);
    let size = u64::from(trace.pages * PAGE);
    assert_eq!(sent.count, sent.head + sent.lost);
    assert_eq!(sent.head, 2 * size, "full again");
    // In the second round, each page has a sync packet and 63 exits.
    let exits = sent.exits(size, 2 * size);
    assert_eq!(exits.len(), 2 * 63);
    // The area held 2 * 63 exits of each round. Lost exits also have sequence numbers, so the gap before the second
    // round's first exit is the number of exits that the first round lost.
    let between = exits[0].sequence - 2 * 63;
    let after = sent.lost / 64 - between;
    assert_eq!(sent.lost % 64, 0);
    // The total consists of the program's exits, the exit of the command that ended the trace, and the exits that the
    // host caused.
    let made = 2 * u64::from(EXITS) + 1;
    let all = 4 * 63 + between + after;
    let of_the_host: u64 =
        ["signal", "other"].iter().filter_map(|name| ran.report["vcpus"][0]["exits"][name].as_u64()).sum();
    assert!((made..=made + of_the_host).contains(&all), "{all}");
}
