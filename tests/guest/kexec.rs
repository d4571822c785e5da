//! Tests a second kernel, which the first kernel starts with kexec, without a reset of the machine. After the start,
//! the device must not write to the first kernel's memory, but must keep events whose rings are in the host's memory.
//!
//! The init programs of both kernels run the same command. Only in the second kernel does the command find the
//! persistent event.

use std::ffi::CString;
use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::process::Command;

use crate::ensure::{ensure, ensure_eq};
use crate::fields::TIME;
use crate::pages::{DATA_HEAD, Pages, READ, READ_WRITE};
use crate::persisting::{persistent, sequence, values};
use crate::raw::{Device, Event, How, KIND_SOFTWARE, PAGE, SW_CPU_CLOCK, sampling, silent};
use crate::{Fallible, Outcome, cpu, os};

const GROUP: &str = "kexec";

const NAME: &str = "across";
const KERNEL: &str = "/boot/kernel";
const INITRAMFS: &str = "/tmp/initramfs";

#[apply(guest_test)]
fn second_kernel_has_its_memory_and_the_persistent_events() -> Outcome {
    let device = Device::open()?;
    cpu::pin(0)?;
    let listed = device.persistent()?;
    match listed.iter().find(|entry| entry.name() == NAME) {
        None => Err(first(&device)?.into()),
        Some(entry) => second(&device, entry.id),
    }
}

/// Returns the guest-physical address of a page of a ring.
fn frame(ring: &Pages, number: usize) -> Fallible<u64> {
    const IN_MEMORY: u64 = 1 << 63;
    const FRAME: u64 = (1 << 55) - 1;
    let mut entry = [0; 8];
    let index = u64::try_from(ring.address().addr() / PAGE + number)?;
    File::open("/proc/self/pagemap")?.read_exact_at(&mut entry, index * 8)?;
    let entry = u64::from_le_bytes(entry);
    ensure!(entry & IN_MEMORY != 0, "a page is not in memory: {entry:#x}");
    Ok((entry & FRAME) * u64::try_from(PAGE)?)
}

/// Lower limit of the addresses at which kexec places the second kernel. kexec fills memory from the top.
fn lowest_of_second_kernel() -> Fallible<u64> {
    /// Offset of `init_size` in the boot protocol's header. This field is the number of bytes of memory that the kernel
    /// needs before it can read the memory map.
    const INIT_SIZE: u64 = 0x260;
    /// Room for the boot parameters, for the code that starts the kernel, and for alignment.
    const REST: u64 = 16 << 20;
    let mut size = [0; 4];
    File::open(KERNEL)?.read_exact_at(&mut size, INIT_SIZE)?;
    let taken = u64::from(u32::from_le_bytes(size)) + fs::metadata(INITRAMFS)?.len() + REST;
    let map = fs::read_to_string("/proc/iomem")?;
    let end = map
        .lines()
        .filter(|line| line.ends_with(": System RAM"))
        .filter_map(|line| line.split([' ', '-']).nth(1))
        .map(|end| u64::from_str_radix(end, 16))
        .next_back()
        .ok_or("no memory in /proc/iomem")??;
    end.checked_sub(taken).ok_or_else(|| format!("memory ends at {end:#x}, the kernel needs {taken:#x} bytes").into())
}

/// Bytes of memory that are still available.
fn available_memory() -> Fallible<usize> {
    let lines = fs::read_to_string("/proc/meminfo")?;
    let line = lines.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB"));
    Ok(kib.ok_or("no MemAvailable")?.parse::<usize>()? << 10)
}

/// Returns a sampling clock with a ring below `limit`, and the addresses of the ring's pages.
fn low_clock(device: &Device, limit: u64) -> Fallible<(Event, Pages, [u64; 2])> {
    const STEP: usize = 4 << 20;
    // Number of steps in the 64 MiB that must stay free for loading the second kernel.
    const LEFT: usize = 16;
    let steps = (available_memory()? / STEP).saturating_sub(LEFT);
    let mut attr = sampling(device.attr(KIND_SOFTWARE, SW_CPU_CLOCK), 1_000_000, TIME);
    attr.set_write_backward(1);
    // Keeps the rings that are not below the limit, and uses up free pages, so that the next ring is allocated lower.
    let mut high = Vec::new();
    // Full pipes use up kernel memory. The kernel allocates rings from the same pool of pages. The memory of programs
    // comes from another pool.
    let mut taken = Vec::new();
    loop {
        let clock = device.start(&silent(attr), How::on_cpu(0))?;
        let ring = Pages::map(&clock, 1, READ)?;
        while ring.head() == 0 {}
        let pages = [frame(&ring, 0)?, frame(&ring, 1)?];
        if pages.iter().all(|&page| page < limit) {
            return Ok((clock, ring, pages));
        }
        clock.disable(0)?;
        high.push((clock, ring));
        taken.push(os::full_pipe(STEP)?);
        ensure!(taken.len() < steps, "all rings lie above {limit:#x}, the last at {pages:#x?}");
    }
}

/// Starts the second kernel, whose command line reserves the ring's pages. Returns only if the start fails, with the
/// error.
fn first(device: &Device) -> Fallible<io::Error> {
    let (kept, _) = persistent(device, &sequence(device), 0, NAME)?;
    let _window = Pages::map(&kept, 1, READ_WRITE)?;
    device.place(7, 20)?;

    let pack = "cd / && find . -xdev ! -path ./boot/kernel | cpio -o -H newc > /tmp/initramfs";
    ensure!(Command::new("sh").args(["-c", pack]).status()?.success(), "the initramfs was not packed");
    let (clock, _ring, pages) = low_clock(device, lowest_of_second_kernel()?)?;
    // Before another kernel starts, perf core stops its own events, but it does not stop a detached event.
    clock.detach("clock")?;
    let command_line = format!(
        "{} iomem=relaxed memmap=4K${:#x} memmap=4K${:#x}",
        fs::read_to_string("/proc/cmdline")?.trim(),
        pages[0],
        pages[1]
    );
    os::load_kernel(File::open(KERNEL)?.as_fd(), File::open(INITRAMFS)?.as_fd(), &CString::new(command_line)?)?;
    Ok(os::start_kernel())
}

/// Returns the addresses of the first kernel's ring, from the command line.
fn ring_pages() -> Fallible<[u64; 2]> {
    let line = fs::read_to_string("/proc/cmdline")?;
    let pages = line
        .split_whitespace()
        .filter_map(|word| word.strip_prefix("memmap=4K$0x"))
        .map(|digits| u64::from_str_radix(digits, 16))
        .collect::<Result<Vec<_>, _>>()?;
    Ok(pages.as_slice().try_into()?)
}

fn second(device: &Device, id: u64) -> Outcome {
    // Returns the time at which this kernel started, according to the clock that the records use.
    let started = device.time_of(cpu::tsc()) - os::uptime()?;
    let memory = File::open("/dev/mem")?;
    let word = |address| -> io::Result<u64> {
        let mut bytes = [0; 8];
        memory.read_exact_at(&mut bytes, address)?;
        Ok(u64::from_le_bytes(bytes))
    };
    let [metadata, data] = ring_pages()?;
    let head = word(metadata + u64::try_from(DATA_HEAD)?)?;
    ensure!(head != 0, "the first kernel's clock took no sample");
    // The newest record is at the head. Its time follows its header of 8 bytes.
    let newest = word(data + (head + 8) % u64::try_from(PAGE)?)?;
    ensure!(newest != 0, "the newest record is empty");
    ensure!(newest < started, "a sample was written {} ns after this kernel started", newest - started);

    let listed = device.persistent()?;
    ensure_eq!(listed.len(), 1, "persistent events in the second kernel");
    let kept = device.reopen(id, 0)?;
    ensure_eq!(kept.count()?, 20, "marks of the first kernel");
    device.place(8, 5)?;
    ensure_eq!(kept.count()?, 25, "marks of both kernels");
    let mut ring = Pages::map(&kept, 1, READ_WRITE)?;
    let records = ring.take()?;
    let expected: Vec<u64> = [[7; 20].as_slice(), &[8; 5]].concat();
    ensure_eq!(values(&records, &sequence(device))?, expected, "samples of both kernels");
    kept.attach()?;
    Ok(())
}
