//! Finds out which vCPU stored to the doorbell. The messages of vfio-user do not say, and a mark counts for its vCPU alone.

use std::fs::File;
use std::io;
use std::os::fd::RawFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::process::Pid;
use vpmu::host::{StoreTracepoint, Stores};

use super::foreign;
use super::threads::{VcpuThreads, Vmm};

/// Bytes of a line of `/proc/PID/task/TID/syscall`.
const LINE: usize = 256;
/// Longest time until a vCPU that has sent a message waits for the answer. A host that is short of processors may run the
/// vCPU's thread this late, and a mark that is given up is lost. QEMU waits 5 s.
const PATIENCE: Duration = Duration::from_secs(2);

/// How to find the vCPU of a store.
#[derive(Debug)]
pub(super) enum Doorbell {
    /// There is one vCPU.
    Single,
    /// KVM's records of the stores of each vCPU. A message means that at least one vCPU has stored, and no vCPU that has
    /// a record runs the guest.
    Recorded(Vec<Stores>),
    /// The vCPUs' files `/proc/PID/task/TID/syscall`. The VMM forwards an access with a lock held, so one vCPU waits for
    /// an answer at a time.
    Waiting(Vec<File>, Wait),
}

/// The system call in which a vCPU waits for an answer.
#[derive(Debug)]
pub(super) enum Wait {
    /// A futex wait with a time limit. No other wait of QEMU's vCPUs has one. QEMU holds its global lock until the answer
    /// arrives, so a vCPU cannot wait for another device meanwhile.
    Futex,
    /// A read of one of these descriptors: the vCPUs of Cloud Hypervisor read the answers themselves. The vCPUs that
    /// wait for another device read other descriptors.
    Read(Vec<RawFd>),
}

impl Doorbell {
    /// Opens what it takes to find the vCPU among `threads`. `stream` is the connection to their VMM, `process`.
    ///
    /// # Errors
    /// The host's error: reading another process's system calls takes the same user, or `CAP_SYS_PTRACE`.
    pub(super) fn new(threads: &VcpuThreads, process: Pid, stream: &UnixStream) -> io::Result<Self> {
        if threads.ids.len() == 1 {
            return Ok(Self::Single);
        }
        match threads.vmm {
            Vmm::QemuKvm => match recorded(threads) {
                Ok(stores) => return Ok(Self::Recorded(stores)),
                Err(refused) => log::info!("KVM does not record stores to the doorbell: {refused}"),
            },
            Vmm::QemuTcg => {}
            // It does not tell the device the addresses of its regions, so KVM's records cannot be picked out.
            Vmm::CloudHypervisor => {
                let ends = foreign::ends(process, stream)?;
                return Ok(Self::Waiting(waiting(threads)?, Wait::Read(ends)));
            }
        }
        Ok(Self::Waiting(waiting(threads)?, Wait::Futex))
    }

    /// Whether each look at the vCPUs takes the rights of a debugger.
    pub(super) fn reads_calls(&self) -> bool {
        matches!(self, Self::Waiting(..))
    }

    /// The guest has put the doorbell at `address`.
    ///
    /// # Errors
    /// The host's error.
    pub(super) fn place(&mut self, address: u64) -> io::Result<()> {
        match self {
            Self::Recorded(vcpus) => vcpus.iter_mut().try_for_each(|stores| stores.watch(address)),
            _ => Ok(()),
        }
    }

    /// Passes the marks that a message means to `found`, each with its vCPU. The message has the value `value`.
    pub(super) fn marks(&mut self, value: u32, mut found: impl FnMut(usize, u32)) {
        match self {
            Self::Single => found(0, value),
            Self::Recorded(vcpus) => {
                for (vcpu, stores) in vcpus.iter_mut().enumerate() {
                    let missing = stores.take(|value| found(vcpu, value));
                    if missing > 0 {
                        log::error!("{missing} marks of vCPU {vcpu} are lost: KVM's records of its stores are missing");
                    }
                }
            }
            Self::Waiting(calls, wait) => match look(calls, wait) {
                Some(vcpu) => found(vcpu, value),
                None => log::error!("a mark is lost: no vCPU waits for the answer to its store"),
            },
        }
    }
}

fn recorded(threads: &VcpuThreads) -> Result<Vec<Stores>, Box<dyn std::error::Error>> {
    let tracepoint = StoreTracepoint::find()?;
    let stores = threads.ids.iter().map(|&id| Stores::open(&tracepoint, id));
    Ok(stores.collect::<io::Result<_>>()?)
}

fn waiting(threads: &VcpuThreads) -> io::Result<Vec<File>> {
    let files = threads.ids.iter().map(|&id| {
        let file = File::open(threads.file(id, "syscall"))?;
        // The kernel checks the permission at each read.
        file.read_at(&mut [0; LINE], 0)?;
        Ok(file)
    });
    files.collect()
}

/// The vCPU that waits for the answer to the message that is being handled.
fn look(calls: &[File], wait: &Wait) -> Option<usize> {
    let begin = Instant::now();
    loop {
        let found = calls.iter().position(|file| Call::of(file).is_some_and(|call| wait.is(call)));
        // The message is sent just before the wait.
        if found.is_some() || begin.elapsed() > PATIENCE {
            return found;
        }
    }
}

/// The system call in which a thread waits: its number and its arguments.
#[derive(Debug, Clone, Copy)]
struct Call {
    number: i64,
    arguments: [u64; 4],
}

impl Call {
    /// Reads `/proc/PID/task/TID/syscall`. `None` if the thread runs.
    fn of(file: &File) -> Option<Self> {
        let mut text = [0; LINE];
        let count = file.read_at(&mut text, 0).ok()?;
        Self::parse(text.get(..count)?)
    }

    fn parse(text: &[u8]) -> Option<Self> {
        let mut words = std::str::from_utf8(text).ok()?.split_ascii_whitespace();
        let number = words.next()?.parse().ok()?;
        let mut argument = || u64::from_str_radix(words.next()?.strip_prefix("0x")?, 16).ok();
        Some(Self { number, arguments: [argument()?, argument()?, argument()?, argument()?] })
    }

    /// The descriptor that the thread reads.
    fn read(self) -> Option<RawFd> {
        let reads = [libc::SYS_read, libc::SYS_recvfrom, libc::SYS_recvmsg].contains(&self.number);
        self.arguments[0].try_into().ok().filter(|_| reads)
    }
}

impl Wait {
    fn is(&self, call: Call) -> bool {
        match self {
            // The arguments are the address, the operation, the value and the time limit.
            Self::Futex => call.number == libc::SYS_futex && call.arguments[3] != 0,
            Self::Read(descriptors) => call.read().is_some_and(|descriptor| descriptors.contains(&descriptor)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::net::Shutdown;
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixListener;
    use std::path::Path;
    use std::sync::mpsc;
    use std::thread;

    use super::*;

    fn is(wait: &Wait, text: &str) -> bool {
        Call::parse(text.as_bytes()).is_some_and(|call| wait.is(call))
    }

    const RUN: &str = "16 0x10 0xae80 0x0 0x1 0x0 0x0 0x7f 0x7f\n";

    #[test]
    fn qemus_wait_with_a_limit_is_the_one_for_an_answer() {
        let futex = libc::SYS_futex;
        let with = |limit| format!("{futex} 0x55d0 0x189 0x0 {limit} 0x0 0xffffffff 0x7ffd 0x7f31\n");
        assert!(is(&Wait::Futex, &with("0x7f31a4ff8540")));
        for other in [&with("0x0"), "running\n", RUN, ""] {
            assert!(!is(&Wait::Futex, other), "{other}");
        }
    }

    #[test]
    fn read_of_the_devices_socket_is_the_one_for_an_answer() {
        for call in [libc::SYS_read, libc::SYS_recvfrom, libc::SYS_recvmsg] {
            let of = |descriptor| format!("{call} 0x{descriptor:x} 0x7f31a4ff8540 0x10 0x0 0x0 0x0 0x7ffd 0x7f31\n");
            let device = Wait::Read(vec![30]);
            assert!(is(&device, &of(30)));
            assert!(!is(&device, &of(31)));
        }
        for other in ["running\n", RUN, "-1 0x7ffd 0x7f31\n", ""] {
            assert!(!is(&Wait::Read(vec![16]), other), "{other}");
        }
    }

    /// Starts a thread that does `act`, which waits for the VMM's end `stream`. Returns the thread's id.
    fn vcpu<'scope>(
        scope: &'scope thread::Scope<'scope, '_>,
        mut stream: UnixStream,
        act: impl FnOnce(&mut UnixStream) + Send + 'scope,
    ) -> i32 {
        let (tell, told) = mpsc::channel();
        scope.spawn(move || {
            tell.send(rustix::thread::gettid().as_raw_nonzero().get()).expect("awaited");
            act(&mut stream);
        });
        told.recv().expect("a thread")
    }

    fn wait(stream: &mut UnixStream) {
        stream.read_exact(&mut [0]).expect_err("no answer");
    }

    /// The doorbell of a Cloud Hypervisor that is this process and has these vCPUs.
    fn cloud_hypervisors(ids: Vec<i32>, device: &UnixStream) -> Doorbell {
        let process = rustix::process::getpid();
        let own = process.as_raw_nonzero().get();
        let threads = VcpuThreads { process: own, vmm: Vmm::CloudHypervisor, ids };
        Doorbell::new(&threads, process, device).expect("found")
    }

    /// The marks that the device counts for a store of 7.
    fn marks_of(doorbell: &mut Doorbell) -> Vec<(usize, u32)> {
        let mut marks = Vec::new();
        doorbell.marks(7, |vcpu, value| marks.push((vcpu, value)));
        marks
    }

    /// Connects this process to a new socket at `path`, as a VMM does to a device. Returns the VMM's end and the device's.
    fn connected(path: &Path) -> (UnixStream, UnixStream) {
        let listener = UnixListener::bind(path).expect("a socket");
        let vmm = UnixStream::connect(path).expect("connected");
        (vmm, listener.accept().expect("accepted").0)
    }

    #[test]
    fn vcpu_that_waits_for_another_device_does_not_make_the_mark() {
        let directory = tempfile::tempdir().expect("a directory");
        let (vmms, device) = connected(&directory.path().join("pmu"));
        let (vmms_other, _other) = connected(&directory.path().join("other"));
        let ends = [&vmms_other, &vmms].map(|stream| stream.try_clone().expect("a descriptor"));
        let fds = [&vmms, &ends[1]].map(AsRawFd::as_raw_fd);
        thread::scope(|scope| {
            let ids = ends.map(|stream| vcpu(scope, stream, wait));
            let mut doorbell = cloud_hypervisors(ids.into(), &device);
            let marks = marks_of(&mut doorbell);
            for stream in [&vmms, &vmms_other] {
                stream.shutdown(Shutdown::Both).expect("connected");
            }
            assert_eq!(marks, [(1, 7)]);
            let Doorbell::Waiting(_, Wait::Read(mut found)) = doorbell else { panic!("{doorbell:?}") };
            found.sort_unstable();
            assert_eq!(found, fds);
        });
    }

    #[test]
    fn mark_of_a_vcpu_that_the_host_runs_late_is_counted() {
        let directory = tempfile::tempdir().expect("a directory");
        let (vmms, device) = connected(&directory.path().join("pmu"));
        thread::scope(|scope| {
            let end = vmms.try_clone().expect("a descriptor");
            let late = vcpu(scope, end, |stream| {
                thread::sleep(Duration::from_secs(1));
                wait(stream);
            });
            let other = rustix::thread::gettid().as_raw_nonzero().get();
            let marks = marks_of(&mut cloud_hypervisors(vec![other, late], &device));
            vmms.shutdown(Shutdown::Both).expect("connected");
            assert_eq!(marks, [(1, 7)]);
        });
    }
}
