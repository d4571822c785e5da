//! Finds out which vCPU stored to the doorbell. The messages of vfio-user do not say, and a mark counts for its vCPU alone.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use vpmu::host::{StoreTracepoint, Stores};

use super::threads::{VcpuThreads, Vmm};

/// Longest time until a vCPU that has sent a message waits for the answer.
const PATIENCE: Duration = Duration::from_millis(500);

/// How to find the vCPU of a store.
#[derive(Debug)]
pub(super) enum Doorbell {
    /// There is one vCPU.
    Single,
    /// KVM's records of the stores of each vCPU. A message means that at least one vCPU has stored, and no vCPU that has
    /// a record runs the guest.
    Recorded(Vec<Stores>),
    /// The vCPUs' files `/proc/PID/task/TID/syscall`. QEMU forwards an access with its global lock held, so one vCPU
    /// waits for an answer at a time, and no other wait of a vCPU's thread has a time limit.
    Waiting(Vec<File>),
    /// Nothing tells.
    Unknown,
}

impl Doorbell {
    /// Opens what it takes to find the vCPU among `threads`.
    ///
    /// # Errors
    /// The host's error: reading another process's system calls takes the same user, or `CAP_SYS_PTRACE`.
    pub(super) fn new(threads: &VcpuThreads) -> io::Result<Self> {
        if threads.ids.len() == 1 {
            return Ok(Self::Single);
        }
        if threads.vmm != Vmm::QemuTcg {
            match recorded(threads) {
                Ok(stores) => return Ok(Self::Recorded(stores)),
                Err(refused) => log::info!("KVM does not record stores to the doorbell: {refused}"),
            }
        }
        match threads.vmm {
            Vmm::QemuKvm | Vmm::QemuTcg => waiting(threads).map(Self::Waiting),
            // It has no lock that all vCPUs wait for.
            Vmm::CloudHypervisor => Ok(Self::Unknown),
        }
    }

    /// Whether each look at the vCPUs takes the rights of a debugger.
    pub(super) fn reads_calls(&self) -> bool {
        matches!(self, Self::Waiting(_))
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
            Self::Waiting(calls) => match waits(calls) {
                Some(vcpu) => found(vcpu, value),
                None => log::error!("a mark is lost: no vCPU waits for the answer to its store"),
            },
            Self::Unknown => {}
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
        file.read_at(&mut [0; CALL], 0)?;
        Ok(file)
    });
    files.collect()
}

/// The vCPU that waits for an answer now. `None` if none does.
fn waits(calls: &[File]) -> Option<usize> {
    let begin = Instant::now();
    loop {
        let mut text = [0; CALL];
        let waits = |call: &File| call.read_at(&mut text, 0).is_ok_and(|count| is_timed_wait(&text[..count]));
        if let Some(vcpu) = calls.iter().position(waits) {
            return Some(vcpu);
        }
        // The message is sent just before the wait.
        if begin.elapsed() > PATIENCE {
            return None;
        }
    }
}

/// Bytes of a line of `/proc/PID/task/TID/syscall`.
const CALL: usize = 256;

/// Whether a thread is in a futex wait with a time limit. `call` has the call's number and its arguments.
fn is_timed_wait(call: &[u8]) -> bool {
    let mut words = call.split(|byte| byte.is_ascii_whitespace());
    let number = libc::SYS_futex.to_string();
    // The number is followed by the address, the operation, the value and the time limit.
    words.next() == Some(number.as_bytes()) && words.nth(3).is_some_and(|limit| limit != b"0x0")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wait_with_a_limit_is_the_one_for_an_answer() {
        let futex = libc::SYS_futex;
        let with = |limit| format!("{futex} 0x55d0 0x189 0x0 {limit} 0x0 0xffffffff 0x7ffd 0x7f31\n");
        assert!(is_timed_wait(with("0x7f31a4ff8540").as_bytes()));
        let others = [
            with("0x0"),
            "running\n".to_owned(),
            "16 0x10 0xae80 0x0 0x1 0x0 0x0 0x7f 0x7f\n".to_owned(),
            String::new(),
        ];
        for other in others {
            assert!(!is_timed_wait(other.as_bytes()), "{other}");
        }
    }
}
