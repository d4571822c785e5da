//! Pins threads to the CPUs that this process may use, because a virtual machine's CPUs differ in speed.
#![expect(unsafe_code, reason = "the affinity of a thread is set by a system call")]

use std::fs;
use std::io;

/// Number of CPUs in a mask, as in `cpu_set_t`.
const MOST: usize = 1024;

/// Returns the numbers of the CPUs that this process may use.
pub(crate) fn allowed() -> io::Result<Vec<usize>> {
    let status = fs::read_to_string("/proc/self/status")?;
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap_or_default();
    let mut cpus = Vec::new();
    for range in list.trim().split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let number = |text: &str| text.parse::<usize>().map_err(io::Error::other);
        cpus.extend(number(first)?..=number(last)?);
    }
    cpus.retain(|&cpu| cpu < MOST);
    Ok(cpus)
}

/// Pins the calling thread to `cpu`, one of the CPUs that it may use.
pub(crate) fn stay_on(cpu: usize) -> io::Result<()> {
    let mut mask = [0_u64; MOST / 64];
    mask[cpu / 64] = 1 << (cpu % 64);
    let mask_ptr = (&raw const mask).cast();
    // SAFETY: the kernel reads `size_of_val(&mask)` bytes at the address of `mask`.
    let failed = unsafe { libc::sched_setaffinity(0, size_of_val(&mask), mask_ptr) } != 0;
    if failed { Err(io::Error::last_os_error()) } else { Ok(()) }
}
