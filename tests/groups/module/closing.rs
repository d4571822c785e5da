//! The number of commands that the driver sends to the device when a task closes its events, from the VMM's report.

use images::foreign::Files;
use serde_json::Value;
use tests::host::Session;

/// Boots guests in which a task closes `$events` counting events, while another task uses the control queue.
const SCRIPT: &str = r#"
for events in 0 64 128 512; do
	ACT=close-$events; boot close-$events
done
"#;

/// Returns the number of commands on the vCPU queues, and the guest's lines about the task.
fn closing(session: &Session, events: u64) -> Result<(u64, Vec<String>), String> {
    let name = format!("close-{events}");
    let report: Value =
        serde_json::from_slice(session.file(&format!("{name}.json"))).map_err(|e| e.to_string())?;
    let commands = report["vpmu"]["commands"].as_u64();
    let commands = commands.ok_or_else(|| format!("no commands in {report}"))?;
    Ok((commands, session.said(&name)))
}

/// If a task slept while it closed one of its events, all its other events would be switched out and in. So a task must
/// not sleep while it closes events, and each event must cost the same number of commands.
#[test]
fn closing_of_many_events_costs_the_same_for_each() -> Result<(), String> {
    let session = Session::run(SCRIPT, Files::new())?;
    let (none, _) = closing(&session, 0)?;
    for events in [64, 128, 512] {
        let (commands, said) = closing(&session, events)?;
        // One command starts an event, one stops it.
        let each = 2 * events;
        assert_eq!(
            (commands.wrapping_sub(none), said.as_slice()),
            (each, ["slept 0".to_owned()].as_slice()),
            "commands for {events} events that are opened, enabled and closed, and how often the task slept"
        );
    }
    Ok(())
}
