//! Tests the fields of a sample, each field alone and all fields in perf's order. The tests compare the fields with
//! known values.
#![expect(clippy::cast_possible_truncation, reason = "splits words into fields; usize has 64 bits")]

use std::os::fd::AsRawFd;

use perf_event_open_sys::bindings::perf_event_attr;

use crate::arch::Known as Register;
use crate::ensure::{ensure, ensure_eq};
use crate::fields::{
    self, ADDR, ALL, CALLCHAIN, CONTEXT_USER, CPU, ID, IDENTIFIER, IP, LOST, MISC_MODE, MISC_USER, PERIOD, READ,
    REGS_INTR, REGS_USER, Reading, Regs, SAMPLE, STACK_USER, STREAM_ID, Sample, TID, TIME, Trailer, Value,
};
use crate::known_code::{self, REGS, STACK};
use crate::pages::{Pages, READ_WRITE};
use crate::raw::{Device, FORMAT_ID, How, PAGE, refused, sampling, silent};
use crate::{Fallible, Outcome, cpu};

const GROUP: &str = "output";

const VALUE: u64 = 60;
/// Number of user stack bytes in a sample. These are the words that the stubs leave on top of the stack.
const STACK_BYTES: u32 = 8 * STACK.len() as u32;

/// Samples every port write of this thread.
fn writes(device: &Device, sample_type: u64) -> perf_event_attr {
    let mut attr = silent(sampling(device.port_exits(), 1, sample_type));
    attr.read_format = FORMAT_ID;
    if sample_type & REGS_USER != 0 {
        attr.sample_regs_user = REGS;
    }
    if sample_type & REGS_INTR != 0 {
        attr.sample_regs_intr = REGS;
    }
    if sample_type & STACK_USER != 0 {
        attr.sample_stack_user = STACK_BYTES;
    }
    attr
}

/// Makes `times` writes with known values. Returns the samples of these writes and the values that they must have.
fn known_writes(device: &Device, attr: &perf_event_attr, times: u64) -> Fallible<(Vec<Sample>, Known)> {
    cpu::pin(1)?;
    cpu::allow_ports()?;
    let event = device.open_event(attr, How::OWN)?;
    let mut ring = Pages::map(&event, 4, READ_WRITE)?;
    event.enable(0)?;
    let mut known = Known { id: event.id()?, since: device.time_of(cpu::tsc()), ..Known::default() };
    for _ in 0..times {
        known.sp = known_code::out_known();
    }
    known.until = device.time_of(cpu::tsc());
    event.disable(0)?;
    let (samples, lost) = fields::samples(&ring.take()?, attr)?;
    ensure_eq!((samples.len() as u64, lost), (times, 0), "samples and losses");
    Ok((samples, known))
}

/// The known values of a run of writes.
#[derive(Debug, Default)]
struct Known {
    id: u64,
    sp: u64,
    since: u64,
    until: u64,
}

/// Returns whether a sample of the write can have `ip`. Some hosts report the address of the write, and others report
/// the address of the next instruction.
fn is_write(ip: u64) -> bool {
    let at = known_code::out_known_ip();
    ip == at || ip == at + known_code::WRITE_LEN
}

/// Compares the value of register `number` with its `known` value.
fn ensure_known(number: usize, value: u64, known: Register) -> Outcome {
    match known {
        Register::Is(is) => ensure_eq!(value, is, "register {number}"),
        Register::Has(bits) => ensure_eq!(value & bits, bits, "register {number}, {value:#x}"),
        Register::Write => ensure_eq!(value, known_code::out_known_ip(), "register {number}"),
        Register::Unknown => {}
    }
    Ok(())
}

impl Known {
    /// Checks that sample `number`, counted from one, has exactly the fields of `asked`, with the right values.
    fn check(&self, sample: &Sample, number: u64, asked: u64) -> Outcome {
        let had = |bit: u64, has: bool| -> Outcome {
            ensure_eq!(has, asked & bit != 0, "whether the sample has field {bit:#x}");
            Ok(())
        };
        had(IDENTIFIER, sample.identifier.is_some())?;
        had(TIME, sample.time.is_some())?;
        had(CALLCHAIN, sample.chain.is_some())?;
        had(REGS_USER, sample.regs_user.is_some())?;
        had(REGS_INTR, sample.regs_intr.is_some())?;
        ensure_eq!(sample.misc & MISC_MODE, MISC_USER, "the mode");
        for (name, bit, reported, is) in [
            ("IDENTIFIER", IDENTIFIER, sample.identifier, self.id),
            ("ADDR, which is zero", ADDR, sample.addr, 0),
            ("ID", ID, sample.id, self.id),
            ("STREAM_ID", STREAM_ID, sample.stream_id, self.id),
            ("PERIOD", PERIOD, sample.period, 1),
        ] {
            ensure_eq!(reported, (asked & bit != 0).then_some(is), "{name}");
        }
        let who = (std::process::id(), cpu::thread_id());
        ensure_eq!(sample.pid_tid, (asked & TID != 0).then_some(who), "TID");
        ensure_eq!(sample.cpu, (asked & CPU != 0).then_some(1), "CPU");
        had(IP, sample.ip.is_some())?;
        ensure!(sample.ip.is_none_or(is_write), "IP {:#x?} is not that of the write", sample.ip);
        if let Some(time) = sample.time {
            let known = self.since..=self.until;
            ensure!(known.contains(&time), "TIME {time} is not in {known:?}");
        }
        let read =
            Reading { values: vec![Value { value: number, id: Some(self.id), lost: None }], ..Reading::default() };
        ensure_eq!(sample.read.as_ref(), (asked & READ != 0).then_some(&read), "READ");
        if let Some(chain) = &sample.chain {
            let begins = chain.len() >= 2 && chain[0] == CONTEXT_USER && is_write(chain[1]);
            ensure!(begins, "CALLCHAIN does not begin at the write: {chain:#x?}");
        }
        for regs in [&sample.regs_user, &sample.regs_intr].into_iter().flatten() {
            self.check_registers(regs)?;
        }
        let stack = (STACK.to_vec(), STACK_BYTES.into());
        let asked_stack = (asked & STACK_USER != 0).then_some(&stack);
        ensure_eq!(sample.stack.as_ref(), asked_stack, "STACK_USER");
        Ok(())
    }

    fn check_registers(&self, regs: &Regs) -> Outcome {
        ensure_eq!(regs.abi, 2, "the registers' abi");
        let numbers = (0..known_code::NUMBERS).filter(|number| REGS & 1 << number != 0);
        let values = regs.values.iter().copied();
        let mut count = 0;
        for (number, value) in numbers.zip(values) {
            match known_code::at_write(number, self.sp) {
                Register::Write => {
                    ensure!(is_write(value), "the instruction pointer {value:#x} is not that of the write")
                }
                register => ensure_known(number, value, register)?,
            }
            count += 1;
        }
        ensure_eq!(count, REGS.count_ones(), "registers compared");
        ensure_eq!(regs.values.len(), count as usize, "register values");
        Ok(())
    }
}

#[apply(guest_test)]
fn each_field_alone_is_true() -> Outcome {
    let device = Device::open()?;
    for field in ALL {
        let (samples, known) = known_writes(&device, &writes(&device, field), 3)?;
        for (number, sample) in (1..).zip(&samples) {
            let checked = known.check(sample, number, field);
            checked.map_err(|e| format!("field {field:#x} alone: {e}"))?;
        }
    }
    // Without any fields, a sample consists only of its header.
    let attr = writes(&device, 0);
    let (samples, known) = known_writes(&device, &attr, 3)?;
    samples.iter().try_for_each(|sample| known.check(sample, 0, 0))
}

/// VPMU-D-6.6-4.
#[apply(guest_test)]
fn all_fields_together_are_true() -> Outcome {
    let device = Device::open()?;
    let all = ALL.iter().fold(0, |all, field| all | field);
    let (samples, known) = known_writes(&device, &writes(&device, all), 10)?;
    for (number, sample) in (1..).zip(&samples) {
        known.check(sample, number, all)?;
    }
    // The offset of a field depends on the fields before it. So for each field, the test also requests all fields
    // except that one.
    for left_out in ALL {
        let asked = all & !left_out;
        let (samples, known) = known_writes(&device, &writes(&device, asked), 2)?;
        for (number, sample) in (1..).zip(&samples) {
            let checked = known.check(sample, number, asked);
            checked.map_err(|e| format!("all but {left_out:#x}: {e}"))?;
        }
    }
    Ok(())
}

#[apply(guest_test)]
fn registers_of_a_user_are_true() -> Outcome {
    let device = Device::open()?;
    for number in (0..known_code::NUMBERS).filter(|number| REGS & 1 << number != 0) {
        let mut attr = writes(&device, REGS_USER | REGS_INTR);
        attr.sample_regs_user = 1 << number;
        attr.sample_regs_intr = REGS & !(1 << number);
        let (samples, known) = known_writes(&device, &attr, 1)?;
        let user = samples[0].regs_user.clone().unwrap_or_default();
        let intr = samples[0].regs_intr.clone().unwrap_or_default();
        // The two masks together cover all registers.
        let mut all = intr.values.clone();
        let place = (REGS & ((1 << number) - 1)).count_ones() as usize;
        ensure_eq!(user.values.len(), 1, "number of registers for mask {:#x}", 1 << number);
        ensure!(place <= all.len(), "only {} registers for a mask of all but one", all.len());
        all.insert(place, user.values[0]);
        known.check_registers(&Regs { abi: 2, values: all })?;
    }
    Ok(())
}

#[apply(guest_test)]
fn registers_at_a_system_call_are_its_users() -> Outcome {
    let device = Device::open()?;
    let mut attr = silent(device.marks(VALUE, 1, REGS_USER | REGS_INTR | STACK_USER | IP));
    attr.sample_regs_user = REGS;
    attr.sample_regs_intr = REGS;
    attr.sample_stack_user = STACK_BYTES;
    let event = device.start(&attr, How::OWN)?;
    let mut ring = Pages::map(&event, 1, READ_WRITE)?;
    let sp = known_code::mark_known(device.as_raw_fd(), VALUE);
    let (samples, lost) = fields::samples(&ring.take()?, &attr)?;
    ensure_eq!((samples.len(), lost), (1, 0), "samples and losses");
    let sample = &samples[0];
    ensure!(sample.ip.is_some_and(|ip| ip >> 63 == 1), "the IP of the mark is not in the kernel");

    let user = sample.regs_user.clone().unwrap_or_default();
    ensure_eq!((user.abi, user.values.len()), (2, REGS.count_ones() as usize), "abi and number of registers");
    let numbers = (0..known_code::NUMBERS).filter(|number| REGS & 1 << number != 0);
    for (number, value) in numbers.clone().zip(user.values) {
        let known = known_code::in_call(number, sp, device.as_raw_fd(), VALUE);
        ensure_known(number, value, known)?;
    }
    let stack = (STACK.to_vec(), u64::from(STACK_BYTES));
    ensure_eq!(sample.stack, Some(stack), "the user's stack");

    let intr = sample.regs_intr.clone().unwrap_or_default();
    ensure_eq!(
        (intr.abi, intr.values.len()),
        (2, REGS.count_ones() as usize),
        "abi and number of registers at the exit"
    );
    ensure_eq!(Some(intr.values[known_code::IP_PLACE]), sample.ip, "the IP among the registers at the exit");
    for (number, &value) in numbers.zip(&intr.values) {
        ensure_known(number, value, known_code::in_kernel(number))?;
    }
    Ok(())
}

#[apply(guest_test)]
fn stack_is_copied_unchanged() -> Outcome {
    let device = Device::open()?;
    for bytes in [8, 32, 256, 4096, 32 << 10] {
        let mut attr = writes(&device, STACK_USER);
        attr.sample_stack_user = bytes;
        cpu::allow_ports()?;
        let event = device.start(&attr, How::OWN)?;
        let mut ring = Pages::map(&event, 16, READ_WRITE)?;
        known_code::out_known();
        let (samples, lost) = fields::samples(&ring.take()?, &attr)?;
        ensure_eq!((samples.len(), lost), (1, 0), "samples and losses with {bytes} bytes of stack");
        let (words, copied) = samples[0].stack.clone().unwrap_or_default();
        ensure_eq!(words.len(), bytes as usize / 8, "words for {bytes} bytes of stack");
        ensure!(copied <= bytes.into() && copied > 0, "{copied} bytes copied of {bytes}");
        let top = STACK.len().min(words.len());
        ensure_eq!(words[..top], STACK[..top], "the top of the stack");
    }
    // The main thread's stack ends less than 60 KiB above the stack pointer. Bytes beyond its end are not copied.
    let size = 60 << 10;
    let mut attr = writes(&device, STACK_USER);
    attr.sample_stack_user = size;
    let event = device.start(&attr, How::OWN)?;
    let mut ring = Pages::map(&event, 32, READ_WRITE)?;
    known_code::out_known();
    let (samples, _) = fields::samples(&ring.take()?, &attr)?;
    let (words, copied) = samples[0].stack.clone().unwrap_or_default();
    ensure_eq!(words.len() as u64 * 8, u64::from(size), "bytes of stack in the sample");
    ensure!(copied < size.into(), "{copied} bytes copied, but the stack is shorter");
    let beyond = &words[copied as usize / 8..];
    ensure!(beyond.iter().all(|&word| word == 0), "bytes beyond the stack are not zero");
    Ok(())
}

#[apply(guest_test)]
fn other_records_name_their_task() -> Outcome {
    let device = Device::open()?;
    cpu::pin(1)?;
    let reported = TID | TIME | ID | STREAM_ID | CPU | IDENTIFIER;
    for fields_asked in [reported, reported & !TID, reported & !IDENTIFIER, TIME, ID | CPU, IP] {
        for all in [true, false] {
            let mut attr = silent(device.marks(VALUE, 1, fields_asked));
            attr.set_sample_id_all(all.into());
            let event = device.open_event(&attr, How::on_cpu(1))?;
            let mut ring = Pages::map(&event, 1, READ_WRITE)?;
            event.enable(0)?;
            let id = event.id()?;
            let since = device.time_of(cpu::tsc());
            let fit = PAGE as u64 / (8 + 8 * u64::from(fields_asked.count_ones()));
            device.place(VALUE, fit + 9)?;
            ring.take()?;
            device.mark(VALUE)?;
            let until = device.time_of(cpu::tsc());
            let records = ring.take()?;
            let kinds: Vec<u32> = records.iter().map(|record| record.kind).collect();
            ensure_eq!(kinds, [LOST, SAMPLE], "records after the loss");
            let (own, trailer) = fields::trailer(&records[0], 2, &attr)?;
            ensure_eq!(own, [id, 9], "the id of the event and the number of lost records");
            let asked = |bit| all && fields_asked & bit != 0;
            let who = (std::process::id(), cpu::thread_id());
            ensure!(
                trailer.time.is_none_or(|time| (since..=until).contains(&time)),
                "the loss's time {:?} is not between {since} and {until}",
                trailer.time
            );
            let expected = Trailer {
                pid_tid: asked(TID).then_some(who),
                time: asked(TIME).then_some(trailer.time.unwrap_or(0)),
                id: asked(ID).then_some(id),
                stream_id: asked(STREAM_ID).then_some(id),
                cpu: asked(CPU).then_some(1),
                identifier: asked(IDENTIFIER).then_some(id),
            };
            ensure_eq!(trailer, expected, "the trailer with fields {fields_asked:#x}, sample_id_all {all}");
            fields::sample(&records[1], &attr)?;
        }
    }
    Ok(())
}

#[apply(guest_test)]
fn other_fields_are_refused() -> Outcome {
    let device = Device::open()?;
    let allowed = ALL.iter().fold(0, |all, field| all | field);
    // In the kernel that the driver is built for, PERF_SAMPLE_MAX is 1 << 25: perf has no fields from bit 25 on.
    for bit in 0..64 {
        let field = 1_u64 << bit;
        if allowed & field != 0 {
            continue;
        }
        // perf itself refuses a branch stack, bit 11, without a kind of branches.
        let expected = if bit < 25 && bit != 11 { libc::EOPNOTSUPP } else { libc::EINVAL };
        for with in [0, IP | TID] {
            let attr = device.marks(VALUE, 1, field | with);
            let errno = refused(device.open_event(&attr, How::OWN));
            ensure_eq!(errno, Some(expected), "errno for field {field:#x} with {with:#x}");
        }
    }
    Ok(())
}

#[apply(guest_test)]
fn registers_and_stacks_that_cannot_be_are_refused() -> Outcome {
    let device = Device::open()?;
    let errno = |attr: &perf_event_attr| refused(device.open_event(attr, How::OWN));
    for (mask, expected) in known_code::refused() {
        let mut attr = device.marks(VALUE, 1, REGS_USER);
        attr.sample_regs_user = mask;
        ensure_eq!(errno(&attr), Some(expected), "errno for user registers {mask:#x}");
        let mut attr = device.marks(VALUE, 1, REGS_INTR);
        attr.sample_regs_intr = mask;
        ensure_eq!(errno(&attr), Some(expected), "errno for registers {mask:#x}");
    }
    for bytes in [1, 4, 12, 65_535, 65_536, u32::MAX] {
        let mut attr = device.marks(VALUE, 1, STACK_USER);
        attr.sample_stack_user = bytes;
        ensure_eq!(errno(&attr), Some(libc::EINVAL), "errno for {bytes} bytes of stack");
    }
    let mut attr = device.marks(VALUE, 1, CALLCHAIN);
    attr.sample_max_stack = 1025;
    ensure_eq!(errno(&attr), Some(libc::EOVERFLOW), "errno for a chain of 1025");
    attr.sample_max_stack = 127;
    ensure_eq!(errno(&attr), None, "errno for a chain of 127");
    Ok(())
}
