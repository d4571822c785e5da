//! Tests of the transport with a driver that initializes the device in the order that virtio specifies, and in other
//! orders.

use std::io;
use std::sync::atomic::{AtomicU32, Ordering};

use vm_memory::{GuestAddress, GuestMemoryMmap};

use super::interrupt::{CONFIG_CHANGE, Line, USED_BUFFER};
use super::*;
use crate::bus::tests::as_vcpu;
use crate::devices::virtio::{ACKNOWLEDGE, DRIVER, DRIVER_OK, FEATURES_OK};

const FEATURE: u64 = 1 << 1;
const OFFERED: u64 = 1 << virtio_bindings::virtio_config::VIRTIO_F_VERSION_1 | FEATURE;

/// A backend with three queues and one shared memory region. It records the calls that the transport makes.
#[derive(Debug, Default)]
struct Recorder {
    refuses: bool,
    calls: Mutex<Vec<Call>>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Call {
    Activate { features: u64, ready: Vec<bool> },
    Reset,
    Notify(u16, u32),
}

impl Recorder {
    fn note(&self, call: Call) {
        self.calls.lock().expect("whole").push(call);
    }
}

impl Backend for Recorder {
    fn device_id(&self) -> u32 {
        63
    }
    fn features(&self) -> u64 {
        OFFERED
    }
    fn queue_sizes(&self) -> Vec<u16> {
        vec![16, 16, 8]
    }
    fn read_config(&self, offset: u64, data: &mut [u8]) {
        data.fill(u8::try_from(offset).expect("small"));
    }
    fn region(&self, id: u8) -> Option<Region> {
        (id == 0).then_some(Region { address: 0x1_d000_1000, size: 0x1000 })
    }
    fn activate(
        &self,
        _memory: Memory,
        features: u64,
        queues: Vec<Queue>,
    ) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        if self.refuses {
            return Err("no".into());
        }
        let ready = queues.iter().map(QueueT::ready).collect();
        self.note(Call::Activate { features, ready });
        Ok(())
    }
    fn reset(&self) {
        self.note(Call::Reset);
    }
    fn notify(&self, queue: u16, caller: &mut Caller<'_>) {
        let vcpu = caller.vcpu;
        self.note(Call::Notify(queue, vcpu));
    }
}

struct Driver {
    device: Arc<Recorder>,
    transport: VirtioMmio,
    line: Arc<Edges>,
}

/// A line that counts its edges.
#[derive(Debug, Default)]
struct Edges(AtomicU32);

impl Edges {
    /// The number of edges since the last call.
    fn take(&self) -> u32 {
        self.0.swap(0, Ordering::SeqCst)
    }
}

impl Line for Edges {
    fn edge(&self) -> io::Result<()> {
        self.0.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }
}

impl Driver {
    fn new(device: Recorder) -> Self {
        let device = Arc::new(device);
        let memory = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), 1 << 20)]).expect("1 MiB");
        let line = Arc::new(Edges::default());
        let interrupt = Arc::new(Interrupt::default());
        interrupt.connect(line.clone()).expect("a line");
        let transport = VirtioMmio::new(device.clone(), memory.into(), interrupt).expect("sizes are right");
        Self { device, transport, line }
    }

    fn read(&self, offset: u64) -> u32 {
        let mut data = [0xaa; 4];
        self.transport.read(offset, &mut data);
        u32::from_le_bytes(data)
    }

    fn write(&self, offset: u64, value: u32) {
        as_vcpu(1, |caller| {
            self.transport.write(offset, &value.to_le_bytes(), caller);
        });
    }

    fn add_status(&self, bit: u32) -> bool {
        self.write(register::STATUS, self.read(register::STATUS) | bit);
        self.read(register::STATUS) & bit != 0
    }

    fn accept(&self, features: u64) {
        for high in [false, true] {
            self.write(register::DRIVER_FEATURES_SELECT, u32::from(high));
            self.write(register::DRIVER_FEATURES, half(features, high));
        }
    }

    /// Performs all initialization steps up to feature negotiation.
    fn negotiate(&self) {
        assert!(self.add_status(ACKNOWLEDGE));
        assert!(self.add_status(DRIVER));
        self.accept(OFFERED);
        assert!(self.add_status(FEATURES_OK));
    }

    fn set_up_queue(&self, index: u32) {
        self.write(register::QUEUE_SELECT, index);
        self.write(register::QUEUE_SIZE, 8);
        self.write(register::QUEUE_DESC_LOW, 0x1000);
        self.write(register::QUEUE_DRIVER_LOW, 0x2000);
        self.write(register::QUEUE_DEVICE_LOW, 0x3000);
        self.write(register::QUEUE_READY, 1);
    }

    fn calls(&self) -> Vec<Call> {
        std::mem::take(&mut *self.device.calls.lock().expect("whole"))
    }
}

#[test]
fn driver_finds_the_device() {
    let driver = Driver::new(Recorder::default());
    assert_eq!(driver.read(register::MAGIC), 0x7472_6976);
    assert_eq!(driver.read(register::VERSION), 2);
    assert_eq!(driver.read(register::DEVICE_ID), 63);
    driver.write(register::DEVICE_FEATURES_SELECT, 0);
    assert_eq!(driver.read(register::DEVICE_FEATURES), half(OFFERED, false));
    driver.write(register::DEVICE_FEATURES_SELECT, 1);
    assert_eq!(driver.read(register::DEVICE_FEATURES), half(OFFERED, true));
    driver.write(register::DEVICE_FEATURES_SELECT, 2);
    assert_eq!(driver.read(register::DEVICE_FEATURES), 0);
    let mut byte = [0];
    driver.transport.read(register::CONFIG + 9, &mut byte);
    assert_eq!(byte, [9]);
}

#[test]
fn steps_in_order_start_the_device() {
    let driver = Driver::new(Recorder::default());
    driver.negotiate();
    driver.set_up_queue(0);
    driver.set_up_queue(2);
    assert_eq!(driver.read(register::QUEUE_READY), 1);
    driver.write(QUEUE_NOTIFY, 2);
    assert_eq!(driver.calls(), [], "notifications are ignored before DRIVER_OK");
    assert!(driver.add_status(DRIVER_OK));
    driver.write(QUEUE_NOTIFY, 2);
    driver.write(QUEUE_NOTIFY, 0x1_0000);
    let activate = Call::Activate { features: OFFERED, ready: vec![true, false, true] };
    assert_eq!(driver.calls(), [activate, Call::Notify(2, 1)]);
}

#[test]
fn steps_out_of_order_do_nothing() {
    let driver = Driver::new(Recorder::default());
    assert!(!driver.add_status(DRIVER));
    assert!(!driver.add_status(FEATURES_OK));
    assert!(!driver.add_status(DRIVER_OK));
    driver.set_up_queue(0);
    assert_eq!(driver.read(register::QUEUE_READY), 0);
    driver.negotiate();
    driver.accept(0);
    driver.set_up_queue(0);
    assert!(driver.add_status(DRIVER_OK));
    driver.write(register::QUEUE_READY, 0);
    assert_eq!(driver.read(register::QUEUE_READY), 1, "the queue is fixed");
    let features = match driver.calls().first() {
        Some(Call::Activate { features, .. }) => *features,
        other => panic!("{other:?}"),
    };
    assert_eq!(features, OFFERED, "negotiated features are fixed");
}

#[test]
fn status_in_one_write_equals_status_in_steps() {
    let driver = Driver::new(Recorder::default());
    driver.write(register::STATUS, ACKNOWLEDGE | DRIVER);
    driver.accept(OFFERED);
    driver.write(register::STATUS, FEATURES_OK | DRIVER_OK);
    assert_eq!(driver.read(register::STATUS), ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK);
}

/// VPMU-D-3-1.
#[test]
fn features_beyond_the_offer_are_refused() {
    for features in [OFFERED | 1 << 5, FEATURE, 0] {
        let driver = Driver::new(Recorder::default());
        driver.add_status(ACKNOWLEDGE);
        driver.add_status(DRIVER);
        driver.accept(features);
        assert!(!driver.add_status(FEATURES_OK), "{features:#x}");
        driver.accept(OFFERED);
        assert!(driver.add_status(FEATURES_OK), "a second attempt is allowed");
    }
}

/// VPMU-D-5-1.
#[test]
fn refused_start_sets_needs_reset() {
    let driver = Driver::new(Recorder { refuses: true, ..Default::default() });
    driver.negotiate();
    driver.add_status(DRIVER_OK);
    assert_ne!(driver.read(register::STATUS) & NEEDS_RESET, 0);
    assert_eq!(driver.read(register::INTERRUPT_STATUS), CONFIG_CHANGE);
    driver.write(QUEUE_NOTIFY, 0);
    assert_eq!(driver.calls(), []);
}

#[test]
fn reset_clears_all_registers() {
    assert_reset_clears_registers(|driver| driver.write(register::STATUS, 0));
}

#[test]
fn machine_reset_clears_all_registers() {
    assert_reset_clears_registers(|driver| driver.transport.reset());
}

fn assert_reset_clears_registers(reset: impl FnOnce(&Driver)) {
    let driver = Driver::new(Recorder::default());
    driver.negotiate();
    driver.set_up_queue(0);
    driver.add_status(DRIVER_OK);
    driver.transport.interrupt.used_buffer().expect("raised");
    driver.calls();
    reset(&driver);
    driver.write(QUEUE_NOTIFY, 0);
    assert_eq!(driver.calls(), [Call::Reset]);
    assert_eq!(driver.read(register::STATUS), 0);
    assert_eq!(driver.read(register::INTERRUPT_STATUS), 0);
    assert_eq!(driver.line.take(), 1, "the edge before the reset");
    // A thread of the device can still report used buffers after the reset.
    driver.transport.interrupt.used_buffer().expect("ignored");
    assert_eq!(driver.read(register::INTERRUPT_STATUS), 0);
    assert_eq!(driver.line.take(), 0, "an edge after the reset");
    assert_eq!(driver.read(register::QUEUE_READY), 0);
    driver.negotiate();
    assert!(driver.add_status(DRIVER_OK), "the device works again");
}

#[test]
fn interrupt_status_is_set_before_the_edge_until_acknowledged() {
    let driver = Driver::new(Recorder::default());
    driver.negotiate();
    driver.add_status(DRIVER_OK);
    driver.transport.interrupt.used_buffer().expect("raised");
    assert_eq!(driver.line.take(), 1, "an edge");
    assert_eq!(driver.read(register::INTERRUPT_STATUS), USED_BUFFER);
    driver.write(register::INTERRUPT_ACK, CONFIG_CHANGE);
    assert_eq!(driver.read(register::INTERRUPT_STATUS), USED_BUFFER);
    driver.write(register::INTERRUPT_ACK, USED_BUFFER);
    assert_eq!(driver.read(register::INTERRUPT_STATUS), 0);
}

/// VPMU-D-6.13-10.
#[test]
fn restore_changes_the_generation_and_notifies_a_started_driver() {
    let driver = Driver::new(Recorder::default());
    driver.negotiate();
    let restored = || {
        let other = Driver::new(Recorder::default());
        let saved = driver.transport.save();
        let _ = other.transport.restore(&saved).expect("restored");
        other
    };
    let unstarted = restored();
    assert_eq!(unstarted.read(register::CONFIG_GENERATION), 1);
    assert_eq!(unstarted.read(register::INTERRUPT_STATUS), 0);
    assert_eq!(unstarted.line.take(), 0);
    assert!(driver.add_status(DRIVER_OK));
    let started = restored();
    assert_eq!(started.read(register::CONFIG_GENERATION), 1);
    assert_eq!(started.read(register::INTERRUPT_STATUS), CONFIG_CHANGE);
    assert_eq!(started.line.take(), 1, "an edge");
    assert_eq!(driver.read(register::CONFIG_GENERATION), 0);
}

#[test]
fn region_registers_report_a_region_and_all_ones_for_none() {
    let driver = Driver::new(Recorder::default());
    let region = |id| {
        driver.write(register::REGION_SELECT, id);
        [register::REGION_SIZE_LOW, register::REGION_SIZE_HIGH, register::REGION_BASE_LOW, register::REGION_BASE_HIGH]
            .map(|offset| driver.read(offset))
    };
    assert_eq!(region(0), [0x1000, 0, 0xd000_1000, 1]);
    assert_eq!(region(1), [u32::MAX; 4]);
    assert_eq!(region(256), [u32::MAX; 4]);
}

#[test]
fn invalid_accesses_are_harmless() {
    let driver = Driver::new(Recorder::default());
    for (offset, len) in [(0, 1), (1, 4), (0x70, 8), (0xfe, 2), (0x54, 4)] {
        let mut data = vec![0xaa; len];
        driver.transport.read(offset, &mut data);
        assert_eq!(data, vec![0; len], "{offset:#x}");
        as_vcpu(0, |caller| {
            driver.transport.write(offset, &vec![0xff; len], caller);
        });
    }
    driver.negotiate();
    driver.write(register::QUEUE_SELECT, u32::MAX);
    assert_eq!(driver.read(register::QUEUE_SIZE_MAX), 0);
    driver.write(register::QUEUE_READY, 1);
    driver.write(register::QUEUE_SELECT, 2);
    assert_eq!(driver.read(register::QUEUE_SIZE_MAX), 8);
    driver.write(register::QUEUE_SIZE, 0x1_0000);
    driver.write(register::QUEUE_SIZE, 3);
    assert_eq!(driver.read(register::QUEUE_READY), 0);
}
