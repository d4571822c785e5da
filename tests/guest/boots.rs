//! `guest-tests boots` runs on the lab's KVM host. This project's VMM, with and without its device, and QEMU take turns
//! booting the same kernel and init. For each, the program prints the time to the init's first line, the number of
//! exits up to that line, and the memory that the VMM uses in addition to the guest's memory.

use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStdout, Command, ExitCode, Stdio};
use std::time::Instant;

use guest_tests::figures;

use crate::ensure::{ensure, ensure_eq};
use crate::{Fallible, Outcome};

/// The init's only line.
const MARK: &str = "@init";
const INITRAMFS: &str = "/tmp/small-initramfs";
const MEMORY_MIB: u64 = 256;
const CMDLINE: &str = "console=ttyS0 quiet nokaslr mitigations=off reboot=t panic=-1 \
    random.trust_cpu=on cryptomgr.notests";
/// The file that contains the number of exits of all guests on this host.
const EXITS: &str = "/sys/kernel/debug/kvm/exits";
/// A VMM to boot. The fields are its name in the figures, its program, the arguments before the kernel, and the option
/// for the kernel's command line.
struct Vmm {
    subject: &'static str,
    program: &'static str,
    arguments: &'static [&'static str],
    append: &'static str,
}

const VMMS: [Vmm; 3] = [
    Vmm {
        subject: "vmm",
        program: "vmm",
        arguments: &["run", "--vcpus", "1", "--memory", "256", "--initramfs", INITRAMFS],
        append: "--cmdline",
    },
    Vmm {
        subject: "vmm-without",
        program: "vmm",
        arguments: &["run", "--vcpus", "1", "--memory", "256", "--initramfs", INITRAMFS, "--no-vpmu"],
        append: "--cmdline",
    },
    // QEMU's manual recommends these options for the fastest boot. KVM provides the timer and the clock.
    Vmm {
        subject: "qemu-microvm",
        program: "qemu-system-x86_64",
        arguments: &[
            "-L",
            "/firmware",
            "-M",
            "microvm,accel=kvm,x-option-roms=off,pit=off,pic=off,rtc=off,isa-serial=on",
            "-cpu",
            "host",
            "-smp",
            "1",
            "-m",
            "256",
            "-nodefaults",
            "-no-user-config",
            "-display",
            "none",
            "-serial",
            "stdio",
            "-no-reboot",
            "-initrd",
            INITRAMFS,
        ],
        append: "-append",
    },
];

impl Vmm {
    fn start(&self) -> Fallible<Child> {
        let kernel = if self.append.starts_with("--") { "--kernel" } else { "-kernel" };
        let child = Command::new(self.program)
            .args(self.arguments)
            .args([kernel, "/guest/kernel", self.append, CMDLINE])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn();
        child.map_err(|error| format!("{}: {error}", self.program).into())
    }

    /// Boots a guest until its init prints a line.
    fn boot(&self) -> Fallible<Boot> {
        let (before, began) = (exits()?, Instant::now());
        let mut child = self.start()?;
        let output = child.stdout.take().ok_or("no output")?;
        let booted = until_init(output).and_then(|_console| {
            let time = u64::try_from(began.elapsed().as_nanos())?;
            let exits = exits()? - before;
            let memory = memory_besides_guest(child.id())?;
            Ok(Boot { time, exits, memory })
        });
        end(&mut child)?;
        booted.map_err(|error| format!("{}: {error}", self.subject).into())
    }
}

/// A boot up to the init's line.
struct Boot {
    /// In nanoseconds.
    time: u64,
    /// Exits of the guest.
    exits: u64,
    /// In bytes, without the guest's memory.
    memory: u64,
}

/// Reads the console up to the init's line. The console stays open until the result is dropped.
fn until_init(console: ChildStdout) -> Fallible<BufReader<ChildStdout>> {
    let mut console = BufReader::new(console);
    let mut output = Vec::new();
    loop {
        let begin = output.len();
        if console.read_until(b'\n', &mut output)? == 0 {
            return Err(format!("no init:\n{}", String::from_utf8_lossy(&output)).into());
        }
        if String::from_utf8_lossy(&output[begin..]).contains(MARK) {
            return Ok(console);
        }
    }
}

/// Kills the process that runs the guest. A parent that waits for it ends after it, so that the exits of this guest are no
/// longer counted when this function returns.
fn end(process: &mut Child) -> Outcome {
    match child_of(process.id())? {
        Some(child) => {
            let status = Command::new("kill").args(["-KILL", &child.to_string()]).status()?;
            ensure!(status.success(), "kill: {status}");
        }
        None => process.kill()?,
    }
    process.wait()?;
    Ok(())
}

fn child_of(process: u32) -> Fallible<Option<u32>> {
    let children = fs::read_to_string(format!("/proc/{process}/task/{process}/children"))?;
    Ok(children.split_ascii_whitespace().next().map(str::parse).transpose()?)
}

fn exits() -> Fallible<u64> {
    let text = fs::read_to_string(EXITS).map_err(|error| format!("{EXITS}: {error}"))?;
    Ok(text.trim().parse()?)
}

/// Returns the memory of a VMM without the guest's memory: what is resident of the process that runs the guest, which is
/// `process` or its child. A parent that waits for the child adds the pages that it does not share.
fn memory_besides_guest(process: u32) -> Fallible<u64> {
    match child_of(process)? {
        None => resident_besides_guest(process),
        Some(child) => Ok(resident_besides_guest(child)? + unshared(process)?),
    }
}

/// Returns the pages of a process that no other process uses.
fn unshared(process: u32) -> Fallible<u64> {
    let sums = fs::read_to_string(format!("/proc/{process}/smaps_rollup"))?;
    let mut all = 0;
    for line in sums.lines().filter(|line| line.starts_with("Private_")) {
        let kib = line.split_ascii_whitespace().nth(1).ok_or("no size")?;
        all += kib.parse::<u64>()? << 10;
    }
    Ok(all)
}

/// Returns the process's resident memory without the guest's memory. The guest's memory is the only mapping of exactly
/// [`MEMORY_MIB`] MiB.
fn resident_besides_guest(process: u32) -> Fallible<u64> {
    let maps = fs::read_to_string(format!("/proc/{process}/smaps"))?;
    let (mut all, mut guests, mut is_guests) = (0, 0, false);
    for line in maps.lines() {
        let mut words = line.split_ascii_whitespace();
        match (words.next(), words.next().and_then(|kib| kib.parse::<u64>().ok())) {
            (Some("Size:"), Some(kib)) => {
                is_guests = kib == MEMORY_MIB << 10;
                guests += u32::from(is_guests);
            }
            (Some("Rss:"), Some(kib)) if !is_guests => all += kib << 10,
            _ => {}
        }
    }
    ensure_eq!(guests, 1, "mappings of {MEMORY_MIB} MiB");
    Ok(all)
}

/// Packs an initramfs with busybox and with an init that prints [`MARK`]. Also mounts debugfs on this host, so that
/// [`EXITS`] can be read.
fn pack() -> Outcome {
    const SCRIPT: &str = "set -e
mkdir -p /tmp/small/bin
cp /bin/busybox /tmp/small/bin/
printf '#!/bin/busybox sh\\n/bin/busybox echo @init\\n/bin/busybox sleep 1000\\n' > /tmp/small/init
chmod 755 /tmp/small/init
cd /tmp/small
find . | cpio -o -H newc > /tmp/small-initramfs
mount -t debugfs debugfs /sys/kernel/debug";
    let status = Command::new("sh").args(["-c", SCRIPT]).status()?;
    ensure!(status.success(), "packing the initramfs: {status}");
    Ok(())
}

/// Returns the median, the minimum and the maximum of an odd number of values.
fn spread(mut values: Vec<u64>) -> Option<[u64; 3]> {
    values.sort_unstable();
    Some([*values.get(values.len() / 2)?, *values.first()?, *values.last()?])
}

fn measure_all(rounds: usize) -> Outcome {
    pack()?;
    let mut boots: [Vec<Boot>; 3] = [const { Vec::new() }; 3];
    // The first boot of each VMM only warms up caches, so it is not measured.
    for round in 0..=rounds {
        for (vmm, boots) in VMMS.iter().zip(&mut boots) {
            let boot = vmm.boot()?;
            if round > 0 {
                boots.push(boot);
            }
        }
    }
    for (vmm, boots) in VMMS.iter().zip(&boots) {
        let of = |quantity: fn(&Boot) -> u64| spread(boots.iter().map(quantity).collect()).ok_or("no rounds");
        let (time, exits, memory) = (of(|it| it.time)?, of(|it| it.exits)?, of(|it| it.memory)?);
        let mut figures = Vec::new();
        figures.extend(["time", "time-least", "time-most"].into_iter().zip(time));
        figures.extend(["exits", "exits-least", "exits-most"].into_iter().zip(exits));
        figures.extend(["memory", "memory-least", "memory-most"].into_iter().zip(memory));
        println!("{}", figures::line(vmm.subject, &figures));
    }
    Ok(())
}

/// `guest-tests boots ROUNDS`.
pub(crate) fn measure(rounds: &str) -> ExitCode {
    let measured = rounds.parse().map_err(Into::into).and_then(measure_all);
    match measured {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
