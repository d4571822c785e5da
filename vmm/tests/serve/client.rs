//! A VMM that connects to `vmm serve`: it shares memory, forwards accesses to the device's registers, and has vCPU
//! threads that wait for the answers as QEMU's do. It is written from the documents of vfio-user and virtio alone.

use std::collections::HashMap;
use std::fs::File;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Output, Stdio};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::cmsg_space;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::MemfdFlags;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
};
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};
use vpmu::abi::{COMMAND_READ, CONTROL_MAP, ControlReply, MAP_WRITABLE, OpenReply, OpenRequest, QUEUE_VCPU, Reply};
use vpmu_testkit::{DriverQueue, Layout, command, map_request};
use zerocopy::{FromBytes, IntoBytes};

use crate::common::{Bench, Running, kill, vmm};

pub(crate) const VERSION: u16 = 1;
pub(crate) const DMA_MAP: u16 = 2;
pub(crate) const DMA_UNMAP: u16 = 3;
pub(crate) const DEVICE_INFO: u16 = 4;
pub(crate) const REGION_INFO: u16 = 5;
pub(crate) const SET_IRQS: u16 = 8;
pub(crate) const REGION_READ: u16 = 9;
pub(crate) const REGION_WRITE: u16 = 10;
pub(crate) const RESET: u16 = 13;

pub(crate) const REGISTERS: u32 = 0;
pub(crate) const WINDOW: u32 = 2;
pub(crate) const DOORBELL: u32 = 4;
pub(crate) const CONFIG_SPACE: u32 = 7;
/// Offset in [`REGISTERS`] of queue notifications, 4 bytes for each queue.
const NOTIFY: u64 = 0x3000;
const MSIX: u32 = 2;

const MEMORY: usize = 0x200_0000;
const ANSWER_TIME: Duration = Duration::from_secs(30);

/// Bytes of native integers.
macro_rules! bytes {
    ($($value:expr),* $(,)?) => { [$($value.to_ne_bytes().as_slice()),*].concat() };
}
pub(crate) use bytes;

/// An answer to a request.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) errno: u32,
    pub(crate) body: Vec<u8>,
    pub(crate) file: Option<File>,
}

/// The running `vmm serve`.
pub(crate) struct Daemon {
    pub(crate) child: Running,
    pub(crate) socket: std::path::PathBuf,
}

impl Daemon {
    /// Starts the daemon for `vcpus` vCPUs, and waits until its socket is there.
    pub(crate) fn start(bench: &Bench, vcpus: u32, more: &[&str]) -> Self {
        let socket = bench.path("pmu.sock");
        let mut command = vmm(["serve", "--vcpus", &vcpus.to_string(), "--socket"]);
        command.arg(&socket).args(more).current_dir(bench.path(".")).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = Running::start(&mut command);
        let begin = Instant::now();
        while !socket.exists() {
            let ended = child.try_wait().expect("our child");
            assert!(ended.is_none() && begin.elapsed() < ANSWER_TIME, "no socket: {ended:?}");
            thread::sleep(Duration::from_millis(5));
        }
        Self { child, socket }
    }

    /// Waits for the daemon's end.
    pub(crate) fn output(self) -> Output {
        self.child.wait_with_output()
    }

    pub(crate) fn signal(&self, name: &str) {
        kill(name, &self.child);
    }
}

#[derive(Debug, Default)]
struct Answers {
    known: HashMap<u16, Answer>,
    next: u16,
    ended: bool,
}

/// A connection to the daemon.
pub(crate) struct Client {
    stream: UnixStream,
    answers: Arc<(Mutex<Answers>, Condvar)>,
    reader: Option<JoinHandle<()>>,
}

impl Client {
    pub(crate) fn connect(socket: &Path) -> Self {
        let stream = UnixStream::connect(socket).expect("the daemon listens");
        let answers = Arc::new((Mutex::new(Answers::default()), Condvar::new()));
        let (reads, receives) = (stream.try_clone().expect("a descriptor"), Arc::clone(&answers));
        let reader = thread::spawn(move || {
            while let Some((id, answer)) = receive(&reads) {
                let (answers, arrived) = &*receives;
                answers.lock().expect("no panic").known.insert(id, answer);
                arrived.notify_all();
            }
            receives.0.lock().expect("no panic").ended = true;
            receives.1.notify_all();
        });
        Self { stream, answers, reader: Some(reader) }
    }

    /// Sends a request, and waits with a time limit, as QEMU does. `None` if the daemon ends the connection.
    pub(crate) fn try_call(&self, command: u16, body: &[u8], files: &[BorrowedFd<'_>]) -> Option<Answer> {
        let (answers, arrived) = &*self.answers;
        let mut known = answers.lock().expect("no panic");
        let id = known.next;
        known.next += 1;
        let size = u32::try_from(16 + body.len()).expect("small");
        let message = [bytes![id, command, size, 0u32, 0u32], body.to_vec()].concat();
        send(&self.stream, &message, files);
        loop {
            if let Some(answer) = known.known.remove(&id) {
                return Some(answer);
            }
            if known.ended {
                return None;
            }
            let (woken, late) = arrived.wait_timeout(known, ANSWER_TIME).expect("no panic");
            assert!(!late.timed_out(), "no answer to command {command}");
            known = woken;
        }
    }

    pub(crate) fn call(&self, command: u16, body: &[u8], files: &[BorrowedFd<'_>]) -> Answer {
        self.try_call(command, body, files).expect("the connection lasts")
    }

    /// Calls, and returns the answer's body.
    pub(crate) fn done(&self, command: u16, body: &[u8], files: &[BorrowedFd<'_>]) -> Vec<u8> {
        let answer = self.call(command, body, files);
        assert_eq!(answer.errno, 0, "command {command}");
        answer.body
    }

    pub(crate) fn read<const N: usize>(&self, region: u32, offset: u64) -> [u8; N] {
        let count = u32::try_from(N).expect("small");
        let body = self.done(REGION_READ, &bytes![offset, region, count], &[]);
        body[16..].try_into().expect("as many bytes as asked for")
    }

    pub(crate) fn write(&self, region: u32, offset: u64, data: &[u8]) {
        let count = u32::try_from(data.len()).expect("small");
        let body = [bytes![offset, region, count], data.to_vec()].concat();
        self.done(REGION_WRITE, &body, &[]);
    }

    pub(crate) fn raw(&self, message: &[u8]) {
        send(&self.stream, message, &[]);
    }

    /// Agrees on the version.
    pub(crate) fn greet(&self) -> String {
        let limits = br#"{"capabilities":{"max_msg_fds":8,"max_data_xfer_size":1048576}}"#;
        let body = self.done(VERSION, &[bytes![0u16, 0u16], limits.to_vec(), vec![0]].concat(), &[]);
        assert_eq!(body[..4], [0; 4]);
        String::from_utf8(body[4..body.len() - 1].to_vec()).expect("JSON")
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        // The daemon may have closed the connection.
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
    }
}

fn send(stream: &UnixStream, message: &[u8], files: &[BorrowedFd<'_>]) {
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(8))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !files.is_empty() {
        assert!(ancillary.push(SendAncillaryMessage::ScmRights(files)));
    }
    let slices = [IoSlice::new(message)];
    // The daemon may have ended the connection: the caller then gets no answer.
    let _ = rustix::net::sendmsg(stream, &slices, &mut ancillary, SendFlags::NOSIGNAL);
}

fn receive(stream: &UnixStream) -> Option<(u16, Answer)> {
    let mut head = [0; 16];
    let mut files: Vec<OwnedFd> = Vec::new();
    fill(stream, &mut head, &mut files)?;
    let word = |at: usize| u32::from_ne_bytes(head[at..at + 4].try_into().expect("four bytes"));
    assert_eq!(word(8) & 0xf, 1, "an answer");
    let mut body = vec![0; usize::try_from(word(4)).expect("small") - 16];
    fill(stream, &mut body, &mut files)?;
    let id = u16::from_ne_bytes([head[0], head[1]]);
    let errno = if word(8) & 1 << 5 != 0 { word(12) } else { 0 };
    Some((id, Answer { errno, body, file: files.pop().map(File::from) }))
}

fn fill(stream: &UnixStream, bytes: &mut [u8], files: &mut Vec<OwnedFd>) -> Option<()> {
    let mut at = 0;
    while at < bytes.len() {
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut slices = [IoSliceMut::new(&mut bytes[at..])];
        let got = rustix::net::recvmsg(stream, &mut slices, &mut ancillary, RecvFlags::CMSG_CLOEXEC).ok()?;
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(more) = message {
                files.extend(more);
            }
        }
        if got.bytes == 0 {
            return None;
        }
        at += got.bytes;
    }
    Some(())
}

type Job = Box<dyn FnOnce(&Client) + Send>;

/// A vCPU's thread, named as QEMU names it.
struct Vcpu {
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Vcpu {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Only one virtual machine of this process has vCPUs at a time, because a process with two would not tell which thread
/// is whose.
static ONE: Mutex<()> = Mutex::new(());

/// A virtual machine with a driver of the device.
pub(crate) struct Machine {
    vcpus: Vec<Vcpu>,
    pub(crate) client: Arc<Client>,
    memory: GuestMemoryMmap,
    queues: Vec<DriverQueue>,
    next_ring: u64,
    /// The eventfd of every vector.
    pub(crate) interrupt: File,
    _one: MutexGuard<'static, ()>,
}

impl Machine {
    /// Connects a machine with `vcpus` vCPUs to the daemon at `socket`, and starts its driver.
    pub(crate) fn start(socket: &Path, vcpus: u32) -> Self {
        let mut machine = Self::connect(socket, vcpus);
        machine.client.greet();
        machine.share();
        machine.initialize();
        machine
    }

    /// Connects a machine without a driver.
    pub(crate) fn connect(socket: &Path, vcpus: u32) -> Self {
        let one = ONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        // The threads run before the driver does, as in QEMU. A thread has no name before it runs.
        let (tell, told) = channel();
        let (runs, run) = channel();
        let vcpus: Vec<Vcpu> = (0..vcpus)
            .map(|number| {
                let (jobs, work) = channel::<Job>();
                let (give, client) = channel::<Arc<Client>>();
                tell.send(give).expect("taken");
                let runs = runs.clone();
                let thread = thread::Builder::new().name(format!("CPU {number}/TCG")).spawn(move || {
                    runs.send(()).expect("awaited");
                    let Ok(client) = client.recv() else { return };
                    for job in work {
                        job(&client);
                    }
                });
                Vcpu { jobs: Some(jobs), thread: Some(thread.expect("a thread")) }
            })
            .collect();
        drop(tell);
        run.iter().take(vcpus.len()).for_each(drop);
        let client = Arc::new(Client::connect(socket));
        for give in told {
            give.send(Arc::clone(&client)).expect("the vCPU waits");
        }
        let file = File::from(rustix::fs::memfd_create("guest", MemfdFlags::CLOEXEC).expect("memory"));
        file.set_len(MEMORY as u64).expect("memory");
        let memory = [(GuestAddress(0), MEMORY, Some(FileOffset::new(file, 0)))];
        let memory = GuestMemoryMmap::from_ranges_with_files(memory).expect("memory");
        let interrupt = File::from(eventfd(0, EventfdFlags::NONBLOCK).expect("an eventfd"));
        Self { vcpus, client, memory, queues: Vec::new(), next_ring: 0x10_0000, interrupt, _one: one }
    }

    /// Runs `act` on the thread of a vCPU.
    pub(crate) fn on<T: Send + 'static>(&self, vcpu: usize, act: impl FnOnce(&Client) -> T + Send + 'static) -> T {
        let (give, result) = channel();
        let job = move |client: &Client| {
            let _ = give.send(act(client));
        };
        let jobs = self.vcpus[vcpu].jobs.as_ref().expect("runs");
        jobs.send(Box::new(job)).expect("runs");
        result.recv().expect("no panic")
    }

    /// Ends the thread of a vCPU.
    pub(crate) fn unplug(&mut self, vcpu: usize) {
        self.vcpus.remove(vcpu);
    }

    /// Shares the memory, and connects the interrupts.
    pub(crate) fn share(&self) {
        let region = self.memory.iter().next().expect("one region");
        let file = region.file_offset().expect("a file").file();
        let map = bytes![32u32, 3u32, 0u64, 0u64, MEMORY as u64];
        self.client.done(DMA_MAP, &map, &[file.as_fd()]);
        let vectors = u32::try_from(3 + self.vcpus.len()).expect("few");
        for vector in 0..vectors {
            let set = bytes![20u32, 0x24u32, MSIX, vector, 1u32];
            self.client.done(SET_IRQS, &set, &[self.interrupt.as_fd()]);
        }
    }

    /// Does what a driver does until DRIVER_OK.
    pub(crate) fn initialize(&mut self) {
        let layout = Layout {
            vcpus: u32::try_from(self.vcpus.len()).expect("few"),
            rings: 0x1_0000,
            buffers: 0x100_0000,
            slots: 16,
        };
        let (drivers, queues) = layout.set_up(&self.memory);
        let client = &self.client;
        let set = |offset: u64, data: &[u8]| client.write(REGISTERS, offset, data);
        for status in [0u8, 1, 3] {
            set(0x14, &[status]);
        }
        let mut features = 0;
        for half in [0u32, 1] {
            set(0x00, &half.to_le_bytes());
            set(0x08, &half.to_le_bytes());
            let offered = client.read::<4>(REGISTERS, 0x04);
            set(0x0c, &offered);
            features |= u64::from(u32::from_le_bytes(offered)) << (32 * half);
        }
        assert_ne!(features & 1 << 32, 0, "the device offers VIRTIO_F_VERSION_1");
        set(0x14, &[11]);
        assert_eq!(client.read::<1>(REGISTERS, 0x14), [11], "FEATURES_OK stays");
        for (index, queue) in (0u16..).zip(&queues) {
            set(0x16, &index.to_le_bytes());
            set(0x18, &queue.size.to_le_bytes());
            set(0x1a, &(index + 1).to_le_bytes());
            set(0x20, &queue.desc_table.to_le_bytes());
            set(0x28, &queue.avail_ring.to_le_bytes());
            set(0x30, &queue.used_ring.to_le_bytes());
            set(0x1c, &1u16.to_le_bytes());
        }
        set(0x14, &[15]);
        assert_eq!(client.read::<1>(REGISTERS, 0x14), [15], "the device has started");
        self.queues = drivers;
    }

    /// The status register.
    pub(crate) fn status(&self) -> u8 {
        self.client.read::<1>(REGISTERS, 0x14)[0]
    }

    fn notify(client: &Client, queue: u16) {
        client.write(REGISTERS, NOTIFY + 4 * u64::from(queue), &queue.to_le_bytes());
    }

    /// Sends a control request. Another thread of the daemon answers it.
    pub(crate) fn ask(&mut self, request: &[u8], room: usize) -> Vec<u8> {
        self.queues[0].request(request, room);
        Self::notify(&self.client, 0);
        let begin = Instant::now();
        loop {
            if let Some(answer) = self.queues[0].answer() {
                return answer;
            }
            assert!(begin.elapsed() < ANSWER_TIME, "no answer");
            thread::sleep(Duration::from_millis(1));
        }
    }

    pub(crate) fn open(&mut self, request: &OpenRequest) -> u64 {
        let answer = self.ask(request.as_bytes(), size_of::<OpenReply>());
        let (reply, _) = OpenReply::read_from_prefix(&answer).expect("whole");
        assert_eq!(reply.status.get(), 0);
        reply.id.get()
    }

    /// Maps a ring of one data page for `event`. Returns its address.
    pub(crate) fn map(&mut self, event: u64) -> u64 {
        let pages = [self.next_ring, self.next_ring + 0x1000];
        self.next_ring += 0x2000;
        let request = map_request(CONTROL_MAP, event, MAP_WRITABLE, &pages);
        let answer = self.ask(&request, size_of::<ControlReply>());
        let (reply, _) = ControlReply::read_from_prefix(&answer).expect("whole");
        assert_eq!(reply.status.get(), 0);
        pages[0]
    }

    /// Sends commands on a vCPU's queue, on its thread. They are answered when the write has been.
    pub(crate) fn commands(&mut self, vcpu: usize, commands: &[u8], room: usize) -> Vec<u8> {
        let (waits, answer) = self.notified(vcpu, commands, room);
        assert_eq!(waits.len(), 1, "notifications until the answer");
        answer
    }

    /// Sends commands on a vCPU's queue, and notifies on its thread until they are answered. Returns how long each
    /// notification took, and the answer.
    pub(crate) fn notified(&mut self, vcpu: usize, commands: &[u8], room: usize) -> (Vec<Duration>, Vec<u8>) {
        let queue = QUEUE_VCPU + u16::try_from(vcpu).expect("few");
        self.queues[usize::from(queue)].request(commands, room);
        let mut waits = Vec::new();
        loop {
            waits.push(self.on(vcpu, move |client| {
                let begin = Instant::now();
                Self::notify(client, queue);
                begin.elapsed()
            }));
            if let Some(answer) = self.queues[usize::from(queue)].answer() {
                return (waits, answer);
            }
        }
    }

    /// The count of `event`.
    pub(crate) fn count(&mut self, vcpu: usize, event: u64) -> u64 {
        let read = command(COMMAND_READ, event);
        let answer = self.commands(vcpu, read.as_bytes(), size_of::<Reply>());
        let (reply, _) = Reply::read_from_prefix(&answer).expect("whole");
        assert_eq!(reply.status.get(), 0);
        reply.value.get()
    }

    /// A vCPU stores `value` to the doorbell.
    pub(crate) fn mark(&self, vcpu: usize, value: u32) {
        self.on(vcpu, move |client| client.write(DOORBELL, 0, &value.to_le_bytes()));
    }

    /// Bytes of guest memory.
    pub(crate) fn bytes_at<const N: usize>(&self, address: u64) -> [u8; N] {
        let mut bytes = [0; N];
        self.memory.read_slice(&mut bytes, GuestAddress(address)).expect("in memory");
        bytes
    }
}
