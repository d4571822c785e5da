//! Finds reports of faults in a kernel's log. Every kernel checks for some faults. A kernel that is built with a checker
//! also reports others. The driver reports its losses as errors.

/// Words with which the kernel begins or continues a report of a fault.
const FAULTS: [&str; 22] = [
    "WARNING:",
    "BUG",
    "Oops",
    "refcount",
    "general protection",
    "Redzone",
    "Poison",
    "Object already free",
    "SLUB: ",
    "ODEBUG:",
    "UBSAN:",
    "KASAN:",
    "INFO: possible",
    "INFO: trying to register",
    "INFO: task",
    // Reports of CPUs and tasks that make no progress. A guest that continues afterwards has still lost that time.
    "rcu: INFO:",
    "self-detected stall",
    "hard LOCKUP",
    "blocked for more than",
    "suspicious RCU usage",
    "bad unlock balance",
    "turning off the locking correctness validator",
];
/// How a message of the driver begins, after its time.
const DRIVER: &str = "] virtio_pmu";
/// The kernel's level of messages about errors. More severe messages have lower levels.
const ERROR: u8 = 3;
/// Maximum number of lines of a report that are shown.
const LINES: usize = 40;

/// The level of a line that `dmesg -r` prints, which begins with the facility and the level: `<3>`.
fn level(line: &str) -> Option<u8> {
    let (number, _) = line.strip_prefix('<')?.split_once('>')?;
    Some(number.parse::<u8>().ok()? & 7)
}

/// Whether the line is an error that the driver reports. The driver logs its losses as errors: pages that it leaks,
/// events that it gives up, a device that does not answer.
fn is_drivers_error(line: &str) -> bool {
    line.contains(DRIVER) && level(line).is_some_and(|level| level <= ERROR)
}

/// Returns up to `LINES` lines of the log, starting with the first report of a fault. Reports that contain a word of
/// `expected` are not faults. Reports that contain a word of `more` are.
#[must_use]
pub fn fault<'a>(log: &'a str, more: &[&str], expected: &[&str]) -> Option<Vec<&'a str>> {
    // Harmless lines: boot messages of the allocator and of KASAN, and reports of faults in programs.
    let harmless = ["SLUB: HWalign", "KernelAddressSanitizer initialized", "traps: "];
    let names_fault = |line: &&str| {
        let has = |word: &&str| line.contains(*word);
        let is_fault = FAULTS.iter().chain(more).any(has) || is_drivers_error(line);
        is_fault && !harmless.iter().chain(expected).any(has)
    };
    let lines: Vec<&str> = log.lines().collect();
    let first = lines.iter().position(names_fault)?;
    Some(lines[first..lines.len().min(first + LINES)].to_vec())
}

#[cfg(test)]
mod tests {
    use super::fault;

    const LOST: &str = "<3>[    7.1] virtio_pmu virtio0: the device keeps the ring of event 5 (-5): 3 pages are lost";

    #[test]
    fn error_of_the_driver_is_a_fault_unless_it_is_expected() {
        assert_eq!(fault(LOST, &[], &[]), Some(vec![LOST]));
        assert_eq!(fault(LOST, &[], &["pages are lost"]), None);
        assert_eq!(fault(&LOST.replace("<3>", "<4>"), &[], &[]), None);
        assert_eq!(fault("<3>[    7.1] virtio_blk virtio1: a disk's error", &[], &[]), None);
    }

    #[test]
    fn report_starts_at_the_first_fault() {
        let log = format!("<6>[    1.0] starts\n{LOST}\n<6>[    8.0] goes on");
        let report = fault(&log, &[], &[]);
        assert_eq!(report.map(|lines| lines.len()), Some(2));
        assert_eq!(
            fault("<4>[    2.0] watchdog: BUG: soft lockup - CPU#1 stuck", &[], &[]).map(|it| it.len()),
            Some(1)
        );
    }
}
