//! The task in samples of the batched engine, from the history in the task page.

use vpmu_testkit::{Fields, header};

use super::*;

/// Writes entry number `n` of the history, which records a switch to task `who` at guest TSC `since`.
fn switch(fixture: &Fixture, n: u64, who: u32, since: u64) {
    let word = u64::from(who) | u64::from(who + 1) << 32;
    let entry = TASK_PAGE + 32 + n % TASK_HISTORY as u64 * 16;
    let put = |at, value: u64, order| {
        let stored = fixture.memory.store(value, GuestAddress(at), order);
        stored.expect("in memory");
    };
    put(TASK_PAGE, word, Ordering::Relaxed);
    put(entry, word, Ordering::Relaxed);
    put(entry + 8, since, Ordering::Relaxed);
    put(TASK_PAGE + 16, n + 1, Ordering::Release);
}

fn name_page(fixture: &mut Fixture) {
    fixture
        .control(&TaskPageRequest {
            header: header(CONTROL_TASK_PAGE, 0),
            vcpu: 0.into(),
            reserved: 0.into(),
            address: TASK_PAGE.into(),
        })
        .expect("set");
}

#[test]
fn sample_names_the_task_of_its_moment() {
    let mut fixture = fixture();
    name_page(&mut fixture);
    let (_, mut ring) = batched(&mut fixture, &cycles(0));
    fixture.host.pass(100 * HOLD_BACK);
    let base = fixture.host.now() - 90_000_000;
    for n in 0..8 {
        let who = 100 + u32::try_from(n).expect("small");
        switch(&fixture, n, who, base + TSC_OFFSET + n * 10_000_000);
        for when in [0, 9_999_999] {
            let tsc = base + n * 10_000_000 + when;
            fixture.host.record(thread(0), overflow(tsc, n, Mode::Guest));
        }
    }
    fixture.vpmu.drain();
    let samples = ring.samples();
    assert_eq!(samples.len(), 16);
    for sample in samples {
        assert_eq!((sample.pid, sample.tid), (100 + sample.ip, 101 + sample.ip));
    }
    assert_eq!(fixture.vpmu.metrics().samples_unnamed, 0);
}

/// VPMU-D-6.5-1.
#[test]
fn sample_older_than_the_history_names_no_task() {
    let mut fixture = fixture();
    name_page(&mut fixture);
    let (event, mut ring) = batched(&mut fixture, &cycles(0));
    let start = fixture.host.now();
    fixture.host.record(thread(0), overflow(start, 1, Mode::Guest));
    for n in 0..1000 {
        fixture.host.pass(10);
        switch(&fixture, n, 7, fixture.host.now() + TSC_OFFSET);
    }
    let now = fixture.host.now();
    fixture.host.record(thread(0), overflow(now, 2, Mode::Guest));
    fixture.read(0, event);
    let tasks: Vec<_> = ring.samples().iter().map(|s| (s.pid, s.tid)).collect();
    assert_eq!(tasks, [(0, 0), (7, 8)]);
    assert_eq!(fixture.vpmu.metrics().samples_unnamed, 1);
}

#[test]
fn task_event_names_the_task_of_its_schedule_in() {
    let mut fixture = fixture();
    name_page(&mut fixture);
    let event = fixture.opened(&cycles(CONTEXT_TASK).flags(OPEN_ENABLED));
    let mut ring = fixture.map(event, 2);
    switch(&fixture, 0, 41, 0);
    fixture.command(0, COMMAND_IN, event);
    record(&fixture, 0, &[10]);
    // The task page already shows the next task when the event is scheduled out.
    switch(&fixture, 1, 51, 0);
    fixture.command(0, COMMAND_OUT, event);
    let samples = ring.samples();
    assert_eq!((samples[0].pid, samples[0].tid), (41, 42));
}
