//! Guests that share their host's counters: with each other, with the host's perf, and with a process that keeps some
//! of the counters for itself.

use images::Arch;
use tests::host::SharedSession;

const SCRIPT: &str = r#"
until_said() {
	tries=0
	until grep -q "@guest $2" "/tmp/$1.console" 2> /dev/null; do
		sleep 0.1
		tries=$((tries + 1))
		if [ $tries -gt 3000 ]; then
			echo "$1 did not print: $2"
			cat "/tmp/$1.console" "/tmp/$1.log"
			exit 1
		fi
	done
}
end() {
	kill -TERM $(pidof vmm)
	wait
	cat /tmp/*.said
	rm /tmp/*.said
}
ACT=counts
VCPUS=1

# Has the host's perf count what guests execute on the VMM's threads. This slows the lab down.
VMM="guest-tests count-guests /tmp/alone.host /bin/vmm"
# Without --engine, the VMM would first run a small guest to find out which engine works.
boot alone --engine exit --persistent instructions:u,size=0,name=all --ctl /tmp/alone.sock > /tmp/alone.said &
until_said alone waiting
sleep 1
/bin/vmm ctl --socket /tmp/alone.sock --json list > /tmp/alone.list
end
put alone.list /tmp/alone.list
put alone.host /tmp/alone.host
unset VMM

# The processor's own number of the event that counts instructions.
case $(uname -m) in
x86_64) instructions=0xc0 ;;
aarch64) instructions=0x8 ;;
esac
boot costly --count-mode vcpu --raw-events $instructions > /tmp/costly.said &
until_said costly waiting
end

boot one > /tmp/one.said &
boot two > /tmp/two.said &
until_said one waiting
until_said two waiting
end

guest-tests hold-counters 4 > /tmp/held &
holder=$!
until grep -q held /tmp/held; do
	sleep 0.1
done
boot contended > /tmp/contended.said &
until_said contended waiting
kill $holder
end

# On aarch64, the PMU of a restored machine stands still.
[ $(uname -m) = x86_64 ] || exit 0
# A machine with KVM's own PMU is saved while the PMU counts, and restored.
ACT=steps
boot saved --guest-pmu --ctl /tmp/saved.sock > /tmp/saved.said &
until_said saved "step 3"
limited vmm ctl --socket /tmp/saved.sock snapshot /tmp/snapshot --then-exit
wait
cat /tmp/saved.said
rm /tmp/saved.said
limited vmm run --restore /tmp/snapshot > /tmp/restored.console 2> /tmp/restored.log < /dev/null &
until_said restored "step 9"
end
put restored.text /tmp/restored.console
"#;

static X86_64: SharedSession = SharedSession::new(SCRIPT).in_exact_lab(Arch::X86_64);
static AARCH64: SharedSession = SharedSession::new(SCRIPT).in_exact_lab(Arch::Aarch64);
on_both! {
    boots: [boot],
    [
        guests_count_is_the_hosts_count_of_the_vcpus_thread,
        guests_on_one_host_count_their_own_instructions,
        counter_that_the_host_keeps_shows_in_the_time_running,
        hosts_work_for_the_guest_counts_in_vcpu_mode_alone,
        raw_event_counts_where_the_operator_allows_it,
    ]
}

/// Returns the value that the guest reported for `what` in boot `boot`.
fn said(session: &SharedSession, boot: &str, what: &str) -> String {
    let said = session.get().said(boot);
    let line = said.iter().find_map(|line| line.strip_prefix(what));
    let line = line.unwrap_or_else(|| panic!("nothing of {what}: {said:?}"));
    line.trim().to_owned()
}

fn number(session: &SharedSession, boot: &str, what: &str) -> u64 {
    let said = said(session, boot, what);
    said.parse().unwrap_or_else(|e| panic!("{e}: {what} {said}"))
}

/// Checks that the guest of boot `boot` counted every instruction of its loop exactly.
fn ensure_exact(session: &SharedSession, boot: &str) {
    assert_eq!(said(session, boot, "loops"), "exact", "{boot}");
}

fn guests_count_is_the_hosts_count_of_the_vcpus_thread(session: &SharedSession) {
    let list = session.get().text("alone.list");
    let list: serde_json::Value = serde_json::from_str(&list).expect("JSON");
    let ours = list["events"][0]["count"].as_u64().expect("a count");
    let host: u64 = session.get().text("alone.host").trim().parse().expect("a count");
    assert!(ours > 1_000_000, "{ours} instructions of a whole boot");
    assert_eq!(ours, host, "the whole guest's instructions: vPMU, host");
    ensure_exact(session, "alone");
}

fn guests_on_one_host_count_their_own_instructions(session: &SharedSession) {
    ensure_exact(session, "one");
    ensure_exact(session, "two");
}

fn counter_that_the_host_keeps_shows_in_the_time_running(session: &SharedSession) {
    assert_eq!(said(session, "alone", "without-a-counter"), "0 of 4");
    let contended = said(session, "contended", "without-a-counter");
    let waiting = contended.split(' ').next().unwrap_or_default();
    let waiting: u32 = waiting.parse().expect("a number");
    assert!(waiting > 0, "{contended}");
    ensure_exact(session, "contended");
}

/// Minimum number of instructions that KVM and the VMM execute for an exit that reaches the VMM.
const LEAST_OF_AN_EXIT: u64 = 500;

fn hosts_work_for_the_guest_counts_in_vcpu_mode_alone(session: &SharedSession) {
    // A loop of three instructions, with 1,000 exits.
    let (guest, vcpu) = (number(session, "alone", "writes"), number(session, "costly", "writes"));
    assert!(guest >= 2_000, "{guest} instructions");
    assert!(guest < 1_000 * LEAST_OF_AN_EXIT, "{guest} instructions: the count includes the host's");
    assert!(
        vcpu > guest + 1_000 * LEAST_OF_AN_EXIT,
        "{vcpu} instructions including the host's, {guest} excluding the host's"
    );
    ensure_exact(session, "costly");
}

fn raw_event_counts_where_the_operator_allows_it(session: &SharedSession) {
    assert_eq!(said(session, "alone", "raw"), "refused");
    let raw = number(session, "costly", "raw");
    assert!((20_000..20_064).contains(&raw), "{raw} instructions");
}

#[apply(tests::host_test)]
fn kvms_own_pmu_counts_on_in_a_restored_machine() {
    let steps = |boot: &str| -> Vec<(u64, u64)> {
        let said = X86_64.get().said(boot);
        let steps = said.iter().filter_map(|line| line.strip_prefix("step ")?.split_once(' '));
        // The restored machine's console begins in the middle of a line.
        steps.filter_map(|(step, count)| Some((step.parse().ok()?, count.trim().parse().ok()?))).collect()
    };
    let (saved, restored) = (steps("saved"), steps("restored"));
    let all = || saved.iter().chain(&restored);
    assert!(saved.len() >= 3 && restored.len() >= 3, "{saved:?}, then {restored:?}");
    let step = 20_000_000..20_001_000;
    assert!(all().all(|(_, count)| step.contains(count)), "{saved:?}, then {restored:?}");
}
