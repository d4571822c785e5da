//! A device whose vCPUs run in another process. A guest sends commands and places marks, the host records overflows, and
//! vCPUs' threads end and are replaced. The device must not panic, must bound each notification, and must count each mark
//! and answer each command once.
#![no_main]
#![allow(clippy::expect_used, reason = "a target panics when the device is wrong")]

use libfuzzer_sys::arbitrary::{Result, Unstructured};
use libfuzzer_sys::fuzz_target;
use vm_memory::{GuestAddress, GuestMemoryMmap};
use vpmu::abi::{
    Command, EXIT_ALL, EXIT_USER, KIND_EXITS, KIND_GUEST_TIME, KIND_HARDWARE, KIND_MARK, KIND_SOFTWARE, KIND_TSC,
    MARK_ANY, OPEN_ENABLED, QUEUE_VCPU, Reply,
};
use vpmu::source::{Mode, Overflow};
use vpmu::{RemoteVcpu, Settings, Turn};
use vpmu_testkit::{ALL_FEATURES, Fields, Fixture, TSC_OFFSET, VCPUS, command, limits, open_of, structs, thread};
use zerocopy::IntoBytes;

/// Bytes of guest memory: as much as the fixture's buffers take.
const MEMORY: usize = 0x200_0000;
/// Commands of the largest request.
const MOST_COMMANDS: usize = 300;
/// Most notifications until the commands of one are executed. Each takes hundreds of operations.
const MOST_KICKS: usize = 16;

/// The device, its guest and its host.
struct Machine {
    fixture: Fixture,
    /// A vCPU whose thread has ended has none.
    vcpus: Vec<Option<RemoteVcpu>>,
    /// Number of threads so far.
    threads: i32,
    events: Vec<u64>,
    marks: u64,
}

impl Machine {
    fn new(input: &mut Unstructured<'_>) -> Result<Self> {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), MEMORY)]).expect("memory");
        let settings = Settings::new(VCPUS, 1_000_000).with_limits(limits()).remote();
        let mut fixture = Fixture::with_memory(settings, None, memory);
        if input.ratio(7, 8)? {
            fixture.host.know_ips();
        }
        fixture.activate(ALL_FEATURES);
        let mut machine = Self { fixture, vcpus: Vec::new(), threads: 0, events: Vec::new(), marks: 0 };
        machine.vcpus = (0..VCPUS).map(|vcpu| Some(machine.attach(vcpu, thread(vcpu)))).collect();
        Ok(machine)
    }

    fn attach(&self, vcpu: u32, thread: i32) -> RemoteVcpu {
        self.fixture.vpmu.attach_thread(vcpu, thread, TSC_OFFSET).expect("the vCPU has no thread")
    }

    fn step(&mut self, input: &mut Unstructured<'_>) -> Result<()> {
        let vcpu = input.int_in_range(0..=VCPUS - 1)?;
        match input.int_in_range(0..=7)? {
            0 => self.open(vcpu, input),
            1..=3 => self.commands(vcpu, input),
            4 => {
                let value = input.int_in_range(4..=6)?;
                if let Some(own) = &mut self.vcpus[vcpu as usize] {
                    own.mark(value);
                    self.marks += 1;
                }
                Ok(())
            }
            5 => self.overflows(vcpu, input),
            6 => {
                self.fixture.host.pass(input.int_in_range(0..=20_000_000)?);
                self.fixture.vpmu.drain();
                Ok(())
            }
            _ => {
                self.vcpus[vcpu as usize] = None;
                if input.arbitrary()? {
                    self.threads += 1;
                    self.vcpus[vcpu as usize] = Some(self.attach(vcpu, 1000 + self.threads));
                }
                Ok(())
            }
        }
    }

    fn open(&mut self, vcpu: u32, input: &mut Unstructured<'_>) -> Result<()> {
        let (kind, config) = *input.choose(&[
            (KIND_MARK, 5),
            (KIND_MARK, MARK_ANY),
            (KIND_HARDWARE, 0),
            (KIND_SOFTWARE, 0),
            (KIND_TSC, 0),
            (KIND_EXITS, EXIT_ALL),
            (KIND_EXITS, EXIT_USER),
            (KIND_GUEST_TIME, 0),
        ])?;
        let request = open_of(kind, config, vcpu).period(input.int_in_range(0..=3)?);
        let request = request.flags(if input.arbitrary()? { OPEN_ENABLED } else { 0 });
        let opened = self.fixture.open(&request);
        let absent = kind == KIND_GUEST_TIME || (kind, config) == (KIND_EXITS, EXIT_USER);
        assert!(!absent || opened.is_err(), "an event of the vCPU's own process was opened");
        if let Ok(event) = opened {
            self.events.push(event);
            if input.arbitrary()? {
                let _ = self.fixture.try_map(event, 1);
            }
        }
        if self.events.len() > 4 && input.arbitrary()? {
            let at = input.choose_index(self.events.len())?;
            let _ = self.fixture.close(self.events.swap_remove(at));
        }
        Ok(())
    }

    /// Sends commands on the vCPU's own queue, or on another vCPU's.
    fn commands(&mut self, vcpu: u32, input: &mut Unstructured<'_>) -> Result<()> {
        let queue = QUEUE_VCPU + u16::try_from(input.int_in_range(0..=VCPUS - 1)?).unwrap_or(0);
        let count = *input.choose(&[1, 2, 20, MOST_COMMANDS])?;
        let event = if self.events.is_empty() { input.arbitrary()? } else { *input.choose(&self.events)? };
        let op = input.int_in_range(0..=12)?;
        let value = input.int_in_range(0..=1000)?;
        let Some(own) = &mut self.vcpus[vcpu as usize] else {
            return Ok(());
        };
        let commands = vec![Command { value: u64::into(value), ..command(op, event) }; count];
        let driver = &mut self.fixture.queues[usize::from(queue)];
        driver.request(commands.as_bytes(), count * size_of::<Reply>());
        let done = (0..MOST_KICKS).any(|_| own.kick(queue) == Turn::Done);
        assert!(done, "commands remain after {MOST_KICKS} notifications");
        let replies: Vec<Reply> = structs(&driver.answer().expect("answered before the vCPU runs"));
        assert_eq!(replies.len(), count, "one answer for each command");
        Ok(())
    }

    fn overflows(&mut self, vcpu: u32, input: &mut Unstructured<'_>) -> Result<()> {
        let host = &self.fixture.host;
        for _ in 0..input.int_in_range(1..=4)? {
            let overflow = Overflow {
                tsc: host.now().saturating_sub(input.int_in_range(0..=5000)?),
                ip: input.arbitrary()?,
                mode: *input.choose(&[Mode::Guest, Mode::Guest, Mode::Host])?,
                period: input.arbitrary()?,
            };
            host.record(thread(vcpu), overflow);
        }
        host.work(thread(vcpu), input.int_in_range(0..=500)?, input.int_in_range(0..=4)?);
        Ok(())
    }
}

fn run(machine: &mut Machine, input: &mut Unstructured<'_>) -> Result<()> {
    while !input.is_empty() {
        machine.step(input)?;
    }
    Ok(())
}

fuzz_target!(|input: &[u8]| {
    let mut input = Unstructured::new(input);
    let Ok(mut machine) = Machine::new(&mut input) else {
        return;
    };
    // Ends when the bytes run out.
    let _ = run(&mut machine, &mut input);
    assert_eq!(machine.fixture.vpmu.metrics().marks, machine.marks, "every mark is counted");
    drop(machine.vcpus);
    machine.fixture.vpmu.reset();
});
