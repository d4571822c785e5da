//! Snapshots of a running stock guest. The guest continues after a save, and each restored copy also continues.

use images::Arch;
use serde_json::Value;
use tests::host::SharedSession;

/// Number of lines that the guest's program prints.
const LINES: u32 = 150;
/// Number of lines that the program prints in the machine that is saved [`CYCLES`] times.
const LINES_OF_CYCLES: u32 = 400;
const CYCLES: usize = 20;
/// Number of programs in the guest that perf or vperf measures. Each program places a mark at each line.
const PROGRAMS: usize = 4;

/// Functions of the scripts.
macro_rules! functions {
    () => {
        r#"
until_line() {
	tries=0
	while ! grep -q "@guest line $2 " "/tmp/$1.console" 2> /dev/null; do
		sleep 0.1
		tries=$((tries + 1))
		if [ $tries -gt 1000 ] || grep -q "@guest failed" "/tmp/$1.console" 2> /dev/null; then
			echo "$1 did not print line $2"
			cat "/tmp/$1.console" "/tmp/$1.log"
			exit 1
		fi
	done
}
snapshot() {
	name=$1
	shift
	limited vmm ctl --socket /tmp/ctl snapshot "$@" > "/tmp/$name-snapshot" 2>&1
	printf '\n@exit %s %s\n' "$name-snapshot" $?
	put "$name-snapshot" "/tmp/$name-snapshot"
}
restore() {
	name=$1
	shift
	limited vmm run --restore "$@" > "/tmp/$name.console" 2> "/tmp/$name.log" < /dev/null
	printf '\n@exit %s %s\n' "$name" $?
	put "$name.console" "/tmp/$name.console"
	put "$name.log" "/tmp/$name.log"
}
forge() {
	mkdir /tmp/forged
	ln /tmp/here/memory /tmp/forged/memory
	sed "$2" /tmp/here/state > /tmp/forged.state
	tail -n 1 /tmp/forged.state | tr -d '\n' > /tmp/forged.body
	digest=$(sha256sum < /tmp/forged.body | cut -d ' ' -f 1)
	head -n 1 /tmp/forged.state | sed "s/\"digest\":\"[0-9a-f]*\"/\"digest\":\"$digest\"/" > /tmp/forged/state
	cat /tmp/forged.body >> /tmp/forged/state
	restore "forged-$1" /tmp/forged
	rm -r /tmp/forged
}
"#
    };
}

const SCRIPT: &str = concat!(
    functions!(),
    r#"
# Tools measure programs while the machine is saved twice. The operator's event continues, too.
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
# A machine without the device. On aarch64 it has KVM's own PMU.
case $(uname -m) in
aarch64) pmu=--guest-pmu ;;
*) pmu= ;;
esac
boot live --no-vpmu $pmu --ctl /tmp/ctl > /tmp/live.said &
until_line live 40
snapshot live /tmp/here
wait
cat /tmp/live.said
# Restores changed copies of its state, each with the digest of its content. The first copy is not changed.
forge none ''
forge arch 's/"arch":"[a-z0-9_]*"/"arch":"riscv64"/'
case $(uname -m) in
x86_64)
	forge counter 's/"tsc_khz":[0-9]*/"tsc_khz":7/'
	forge register 's/"msrs":\[\[[0-9]*,/"msrs":[[2147418112,/'
	forge controllers 's/"irqchips":\[.*\],"clock"/"irqchips":[],"clock"/'
	;;
aarch64)
	forge counter 's/"hertz":[0-9]*/"hertz":7000/'
	forge processor 's/"processor":\[[0-9]*,/"processor":[99,/'
	forge register 's/"registers":\[\[[0-9]*,/"registers":[[6931039826524504063,/'
	forge size 's/"registers":\[\[[0-9]*,/"registers":[[6985083022052941594,/'
	forge registers "s/\"registers\":\[/&$(seq 600 | sed 's/.*/[1,0,0],/' | tr -d '\n')/"
	forge state 's/"mp":\[[0-9]*,/"mp":[77,/'
	forge controllers 's/"distributor":\[[0-9]*,/"distributor":[/'
	forge controller 's/"distributor":\[[0-9]*,/"distributor":[7,/'
	forge interfaces 's/"interfaces":\[\[\([0-9]*\),[0-9]*,/"interfaces":[[\1,1792,/'
	;;
esac
rm -r /tmp/here

# A machine whose device is in use. It continues after its first snapshot and ends with its second, which has
# only the pages written since the first. Three copies run at once, two of them from the second snapshot.
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
restore two /tmp/second --max-sample-rate 40000 > /tmp/two.said &
wait
cat /tmp/early.said /tmp/one.said /tmp/two.said
true
"#
);

const SCRIPT_OF_CYCLES: &str = concat!(
    functions!(),
    r#"
# A machine is saved and restored twenty times, while its events count, sample, trace and flush.
ACT=cycles
boot cycle0 --ctl /tmp/ctl > /tmp/cycle0.said &
for cycle in $(seq 0 19); do
	until_line cycle$cycle '[0-9]*'
	next=$((cycle + 1))
	snapshot cycle$cycle /tmp/cycle.$next --then-exit
	wait
	cat /tmp/cycle$cycle.said
	put cycle$next.state /tmp/cycle.$next/state
	rm -rf /tmp/cycle.$cycle
	restore cycle$next /tmp/cycle.$next --ctl /tmp/ctl > /tmp/cycle$next.said &
done
wait
cat /tmp/cycle20.said
rm -r /tmp/cycle.20
put cycle0.console /tmp/cycle0.console
true
"#
);

static SESSION: SharedSession = SharedSession::new(SCRIPT).with_perf().on_any();
static SESSION_OF_CYCLES: SharedSession = SharedSession::new(SCRIPT_OF_CYCLES).on_any();
tests::shared_boots!(|| SESSION.boot(), || SESSION_OF_CYCLES.boot());

/// Returns the number and the time of each line on a console.
fn lines(console: &[u8]) -> Vec<(u32, u64)> {
    let text = String::from_utf8_lossy(console).replace('\r', "");
    let said = text.lines().filter_map(|line| line.strip_prefix("@guest line "));
    said.map(|line| {
        let (number, time) = line.split_once(' ').expect("two numbers");
        let time = time.parse().expect("a time");
        (number.parse().expect("a number"), time)
    })
    .collect()
}

/// Checks that a console has every line from its first line to [`LINES`] exactly once and in order, that the times
/// never decrease, and that the guest's last message is `whole`. Returns the number of the first line.
fn rest(console: &[u8]) -> u32 {
    rest_of(LINES, console)
}

/// Like [`rest`], but with `last` as the last line.
fn rest_of(last: u32, console: &[u8]) -> u32 {
    let text = String::from_utf8_lossy(console).replace('\r', "");
    let said: Vec<&str> = text
        .lines()
        .filter_map(|line| line.strip_prefix("@guest "))
        .filter(|line| !line.starts_with("limit "))
        .collect();
    let (end, others) = said.split_last().expect("the guest prints lines");
    assert_eq!(*end, "whole", "{text}");
    let lines = lines(console);
    assert_eq!(lines.len(), others.len(), "{text}");
    let numbers: Vec<u32> = lines.iter().map(|(number, _)| *number).collect();
    let first = *numbers.first().expect("a line");
    assert_eq!(numbers, (first..=last).collect::<Vec<_>>(), "{text}");
    assert!(lines.is_sorted_by_key(|(_, time)| *time), "{text}");
    first
}

/// Checks that a console has every line, starting with the first.
fn whole(console: &[u8]) {
    assert_eq!(rest(console), 1);
}

#[apply(tests::host_test)]
fn saved_guest_prints_every_line_once() {
    let session = SESSION.get();
    let log = session.text("live-snapshot");
    assert_eq!(session.exit("live-snapshot"), 0, "{log}");
    assert_eq!(session.exit("live"), 0, "{}", session.text("live.log"));
    whole(session.file("live.text"));
}

#[apply(tests::host_test)]
fn each_restored_copy_prints_the_remaining_lines_once() {
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

/// VPMU-G-6.13-1, VPMU-D-6.13-10.
#[apply(tests::host_test)]
fn driver_of_each_copy_reports_the_limits_of_its_host() {
    let session = SESSION.get();
    for (copy, limit) in [("one", "100000"), ("two", "40000")] {
        let console = session.text(&format!("{copy}.console"));
        let mut lines = console.lines();
        let found = lines.find_map(|line| line.trim_end().strip_prefix("@guest limit "));
        assert_eq!(found, Some(limit), "{copy}: {console}");
    }
}

#[apply(tests::host_test)]
fn machine_that_is_saved_and_restored_twenty_times_loses_nothing() {
    let session = SESSION_OF_CYCLES.get();
    let mut consoles = Vec::new();
    for cycle in 0..=CYCLES {
        let name = format!("cycle{cycle}");
        let log = session.text(&format!("{name}.log"));
        let code = if cycle == CYCLES { 0 } else { 6 };
        assert_eq!(session.exit(&name), code, "{name}: {log}");
        consoles.push(session.file(&format!("{name}.console")));
    }
    assert_eq!(rest_of(LINES_OF_CYCLES, &consoles.concat()), 1);
}

#[apply(tests::host_test)]
fn diff_is_smaller_than_its_base() {
    let text = SESSION.get().text("sizes");
    let sizes = text.lines().map(|line| line.split('\t').next());
    let sizes: Vec<u64> = sizes.map(|size| size.and_then(|size| size.parse().ok()).expect("a size")).collect();
    println!("{text}");
    let [whole, diff] = sizes[..] else {
        panic!("two files, not {text}");
    };
    assert!(0 < diff && diff < whole / 2, "{text}");
}

#[apply(tests::host_test)]
fn events_go_on_in_each_copy() {
    let session = SESSION.get();
    let log = session.text("early.log");
    assert_eq!(session.exit("early"), 0, "{log}");
    println!("{log}");
    // This console starts with a later line, because the earlier lines are on the console of the saved machine.
    let first = rest(session.file("early.console"));
    assert!((20..60).contains(&first), "{first}");
}

#[apply(tests::host_test)]
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

/// The machine in a state file.
fn state(session: &SharedSession, file: &str) -> Value {
    let text = session.get().text(file);
    let line = text.lines().nth(1).expect("a second line");
    serde_json::from_str(line).expect("JSON")
}

/// Returns how far the second vCPU's TSC is ahead of the first vCPU's TSC.
fn tsc_distance(state: &Value) -> u64 {
    let [one, other] = [0, 1].map(|vcpu| {
        let offset = state["vcpus"][vcpu]["tsc_offset"].as_u64();
        offset.expect("the lab's KVM reports offsets")
    });
    other.wrapping_sub(one)
}

/// Returns by how many nanoseconds the first vCPU's TSC was ahead of KVM's clock at the save.
fn lead(state: &Value) -> i128 {
    let number = |value: &Value| value.as_u64().expect("a number");
    let bytes = state["vm"]["clock"].as_array().expect("bytes");
    let bytes = bytes.iter().take(8).rev();
    let clock = bytes.fold(0, |clock, byte| clock << 8 | i128::from(number(byte)));
    let vcpu = &state["vcpus"][0];
    let tsc = number(&state["vm"]["host_tsc"]).wrapping_add(number(&vcpu["tsc_offset"]));
    i128::from(tsc.cast_signed()) * 1_000_000 / i128::from(number(&vcpu["tsc_khz"])) - clock
}

/// Returns the guest's counter value in `state`, converted to nanoseconds.
fn counted(state: &Value) -> u64 {
    let of = |name: &str| state["vm"][name].as_u64().expect("a number");
    let nanoseconds = u128::from(of("counter")) * 1_000_000_000 / u128::from(of("hertz"));
    u64::try_from(nanoseconds).expect("not so long")
}

/// From one save to the next, the difference between a guest's TSC and KVM's clock changes by less than this number of
/// nanoseconds. KVM calculates its clock from the TSC, but occasionally sets it from the host kernel's clock. KVM and
/// the host kernel's clock round the TSC's frequency differently.
const DRIFT: i128 = 500;

#[apply(tests::host_test)]
fn counters_of_vcpus_go_on_together_over_a_restore() {
    let [before, after] = ["measured.state", "later.state"].map(|file| state(&SESSION, file));
    match SESSION.arch() {
        Arch::X86_64 => {
            assert_eq!(tsc_distance(&after), tsc_distance(&before));
            let saves = (1..=CYCLES).map(|cycle| format!("cycle{cycle}.state"));
            let leads = saves.map(|file| lead(&state(&SESSION_OF_CYCLES, &file)));
            let leads: Vec<i128> = leads.collect();
            let drifts = leads.windows(2).map(|pair| pair[1] - pair[0]);
            let drifts: Vec<i128> = drifts.collect();
            println!("ns that the TSC gains on KVM's clock from save to save: {drifts:?}");
            assert!(drifts.iter().all(|drift| drift.abs() < DRIFT), "{drifts:?}");
        }
        // On aarch64, all vCPUs read one counter. The times of the printed lines limit how far this counter may advance
        // from the first save to the second. It must advance at least by the time from the first to the last line
        // between the saves, and at most by the time from the last line before the first save to the first line after
        // the second save.
        Arch::Aarch64 => {
            let times = |machine: &str| {
                let lines = lines(SESSION.get().file(&format!("{machine}.console")));
                let times: Vec<u64> = lines.iter().map(|(_, time)| *time).collect();
                let ends = times.first().copied().zip(times.last().copied());
                ends.expect("lines")
            };
            let [(_, before_all), (first, last), (after_all, _)] = ["measured", "later", "last"].map(times);
            let counted = counted(&after) - counted(&before);
            println!("{counted} ns between saves, {first} to {last} ns in lines");
            assert!(last - first <= counted && counted <= after_all - before_all);
        }
    }
}

/// Names of forged states. Beside each name are words that the restore's error message must contain.
fn forged(arch: Arch) -> &'static [(&'static str, &'static str)] {
    match arch {
        Arch::X86_64 => &[
            ("arch", "is a snapshot of a riscv64 machine, but this host is x86_64"),
            ("counter", "runs at 7 kHz"),
            ("register", "model-specific register 0x7fff0000"),
            ("controllers", "set of interrupt controllers"),
        ],
        Arch::Aarch64 => &[
            ("arch", "is a snapshot of a riscv64 machine, but this host is aarch64"),
            ("counter", "runs at 7000 Hz"),
            ("processor", "a different kind of processor"),
            ("register", "register 0x603000000013ffff"),
            ("size", "register 0x60f000000013df1a"),
            ("registers", "saved set of registers is not valid"),
            ("state", "cannot restore the run state"),
            ("controllers", "saved set of distributor registers is not valid"),
            ("controller", "distributor's register 0x8"),
            ("interfaces", "saved set of CPU interface registers is not valid"),
        ],
    }
}

#[apply(tests::host_test)]
fn forged_state_starts_nothing() {
    let session = SESSION.get();
    // The VMM restores an unchanged state with a new digest.
    let log = session.text("forged-none.log");
    assert_eq!(session.exit("forged-none"), 0, "{log}");
    rest(session.file("forged-none.console"));
    for (name, words) in forged(SESSION.arch()) {
        let name = format!("forged-{name}");
        let log = session.text(&format!("{name}.log"));
        assert_eq!(session.exit(&name), 1, "{name}: {log}");
        assert!(log.contains(words), "{name}: no {words:?} in: {log}");
        assert_eq!(log.lines().count(), 1, "{name}: {log}");
        assert!(session.file(&format!("{name}.console")).is_empty());
    }
}

#[apply(tests::host_test)]
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
