//! Tests call chains that follow frame pointers. The chains of known nested calls must contain exactly the known
//! addresses.

use std::os::fd::AsRawFd;

use perf_event_open_sys::bindings::{self, perf_event_attr};

use crate::ensure::{ensure, ensure_eq};
use crate::fields::{self, CALLCHAIN, CONTEXT_KERNEL, CONTEXT_USER, IP, MISC_KERNEL, MISC_MODE, MISC_USER, Sample};
use crate::known_code::{self, Leaf};
use crate::pages::{Pages, READ_WRITE};
use crate::raw::{
    self, Device, ENGINE_BATCHED, ENGINE_EXIT, Event, How, KIND_SOFTWARE, SW_CPU_CLOCK, SW_TASK_CLOCK, refused,
    sampling, silent,
};
use crate::{Fallible, Outcome, cpu};

const GROUP: &str = "output";

const VALUE: u64 = 70;

fn take_samples(event: &Event, ring: &mut Pages, attr: &perf_event_attr) -> Fallible<Vec<Sample>> {
    event.disable(0)?;
    let (samples, lost) = fields::samples(&ring.take()?, attr)?;
    ensure_eq!(lost, 0, "lost samples");
    Ok(samples)
}

/// Returns the chains of `times` runs of the nest. Each run has one sample.
fn chains(device: &Device, attr: &perf_event_attr, leaf: Leaf, times: usize) -> Fallible<Vec<Vec<u64>>> {
    cpu::allow_ports()?;
    let event = device.open_event(attr, How::OWN)?;
    let mut ring = Pages::map(&event, 4, READ_WRITE)?;
    event.enable(0)?;
    (0..times).for_each(|_| known_code::nest(leaf));
    let samples = take_samples(&event, &mut ring, attr)?;
    ensure_eq!(samples.len(), times, "samples of {leaf:?}");
    Ok(samples.into_iter().filter_map(|sample| sample.chain).collect())
}

fn writes(device: &Device) -> perf_event_attr {
    silent(sampling(device.port_exits(), 1, CALLCHAIN))
}

/// Returns whether a sample of the write can have `ip`. Some hosts report the address of the write, and others report
/// the address of the next instruction.
fn is_out(ip: u64) -> bool {
    ip == known_code::nest_out() || ip == known_code::nest_out() + known_code::WRITE_LEN
}

#[apply(guest_test)]
fn users_chain_is_exact() -> Outcome {
    let device = Device::open()?;
    for chain in chains(&device, &writes(&device), Leaf::Out, 20)? {
        ensure_eq!(chain.len(), 5, "entries of a context, the leaf and three callers: {chain:#x?}");
        ensure_eq!(chain[0], CONTEXT_USER, "the context");
        ensure!(is_out(chain[1]), "the leaf's address {:#x} is not that of the write", chain[1]);
        ensure_eq!(chain[2..], known_code::nest_callers(), "the callers");
    }
    Ok(())
}

#[apply(guest_test)]
fn chain_has_the_requested_length() -> Outcome {
    let device = Device::open()?;
    for most in 1..=5 {
        let mut attr = writes(&device);
        attr.sample_max_stack = most;
        let chain = chains(&device, &attr, Leaf::Out, 1)?.remove(0);
        let addresses = usize::from(most).min(4);
        ensure_eq!(chain.len(), 1 + addresses, "entries with at most {most}: {chain:#x?}");
        ensure_eq!(chain[2..], known_code::nest_callers()[..addresses - 1], "callers with at most {most}");
    }
    Ok(())
}

fn mark(device: &Device) -> Leaf {
    Leaf::Mark(device.as_raw_fd(), VALUE)
}

/// Splits a chain at its context markers. Returns the kernel addresses and the user addresses.
fn halves(chain: &[u64]) -> Result<[Option<&[u64]>; 2], String> {
    let at = chain.iter().position(|&entry| entry == CONTEXT_USER);
    let (kernel, user) = chain.split_at(at.unwrap_or(chain.len()));
    let kernel = match kernel.split_first() {
        None => None,
        Some((&CONTEXT_KERNEL, addresses)) => Some(addresses),
        Some(_) => return Err(format!("the chain begins without a context: {chain:#x?}")),
    };
    Ok([kernel, user.split_first().map(|(_, addresses)| addresses)])
}

fn users_half() -> [u64; 4] {
    let [leaf, middle, outer] = known_code::nest_callers();
    [known_code::nest_marked(), leaf, middle, outer]
}

#[apply(guest_test)]
fn chain_continues_through_the_kernel() -> Outcome {
    let device = Device::open()?;
    let attr = silent(device.marks(VALUE, 1, CALLCHAIN));
    for chain in chains(&device, &attr, mark(&device), 20)? {
        let [kernel, user] = halves(&chain)?;
        let kernel = kernel.ok_or("nothing of the kernel")?;
        ensure!(!kernel.is_empty(), "the kernel's half is empty");
        ensure!(kernel.iter().all(|address| address >> 63 == 1), "the kernel's half has a user address: {kernel:#x?}");
        ensure_eq!(user, Some(&users_half()[..]), "the user's half");
    }
    Ok(())
}

#[apply(guest_test)]
fn either_half_of_a_chain_can_be_left_out() -> Outcome {
    let device = Device::open()?;
    let both = silent(device.marks(VALUE, 1, CALLCHAIN));
    let (mut kernel, mut user) = (both, both);
    kernel.set_exclude_callchain_user(1);
    user.set_exclude_callchain_kernel(1);
    for chain in chains(&device, &kernel, mark(&device), 3)? {
        let [kernel, user] = halves(&chain)?;
        ensure!(kernel.is_some_and(|k| !k.is_empty()), "the chain has no kernel half: {chain:#x?}");
        ensure_eq!(user, None, "the user's half, excluded");
    }
    for chain in chains(&device, &user, mark(&device), 3)? {
        let [kernel, user] = halves(&chain)?;
        ensure_eq!(kernel, None, "the kernel's half, excluded");
        ensure_eq!(user, Some(&users_half()[..]), "the user's half");
    }
    Ok(())
}

/// For each sample whose IP is in the leaf's loop, returns the callers in its chain.
fn callers_of_the_loop(samples: &[Sample]) -> Vec<Vec<u64>> {
    let inside = |sample: &&Sample| {
        sample.misc & MISC_MODE == MISC_USER && sample.ip.is_some_and(|ip| known_code::nest_spin().contains(&ip))
    };
    let chains = samples.iter().filter(inside).filter_map(|s| s.chain.as_deref());
    chains
        .filter(|chain| chain.get(..1) == Some(&[CONTEXT_USER]))
        .map(|chain| chain.get(2..).unwrap_or_default().to_vec())
        .collect()
}

/// Runs the nest's loop until there are `enough` samples with an IP in the loop. Returns the callers of each sample.
fn sample_loop(event: &Event, attr: &perf_event_attr, enough: usize) -> Fallible<Vec<Vec<u64>>> {
    let mut ring = Pages::map(event, 16, READ_WRITE)?;
    let mut callers = Vec::new();
    event.enable(0)?;
    while callers.len() < enough {
        known_code::nest(Leaf::Spin(1 << 20));
        let (samples, _) = fields::samples(&ring.take()?, attr)?;
        let kernels = samples.iter().find(|s| {
            s.misc & MISC_MODE == MISC_KERNEL && s.chain.as_ref().is_none_or(|c| c.first() != Some(&CONTEXT_KERNEL))
        });
        ensure!(kernels.is_none(), "a chain of a kernel sample does not begin in the kernel: {kernels:#x?}");
        callers.extend(callers_of_the_loop(&samples));
    }
    event.disable(0)?;
    Ok(callers)
}

#[apply(guest_test)]
fn chains_of_a_clock_equal_perfs() -> Outcome {
    let device = Device::open()?;
    cpu::pin(0)?;
    let ours = device.attr(KIND_SOFTWARE, SW_TASK_CLOCK);
    let ours = silent(sampling(ours, 1_000_000, IP | CALLCHAIN));
    let theirs = perf_event_attr { type_: bindings::PERF_TYPE_SOFTWARE, config: SW_CPU_CLOCK, ..ours };
    let own = sample_loop(&device.open_event(&ours, How::OWN)?, &ours, 50)?;
    let perfs = sample_loop(&raw::kernels_own(&theirs)?, &theirs, 50)?;
    for (name, found) in [("perf", perfs), ("the device", own)] {
        let strange = found.iter().find(|callers| **callers != known_code::nest_callers());
        ensure!(strange.is_none(), "{name} found the callers {strange:#x?}, not {:#x?}", known_code::nest_callers());
    }
    Ok(())
}

#[apply(guest_test)]
fn host_does_not_walk_guest_stacks() -> Outcome {
    let device = Device::open()?;
    let clock = silent(sampling(device.attr(KIND_SOFTWARE, SW_TASK_CLOCK), 1_000_000, IP | CALLCHAIN));
    // By default, the device selects the exit engine, because the batched engine does not support call chains.
    let event = device.open_event(&clock, How::OWN)?;
    ensure_eq!(event.engine()?, ENGINE_EXIT, "the engine of an event with chains");
    for field in [CALLCHAIN, fields::REGS_USER, fields::REGS_INTR, fields::STACK_USER] {
        let mut attr = clock;
        attr.sample_type = IP | field;
        attr.sample_regs_user = if field == fields::REGS_USER { 1 } else { 0 };
        attr.sample_regs_intr = if field == fields::REGS_INTR { 1 } else { 0 };
        attr.sample_stack_user = if field == fields::STACK_USER { 64 } else { 0 };
        let how = How { engine: ENGINE_BATCHED, ..How::OWN };
        ensure_eq!(
            refused(device.open_event(&attr, how)),
            Some(libc::EOPNOTSUPP),
            "errno for field {field:#x} with the batched engine"
        );
    }
    Ok(())
}
