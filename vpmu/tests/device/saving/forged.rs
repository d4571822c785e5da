//! Forged states. The device refuses each of them with an error that names the fault.

use proptest::prelude::*;
use serde_json::{Value, json};
use vm_memory::GuestMemoryMmap;
use vpmu::abi::*;
use vpmu::{RestoreError, SavedState};
use vpmu_testkit::{
    Fields, Fixture, Forgery, MEMORY, WINDOW_FEATURES, command, forge, leaves, map_aux, open_of, window,
};

use super::{mark, marks};
use crate::persistent::asked;

/// A device with events of every kind, and its window.
struct Rich {
    fixture: Fixture,
    window: GuestMemoryMmap,
}

impl Rich {
    fn new() -> Self {
        let window = window(64);
        let mut fixture = Fixture::windowed(&window);
        fixture.runs(0, 11, 12);
        // Event 1 belongs to the operator. Event 2 belongs to the guest and has its ring in the window.
        fixture.vpmu.persist(&asked("mark=5", 0)).expect("started");
        let guests = fixture.opened(&marks(0, 1));
        fixture.detach(guests, "mine").expect("detached");
        fixture.map_window(guests, 2, MAP_WRITABLE).expect("mapped");
        // Event 3 is a parent with a ring, and event 4 is its child.
        let parent = fixture.opened(&marks(0, 3));
        fixture.map(parent, 4);
        fixture.opened(&marks(0, 3).parent(parent));
        // Event 5 writes to the parent's ring, and starts event 6.
        let starter = fixture.opened(&marks(0, 2));
        fixture.redirect(starter, parent).expect("redirected");
        // Event 6 is a leader, and event 7 is a member with a frequency.
        let leader = fixture.opened(&open_of(KIND_MARK, 5, 0));
        let member = open_of(KIND_MARK, MARK_ANY, 0).sampled(100).leader(leader).flags(OPEN_ENABLED | OPEN_FREQ);
        fixture.opened(&member);
        fixture.link(starter, leader, LINK_STARTER).expect("linked");
        // Event 8 is a trace with both a ring and an area.
        let trace = fixture.opened(&open_of(KIND_EXIT_TRACE, EXIT_IO, 0));
        let first = fixture.next_ring;
        fixture.next_ring += 8 * 0x1000;
        let pages: Vec<u64> = (0..6).map(|page| first + page * 0x1000).collect();
        fixture.map_pages(trace, MAP_WRITABLE, &pages[..2]).expect("a ring");
        map_aux(&mut fixture, trace, MAP_WRITABLE, &pages[2..]).expect("an area");
        // Event 9 is a trace of a task, with an area that the driver owns.
        let task = fixture.opened(&open_of(KIND_EXIT_TRACE, EXIT_IO, CONTEXT_TASK).flags(OPEN_ENABLED));
        let pages = [fixture.next_ring, fixture.next_ring + 0x1000];
        fixture.next_ring += 4 * 0x1000;
        map_aux(&mut fixture, task, MAP_DRIVER_OWNED, &pages).expect("an area");
        let begin = Command { room: 4096.into(), ..command(COMMAND_AUX_BEGIN, task) };
        fixture.commands(0, &[command(COMMAND_IN, task), begin]);
        mark(&fixture, 1, 300);
        fixture.halt();
        Self { fixture, window }
    }

    fn state(&self) -> Value {
        serde_json::to_value(self.fixture.save()).expect("a file")
    }

    /// Restores a state into a new device.
    fn restore(&self, state: Value) -> Result<Fixture, Option<RestoreError>> {
        let state: SavedState = serde_json::from_value(state).map_err(|_| None)?;
        let next = self.fixture.successor(self.fixture.settings(), self.fixture.memory.clone(), Some(&self.window));
        let (features, queues) = next.transport();
        let memory = next.memory.clone();
        match next.vpmu.restore(&state, memory, features, &queues, next.interrupt.clone()) {
            Ok(()) => Ok(next),
            Err(error) => {
                // After the refusal, the device behaves like a new device. It has no events, and accepts a driver and a
                // valid state.
                assert_eq!(next.vpmu.persistent(), []);
                let (features, queues) = next.transport();
                let memory = next.memory.clone();
                let sound: SavedState = serde_json::from_value(self.state()).expect("a state");
                let again = next.vpmu.restore(&sound, memory, features, &queues, next.interrupt.clone());
                again.expect("restored");
                Err(Some(error))
            }
        }
    }
}

/// VPMU-D-6.13-2.
#[test]
fn restored_device_saves_the_same_state() {
    let rich = Rich::new();
    let state = rich.state();
    let next = rich.restore(state.clone());
    let next = next.unwrap_or_else(|error| panic!("{error:?}"));
    // Ignore the sequence locks of metadata pages, because the restore changed them when it wrote the clock conversion.
    let but_locks = |mut state: Value| {
        for sink in state["sinks"].as_array_mut().expect("sinks") {
            if let Some(ring) = sink["ring"].as_object_mut() {
                assert_eq!(ring.remove("sequence").and_then(|lock| lock.as_u64()).map(|lock| lock % 2), Some(0));
            }
        }
        state
    };
    let again = serde_json::to_value(next.save()).expect("a file");
    assert_eq!(but_locks(again), but_locks(state));
}

/// VPMU-D-7-4.
#[test]
fn forged_states_are_refused_with_the_fault() {
    let rich = Rich::new();
    let state = rich.state();
    let event = |number: usize, field: &str| format!("/events/{number}{field}");
    let sink = |id: u64, field: &str| {
        let sinks = state["sinks"].as_array().expect("sinks");
        let at = sinks.iter().position(|sink| sink["id"] == id).expect("it");
        format!("/sinks/{at}{field}")
    };
    let cases: Vec<(String, Value, &str)> = vec![
        ("/format".into(), json!(1), "format 1"),
        ("/tsc_khz".into(), json!(0), "TSC frequency"),
        ("/next_id".into(), json!(0), "next id"),
        ("/next_id".into(), json!(u64::MAX), "next id"),
        ("/next_id".into(), json!(9), "event 9: its id"),
        ("/vcpus".into(), json!([]), "vCPUs"),
        ("/vcpus/0/task_page".into(), json!(1), "task page"),
        ("/vcpus/0/task_page".into(), json!(MEMORY), "task page"),
        ("/vcpus/1/exits/io".into(), json!(u64::MAX), "too large"),
        ("/driver/features".into(), json!(1_u64 << 32), "saved features"),
        ("/driver/features".into(), json!(WINDOW_FEATURES | 1 << 20), "saved features"),
        ("/driver/queues".into(), json!([]), "number of queues"),
        ("/totals/kicks".into(), json!([]), "notification counts"),
        // Events.
        (event(0, "/spec/id"), json!(0), "its id"),
        (event(3, "/spec/owner"), json!(0), "its id"),
        (event(3, "/spec/owner"), json!(5), "its id"),
        (event(3, "/spec/owner"), json!(1), "inherited"),
        (event(0, "/life/prompt"), json!(true), "settings of its wakeups"),
        (event(0, "/spec/own_notices"), json!(true), "settings of its wakeups"),
        (event(5, "/life/prompt"), json!(true), "makes no samples"),
        (event(7, "/life/prompt"), json!(true), "makes no samples"),
        (event(5, "/spec/own_notices"), json!(true), "settings of its wakeups"),
        (event(3, "/spec/own_notices"), json!(true), "contradict those of its family"),
        (event(2, "/spec/request/flags"), json!(u32::MAX), "its request is not valid"),
        (event(2, "/spec/request/layout/sample_type"), json!(1_u64 << 63), "unknown"),
        (event(2, "/spec/request/layout/sample_id_all"), json!(true), "contradict"),
        (event(2, "/spec/request/engine"), json!(0), "its engine"),
        (event(2, "/spec/request/engine"), json!(9), "its request is not valid"),
        (event(2, "/context"), json!({"Vcpu": 2}), "its vCPU does not exist"),
        (event(2, "/shard"), json!(1), "its vCPU does not exist"),
        (event(8, "/shard"), json!(7), "its vCPU does not exist"),
        (event(2, "/life/last_vcpu"), json!(2), "its vCPU does not exist"),
        (event(2, "/life/period/length"), json!(0), "its period is not valid"),
        (event(2, "/life/period/counted"), json!(3), "its period is not valid"),
        (event(6, "/life/period/frequency"), json!(0), "its period is not valid"),
        (event(6, "/life/period/frequency"), json!(null), "contradict"),
        (event(5, "/life/limit"), json!(1), "never overflows"),
        (event(2, "/life/task"), json!({"pid": 1, "tid": 1}), "is a vCPU"),
        (event(7, "/life/trace"), json!(null), "contradicts its kind"),
        (event(7, "/life/trace/due"), json!(255), "its trace is not valid"),
        (event(6, "/leader"), json!(7), "the group of its leader"),
        (event(6, "/leader"), json!(2), "the group of its leader"),
        (event(6, "/leader"), json!(99), "the group of its leader"),
        (event(1, "/persistence/name"), json!("No"), "its name is not"),
        (event(1, "/persistence/name"), json!("event9"), "its name is not"),
        (event(1, "/persistence/name"), json!("recorder"), "its name is not"),
        (event(8, "/persistence"), json!({"name": "a", "operator": false}), "persistent"),
        // Rings and areas.
        (sink(3, "/id"), json!(4), "inherited"),
        (sink(3, "/ring"), json!(null), "neither"),
        (sink(3, "/ring/pages"), json!([]), "number of pages"),
        (sink(3, "/ring/pages/1"), json!(MEMORY), "not guest memory"),
        (sink(3, "/ring/pages/1"), json!(8), "not guest memory"),
        (sink(3, "/ring/head"), json!(4095), "not a multiple of 8"),
        (sink(3, "/ring/bytes"), json!(u64::MAX), "too large"),
        (sink(3, "/ring/sequence"), json!(1), "metadata page is odd"),
        (sink(3, "/ring/backward"), json!(true), "may not write to"),
        (sink(2, "/window_page"), json!(62), "do not exist"),
        (sink(2, "/window_page"), json!(u32::MAX), "do not exist"),
        (sink(2, "/window_page"), json!(20), "do not match the window"),
        (sink(1, "/window_page"), json!(null), "outside the window"),
        (sink(8, "/area/pages"), json!([0x1000, 0x2000, 0x3000]), "number of pages"),
        (sink(8, "/area/pages/0"), json!(MEMORY), "not guest memory"),
        (sink(8, "/area/watermark"), json!(0), "watermark"),
        (sink(8, "/area/head"), json!(1), "between two words"),
        (sink(8, "/area/keeper"), json!({"Driver": {"span": null}}), "has a ring"),
        (sink(8, "/area/keeper/Device/flags"), json!(16), "unknown flags"),
        (sink(9, "/area/keeper/Driver/span/room"), json!(u64::MAX), "larger than the area"),
        (sink(9, "/area/keeper/Driver/span/event"), json!(3), "does not write to the sink"),
        (sink(9, "/area/keeper/Driver/span"), json!(null), "or a span without an open write"),
        (sink(9, "/area/keeper"), json!({"Device": {"flags": 0, "full": false}}), "no ring"),
        ("/families/0/sink".into(), json!(77), "does not exist"),
        ("/families/0/owner".into(), json!(77), "does not exist"),
        ("/families/1/sink".into(), json!(3), "of its own"),
        // Links and notices.
        ("/links/0/trigger".into(), json!(6), "cannot be linked"),
        ("/links/0/trigger".into(), json!(99), "cannot be linked"),
        ("/links/0/target".into(), json!(1), "cannot be linked"),
        ("/links/0/target".into(), json!(5), "cannot be linked"),
        ("/notices/0/kind".into(), json!(99), "kind is unknown"),
        ("/notices/0/event".into(), json!(99), "does not exist"),
        ("/notices".into(), json!([{"kind": NOTICE_WAKEUP, "event": 5, "value": 1}]), "cannot have such a notice"),
        ("/notices".into(), json!([{"kind": NOTICE_WAKEUP, "event": 3, "value": 0}]), "value is not valid"),
        ("/notices".into(), json!([{"kind": NOTICE_ERROR, "event": 3, "value": 1}]), "does not exist"),
        (
            "/notices".into(),
            json!([
                {"kind": NOTICE_PERSISTENT, "event": 1, "value": 0},
                {"kind": NOTICE_PERSISTENT, "event": 2, "value": 0}
            ]),
            "already pending",
        ),
    ];
    let wrong = cases.into_iter().filter_map(|(at, value, expected)| {
        let mut forged = state.clone();
        *forged.pointer_mut(&at).unwrap_or_else(|| panic!("{at}")) = value;
        let text = match rich.restore(forged) {
            Err(Some(error)) => error.to_string(),
            Err(None) => "no state".to_owned(),
            Ok(_) => "restored".to_owned(),
        };
        (!text.contains(expected)).then(|| format!("{at}: {text}, not {expected}"))
    });
    assert_eq!(wrong.collect::<Vec<_>>(), [""; 0]);
}

#[test]
fn unknown_field_is_refused() {
    let rich = Rich::new();
    for at in
        ["", "/events/0", "/events/0/spec", "/events/0/spec/request", "/sinks/0/ring", "/vcpus/0/exits", "/totals"]
    {
        let mut forged = rich.state();
        let object = forged.pointer_mut(at).and_then(Value::as_object_mut);
        object.expect(at).insert("more".to_owned(), json!(1));
        assert!(matches!(rich.restore(forged), Err(None)), "the unknown field at {at:?} was not refused");
    }
}

#[test]
fn device_in_use_is_not_restored() {
    let rich = Rich::new();
    let state = rich.fixture.save();
    let (features, queues) = rich.fixture.transport();
    let memory = rich.fixture.memory.clone();
    let restored = rich.fixture.vpmu.restore(&state, memory, features, &queues, rich.fixture.interrupt.clone());
    assert!(matches!(restored, Err(RestoreError::InUse)));
}

#[test]
fn events_beyond_the_limit_are_refused() {
    let rich = Rich::new();
    let state = rich.fixture.save();
    let mut settings = rich.fixture.settings();
    settings.limits.max_events = 3;
    let next = rich.fixture.successor(settings, rich.fixture.memory.clone(), Some(&rich.window));
    let (features, queues) = next.transport();
    let memory = next.memory.clone();
    let restored = next.vpmu.restore(&state, memory, features, &queues, next.interrupt.clone());
    let error = restored.expect_err("too many").to_string();
    assert!(error.contains("number of events"), "another error: {error}");
}

fn forgery() -> impl Strategy<Value = Forgery> {
    let number = prop_oneof![
        Just(0_u64),
        1_u64..20,
        any::<u64>(),
        Just(u64::MAX),
        Just(1 << 63),
        any::<u32>().prop_map(u64::from)
    ];
    prop_oneof![
        4 => number.clone().prop_map(Forgery::Number),
        2 => number.prop_map(Forgery::Plus),
        2 => Just(Forgery::Flip),
        1 => Just(Forgery::Null),
        1 => Just(Forgery::Remove),
        1 => Just(Forgery::Repeat),
    ]
}

/// VPMU-D-7-4.
#[test]
fn forged_states_do_no_harm() {
    let rich = Rich::new();
    let state = rich.state();
    let places = leaves(&state);
    let steps = prop::collection::vec((any::<prop::sample::Index>(), forgery()), 1..4);
    let mut runner =
        proptest::test_runner::TestRunner::new(ProptestConfig { cases: 2000, ..ProptestConfig::default() });
    let restored = std::cell::Cell::new(0_u32);
    let run = runner.run(&steps, |steps| {
        let mut forged = state.clone();
        for (place, forgery) in &steps {
            forge(&mut forged, &places[place.index(places.len())], forgery);
        }
        let Ok(mut next) = rich.restore(forged) else {
            return Ok(());
        };
        restored.set(restored.get() + 1);
        // A device that accepted a state must work with this state.
        (0..2).for_each(|vcpu| next.attach(vcpu));
        mark(&next, 1, 20);
        let commands: Vec<Command> = (1..12).map(|id| command(COMMAND_READ, id)).collect();
        next.vcpus.leave(0, vpmu::ExitReason::Io, &mut vpmu_testkit::At(1));
        next.vcpus.enter(0);
        let room = commands.len() * size_of::<Reply>();
        next.queues[2].request(zerocopy::IntoBytes::as_bytes(&commands[..]), room);
        next.vcpus.leave(0, vpmu::ExitReason::Io, &mut vpmu_testkit::At(1));
        next.vcpus.kick(0, 2);
        next.vcpus.enter(0);
        next.vpmu.drain();
        next.halt();
        next.save();
        next.vpmu.reset();
        for event in next.vpmu.persistent() {
            next.vpmu.end(event.id).expect("the event exists");
        }
        Ok(())
    });
    run.unwrap_or_else(|error| panic!("{error}"));
    assert!(restored.get() > 100, "only {} forged states were accepted", restored.get());
}
