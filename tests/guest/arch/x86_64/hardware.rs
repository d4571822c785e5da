//! Tests the trace of every exit, including exits that the host's kernel handles by itself. Compares it with the host's
//! own statistics, with the trace of the exits that reach the VMM, and with instructions whose exits are known.
#![expect(unsafe_code, reason = "an instruction at a known address")]

use std::arch::global_asm;

use vpmu_client::trace::{Exit, Reason};
use vpmu_client::{Area, Chunk, Event, EventAttr, Packet, Ring, Vpmu};

use crate::arch::IDLE_PORT;
use crate::cpu;
use crate::ensure::{ensure, ensure_eq};
use crate::{Fallible, Outcome};

const GROUP: &str = "aux-hardware";

/// The exit codes of CPUID and of port I/O, first for SVM and then for VMX.
const CPUID: [u16; 2] = [0x72, 10];
const PORT_IO: [u16; 2] = [0x7b, 30];
const PACKET: u64 = 64;

global_asm!(
    ".global vpmu_hardware_cpuid",
    ".global vpmu_hardware_cpuid_at",
    // rdi: the number of rounds.
    "vpmu_hardware_cpuid:",
    "push rbx",
    "2:",
    "xor eax, eax",
    "xor ecx, ecx",
    "vpmu_hardware_cpuid_at:",
    "cpuid",
    "dec rdi",
    "jnz 2b",
    "pop rbx",
    "ret",
);

unsafe extern "C" {
    fn vpmu_hardware_cpuid(times: u64);
    /// This is not a function, but a label inside a function.
    safe static vpmu_hardware_cpuid_at: u8;
}

/// Executes CPUID `times` times. Each execution is an exit that the host's kernel handles by itself.
fn cpuid(times: u64) {
    // SAFETY: the function preserves the registers that a C function must preserve. Its argument is not zero, so its
    // loop ends.
    unsafe { vpmu_hardware_cpuid(times.max(1)) };
}

/// A trace of exits with its area, and a counting event in the trace's group.
struct Traced {
    trace: Event,
    _ring: Ring,
    area: Area,
    counted: Event,
}

impl Traced {
    /// Opens both events. `place` selects their CPU or task in the attributes.
    fn new(vpmu: &Vpmu, trace: &str, counted: &str, place: impl Fn(EventAttr) -> EventAttr) -> Fallible<Self> {
        let attr = vpmu.attr(trace).map_err(|error| format!("{error}: 'vmm check' on the host shows the reason"))?;
        let trace = vpmu.open_event(&place(attr.tracing(0)))?;
        let ring = trace.map(1)?;
        let area = Area::map(&trace, &ring, 8)?;
        let counted = vpmu.open_member(&place(vpmu.attr(counted)?), &trace)?;
        counted.enable()?;
        Ok(Self { trace, _ring: ring, area, counted })
    }

    /// The packets of exits so far.
    fn exits(&mut self) -> Fallible<Vec<Exit>> {
        let mut exits = Vec::new();
        let mut chunk = Chunk::default();
        while self.area.read(&mut chunk)? {
            for packet in chunk.packets() {
                if let Packet::Exit(exit) = packet? {
                    exits.push(*exit);
                }
            }
        }
        Ok(exits)
    }
}

fn is(exit: &Exit, numbers: [u16; 2]) -> bool {
    matches!(exit.reason(), Reason::Hardware(number) if numbers.contains(&number))
}

/// Returns the port of a port access. SVM and VMX report it in the same bits.
fn port(exit: &Exit) -> u64 {
    exit.qualification() >> 16 & 0xffff
}

#[apply(guest_test)]
fn every_exit_is_traced() -> Outcome {
    const TIMES: u64 = 300;
    let vpmu = Vpmu::open()?;
    cpu::pin(0)?;
    let on_cpu = |attr: EventAttr| attr.on_cpu(0);
    let mut both = Traced::new(&vpmu, "exit-trace", "exits", on_cpu)?;
    for round in 0..3 {
        let before = (both.counted.read()?.value, cpu::tsc());
        both.trace.enable()?;
        cpuid(TIMES);
        both.trace.disable()?;
        let counted = both.counted.read()?.value - before.0;
        let exits = both.exits()?;
        ensure_eq!(exits.len() as u64, counted, "exits traced, compared with the count");
        let at = (&raw const vpmu_hardware_cpuid_at).addr() as u64;
        let ours: Vec<_> = exits.iter().filter(|exit| exit.ip() == Some(at)).collect();
        // An exit for an interrupt can have the same address.
        let cpuids = ours.iter().filter(|exit| is(exit, CPUID));
        ensure_eq!(cpuids.count() as u64, TIMES, "CPUIDs, round {round}");
        let me = (std::process::id(), cpu::thread_id());
        for exit in ours {
            ensure!(exit.user() && exit.vcpu() == 0, "not an exit from user mode on vCPU 0: {exit:?}");
            ensure_eq!((exit.pid(), exit.tid()), me, "process and thread of a CPUID exit");
            ensure_eq!((exit.qualification(), exit.detail()), (0, 0), "qualification and detail of a CPUID exit");
        }
        ensure!(exits.is_sorted_by_key(Exit::time), "the times of the exits go back");
        let (first, last) = (exits.first(), exits.last());
        let span = |exit: Option<&Exit>| exit.map_or(0, Exit::time);
        let from = vpmu.info().time_of(before.1);
        let until = vpmu.info().time_of(cpu::tsc());
        ensure!(from <= span(first) && span(last) <= until, "not between {from} and {until} ns: {first:?} or {last:?}");
        let outside: u64 = exits.iter().map(Exit::outside).sum();
        ensure!((1..=until - from).contains(&outside), "{outside} ns outside the guest, of {} ns", until - from);
        let (Some(last), rest) = (last, &exits[..exits.len() - 1]) else {
            return Err("no exit".into());
        };
        ensure!(last.is_cut(), "the last exit is not cut: {last:?}");
        ensure!(!rest.iter().any(Exit::is_cut), "an earlier exit is cut");
    }
    let reading = both.trace.read()?;
    ensure_eq!(reading.value, both.area.head(), "bytes produced, none of them lost");
    Ok(())
}

#[apply(guest_test)]
fn exits_to_the_vmm_are_among_them() -> Outcome {
    const TIMES: usize = 200;
    let vpmu = Vpmu::open()?;
    cpu::pin(0)?;
    cpu::allow_ports()?;
    let on_cpu = |attr: EventAttr| attr.on_cpu(0);
    let mut all = Traced::new(&vpmu, "exit-trace", "exits-user", on_cpu)?;
    let mut some = Traced::new(&vpmu, "exit-trace-io", "exits-io", on_cpu)?;
    some.trace.enable()?;
    all.trace.enable()?;
    for _ in 0..TIMES {
        cpu::port_write();
    }
    all.trace.disable()?;
    some.trace.disable()?;
    let ours = |exit: &&Exit| exit.user() && exit.tid() == cpu::thread_id();
    let (all, some) = (all.exits()?, some.exits()?);
    let hardware = all.iter().filter(ours).filter(|exit| is(exit, PORT_IO));
    let hardware: Vec<_> = hardware.collect();
    let reached = some.iter().filter(ours).filter(|exit| exit.reason() == Reason::Io);
    let reached: Vec<_> = reached.collect();
    ensure_eq!((hardware.len(), reached.len()), (TIMES, TIMES), "port writes");
    for (hardware, reached) in hardware.into_iter().zip(reached) {
        ensure_eq!(port(hardware), u64::from(IDLE_PORT), "the port in the hardware's exit");
        ensure_eq!(reached.qualification(), u64::from(IDLE_PORT), "the port in the VMM's exit");
        ensure_eq!(hardware.ip(), reached.ip(), "the address of the write");
        // The host's kernel sees an exit before the VMM does, and enters the guest after the VMM has returned. The
        // times may be off by a microsecond.
        let ends = |exit: &Exit| exit.time() + exit.outside();
        ensure!(
            hardware.time() <= reached.time() + 1_000 && ends(reached) <= ends(hardware) + 1_000,
            "the VMM's {reached:?} is not within the hardware's {hardware:?}"
        );
    }
    Ok(())
}

#[apply(guest_test)]
fn hardware_trace_of_a_task_has_only_its_exits() -> Outcome {
    const TIMES: u64 = 100;
    let vpmu = Vpmu::open()?;
    cpu::pin(0)?;
    let mut both = Traced::new(&vpmu, "exit-trace", "exits", |attr| attr)?;
    both.trace.enable()?;
    for _ in 0..TIMES {
        cpuid(1);
        // Another thread makes the same exits, which must not be in the trace.
        std::thread::spawn(|| cpuid(1)).join().map_err(|_| "a panic")?;
    }
    both.trace.disable()?;
    let exits = both.exits()?;
    // perf core schedules the leader out, with an exit, and then the member, which counts this exit.
    ensure_eq!(exits.len() as u64 + 1, both.counted.read()?.value, "exits traced, compared with the count");
    let me = cpu::thread_id();
    ensure!(exits.iter().all(|exit| exit.tid() == me), "the trace has an exit of another thread");
    let at = (&raw const vpmu_hardware_cpuid_at).addr() as u64;
    let ours = exits.iter().filter(|exit| exit.ip() == Some(at) && is(exit, CPUID));
    ensure_eq!(ours.count() as u64, TIMES, "CPUIDs of this thread");
    Ok(())
}

#[apply(guest_test)]
fn stalled_readers_losses_are_counted() -> Outcome {
    let vpmu = Vpmu::open()?;
    cpu::pin(0)?;
    let on_cpu = |attr: EventAttr| attr.on_cpu(0);
    let mut both = Traced::new(&vpmu, "exit-trace", "exits", on_cpu)?;
    both.trace.enable()?;
    // Makes more exits than fit into the area, and perhaps more than fit into the host's own ring.
    cpuid(2 * both.area.size() / PACKET);
    both.trace.disable()?;
    let (reading, counted) = (both.trace.read()?, both.counted.read()?.value);
    let lost = reading.lost;
    ensure!(lost > 0 && lost.is_multiple_of(PACKET), "{lost} lost bytes: zero, or not whole packets");
    ensure_eq!(reading.value, both.area.head() + lost, "bytes produced, compared with those written and lost");
    let exits = both.exits()?;
    ensure_eq!(exits.len() as u64 + lost / PACKET, counted, "exits traced and lost, compared with the count");
    Ok(())
}
