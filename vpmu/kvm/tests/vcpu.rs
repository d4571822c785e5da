//! [`VcpuThread`] with a guest of a few instructions, on this host's KVM.
#![expect(clippy::expect_used, reason = "tests fail by panicking")]

use std::io;
use std::sync::Arc;
use std::time::Duration;

use kvm_ioctls::VcpuExit;
use vm_memory::{GuestAddress, GuestMemoryMmap};
use vmm_sys_util::signal::SIGRTMIN;
use vpmu::host::PerfSource;
use vpmu::{Access, Exit, ExitReason, Persist, Registers, Settings, Source, Vpmu};
use vpmu_kvm::micro::{self, Machine, Ring, code, in_loop};
use vpmu_kvm::{DrainTimer, KvmMachine, Statistics, Stats, Threads, VcpuThread, clock_offset, here};
use vpmu_kvm::{kick, registers};

/// `again: mov dword [rdi], 7; jmp again`
#[cfg(target_arch = "x86_64")]
const STORES: &[code::Unit] = &[0xc7, 0x07, 0x07, 0x00, 0x00, 0x00, 0xeb, 0xf8];
/// `mov w1, #7; again: str w1, [x0]; b again`
#[cfg(target_arch = "aarch64")]
const STORES: &[code::Unit] = &[0x5280_00e1, 0xb900_0001, 0x17ff_ffff];

const BUDGET: Duration = Duration::from_secs(20);

/// A device with one vCPU, and the services that its machine provides.
struct Host {
    vpmu: Arc<Vpmu>,
    stats: Arc<Statistics>,
    threads: Arc<Threads>,
}

impl Host {
    fn new() -> Self {
        kick::install(SIGRTMIN()).expect("a handler");
        let (stats, threads) = (Statistics::new(1), Threads::new(1, SIGRTMIN()));
        let (stats, threads) = (Arc::new(stats), Arc::new(threads));
        let machine = KvmMachine {
            stats: Arc::clone(&stats),
            threads: Arc::clone(&threads),
            drain: Arc::new(DrainTimer::new().expect("a timer")),
            guest_ips: false,
        };
        let source = PerfSource::new(SIGRTMIN()).expect("a host");
        let vpmu = Vpmu::new(Settings::new(1, 1_000_000), Arc::new(machine), Box::new(source));
        let window = [(GuestAddress(1 << 32), 64 * vpmu::abi::PAGE_SIZE)];
        let window = GuestMemoryMmap::<()>::from_ranges(&window).expect("memory");
        let vpmu = vpmu.expect("a device").with_window(window);
        Self { vpmu: Arc::new(vpmu.expect("a window")), stats, threads }
    }

    /// Binds the machine's vCPU to this thread.
    fn thread(&self, machine: &Machine) -> VcpuThread {
        let offset = clock_offset(&machine.vcpu).unwrap_or(0);
        let session = self.vpmu.attach(0, offset).expect("the thread is free");
        VcpuThread::new(&machine.vcpu, session).expect("a run page")
    }

    /// Opens a counting event of the operator.
    fn count(&self, event: &str) -> u64 {
        let persist = Persist { name: None, event: event.to_owned(), vcpu: 0, rate: None, sample_type: 0, pages: 0 };
        self.vpmu.persist(&persist).expect("an event")
    }

    fn counted(&self, id: u64) -> u64 {
        let all = self.vpmu.persistent();
        let event = all.iter().find(|event| event.id == id);
        event.expect("the event lives").count
    }
}

/// Builds a machine whose guest repeatedly stores to the device window, and calls `judge` to run it.
fn storing(judge: impl FnOnce(&mut Machine) + Send + 'static) {
    let judge = |machine: &mut Machine| {
        judge(machine);
        Ok(())
    };
    micro::on_machine(BUDGET, Ring::User, STORES, judge).expect("a guest of two instructions runs");
}

const STORE: Exit =
    Exit { reason: ExitReason::Mmio, access: Some(Access { address: code::WINDOW, size: 4, write: true, count: 1 }) };

fn is_interrupted<T>(ran: &Result<T, kvm_ioctls::Error>) -> bool {
    matches!(ran, Err(error) if error.errno() == libc::EINTR)
}

#[test]
fn exit_is_reported_with_its_access_and_registers() {
    storing(|machine| {
        let host = Host::new();
        let mut thread = host.thread(machine);
        for _ in 0..5 {
            let (exit, mut at) = thread.run(&mut machine.vcpu).expect("the guest runs");
            let VcpuExit::MmioWrite(address, data) = exit else {
                panic!("{exit:?}");
            };
            assert_eq!((address, data), (code::WINDOW, &[7, 0, 0, 0][..]));
            assert_eq!(at.exit, STORE);
            // `data` still borrows the vCPU.
            let regs = at.registers.registers().expect("registers from KVM");
            let program = code::PROGRAM..code::PROGRAM + size_of_val(STORES) as u64;
            assert!(program.contains(&regs.ip) && regs.user, "{regs:?}");
            assert_eq!(data[0], 7);
        }
        let session = thread.session().expect("a session");
        assert_eq!((session.exits().mmio, session.exits().total()), (5, 5));
    });
}

#[test]
fn kicked_vcpu_returns_once() {
    storing(|machine| {
        let host = Host::new();
        let mut thread = host.thread(machine);
        assert!(host.threads.kick(0).is_err(), "no thread has joined");
        let _joined = host.threads.join(0);
        for _ in 0..3 {
            host.threads.kick(0).expect("this thread");
            let ran = thread.run(&mut machine.vcpu);
            assert!(is_interrupted(&ran.map(|_| ())));
            thread.run(&mut machine.vcpu).expect("the kick is over");
        }
        thread.return_at_once();
        assert!(is_interrupted(&thread.run(&mut machine.vcpu).map(|_| ())));
        let exits = thread.session().expect("a session").exits();
        assert_eq!((exits.signal, exits.mmio), (4, 3));
        drop(thread);
        host.threads.kick(0).expect("a signal without effect");
        let mut thread = VcpuThread::new(&machine.vcpu, None).expect("a run page");
        thread.run(&mut machine.vcpu).expect("no kick is left");
    });
}

/// Starts an operator's event on `host`. The event is a CPU clock that overflows each time the vCPU's thread has used
/// 20 ms of CPU time.
fn record(host: &Host) -> u64 {
    let clock: Persist = "cpu-clock,period=20000000".parse().expect("a valid event");
    host.vpmu.persist(&clock).expect("a window and a clock")
}

/// Loops until this thread has used `times` × 20 ms of CPU time.
fn work(times: u64) {
    let source = PerfSource::new(SIGRTMIN()).expect("a host");
    let request = vpmu::source::Request { kind: vpmu::abi::KIND_SOFTWARE, ..Default::default() };
    let mut clock = source.open(&request, source.thread()).expect("a clock");
    clock.start().expect("started");
    while clock.read().expect("a count").value < times * 20_000_000 {
        std::hint::black_box(0);
    }
}

#[test]
fn clock_that_overflows_outside_the_guest_makes_the_run_call_return() {
    storing(|machine| {
        let host = Host::new();
        let id = record(&host);
        let mut thread = host.thread(machine);
        work(3);
        assert!(is_interrupted(&thread.run(&mut machine.vcpu).map(|_| ())));
        assert!(host.vpmu.history(id).expect("a ring").iter().count() > 0);
    });
}

#[test]
fn clock_of_a_paused_vcpu_does_not_overflow() {
    storing(|machine| {
        let host = Host::new();
        let id = record(&host);
        let mut thread = host.thread(machine);
        let paused = thread.session().map(vpmu::VcpuSession::pause);
        work(10);
        drop(paused);
        thread.run(&mut machine.vcpu).expect("no overflow occurred");
        assert_eq!(host.vpmu.history(id).expect("a ring").iter().count(), 0);
        work(3);
        assert!(is_interrupted(&thread.run(&mut machine.vcpu).map(|_| ())));
        assert!(host.vpmu.history(id).expect("a ring").iter().count() > 0);
    });
}

#[test]
fn mark_at_an_exit_is_counted_at_once() {
    storing(|machine| {
        let host = Host::new();
        let marks = host.count("marks");
        let mut thread = host.thread(machine);
        let (_, mut at) = thread.run(&mut machine.vcpu).expect("the guest runs");
        at.mark(7);
        assert_eq!(host.counted(marks), 1);
    });
}

#[test]
fn mark_of_a_bus_is_counted_before_the_guest_runs_on() {
    storing(|machine| {
        let host = Host::new();
        let marks = host.count("marks");
        assert!(!here::mark(7), "no vCPU runs here");
        let mut thread = host.thread(machine);
        assert!(here::mark(7) && here::mark(8));
        assert_eq!(host.counted(marks), 0);
        thread.return_at_once();
        assert!(is_interrupted(&thread.run(&mut machine.vcpu).map(|_| ())));
        assert_eq!(host.counted(marks), 2, "before the guest runs");
        thread.run(&mut machine.vcpu).expect("the guest runs");
        assert_eq!(host.counted(marks), 2, "each mark is counted once");
        assert!(here::mark(9));
        drop(thread);
        assert_eq!(host.counted(marks), 3, "the last mark is not lost");
        assert!(!here::mark(7) && !here::kick(2), "no vCPU runs here any more");
    });
}

#[test]
fn machine_without_the_device_runs_all_the_same() {
    storing(|machine| {
        let mut thread = VcpuThread::new(&machine.vcpu, None).expect("a run page");
        let (_, mut at) = thread.run(&mut machine.vcpu).expect("the guest runs");
        at.mark(7);
        assert_eq!(at.exit, STORE);
        assert!(thread.session().is_none() && !here::mark(7));
    });
}

#[test]
fn exits_of_the_statistics_grow_with_the_guests() {
    storing(|machine| {
        let host = Host::new();
        let stats = Stats::open(&machine.vcpu);
        // A KVM without statistics does not count exits.
        let has = stats.is_ok();
        host.stats.begin(vec![stats.ok()]);
        let mut thread = host.thread(machine);
        let before = host.stats.read(0, "exits");
        for _ in 0..5 {
            thread.run(&mut machine.vcpu).expect("the guest runs");
        }
        let after = host.stats.read(0, "exits");
        assert_eq!((before.is_some(), after.is_some()), (has, has));
        assert!(!has || after >= before.map(|exits| exits + 5));
    });
}

#[test]
fn registers_are_read_outside_of_exits() {
    storing(|machine| {
        let regs = registers(&machine.vcpu).registers().expect("registers from KVM");
        assert_eq!((regs.ip, regs.user), (code::PROGRAM, true));
    });
}

#[test]
fn loop_is_observed_until_its_time_is_over() {
    let ips =
        micro::spin(Duration::from_millis(50), Ring::User, || Ok(()), |()| false, |()| Ok(in_loop(code::PROGRAM)));
    assert!(ips.expect("the guest loops"));
    let failed = micro::spin(
        Duration::from_millis(50),
        Ring::User,
        || Err::<(), _>(io::ErrorKind::Other.into()),
        |()| false,
        |()| Ok(()),
    );
    assert!(matches!(failed, Err(micro::MicroError::Observer(_))));
}
