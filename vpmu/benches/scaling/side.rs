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

/// All threads of a side in one slice.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Slice {
    /// Steps per second; with [`Load::Samples`] samples written per second.
    pub(crate) rate: f64,
    /// CPU time per second.
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
    /// CPU time of the threads in slices, in nanoseconds.
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
            cpu_time: AtomicU64::new(0),
            host: Arc::clone(host),
        });
        let mut devices: Vec<_> = seats.iter().map(|seat| Arc::clone(&seat.device)).collect();
        devices.dedup_by(|one, other| Arc::ptr_eq(one, other));
        let start = |(seat, &cpu): (Seat, &usize)| {
            let gate = Arc::clone(&gate);
            thread::spawn(move || gate.live(load, seat, cpu))
        };
        let threads = seats
            .into_iter()
            .zip(host.cpus.iter().cycle())
            .map(start)
            .collect();
        Self {
            load,
            devices,
            gate,
            threads,
        }
    }

    pub(crate) fn slice(&self) -> Slice {
        let cpu_time = || self.gate.cpu_time.load(Ordering::Relaxed);
        let before = (self.done(), cpu_time());
        self.gate.stop.store(false, Ordering::Relaxed);
        self.gate.barrier.wait();
        let begun = Instant::now();
        thread::sleep(SLICE);
        let spent = begun.elapsed().as_secs_f64();
        self.gate.stop.store(true, Ordering::Relaxed);
        self.gate.barrier.wait();
        Slice {
            rate: (self.done() - before.0) as f64 / spent,
            cpus: (cpu_time() - before.1) as f64 / 1e9 / spent,
        }
    }

    /// Ends the threads. Returns the first error of a thread.
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
    /// Runs a vCPU's thread. A thread that fails still waits at the barrier, for the others.
    fn live(&self, load: Load, seat: Seat, cpu: usize) -> io::Result<()> {
        let device = Arc::clone(&seat.device);
        let attached =
            cpus::stay_on(cpu).and_then(|()| VcpuThread::attach(&device.vpmu, seat.vcpu));
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
        let (begun, mut steps) = (clock(), 0);
        while !self.stop.load(Ordering::Relaxed) {
            work.step(vcpu)?;
            steps += 1;
        }
        self.steps.fetch_add(steps, Ordering::Relaxed);
        self.cpu_time.fetch_add(clock() - begun, Ordering::Relaxed);
        Ok(())
    }
}
