//! A stock guest is saved while it runs, and goes on from there: itself, and as many copies as are restored.
#![expect(
    clippy::expect_used,
    reason = "output that cannot be read fails the test"
)]

use tests::host::SharedSession;

/// Lines of the guest, as its program numbers them.
const LINES: u32 = 150;
/// Programs that place a mark at each line while a tool measures them.
const PROGRAMS: usize = 4;

const SCRIPT: &str = r#"
until_line() {
	tries=0
	while ! grep -q "@guest line $2 " "/tmp/$1.console" 2> /dev/null; do
		sleep 0.1
		tries=$((tries + 1))
		if [ $tries -gt 1000 ] || grep -q "@guest failed" "/tmp/$1.console" 2> /dev/null; then
			echo "$1 did not say line $2"
			cat "/tmp/$1.console" "/tmp/$1.log"
			exit 1
		fi
	done
}
snapshot() {
	name=$1
	shift
	vmm ctl --socket /tmp/ctl snapshot "$@" > "/tmp/$name-snapshot" 2>&1
	printf '\n@exit %s %s\n' "$name-snapshot" $?
	put "$name-snapshot" "/tmp/$name-snapshot"
}
restore() {
	name=$1
	shift
	vmm run --restore "$@" > "/tmp/$name.console" 2> "/tmp/$name.log" < /dev/null
	printf '\n@exit %s %s\n' "$name" $?
	put "$name.console" "/tmp/$name.console"
	put "$name.log" "/tmp/$name.log"
}
# Tools measure programs while the machine is saved twice. Its host's own event goes on, too.
ACT=tools
boot measured --ctl /tmp/ctl --persistent marks,name=flight > /tmp/measured.said &
until_line measured 40
snapshot measured /tmp/measured.1 --then-exit
wait
cat /tmp/measured.said
put measured.console /tmp/measured.console
restore later /tmp/measured.1 --ctl /tmp/ctl > /tmp/later.said &
until_line later 80
snapshot later /tmp/measured.2 --then-exit
wait
cat /tmp/later.said
put measured.state /tmp/measured.1/state
put later.state /tmp/measured.2/state
rm -r /tmp/measured.1
restore last /tmp/measured.2 --recording /tmp/last.data
rm -r /tmp/measured.2
perf script -i /tmp/last.data -F cpu,time,event,addr > /tmp/last.marks
put last.marks /tmp/last.marks
ACT=lines
# A machine without a device.
boot live --no-vpmu --ctl /tmp/ctl > /tmp/live.said &
until_line live 40
snapshot live /tmp/here
wait
cat /tmp/live.said
rm -r /tmp/here

# One whose device is in use: it goes on after its first snapshot and ends with its second, which has only what
# was written since the first. Two copies at once.
ACT=events
boot used --ctl /tmp/ctl --track-dirty > /tmp/used.said &
until_line used 20
snapshot used /tmp/first
until_line used 60
snapshot ended /tmp/second --diff /tmp/first --then-exit
wait
cat /tmp/used.said
put used.console /tmp/used.console
du -k /tmp/first/memory /tmp/second/memory > /tmp/sizes
put sizes /tmp/sizes
restore early /tmp/first > /tmp/early.said &
restore one /tmp/second > /tmp/one.said &
restore two /tmp/second > /tmp/two.said &
wait
cat /tmp/early.said /tmp/one.said /tmp/two.said
true
"#;

static SESSION: SharedSession = SharedSession::with_perf(SCRIPT);

/// Checks that a console has every line up to the last once, in order, its times never going back, and then
/// the end; the first line that it has.
fn rest(console: &[u8]) -> u32 {
    let text = String::from_utf8_lossy(console).replace('\r', "");
    let said: Vec<&str> = text
        .lines()
        .filter_map(|line| line.strip_prefix("@guest "))
        .collect();
    let (last, lines) = said.split_last().expect("the guest says something");
    assert_eq!(*last, "whole", "{text}");
    let lines: Vec<(u32, u64)> = lines
        .iter()
        .map(|line| {
            let mut words = line.split(' ');
            let word = (words.next(), words.next(), words.next(), words.next());
            let (Some("line"), Some(number), Some(time), None) = word else {
                panic!("no line: {line:?} in {text}");
            };
            (
                number.parse().expect("a number"),
                time.parse().expect("a time"),
            )
        })
        .collect();
    let numbers: Vec<u32> = lines.iter().map(|(number, _)| *number).collect();
    let first = *numbers.first().expect("a line");
    assert_eq!(numbers, (first..=LINES).collect::<Vec<_>>(), "{text}");
    assert!(lines.is_sorted_by_key(|(_, time)| *time), "{text}");
    first
}

/// The same of a console that has them all.
fn whole(console: &[u8]) {
    assert_eq!(rest(console), 1);
}

#[test]
fn guest_that_is_saved_says_every_line_once() {
    let session = SESSION.get();
    let log = session.text("live-snapshot");
    assert_eq!(session.exit("live-snapshot"), 0, "{log}");
    assert_eq!(session.exit("live"), 0, "{}", session.text("live.log"));
    whole(session.file("live.text"));
}

#[test]
fn each_copy_says_the_rest_of_the_lines_once() {
    let session = SESSION.get();
    for snapshot in ["used", "ended"] {
        let log = session.text(&format!("{snapshot}-snapshot"));
        assert_eq!(session.exit(&format!("{snapshot}-snapshot")), 0, "{log}");
    }
    println!("{}", session.text("ended-snapshot"));
    assert_eq!(session.exit("used"), 6, "{}", session.text("used.log"));
    let before = session.file("used.console");
    assert!(!before.windows(5).any(|bytes| bytes == b"whole"));
    for copy in ["one", "two"] {
        let log = session.text(&format!("{copy}.log"));
        assert_eq!(session.exit(copy), 0, "{log}");
        println!("{log}");
        whole(&[before, session.file(&format!("{copy}.console"))].concat());
    }
}

#[test]
fn diff_is_smaller_than_its_base() {
    let text = SESSION.get().text("sizes");
    let sizes = text.lines().map(|line| line.split('\t').next());
    let sizes: Vec<u64> = sizes
        .map(|size| size.and_then(|size| size.parse().ok()).expect("a size"))
        .collect();
    println!("{text}");
    let [whole, diff] = sizes[..] else {
        panic!("two files, not {text}");
    };
    assert!(0 < diff && diff < whole / 2, "{text}");
}

#[test]
fn events_go_on_in_each_copy() {
    let session = SESSION.get();
    let log = session.text("early.log");
    assert_eq!(session.exit("early"), 0, "{log}");
    println!("{log}");
    // Those before are the machine's that went on.
    let first = rest(session.file("early.console"));
    assert!((20..60).contains(&first), "{first}");
}

#[test]
fn tools_measure_on_over_two_saves() {
    let session = SESSION.get();
    let mut consoles = Vec::new();
    for (machine, code) in [("measured", 6), ("later", 6), ("last", 0)] {
        let log = session.text(&format!("{machine}.log"));
        assert_eq!(session.exit(machine), code, "{log}");
        consoles.push(session.file(&format!("{machine}.console")));
    }
    whole(&consoles.concat());
}

/// How far the TSC of the second vCPU is ahead of that of the first, in a state file.
fn tsc_distance(file: &str) -> u64 {
    let text = SESSION.get().text(file);
    let line = text.lines().nth(1).expect("a second line");
    let state: serde_json::Value = serde_json::from_str(line).expect("JSON");
    let [one, other] = [0, 1].map(|vcpu| {
        let offset = state["vcpus"][vcpu]["tsc_offset"].as_u64();
        offset.expect("the lab's KVM reports offsets")
    });
    other.wrapping_sub(one)
}

#[test]
fn tscs_of_vcpus_keep_their_distance_over_a_restore() {
    assert_eq!(tsc_distance("later.state"), tsc_distance("measured.state"));
}

#[test]
fn operators_recording_after_two_saves_has_every_mark_once() {
    let text = SESSION.get().text("last.marks");
    let mut times = [Vec::new(), Vec::new()];
    for line in text.lines() {
        let words: Vec<&str> = line.split_ascii_whitespace().collect();
        let ["[000]" | "[001]", time, _, "3"] = words.as_slice() else {
            panic!("no mark of the programs: {line:?}");
        };
        let time: f64 = time.trim_end_matches(':').parse().expect("seconds");
        times[usize::from(words[0] == "[001]")].push(time);
    }
    let [one, other] = &times;
    assert_eq!(one.len() + other.len(), PROGRAMS * LINES as usize, "{text}");
    for times in &times {
        assert!(times.is_sorted(), "{times:?}");
    }
}
