//! Threads that do the same work at the same time, in slices.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use vpmu::Source;

use crate::device::{Device, Seat};
use crate::vcpu::VcpuThread;
use crate::work::{Load, Work};
use crate::{Host, cpus};

const SLICE: Duration = Duration::from_millis(20);

/// Results of one slice, summed over all threads of a [`Side`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct Slice {
    /// Steps per second; for [`Load::Samples`], samples written per second.
    pub(crate) rate: f64,
    /// CPU seconds per second.
    pub(crate) cpus: f64,
}

/// A thread for each seat. The threads sleep between slices.
#[derive(Debug)]
pub(crate) struct Side {
    load: Load,
    devices: Vec<Arc<Device>>,
    gate: Arc<Gate>,
    threads: Vec<JoinHandle<io::Result<()>>>,
}

#[derive(Debug)]
struct Gate {
    /// Every slice begins and ends here.
    barrier: Barrier,
    stop: AtomicBool,
    over: AtomicBool,
    steps: AtomicU64,
    /// Nanoseconds that the threads spent in slices: `time` is elapsed time, `cpu_time` is CPU time. Each thread
    /// measures its own times, because the thread that controls the slices may have to wait for a CPU.
    time: AtomicU64,
    cpu_time: AtomicU64,
    host: Arc<Host>,
}

impl Side {
    pub(crate) fn start(load: Load, seats: Vec<Seat>, host: &Arc<Host>) -> Self {
        let gate = Arc::new(Gate {
            barrier: Barrier::new(seats.len() + 1),
            stop: AtomicBool::new(false),
            over: AtomicBool::new(false),
            steps: AtomicU64::new(0),
            time: AtomicU64::new(0),
            cpu_time: AtomicU64::new(0),
            host: Arc::clone(host),
        });
        let mut devices: Vec<_> = seats.iter().map(|seat| Arc::clone(&seat.device)).collect();
        devices.dedup_by(|one, other| Arc::ptr_eq(one, other));
        let start = |(seat, &cpu): (Seat, &usize)| {
            let gate = Arc::clone(&gate);
            thread::spawn(move || gate.live(load, seat, cpu))
        };
        let threads = seats.into_iter().zip(host.cpus.iter().cycle()).map(start).collect();
        Self { load, devices, gate, threads }
    }

    pub(crate) fn slice(&self) -> Slice {
        let spent = || {
            let of = [&self.gate.time, &self.gate.cpu_time];
            of.map(|nanoseconds| nanoseconds.load(Ordering::Relaxed))
        };
        let (done, [time, cpu_time]) = (self.done(), spent());
        self.gate.stop.store(false, Ordering::Relaxed);
        self.gate.barrier.wait();
        thread::sleep(SLICE);
        self.gate.stop.store(true, Ordering::Relaxed);
        self.gate.barrier.wait();
        let (done, after) = (self.done() - done, spent());
        let seconds = |from: u64, to: u64| (to - from) as f64 / 1e9;
        let time = seconds(time, after[0]) / self.threads.len() as f64;
        Slice { rate: done as f64 / time, cpus: seconds(cpu_time, after[1]) / time }
    }

    /// Ends the threads. Returns the first error.
    pub(crate) fn finish(self) -> io::Result<()> {
        self.gate.over.store(true, Ordering::Relaxed);
        self.gate.barrier.wait();
        self.threads.into_iter().try_for_each(|thread| {
            let ended = thread.join();
            ended.unwrap_or_else(|_| Err(io::Error::other("a vCPU's thread panicked")))
        })
    }

    fn done(&self) -> u64 {
        match self.load {
            Load::Samples => {
                let written = |device: &Arc<Device>| device.vpmu.metrics().samples_written;
                self.devices.iter().map(written).sum()
            }
            _ => self.gate.steps.load(Ordering::Relaxed),
        }
    }
}

impl Gate {
    /// Runs a vCPU's thread. After an error, the thread stops working but still waits at the barrier, because the other
    /// threads cannot pass the barrier without it.
    fn live(&self, load: Load, seat: Seat, cpu: usize) -> io::Result<()> {
        let device = Arc::clone(&seat.device);
        let attached = cpus::stay_on(cpu).and_then(|()| VcpuThread::attach(&device.vpmu, seat.vcpu));
        let mut ready = attached.and_then(|mut vcpu| {
            let work = Work::begin(load, seat, &mut vcpu, &self.host.software)?;
            Ok((work, vcpu))
        });
        loop {
            self.barrier.wait();
            if self.over.load(Ordering::Relaxed) {
                break;
            }
            if let Ok((work, vcpu)) = &mut ready
                && let Err(error) = self.run(work, vcpu)
            {
                ready = Err(error);
            }
            self.barrier.wait();
        }
        let (work, mut vcpu) = ready?;
        work.end(&mut vcpu)
    }

    fn run(&self, work: &mut Work, vcpu: &mut VcpuThread) -> io::Result<()> {
        let clock = || self.host.clock.thread_time().unwrap_or(0);
        let (begun, begun_on_cpu, mut steps) = (Instant::now(), clock(), 0);
        while !self.stop.load(Ordering::Relaxed) {
            work.step(vcpu)?;
            steps += 1;
        }
        self.steps.fetch_add(steps, Ordering::Relaxed);
        let on_cpu = clock() - begun_on_cpu;
        self.cpu_time.fetch_add(on_cpu, Ordering::Relaxed);
        let time = u64::try_from(begun.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.time.fetch_add(time, Ordering::Relaxed);
        Ok(())
    }
}
