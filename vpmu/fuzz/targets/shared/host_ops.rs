//! Operations of the host, the vCPUs and the operator, made from the fuzzer's bytes.

use libfuzzer_sys::arbitrary::{Result, Unstructured};
use vpmu::abi::PAGE_SIZE;
use vpmu::source::{HostExit, Mode, Overflow, Rate, Recorded};
use vpmu::{AuxError, FlushError, Persist, Vpmu};
use vpmu_testkit::{Errno, Forgery, VCPUS, forge, leaves, thread};

use super::input::{cpu, exit, number, once_in};
use super::stage::Stage;

/// One step of a vCPU, the host or the operator.
pub(crate) fn step(stage: &mut Stage, input: &mut Unstructured<'_>) -> Result<()> {
    match input.int_in_range(0..=15)? {
        0..=2 => marks(stage, input),
        3..=4 => exits(stage, input),
        5..=6 => host_counts(stage, input),
        7..=8 => host_records(stage, input),
        9 => {
            stage.fixture.host.pass(input.int_in_range(0..=20_000_000)?);
            stage.fixture.vpmu.drain();
            Ok(())
        }
        10 => host_fails(stage, input),
        11 => threads(stage, input),
        12 => persist(stage, input),
        13 => flush(stage, input),
        14 => histories(stage, input),
        _ if input.arbitrary()? => produce(stage, input),
        _ => {
            let _ = stage.fixture.vpmu.end(stage.event(input)?);
            Ok(())
        }
    }
}

/// Writes data as a producer in the VMM does: to an active trace, or to any event.
fn produce(stage: &Stage, input: &mut Unstructured<'_>) -> Result<()> {
    let vpmu = &stage.fixture.vpmu;
    let active = vpmu.aux_traces(0, input.int_in_range(0..=VCPUS)?);
    let trace = match active.first() {
        Some(&trace) if !once_in(input, 4)? => trace,
        _ => stage.event(input)?,
    };
    let Ok(mut writer) = vpmu.aux_begin(trace) else {
        return Ok(());
    };
    for _ in 0..input.int_in_range(0..=3)? {
        match input.int_in_range(0..=4)? {
            0 => assert!(matches!(vpmu.aux_begin(trace), Err(AuxError::Nested))),
            1 => {
                let _ = writer.skip(u64::from(input.arbitrary::<u8>()?));
            }
            2 => writer.lose(input.int_in_range(0..=4096)?),
            _ => {
                let _ = writer.put(&[7; 100][..input.int_in_range(0..=100)?]);
            }
        }
        if let Some(place) = writer.get() {
            assert!(place.room <= 4 * PAGE_SIZE as u64, "more room than any area has");
        }
    }
    match input.int_in_range(0..=7)? {
        0 => drop(writer),
        1 => {
            let _ = writer.end(number(input)?);
        }
        _ => {
            let size = writer.written();
            let _ = writer.end(size);
        }
    }
    Ok(())
}

/// Writes to the doorbell, like a guest program.
pub(crate) fn marks(stage: &mut Stage, input: &mut Unstructured<'_>) -> Result<()> {
    let Some(vcpu) = stage.vcpu(input)? else {
        return Ok(());
    };
    let value = *input.choose(&[5, 5, 5, 6])?;
    let mut regs = cpu(input)?;
    for _ in 0..*input.choose(&[1, 1, 2, 20])? {
        let reason = vpmu::ExitReason::Mmio;
        stage.fixture.vcpus.leave(vcpu, reason, &mut regs);
        stage.fixture.vcpus.mark(vcpu, value, &mut regs);
        stage.fixture.vcpus.enter(vcpu);
        stage.marks += 1;
    }
    Ok(())
}

/// Makes a vCPU leave the guest and usually enter it again.
fn exits(stage: &mut Stage, input: &mut Unstructured<'_>) -> Result<()> {
    let Some(vcpu) = stage.vcpu(input)? else {
        return Ok(());
    };
    let (exit, mut regs) = (exit(input)?, cpu(input)?);
    stage.fixture.host.add_exits(1);
    stage.fixture.host.spend(input.int_in_range(0..=2000)?);
    for _ in 0..*input.choose(&[1, 1, 3, 20])? {
        stage.fixture.vcpus.leave(vcpu, exit, &mut regs);
        if !once_in(input, 10)? {
            stage.fixture.vcpus.enter(vcpu);
        }
    }
    Ok(())
}

/// Makes the host's counters grow.
fn host_counts(stage: &Stage, input: &mut Unstructured<'_>) -> Result<()> {
    let of = thread(input.int_in_range(0..=VCPUS - 1)?);
    let events = *input.choose(&[1, 9, 10, 100, 500])?;
    stage.fixture.host.work(of, events, input.int_in_range(0..=4)?);
    stage.fixture.host.pass(input.int_in_range(0..=20_000_000)?);
    Ok(())
}

/// Makes the host record overflows, exits and losses while a vCPU keeps running.
fn host_records(stage: &Stage, input: &mut Unstructured<'_>) -> Result<()> {
    let host = &stage.fixture.host;
    let of = thread(input.int_in_range(0..=VCPUS - 1)?);
    for _ in 0..input.int_in_range(1..=4)? {
        let tsc = match input.int_in_range(0..=7)? {
            0 => number(input)?,
            _ => host.now().saturating_sub(input.int_in_range(0..=5000)?),
        };
        match input.int_in_range(0..=7)? {
            0 => host.drop_overflows(of, input.int_in_range(0..=2)?),
            1 => {
                // Real hosts do not report larger losses.
                let lost = number(input)? & u64::from(u32::MAX);
                host.record_exit(of, Recorded::Lost(lost));
            }
            2..=3 => {
                let recorded = HostExit {
                    tsc,
                    back: if input.arbitrary()? { Some(tsc.wrapping_add(input.int_in_range(0..=500)?)) } else { None },
                    ip: number(input)?,
                    reason: input.arbitrary()?,
                    qualification: number(input)?,
                    detail: number(input)?,
                };
                host.record_exit(of, Recorded::Exit(recorded));
            }
            _ => {
                let overflow = Overflow {
                    tsc,
                    ip: number(input)?,
                    mode: *input.choose(&[Mode::Guest, Mode::Guest, Mode::Host])?,
                    period: number(input)?,
                };
                host.record(of, overflow);
            }
        }
    }
    Ok(())
}

/// Makes the host refuse some operations on counters until this function permits them again.
fn host_fails(stage: &Stage, input: &mut Unstructured<'_>) -> Result<()> {
    let host = &stage.fixture.host;
    match input.int_in_range(0..=3)? {
        0 => host.give_up(thread(input.int_in_range(0..=VCPUS - 1)?)),
        1 => host.refuse_rates(),
        2 if once_in(input, 4)? => host.break_host(),
        3 => {
            // EBUSY, EACCES, EMFILE, ENOENT or EINVAL; zero permits counters again.
            host.deny(*input.choose(&[0, 16, 13, 24, 2, 22])?);
        }
        _ => {}
    }
    Ok(())
}

/// Ends a vCPU's thread, or moves the vCPU to another thread.
fn threads(stage: &mut Stage, input: &mut Unstructured<'_>) -> Result<()> {
    let vcpu = input.int_in_range(0..=VCPUS - 1)?;
    match once_in(input, 3)? {
        true => stage.detach(vcpu),
        // Two vCPUs never share a thread.
        false => {
            let other = Errno::from(input.int_in_range(0..=2_u8)?) * 100;
            stage.attach(vcpu, thread(vcpu) + other);
        }
    }
    Ok(())
}

/// Starts an event of the operator.
pub(crate) fn persist(stage: &mut Stage, input: &mut Unstructured<'_>) -> Result<()> {
    if let Ok(id) = stage.fixture.vpmu.persist(&persist_request(input)?) {
        stage.events.push(id);
    }
    Ok(())
}

/// Builds an operator's request to start an event. The request may be invalid.
pub(crate) fn persist_request(input: &mut Unstructured<'_>) -> Result<Persist> {
    let events = [
        "mark=5",
        "marks",
        "cycles",
        "cycles:u",
        "page-faults",
        "tsc",
        "exits-user:u",
        "exits",
        "exit-trace",
        "mark=",
        "mark=99999999999",
        "",
        ":k",
    ];
    let event = *input.choose(&events)?;
    let name = *input.choose(&[None, Some("ours"), Some("other"), Some("No")])?;
    let rates =
        [None, Some(Rate::Period(1)), Some(Rate::Period(100)), Some(Rate::Frequency(1000)), Some(Rate::Period(0))];
    Ok(Persist {
        name: name.map(str::to_owned),
        event: event.to_owned(),
        vcpu: input.int_in_range(0..=VCPUS)?,
        rate: *input.choose(&rates)?,
        sample_type: *input.choose(&[0x1_01cf, 0x1_03ff, 0x87, 0])?,
        pages: *input.choose(&[1, 0, 2, 4, 8, 3])?,
    })
}

/// Flushes an event or all events, like the operator.
fn flush(stage: &mut Stage, input: &mut Unstructured<'_>) -> Result<()> {
    let event = if input.arbitrary()? { None } else { Some(stage.event(input)?) };
    if once_in(input, 8)? {
        stage.fixture.host.be_stuck();
        stage.stuck = true;
    }
    if !stage.stuck {
        // A flush waits until the vCPUs have left the guest. This thread also acts as the vCPUs, so it must make them
        // leave before it flushes.
        stage.leave_all();
    }
    let result = stage.fixture.vpmu.flush(event);
    if !stage.stuck {
        assert!(!matches!(result, Err(FlushError::Inside { .. })));
        stage.enter_all();
    }
    Ok(())
}

/// Lists persistent events and reads their histories, like the operator. Sometimes also reads the configuration space,
/// or saves and restores the device.
fn histories(stage: &mut Stage, input: &mut Unstructured<'_>) -> Result<()> {
    histories_of(&stage.fixture.vpmu);
    if input.arbitrary()? {
        let mut config = [0xff; 16];
        stage.fixture.vpmu.read_config(input.int_in_range(0..=128)?, &mut config);
        if stage.movable && once_in(input, 4)? {
            return moves(stage, input);
        }
    }
    Ok(())
}

/// Saves the device and restores the state into a new device. Sometimes forges the saved state before restoring it.
fn moves(stage: &mut Stage, input: &mut Unstructured<'_>) -> Result<()> {
    stage.leave_all();
    let mut state = stage.save();
    let forgeries = input.int_in_range(0..=5)?;
    // Leave the state unchanged in most executions.
    for _ in 3..forgeries {
        let places = leaves(&state);
        let place = input.choose(&places)?;
        let forgery = match input.int_in_range(0..=7)? {
            0..=2 => Forgery::Number(number(input)?),
            3 => Forgery::Plus(number(input)?),
            4 => Forgery::Flip,
            5 => Forgery::Null,
            6 => Forgery::Remove,
            _ => Forgery::Repeat,
        };
        forge(&mut state, place, &forgery);
    }
    let forged = forgeries > 3;
    match stage.successor(&state) {
        Some((next, Ok(()))) => {
            stage.forged |= forged;
            if input.arbitrary()? {
                next.host.know_ips();
            }
            stage.go_on_as(next);
        }
        refused => {
            assert!(forged || stage.forged, "{:?}", refused.map(|(_, refused)| refused));
            stage.enter_all();
        }
    }
    Ok(())
}

/// Reads the history of every persistent event.
pub(crate) fn histories_of(vpmu: &Vpmu) {
    for event in vpmu.persistent() {
        let Ok(history) = vpmu.history(event.id) else {
            continue;
        };
        let read: usize = history.iter().map(<[u8]>::len).sum();
        assert_eq!(read, history.records.len(), "the history has only whole records");
    }
}
