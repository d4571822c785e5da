//! Cost of a traced exit, and the slowdown of a guest that does nothing but exit.
//!
//! A minimal VMM embeds the device and runs a vCPU on this machine's `/dev/kvm`. The vCPU runs a ring-3 loop
//! that writes to a port in each round. Short slices with the trace off and on alternate in one run, and each
//! slice with the trace on is compared with its two neighbours. Separate runs would not be comparable: on a
//! machine with other users, speed drifts from run to run. Times are CPU time of the vCPU's thread, which
//! excludes other programs.

#![expect(clippy::expect_used, reason = "benchmarks fail by panicking")]

mod trace;

use std::io;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use kvm_ioctls::{Kvm, SyncReg, VcpuExit};
use vmm_sys_util::signal::SIGRTMIN;
use vpmu::host::PerfSource;
use vpmu::{Access, Engines, Exit, ExitReason, Settings, Source, VcpuSession, Vpmu};
use vpmu_testkit::{Bare, Exited, Guest, selects};

use trace::Trace;

/// `again: inc qword [rdi]; out 0x80, al; jmp again`
const LOOP: [u8; 7] = [0x48, 0xff, 0x07, 0xe6, 0x80, 0xeb, 0xf9];
/// Exits of a slice.
const EXITS: u64 = 5_000;
/// Number of slices with the trace on. Each is between two slices with the trace off.
const SLICES: usize = 60;

fn main() -> ExitCode {
    if !selects("aux_exits") {
        return ExitCode::SUCCESS;
    }
    if !Path::new("/dev/kvm").exists() {
        println!("aux: exits: not measured, because this machine has no /dev/kvm");
        return ExitCode::SUCCESS;
    }
    match measure() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("aux: exits: {error}");
            ExitCode::FAILURE
        }
    }
}

fn measure() -> io::Result<()> {
    let module = ["kvm_intel", "kvm_amd", "kvm_pvm"]
        .into_iter()
        .find(|name| Path::new("/sys/module").join(name).exists())
        .unwrap_or("of unknown kind");
    let kvm = Kvm::new().map_err(system)?;
    let settings = Settings::new(1, 1_000_000).with_engines(Engines::Exit);
    let source = PerfSource::new(SIGRTMIN()).map_err(io::Error::other)?;
    let vpmu = Vpmu::new(settings, Arc::new(Bare::default()), Box::new(source)).map_err(io::Error::other)?;
    let vpmu = Arc::new(vpmu);
    let clock = PerfSource::new(SIGRTMIN()).map_err(io::Error::other)?;
    let mut guest = Guest::new(&kvm, &LOOP)?;
    let mut session = vpmu.attach(0, 0).map_err(io::Error::other)?;
    let mut trace = Trace::open(&vpmu, &guest.memory)?;
    let mut slice = |on: bool| -> io::Result<f64> {
        if on {
            trace.turn(&mut session, true)?;
        }
        choose_sync(&session, &mut guest);
        let (rounds, spent) = (guest.count(), clock.thread_time().unwrap_or(0));
        run(&mut session, &mut guest)?;
        let spent = clock.thread_time().unwrap_or(0) - spent;
        assert_eq!(guest.count() - rounds, EXITS, "each round exits once");
        if on {
            trace.turn(&mut session, false)?;
            trace.check(EXITS);
        }
        Ok(spent as f64 / EXITS as f64)
    };
    slice(true)?;
    let mut off = vec![slice(false)?];
    let mut on = Vec::new();
    for _ in 0..SLICES {
        on.push(slice(true)?);
        off.push(slice(false)?);
    }
    let beside = off.windows(2).map(|both| (both[0] + both[1]) / 2.0);
    let pairs: Vec<(f64, f64)> = on.iter().copied().zip(beside).collect();
    let costs = quartiles(pairs.iter().map(|(on, off)| on - off));
    let slower = quartiles(pairs.iter().map(|(on, off)| 100.0 * (on / off - 1.0)));
    println!(
        "aux: an exit to a VMM on /dev/kvm ({module}): {:.0} ns with the trace off, {:.0} ns with it on",
        quartiles(off.iter().copied())[1],
        quartiles(on.iter().copied())[1],
    );
    println!(
        "aux: a traced exit costs {:.0} ns (quartiles {:.0} to {:.0}); a guest that does nothing but \
         exit is {:.2} % slower (quartiles {:.2} to {:.2}); every exit was in the trace, {} bytes each",
        costs[1],
        costs[0],
        costs[2],
        slower[1],
        slower[0],
        slower[2],
        trace::PACKET,
    );
    Ok(())
}

/// Runs the guest for one slice, and reports its entries and exits to the device as a VMM does.
fn run(session: &mut VcpuSession, guest: &mut Guest) -> io::Result<()> {
    for _ in 0..EXITS {
        session.enter();
        let access = match guest.vcpu.run().map_err(system)? {
            VcpuExit::IoOut(port, data) => Access {
                address: port.into(),
                size: u8::try_from(data.len()).unwrap_or(u8::MAX),
                write: true,
                count: 1,
            },
            other => {
                return Err(io::Error::other(format!("unexpected exit of the guest: {other:?}")));
            }
        };
        let exit = Exit { reason: ExitReason::Io, access: Some(access) };
        session.leave(exit, &mut Exited(&guest.vcpu));
    }
    // An exit ends at the next entry, so enter once more to end the last exit.
    session.enter();
    Ok(())
}

/// Makes KVM copy the registers to the run page at each exit, but only while a trace needs them.
fn choose_sync(session: &VcpuSession, guest: &mut Guest) {
    let wanted = session.wants_registers();
    for set in [SyncReg::Register, SyncReg::SystemRegister] {
        if wanted {
            guest.vcpu.set_sync_valid_reg(set);
        } else {
            guest.vcpu.clear_sync_valid_reg(set);
        }
    }
}

fn quartiles(values: impl Iterator<Item = f64>) -> [f64; 3] {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    [1, 2, 3].map(|quarter| values[(values.len() - 1) * quarter / 4])
}

fn system(error: kvm_ioctls::Error) -> io::Error {
    io::Error::from_raw_os_error(error.errno())
}
