//! Valid open requests, and the bounds of their fields.

use vpmu::abi::*;
use vpmu_testkit::{ALL_FEATURES, CYCLES, FAULTS, Fields, Fixture, limits, open_of};

const READ: u64 = 1 << 4;

fn good() -> OpenRequest {
    open_of(KIND_MARK, 5, 0).sampled(1)
}

#[test]
fn every_defined_flag_and_field_is_accepted() {
    let mut fixture = Fixture::new();
    let leader = fixture.opened(&good());
    let request = good()
        .flags(0x7ff & !(OPEN_PINNED | OPEN_FREQ))
        .sample_type(0x1_03c7 | 1 << 3 | READ)
        .read_format(READ_ALLOWED)
        .leader(leader)
        .wakeup(1)
        .engine(ENGINE_EXIT);
    let reply = fixture.open_reply(&request);
    assert_eq!((reply.status.get(), reply.engine.get()), (0, ENGINE_EXIT));
    let pinned = good().flags(OPEN_PINNED | OPEN_FREQ);
    fixture.opened(&pinned);
    let counting = fixture.open_reply(&open_of(KIND_MARK, 5, 0));
    assert_eq!(counting.engine.get(), ENGINE_ANY, "an event that only counts has no engine");
}

#[test]
fn unknown_bits_are_refused_one_by_one() {
    let mut fixture = Fixture::new();
    for bit in 17..32 {
        let request = good().flags(1_u32 << bit);
        assert_eq!(fixture.open(&request), Err(libc::EINVAL), "flag {bit}");
    }
    for bit in (0..64).filter(|bit| SAMPLE_ALLOWED & 1 << bit == 0) {
        let request = good().sample_type(1_u64 << bit);
        assert_eq!(fixture.open(&request), Err(libc::EOPNOTSUPP), "sample {bit}");
    }
    for bit in (0..64).filter(|bit| READ_ALLOWED & 1 << bit == 0) {
        let request = good().read_format(1_u64 << bit);
        assert_eq!(fixture.open(&request), Err(libc::EOPNOTSUPP), "read {bit}");
    }
}

#[test]
fn registers_stacks_and_chains_have_perfs_bounds() {
    let mut fixture = Fixture::new();
    let (chain, user, stack, intr) = (1_u64 << 5, 1 << 12, 1 << 13, 1 << 18);
    let open = |fixture: &mut Fixture, sample_type: u64, mask: u64, size: u32, max_stack: u32| {
        fixture
            .open(
                &good().sample_type(sample_type).regs_user(mask).regs_intr(mask).stack_user(size).max_stack(max_stack),
            )
            .err()
    };
    let registers = 0xff_0fff_u64;
    for bit in 0..64 {
        let refused = registers & 1 << bit == 0;
        for field in [user, intr] {
            let errno = open(&mut fixture, field, 1 << bit, 0, 0);
            assert_eq!(errno == Some(libc::EINVAL), refused, "register {bit}");
        }
    }
    for field in [user, intr] {
        assert_eq!(open(&mut fixture, field, 0, 0, 0), Some(libc::EINVAL));
    }
    for (size, refused) in [(0, false), (8, false), (65_528, false), (12, true), (65_536, true)] {
        let errno = open(&mut fixture, stack, 0, size, 0);
        assert_eq!(errno == Some(libc::EINVAL), refused, "stack of {size}");
    }
    for (most, refused) in [(0, false), (1, false), (1024, false), (1025, true), (u32::MAX, true)] {
        let errno = open(&mut fixture, chain, 0, 0, most);
        assert_eq!(errno == Some(libc::EOVERFLOW), refused, "chain of {most}");
    }
    // As in perf, the device does not check `max_stack`, `regs_*` and `stack_user` unless `sample_type` needs them.
    assert_eq!(open(&mut fixture, 1, u64::MAX, u32::MAX, u32::MAX), None);
}

#[test]
fn periods_and_frequencies_have_bounds() {
    let limits = limits().with(|limits| limits.max_sample_rate = 5000);
    let mut fixture = Fixture::with(limits, ALL_FEATURES);
    let mut rate = [0; 4];
    fixture.vpmu.read_config(44, &mut rate);
    assert_eq!(u32::from_le_bytes(rate), 5000);
    let open = |fixture: &mut Fixture, flags: u32, period: u64| fixture.open(&good().flags(flags).period(period)).err();
    assert_eq!(open(&mut fixture, 0, u64::MAX >> 1), None);
    assert_eq!(open(&mut fixture, 0, 1 << 63), Some(libc::EINVAL));
    assert_eq!(open(&mut fixture, OPEN_FREQ, 0), Some(libc::EINVAL));
    assert_eq!(open(&mut fixture, OPEN_FREQ, 5000), None);
    assert_eq!(open(&mut fixture, OPEN_FREQ, 5001), Some(libc::EINVAL));
    // An event's shortest period does not limit its frequency. An event that cannot sample cannot have a frequency.
    let frequency = |of: (u32, u64)| open_of(of.0, of.1, 0).sampled(1).flags(OPEN_FREQ);
    fixture.opened(&frequency(CYCLES));
    assert_eq!(fixture.open(&frequency(FAULTS)), Err(libc::EOPNOTSUPP));
}
