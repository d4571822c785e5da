//! Guest state in samples. The tests check which events need it, and at which exit the device reads it. Other tests
//! check the stack walk.

use std::cell::Cell;

use vm_memory::{Bytes, GuestAddress};
use vpmu::abi::*;
use vpmu::{CpuState, ExitReason, GENERAL_REGS, GuestRegs, Registers};
use vpmu_testkit::{CYCLES, Fields, Fixture, command, open_of, thread};
use zerocopy::IntoBytes;

const CALLCHAIN: u64 = 1 << 5;
const REGS_USER: u64 = 1 << 12;
const STACK_USER: u64 = 1 << 13;
const REGS_INTR: u64 = 1 << 18;
const IN_USER: u64 = -512_i64 as u64;
const IN_KERNEL: u64 = -128_i64 as u64;

/// The page tables, with one page at each level. They map the stack's pages for user mode, starting at virtual address
/// zero.
const TABLES: u64 = 0xa000;
const STACK: u64 = 0x60_0000;
const STACK_PAGES: u64 = 20;
const RING: u64 = 0x70_0000;

/// A vCPU at address `ip` with frame pointer `bp`. `asked` counts how often the device reads the vCPU's state.
#[derive(Debug)]
struct Somewhere<'a> {
    user: bool,
    ip: u64,
    bp: u64,
    asked: &'a Cell<u32>,
}

impl Registers for Somewhere<'_> {
    fn registers(&mut self) -> Option<GuestRegs> {
        Some(GuestRegs { ip: self.ip, user: self.user })
    }

    fn state(&mut self) -> Option<CpuState> {
        self.asked.set(self.asked.get() + 1);
        let mut general = [0; GENERAL_REGS];
        general[6] = self.bp;
        general[8] = self.ip;
        Some(CpuState { general, user: self.user, code64: true, cr0: 1 << 31, cr3: TABLES, cr4: 1 << 5, efer: 1 << 10 })
    }
}

/// Returns a fixture whose guest has a stack. A caller's frame is 0x100 bytes above the start of the stack.
fn fixture() -> Fixture {
    let fixture = Fixture::new();
    let put = |at: u64, word: u64| {
        fixture.memory.write_obj(word, GuestAddress(at)).expect("in memory");
    };
    for level in 0..3 {
        put(TABLES + level * 0x1000, (TABLES + (level + 1) * 0x1000) | 5);
    }
    for page in 0..STACK_PAGES {
        put(TABLES + 0x3000 + page * 8, (STACK + page * 0x1000) | 5);
    }
    put(STACK + 0x100, u64::MAX);
    put(STACK + 0x108, 0x1111);
    fixture
}

/// Opens an event for `request` that is enabled from the start, and maps its ring.
fn opened(fixture: &mut Fixture, request: OpenRequest) -> u64 {
    let request = request.flags(request.flags.get() | OPEN_ENABLED);
    let event = fixture.opened(&request);
    let pages: Vec<u64> = (0..=64).map(|page| RING + page * 0x1000).collect();
    fixture.map_pages(event, MAP_WRITABLE, &pages).expect("mapped");
    event
}

fn fields(sample_type: u64) -> OpenRequest {
    open_of(KIND_MARK, 5, 0).sampled(1).sample_type(sample_type)
}

/// Returns every record in the ring at [`RING`]. Each record starts with its header.
fn records(fixture: &Fixture) -> Vec<Vec<u64>> {
    let word = |at: u64| fixture.memory.read_obj::<u64>(GuestAddress(at)).expect("in memory");
    let head = word(RING + 1024);
    let (mut at, mut records) = (0, Vec::new());
    while at < head {
        let size = word(RING + 0x1000 + at) >> 48;
        let words = (0..size / 8).map(|n| word(RING + 0x1000 + at + n * 8));
        records.push(words.collect());
        at += size;
    }
    records
}

#[test]
fn vcpu_state_is_read_once_and_only_if_needed() {
    let mut fixture = fixture();
    let asked = Cell::new(0);
    let mark = |fixture: &Fixture| {
        let mut at = Somewhere { user: true, ip: 0x4000, bp: 0x100, asked: &asked };
        fixture.vcpus.mark(0, 5, &mut at);
    };
    fixture.opened(&open_of(KIND_MARK, 5, 0).sampled(1).flags(OPEN_ENABLED));
    mark(&fixture);
    assert_eq!(asked.get(), 0);
    let event = opened(&mut fixture, fields(CALLCHAIN));
    let other = fixture.opened(&fields(CALLCHAIN).flags(OPEN_ENABLED));
    mark(&fixture);
    assert_eq!(asked.get(), 1);
    assert_eq!(records(&fixture)[0][1..], [3, IN_USER, 0x4000, 0x1111], "one chain");
    fixture.close(event).expect("closed");
    fixture.close(other).expect("closed");
    mark(&fixture);
    assert_eq!(asked.get(), 1);
}

#[test]
fn overflow_found_by_a_command_has_the_callers_of_its_exit() {
    let mut fixture = fixture();
    let asked = Cell::new(0);
    let (kind, config) = CYCLES;
    let event = opened(&mut fixture, open_of(kind, config, 1).sampled(100).sample_type(CALLCHAIN));
    let mut at = Somewhere { user: true, ip: 0x7000, bp: 0x100, asked: &asked };
    fixture.vcpus.leave(1, ExitReason::Mmio, &mut at);
    fixture.host.work(thread(1), 100, 4);
    fixture.queues[3].request(command(COMMAND_DISABLE, event).as_bytes(), 48);
    fixture.vcpus.kick(1, 3);
    let records = records(&fixture);
    assert_eq!(records.len(), 1);
    assert_eq!(records[0][1..], [3, IN_USER, 0x7000, 0x1111]);
}

/// VPMU-D-6.6-12.
#[test]
fn sample_has_no_data_of_an_excluded_mode() {
    for (sample_type, mask) in [(CALLCHAIN, 0), (REGS_USER, 1), (STACK_USER, 0), (REGS_INTR, 1)] {
        let mut fixture = fixture();
        let (kind, config) = CYCLES;
        let event = opened(
            &mut fixture,
            open_of(kind, config, 0)
                .sampled(100)
                .sample_type(sample_type)
                .flags(OPEN_EXCLUDE_KERNEL)
                .regs_user(mask)
                .regs_intr(mask)
                .stack_user(8),
        );
        fixture.host.work(thread(0), 100, 4);
        let mut at = Somewhere { user: false, ip: 0x4000, bp: 0x100, asked: &Cell::new(0) };
        fixture.exit(0, ExitReason::Signal, &mut at);
        fixture.command(0, COMMAND_READ, event);
        let records = records(&fixture);
        assert_eq!(records.len(), 1);
        assert_eq!(records[0][0] & 0xffff_ffff, 2, "a LOST record for {sample_type:#x}");
    }
}

#[test]
fn kernel_callers_need_the_hypervisors_state() {
    /// A vCPU that provides only its address and mode.
    #[derive(Debug)]
    struct Terse;

    impl Registers for Terse {
        fn registers(&mut self) -> Option<GuestRegs> {
            Some(GuestRegs { ip: u64::MAX - 0xff, user: false })
        }
    }

    let mut fixture = fixture();
    let fields = fields(CALLCHAIN | REGS_INTR | STACK_USER).regs_intr(1);
    opened(&mut fixture, fields);
    fixture.vcpus.mark(0, 5, &mut Terse);
    assert_eq!(
        records(&fixture)[0][1..],
        [2, IN_KERNEL, u64::MAX - 0xff, 0, 0],
        "the sample has the address, but neither stack nor registers"
    );
}

#[test]
fn record_size_fits_its_header() {
    let mut fixture = fixture();
    let everything = fields(SAMPLE_ALLOWED & !(1 << 4)).regs_user(0xff_0fff).regs_intr(0xff_0fff).stack_user(65_528);
    opened(&mut fixture, everything);
    let mut at = Somewhere { user: true, ip: 0x4000, bp: 0x100, asked: &Cell::new(0) };
    fixture.vcpus.mark(0, 5, &mut at);
    fixture.vcpus.mark(0, 5, &mut at);
    let records = records(&fixture);
    let sizes: Vec<usize> = records.iter().map(|record| record.len() * 8).collect();
    assert_eq!(sizes, [65_528, 65_528]);
    // The record has 8191 words: 1 for the header, 9 for plain fields, 4 for the call chain (its length and three
    // entries), 42 for two register sets, and 2 for two stack sizes. The rest is for the stack. REGS_INTR comes last.
    // The word before it holds the number of stack bytes that the device read.
    let record = &records[0];
    let room = 8 * (8191 - 1 - 9 - 4 - 42 - 2);
    assert_eq!(record[record.len() - 22], room);
    assert_eq!(record[1 + 9 + 4 + 21], room);
}
