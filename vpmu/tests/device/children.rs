//! The records that report a child's counts when the child is closed, and the trailers of records other than samples.

use vpmu::abi::*;
use vpmu_testkit::{ALL_FEATURES, Fields, Fixture, LOST, READ, SAMPLE, THROTTLE, command, limits, open_of};

fn family(fixture: &mut Fixture, flags: u32, format: u64) -> (u64, u64) {
    let request = open_of(KIND_MARK, 5, CONTEXT_TASK).flags(flags | OPEN_ENABLED).read_format(format);
    let parent = fixture.opened(&request);
    let child = request.parent(parent);
    (parent, fixture.opened(&child))
}

#[test]
fn counts_of_a_child_are_written_at_its_close() {
    let mut fixture = Fixture::new();
    fixture.runs(1, 41, 42);
    // PERF_FORMAT_TOTAL_TIME_ENABLED, _TOTAL_TIME_RUNNING, _ID.
    let (parent, child) = family(&mut fixture, OPEN_INHERIT_STAT, 7);
    let mut ring = fixture.map(parent, 1);
    fixture.command(1, COMMAND_IN, child);
    (0..9).for_each(|_| fixture.mark(1, 5, 1));
    // Schedule out the child's task, and then run another task.
    let out = fixture.command(1, COMMAND_OUT, child);
    fixture.runs(1, 51, 52);
    fixture.close(child).expect("closed");
    let raw = ring.raw();
    assert_eq!(raw.len(), 1);
    assert_eq!(raw[0].kind, READ);
    let times = [out.time_enabled.get(), out.time_running.get()];
    assert_eq!(raw[0].words, [42 << 32 | 41, 9, times[0], times[1], parent]);
    fixture.close(parent).expect("closed");
    assert_eq!(ring.raw(), [], "no READ record: the parent is not a child");
}

#[test]
fn child_that_never_ran_names_no_task() {
    let mut fixture = Fixture::new();
    fixture.runs(0, 41, 42);
    let (parent, child) = family(&mut fixture, OPEN_INHERIT_STAT, 0);
    let mut ring = fixture.map(parent, 1);
    fixture.close(child).expect("closed");
    assert_eq!(ring.raw()[0].words, [0, 0]);
}

#[test]
fn counts_are_written_only_if_requested() {
    let mut fixture = Fixture::new();
    let (parent, child) = family(&mut fixture, 0, 0);
    let mut ring = fixture.map(parent, 1);
    fixture.close(child).expect("closed");
    assert_eq!(ring.raw(), []);
}

#[test]
fn child_records_other_than_samples_end_with_task_and_time() {
    let limits = limits().with(|limits| limits.max_sample_rate = 60 * 100);
    let mut fixture = Fixture::with(limits, ALL_FEATURES);
    fixture.runs(0, 41, 42);
    let request = open_of(KIND_MARK, 5, 0).sampled(1).flags(OPEN_SAMPLE_ID_ALL | OPEN_INHERIT_STAT | OPEN_ENABLED);
    let parent = fixture.opened(&request);
    let mut ring = fixture.map(parent, 1);
    (0..100).for_each(|_| fixture.mark(0, 5, 1));
    // Sixty samples are allowed in this time window, but only 56 fit into the ring. The THROTTLE record does not fit.
    let samples = ring.raw();
    assert!(samples.iter().all(|record| record.kind == SAMPLE));
    assert_eq!(samples.len(), 56);
    fixture.command(0, COMMAND_READ, parent);
    let raw = ring.raw();
    let trailer = |words: &[u64], stream: u64| {
        let [task, _time, id, stream_id, cpu, identifier] = *words else {
            panic!("{words:?}");
        };
        assert_eq!((task, cpu), (42 << 32 | 41, 0));
        assert_eq!((id, stream_id, identifier), (parent, stream, parent));
    };
    assert_eq!(raw.len(), 1);
    assert_eq!((raw[0].kind, &raw[0].words[..2]), (LOST, &[parent, 4][..]));
    trailer(&raw[0].words[2..], parent);

    let child = fixture.opened(&request.parent(parent));
    (0..60).for_each(|_| fixture.mark(0, 5, 1));
    let raw = ring.raw();
    let throttle: Vec<_> = raw.iter().filter(|record| record.kind == THROTTLE).collect();
    // The parent is still throttled. The child takes sixty samples, and the device writes the samples that fit.
    assert_eq!(throttle.len(), 0, "{} records", raw.len());
    fixture.commands(0, &[command(COMMAND_DISABLE, parent)]);
    ring.raw();
    fixture.close(child).expect("closed");
    let raw = ring.raw();
    assert_eq!(raw.len(), 1);
    assert_eq!((raw[0].kind, &raw[0].words[..2]), (READ, &[42 << 32 | 41, 60][..]));
    trailer(&raw[0].words[2..], child);
}

#[test]
fn throttle_records_end_with_task_and_time() {
    let limits = limits().with(|limits| limits.max_sample_rate = 3 * 100);
    let mut fixture = Fixture::with(limits, ALL_FEATURES);
    fixture.runs(1, 41, 42);
    let request = open_of(KIND_MARK, 5, 1).sampled(1).flags(OPEN_SAMPLE_ID_ALL | OPEN_ENABLED);
    let event = fixture.opened(&request);
    let mut ring = fixture.map(event, 1);
    (0..4).for_each(|_| fixture.mark(1, 5, 1));
    let raw = ring.raw();
    let last = &raw[3];
    assert_eq!((last.kind, raw.len()), (THROTTLE, 4));
    let time = raw[2].words[3];
    let task = 42 << 32 | 41;
    assert_eq!(last.words, [time, event, event, task, time, event, event, 1, event]);
}

#[test]
fn loss_recorded_at_schedule_out_names_the_left_vcpu() {
    let mut fixture = Fixture::new();
    let request = open_of(KIND_MARK, 5, CONTEXT_TASK).sampled(1).flags(OPEN_SAMPLE_ID_ALL | OPEN_ENABLED);
    let event = fixture.opened(&request);
    let mut ring = fixture.map(event, 1);
    fixture.command(1, COMMAND_IN, event);
    (0..60).for_each(|_| fixture.mark(1, 5, 1));
    assert_eq!(ring.raw().len(), 56);
    fixture.command(1, COMMAND_OUT, event);
    let raw = ring.raw();
    assert_eq!((raw.len(), raw[0].kind), (1, LOST));
    // These words are the number of lost samples, and the CPU in the trailer.
    assert_eq!((raw[0].words[1], raw[0].words[6]), (4, 1));
}
