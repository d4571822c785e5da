//! A driver that accesses the registers of the virtio-mmio transport in any order and with any width. It negotiates
//! features, and sets up, uses and resets queues while the device works. If the driver has started the device in the
//! right order, the device must answer requests. If the driver has not started the device or has reset it, the device
//! must not answer.
#![no_main]
#![allow(dead_code, clippy::expect_used, reason = "not every target uses all of the shared module")]

mod shared;

use std::sync::Arc;

use libfuzzer_sys::arbitrary::{Result, Unstructured};
use libfuzzer_sys::fuzz_target;
use vmm::bus::{Caller, Device};
use vmm::devices::virtio_mmio::{Interrupt, QUEUE_NOTIFY, VirtioMmio};
use vmm::devices::vpmu::VirtioPmu;
use vmm_sys_util::eventfd::EventFd;
use vpmu::QueueState;
use vpmu::abi::PAGE_SIZE;
use vpmu_testkit::Nowhere;

use crate::shared::input::{cpu, half, once_in};
use crate::shared::layout::WINDOW_PAGES;
use crate::shared::stage::{Stage, features};
use crate::shared::{driver_ops, host_ops};

/// Registers of the transport, with the names of the virtio specification.
const QUEUE_SEL: u64 = 0x30;
const QUEUE_NUM: u64 = 0x38;
const QUEUE_READY: u64 = 0x44;
const STATUS: u64 = 0x70;
const DRIVER_FEATURES: u64 = 0x20;
const DRIVER_FEATURES_SEL: u64 = 0x24;
const QUEUE_DESC: u64 = 0x80;
const QUEUE_DRIVER: u64 = 0x90;
const QUEUE_DEVICE: u64 = 0xa0;
/// Size in bytes of the range to access: the registers, and the first part of the configuration space.
const REGISTERS: u64 = 0x120;

const ACKNOWLEDGE: u32 = 1;
const DRIVER: u32 = 2;
const DRIVER_OK: u32 = 4;
const FEATURES_OK: u32 = 8;
const NEEDS_RESET: u32 = 0x40;
const FAILED: u32 = 0x80;

struct Transport {
    stage: Stage,
    mmio: VirtioMmio,
    /// Whether the device was set up in the right order and has not been reset since.
    orderly: bool,
}

impl Transport {
    fn new(input: &mut Unstructured<'_>) -> Result<Self> {
        let stage = Stage::new(input)?;
        let interrupt = Arc::new(Interrupt::default());
        let device = VirtioPmu {
            vpmu: Arc::clone(&stage.fixture.vpmu),
            interrupt: Arc::clone(&interrupt),
            window: WINDOW_PAGES * PAGE_SIZE as u64,
            control: Arc::new(EventFd::new(libc::EFD_NONBLOCK).expect("an event descriptor")),
        };
        let memory = stage.fixture.memory.clone().into();
        let mmio = VirtioMmio::new(Arc::new(device), memory, interrupt);
        Ok(Self { stage, mmio: mmio.expect("queue sizes that virtio knows"), orderly: false })
    }

    fn read(&self, register: u64) -> u32 {
        let mut data = [0xaa; 4];
        self.mmio.read(register, &mut data);
        u32::from_le_bytes(data)
    }

    /// Writes `data` to `register` as vCPU 0, with the session of vCPU 0 if there is one.
    fn write_bytes(&mut self, register: u64, data: &[u8]) {
        let vcpus = &self.stage.fixture.vcpus;
        let mut session = self.stage.runs(0).then(|| vcpus.take(0));
        let mut caller = Caller { vcpu: 0, registers: &mut Nowhere, pmu: session.as_mut() };
        self.mmio.write(register, data, &mut caller);
        if session.is_some() {
            vcpus.set(0, session);
        }
    }

    fn write(&mut self, register: u64, value: u32) {
        self.write_bytes(register, &value.to_le_bytes());
    }

    /// Sets up the device like a driver, in the right order. Sometimes omits one step.
    fn set_up(&mut self, input: &mut Unstructured<'_>) -> Result<()> {
        // `queues` zeroes the rings, even if the device is running. From then on, the device need not answer until it
        // has been set up again.
        self.orderly = false;
        let (drivers, queues) = self.stage.memory.queues();
        let features = features(input)?;
        let omitted = if once_in(input, 4)? { Some(input.int_in_range(0..=5)?) } else { None };
        let does = |step: u32| omitted != Some(step);
        let offered = self.stage.fixture.vpmu.features();
        let features = if does(5) { features & offered } else { features };
        if does(0) {
            self.write(STATUS, 0);
        }
        self.write(STATUS, ACKNOWLEDGE);
        if does(1) {
            self.write(STATUS, ACKNOWLEDGE | DRIVER);
        }
        for (select, value) in [(0, features & 0xffff_ffff), (1, features >> 32)] {
            self.write(DRIVER_FEATURES_SEL, select);
            self.write(DRIVER_FEATURES, u32::try_from(value).expect("half"));
        }
        if does(2) {
            self.write(STATUS, ACKNOWLEDGE | DRIVER | FEATURES_OK);
        }
        for (index, queue) in queues.iter().enumerate() {
            if does(3) || index != 0 {
                self.set_up_queue(u32::try_from(index).expect("few"), queue);
            }
        }
        if does(4) {
            let all = ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK;
            self.write(STATUS, all);
        }
        if omitted.is_none() {
            let status = self.read(STATUS);
            let all = ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK;
            assert_eq!(status, all, "the right order starts the device");
            self.stage.fixture.queues = drivers;
            self.stage.events.clear();
            self.orderly = true;
        }
        Ok(())
    }

    fn set_up_queue(&mut self, index: u32, queue: &QueueState) {
        self.write(QUEUE_SEL, index);
        self.write(QUEUE_NUM, queue.size.into());
        let parts = [(QUEUE_DESC, queue.desc_table), (QUEUE_DRIVER, queue.avail_ring), (QUEUE_DEVICE, queue.used_ring)];
        for (register, address) in parts {
            for (register, value) in [(register, address), (register + 4, address >> 32)] {
                let half = u32::try_from(value & 0xffff_ffff).expect("half");
                self.write(register, half);
            }
        }
        self.write(QUEUE_READY, 1);
    }

    /// Makes any access to any register.
    fn access(&mut self, input: &mut Unstructured<'_>) -> Result<()> {
        let register = if input.arbitrary()? {
            input.int_in_range(0..=REGISTERS / 4)? * 4
        } else {
            input.int_in_range(0..=REGISTERS)?
        };
        let mut data = if once_in(input, 4)? { vec![0xaa; input.int_in_range(0..=16)?] } else { vec![0xaa; 4] };
        if input.arbitrary()? {
            self.mmio.read(register, &mut data);
        } else {
            let value = half(input)?.to_le_bytes();
            data.iter_mut().zip(value.iter().cycle()).for_each(|(to, from)| *to = *from);
            self.write_bytes(register, &data);
        }
        Ok(())
    }

    /// Checks the invariants that hold for every driver.
    fn check(&mut self) {
        assert_eq!(self.read(0), u32::from_le_bytes(*b"virt"));
        let status = self.read(STATUS);
        let known = ACKNOWLEDGE | DRIVER | DRIVER_OK | FEATURES_OK | NEEDS_RESET | FAILED;
        assert_eq!(status & !known, 0, "status {status:#x}");
        let started = status & DRIVER_OK != 0;
        assert!(!started || status & FEATURES_OK != 0, "status {status:#x}");
        assert!(!self.orderly || started || status == 0, "a started device stopped without a reset");
        self.orderly &= started;
    }

    fn step(&mut self, input: &mut Unstructured<'_>) -> Result<()> {
        match input.int_in_range(0..=15)? {
            0..=3 => self.access(input)?,
            4..=5 => self.set_up(input)?,
            6 => {
                // Sets one more status bit, or resets the device.
                let status = self.read(STATUS);
                let added = 1 << input.int_in_range(0..=8)? & 0xff;
                self.write(STATUS, if added == 0 { 0 } else { status | added });
            }
            7 => {
                self.mmio.reset();
                assert_eq!(self.read(STATUS), 0);
            }
            8 => {
                let queue = input.int_in_range(0..=8)?;
                self.write(QUEUE_NOTIFY, queue);
            }
            9 => self.request(input)?,
            10..=13 if self.orderly => driver_ops::step(&mut self.stage, input)?,
            _ => host_ops::step(&mut self.stage, input)?,
        }
        self.check();
        Ok(())
    }

    /// Makes a request on any queue, and notifies the queue through its register. Only a started device may
    /// answer.
    fn request(&mut self, input: &mut Unstructured<'_>) -> Result<()> {
        let Some(last) = self.stage.fixture.queues.len().checked_sub(1) else {
            return Ok(());
        };
        let index = input.int_in_range(0..=last)?;
        if index >= 2 && !self.stage.can_run(0) {
            return Ok(());
        }
        let len = input.int_in_range(1..=64)?;
        let bytes = input.bytes(len)?.to_vec();
        let room = input.int_in_range(0..=64)?;
        let queue = &mut self.stage.fixture.queues[index];
        while queue.reclaim().is_some() {}
        queue.request(&bytes, room);
        let mut regs = cpu(input)?;
        if self.stage.runs(0) {
            self.stage.fixture.vcpus.leave(0, vpmu::ExitReason::Mmio, &mut regs);
        }
        self.write(QUEUE_NOTIFY, u32::try_from(index).expect("few"));
        if self.stage.runs(0) {
            self.stage.fixture.vcpus.enter(0);
        }
        let live = self.read(STATUS) & (DRIVER_OK | NEEDS_RESET) == DRIVER_OK;
        let answered = self.stage.fixture.queues[index].reclaim().is_some();
        assert!(live || !answered, "a device that was not started answers");
        let served = index != 1;
        assert!(!(self.orderly && served) || answered, "queue {index} is not answered");
        Ok(())
    }
}

fn run(transport: &mut Transport, input: &mut Unstructured<'_>) -> Result<()> {
    while !input.is_empty() {
        transport.step(input)?;
    }
    Ok(())
}

fuzz_target!(|input: &[u8]| {
    let mut input = Unstructured::new(input);
    let Ok(mut transport) = Transport::new(&mut input) else {
        return;
    };
    // Ends when the bytes run out.
    let _ = run(&mut transport, &mut input);
    transport.write(STATUS, 0);
    assert_eq!(transport.read(STATUS), 0, "a reset takes effect immediately");
    transport.stage.finish();
});
