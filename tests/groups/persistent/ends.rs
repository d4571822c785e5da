//! Recordings of a guest that has ended, for each way in which a guest can end. Stock perf and an independent reader
//! must find every mark in them, in order.

use std::io::Cursor;

use linux_perf_data::linux_perf_event_reader::EventRecord;
use linux_perf_data::{AttributeDescription, PerfFileReader, PerfFileRecord};
use tests::host::SharedSession;

/// Number of marks that the guest's program places in one boot.
pub(crate) const MARKS: u64 = 1_000;
/// Number of marks that the guest's own event counts in one boot.
const OWN: usize = 50;

const SCRIPT: &str = r#"
flight="--persistent marks,name=flight,size=256K"
ACT=panic; boot panic $flight
ACT=reboot; RESET=t; boot triple $flight
ACT=reboot; RESET=k; boot reset $flight
ACT=twice; RESET=k; boot twice $flight --on-reset restart

# The operator controls this machine through its socket, and ends it with a signal.
until_said() {
	tries=0
	while ! grep -q "@guest $1" /tmp/wait.console 2> /dev/null; do
		sleep 0.1
		tries=$((tries + 1))
		if [ $tries -gt 1000 ] || grep -q "@guest failed" /tmp/wait.console 2> /dev/null; then
			echo "the guest did not print: $1"
			cat /tmp/wait.console /tmp/wait.log
			exit 1
		fi
	done
}
by_hand() {
	printf '\n@exit %s ' "ctl-$1"
	name=$1
	shift
	vmm ctl --socket /tmp/ctl "$@" > "/tmp/ctl-$name" 2>&1
	echo $?
	put "ctl-$name" "/tmp/ctl-$name"
}
ACT=wait
boot wait $flight --ctl /tmp/ctl > /tmp/wait.said &
until_said ready
stat -c %a /tmp/ctl > /tmp/mode
put mode /tmp/mode
by_hand list list --json
by_hand table list
by_hand dump dump /tmp/by-hand.data
[ ! -e /tmp/by-hand.data ] || put by-hand.data /tmp/by-hand.data
by_hand flush flush
until_said woken
by_hand start start marks,cpu=1,name=late,size=64K
until_said "late came"
by_hand end end flight-1
until_said "flight-1 went"
by_hand unknown end nobody
by_hand twice start marks,cpu=0,name=late
by_hand spec start no-such-event
by_hand list-2 list --json
# The VMM of the machine that waits is the only one left.
kill -TERM $(pidof vmm)
wait
cat /tmp/wait.said

# Stock perf, on the host.
for data in panic triple reset twice by-hand wait; do
	[ -e "/tmp/$data.data" ] || continue
	perf script -i "/tmp/$data.data" -F tid,cpu,time,event,addr > "/tmp/$data.script" 2> "/tmp/$data.complaint"
	printf '\n@exit %s %s\n' "script-$data" $?
	put "$data.script" "/tmp/$data.script"
	put "$data.complaint" "/tmp/$data.complaint"
done
perf report -i /tmp/panic.data --stdio > /tmp/panic.report 2>&1
printf '\n@exit report %s\n' $?
put panic.report /tmp/panic.report

# Files for the programs that crate::exports runs on the machine of the tests.
perf record -q -e cpu-clock -F 499 -g -o /tmp/tree.data -- workload tree --rounds 200 > /dev/null 2>&1
perf script -i /tmp/tree.data -F event,ip,sym > /tmp/tree.script 2> /dev/null
put tree.data /tmp/tree.data
put tree.script /tmp/tree.script
export_pprof() {
	data=$1
	shift
	vmm export "/tmp/$data.data" --to pprof -o "/tmp/$data.pprof" "$@" 2> "/tmp/$data.notes"
	printf '\n@exit %s %s\n' "export-$data.pprof" $?
	put "$data.pprof.notes" "/tmp/$data.notes"
	[ ! -e "/tmp/$data.pprof" ] || put "$data.pprof" "/tmp/$data.pprof"
}
export_pprof panic --event flight
export_pprof tree --symfs /
true
"#;

pub(crate) static SESSION: SharedSession = SharedSession::new(SCRIPT).with_perf();
tests::shared_boots!(|| SESSION.boot());

/// A sample of a recording.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Marked {
    event: String,
    value: u64,
    time: u64,
    cpu: u32,
}

/// Returns the samples in a perf.data file. An independent crate reads the file.
fn recorded(data: &[u8]) -> Vec<Marked> {
    let PerfFileReader { mut perf_file, mut record_iter } =
        PerfFileReader::parse_file(Cursor::new(data)).expect("a perf.data");
    let names: Vec<String> = perf_file
        .event_attributes()
        .iter()
        .map(|attr| AttributeDescription::name(attr).unwrap_or("").to_owned())
        .collect();
    let mut samples = Vec::new();
    while let Some(record) = record_iter.next_record(&mut perf_file).expect("a record") {
        let PerfFileRecord::EventRecord { attr_index, record } = record else {
            continue;
        };
        match record.parse().expect("a record that can be parsed") {
            EventRecord::Sample(sample) => samples.push(Marked {
                event: names[attr_index].clone(),
                value: sample.addr.expect("a mark's value"),
                time: sample.timestamp.expect("a time"),
                cpu: sample.cpu.expect("a vCPU"),
            }),
            EventRecord::Lost(lost) => panic!("{lost:?}"),
            _ => {}
        }
    }
    samples
}

/// Returns the values in the samples of the operator's events, in the order of the recording.
fn flight(data: &[u8]) -> Vec<u64> {
    let samples = recorded(data);
    assert!(samples.is_sorted_by_key(|sample| sample.time), "the recording goes back in time");
    samples
        .iter()
        .filter(|sample| sample.event.starts_with("flight"))
        .inspect(|sample| assert_eq!(sample.event, format!("flight-{}", sample.cpu)))
        .map(|sample| sample.value)
        .collect()
}

/// Like [`flight`], but from the output of stock perf.
fn scripted(text: &str) -> Vec<u64> {
    text.lines()
        .filter(|line| line.contains("flight-"))
        .map(|line| {
            let value = line.split_whitespace().last().unwrap_or("");
            u64::from_str_radix(value, 16).unwrap_or_else(|e| panic!("{e}: {line:?}"))
        })
        .collect()
}

/// Checks how a machine ended, and checks its recording both with stock perf and with the independent crate.
fn whole(name: &str, status: i32) {
    let session = SESSION.get();
    let said = session.said(name);
    assert!(!said.iter().any(|line| line.starts_with("failed")), "{said:?}");
    let log = session.text(&format!("{name}.log"));
    assert_eq!(session.exit(name), status, "the VMM's exit code; its log: {log}");
    let expected: Vec<u64> = (1..=MARKS).collect();
    assert_eq!(flight(session.file(&format!("{name}.data"))), expected);
    let complaint = session.text(&format!("{name}.complaint"));
    assert_eq!(session.exit(&format!("script-{name}")), 0, "{complaint}");
    assert_eq!(scripted(&session.text(&format!("{name}.script"))), expected);
}

#[apply(tests::host_test)]
fn recording_after_panic_has_every_mark() {
    whole("panic", 5);
    let report = SESSION.get().text("panic.report");
    assert_eq!(SESSION.get().exit("report"), 0, "{report}");
    for event in ["flight-0", "flight-1"] {
        assert!(report.contains(event), "perf report does not list {event}: {report}");
    }
}

#[apply(tests::host_test)]
fn recording_after_triple_fault_has_every_mark() {
    whole("triple", 4);
}

#[apply(tests::host_test)]
fn recording_after_reset_has_every_mark() {
    whole("reset", 3);
}

/// After the reboot, the guest's event has the same ID and still holds its records, and the operator's events keep
/// counting. The recording is written at power-off and contains the marks of both boots.
#[apply(tests::host_test)]
fn rebooted_guest_finds_persistent_events() {
    let session = SESSION.get();
    let said = session.said("twice");
    let log = session.text("twice.log");
    assert_eq!(session.exit("twice"), 0, "{said:?}: {log}");
    let [own, found, last] = said.as_slice() else {
        panic!("the guest printed {said:?}");
    };
    let id = own.strip_prefix("own ").expect("an event of the first boot");
    assert_eq!(found.strip_prefix("found "), Some(id), "the id in the second boot");
    assert_eq!(last, "whole");
    let marks: Vec<u64> = flight(session.file("twice.data")).into_iter().filter(|&value| value <= 2 * MARKS).collect();
    assert_eq!(marks, (1..=2 * MARKS).collect::<Vec<_>>(), "marks of both boots");
    let report = session.text("twice.json");
    let report: serde_json::Value = serde_json::from_str(&report).expect("a report");
    assert_eq!(report["boots"], 2, "{report:#}");
}

#[apply(tests::host_test)]
fn recording_after_signal_lacks_only_the_ended_event() {
    let session = SESSION.get();
    let said = session.said("wait");
    assert_eq!(
        said,
        ["ready", "woken", "late came", "flight-1 is over", "flight-1 went"],
        "{}",
        session.text("wait.log")
    );
    assert_eq!(session.exit("wait"), 6);
    let data = recorded(session.file("wait.data"));
    // A request ended event flight-1, so the recording lacks this event and its half of the marks. The recording still
    // has flight-0's half.
    let half: Vec<u64> = (1..=MARKS).filter(|value| (value - 1) / 100 % 2 == 0).collect();
    let reported: Vec<u64> = data
        .iter()
        .filter(|sample| sample.event == "flight-0" && sample.value <= MARKS)
        .map(|sample| sample.value)
        .collect();
    assert_eq!(reported, half);
    assert!(data.iter().all(|sample| sample.event != "flight-1"));
    let own = data.iter().filter(|sample| sample.event == "own").count();
    assert_eq!(own, OWN, "samples of the guest's own event");
    // Stock perf finds the same.
    let complaint = session.text("wait.complaint");
    assert_eq!(session.exit("script-wait"), 0, "{complaint}");
    let mut reported = scripted(&session.text("wait.script"));
    reported.retain(|&value| value <= MARKS);
    assert_eq!(reported, half);
}

#[apply(tests::host_test)]
fn dump_on_demand_has_every_mark_so_far() {
    let session = SESSION.get();
    let said = session.text("ctl-dump");
    assert_eq!(session.exit("ctl-dump"), 0, "{said}");
    let data = session.file("by-hand.data");
    let marks: Vec<u64> = flight(data).into_iter().filter(|&v| v <= MARKS).collect();
    assert_eq!(marks, (1..=MARKS).collect::<Vec<_>>());
    // The guest's own event is recorded, too.
    let own = recorded(data).into_iter().filter(|s| s.event == "own").count();
    assert_eq!(own, OWN);
    assert_eq!(session.exit("script-by-hand"), 0, "{}", session.text("by-hand.complaint"));
}

/// VPMU-G-6.10-1.
#[apply(tests::host_test)]
fn event_ended_by_host_is_over_for_its_readers() {
    let said = SESSION.get().said("wait");
    assert!(said.contains(&"flight-1 is over".to_owned()), "{said:?}");
}

#[apply(tests::host_test)]
fn control_socket_lists_starts_flushes_and_ends() {
    let session = SESSION.get();
    assert_eq!(session.text("mode").trim(), "600", "the mode of the socket");
    for done in ["list", "table", "flush", "start", "end", "list-2"] {
        let said = session.text(&format!("ctl-{done}"));
        assert_eq!(session.exit(&format!("ctl-{done}")), 0, "{done}: {said}");
    }
    for refused in ["unknown", "twice", "spec"] {
        let said = session.text(&format!("ctl-{refused}"));
        assert_eq!(session.exit(&format!("ctl-{refused}")), 1, "{refused}: {said}");
        assert_eq!(said.trim_end().lines().count(), 1, "one line, not {said}");
    }
    let table = session.text("ctl-table");
    for name in ["flight-0", "flight-1", "own"] {
        assert!(table.contains(name), "{name} is not in:\n{table}");
    }
    let names = |list: &str| -> Vec<String> {
        let list: serde_json::Value = serde_json::from_str(&session.text(list)).expect("a list in JSON");
        let events = list.as_array().or_else(|| list["events"].as_array());
        let mut names: Vec<String> = events
            .expect("an array of events")
            .iter()
            .map(|event| event["name"].as_str().expect("a name").to_owned())
            .collect();
        names.sort_unstable();
        names
    };
    assert_eq!(names("ctl-list"), ["flight-0", "flight-1", "own"]);
    assert_eq!(names("ctl-list-2"), ["flight-0", "late", "own"]);
}
