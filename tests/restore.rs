//! A stock guest is saved while it runs, and goes on from there: itself, and as many copies as are restored.
#![expect(
    clippy::expect_used,
    reason = "output that cannot be read fails the test"
)]

use tests::host::SharedSession;

/// Lines of the guest, as its program numbers them.
const LINES: u32 = 300;

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
ACT=lines
# A machine that goes on after its snapshot, with a device that no driver uses.
boot live --no-vpmu --ctl /tmp/ctl > /tmp/live.said &
until_line live 40
snapshot live /tmp/here
wait
cat /tmp/live.said
rm -r /tmp/here

# One that ends with it, and two copies at once.
boot ended --no-vpmu --ctl /tmp/ctl > /tmp/ended.said &
until_line ended 40
snapshot ended /tmp/here --then-exit
wait
cat /tmp/ended.said
put ended.console /tmp/ended.console
restore one /tmp/here > /tmp/one.said &
restore two /tmp/here > /tmp/two.said &
wait
cat /tmp/one.said /tmp/two.said
true
"#;

static SESSION: SharedSession = SharedSession::new(SCRIPT);

/// Checks that a console has every line once, in order, its times never going back, and then the end.
fn whole(console: &[u8]) {
    let text = String::from_utf8_lossy(console).replace('\r', "");
    let said: Vec<&str> = text
        .lines()
        .filter_map(|line| line.strip_prefix("@guest "))
        .collect();
    let (last, lines) = said.split_last().expect("the guest says something");
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
    assert_eq!(numbers, (1..=LINES).collect::<Vec<_>>(), "{text}");
    assert!(lines.is_sorted_by_key(|(_, time)| *time), "{text}");
    assert_eq!(*last, "whole");
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
    let log = session.text("ended-snapshot");
    assert_eq!(session.exit("ended-snapshot"), 0, "{log}");
    assert_eq!(session.exit("ended"), 6, "{}", session.text("ended.log"));
    let before = session.file("ended.console");
    assert!(!before.windows(5).any(|bytes| bytes == b"whole"));
    for copy in ["one", "two"] {
        let log = session.text(&format!("{copy}.log"));
        assert_eq!(session.exit(copy), 0, "{log}");
        whole(&[before, session.file(&format!("{copy}.console"))].concat());
    }
}
