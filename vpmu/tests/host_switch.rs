//! Task switches with real software events. The tests check the counts, and how many system calls and file descriptors
//! the switches cost.
#![expect(unsafe_code, reason = "a limit on huge pages has no safe wrapper")]
#![expect(clippy::expect_used, reason = "tests fail by panicking")]

mod syscalls;

use std::fs;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::Duration;

use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vmm_sys_util::signal::SIGRTMIN;
use vpmu::abi::*;
use vpmu::host::PerfSource;
use vpmu::{Engines, ExitReason, Limits, Settings, Turn, VcpuSession, Vpmu};
use vpmu_testkit::{
    At, Bare, Driver, DriverQueue, Errno, Layout, QUEUE_SIZE, alone, commands, open_of, outcome, replies,
    size_of_replies,
};
use zerocopy::IntoBytes;

const CPU_CLOCK: u64 = 0;
const PAGE_FAULTS: u64 = 2;
/// Software events that every Linux kernel counts.
const CONFIGS: u64 = 5;
/// How many events each task has in the measurements.
const SIZES: [usize; 3] = [1, 6, 20];
const MEMORY_LEN: usize = 0x200_0000;
const QUEUES: u64 = 0x1_0000;
const BUFFERS: u64 = 0x10_0000;
/// Maximum number of commands per notification.
const MOST_COMMANDS: usize = 2048;
/// How long to wait. No work of a vCPU takes this long, even on a busy machine.
const LONG: Duration = Duration::from_secs(120);

/// A device on this host, with its driver.
struct Guest {
    vpmu: Arc<Vpmu>,
    driver: Driver,
}

/// A vCPU on this thread, with the driver's side of its queue.
struct Lane {
    index: u16,
    vcpu: VcpuSession,
    queue: DriverQueue,
}

impl Guest {
    /// Creates a device. Also returns the driver's side of each vCPU queue.
    fn new(vcpus: u32, max_events: u32) -> (Self, Vec<DriverQueue>) {
        let settings = Settings::new(vcpus, 1_000_000)
            .with_limits(Limits::default().with(|limits| limits.max_events = max_events))
            .with_engines(Engines::Exit);
        let source = PerfSource::new(SIGRTMIN()).expect("a source");
        let vpmu = Vpmu::new(settings, Arc::new(Bare::default()), Box::new(source)).expect("a device");
        let vpmu = Arc::new(vpmu);
        let range = [(GuestAddress(0), MEMORY_LEN)];
        let memory = GuestMemoryMmap::<()>::from_ranges(&range).expect("memory");
        let layout = Layout { vcpus, rings: QUEUES, buffers: BUFFERS, slots: QUEUE_SIZE };
        let driver = Driver::activate(&vpmu, &memory, layout, 1 << 32 | 1 << F_RING);
        let mut driver = driver.expect("active");
        let lanes = driver.queues.split_off(usize::from(QUEUE_VCPU));
        (Self { vpmu, driver }, lanes)
    }

    /// Attaches the calling thread to vCPU `index`.
    fn lane(&self, index: u16, queue: DriverQueue) -> Lane {
        let vcpu = self.vpmu.attach(index.into(), 0).expect("the device has this vCPU");
        Lane { index, vcpu, queue }
    }

    fn try_open(&mut self, request: &OpenRequest) -> Result<u64, Errno> {
        let reply: OpenReply = self.driver.ask(request);
        outcome(reply.status.get()).map(|()| reply.id.get())
    }

    fn open(&mut self, request: &OpenRequest) -> u64 {
        self.try_open(request).expect("perf_event_open: see /proc/sys/kernel/perf_event_paranoid")
    }

    /// Opens enabled events of a task. Their number is `events`, and their configs cycle through 0 to `CONFIGS` - 1.
    fn task(&mut self, events: usize) -> Vec<u64> {
        let configs = (0..CONFIGS).cycle().take(events);
        configs.map(|config| self.open(&counting(config))).collect()
    }

    fn close(&mut self, event: u64) {
        self.driver.close(event).expect("closed");
    }
}

impl Lane {
    /// Sends these commands in a notification. They must succeed. Returns the number of system calls that the
    /// notification makes.
    fn system_calls(&mut self, commands: &[Command]) -> usize {
        self.offer(commands);
        let calls = syscalls::count(|| self.kick());
        self.replies();
        calls
    }

    /// Sends these commands in notifications. They must succeed. Returns their replies.
    fn run(&mut self, commands: &[Command]) -> Vec<Reply> {
        let mut replies = Vec::new();
        for commands in commands.chunks(MOST_COMMANDS) {
            self.offer(commands);
            self.kick();
            replies.extend(self.replies());
        }
        replies
    }

    fn offer(&mut self, commands: &[Command]) {
        self.queue.request(commands.as_bytes(), size_of_replies(commands));
    }

    fn kick(&mut self) {
        self.vcpu.kick(QUEUE_VCPU + self.index);
        while self.vcpu.resume() == Turn::Unfinished {}
    }

    fn replies(&mut self) -> Vec<Reply> {
        replies(&self.queue.answer().expect("answered immediately")).expect("commands that succeed")
    }

    fn value(&mut self, event: u64) -> u64 {
        self.run(&commands(COMMAND_READ, &[event]))[0].value.get()
    }
}

/// Returns a request for an enabled task event of kind `KIND_SOFTWARE`.
fn counting(config: u64) -> OpenRequest {
    OpenRequest { flags: OPEN_ENABLED.into(), ..open_of(KIND_SOFTWARE, config, CONTEXT_TASK) }
}

/// Switches from one task to another.
fn switch(from: &[u64], to: &[u64]) -> Vec<Command> {
    [commands(COMMAND_OUT, from), commands(COMMAND_IN, to)].concat()
}

/// Disables transparent huge pages for this process, so that each fault maps one small page.
fn have_small_pages() {
    // SAFETY: the call takes no pointer.
    let set = unsafe { libc::prctl(libc::PR_SET_THP_DISABLE, 1, 0, 0, 0) };
    assert_eq!(set, 0);
}

/// Causes a page fault for each of `pages` pages. `pages` must be at least one.
fn touch(pages: u64) {
    have_small_pages();
    let length = usize::try_from(pages).expect("few") * 4096;
    let fresh = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), length)]).expect("memory");
    for page in 0..pages {
        let written = fresh.write_obj(1_u8, GuestAddress(page * 4096));
        written.expect("in memory");
    }
}

fn open_descriptors() -> usize {
    fs::read_dir("/proc/self/fd").expect("readable").count()
}

#[test]
fn switch_of_any_number_of_events_makes_one_system_call() {
    let _alone = alone();
    for events in SIZES {
        let (mut guest, mut queues) = Guest::new(1, 1024);
        let mut lane = guest.lane(0, queues.remove(0));
        let (one, other) = (guest.task(events), guest.task(events));
        // Run each task once before the measurement, so that its host counters are open and all buffers have their
        // final size.
        for task in [&one, &other] {
            lane.run(&commands(COMMAND_IN, task));
            lane.run(&commands(COMMAND_OUT, task));
        }
        lane.run(&switch(&[], &one));
        lane.run(&switch(&one, &other));
        lane.run(&switch(&other, &[]));

        let scheduled_in = lane.system_calls(&commands(COMMAND_IN, &one));
        let read = lane.system_calls(&commands(COMMAND_READ, &one));
        let switched = lane.system_calls(&switch(&one, &other));
        let back = lane.system_calls(&switch(&other, &one));
        let scheduled_out = lane.system_calls(&commands(COMMAND_OUT, &one));
        let idle = lane.system_calls(&commands(COMMAND_READ, &one));
        eprintln!(
            "{events} events: IN {scheduled_in}, READ {read}, OUT {scheduled_out}, \
             OUT and IN {switched} and {back}, READ of a task that is out {idle} system calls"
        );
        let calls = [scheduled_in, read, switched, back, scheduled_out];
        assert_eq!(calls, [1; 5], "{events} events");
        assert_eq!(idle, 0, "{events} events");
    }
}

#[test]
fn switch_of_any_number_of_clock_samples_switches_the_host_once() {
    let _alone = alone();
    for events in SIZES {
        let (mut guest, mut queues) = Guest::new(1, 1024);
        let mut lane = guest.lane(0, queues.remove(0));
        let task: Vec<u64> = (0..events)
            .map(|_| guest.open(&OpenRequest { period: 3_600_000_000_000.into(), ..counting(CPU_CLOCK) }))
            .collect();
        lane.run(&commands(COMMAND_IN, &task));
        lane.run(&commands(COMMAND_OUT, &task));

        let scheduled_in = lane.system_calls(&commands(COMMAND_IN, &task));
        let scheduled_out = lane.system_calls(&commands(COMMAND_OUT, &task));
        eprintln!("{events} sampling: IN {scheduled_in}, OUT {scheduled_out} system calls");
        assert_eq!(scheduled_in, 1, "{events} events");
        // The device reads each sampling counter with a separate system call.
        assert_eq!(scheduled_out, 1 + events, "{events} events");
    }
}

#[test]
fn switch_of_events_that_the_device_counts_makes_no_system_call() {
    let _alone = alone();
    let (mut guest, mut queues) = Guest::new(1, 1024);
    let mut lane = guest.lane(0, queues.remove(0));
    let kinds = [(KIND_MARK, 5), (KIND_TSC, 0), (KIND_EXITS, EXIT_MMIO), (KIND_EXITS, EXIT_USER)];
    let events = kinds.map(|(kind, config)| guest.open(&OpenRequest { kind: kind.into(), ..counting(config) }));
    lane.run(&commands(COMMAND_IN, &events));
    lane.run(&commands(COMMAND_OUT, &events));
    for op in [COMMAND_IN, COMMAND_READ, COMMAND_OUT] {
        assert_eq!(lane.system_calls(&commands(op, &events)), 0, "command {op}");
    }
}

#[test]
fn exits_and_marks_without_samples_make_no_system_call() {
    let _alone = alone();
    let (mut guest, mut queues) = Guest::new(1, 1024);
    let mut lane = guest.lane(0, queues.remove(0));
    let task = guest.task(20);
    let mark = guest.open(&OpenRequest { kind: KIND_MARK.into(), ..counting(7) });
    lane.run(&commands(COMMAND_IN, &task));
    lane.run(&commands(COMMAND_IN, &[mark]));
    let visits = syscalls::count(|| {
        for _ in 0..1000 {
            lane.vcpu.enter();
            lane.vcpu.leave(ExitReason::Io, &mut At(1));
        }
    });
    let marks = syscalls::count(|| {
        for _ in 0..1000 {
            lane.vcpu.mark(7, &mut At(1));
        }
    });
    eprintln!("1000 entries and exits: {visits} system calls, 1000 marks: {marks} system calls");
    assert_eq!((visits, marks), (0, 0));
    assert_eq!(lane.value(mark), 1000);
}

#[test]
fn page_faults_count_for_the_task_that_is_in() {
    const K: u64 = 300;
    let _alone = alone();
    let (mut guest, mut queues) = Guest::new(1, 1024);
    let mut lane = guest.lane(0, queues.remove(0));
    let (one, other) = (guest.task(6), guest.task(6));
    // The third event of each task counts page faults.
    let at = usize::try_from(PAGE_FAULTS).expect("small");
    let faults = |replies: &[Reply], from: usize| replies[from + at].value.get();
    let mut visit = |task: &[u64], pages: u64| {
        lane.run(&commands(COMMAND_IN, task));
        touch(pages);
        faults(&lane.run(&commands(COMMAND_OUT, task)), 0)
    };
    // Call `visit` for each task before the measurement, so that pages of code, stack and buffers are in memory.
    for task in [&one, &other, &one, &other] {
        visit(task, 1);
    }
    let mut counted = [&one, &other].map(|task| visit(task, 1));
    let mut grown = |task: usize, pages| {
        let now = visit([&one, &other][task], pages);
        now - std::mem::replace(&mut counted[task], now)
    };
    for task in [0, 1] {
        // `touch` cannot map zero pages, so the baseline touches one page.
        let without = grown(task, 1);
        let with = grown(task, 1 + K);
        assert_eq!(with - without, K, "task {task}");
        touch(K);
        assert_eq!(grown(task, 1), without, "task {task} counts no faults while it is scheduled out");
        assert_eq!(grown(1 - task, 1 + K), without + K, "the faults count for the other task");
        assert_eq!(grown(task, 1), without, "task {task} counts no faults of the other task");
    }
}

#[test]
fn page_faults_of_a_switch_in_one_notification_belong_to_one_task() {
    const ROUNDS: u64 = 50;
    let _alone = alone();
    let (mut guest, mut queues) = Guest::new(1, 1024);
    let mut lane = guest.lane(0, queues.remove(0));
    let tasks = [(); 3].map(|()| guest.open(&counting(PAGE_FAULTS)));
    let whole = guest.open(&OpenRequest { context: 0.into(), ..counting(PAGE_FAULTS) });
    lane.run(&commands(COMMAND_IN, &tasks[..1]));
    let before = lane.value(whole);
    for round in 0..ROUNDS {
        for task in 0..3 {
            touch(10 * (1 + round % 7));
            let next = (task + 1) % 3;
            lane.run(&switch(&tasks[task..=task], &tasks[next..=next]));
        }
    }
    // At all times, exactly one task was scheduled in, so each fault counted once.
    let counts = tasks.map(|task| lane.value(task));
    let grown = lane.value(whole) - before;
    let sum: u64 = counts.iter().sum();
    let touched: u64 = (0..ROUNDS).map(|round| 10 * (1 + round % 7)).sum();
    assert!(counts.iter().all(|&count| count >= touched), "a count is below {touched}: {counts:?}");
    // `sum` and `grown` can differ slightly, because the test reads the counts one after another. The device can cause
    // faults between these reads, and between the first IN and the first read.
    assert!(sum.abs_diff(grown) <= 8, "{counts:?} do not add up to {grown}");
}

/// A thread that runs a vCPU and executes the work sent to it.
struct Worker {
    jobs: Sender<Vec<Command>>,
    done: Receiver<Vec<Reply>>,
}

impl Worker {
    fn spawn(guest: &Guest, index: u16, queue: DriverQueue) -> Self {
        let (jobs, received) = channel::<Vec<Command>>();
        let (finished, done) = channel();
        let vpmu = Arc::clone(&guest.vpmu);
        thread::spawn(move || {
            let vcpu = vpmu.attach(index.into(), 0).expect("the device has this vCPU");
            let mut lane = Lane { index, vcpu, queue };
            finished.send(Vec::new()).expect("the test waits");
            for job in received {
                finished.send(lane.run(&job)).expect("the test waits");
            }
        });
        let worker = Self { jobs, done };
        worker.wait();
        worker
    }

    fn send(&self, job: Vec<Command>) {
        self.jobs.send(job).expect("the worker's thread runs");
    }

    fn wait(&self) -> Vec<Reply> {
        let replies = self.done.recv_timeout(LONG);
        replies.expect("the vCPU continues")
    }
}

#[test]
fn descriptors_go_with_kinds_of_events_and_vcpus_not_with_events() {
    const EVENTS: usize = 10_000;
    let _alone = alone();
    let (mut guest, queues) = Guest::new(2, u32::try_from(EVENTS).expect("fits"));
    let workers: Vec<_> = (0_u16..).zip(queues).map(|(index, queue)| Worker::spawn(&guest, index, queue)).collect();
    let before = open_descriptors();
    let tasks = [(); 2].map(|()| guest.task(EVENTS / 2));
    assert_eq!(guest.try_open(&counting(0)), Err(libc::ENOSPC));
    for round in 0..4 {
        // Run both vCPUs at the same time. The tasks swap vCPUs in each round.
        for op in [COMMAND_IN, COMMAND_READ, COMMAND_OUT] {
            for (index, worker) in workers.iter().enumerate() {
                worker.send(commands(op, &tasks[(index + round) % 2]));
            }
            for worker in &workers {
                assert_eq!(worker.wait().len(), EVENTS / 2);
            }
        }
    }
    let held = open_descriptors() - before;
    eprintln!("{EVENTS} events of {CONFIGS} kinds on 2 vCPUs: {held} descriptors");
    assert!(held <= 2 * usize::try_from(CONFIGS).expect("few"), "{held} descriptors");
    for event in tasks.concat() {
        guest.close(event);
    }
    assert_eq!(open_descriptors(), before);
}

#[test]
fn pinned_event_shares_the_counter_and_the_system_call() {
    const K: u64 = 100;
    let _alone = alone();
    let (mut guest, mut queues) = Guest::new(1, 1024);
    let mut lane = guest.lane(0, queues.remove(0));
    let before = open_descriptors();
    let pinned = OpenRequest { flags: (OPEN_ENABLED | OPEN_PINNED).into(), ..counting(PAGE_FAULTS) };
    let mut task = guest.task(6);
    let pair = [(); 2].map(|()| guest.open(&pinned));
    task.extend(pair);
    let grown = open_descriptors() - before;
    assert_eq!(grown, 5, "one counter for each kind, and pinned events share it");
    let in_and_out = [commands(COMMAND_IN, &task), commands(COMMAND_OUT, &task)];
    let mut counts = Vec::new();
    for pages in [1, 1, 1 + K] {
        lane.run(&in_and_out[0]);
        touch(pages);
        let replies = lane.run(&in_and_out[1]);
        let [one, other] = [6, 7].map(|at: usize| replies[at].value.get());
        assert_eq!(one, other);
        counts.push(one);
    }
    assert_eq!(counts[2] - counts[1], counts[1] - counts[0] + K);
    let calls = in_and_out.map(|commands| lane.system_calls(&commands));
    eprintln!("6 events and 2 pinned events: {calls:?} system calls for IN and OUT");
    assert_eq!(calls, [1, 1]);
    // A group member cannot be pinned, because it counts only when its leader counts.
    let member = OpenRequest { leader: task[0].into(), ..pinned };
    assert_eq!(guest.try_open(&member), Err(libc::EINVAL));
}

#[test]
fn exclusions_are_refused_where_the_host_cannot_keep_them_and_share_a_system_call_elsewhere() {
    let _alone = alone();
    let (mut guest, mut queues) = Guest::new(1, 1024);
    let mut lane = guest.lane(0, queues.remove(0));
    let excluding = |request: OpenRequest, flag: u32| OpenRequest { flags: (OPEN_ENABLED | flag).into(), ..request };
    for flag in [OPEN_EXCLUDE_USER, OPEN_EXCLUDE_KERNEL] {
        let opened = guest.try_open(&excluding(counting(PAGE_FAULTS), flag));
        assert_eq!(opened, Err(libc::EOPNOTSUPP));
    }
    let cycles = OpenRequest { kind: KIND_HARDWARE.into(), ..counting(0) };
    let Ok(both) = guest.try_open(&cycles) else {
        eprintln!("this host does not count cycles, so the exclusions of its PMU are not tested");
        return;
    };
    let parts = [OPEN_EXCLUDE_USER, OPEN_EXCLUDE_KERNEL].map(|flag| {
        let opened = guest.try_open(&excluding(cycles, flag));
        opened.expect("a PMU that can exclude guest modes")
    });
    let task = [both, parts[0], parts[1]];
    for _ in 0..2 {
        lane.run(&commands(COMMAND_IN, &task));
        lane.run(&commands(COMMAND_OUT, &task));
    }
    let calls = lane.system_calls(&commands(COMMAND_IN, &task));
    eprintln!("cycles with both exclusions: {calls} system calls");
    assert!(calls <= 1, "{calls} system calls");
}
