//! A VMM with one vCPU that embeds the device. It needs only `vpmu-kvm` to connect the device with kvm-ioctls. The
//! guest loops in ring 3 and occasionally writes to a port that serves as the doorbell. The guest counts its marks,
//! samples its clock and traces its exits. The operator runs a flight recorder. At the end the guest and the operator
//! print their results.
//!
//! `cargo run -p vpmu --example embed`, on x86-64 with `/dev/kvm`.
//!
//! `vpmu-testkit` and the module `recorder` are not part of the VMM: they provide the guest and the guest's driver.
//! EMBEDDING.md states the number of lines of each section below. A section begins with `// --`.

#[path = "support/recorder.rs"]
mod recorder;

use std::collections::BTreeMap;
use std::error::Error;
use std::io;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use kvm_ioctls::{Kvm, VcpuExit};
use vm_memory::{GuestAddress, GuestMemoryMmap};
use vmm_sys_util::signal::SIGRTMIN;
use vpmu::host::PerfSource;
use vpmu::{Persist, QueueState, Settings, Vpmu, abi};
use vpmu_kvm::{DrainTimer, KvmMachine, Statistics, Stats, Threads, VcpuThread, clock_offset, kick, probe};
use vpmu_testkit::{Guest, Silent};

use recorder::Recorder;

/// `outer: mov ecx, 1 << 20; inner: inc qword [rdi]; dec ecx; jnz inner; mov al, 7; out 0x80, al; jmp outer`
const PROGRAM: [u8; 18] =
    [0xb9, 0x00, 0x00, 0x10, 0x00, 0x48, 0xff, 0x07, 0xff, 0xc9, 0x75, 0xf9, 0xb0, 0x07, 0xe6, 0x80, 0xeb, 0xee];
/// Addresses of the program's hot loop.
const HOT: std::ops::Range<u64> = 0x8005..0x800c;
const DOORBELL: u16 = 0x80;
/// The assumed frequency of the guest's TSC in kHz. If the real frequency differs, times in records are wrong.
const TSC_KHZ: u32 = 1_000_000;
/// The VMM stops the guest when the guest's clock and the flight recorder have this many samples each.
const ENOUGH: usize = 20;
const WINDOW: GuestAddress = GuestAddress(1 << 32);
const WINDOW_BYTES: usize = 64 * abi::PAGE_SIZE;

// -- machine: the services that the device needs from its VMM.

fn machine(guest: &Guest) -> io::Result<Arc<KvmMachine>> {
    let stats = Statistics::new(1);
    stats.begin(vec![Stats::open(&guest.vcpu).ok()]);
    Ok(Arc::new(KvmMachine {
        stats: Arc::new(stats),
        threads: Arc::new(Threads::new(1, SIGRTMIN())),
        drain: Arc::new(DrainTimer::new()?),
        guest_ips: probe::guest_ips(),
    }))
}

/// Starts a thread that drains the device until [`DrainTimer::end`] is called.
fn drain(host: &Arc<KvmMachine>, vpmu: &Arc<Vpmu>) -> JoinHandle<()> {
    let (host, vpmu) = (Arc::clone(host), Arc::clone(vpmu));
    thread::spawn(move || {
        while host.drain.wait() {
            vpmu.drain();
        }
    })
}

// -- device: created before the guest runs.

fn device(host: &Arc<KvmMachine>) -> Result<Arc<Vpmu>, Box<dyn Error>> {
    kick::install(SIGRTMIN())?;
    let settings = Settings::new(1, TSC_KHZ);
    let source = PerfSource::new(SIGRTMIN())?;
    let window = GuestMemoryMmap::<()>::from_ranges(&[(WINDOW, WINDOW_BYTES)])?;
    let vpmu = Vpmu::new(settings, Arc::clone(host) as _, Box::new(source))?;
    Ok(Arc::new(vpmu.with_window(window)?))
}

/// Starts the flight recorder, which needs neither a driver nor the guest's cooperation.
fn record_flight(vpmu: &Vpmu) -> Result<u64, Box<dyn Error>> {
    let flight: Persist = "cpu-clock,freq=1000,name=flight".parse()?;
    Ok(vpmu.persist(&flight)?)
}

// -- transport: when the driver has set up its queues, passes them to the device.

/// In a VMM with a virtio transport, the transport calls this when the driver sets `DRIVER_OK`. The driver of this
/// example polls its queues and needs no interrupts, so the device gets [`Silent`].
fn activate(vpmu: &Vpmu, memory: &GuestMemoryMmap, queues: &[QueueState]) -> Result<(), vpmu::Error> {
    let features = vpmu.features();
    vpmu.activate(memory.clone(), features, queues, Arc::new(Silent))
}

// -- vcpu: each entry and exit is reported.

/// Binds the vCPU to this thread.
fn attach(vpmu: &Vpmu, guest: &Guest) -> Result<VcpuThread, Box<dyn Error>> {
    // Before Linux 5.16 KVM reports no offset.
    let offset = clock_offset(&guest.vcpu).unwrap_or(0);
    Ok(VcpuThread::new(&guest.vcpu, vpmu.attach(0, offset)?)?)
}

/// Runs the guest until its next exit. Returns whether the exit was a write to the doorbell.
fn run_once(guest: &mut Guest, vcpu: &mut VcpuThread) -> Result<bool, Box<dyn Error>> {
    match vcpu.run(&mut guest.vcpu) {
        Ok((VcpuExit::IoOut(DOORBELL, data), mut at)) => {
            at.mark(data.first().copied().map_or(0, u32::from));
            Ok(true)
        }
        Err(error) if error.errno() == libc::EINTR => Ok(false),
        Err(error) => Err(error.into()),
        Ok((other, _)) => Err(format!("unexpected exit of the guest: {other:?}").into()),
    }
}

// -- end of the VMM.

fn main() -> Result<(), Box<dyn Error>> {
    let mut guest = Guest::new(&Kvm::new()?, &PROGRAM)?;
    let host = machine(&guest)?;
    let vpmu = device(&host)?;
    let flight = record_flight(&vpmu)?;
    let drains = drain(&host, &vpmu);
    let _joined = host.threads.join(0);
    let mut vcpu = attach(&vpmu, &guest)?;
    let mut recorder = Recorder::new(&vpmu, &guest.memory, |memory, queues| activate(&vpmu, memory, queues))?;
    recorder.start(vcpu.session().ok_or("no session")?)?;
    let mut rung = 0_u64;
    let flown = loop {
        let rings = run_once(&mut guest, &mut vcpu)?;
        rung += u64::from(rings);
        let history = vpmu.history(flight)?;
        let flown: Vec<u64> = history.iter().filter_map(recorder::identified_ip).collect();
        // The device writes an exit's packet at the next entry. Don't stop right after a write to the doorbell: the
        // packet of this exit would be missing.
        if !rings && flown.len() >= ENOUGH && recorder.samples()?.len() >= ENOUGH {
            break flown;
        }
    };
    let seen = recorder.stop(vcpu.session().ok_or("no session")?, DOORBELL)?;
    host.drain.end();
    drains.join().map_err(|_| "the draining thread panicked")?;
    println!("counted: {} marks, {rung} writes to the doorbell", seen.marks);
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
