//! Tests how many commands the driver sends to the device when events are closed, according to the VMM's report. Also
//! tests whether siblings lose counts when their leader is closed.

use serde_json::Value;
use tests::host::{Session, SharedSession};

/// Boots guests in which a task closes `$events` counting events, while another task uses the control queue.
///
/// Then boots a guest in which a task closes leaders. The device executes requests of the control queue on the VMM's
/// main thread. The script gives this thread the lowest priority. So the device closes a leader only after the guest
/// has placed its next mark, unless the driver waits for the close.
const SCRIPT: &str = r#"
for events in 0 64 128 512; do
	ACT=close-$events; boot close-$events
done
ACT=leaders
boot leaders &
until vmm=$(machine) || [ -e /tmp/leaders.json ]; do sleep 0.01; done
renice -n 19 -p $vmm
wait
"#;
static SESSION: SharedSession = SharedSession::new(SCRIPT);
tests::shared_boots!(|| SESSION.boot());

/// Number of events in each group that the guest opens.
const GROUP: u64 = 64;

/// Returns the number of commands on the vCPU queues, and the guest's lines about the task.
fn closing(session: &Session, events: u64) -> (u64, Vec<String>) {
    let name = format!("close-{events}");
    let report: Value = serde_json::from_slice(session.file(&format!("{name}.json"))).unwrap();
    let commands = report["vpmu"]["commands"].as_u64();
    let commands = commands.unwrap_or_else(|| panic!("no commands in {report}"));
    (commands, session.said(&name))
}

/// If a task slept while it closed one of its events, the kernel would schedule all its other events out and in. So a
/// task must not sleep while it closes events, and each event must take the same number of commands.
#[apply(tests::host_test)]
fn closing_of_many_events_costs_the_same_for_each() {
    let session = SESSION.get();
    let (none, _) = closing(session, 0);
    for groups in [1, 2, 8] {
        let events = groups * GROUP;
        let (commands, said) = closing(session, events);
        // One command starts an event, and one command stops it. perf core also stops and starts the groups that count
        // when it enables another.
        let restarts = GROUP * groups * (groups - 1) / 2;
        let each = 2 * (events + restarts);
        assert_eq!(
            (commands.wrapping_sub(none), said.as_slice()),
            (each, ["slept 0".to_owned()].as_slice()),
            "commands for {events} events that are opened, enabled and closed, and how often the task slept"
        );
    }
}

/// On the device, an enabled sibling does not count while its leader is off. Therefore, the call that closes a leader
/// must not return before the device has closed the leader.
#[apply(tests::host_test)]
fn sibling_counts_from_the_close_of_its_leader() {
    let session = SESSION.get();
    assert_eq!(session.exit("leaders"), 0, "{}", session.text("leaders.text"));
    assert_eq!(session.said("leaders"), [""; 0]);
}
