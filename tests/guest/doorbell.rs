//! Marks that a program makes with a single store to the doorbell's page, which is mapped into the program.

use crate::ensure::{ensure, ensure_eq};
use crate::fields::{self, ADDR, TIME};
use crate::pages::{Pages, READ_WRITE};
use crate::persisting::values;
use crate::raw::{Device, Doorbell, EXIT_MMIO, How, KIND_EXITS, KIND_MARK, PAGE, refused, silent};
use crate::{Outcome, cpu, os};

const GROUP: &str = "trigger";

const VALUE: u32 = 80;

#[apply(guest_test)]
fn store_to_the_doorbell_is_a_mark() -> Outcome {
    let device = Device::open()?;
    let bell = Doorbell::map(&device)?;
    let event = device.start(&device.attr(KIND_MARK, VALUE.into()), How::OWN)?;
    for round in 0..40 {
        cpu::pin(round % 2)?;
        bell.place(VALUE, 5);
        bell.mark(VALUE + 1);
    }
    ensure_eq!(event.count()?, 200, "marks by stores on two CPUs");
    // Counts the marks of each task on this CPU.
    cpu::pin(1)?;
    let all = device.start(&device.attr(KIND_MARK, VALUE.into()), How::on_cpu(1))?;
    // The mapping remains after its file is closed, and a child inherits it.
    drop(device);
    bell.mark(VALUE);
    ensure_eq!(event.count()?, 201, "marks, the last one after the file was closed");
    let code = os::forked(|| {
        bell.mark(VALUE);
        0
    })?;
    ensure_eq!(code, 0, "exit code of a child that places a mark");
    ensure_eq!(all.count()?, 2, "marks with the child's");
    ensure_eq!(event.count()?, 201, "marks without the child's");
    Ok(())
}

#[apply(guest_test)]
fn mark_costs_one_exit() -> Outcome {
    let device = Device::open()?;
    cpu::pin(1)?;
    cpu::keep()?;
    let bell = Doorbell::map(&device)?;
    let exits = device.start(&device.attr(KIND_EXITS, EXIT_MMIO), How::on_cpu(1))?;
    let page = Pages::map(&exits, 0, READ_WRITE)?;
    let before = page.snapshot().count;
    bell.place(VALUE, 500);
    ensure_eq!(page.snapshot().count - before, 500, "exits of 500 marks");
    Ok(())
}

#[apply(guest_test)]
fn mark_has_its_value() -> Outcome {
    let device = Device::open()?;
    cpu::pin(1)?;
    let bell = Doorbell::map(&device)?;
    let attr = silent(device.any_marks(1, TIME | ADDR));
    let event = device.start(&attr, How::on_cpu(1))?;
    let mut ring = Pages::map(&event, 1, READ_WRITE)?;
    let placed = [0, 1, 7, 0x7fff_ffff, 0x8000_0000, u32::MAX];
    for value in placed {
        bell.mark(value);
        device.mark(value.into())?;
    }
    let expected: Vec<u64> = placed.iter().flat_map(|&v| [u64::from(v); 2]).collect();
    ensure_eq!(values(&ring.take()?, &attr)?, expected, "the values in the samples of all marks");
    // Samples contain the mark's value even if the event counts marks of only one value. Samples of other kinds of
    // events contain zero.
    let attr = silent(device.marks(VALUE.into(), 2, ADDR));
    let event = device.start(&attr, How::on_cpu(1))?;
    let mut ring = Pages::map(&event, 1, READ_WRITE)?;
    bell.place(VALUE, 4);
    ensure_eq!(values(&ring.take()?, &attr)?, [u64::from(VALUE); 2], "the values in the samples of one value");
    let exits = device.attr(KIND_EXITS, EXIT_MMIO);
    let attr = silent(crate::raw::sampling(exits, 1, ADDR));
    let event = device.start(&attr, How::OWN)?;
    let mut ring = Pages::map(&event, 1, READ_WRITE)?;
    bell.mark(VALUE);
    event.disable(0)?;
    let (samples, _) = fields::samples(&ring.take()?, &attr)?;
    ensure!(!samples.is_empty(), "no exit was sampled");
    ensure!(samples.iter().all(|sample| sample.addr == Some(0)), "a sample of an exit has an address: {samples:?}");
    Ok(())
}

#[apply(guest_test)]
fn doorbell_is_one_page() -> Outcome {
    let device = Device::open()?;
    let write = libc::PROT_READ | libc::PROT_WRITE;
    let map = |bytes, protection, flags, offset| refused(Doorbell::map_raw(&device, bytes, protection, flags, offset));
    ensure_eq!(map(PAGE, write, libc::MAP_SHARED, 0), None, "a valid map");
    ensure_eq!(map(PAGE, libc::PROT_WRITE, libc::MAP_SHARED, 0), None, "a write-only map");
    let page = i64::try_from(PAGE)?;
    for (bytes, flags, offset, what) in [
        (2 * PAGE, libc::MAP_SHARED, 0, "two pages"),
        (PAGE, libc::MAP_SHARED, page, "an offset of a page"),
        (PAGE, libc::MAP_PRIVATE, 0, "a private map"),
    ] {
        ensure_eq!(map(bytes, write, flags, offset), Some(libc::EINVAL), "{what}");
    }
    let runs = map(PAGE, write | libc::PROT_EXEC, libc::MAP_SHARED, 0);
    ensure!(runs.is_some(), "an executable map was accepted");
    Ok(())
}

/// VPMU-D-4-2.
#[apply(guest_test)]
fn doorbell_reads_as_zero() -> Outcome {
    let device = Device::open()?;
    let bell = Doorbell::map(&device)?;
    let event = device.start(&device.attr(KIND_MARK, VALUE.into()), How::OWN)?;
    bell.mark(VALUE);
    for _ in 0..10 {
        ensure_eq!(bell.load(), 0, "the value read");
    }
    ensure_eq!(event.count()?, 1, "marks after the doorbell was read and one mark placed");
    Ok(())
}
