//! Delay between the overflow of a host counter and the start or stop of a linked event. Overflows of events that count
//! marks or exits take effect immediately. An overflow of a host counter takes effect only at the exit that it causes.
//!
//! A minimal VMM embeds the device and runs a vCPU on this machine's `/dev/kvm`. The vCPU runs a ring-3 loop.
//! Each overflow of a host clock starts or stops another event. The host's record of an overflow has the time
//! and the instruction pointer of the overflow. A comparison with the instruction pointer at the exit shows how
//! far the guest ran after the overflow.

#![expect(clippy::expect_used, reason = "benchmarks fail by panicking")]

mod watched;

use std::io;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use kvm_ioctls::Kvm;
use vm_memory::GuestMemoryMmap;
use vmm_sys_util::signal::SIGRTMIN;
use vpmu::abi::*;
use vpmu::host::PerfSource;
use vpmu::{Engines, ExitReason, Settings, VcpuSession, Vpmu};
use vpmu_testkit::{Bare, Driver, Exited, Guest, Layout, command, header, ignore_signals, limits, open_of, selects};

use watched::{Acted, TARGET, Watch, Watched};

/// `inc qword [rdi]`. The program is [`INCS`] copies of this instruction and a jump back to the first copy, so
/// that the instruction pointer shows how far the guest ran.
const INC: [u8; 3] = [0x48, 0xff, 0x07];
const INCS: usize = 512;
const FEATURES: u64 = 1 << 32 | 7;
/// Nanoseconds between two overflows.
const PERIOD: u64 = 200_000;
const OVERFLOWS: usize = 5_000;

fn main() -> ExitCode {
    if !selects("skid") {
        return ExitCode::SUCCESS;
    }
    if !Path::new("/dev/kvm").exists() {
        println!("skid: not measured, because this machine has no /dev/kvm");
        return ExitCode::SUCCESS;
    }
    match measure() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("skid: {error}");
            ExitCode::FAILURE
        }
    }
}

fn measure() -> io::Result<()> {
    ignore_signals();
    let system = |error: kvm_ioctls::Error| io::Error::from_raw_os_error(error.errno());
    let kvm = Kvm::new().map_err(system)?;
    let mut guest = Guest::new(&kvm, &program())?;
    let tsc_khz = guest.vcpu.get_tsc_khz().map_err(system)?;
    let settings = Settings::new(1, tsc_khz)
        .with_limits(limits().with(|limits| limits.max_sample_rate = u32::MAX))
        .with_engines(Engines::Exit);
    let watch = Watch::default();
    let source = Watched { source: PerfSource::new(SIGRTMIN()).map_err(io::Error::other)?, watch: watch.clone() };
    let vpmu = Vpmu::new(settings, Arc::new(Bare::default()), Box::new(source)).map_err(io::Error::other)?;
    let vpmu = Arc::new(vpmu);
    let mut session = vpmu.attach(0, 0).map_err(io::Error::other)?;
    link(&vpmu, &mut session, &guest.memory)?;
    while watch.len() < OVERFLOWS {
        session.enter();
        match guest.vcpu.run() {
            Err(error) if error.errno() == libc::EINTR => {}
            Err(error) => return Err(system(error)),
            Ok(exit) => {
                return Err(io::Error::other(format!("unexpected exit of the guest: {exit:?}")));
            }
        }
        watch.left(guest.vcpu.sync_regs().regs.rip);
        session.leave(ExitReason::Signal, &mut Exited(&guest.vcpu));
    }
    report(&watch.acted(), tsc_khz);
    Ok(())
}

fn program() -> Vec<u8> {
    let mut program = INC.repeat(INCS);
    let back = -i32::try_from(program.len() + 5).expect("short");
    program.push(0xe9);
    program.extend(back.to_le_bytes());
    program
}

/// Opens two clocks. Each overflow of the second clock starts the first clock if the first clock is stopped, and
/// otherwise stops it.
fn link(vpmu: &Arc<Vpmu>, session: &mut VcpuSession, memory: &GuestMemoryMmap) -> io::Result<()> {
    let mut driver = Driver::activate(vpmu, memory, Layout::SMALL, FEATURES).map_err(io::Error::other)?;
    let target = driver.open(&OpenRequest {
        // The target never overflows. The period makes the device open a separate host counter for the target,
        // with `Source::open`, so that `Watched` sees each start and stop of the target.
        period: (u64::MAX >> 1).into(),
        flags: (OPEN_ENABLED | OPEN_PAUSED).into(),
        ..open_of(KIND_SOFTWARE, TARGET, 0)
    })?;
    let trigger = driver.open(&OpenRequest {
        period: PERIOD.into(),
        engine: ENGINE_EXIT.into(),
        ..open_of(KIND_SOFTWARE, 0, 0)
    })?;
    for role in [LINK_STARTER, LINK_STOPPER] {
        driver.request(&LinkRequest {
            header: header(CONTROL_LINK, trigger),
            target: target.into(),
            role: role.into(),
            reserved: 0.into(),
        })?;
    }
    driver.commands(session, &[command(COMMAND_ENABLE, trigger)]).map(|_| ())
}

fn report(acted: &[Acted], tsc_khz: u32) {
    let inside: Vec<&Acted> = acted.iter().filter(|acted| acted.in_guest).collect();
    println!(
        "skid: {} overflows of the host's cpu-clock each started or stopped a task-clock; {} of them \
         occurred while the guest ran",
        acted.len(),
        inside.len()
    );
    let round = (INC.len() * INCS + 5) as u64;
    // The program is a loop, so distances are modulo its length.
    let ran = |acted: &Acted| {
        let bytes = (acted.to + round).saturating_sub(acted.from) % round;
        bytes.div_ceil(INC.len() as u64)
    };
    let ran = sorted(inside.iter().map(|acted| ran(acted)));
    let took = sorted(acted.iter().map(|acted| acted.ticks * 1_000_000 / u64::from(tsc_khz)));
    for (what, unit, values) in [
        ("instructions that the guest executed after the overflow", "", ran),
        ("delay until the target started or stopped", " ns", took),
    ] {
        if let Some(most) = values.last() {
            let at = |part: usize| values[(values.len() - 1) * part / 100];
            println!("skid: {what}: median {}{unit}, 99th percentile {}{unit}, maximum {most}{unit}", at(50), at(99),);
        }
    }
}

fn sorted(values: impl Iterator<Item = u64>) -> Vec<u64> {
    let mut values: Vec<u64> = values.collect();
    values.sort_unstable();
    values
}
