//! Random drivers and vCPUs against a whole device with a source whose every figure is known: it
//! does not panic, answers what it must, and touches no page that is not a ring or an AUX area.
#![no_main]
#![allow(
    dead_code,
    clippy::expect_used,
    unreachable_pub,
    reason = "the driver, the host and the reader are those of the device's tests"
)]

#[path = "../../tests/device/driver.rs"]
mod driver;
#[path = "../../tests/device/reader.rs"]
mod reader;
#[path = "../../tests/device/rig.rs"]
mod rig;
#[path = "../../tests/device/world.rs"]
mod world;

use std::sync::atomic::Ordering;

use libfuzzer_sys::arbitrary::{Result, Unstructured};
use libfuzzer_sys::fuzz_target;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vpmu::abi::*;
use vpmu::source::Rate;
use vpmu::{CpuState, Engines, ExitReason, GENERAL_REGS, GuestRegs, Limits, Persist, Registers};
use zerocopy::{FromBytes, IntoBytes};

use crate::driver::Descriptor;
use crate::rig::{ALL_FEATURES, Errno, MEMORY, Rig, VCPUS, thread};
use crate::world::{At, Nowhere};

/// Where the driver takes ring pages from: every second page from here on, so that each has a
/// neighbour that nobody may write to.
const ARENA: u64 = 0x20_0000;
const ARENA_PAGES: u64 = 32;
/// Where the window lies, and its pages.
const WINDOW: u64 = 0xd010_0000;
const WINDOW_PAGES: u64 = 16;
const DATA_TAIL: u64 = std::mem::offset_of!(Metadata, data_tail) as u64;
const AUX_TAIL: u64 = std::mem::offset_of!(Metadata, aux_tail) as u64;

/// A vCPU whose registers are the driver's choice, its page tables among them.
#[derive(Debug)]
struct Full(CpuState);

impl Registers for Full {
    fn registers(&mut self) -> Option<GuestRegs> {
        let CpuState { general, user, .. } = self.0;
        Some(GuestRegs {
            ip: general[8],
            user,
        })
    }

    fn state(&mut self) -> Option<CpuState> {
        Some(self.0)
    }
}

fn full(input: &mut Unstructured<'_>) -> Result<Full> {
    let mut general = [0; GENERAL_REGS];
    for register in &mut general[..10] {
        *register = number(input)?;
    }
    Ok(Full(CpuState {
        general,
        user: input.arbitrary()?,
        code64: input.ratio(3, 4)?,
        // Long mode mostly, with tables where rings are.
        cr0: u64::from(input.ratio(9, 10)?) << 31,
        cr3: page(input.int_in_range(0..=3)?),
        cr4: u64::from(input.ratio(9, 10)?) << 5 | u64::from(input.ratio(1, 4)?) << 12,
        efer: u64::from(input.ratio(9, 10)?) << 10,
    }))
}

/// Tables that lead to tables: the first entries of some pages.
fn tables(rig: &mut Rig, input: &mut Unstructured<'_>) -> Result<()> {
    for table in 0..input.int_in_range(1..=6)? {
        let flags = input.int_in_range(0..=0xff_u64)?;
        let entry = match input.int_in_range(0..=7)? {
            0 => input.arbitrary()?,
            _ => page(table + 1) | flags | 1,
        };
        let slot = 8 * input.int_in_range(0..=1)?;
        rig.memory
            .write_obj(entry, GuestAddress(page(table) + slot))
            .expect("in memory");
    }
    Ok(())
}

fn page(number: u64) -> u64 {
    ARENA + number % ARENA_PAGES * 2 * PAGE_SIZE as u64
}

/// A number that is small, or large, or anything.
fn number(input: &mut Unstructured<'_>) -> Result<u64> {
    Ok(match input.int_in_range(0..=7)? {
        0..=4 => input.int_in_range(0..=8)?,
        5 => input.int_in_range(0..=100_000)?,
        6 => u64::MAX - input.int_in_range(0..=100)?,
        _ => input.arbitrary()?,
    })
}

fn half(input: &mut Unstructured<'_>) -> Result<u32> {
    let number = number(input)?;
    Ok(u32::try_from(number & 0xffff_ffff).unwrap_or(0))
}

fn vcpu(input: &mut Unstructured<'_>) -> Result<u32> {
    input.int_in_range(0..=VCPUS - 1)
}

fn header(input: &mut Unstructured<'_>, op: u32) -> Result<ControlHeader> {
    Ok(ControlHeader {
        op: op.into(),
        reserved: u32::from(input.ratio(1, 50)?).into(),
        event: number(input)?.into(),
    })
}

/// An open request that is mostly one that a driver might make.
fn open(input: &mut Unstructured<'_>) -> Result<OpenRequest> {
    let kinds = [
        (KIND_MARK, 5),
        (KIND_EXITS, EXIT_USER),
        (world::CYCLES.0, world::CYCLES.1),
        (world::FAULTS.0, world::FAULTS.1),
        (KIND_TSC, 0),
        (KIND_GUEST_TIME, 0),
        (KIND_EXIT_TRACE, EXIT_USER),
        (KIND_EXIT_TRACE, EXIT_IO),
        (KIND_SAMPLE_TRACE, PACE_EXITS),
    ];
    let mut request = OpenRequest::default();
    if input.ratio(1, 20)? {
        let mut bytes = [0; size_of::<OpenRequest>()];
        input.fill_buffer(&mut bytes)?;
        request = OpenRequest::read_from_bytes(&bytes).unwrap_or_default();
    }
    let (kind, config) = *input.choose(&kinds)?;
    request.header.op = CONTROL_OPEN.into();
    request.header.reserved = 0.into();
    request.kind = kind.into();
    request.config = config.into();
    request.context = match input.int_in_range(0..=3)? {
        0 => CONTEXT_TASK,
        vcpu => vcpu - 1,
    }
    .into();
    request.period = match kind {
        KIND_EXIT_TRACE => 0,
        _ => number(input)?,
    }
    .into();
    request.sample_type = (input.arbitrary::<u64>()? & SAMPLE_ALLOWED).into();
    request.read_format = (input.arbitrary::<u64>()? & READ_ALLOWED).into();
    request.flags = (input.arbitrary::<u32>()? & 0xffff).into();
    if matches!(kind, KIND_EXIT_TRACE | KIND_SAMPLE_TRACE) {
        request.aux_watermark = half(input)?.into();
    }
    request.wakeup = half(input)?.into();
    request.engine = input.int_in_range(0..=2)?.into();
    request.max_stack = input.int_in_range(0..=MAX_STACK)?.into();
    if input.ratio(1, 3)? {
        request.parent = number(input)?.into();
    }
    if input.ratio(1, 3)? {
        request.leader = number(input)?.into();
    }
    if request.sample_type.get() & 1 << 12 != 0 {
        request.regs_user = (1 + input.int_in_range(0..=0xfff)?).into();
    }
    if request.sample_type.get() & 1 << 18 != 0 {
        request.regs_intr = (1 + input.int_in_range(0..=0xfff)?).into();
    }
    if request.sample_type.get() & 1 << 13 != 0 {
        request.stack_user = (8 * input.int_in_range(0..=8191_u32)?).into();
    }
    Ok(request)
}

fn control(rig: &mut Rig, input: &mut Unstructured<'_>) -> Result<()> {
    match input.int_in_range(0..=8)? {
        7 => {
            let mut name = [0; PERSISTENT_NAME];
            let len = input.int_in_range(0..=PERSISTENT_NAME)?;
            for byte in &mut name[..len] {
                *byte = *input.choose(b"aab-9_A\0")?;
            }
            let request = DetachRequest {
                header: header(input, CONTROL_DETACH)?,
                name,
            };
            let _ = rig.control(&request);
        }
        8 => {
            let request = MapRequest {
                header: header(input, CONTROL_MAP)?,
                pages: (*input.choose(&[1_u32, 2, 3, 5, 9, 17, 4])?).into(),
                flags: (MAP_WINDOW | input.int_in_range(0..=1)?).into(),
            };
            let _ = rig.control(&request);
        }
        0..=1 => {
            let _ = rig.open_reply(&open(input)?);
        }
        2 => {
            let data: u64 = *input.choose(&[0, 1, 2, 4, 8, 3])?;
            let op = *input.choose(&[CONTROL_MAP, CONTROL_MAP_AUX])?;
            let first = input.int_in_range(0..=ARENA_PAGES)?;
            let first = first + u64::from(op == CONTROL_MAP_AUX);
            let mut pages: Vec<u64> = (first..first + data).map(page).collect();
            if op == CONTROL_MAP {
                pages.push(page(first + data));
            }
            if input.ratio(1, 10)? && !pages.is_empty() {
                pages[0] = *input.choose(&[MEMORY, u64::MAX - 4095, page(first + 1), 1])?;
            }
            let flags = input.int_in_range(0..=8)?;
            let _ = rig.map_as(op, number(input)?, flags, &pages);
        }
        3 => {
            let op = input.int_in_range(0..=15)?;
            rig.control_bytes(header(input, op)?.as_bytes(), 64);
        }
        4 => {
            let request = TaskPageRequest {
                header: header(input, CONTROL_TASK_PAGE)?,
                vcpu: half(input)?.into(),
                reserved: 0.into(),
                address: page(input.int_in_range(0..=ARENA_PAGES)?).into(),
            };
            let _ = rig.control(&request);
        }
        5 => {
            // Redirections, pauses and what else has a value after its header.
            let op: u32 = input.int_in_range(0..=15)?;
            let mut bytes = header(input, op)?.as_bytes().to_vec();
            bytes.extend(number(input)?.to_le_bytes());
            bytes.extend(number(input)?.to_le_bytes());
            let cut = input.int_in_range(1..=bytes.len())?;
            rig.control_bytes(&bytes[..cut], input.int_in_range(0..=64)?);
        }
        _ => {
            let len = input.int_in_range(1..=200)?;
            let bytes = input.bytes(len)?.to_vec();
            rig.control_bytes(&bytes, input.int_in_range(0..=64)?);
        }
    }
    Ok(())
}

fn commands(rig: &mut Rig, input: &mut Unstructured<'_>) -> Result<()> {
    let mut batch = Vec::new();
    for _ in 0..input.int_in_range(1..=8)? {
        batch.push(Command {
            op: input.int_in_range(0..=13)?.into(),
            reserved: u32::from(input.ratio(1, 50)?).into(),
            event: number(input)?.into(),
            value: number(input)?.into(),
            room: match input.int_in_range(0..=3)? {
                0 => 64 * input.int_in_range(0..=600_u64)?,
                1 => number(input)?,
                _ => 0,
            }
            .into(),
        });
    }
    let of = vcpu(input)?;
    let by = if input.ratio(1, 10)? {
        vcpu(input)?
    } else {
        of
    };
    let replies = rig.commands_from(of, by, &batch);
    assert_eq!(replies.len(), batch.len(), "an answer to each");
    Ok(())
}

/// A chain of descriptors that nobody vouches for: buffers of the driver's, or no memory at all.
fn chain(rig: &mut Rig, input: &mut Unstructured<'_>) -> Result<()> {
    let index = input.int_in_range(0..=rig.queues.len() - 1)?;
    let queue = &mut rig.queues[index];
    for slot in 0..input.int_in_range(1..=4)? {
        let address = match input.int_in_range(0..=3)? {
            0 => MEMORY - 8,
            1 => u64::MAX - 4,
            _ => queue.buffer(input.int_in_range(0..=3)?),
        };
        let next = input.ratio(1, 2)?;
        let descriptor = Descriptor {
            address,
            len: half(input)? % 0x1_0000,
            writable: input.arbitrary()?,
            next: next.then_some(input.int_in_range(0..=20)?),
        };
        queue.describe(slot, descriptor);
    }
    queue.offer(input.int_in_range(0..=3)?);
    let index_on_bus = u16::try_from(index).expect("few");
    // Notified by no vCPU first, or by another one; at last by its own, which gets everything back.
    match input.arbitrary()? {
        true => rig.vcpus.kick(vcpu(input)?, index_on_bus),
        false => rig.vpmu.notify(index_on_bus),
    }
    match index_on_bus.checked_sub(QUEUE_VCPU) {
        Some(own) => rig.vcpus.kick(own.into(), index_on_bus),
        None => rig.vpmu.notify(index_on_bus),
    }
    while rig.queues[index].reclaim().is_some() {}
    Ok(())
}

/// What the host does with persistent events, and a guest with the window.
fn operator(rig: &mut Rig, window: &GuestMemoryMmap, input: &mut Unstructured<'_>) -> Result<()> {
    match input.int_in_range(0..=5)? {
        0 => {
            let event = *input.choose(&["mark=5", "marks", "cycles", "tsc", "exits-user:u"])?;
            let rates = [None, Some(Rate::Period(1)), Some(Rate::Period(100))];
            let persist = Persist {
                name: input.arbitrary::<bool>()?.then(|| "ours".to_owned()),
                event: event.to_owned(),
                vcpu: vcpu(input)?,
                rate: *input.choose(&rates)?,
                sample_type: input.arbitrary::<u64>()? & 0x1_03ff,
                pages: *input.choose(&[0, 1, 2, 4, 8])?,
            };
            let _ = rig.vpmu.persist(&persist);
        }
        1 => {
            let _ = rig.vpmu.end(number(input)?);
        }
        2..=3 => {
            for event in rig.vpmu.persistent() {
                let Ok(history) = rig.vpmu.history(event.id) else {
                    continue;
                };
                let read: usize = history.iter().map(<[u8]>::len).sum();
                assert_eq!(read, history.records.len(), "whole records");
            }
        }
        4 => {
            let at = input.int_in_range(0..=WINDOW_PAGES * PAGE_SIZE as u64 - 8)? / 8 * 8;
            let word = match input.arbitrary()? {
                true => 9 | input.int_in_range(0..=20)? << 51,
                false => number(input)?,
            };
            window
                .write_obj(word, GuestAddress(WINDOW + at))
                .expect("in memory");
        }
        _ => rig.attach_as(vcpu(input)?, Errno::from(input.int_in_range(100..=104_u8)?)),
    }
    Ok(())
}

fn run(rig: &mut Rig, window: &GuestMemoryMmap, input: &mut Unstructured<'_>) -> Result<()> {
    while !input.is_empty() {
        match input.int_in_range(0..=15)? {
            15 => operator(rig, window, input)?,
            0..=3 => control(rig, input)?,
            4..=6 => commands(rig, input)?,
            7 => {
                let (vcpu, ip) = (vcpu(input)?, number(input)?);
                for _ in 0..input.int_in_range(1..=64)? {
                    rig.mark(vcpu, 5, ip);
                }
            }
            8 => {
                let reasons = [ExitReason::Io, ExitReason::Hlt, ExitReason::Signal];
                let (vcpu, reason) = (vcpu(input)?, *input.choose(&reasons)?);
                match input.arbitrary()? {
                    true => rig.exit(vcpu, reason, &mut At(number(input)?)),
                    false => rig.exit(vcpu, reason, &mut Nowhere),
                }
            }
            9 => {
                let of = thread(vcpu(input)?);
                rig.world.work(of, input.int_in_range(0..=500)?, 4);
                rig.world.drop_overflows(of, input.int_in_range(0..=2)?);
                rig.world.pass(input.int_in_range(0..=20_000_000)?);
            }
            10 => {
                rig.post_notice(input.int_in_range(0..=15)?, input.int_in_range(0..=32)?);
                while rig.queues[1].reclaim().is_some() {}
            }
            11 => {
                let metadata = GuestAddress(page(input.int_in_range(0..=ARENA_PAGES)?));
                let field = *input.choose(&[DATA_TAIL, AUX_TAIL])?;
                let tail = GuestAddress(metadata.0 + field);
                rig.memory
                    .store(number(input)?, tail, Ordering::Release)
                    .expect("in memory");
            }
            12 => tables(rig, input)?,
            13 => {
                let (vcpu, mut regs) = (vcpu(input)?, full(input)?);
                rig.vcpus.leave(vcpu, ExitReason::Mmio, &mut regs);
                rig.vcpus.mark(vcpu, 5, &mut regs);
                rig.vcpus.enter(vcpu);
            }
            _ => match input.int_in_range(0..=9)? {
                0 => rig.activate(input.arbitrary::<u64>()? & 31 | 1 << 32),
                1 => rig.world.break_host(),
                _ => chain(rig, input)?,
            },
        }
    }
    Ok(())
}

fuzz_target!(|input: &[u8]| {
    let range = (
        GuestAddress(WINDOW),
        usize::try_from(WINDOW_PAGES).expect("few") * PAGE_SIZE,
    );
    let window = GuestMemoryMmap::from_ranges(&[range]).expect("memory");
    let limits = Limits {
        max_persistent: 6,
        ..Limits::default()
    };
    let mut rig = Rig::bare(Engines::Auto, limits, Some(&window));
    (0..VCPUS).for_each(|vcpu| rig.attach(vcpu));
    rig.activate(ALL_FEATURES | 1 << F_WINDOW);
    // Out of input is the end.
    let _ = run(&mut rig, &window, &mut Unstructured::new(input));
    let mut bytes = [0; PAGE_SIZE];
    for number in 0..ARENA_PAGES {
        let neighbour = GuestAddress(page(number) + PAGE_SIZE as u64);
        rig.memory
            .read_slice(&mut bytes, neighbour)
            .expect("in memory");
        assert!(bytes == [0; PAGE_SIZE], "a page of nobody's");
    }
});
