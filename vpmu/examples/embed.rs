//! A VMM of one vCPU that carries the device, with nothing between it and kvm-ioctls. Its guest loops in
//! ring 3 and writes to a port now and then: the doorbell. The guest counts its marks, samples its clock and
//! traces its exits; the operator keeps a flight recorder. Then both read what there is.
//!
//! `cargo run -p vpmu --example embed`, on x86-64 with `/dev/kvm`.
//!
//! `guest` is the micro guest, `driver` its half of the device: a VMM has neither. EMBEDDING.md counts the
//! lines of the sections below, which begin with `// --`.

#![expect(unsafe_code, reason = "guest memory, and a byte for a signal handler")]

#[path = "support/driver.rs"]
mod driver;
#[expect(dead_code, reason = "the benchmark counts its rounds")]
#[path = "../benches/slowdown/guest.rs"]
mod guest;

use std::collections::BTreeMap;
use std::error::Error;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::time::{Duration, Instant};

use kvm_ioctls::{Kvm, VcpuExit};
use vm_memory::{GuestAddress, GuestMemoryMmap};
use vmm_sys_util::signal::{SIGRTMIN, register_signal_handler};
use vpmu::host::PerfSource;
use vpmu::source::Rate;
use vpmu::{
    Access, Exit, ExitReason, Machine, Persist, QueueState, Settings, VcpuSession, Vpmu, abi,
};

use driver::{Driver, Silent};
use guest::{Exited, Guest};

/// `outer: mov ecx, 1 << 20; inner: inc qword [rdi]; dec ecx; jnz inner; mov al, 7; out 0x80, al; jmp outer`
const PROGRAM: [u8; 18] = [
    0xb9, 0x00, 0x00, 0x10, 0x00, 0x48, 0xff, 0x07, 0xff, 0xc9, 0x75, 0xf9, 0xb0, 0x07, 0xe6, 0x80,
    0xeb, 0xee,
];
/// Where it lies, and where its hot loop begins and ends.
const HOT: std::ops::Range<u64> = 0x8005..0x800c;
const DOORBELL: u16 = 0x80;
/// The guest's TSC, in kHz: of a guest that has the host's. Its times come out wrong if it is another.
const TSC_KHZ: u32 = 1_000_000;
/// Samples that each of the two clocks takes before the run ends.
const ENOUGH: usize = 20;
const WINDOW: GuestAddress = GuestAddress(1 << 32);
const WINDOW_BYTES: usize = 64 * abi::PAGE_SIZE;
const DRAIN_EVERY: Duration = Duration::from_millis(10);

// -- machine: the services that the device asks for.

#[derive(Debug, Default)]
struct Host {
    draining: AtomicBool,
}

impl Machine for Host {
    // From KVM's binary statistics, in a VMM that reads them.
    fn exits(&self, _vcpu: u32) -> Option<u64> {
        None
    }

    fn halts(&self, _vcpu: u32) -> Option<u64> {
        None
    }

    fn draining(&self, wanted: bool) {
        self.draining.store(wanted, Ordering::Relaxed);
    }
}

// -- signal: an overflow makes the run call return, also when it has not been entered yet.

/// `immediate_exit` of the vCPU; one for each thread, and so thread-local, in a VMM with several.
static IMMEDIATE_EXIT: AtomicPtr<u8> = AtomicPtr::new(std::ptr::null_mut());

extern "C" fn kicked(_: i32, _: *mut libc::siginfo_t, _: *mut libc::c_void) {
    let flag = IMMEDIATE_EXIT.load(Ordering::Relaxed);
    if !flag.is_null() {
        // SAFETY: in the run page, which is mapped for as long as this is not null.
        unsafe { flag.write_volatile(1) };
    }
}

/// While it lives, the handler has a vCPU. Counters of the thread overflow even after its session.
struct Handled;

impl Drop for Handled {
    fn drop(&mut self) {
        IMMEDIATE_EXIT.store(std::ptr::null_mut(), Ordering::Relaxed);
    }
}

/// The result is dropped before the guest.
fn install(guest: &mut Guest) -> io::Result<Handled> {
    // The kernel sends SIGIO when the queue of real-time signals is full.
    for signal in [SIGRTMIN(), libc::SIGIO] {
        register_signal_handler(signal, kicked)?;
    }
    let run = guest.vcpu.get_kvm_run();
    IMMEDIATE_EXIT.store(&raw mut run.immediate_exit, Ordering::Relaxed);
    Ok(Handled)
}

// -- device: made before the guest runs.

fn device(host: &Arc<Host>) -> Result<Arc<Vpmu>, Box<dyn Error>> {
    let settings = Settings::new(1, TSC_KHZ);
    let source = PerfSource::new(SIGRTMIN())?;
    let window = GuestMemoryMmap::<()>::from_ranges(&[(WINDOW, WINDOW_BYTES)])?;
    let vpmu = Vpmu::new(settings, Arc::clone(host) as _, Box::new(source))?;
    Ok(Arc::new(vpmu.with_window(window)?))
}

/// The flight recorder: it needs neither a driver nor a guest that knows of it.
fn record_flight(vpmu: &Vpmu) -> Result<u64, Box<dyn Error>> {
    let persist = Persist {
        name: Some("flight".to_owned()),
        event: "cpu-clock".to_owned(),
        vcpu: 0,
        rate: Some(Rate::Frequency(1000)),
        sample_type: driver::IP_TID_TIME,
        pages: 16,
    };
    Ok(vpmu.persist(&persist)?)
}

// -- transport: what the driver has set up reaches the device.

/// The call of a virtio transport at `DRIVER_OK`. This guest polls, so its interrupt is silent.
fn activate(
    vpmu: &Vpmu,
    memory: &GuestMemoryMmap,
    queues: &[QueueState],
) -> Result<(), vpmu::Error> {
    let features = vpmu.features();
    vpmu.activate(memory.clone(), features, queues, Arc::new(Silent))
}

// -- vcpu: each entry and exit is reported.

/// Runs the guest once; whether it rang the doorbell.
fn run_once(guest: &mut Guest, session: &mut VcpuSession) -> Result<bool, Box<dyn Error>> {
    session.enter();
    // The exit borrows the vCPU: what the device needs of it is copied first.
    let (exit, mark) = match guest.vcpu.run() {
        Ok(VcpuExit::IoOut(port, data)) => {
            let access = Access {
                address: port.into(),
                size: u8::try_from(data.len())?,
                write: true,
                count: 1,
            };
            let exit = Exit {
                reason: ExitReason::Io,
                access: Some(access),
            };
            let value = data.first().copied().map(u32::from);
            (exit, value.filter(|_| port == DOORBELL))
        }
        Err(error) if error.errno() == libc::EINTR => (ExitReason::Signal.into(), None),
        Err(error) => return Err(error.into()),
        Ok(other) => return Err(format!("the guest left: {other:?}").into()),
    };
    // Before the exit is reported: an overflow from here on makes the next run call return.
    guest.vcpu.set_kvm_immediate_exit(0);
    session.leave(exit, &mut Exited(&guest.vcpu));
    if let Some(value) = mark {
        session.mark(value, &mut Exited(&guest.vcpu));
    }
    Ok(mark.is_some())
}

// -- end of the VMM.

fn main() -> Result<(), Box<dyn Error>> {
    let host = Arc::new(Host::default());
    let vpmu = device(&host)?;
    let mut guest = Guest::new(&Kvm::new()?, &PROGRAM)?;
    let _handled = install(&mut guest)?;
    let flight = record_flight(&vpmu)?;
    let mut session = vpmu.attach(0, 0)?;
    let mut driver = Driver::new(&vpmu, &guest.memory, |memory, queues| {
        activate(&vpmu, memory, queues)
    })?;
    driver.start(&mut session)?;
    let (mut rung, mut drained) = (0_u64, Instant::now());
    let flown = loop {
        let rings = run_once(&mut guest, &mut session)?;
        rung += u64::from(rings);
        if host.draining.load(Ordering::Relaxed) && drained.elapsed() >= DRAIN_EVERY {
            // On a thread that is no vCPU's, in a VMM that has one.
            vpmu.drain();
            drained = Instant::now();
        }
        let history = vpmu.history(flight)?;
        let flown: Vec<u64> = history.iter().filter_map(driver::ip).collect();
        // An exit is traced when it is over: not after a ring.
        if !rings && flown.len() >= ENOUGH && driver.samples()?.len() >= ENOUGH {
            break flown;
        }
    };
    let seen = driver.stop(&mut session, DOORBELL)?;
    println!(
        "counted: {} marks, {rung} rings of the doorbell",
        seen.marks
    );
    println!("traced: {} exits to port {DOORBELL:#x}", seen.exits);
    report("sampled", &seen.samples);
    report("flight recorder", &flown);
    Ok(())
}

fn report(what: &str, samples: &[u64]) {
    let hot = samples.iter().filter(|ip| HOT.contains(ip)).count();
    let mut addresses = BTreeMap::new();
    for ip in samples {
        *addresses.entry(ip).or_insert(0_u64) += 1;
    }
    println!("{what}: {} samples, {hot} in the hot loop", samples.len());
    for (ip, count) in addresses {
        println!("  {ip:#x} {count}");
    }
}
