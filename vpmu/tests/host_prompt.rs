//! Prompt sampling with a real clock of the host: the event changes from the batched engine to the exit engine and back.
#![expect(clippy::expect_used, reason = "tests fail by panicking")]

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vm_memory::{GuestAddress, GuestMemoryMmap};
use vmm_sys_util::signal::SIGRTMIN;
use vpmu::abi::*;
use vpmu::host::PerfSource;
use vpmu::{ExitReason, Limits, Metrics, Settings, VcpuSession, Vpmu};
use vpmu_testkit::{At, Bare, Driver, Layout, command, ignore_signals, open_of};

/// perf's `PERF_COUNT_SW_TASK_CLOCK`.
const TASK_CLOCK: u64 = 1;
const MEMORY_LEN: usize = 0x200_0000;
const RING: u64 = 0x10_0000;
/// Data pages of the ring.
const PAGES: u64 = 64;

/// A device of one vCPU, whose thread is the calling thread.
struct Guest {
    vpmu: Arc<Vpmu>,
    vcpu: VcpuSession,
    driver: Driver,
}

impl Guest {
    fn new() -> Self {
        let limits = Limits::default().with(|limits| {
            limits.max_sample_rate = 1_000_000;
            limits.max_sampling_percent = 100;
        });
        let settings = Settings::new(1, 1_000_000).with_limits(limits);
        let source = PerfSource::new(SIGRTMIN()).expect("a source");
        let machine = Arc::new(Bare { guest_ips: true });
        let vpmu = Arc::new(Vpmu::new(settings, machine, Box::new(source)).expect("a device"));
        let memory = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), MEMORY_LEN)]).expect("memory");
        let driver = Driver::activate(&vpmu, &memory, Layout::SMALL, 1 << 32 | 1 << F_RING).expect("active");
        let vcpu = vpmu.attach(0, 0).expect("the vCPU");
        Self { vpmu, vcpu, driver }
    }

    /// Opens an enabled event that samples every millisecond with the batched engine, and maps its ring.
    fn open(&mut self) -> u64 {
        let reply: OpenReply = self.driver.ask(&OpenRequest {
            period: 1_000_000.into(),
            sample_type: 1.into(),
            flags: OPEN_ENABLED.into(),
            wakeup: u32::MAX.into(),
            ..open_of(KIND_SOFTWARE, TASK_CLOCK, 0)
        });
        let opened = (reply.status.get(), reply.engine.get());
        assert_eq!(opened, (0, ENGINE_BATCHED));
        let event = reply.id.get();
        self.driver.map(CONTROL_MAP, event, 0, RING, PAGES + 1).expect("mapped");
        event
    }

    fn command(&mut self, op: u32, event: u64, value: u64) -> Reply {
        let command = Command { value: value.into(), ..command(op, event) };
        self.driver.commands(&mut self.vcpu, &[command]).expect("a command that succeeds")[0]
    }

    /// Runs the vCPU, with exits, until `enough` holds for the device's metrics.
    fn run(&mut self, enough: impl Fn(&Metrics) -> bool) {
        let begun = Instant::now();
        while !enough(&self.vpmu.metrics()) {
            assert!(begun.elapsed() < Duration::from_secs(60), "no samples");
            self.vcpu.enter();
            let entered = Instant::now();
            while entered.elapsed() < Duration::from_millis(1) {
                black_box(());
            }
            self.vcpu.leave(ExitReason::Signal, &mut At(0x1234));
            self.vpmu.drain();
        }
    }
}

/// VPMU-D-6.6-15, VPMU-D-6.6-16.
#[test]
fn prompt_event_wakes_at_each_sample_of_the_hosts_clock() {
    ignore_signals();
    let mut guest = Guest::new();
    let event = guest.open();
    let before = |guest: &Guest| {
        let metrics = guest.vpmu.metrics();
        (metrics.host_overflows, metrics.samples_written, metrics.wakeups)
    };
    let mut count = 0;
    for round in 1..=3 {
        // This thread does not run a guest, so the host records only overflows during its own work.
        let (overflows, samples, wakeups) = before(&guest);
        guest.run(|metrics| metrics.host_overflows >= overflows + 5);
        let prompt = guest.command(COMMAND_PROMPT, event, 1);
        assert!(prompt.value.get() >= count + 5_000_000, "{prompt:?}");
        assert_eq!(prompt.state.get(), STATE_ACTIVE);
        let (_, written, woken) = before(&guest);
        assert_eq!((written, woken), (samples, wakeups), "round {round}");
        guest.run(|metrics| metrics.samples_written >= samples + 5);
        let later = guest.command(COMMAND_PROMPT, event, 0);
        let (_, written, woken) = before(&guest);
        assert_eq!(written - samples, woken - wakeups, "round {round}");
        assert!(later.value.get() >= prompt.value.get() + 5_000_000);
        assert_eq!(guest.command(COMMAND_READ, event, 0).lost.get(), 0);
        count = later.value.get();
    }
}
