//! Delay between the overflow of a host counter and the start or stop of a linked event. Overflows of events that count
//! marks or exits take effect immediately. An overflow of a host counter takes effect only at the exit that it causes.
//!
//! A minimal VMM embeds the device and runs a vCPU on this machine's `/dev/kvm`. The vCPU runs a ring-3 loop.
//! Each overflow of a host clock starts or stops another event. The host's record of an overflow has the time
//! and the instruction pointer of the overflow. A comparison with the instruction pointer at the exit shows how
//! far the guest ran after the overflow.

#![expect(clippy::expect_used, reason = "benchmarks fail by panicking")]
#![expect(unsafe_code, reason = "guest memory is registered with KVM by address")]

#[expect(dead_code, reason = "only the device's tests use the rest of the module")]
#[path = "../../tests/device/driver.rs"]
mod driver;
#[expect(dead_code, reason = "the guest's count is not read here")]
#[path = "../common/guest.rs"]
mod guest;
#[path = "../common/selection.rs"]
mod selection;
mod watched;

use std::io;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use kvm_ioctls::Kvm;
use vm_memory::GuestMemoryMmap;
use vmm_sys_util::signal::{SIGRTMIN, register_signal_handler};
use vpmu::abi::*;
use vpmu::host::PerfSource;
use vpmu::{Engines, ExitReason, Interrupt, Limits, Machine, Settings, VcpuSession, Vpmu};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use driver::DriverQueue;
use guest::{Exited, Guest};
use watched::{Acted, TARGET, Watch, Watched};

/// `inc qword [rdi]`. The program is [`INCS`] copies of this instruction and a jump back to the first copy, so
/// that the instruction pointer shows how far the guest ran.
const INC: [u8; 3] = [0x48, 0xff, 0x07];
const INCS: usize = 512;
const FEATURES: u64 = 1 << 32 | 7;
const QUEUES: u64 = 0x1_0000;
const BUFFERS: u64 = 0x2_0000;
/// Nanoseconds between two overflows.
const PERIOD: u64 = 200_000;
const OVERFLOWS: usize = 5_000;

#[derive(Debug)]
struct Host;

impl Machine for Host {
    fn exits(&self, _vcpu: u32) -> Option<u64> {
        None
    }

    fn halts(&self, _vcpu: u32) -> Option<u64> {
        None
    }
}

fn main() -> ExitCode {
    if !selection::selects("skid") {
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

extern "C" fn ignore(_: i32, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}

fn measure() -> io::Result<()> {
    register_signal_handler(SIGRTMIN(), ignore)?;
    let system = |error: kvm_ioctls::Error| io::Error::from_raw_os_error(error.errno());
    let kvm = Kvm::new().map_err(system)?;
    let mut guest = Guest::new(&kvm, &program())?;
    let tsc_khz = guest.vcpu.get_tsc_khz().map_err(system)?;
    let settings = Settings::new(1, tsc_khz)
        .with_limits(Limits::default().with(|limits| {
            limits.max_sample_rate = u32::MAX;
            limits.max_samples = u32::MAX;
            limits.max_record_bytes = u64::MAX;
            limits.max_sampling_percent = 100;
            limits.min_hardware_period = 1;
        }))
        .with_engines(Engines::Exit);
    let watch = Watch::default();
    let source = Watched { source: PerfSource::new(SIGRTMIN()).map_err(io::Error::other)?, watch: watch.clone() };
    let vpmu = Vpmu::new(settings, Arc::new(Host), Box::new(source)).map_err(io::Error::other)?;
    let mut session = vpmu.attach(0, 0).map_err(io::Error::other)?;
    link(&vpmu, &mut session, &guest.memory);
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

/// Discards interrupts: the driver polls.
#[derive(Debug)]
struct Silent;

impl Interrupt for Silent {
    fn used(&self, _queues: &[u16]) -> io::Result<()> {
        Ok(())
    }
}

/// Opens two clocks. Each overflow of the second clock starts the first clock if the first clock is stopped, and
/// otherwise stops it.
fn link(vpmu: &Vpmu, session: &mut VcpuSession, memory: &GuestMemoryMmap) {
    let (mut drivers, queues): (Vec<_>, Vec<_>) = (0..3)
        .map(|index| {
            let buffers = BUFFERS + index * 2 * DriverQueue::BUFFER;
            DriverQueue::new(memory, QUEUES + index * 0x1000, buffers)
        })
        .unzip();
    vpmu.activate(memory.clone(), FEATURES, &queues, Arc::new(Silent)).expect("active");
    let mut control = Control { vpmu, queue: drivers.remove(0) };
    let open = OpenRequest {
        header: header(CONTROL_OPEN, 0),
        kind: KIND_SOFTWARE.into(),
        flags: OPEN_ENABLED.into(),
        ..OpenRequest::default()
    };
    let target = control.open(&OpenRequest {
        config: TARGET.into(),
        // The target never overflows. The period makes the device open a separate host counter for the target,
        // with `Source::open`, so that `Watched` sees each start and stop of the target.
        period: (u64::MAX >> 1).into(),
        flags: (OPEN_ENABLED | OPEN_PAUSED).into(),
        ..open
    });
    let trigger =
        control.open(&OpenRequest { period: PERIOD.into(), engine: ENGINE_EXIT.into(), flags: 0.into(), ..open });
    for role in [LINK_STARTER, LINK_STOPPER] {
        let answer = control.ask(&LinkRequest {
            header: header(CONTROL_LINK, trigger),
            target: target.into(),
            role: role.into(),
            reserved: 0.into(),
        });
        let reply = ControlReply::read_from_prefix(&answer).expect("a reply").0;
        assert_eq!(reply.status.get(), 0, "linked");
    }
    let enable = Command { op: COMMAND_ENABLE.into(), event: trigger.into(), ..Command::default() };
    let vcpu = &mut drivers[1];
    vcpu.request(enable.as_bytes(), size_of::<Reply>());
    session.kick(QUEUE_VCPU);
    assert!(vcpu.answer().is_some(), "answered immediately");
}

/// The driver's side of the control queue.
struct Control<'a> {
    vpmu: &'a Vpmu,
    queue: DriverQueue,
}

impl Control<'_> {
    fn ask(&mut self, request: &(impl IntoBytes + Immutable)) -> Vec<u8> {
        self.queue.request(request.as_bytes(), 64);
        let _ = self.vpmu.notify(QUEUE_CONTROL);
        self.queue.answer().expect("answered immediately")
    }

    fn open(&mut self, request: &OpenRequest) -> u64 {
        let answer = self.ask(request);
        let reply = OpenReply::read_from_prefix(&answer).expect("a reply").0;
        assert_eq!(reply.status.get(), 0, "opened");
        reply.id.get()
    }
}

fn header(op: u32, event: u64) -> ControlHeader {
    ControlHeader { op: op.into(), reserved: 0.into(), event: event.into() }
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
