//! Several processes of the users `root` and `nobody` make random calls to the driver at the same time, in a kernel
//! that checks its allocations. Afterwards, the kernel must have logged no fault, and no event may be left on the
//! device.
//!
//! Each process makes the same calls for the same seed. How the calls of several processes interleave depends on the
//! scheduler.
#![expect(unsafe_code, reason = "calls with arguments that safe wrappers refuse")]
#![expect(clippy::cast_possible_truncation, clippy::cast_possible_wrap, reason = "arguments are made of random bits")]

use std::fs;
use std::io::{self, Write};
use std::mem;
use std::os::fd::AsRawFd;
use std::process::Command;
use std::ptr;
use std::slice;

use perf_event_open_sys::bindings::{self, perf_event_attr};
use vpmu_abi::{EXIT_IO, uapi};

use crate::ensure::{ensure, ensure_eq};
use crate::permissions::room;
use crate::raw::{
    Device, EXIT_MMIO, KIND_EXIT_TRACE, KIND_EXITS, KIND_MARK, KIND_SAMPLE_TRACE, KIND_SOFTWARE, KIND_TSC, MARK_ANY,
    PACE_EXITS, PAGE, SW_CPU_CLOCK, SW_TASK_CLOCK,
};
use crate::{Fallible, Outcome, cpu, kernel_log, os, persisting};

const GROUP: &str = "hammer";

const SEED: u64 = 0x5eed_0001;
const OPERATIONS: u64 = 600;
/// Number of processes. Half of them belong to root.
const PROCESSES: u64 = 6;
/// Maximum number of descriptors, and of maps, that a process keeps.
const KEPT: usize = 20;

/// The ioctls of `/dev/vpmu`. [`EVENT_CALLS`] has the ioctls of events and rings, [`PERF_CALLS`] the calls by
/// `VPMU_IOC_PERF`.
const DEVICE_CALLS: [u32; 8] = [
    uapi::IOC_INFO,
    uapi::IOC_RING,
    uapi::IOC_CATALOGUE,
    uapi::IOC_MARK,
    uapi::IOC_PERSISTENT,
    uapi::IOC_FLUSH,
    uapi::IOC_PERF,
    // A number that the driver does not have.
    uapi::IOC_MAGIC << 8 | 0xff,
];
const EVENT_CALLS: [u32; 14] = [
    bindings::ENABLE,
    bindings::DISABLE,
    bindings::REFRESH,
    bindings::RESET,
    bindings::PERIOD,
    bindings::SET_OUTPUT,
    bindings::SET_FILTER,
    bindings::ID,
    bindings::SET_BPF,
    bindings::PAUSE_OUTPUT,
    bindings::QUERY_BPF,
    bindings::MODIFY_ATTRIBUTES,
    uapi::IOC_FLUSH,
    uapi::IOC_WAKEUP,
];
const PERF_CALLS: [u32; 7] = [
    uapi::IOC_EVENT,
    uapi::IOC_FLUSH,
    uapi::IOC_DETACH,
    uapi::IOC_ATTACH,
    uapi::IOC_SET_STARTER,
    uapi::IOC_SET_STOPPER,
    uapi::IOC_WAKEUP,
];
/// Kinds and configs of events. Most of these events can be opened.
const KINDS: [(u64, u64); 9] = [
    (KIND_MARK, 1),
    (KIND_MARK, MARK_ANY),
    (KIND_TSC, 0),
    (KIND_EXITS, EXIT_IO),
    (KIND_EXITS, EXIT_MMIO),
    (KIND_EXIT_TRACE, EXIT_IO),
    (KIND_SAMPLE_TRACE, PACE_EXITS),
    (KIND_SOFTWARE, SW_CPU_CLOCK),
    (KIND_SOFTWARE, SW_TASK_CLOCK),
];
const SAMPLED: [u64; 6] = [0, 0b10, 0b1111, 1 << 4, 0x4_0000, 0xffff_ffff];

/// A pseudo-random sequence. Equal seeds result in equal sequences.
#[derive(Debug)]
struct Random(u64);

impl Random {
    fn new(seed: u64) -> Self {
        // This value is never zero. Seeds that are close to each other result in values that are far apart.
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, limit: u64) -> u64 {
        // The low bits have the shortest period.
        (self.next() >> 16) % limit
    }

    fn one_in(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }

    fn of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len() as u64) as usize]
    }
}

/// The state of a process that makes calls, with the descriptors and maps that these calls created.
#[derive(Debug)]
struct Hammer {
    random: Random,
    device: Device,
    /// A buffer that calls may read and write.
    scratch: Vec<u64>,
    fds: Vec<i32>,
    maps: Vec<(usize, usize)>,
    /// Whether the process may fork. A child must not.
    forks: bool,
    /// Numbers of descriptors and of maps that calls have created.
    opened: u64,
    mapped: u64,
}

impl Hammer {
    fn new(seed: u64) -> io::Result<Self> {
        Ok(Self {
            random: Random::new(seed),
            device: Device::open()?,
            scratch: vec![0; 512],
            fds: Vec::new(),
            maps: Vec::new(),
            forks: true,
            opened: 0,
            mapped: 0,
        })
    }

    /// Returns a descriptor. Mostly it belongs to an event. Sometimes it is -1, 0, the device's descriptor, or a
    /// descriptor that is not open.
    fn fd(&mut self) -> i32 {
        let device = self.device.as_raw_fd();
        match self.random.below(12) {
            0 => -1,
            1 => self.random.of(&[0, device, 999, i32::MAX]),
            _ if self.fds.is_empty() => -1,
            _ => {
                let fds = self.fds.clone();
                self.random.of(&fds)
            }
        }
    }

    /// Returns an address. Mostly it is the address of [`Self::scratch`], and sometimes an address that faults.
    fn address(&mut self) -> u64 {
        let scratch = self.scratch.as_ptr().expose_provenance() as u64;
        match self.random.below(8) {
            0 => self.random.of(&[0, 1, PAGE as u64, u64::MAX - 7, 0xffff_8880_0000_0000]),
            1 => scratch + self.random.below(64),
            _ => scratch,
        }
    }

    fn fill(&mut self) {
        for word in 0..32 {
            self.scratch[word] = match self.random.below(4) {
                0 => self.random.next(),
                1 => 0,
                _ => self.random.below(8),
            };
        }
    }

    fn attr(&mut self) -> perf_event_attr {
        let (kind, event) = self.random.of(&KINDS);
        let mut attr = self.device.attr(kind, event);
        attr.set_disabled(self.random.below(2));
        attr.set_inherit(self.random.below(2));
        attr.set_enable_on_exec(u64::from(self.random.one_in(4)));
        attr.set_exclude_kernel(u64::from(self.random.one_in(4)));
        attr.set_write_backward(u64::from(self.random.one_in(4)));
        attr.set_pinned(u64::from(self.random.one_in(8)));
        attr.read_format = self.random.below(32);
        if self.random.one_in(2) {
            attr.sample_type = self.random.of(&SAMPLED);
            attr.__bindgen_anon_1.sample_period = self.random.of(&[1, 1, 2, 100, 1_000_000]);
        }
        if self.random.one_in(8) {
            attr.type_ = self.random.of(&[0, 1, 3, 4, self.device.info.persistent_type, 77]);
            attr.config = self.random.below(64);
        }
        attr.aux_watermark = self.random.of(&[0, 0, 64, u32::MAX]);
        if self.random.one_in(10) {
            let bytes = mem::size_of::<perf_event_attr>() as u64;
            let (at, bit) = (8 + self.random.below(bytes - 8), self.random.below(8));
            let raw = (&raw mut attr).cast::<u8>();
            // SAFETY: the slice is exactly the attr, which consists of integers.
            let raw = unsafe { slice::from_raw_parts_mut(raw, bytes as usize) };
            raw[at as usize] ^= 1 << bit;
        }
        attr
    }

    fn open(&mut self) {
        let attr = self.attr();
        // SAFETY: the call takes no arguments.
        let parent = unsafe { libc::getppid() };
        let pid = self.random.of(&[0, 0, 0, -1, -1, parent, 1]);
        let cpu = match pid {
            -1 => self.random.of(&[0, 1, 1, -1, 77]),
            _ => self.random.of(&[-1, -1, -1, 0, 1]),
        };
        let group = if self.random.one_in(3) { self.fd() } else { -1 };
        let flags = self.random.of(&[0_u64, 0, 0, 0, 1, 2, 8, 1 << 40]);
        let mut attr = attr;
        if !self.random.one_in(5) {
            let engine = self.random.of(&[0, 0, 1, 2, 3]) << uapi::CONFIG1_ENGINE_SHIFT;
            let other = match self.random.below(12) {
                0 => uapi::CONFIG1_ENABLE_ON_STARTER,
                1 => uapi::CONFIG1_PERSISTENT,
                2 => 1 << 40,
                _ => 0,
            };
            attr.__bindgen_anon_3.config1 = uapi::CONFIG1_RING | engine | other;
        }
        // SAFETY: the kernel reads the attr, which is valid during the call.
        let fd = unsafe { libc::syscall(libc::SYS_perf_event_open, &raw const attr, pid, cpu, group, flags) } as i32;
        self.keep(fd);
        if fd >= 0 {
            // SAFETY: the call takes its argument by value.
            let ring = unsafe { libc::ioctl(self.device.as_raw_fd(), uapi::IOC_RING.into(), fd) };
            self.keep(ring);
        }
    }

    fn keep(&mut self, fd: i32) {
        if fd < 0 {
            return;
        }
        self.opened += 1;
        self.fds.push(fd);
        if self.fds.len() > KEPT {
            self.close();
        }
    }

    fn close(&mut self) {
        if self.fds.is_empty() {
            return;
        }
        let which = self.random.below(self.fds.len() as u64) as usize;
        // SAFETY: `keep` put this descriptor into `fds`, and it is closed only once.
        unsafe { libc::close(self.fds.swap_remove(which)) };
    }

    fn call(&mut self) {
        self.fill();
        let argument = match self.random.below(4) {
            0 => self.random.below(4),
            1 => self.fd() as u64,
            _ => self.address(),
        };
        let (fd, call) = if self.random.one_in(6) {
            (self.device.as_raw_fd(), self.random.of(&DEVICE_CALLS))
        } else {
            (self.fd(), self.random.of(&EVENT_CALLS))
        };
        // SAFETY: a call writes only to `scratch`, or to an address that faults.
        let returned = unsafe { libc::ioctl(fd, call.into(), argument) };
        if call == uapi::IOC_RING {
            self.keep(returned);
        }
    }

    /// Makes one of the driver's calls for an event.
    fn call_perf(&mut self) {
        self.fill();
        let arg = match self.random.below(3) {
            0 => 0,
            1 => self.fd() as u64,
            _ => self.address(),
        };
        let request = uapi::Perf { fd: self.fd(), call: self.random.of(&PERF_CALLS), arg };
        // SAFETY: the driver reads the request, and writes only to `scratch` or to an address that faults.
        unsafe { libc::ioctl(self.device.as_raw_fd(), uapi::IOC_PERF.into(), &raw const request) };
    }

    fn map(&mut self) {
        let pages = self.random.of(&[1, 2, 2, 3, 5, 9, 4, 64]);
        let offset = self.random.of(&[0, 0, 0, 1, 2, 3, 5]) * PAGE;
        let protection = self.random.of(&[1, 3, 3, 7, 0]);
        let flags = self.random.of(&[1, 1, 1, 2]);
        let fd = self.fd();
        // SAFETY: the call makes a new mapping at an address that the kernel chooses.
        let base = unsafe { libc::mmap(ptr::null_mut(), pages * PAGE, protection, flags, fd, offset as i64) };
        if base == libc::MAP_FAILED {
            return;
        }
        self.mapped += 1;
        self.maps.push((base.expose_provenance(), pages * PAGE));
        if self.maps.len() > KEPT {
            self.unmap();
        }
    }

    fn unmap(&mut self) {
        if self.maps.is_empty() {
            return;
        }
        let which = self.random.below(self.maps.len() as u64) as usize;
        let (base, bytes) = self.maps.swap_remove(which);
        // SAFETY: `map` made this mapping, and no reference points into it.
        unsafe { libc::munmap(ptr::with_exposed_provenance_mut(base), bytes) };
    }

    /// Changes a mapping, or its contents.
    fn touch(&mut self) {
        if self.maps.is_empty() {
            return;
        }
        let maps = self.maps.clone();
        let (base, bytes) = self.random.of(&maps);
        let at = ptr::with_exposed_provenance_mut::<libc::c_void>(base);
        match self.random.below(4) {
            0 => {
                let protection = self.random.of(&[0, 1, 3, 7]);
                // SAFETY: `map` made this mapping, and no reference points into it.
                unsafe { libc::mprotect(at, bytes, protection) };
            }
            1 => {
                let advice = self.random.of(&[4, 9, 10, 11, 16, 17]);
                // SAFETY: as above.
                unsafe { libc::madvise(at, bytes, advice) };
            }
            2 => {
                // Fields of the metadata page: the two tails, and an AUX area's offset and size.
                let field = self.random.of(&[1032, 1072, 1080, 1064]);
                let values = [PAGE as u64, 2 * PAGE as u64, 3 * PAGE as u64, u64::MAX];
                self.scratch[0] = self.random.of(&values);
                self.put(base + field, 1);
            }
            _ => {
                self.fill();
                self.put(base, 32);
            }
        }
    }

    /// Makes the kernel write the first `words` words of [`Self::scratch`] to `address`. The write may fault.
    fn put(&self, address: usize, words: usize) {
        let Ok((reader, mut writer)) = io::pipe() else {
            return;
        };
        let bytes: Vec<u8> = self.scratch[..words].iter().flat_map(|w| w.to_ne_bytes()).collect();
        let target = ptr::with_exposed_provenance_mut::<libc::c_void>(address);
        if writer.write_all(&bytes).is_ok() {
            // SAFETY: the kernel checks the address. No reference points into the mapping there.
            unsafe { libc::read(reader.as_raw_fd(), target, bytes.len()) };
        }
    }

    fn read(&mut self) {
        let (fd, bytes) = (self.fd(), self.random.of(&[0, 8, 24, 100, 1024, 4096]));
        if fd > 2 && fd != self.device.as_raw_fd() {
            // SAFETY: the buffer has room for that many bytes.
            unsafe { libc::read(fd, self.scratch.as_mut_ptr().cast(), bytes) };
        }
    }

    fn wait(&mut self) {
        let fd = self.fd();
        let mut asked = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        // SAFETY: the kernel accesses one element, which is valid during the call.
        unsafe { libc::poll(&raw mut asked, 1, 0) };
        if fd > 2 && self.random.one_in(2) {
            let own = std::process::id() as i32;
            // SAFETY: the call takes only numbers.
            unsafe { libc::fcntl(fd, libc::F_SETOWN, own) };
            // SAFETY: as above.
            unsafe { libc::fcntl(fd, libc::F_SETFL, libc::O_ASYNC) };
        }
    }

    /// Forks a child that inherits the events. The child also makes random calls. Then it is killed, executes another
    /// program, or exits.
    fn fork(&mut self) {
        if !self.forks {
            return;
        }
        let (seed, end) = (self.random.next(), self.random.below(4));
        // The child may end in any way.
        let _ = os::forked(|| {
            self.forks = false;
            self.random = Random::new(seed);
            (0..30).for_each(|_| self.step());
            match end {
                0 => {
                    // SAFETY: ends this process.
                    unsafe { libc::raise(libc::SIGKILL) };
                }
                1 => {
                    let words = [c"/bin/true".as_ptr(), ptr::null()];
                    // SAFETY: a terminated array of terminated strings.
                    unsafe { libc::execv(words[0], words.as_ptr()) };
                }
                _ => {}
            }
            0
        });
    }

    fn step(&mut self) {
        match self.random.below(100) {
            0..25 => self.open(),
            25..32 => self.close(),
            32..46 => self.call(),
            46..60 => self.call_perf(),
            60..70 => self.map(),
            70..74 => self.unmap(),
            74..80 => self.touch(),
            80..85 => self.read(),
            85..89 => self.wait(),
            89..91 => self.fork(),
            91..93 => {
                let which = self.random.below(2) as usize;
                // The calls continue whether or not this call is refused.
                let _ = cpu::pin(which);
            }
            93..95 => os::yield_cpu(),
            _ => {
                let value = self.random.below(3);
                let _ = self.device.place(value, 5);
            }
        }
    }
}

/// The calls of one process.
fn hammer(seed: u64, nobody: bool, operations: u64) -> io::Result<()> {
    // Signals of events must not end the process.
    // SAFETY: the call takes only numbers.
    unsafe { libc::signal(libc::SIGIO, libc::SIG_IGN) };
    os::allow_descriptors(256)?;
    if nobody {
        os::become_nobody()?;
        os::set_dumpable(true)?;
    }
    let mut hammer = Hammer::new(seed)?;
    (0..operations).for_each(|_| hammer.step());
    // If every call is refused, the test shows nothing.
    if hammer.opened == 0 || hammer.mapped == 0 {
        let (opened, mapped) = (hammer.opened, hammer.mapped);
        return Err(io::Error::other(format!("{opened} events opened and {mapped} rings mapped: one number is zero")));
    }
    Ok(())
}

/// Runs all processes to their ends.
pub(crate) fn run(seed: u64, operations: u64) -> Outcome {
    println!("seed {seed:#x}, {operations} calls of each of {PROCESSES} processes");
    os::set_paranoid(-1)?;
    let mut started = Vec::new();
    for process in 0..PROCESSES {
        // SAFETY: the process has one thread, which continues in the child.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            let done = hammer(seed + process, process % 2 == 1, operations);
            if let Err(error) = &done {
                eprintln!("process {process}: {error}");
            }
            // SAFETY: the call ends the child before it runs code that is meant for its parent.
            unsafe { libc::_exit(i32::from(done.is_err())) };
        }
        started.push(pid);
    }
    for pid in started {
        let mut status = 0;
        // SAFETY: the address is valid, and the child belongs to this process.
        unsafe { libc::waitpid(pid, &raw mut status, 0) };
        ensure_eq!(status, 0, "wait status of process {pid}, seed {seed:#x}");
    }
    Ok(())
}

/// Makes the kernel validate all objects in its general caches. Returns the number of caches.
fn validate_slabs() -> Fallible<usize> {
    let mut looked = 0;
    for cache in fs::read_dir("/sys/kernel/slab")? {
        let cache = cache?;
        if cache.file_name().to_string_lossy().starts_with("kmalloc-") {
            fs::write(cache.path().join("validate"), "1")?;
            looked += 1;
        }
    }
    Ok(looked)
}

/// Checks after [`run`] that the kernel has logged no complaint and the device has no events.
pub(crate) fn ensure_clean() -> Outcome {
    let line = fs::read_to_string("/proc/cmdline")?;
    ensure!(line.contains("slub_debug=FZPU"), "allocations are not checked: {line}");
    os::allow_descriptors(4096)?;
    let device = persisting::fresh()?;
    let task = os::Sleeper::start(|| Ok(()))?;
    ensure_eq!(room(&device, task.pid)?, device.info.max_events, "room for events");
    let code = os::forked(|| {
        let counted = os::become_nobody().map_err(Into::into).and_then(|()| {
            os::set_dumpable(true)?;
            room(&device, 0)
        });
        i32::from(!counted.is_ok_and(|room| room == device.info.max_events / 4 * 3))
    })?;
    ensure_eq!(code, 0, "exit code of the check of the user nobody's share");
    drop((task, device));
    let unloaded = Command::new("rmmod").arg("virtio_pmu").status()?;
    ensure!(unloaded.success(), "the module was not unloaded");
    ensure!(validate_slabs()? > 0, "no slab was validated");
    kernel_log::ensure_no_fault()
}

#[apply(guest_test)]
fn random_calls_of_several_users_leave_kernel_and_device_clean() -> Outcome {
    run(SEED, OPERATIONS)?;
    ensure_clean()
}
