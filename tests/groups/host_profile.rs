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
# Of two rounds that end during the profile, at least one also began during it.
profile() {
	rm -f /tmp/control /tmp/acknowledged
	mkfifo /tmp/control /tmp/acknowledged
	perf "$@" --delay=-1 --control=fifo:/tmp/control,/tmp/acknowledged 2> /tmp/said &
	perf=$!
	echo enable > /tmp/control
	read -r answer < /tmp/acknowledged
	until_more 2
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
profile stat -x, -o /tmp/stat -e 'task-clock,context-switches,{kvm:kvm_exit,kvm:kvm_entry}' -t $threads
put stat /tmp/stat
profile stat -x, -o /tmp/whole -e task-clock,kvm:kvm_exit -p $vmm
put whole /tmp/whole
profile record -o /tmp/clock.data -e cpu-clock -c 1000000 -t $threads
perf script -i /tmp/clock.data -F comm,event > /tmp/clock
put clock /tmp/clock
profile record -o /tmp/exits.data -e kvm:kvm_exit -c 1 -p $vmm
perf script -i /tmp/exits.data -F comm,event > /tmp/exits
put exits /tmp/exits
kill -TERM $vmm
wait
cat /tmp/profiled.said
"#;

static SESSION: SharedSession = SharedSession::new(SCRIPT).with_perf();
tests::shared_boots!(|| SESSION.boot());

/// Number of marks that the guest places per round. Each mark causes an exit.
const MARKS: f64 = 500.0;

/// Returns the count of an event in the output of `perf stat -x,`.
fn count(file: &str, event: &str) -> f64 {
    let text = SESSION.get().text(file);
    let line = text.lines().find(|line| line.contains(event));
    let line = line.unwrap_or_else(|| panic!("no {event} in:\n{text}"));
    assert!(line.contains(",100.00,"), "not all the time: {line}");
    let value = line.split(',').next().unwrap_or_default();
    value.parse().unwrap_or_else(|e| panic!("{e}: {line}"))
}

#[apply(tests::host_test)]
fn guests_counts_and_samples_are_exact_while_its_host_profiles_it() {
    let said = SESSION.get().said("profiled");
    // The guest prints one round before the host's first run, and two rounds for each of the host's four runs.
    assert!(said.len() >= 9, "{said:?}");
    for (at, line) in said.iter().enumerate() {
        assert_eq!(*line, format!("round {}: 500 200", at + 1), "{said:?}");
    }
}

#[apply(tests::host_test)]
fn hosts_stat_of_vcpu_threads_counts_while_the_guest_does() {
    assert!(count("stat", "task-clock") > 0.0);
    let exits = count("stat", "kvm:kvm_exit");
    assert!(exits >= MARKS, "{exits} exits");
    // Each vCPU thread is either in the guest or outside it, so for each of the two vCPUs, the numbers of exits and
    // entries differ by at most one.
    let entries = count("stat", "kvm:kvm_entry");
    assert!((exits - entries).abs() <= 2.0, "{exits} exits, {entries} entries");
}

#[apply(tests::host_test)]
fn hosts_stat_of_the_whole_machine_counts_while_the_guest_does() {
    assert!(count("whole", "task-clock") > 0.0);
    let exits = count("whole", "kvm:kvm_exit");
    assert!(exits >= MARKS, "{exits} exits");
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
    let samples = SESSION.get().text("exits");
    let exits = samples.lines().filter(|line| line.contains("kvm:kvm_exit"));
    let exits = exits.count();
    assert!(exits >= 500, "{exits} exits");
}
