//! The metadata page, which shows a program the count and the times without a system call.

use vpmu::ExitReason;
use vpmu::abi::*;
use vpmu_testkit::{At, Fields, Fixture, Reader, TSC_OFFSET, open_of};

/// Returns the count, the time enabled and the time running, as a program computes them from the page at guest time
/// `now`.
fn figures(page: &Reader, now: u64) -> (u64, u64, u64) {
    assert_eq!(page.field(8) & 1, 0, "`lock` is even after the write");
    let (count, enabled, running) = (page.field(16), page.field(24), page.field(32));
    let growing = page.field(40) & 1 << 3 != 0;
    let since = if growing { now.wrapping_add(page.field(56)) } else { 0 };
    (count, enabled + since, running + since)
}

/// VPMU-D-6.7-8.
#[test]
fn page_count_is_exact_after_each_exit_without_a_command() {
    let mut fixture = Fixture::new();
    let mark = fixture.opened(&open_of(KIND_MARK, 5, 0));
    let exits = fixture.opened(&open_of(KIND_EXITS, EXIT_IO, 0));
    let pages = [mark, exits].map(|id| fixture.map(id, 0));
    let counts = || [0, 1].map(|index: usize| pages[index].field(16));
    fixture.command(0, COMMAND_ENABLE, mark);
    fixture.command(0, COMMAND_ENABLE, exits);
    for round in 1..=50 {
        fixture.mark(0, 5, 1);
        fixture.exit(0, ExitReason::Io, &mut At(1));
        assert_eq!(counts(), [round, round]);
    }
    assert_eq!([mark, exits].map(|id| fixture.value(0, id)), [50, 50]);
    fixture.command(0, COMMAND_RESET, mark);
    assert_eq!(counts(), [0, 50]);
    fixture.command(0, COMMAND_DISABLE, exits);
    fixture.exit(0, ExitReason::Io, &mut At(1));
    fixture.mark(0, 5, 1);
    assert_eq!(counts(), [1, 50]);
}

#[test]
fn page_times_advance_between_exits() {
    let mut fixture = Fixture::new();
    let event = fixture.opened(&open_of(KIND_MARK, 5, CONTEXT_TASK));
    let page = fixture.map(event, 0);
    fixture.command(0, COMMAND_IN, event);
    fixture.host.pass(5_000);
    assert_eq!(figures(&page, 5_000), (0, 0, 0), "the event is not enabled");
    fixture.command(0, COMMAND_ENABLE, event);
    fixture.mark(0, 5, 1);
    fixture.host.pass(1_000_000);
    let now = fixture.host.now() + TSC_OFFSET;
    let (count, enabled, running) = figures(&page, now);
    let reply = fixture.read(0, event);
    assert_eq!(count, reply.value.get());
    // Each read of the clock advances it by a tick.
    assert!(reply.time_enabled.get() - enabled < 5);
    assert!(reply.time_running.get() - running < 5);
    let out = fixture.command(0, COMMAND_OUT, event);
    fixture.host.pass(1_000_000);
    let figures = figures(&page, fixture.host.now() + TSC_OFFSET);
    assert_eq!(figures, (1, out.time_enabled.get(), out.time_running.get()));
}

/// VPMU-D-6.3-3.
#[test]
fn unmapped_page_is_not_written() {
    let mut fixture = Fixture::new();
    let event = fixture.opened(&open_of(KIND_EXITS, EXIT_IO, 0).flags(OPEN_ENABLED));
    let page = fixture.map(event, 0);
    fixture.unmap(event).expect("unmapped");
    let before = fixture.snapshot();
    fixture.exit(0, ExitReason::Io, &mut At(1));
    assert!(fixture.snapshot() == before, "the device wrote to guest memory");
    assert_eq!(page.field(16), 0);
    assert_eq!(fixture.value(0, event), 1);
}
