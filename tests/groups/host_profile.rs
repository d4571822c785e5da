//! Checks that perf on the host and vpmu in the guest get correct results at the same time. perf measures the threads
//! of the machine while the guest counts and samples.

use tests::host::SharedSession;

const SCRIPT: &str = r#"
rounds() {
	grep -c '@guest round' /tmp/profiled.console 2> /dev/null
}
# Waits until the guest has ended $1 more rounds.
until_more() {
	wanted=$(($(rounds) + $1))
	tries=0
	while [ "$(rounds)" -lt $wanted ]; do
		sleep 0.1
		tries=$((tries + 1))
		if [ $tries -gt 2000 ] || grep -q '@guest failed' /tmp/profiled.console; then
			echo "no more rounds"
			cat /tmp/profiled.console /tmp/profiled.log
			exit 1
		fi
	done
}
# Of the rounds that end during the profile, all but the first also began during it.
profile() {
	rm -f /tmp/control /tmp/acknowledged
	mkfifo /tmp/control /tmp/acknowledged
	perf "$@" --delay=-1 --control=fifo:/tmp/control,/tmp/acknowledged 2> /tmp/said &
	perf=$!
	echo enable > /tmp/control
	read -r answer < /tmp/acknowledged
	until_more 3
	echo disable > /tmp/control
	read -r answer < /tmp/acknowledged
	kill -INT $perf
	wait $perf
	cat /tmp/said
}
ACT=profiled
boot profiled > /tmp/profiled.said &
until_more 1
vmm=$(machine)
threads=
for thread in /proc/$vmm/task/*; do
	case $(cat $thread/comm) in
		vcpu*) threads=$threads,${thread##*/} ;;
	esac
done
threads=${threads#,}
echo "vCPUs: $threads of $vmm"
# Both events are in the order of their times. KVM reports an exit's write after the exit.
profile record -o /tmp/exits.data -m 16M -e kvm:kvm_exit -e kvm:kvm_mmio -c 1 -p $vmm
perf script -i /tmp/exits.data -F event,trace > /tmp/exits.all
# The address of the doorbell, at which each round ends with a mark of the value 1000.
bell=$(sed -n 's/.*mmio write len 4 gpa 0x\([0-9a-f]*\) val 0x3e8$/\1/p' /tmp/exits.all | head -n 1)
echo "doorbell at $bell"
sed -n "/kvm_exit.*$bell/ s/.*/exit/p; s/.*mmio write len 4 gpa 0x$bell val /mark /p" /tmp/exits.all > /tmp/exits
put exits /tmp/exits
marks="-e kvm:kvm_mmio --filter gpa==0x$bell&&val==3 -e kvm:kvm_mmio --filter gpa==0x$bell&&val==1000"
profile stat -x, -o /tmp/stat -e 'task-clock,context-switches,{kvm:kvm_exit,kvm:kvm_entry}' $marks -t $threads
put stat /tmp/stat
profile stat -x, -o /tmp/whole -e task-clock,kvm:kvm_exit $marks -p $vmm
put whole /tmp/whole
profile record -o /tmp/clock.data -e cpu-clock -c 1000000 -t $threads
perf script -i /tmp/clock.data -F comm,event > /tmp/clock
put clock /tmp/clock
kill -TERM $vmm
wait
cat /tmp/profiled.said
"#;

static SESSION: SharedSession = SharedSession::new(SCRIPT).with_perf();
tests::shared_boots!(|| SESSION.boot());

/// Number of marks that the guest places per round, before the mark that ends the round. Each mark causes an exit.
const MARKS: u64 = 500 + 200;

/// Returns the counts of an event in the output of `perf stat -x,`.
fn counts(file: &str, event: &str) -> Vec<u64> {
    let text = SESSION.get().text(file);
    let lines = text.lines().filter(|line| line.contains(event));
    let counts = lines.map(|line| {
        assert!(line.contains(",100.00,"), "not all the time: {line}");
        let value = line.split(',').next().unwrap_or_default();
        // The count of a clock has a fraction.
        let whole = value.split('.').next().unwrap_or_default();
        whole.parse().unwrap_or_else(|e| panic!("{e}: {line}"))
    });
    counts.collect()
}

fn count(file: &str, event: &str) -> u64 {
    let counts = counts(file, event);
    assert_eq!(counts.len(), 1, "lines of {event} in:\n{}", SESSION.get().text(file));
    counts[0]
}

/// Checks that `perf stat` has counted the marks of each round that began and ended during its run.
fn assert_marks_of_whole_rounds(file: &str) {
    let counts = counts(file, "kvm:kvm_mmio");
    let [marks, ends] = counts[..] else {
        panic!("two counts, not {counts:?}");
    };
    assert!(ends >= 2, "{ends} rounds ended");
    // The first round began before the run, and the run ended during the last.
    let (least, most) = (MARKS * (ends - 1), MARKS * (ends + 1));
    assert!((least..=most).contains(&marks), "{marks} marks, {ends} rounds ended");
}

#[apply(tests::host_test)]
fn guests_counts_and_samples_are_exact_while_its_host_profiles_it() {
    let said = SESSION.get().said("profiled");
    // The guest prints one round before the host's first run, and three rounds for each of the host's four runs.
    assert!(said.len() >= 13, "{said:?}");
    for (at, line) in said.iter().enumerate() {
        assert_eq!(*line, format!("round {}: 500 200", at + 1), "{said:?}");
    }
}

#[apply(tests::host_test)]
fn hosts_stat_of_vcpu_threads_counts_while_the_guest_does() {
    assert!(count("stat", "task-clock") > 0);
    assert_marks_of_whole_rounds("stat");
    let exits = count("stat", "kvm:kvm_exit");
    // Each vCPU thread is either in the guest or outside it, so for each of the two vCPUs, the numbers of exits and
    // entries differ by at most one.
    let entries = count("stat", "kvm:kvm_entry");
    assert!(exits.abs_diff(entries) <= 2, "{exits} exits, {entries} entries");
}

#[apply(tests::host_test)]
fn hosts_stat_of_the_whole_machine_counts_while_the_guest_does() {
    assert!(count("whole", "task-clock") > 0);
    assert_marks_of_whole_rounds("whole");
    // Each mark causes an exit.
    let marks: u64 = counts("whole", "kvm:kvm_mmio").iter().sum();
    let exits = count("whole", "kvm:kvm_exit");
    assert!(exits >= marks, "{exits} exits for {marks} marks");
}

#[apply(tests::host_test)]
fn hosts_record_of_vcpu_threads_has_samples_while_the_guest_counts() {
    let samples = SESSION.get().text("clock");
    assert!(samples.lines().count() > 0, "no samples");
    let other = samples.lines().find(|line| !line.contains("vcpu"));
    assert_eq!(other, None, "a sample of another thread");
}

#[apply(tests::host_test)]
fn hosts_record_of_exits_has_each_of_the_guests_marks() {
    let text = SESSION.get().text("exits");
    // The recording may begin between an exit and its write, and may end there.
    let lines: Vec<&str> = text.lines().skip_while(|line| *line != "exit").collect();
    let marks: Vec<&str> = lines
        .chunks_exact(2)
        .map(|pair| match pair {
            ["exit", mark] => {
                mark.strip_prefix("mark ").unwrap_or_else(|| panic!("an exit without its write: {pair:?}"))
            }
            _ => panic!("a write without its exit: {pair:?}"),
        })
        .collect();
    let rounds: Vec<&[&str]> = marks.split(|mark| *mark == "0x3e8").collect();
    // The first round began before the recording, and the recording ended during the last.
    let [_, whole @ .., _] = rounds.as_slice() else {
        panic!("no round ended: {marks:?}");
    };
    assert!(!whole.is_empty(), "one round ended: {marks:?}");
    for marks in whole {
        assert!(marks.iter().all(|mark| *mark == "0x3"), "{marks:?}");
        assert_eq!(marks.len() as u64, MARKS, "marks of a round");
    }
}
