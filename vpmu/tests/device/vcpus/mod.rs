//! Several vCPUs: events that move between them or affect each other, and locks.

mod delays;
mod drains;
mod effects;
mod elsewhere;
mod exits;
mod interleavings;
mod moving;
mod notices;
mod readings;
mod sessions;
mod storm;

use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::Duration;

use vm_memory::{GuestAddress, GuestMemoryMmap};
use vpmu::abi::*;
use vpmu::{ExitReason, VcpuSession};
use vpmu_testkit::{At, DriverQueue, Errno, Fields, Fixture, command, open_of, structs};
use zerocopy::IntoBytes;

/// How long to wait. No step of these tests takes this long, even on a busy machine.
const LONG: Duration = Duration::from_secs(60);

/// The parts of a vCPU that its thread uses: the vCPU's session, and the driver's side of its queue.
struct Lane {
    vcpu: u32,
    session: VcpuSession,
    queue: DriverQueue,
}

impl Lane {
    /// Takes the vCPU's session and queue from the fixture.
    fn new(fixture: &mut Fixture, vcpu: u32) -> Self {
        // Leave a placeholder for the queue in the fixture. The device does not serve the placeholder.
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 0x1000)]).expect("memory");
        let (idle, _) = DriverQueue::new(&memory, 0, 0);
        Self {
            vcpu,
            session: fixture.vcpus.take(vcpu),
            queue: std::mem::replace(&mut fixture.queues[2 + vcpu as usize], idle),
        }
    }

    /// Like [`Fixture::commands`].
    fn commands(&mut self, commands: &[Command]) -> Vec<Reply> {
        self.session.leave(ExitReason::Mmio, &mut At(u64::MAX));
        let replies = self.kick(commands);
        self.session.enter();
        replies
    }

    /// Adds these commands to the queue and notifies the device. The caller must make the vCPU leave and enter the
    /// guest.
    fn kick(&mut self, commands: &[Command]) -> Vec<Reply> {
        let room = size_of_val(commands) / size_of::<Command>() * size_of::<Reply>();
        self.queue.request(commands.as_bytes(), room);
        let index = u16::try_from(self.vcpu).expect("few");
        self.session.kick(QUEUE_VCPU + index);
        structs(&self.queue.answer().expect("answered immediately"))
    }

    fn mark(&mut self, value: u32) {
        self.session.leave(ExitReason::Mmio, &mut At(1));
        self.session.mark(value, &mut At(1));
        self.session.enter();
    }
}

/// A thread that runs a vCPU and executes jobs.
struct VcpuThread(Sender<Job>);

type Job = Box<dyn FnOnce(&mut Lane) + Send>;

impl VcpuThread {
    fn spawn(mut lane: Lane) -> Self {
        let (jobs, received) = channel::<Job>();
        thread::spawn(move || received.into_iter().for_each(|job| job(&mut lane)));
        Self(jobs)
    }

    fn begin<T: Send + 'static>(&self, act: impl FnOnce(&mut Lane) -> T + Send + 'static) -> Pending<T> {
        let (done, result) = channel();
        let job = move |lane: &mut Lane| {
            // The test may have failed before this point.
            let _ = done.send(act(lane));
        };
        self.0.send(Box::new(job)).expect("the thread runs");
        Pending(result)
    }

    /// Runs `act` on the thread and returns its result. Fails the test if the thread panics.
    fn run<T: Send + 'static>(&self, act: impl FnOnce(&mut Lane) -> T + Send + 'static) -> T {
        self.begin(act).wait()
    }
}

/// The result of work on another thread.
struct Pending<T>(Receiver<T>);

impl<T> Pending<T> {
    fn wait(self) -> T {
        self.0.recv_timeout(LONG).expect("the work ends in time")
    }

    fn is_over(&self) -> bool {
        !matches!(self.0.try_recv(), Err(std::sync::mpsc::TryRecvError::Empty))
    }
}

/// Runs `act` on another thread. The test does not join that thread, so a deadlock in `act` cannot hang the test.
fn aside<T: Send + 'static>(act: impl FnOnce() -> T + Send + 'static) -> Pending<T> {
    let (done, result) = channel();
    thread::spawn(move || {
        let _ = done.send(act());
    });
    Pending(result)
}

/// An enabled task event.
fn task_event(kind: u32, config: u64) -> OpenRequest {
    open_of(kind, config, CONTEXT_TASK).flags(OPEN_ENABLED)
}

/// Makes `request` open a member of the group of `leader`.
fn led(leader: u64, request: OpenRequest) -> OpenRequest {
    request.leader(leader)
}

/// Returns the same command for each of these events.
fn each(op: u32, events: &[u64]) -> Vec<Command> {
    events.iter().map(|&event| command(op, event)).collect()
}

/// Sends a command. Returns the status.
fn status(fixture: &mut Fixture, vcpu: u32, op: u32, event: u64) -> Errno {
    fixture.valued(vcpu, op, event, 0)
}

/// Sends a command, which must succeed. Returns the reply.
fn done(fixture: &mut Fixture, vcpu: u32, op: u32, event: u64) -> Reply {
    let reply = fixture.command(vcpu, op, event);
    assert_eq!(reply.status.get(), 0, "command {op}: {reply:?}");
    reply
}
