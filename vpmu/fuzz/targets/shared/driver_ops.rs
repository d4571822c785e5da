//! Operations of a driver, made from the fuzzer's bytes: requests, commands and writes to guest memory. Most of them
//! are plausible.

use std::mem::offset_of;
use std::sync::atomic::Ordering;

use libfuzzer_sys::arbitrary::{Result, Unstructured};
use vm_memory::{Bytes, GuestAddress};
use vpmu::Turn;
use vpmu::abi::*;
use vpmu_testkit::{CYCLES, Descriptor, Errno, FAULTS, Fields, MEMORY, VCPUS, open_of};
use zerocopy::{FromBytes, IntoBytes};

use super::input::{half, number, once_in};
use super::layout::{self, SHARED_PAGES, SLOTS, TASK_PAGES, WINDOW_PAGES};
use super::rings::OwnRing;
use super::stage::{Stage, features};

const DATA_TAIL: u64 = offset_of!(Metadata, data_tail) as u64;
const AUX_TAIL: u64 = offset_of!(Metadata, aux_tail) as u64;
/// Kind and config of events that the mock host offers, and of events that the device itself counts.
const KINDS: [(u32, u64); 16] = [
    (KIND_MARK, 5),
    (KIND_MARK, MARK_ANY),
    CYCLES,
    (KIND_VMM_TRACE, 0),
    FAULTS,
    (KIND_EXITS, EXIT_USER),
    (KIND_EXITS, EXIT_ALL),
    (KIND_TSC, 0),
    (KIND_GUEST_TIME, 0),
    (KIND_EXIT_TRACE, EXIT_USER),
    (KIND_EXIT_TRACE, EXIT_IO),
    (KIND_EXIT_TRACE, EXIT_ALL),
    (KIND_SAMPLE_TRACE, PACE_EXITS),
    (KIND_SAMPLE_TRACE, PACE_CYCLES),
    (KIND_HOST_TRACE, 0),
    (KIND_HALTS, 0),
];
/// Size in bytes of a buffer that is large enough for every answer.
const ROOM: usize = 4096;

/// One step of the driver.
pub(crate) fn step(stage: &mut Stage, input: &mut Unstructured<'_>) -> Result<()> {
    match input.int_in_range(0..=31)? {
        0..=4 => open_and_map(stage, input),
        5..=11 => commands(stage, input),
        12 => map_own(stage, input),
        13 => map_shared(stage, input),
        14..=15 => map_aux(stage, input),
        16 => link(stage, input),
        17 => linked_tasks(stage, input),
        18 => redirect(stage, input),
        19 => pause(stage, input),
        20 => detach(stage, input),
        21 => with_header(stage, input),
        22 => lists(stage, input),
        23 => task_page(stage, input),
        24 => switch_tasks(stage, input),
        25 => tails(stage, input),
        26 => tables(stage, input),
        27 => post_notices(stage, input),
        28 => any_request(stage, input),
        29 => chain(stage, input),
        30 => {
            stage.read_rings();
            Ok(())
        }
        _ if once_in(input, 4)? => restart(stage, input),
        _ => write_window(stage, input),
    }
}

fn header(input: &mut Unstructured<'_>, op: u32, event: u64) -> Result<ControlHeader> {
    Ok(ControlHeader { op: op.into(), reserved: u32::from(once_in(input, 50)?).into(), event: event.into() })
}

/// Makes an open request, mostly plausible.
fn open_request(stage: &Stage, input: &mut Unstructured<'_>) -> Result<OpenRequest> {
    let mut request = OpenRequest::default();
    if once_in(input, 20)? {
        let mut bytes = [0; size_of::<OpenRequest>()];
        input.fill_buffer(&mut bytes)?;
        request = OpenRequest::read_from_bytes(&bytes).unwrap_or_default();
    }
    let (kind, config) = *input.choose(&KINDS)?;
    request.header = header(input, CONTROL_OPEN, 0)?;
    request.kind = kind.into();
    request.config = config.into();
    request.context = match input.int_in_range(0..=3)? {
        0 => CONTEXT_TASK,
        vcpu => vcpu - 1,
    }
    .into();
    request.period = match kind {
        KIND_EXIT_TRACE | KIND_VMM_TRACE => 0,
        KIND_HARDWARE => *input.choose(&[0, 10, 10, 100, 1000])?,
        _ => number(input)?,
    }
    .into();
    // Choose the fields and flags from likely values: with random bits, nearly all requests would be refused.
    request.sample_type = match input.int_in_range(0..=3)? {
        0 => input.arbitrary::<u64>()? & SAMPLE_ALLOWED,
        1 => 0x3ff,
        2 => 0x1_03c7,
        _ => 0x1_01c7,
    }
    .into();
    request.read_format = (u64::from(input.arbitrary::<u8>()?) & READ_ALLOWED).into();
    request.flags = match input.int_in_range(0..=7)? {
        0 => u32::from(input.arbitrary::<u16>()?),
        1 => OPEN_ENABLED | OPEN_FREQ,
        2 => OPEN_ENABLED | OPEN_PAUSED,
        3 => OPEN_ENABLED | 1 << input.int_in_range(0..=16)?,
        4 => OPEN_ENABLED | OPEN_PERSISTENT | OPEN_BACKWARD,
        5 => 1 << input.int_in_range(0..=16)?,
        _ => OPEN_ENABLED,
    }
    .into();
    if matches!(kind, KIND_EXIT_TRACE | KIND_SAMPLE_TRACE | KIND_VMM_TRACE) {
        request.aux_watermark = half(input)?.into();
    }
    request.wakeup = if input.arbitrary()? { 0 } else { half(input)? }.into();
    request.engine = match kind {
        KIND_HARDWARE | KIND_EXIT_TRACE => input.int_in_range(0..=2)?,
        _ => u32::from(once_in(input, 20)?),
    }
    .into();
    request.max_stack = input.int_in_range(0..=MAX_STACK)?.into();
    match input.int_in_range(0..=5)? {
        0 => request.parent = stage.event(input)?.into(),
        1..=2 => request.leader = stage.event(input)?.into(),
        _ => {}
    }
    if request.sample_type.get() & 1 << 12 != 0 {
        request.regs_user = (1 + input.int_in_range(0..=0xfff)?).into();
    }
    if request.sample_type.get() & 1 << 18 != 0 {
        request.regs_intr = (1 + input.int_in_range(0..=0xfff)?).into();
    }
    if request.sample_type.get() & 1 << 13 != 0 {
        request.stack_user = (8 * input.int_in_range(0..=1023_u32)?).into();
    }
    Ok(request)
}

/// Opens an event and usually maps a ring, an area or both.
fn open_and_map(stage: &mut Stage, input: &mut Unstructured<'_>) -> Result<()> {
    let request = open_request(stage, input)?;
    let answer = stage.fixture.control_bytes(request.as_bytes(), size_of::<OpenReply>());
    // If the request is refused, the answer can be shorter than this structure.
    let reply = match OpenReply::read_from_bytes(&answer) {
        Ok(reply) if reply.status.get() == 0 => reply,
        _ => return Ok(()),
    };
    let event = reply.id.get();
    stage.events.push(event);
    let flags = request.flags.get();
    match input.int_in_range(0..=7)? {
        0 => {}
        1 => map_window(stage, input, event)?,
        _ => {
            let data = *input.choose(&[1, 1, 2, 0])?;
            map_own_as(stage, event, data, input.ratio(3, 4)?, flags)?;
        }
    }
    let traces = [KIND_EXIT_TRACE, KIND_SAMPLE_TRACE, KIND_VMM_TRACE];
    if traces.contains(&request.kind.get()) {
        map_aux_of(stage, input, event)?;
    }
    Ok(())
}

/// Maps a ring of pages that no other ring uses.
fn map_own_as(stage: &mut Stage, event: u64, data: u64, writable: bool, opened: u32) -> Result<()> {
    let Some(pages) = stage.own_pages(1 + data) else {
        return Ok(());
    };
    let flags = if writable { MAP_WRITABLE } else { 0 };
    if stage.fixture.map_pages(event, flags, &pages).is_ok() {
        let backward = opened & OPEN_BACKWARD != 0;
        let ring = OwnRing::new(event, pages, writable, backward);
        stage.rings.push(ring);
    }
    Ok(())
}

fn map_own(stage: &mut Stage, input: &mut Unstructured<'_>) -> Result<()> {
    // Don't check the contents of this ring: this function does not know whether the event writes backwards.
    let event = stage.event(input)?;
    let data = *input.choose(&[0, 1, 2, 4])?;
    if let Some(pages) = stage.own_pages(1 + data) {
        let _ = stage.fixture.map_pages(event, input.int_in_range(0..=1)?, &pages);
    }
    Ok(())
}

fn map_window(stage: &mut Stage, input: &mut Unstructured<'_>, event: u64) -> Result<()> {
    let request = MapRequest {
        header: header(input, CONTROL_MAP, event)?,
        pages: (*input.choose(&[2_u32, 3, 1, 5, 9, 17, 4])?).into(),
        flags: (MAP_WINDOW | input.int_in_range(0..=1)?).into(),
    };
    let _ = stage.fixture.control(&request);
    Ok(())
}

/// Maps pages that may also belong to other rings, or that may lie outside memory.
fn map_shared(stage: &mut Stage, input: &mut Unstructured<'_>) -> Result<()> {
    let event = stage.event(input)?;
    if once_in(input, 4)? {
        return map_window(stage, input, event);
    }
    let data: u64 = *input.choose(&[0, 1, 2, 4, 3])?;
    let first = input.int_in_range(0..=SHARED_PAGES)?;
    let mut pages: Vec<u64> = (first..=first + data).map(layout::shared).collect();
    if once_in(input, 10)? {
        let elsewhere = [MEMORY, u64::MAX - 4095, layout::shared(first + 1), 1];
        pages[0] = *input.choose(&elsewhere)?;
    }
    let _ = stage.fixture.map_pages(event, input.int_in_range(0..=8)?, &pages);
    Ok(())
}

fn map_aux(stage: &mut Stage, input: &mut Unstructured<'_>) -> Result<()> {
    let event = stage.event(input)?;
    map_aux_of(stage, input, event)
}

fn map_aux_of(stage: &mut Stage, input: &mut Unstructured<'_>, event: u64) -> Result<()> {
    let count: u64 = *input.choose(&[1, 2, 4, 1, 3])?;
    let first = input.int_in_range(0..=SHARED_PAGES)?;
    let pages: Vec<u64> = (first..first + count).map(layout::shared).collect();
    let flags = *input.choose(&[MAP_WRITABLE, MAP_DRIVER_OWNED | MAP_WRITABLE, 0, MAP_DRIVER_OWNED])?;
    let _ = stage.fixture.map_as(CONTROL_MAP_AUX, event, flags, &pages);
    Ok(())
}

fn link(stage: &mut Stage, input: &mut Unstructured<'_>) -> Result<()> {
    let (event, target) = (stage.event(input)?, stage.event(input)?);
    let role = input.int_in_range(1..=2)?;
    let _ = stage.fixture.link(event, target, role);
    Ok(())
}

/// Opens two task events, usually schedules them in, and sets the first to start or stop the second.
fn linked_tasks(stage: &mut Stage, input: &mut Unstructured<'_>) -> Result<()> {
    let mut pair = [0; 2];
    for event in &mut pair {
        let (kind, config) = *input.choose(&KINDS[..3])?;
        let flags = *input.choose(&[OPEN_ENABLED, OPEN_ENABLED | OPEN_PAUSED])?;
        let request = open_of(kind, config, CONTEXT_TASK).sampled(10).flags(flags);
        let Ok(opened) = stage.fixture.open(&request) else {
            return Ok(());
        };
        stage.events.push(opened);
        *event = opened;
        if let Some(vcpu) = stage.vcpu(input)? {
            stage.fixture.command(vcpu, COMMAND_IN, opened);
        }
    }
    let _ = stage.fixture.link(pair[0], pair[1], input.int_in_range(1..=2)?);
    Ok(())
}

fn redirect(stage: &mut Stage, input: &mut Unstructured<'_>) -> Result<()> {
    let event = stage.event(input)?;
    let target = if once_in(input, 4)? { 0 } else { stage.event(input)? };
    let _ = stage.fixture.redirect(event, target);
    Ok(())
}

fn pause(stage: &mut Stage, input: &mut Unstructured<'_>) -> Result<()> {
    let event = stage.event(input)?;
    match input.int_in_range(0..=4)? {
        4.. => set_notices(stage, input, event),
        3 => set_wakeup(stage, input, event),
        paused => {
            let _ = stage.fixture.pause(event, paused);
            Ok(())
        }
    }
}

fn set_wakeup(stage: &mut Stage, input: &mut Unstructured<'_>, event: u64) -> Result<()> {
    let request = WakeupRequest {
        header: header(input, CONTROL_WAKEUP, event)?,
        every: (*input.choose(&[1_u64, 3, 100, 0, 1 << 32])?).into(),
        unit: input.int_in_range(0..=3_u32)?.into(),
        reserved: u32::from(once_in(input, 20)?).into(),
    };
    let _ = stage.fixture.control(&request);
    Ok(())
}

fn set_notices(stage: &mut Stage, input: &mut Unstructured<'_>, event: u64) -> Result<()> {
    let request = SignalRequest {
        header: header(input, CONTROL_SIGNAL, event)?,
        own: input.int_in_range(0..=2_u32)?.into(),
        reserved: u32::from(once_in(input, 20)?).into(),
    };
    let _ = stage.fixture.control(&request);
    Ok(())
}

fn detach(stage: &mut Stage, input: &mut Unstructured<'_>) -> Result<()> {
    let event = stage.event(input)?;
    let mut name = [0; PERSISTENT_NAME];
    let len = input.int_in_range(0..=PERSISTENT_NAME)?;
    for byte in &mut name[..len] {
        *byte = *input.choose(b"aab-9_A\0")?;
    }
    let request = DetachRequest { header: header(input, CONTROL_DETACH, event)?, name };
    let _ = stage.fixture.control(&request);
    Ok(())
}

/// Sends a request that is only a header: close, unmap or attach.
fn with_header(stage: &mut Stage, input: &mut Unstructured<'_>) -> Result<()> {
    let event = stage.event(input)?;
    let ops = [CONTROL_CLOSE, CONTROL_UNMAP, CONTROL_UNMAP_AUX, CONTROL_ATTACH];
    let op = *input.choose(&ops)?;
    let request = header(input, op, event)?;
    if stage.fixture.control(&request).is_ok() && op == CONTROL_CLOSE {
        stage.events.retain(|other| *other != event);
    }
    Ok(())
}

/// Lists the catalogue or the persistent events.
fn lists(stage: &mut Stage, input: &mut Unstructured<'_>) -> Result<()> {
    let (first, count) = (half(input)?, half(input)?);
    let room = *input.choose(&[ROOM, 8, 16, 300, 1000])?;
    if input.arbitrary()? {
        let request =
            CatalogueRequest { header: header(input, CONTROL_CATALOGUE, 0)?, first: first.into(), count: count.into() };
        stage.fixture.control_bytes(request.as_bytes(), room);
    } else {
        let request = PersistentRequest {
            header: header(input, CONTROL_PERSISTENT, 0)?,
            after: u64::from(first).into(),
            count: count.into(),
            reserved: u32::from(once_in(input, 50)?).into(),
        };
        let answer = stage.fixture.control_bytes(request.as_bytes(), room);
        let size = size_of::<PersistentEvent>();
        let Ok((reply, events)) = ControlReply::read_from_prefix(&answer) else {
            return Ok(());
        };
        if reply.status.get() == 0 {
            let listed = usize::try_from(reply.value.get()).expect("few");
            assert_eq!(events.len(), listed * size, "the answer does not have as many entries as its `value`");
        }
    }
    Ok(())
}

fn task_page_address(vcpu: u32) -> u64 {
    TASK_PAGES + u64::from(vcpu) * PAGE_SIZE as u64
}

fn task_page(stage: &mut Stage, input: &mut Unstructured<'_>) -> Result<()> {
    let vcpu = input.int_in_range(0..=VCPUS)?;
    let address = match input.int_in_range(0..=7)? {
        0 => 0,
        1 => number(input)?,
        2 => layout::shared(input.int_in_range(0..=SHARED_PAGES)?),
        _ => task_page_address(vcpu % VCPUS),
    };
    let request = TaskPageRequest {
        header: header(input, CONTROL_TASK_PAGE, 0)?,
        vcpu: vcpu.into(),
        reserved: 0.into(),
        address: address.into(),
    };
    let _ = stage.fixture.control(&request);
    Ok(())
}

/// Writes task switches to a task page, as the driver does, or arbitrary data.
fn switch_tasks(stage: &mut Stage, input: &mut Unstructured<'_>) -> Result<()> {
    let vcpu = input.int_in_range(0..=VCPUS - 1)?;
    let page = task_page_address(vcpu);
    if input.arbitrary()? {
        let _ = stage.fixture.control(&TaskPageRequest {
            header: header(input, CONTROL_TASK_PAGE, 0)?,
            vcpu: vcpu.into(),
            reserved: 0.into(),
            address: page.into(),
        });
    }
    let memory = &stage.fixture.memory;
    let put = |offset: usize, value: u64| {
        memory.store(value.to_le(), GuestAddress(page + offset as u64), Ordering::Release).expect("in memory");
    };
    if once_in(input, 4)? {
        put(8 * input.int_in_range(0..=511)?, number(input)?);
        return Ok(());
    }
    let switches = offset_of!(TaskPage, switches);
    let count: u64 = memory.load(GuestAddress(page + switches as u64), Ordering::Acquire).expect("in memory");
    let mut since = stage.fixture.host.now();
    for switch in 0..input.int_in_range(1..=4)? {
        let task = half(input)?;
        let number = count.wrapping_add(switch);
        let index = usize::try_from(number % TASK_HISTORY as u64).expect("small");
        let entry = offset_of!(TaskPage, history) + index * size_of::<TaskSwitch>();
        let word = u64::from(task) << 32 | u64::from(task);
        put(0, word);
        put(entry, word);
        put(entry + 8, since);
        put(switches, number.wrapping_add(1));
        since += input.int_in_range(0..=1000)?;
    }
    put(offset_of!(TaskPage, user_regs), number(input)?);
    Ok(())
}

/// Stores an arbitrary tail in a ring. The contents of this ring are not checked afterwards.
fn tails(stage: &mut Stage, input: &mut Unstructured<'_>) -> Result<()> {
    let rings = stage.rings.len();
    let metadata = match (rings, input.arbitrary()?) {
        (1.., true) => {
            let index = input.int_in_range(0..=rings - 1)?;
            stage.rings.swap_remove(index).metadata()
        }
        _ => layout::shared(input.int_in_range(0..=SHARED_PAGES)?),
    };
    let field = *input.choose(&[DATA_TAIL, AUX_TAIL])?;
    stage.fixture.memory.store(number(input)?, GuestAddress(metadata + field), Ordering::Release).expect("in memory");
    Ok(())
}

/// Writes one of the first two entries of some page tables. Most entries point to the next page table.
fn tables(stage: &mut Stage, input: &mut Unstructured<'_>) -> Result<()> {
    for table in 0..input.int_in_range(1..=6)? {
        let flags = input.int_in_range(0..=0xff_u64)?;
        let entry = match input.int_in_range(0..=7)? {
            0 => input.arbitrary()?,
            _ => layout::table(table + 1) | flags | 1,
        };
        let slot = 8 * input.int_in_range(0..=1)?;
        stage.fixture.memory.write_obj(entry, GuestAddress(layout::table(table) + slot)).expect("in memory");
    }
    Ok(())
}

fn post_notices(stage: &mut Stage, input: &mut Unstructured<'_>) -> Result<()> {
    for slot in 0..input.int_in_range(1..=SLOTS - 1)? {
        stage.fixture.post_notice(slot, input.int_in_range(0..=32)?);
    }
    while stage.queue(1).reclaim().is_some() {}
    Ok(())
}

/// Sends a request of arbitrary bytes, or a header and two words, cut off at any length.
fn any_request(stage: &mut Stage, input: &mut Unstructured<'_>) -> Result<()> {
    let bytes = if input.arbitrary()? {
        let event = stage.event(input)?;
        let op = input.int_in_range(0..=16)?;
        let mut bytes = header(input, op, event)?.as_bytes().to_vec();
        bytes.extend(number(input)?.to_le_bytes());
        bytes.extend(number(input)?.to_le_bytes());
        bytes.truncate(input.int_in_range(1..=32)?);
        bytes
    } else {
        let len = input.int_in_range(1..=200)?;
        input.bytes(len)?.to_vec()
    };
    stage.fixture.control_bytes(&bytes, input.int_in_range(0..=64)?);
    Ok(())
}

fn command(stage: &Stage, input: &mut Unstructured<'_>) -> Result<Command> {
    let op = input.int_in_range(0..=13)?;
    let event = match op {
        COMMAND_FLUSH if input.arbitrary()? => 0,
        COMMAND_VCPU => 0,
        _ => stage.event(input)?,
    };
    let (value, room) = match op {
        COMMAND_AUX_BEGIN => (64 * input.int_in_range(0..=300_u64)?, 64 * input.int_in_range(0..=300_u64)?),
        COMMAND_PERIOD => (*input.choose(&[10, 1, 1000, 0])?, 0),
        COMMAND_REFRESH => (input.int_in_range(0..=3)?, 0),
        COMMAND_PROMPT => (input.int_in_range(0..=1)?, 0),
        _ => (0, 0),
    };
    let (value, room) = if once_in(input, 20)? { (number(input)?, number(input)?) } else { (value, room) };
    Ok(Command {
        op: op.into(),
        reserved: u32::from(once_in(input, 50)?).into(),
        event: event.into(),
        value: value.into(),
        room: room.into(),
    })
}

/// Sends commands in one buffer on a vCPU's queue. Usually that vCPU notifies the queue, sometimes another vCPU.
fn commands(stage: &mut Stage, input: &mut Unstructured<'_>) -> Result<()> {
    let mut batch = Vec::new();
    for _ in 0..input.int_in_range(1..=8)? {
        batch.push(command(stage, input)?);
    }
    let Some(of) = stage.vcpu(input)? else {
        return Ok(());
    };
    let by = if once_in(input, 10)? { stage.vcpu(input)?.unwrap_or(of) } else { of };
    let replies = stage.fixture.commands_from(of, by, &batch);
    assert_eq!(replies.len(), batch.len(), "each command has one reply");
    for reply in replies {
        let errno = Errno::try_from(reply.status.get()).expect("an errno");
        assert!(errno < 134, "Linux has no errno {errno}");
        assert!((STATE_ERROR..=STATE_ACTIVE).contains(&reply.state.get()));
    }
    Ok(())
}

/// Offers a chain of arbitrary descriptors. They point to the driver's buffers, or to addresses outside memory.
fn chain(stage: &mut Stage, input: &mut Unstructured<'_>) -> Result<()> {
    let index = input.int_in_range(0..=stage.fixture.queues.len() - 1)?;
    let queue = stage.queue(index);
    for slot in 0..input.int_in_range(1..=SLOTS)? {
        let address = match input.int_in_range(0..=4)? {
            0 => MEMORY - 8,
            1 => u64::MAX - 4,
            2 => queue.buffer(0) + 4090,
            _ => queue.buffer(input.int_in_range(0..=SLOTS - 1)?),
        };
        let next = input.arbitrary()?;
        let descriptor = Descriptor {
            address,
            len: half(input)? % 0x1_0000,
            writable: input.arbitrary()?,
            next: if next { Some(input.int_in_range(0..=20)?) } else { None },
        };
        queue.describe(slot, descriptor);
    }
    queue.offer(input.int_in_range(0..=SLOTS - 1)?);
    notify(stage, input, index)?;
    while stage.queue(index).reclaim().is_some() {}
    Ok(())
}

/// Notifies a queue twice. The first notification comes from any vCPU or from none. The second follows the rule that
/// only vCPU n may notify the queue of vCPU n.
fn notify(stage: &mut Stage, input: &mut Unstructured<'_>, index: usize) -> Result<()> {
    let queue = u16::try_from(index).expect("few");
    match (input.arbitrary()?, stage.vcpu(input)?) {
        (true, Some(vcpu)) => stage.fixture.vcpus.kick(vcpu, queue),
        _ => while stage.fixture.vpmu.notify(queue) == Turn::Unfinished {},
    }
    match queue.checked_sub(QUEUE_VCPU).map(u32::from) {
        Some(own) if stage.can_run(own) => stage.fixture.vcpus.kick(own, queue),
        Some(_) => {}
        None => while stage.fixture.vpmu.notify(queue) == Turn::Unfinished {},
    }
    Ok(())
}

/// Writes a word to the window, as the guest can. About half of the words look like the header of a sample.
pub(crate) fn write_window(stage: &mut Stage, input: &mut Unstructured<'_>) -> Result<()> {
    let at = input.int_in_range(0..=WINDOW_PAGES * PAGE_SIZE as u64 - 8)? / 8 * 8;
    let word = if input.arbitrary()? { 9 | input.int_in_range(0..=20)? << 51 } else { number(input)? };
    stage.memory.window.write_obj(word, GuestAddress(layout::WINDOW + at)).expect("in memory");
    Ok(())
}

/// Starts a new driver. Sometimes first tries to start a driver that the device may refuse.
fn restart(stage: &mut Stage, input: &mut Unstructured<'_>) -> Result<()> {
    if input.arbitrary()? {
        let features = u64::from(input.arbitrary::<u16>()?);
        let version_1 = 1 << 32;
        stage.activate_wrongly(features | version_1, input.int_in_range(0..=4)?);
    }
    stage.activate(features(input)?);
    let persistent = stage.fixture.vpmu.persistent();
    stage.events = persistent.into_iter().map(|event| event.id).collect();
    Ok(())
}
