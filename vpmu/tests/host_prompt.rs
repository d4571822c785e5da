//! Prompt sampling with a real clock of the host: the event changes from the batched engine to the exit engine and back.
#![expect(clippy::expect_used, reason = "tests fail by panicking")]

#[expect(dead_code, reason = "other tests use the rest of the module")]
mod common;
#[path = "device/driver.rs"]
#[expect(dead_code, reason = "the tests of hostile guests use the rest of the module")]
mod driver;

use std::hint::black_box;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vm_memory::{GuestAddress, GuestMemoryMmap};
use vmm_sys_util::signal::SIGRTMIN;
use vpmu::abi::*;
use vpmu::host::PerfSource;
use vpmu::{ExitReason, Interrupt, Limits, Machine, Metrics, Settings, Turn, VcpuSession, Vpmu};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use self::common::{Still, ignore_signals};
use self::driver::{DriverQueue, QUEUE_SIZE};

/// perf's `PERF_COUNT_SW_TASK_CLOCK`.
const TASK_CLOCK: u64 = 1;
const MEMORY_LEN: usize = 0x200_0000;
const QUEUES: u64 = 0x1_0000;
const RING: u64 = 0x8_0000;
const BUFFERS: u64 = 0x10_0000;
/// Data pages of the ring.
const PAGES: u64 = 64;

/// A machine whose host samples have guest addresses.
#[derive(Debug)]
struct Reporting;

impl Machine for Reporting {
    fn exits(&self, _vcpu: u32) -> Option<u64> {
        None
    }

    fn halts(&self, _vcpu: u32) -> Option<u64> {
        None
    }

    fn reports_guest_ips(&self) -> bool {
        true
    }
}

#[derive(Debug)]
struct Silent;

impl Interrupt for Silent {
    fn used(&self, _queues: &[u16]) -> io::Result<()> {
        Ok(())
    }
}

/// A device of one vCPU, whose thread is the calling thread.
struct Guest {
    vpmu: Arc<Vpmu>,
    vcpu: VcpuSession,
    queues: Vec<DriverQueue>,
}

impl Guest {
    fn new() -> Self {
        let limits = Limits::default().with(|limits| {
            limits.max_sample_rate = 1_000_000;
            limits.max_sampling_percent = 100;
        });
        let settings = Settings::new(1, 1_000_000).with_limits(limits);
        let source = PerfSource::new(SIGRTMIN()).expect("a source");
        let vpmu = Vpmu::new(settings, Arc::new(Reporting), Box::new(source));
        let vpmu = Arc::new(vpmu.expect("a device"));
        let range = [(GuestAddress(0), MEMORY_LEN)];
        let memory = GuestMemoryMmap::<()>::from_ranges(&range).expect("memory");
        let (queues, states): (Vec<_>, Vec<_>) = (0..3)
            .map(|index| {
                let buffers = BUFFERS + index * u64::from(QUEUE_SIZE) * DriverQueue::BUFFER;
                DriverQueue::new(&memory, QUEUES + index * 0x1000, buffers)
            })
            .unzip();
        vpmu.activate(memory, 1 << 32 | 1 << F_RING, &states, Arc::new(Silent)).expect("active");
        let vcpu = vpmu.attach(0, 0).expect("the vCPU");
        Self { vpmu, vcpu, queues }
    }

    fn ask<T: FromBytes>(&mut self, request: &(impl IntoBytes + Immutable + ?Sized)) -> T {
        self.queues[0].request(request.as_bytes(), size_of::<T>());
        let _ = self.vpmu.notify(QUEUE_CONTROL);
        let answer = self.queues[0].answer().expect("answered immediately");
        T::read_from_bytes(&answer).expect("a reply")
    }

    /// Opens an enabled event that samples every millisecond with the batched engine, and maps its ring.
    fn open(&mut self) -> u64 {
        let header = |op: u32, event: u64| ControlHeader { op: op.into(), reserved: 0.into(), event: event.into() };
        let reply: OpenReply = self.ask(&OpenRequest {
            header: header(CONTROL_OPEN, 0),
            kind: KIND_SOFTWARE.into(),
            config: TASK_CLOCK.into(),
            period: 1_000_000.into(),
            sample_type: 1.into(),
            flags: OPEN_ENABLED.into(),
            wakeup: u32::MAX.into(),
            ..OpenRequest::default()
        });
        let opened = (reply.status.get(), reply.engine.get());
        assert_eq!(opened, (0, ENGINE_BATCHED));
        let event = reply.id.get();
        let request = MapRequest {
            header: header(CONTROL_MAP, event),
            pages: u32::try_from(PAGES + 1).expect("few").into(),
            flags: 0.into(),
        };
        let mut bytes = request.as_bytes().to_vec();
        for page in 0..=PAGES {
            bytes.extend((RING + page * 0x1000).to_le_bytes());
        }
        let reply: ControlReply = self.ask(bytes.as_slice());
        assert_eq!(reply.status.get(), 0);
        event
    }

    fn command(&mut self, op: u32, event: u64, value: u64) -> Reply {
        let command = Command { op: op.into(), event: event.into(), value: value.into(), ..Command::default() };
        self.queues[2].request(command.as_bytes(), size_of::<Reply>());
        self.vcpu.kick(QUEUE_VCPU);
        while self.vcpu.resume() == Turn::Unfinished {}
        let answer = self.queues[2].answer().expect("answered immediately");
        let reply = Reply::read_from_bytes(&answer).expect("whole");
        assert_eq!(reply.status.get(), 0, "{reply:?}");
        reply
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
            self.vcpu.leave(ExitReason::Signal, &mut Still(0x1234));
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
