//! The task in samples of the batched engine, from the history in the task page.

use super::*;

/// Writes entry number `n` of the history, which records a switch to task `who` at guest TSC `since`.
fn switch(rig: &Rig, n: u64, who: u32, since: u64) {
    let word = u64::from(who) | u64::from(who + 1) << 32;
    let entry = TASK_PAGE + 32 + n % TASK_HISTORY as u64 * 16;
    let put = |at, value: u64, order| {
        let stored = rig.memory.store(value, GuestAddress(at), order);
        stored.expect("in memory");
    };
    put(TASK_PAGE, word, Ordering::Relaxed);
    put(entry, word, Ordering::Relaxed);
    put(entry + 8, since, Ordering::Relaxed);
    put(TASK_PAGE + 16, n + 1, Ordering::Release);
}

fn name_page(rig: &mut Rig) {
    rig.control(&TaskPageRequest {
        header: Rig::header(CONTROL_TASK_PAGE, 0),
        vcpu: 0.into(),
        reserved: 0.into(),
        address: TASK_PAGE.into(),
    })
    .expect("set");
}

#[test]
fn sample_names_the_task_of_its_moment() {
    let mut rig = rig();
    name_page(&mut rig);
    let (_, mut ring) = batched(&mut rig, &cycles(0));
    rig.world.pass(100 * HOLD_BACK);
    let base = rig.world.now() - 90_000_000;
    for n in 0..8 {
        let who = 100 + u32::try_from(n).expect("small");
        switch(&rig, n, who, base + TSC_OFFSET + n * 10_000_000);
        for when in [0, 9_999_999] {
            let tsc = base + n * 10_000_000 + when;
            rig.world.record(thread(0), overflow(tsc, n, Mode::Guest));
        }
    }
    rig.vpmu.drain();
    let samples = ring.samples();
    assert_eq!(samples.len(), 16);
    for sample in samples {
        assert_eq!((sample.pid, sample.tid), (100 + sample.ip, 101 + sample.ip));
    }
    assert_eq!(rig.vpmu.metrics().samples_unnamed, 0);
}

/// VPMU-D-6.5-1.
#[test]
fn sample_older_than_the_history_names_no_task() {
    let mut rig = rig();
    name_page(&mut rig);
    let (event, mut ring) = batched(&mut rig, &cycles(0));
    let start = rig.world.now();
    rig.world.record(thread(0), overflow(start, 1, Mode::Guest));
    for n in 0..1000 {
        rig.world.pass(10);
        switch(&rig, n, 7, rig.world.now() + TSC_OFFSET);
    }
    let now = rig.world.now();
    rig.world.record(thread(0), overflow(now, 2, Mode::Guest));
    rig.read(0, event);
    let tasks: Vec<_> = ring.samples().iter().map(|s| (s.pid, s.tid)).collect();
    assert_eq!(tasks, [(0, 0), (7, 8)]);
    assert_eq!(rig.vpmu.metrics().samples_unnamed, 1);
}

#[test]
fn task_event_names_the_task_of_its_schedule_in() {
    let mut rig = rig();
    name_page(&mut rig);
    let request = OpenRequest {
        flags: OPEN_ENABLED.into(),
        ..cycles(CONTEXT_TASK)
    };
    let event = rig.open(&request).expect("open");
    let mut ring = rig.map(event, 2);
    switch(&rig, 0, 41, 0);
    rig.command(0, COMMAND_IN, event);
    record(&rig, 0, &[10]);
    // The task page already shows the next task when the event is scheduled out.
    switch(&rig, 1, 51, 0);
    rig.command(0, COMMAND_OUT, event);
    let samples = ring.samples();
    assert_eq!((samples[0].pid, samples[0].tid), (41, 42));
}
