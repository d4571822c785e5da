//! Four concurrent threads on one device: two vCPUs, a driver with its requests and resets, and a host that
//! drains, flushes, lists, starts and ends events. The order of their operations varies between executions, so
//! only properties that hold in any order are checked: nothing panics or waits forever, and everything is freed
//! at the end.
#![no_main]
#![allow(dead_code, clippy::expect_used, reason = "not every target uses all of the shared module")]

mod shared;

use std::sync::{Arc, Mutex};
use std::thread;

use libfuzzer_sys::arbitrary::{Result, Unstructured};
use libfuzzer_sys::fuzz_target;
use vpmu::abi::{COMMAND_FLUSH, Command, QUEUE_VCPU};
use vpmu::source::{Mode, Overflow};
use vpmu::{ExitReason, VcpuSession, Vpmu};
use vpmu_testkit::{DriverQueue, FakeHost, Nowhere, TSC_OFFSET, thread};
use zerocopy::IntoBytes;

use crate::shared::input::{cpu, exit, number};
use crate::shared::stage::{Stage, features};
use crate::shared::{driver_ops, host_ops};

/// One vCPU on its thread.
struct VcpuThread<'a> {
    vcpu: u32,
    session: Option<VcpuSession>,
    /// The driver's side of the vCPU's queue. If another thread resets the device, the device's side of the queue
    /// starts again from zero, but the driver's side does not. From then on, the two sides disagree, and the device
    /// may read any bytes as buffers.
    queue: DriverQueue,
    vpmu: &'a Vpmu,
    host: &'a FakeHost,
    /// Held while a thread attaches its vCPU. [`FakeHost::be_thread`] sets the current thread of the mock host, and
    /// another thread must not overwrite the setting before the device has read it.
    attaching: &'a Mutex<()>,
    marks: u64,
}

impl VcpuThread<'_> {
    /// Runs steps until the input bytes run out, then leaves the guest. Returns the session and the number of marks.
    fn run(mut self, input: &[u8]) -> (Option<VcpuSession>, u64) {
        let mut input = Unstructured::new(input);
        // Ends when the bytes run out.
        while !input.is_empty() && self.step(&mut input).is_ok() {}
        if let Some(session) = &mut self.session {
            session.leave(ExitReason::Signal, &mut Nowhere);
        }
        (self.session, self.marks)
    }

    fn step(&mut self, input: &mut Unstructured<'_>) -> Result<()> {
        let thread = thread(self.vcpu);
        let (exit, mut regs) = (exit(input)?, cpu(input)?);
        let op = input.int_in_range(0..=9)?;
        if op == 0 {
            // Drop the session and attach the vCPU again, as when it moves to another thread.
            drop(self.session.take());
            let _alone = self.attaching.lock().expect("no panic");
            self.host.be_thread(thread);
            let attached = self.vpmu.attach(self.vcpu, TSC_OFFSET);
            self.session = Some(attached.expect("the old session is dropped"));
        }
        let Some(session) = &mut self.session else {
            return Ok(());
        };
        session.enter();
        match op {
            1 => self.host.work(thread, input.int_in_range(0..=300)?, 4),
            2 => {
                let overflow = Overflow { tsc: self.host.now(), ip: number(input)?, mode: Mode::Guest, period: 10 };
                self.host.record(thread, overflow);
            }
            3 => self.host.pass(input.int_in_range(0..=20_000_000)?),
            _ => {}
        }
        session.leave(exit, &mut regs);
        match op {
            4..=5 => {
                for _ in 0..input.int_in_range(1..=20)? {
                    session.mark(5, &mut regs);
                    self.marks += 1;
                }
            }
            6..=8 => {
                let mut batch = Vec::new();
                for _ in 0..input.int_in_range(1..=6)? {
                    let op = input.int_in_range(0..=13)?;
                    let event = match op {
                        COMMAND_FLUSH if input.arbitrary()? => 0,
                        _ => input.int_in_range(0..=12)?,
                    };
                    batch.push(Command {
                        op: op.into(),
                        reserved: 0.into(),
                        event: event.into(),
                        value: (*input.choose(&[0_u64, 1, 10, 64])?).into(),
                        room: (*input.choose(&[0_u64, 0, 64, 4096])?).into(),
                    });
                }
                while self.queue.reclaim().is_some() {}
                self.queue.request(batch.as_slice().as_bytes(), 512);
                let queue = u32::from(QUEUE_VCPU) + self.vcpu;
                session.kick(u16::try_from(queue).expect("few"));
            }
            _ => {}
        }
        Ok(())
    }
}

/// Concurrent operations of the host and the operator.
fn drain_and_operate(vpmu: &Vpmu, input: &[u8]) {
    let mut input = Unstructured::new(input);
    while !input.is_empty() && host_step(vpmu, &mut input).is_ok() {}
}

fn host_step(vpmu: &Vpmu, input: &mut Unstructured<'_>) -> Result<()> {
    match input.int_in_range(0..=9)? {
        0..=2 => vpmu.drain(),
        // An error is not a failure, because the event may have ended.
        3 => drop(vpmu.flush(Some(input.int_in_range(0..=12)?))),
        4 => drop(vpmu.flush(None)),
        5 => host_ops::histories_of(vpmu),
        6 => drop(vpmu.metrics()),
        7..=8 => drop(vpmu.persist(&host_ops::persist_request(input)?)),
        _ => drop(vpmu.end(input.int_in_range(0..=12)?)),
    }
    Ok(())
}

/// Operations of the driver and of the guest's readers.
fn driver(stage: &mut Stage, input: &[u8]) {
    let mut input = Unstructured::new(input);
    while !input.is_empty() && driver_ops::step(stage, &mut input).is_ok() {}
}

fn run(stage: &mut Stage, input: &mut Unstructured<'_>) -> Result<()> {
    stage.activate(features(input)?);
    // Events for the threads to contend for.
    for _ in 0..input.int_in_range(1..=6)? {
        driver_ops::step(stage, input)?;
    }
    let quarter = input.len() / 4;
    let [first, second, third] = [input.bytes(quarter)?, input.bytes(quarter)?, input.bytes(quarter)?];
    let rest = input.bytes(input.len())?;
    let (vpmu, host) = (Arc::clone(&stage.fixture.vpmu), Arc::clone(&stage.fixture.host));
    let attaching = Mutex::new(());
    let vcpus: Vec<VcpuThread<'_>> = stage
        .take_vcpus()
        .into_iter()
        .map(|(vcpu, session, queue)| VcpuThread {
            vcpu,
            session: Some(session),
            queue,
            vpmu: &vpmu,
            host: &host,
            attaching: &attaching,
            marks: 0,
        })
        .collect();
    let ended: Vec<_> = thread::scope(|scope| {
        let vcpus: Vec<_> =
            vcpus.into_iter().zip([first, second]).map(|(vcpu, input)| scope.spawn(move || vcpu.run(input))).collect();
        let host = scope.spawn(|| drain_and_operate(&vpmu, third));
        driver(stage, rest);
        host.join().expect("no panic");
        let vcpus = vcpus.into_iter();
        vcpus.map(|vcpu| vcpu.join().expect("no panic")).collect()
    });
    for (vcpu, (session, marks)) in (0..).zip(ended) {
        stage.give_back(vcpu, session);
        stage.marks += marks;
    }
    Ok(())
}

fuzz_target!(|input: &[u8]| {
    let mut input = Unstructured::new(input);
    let Ok(mut stage) = Stage::new(&mut input) else {
        return;
    };
    let _ = run(&mut stage, &mut input);
    stage.finish();
});
