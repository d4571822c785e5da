//! Checks whether the counts of hardware events obey the rules for counters, both with the vPMU and with KVM's own PMU
//! on the same host. Each rule is a row of a table. Also checks the host's view of these counts.
//!
//! On a host without counters, these tests run in the exact labs of both architectures. There, QEMU emulates counters
//! that are exact to the instruction: AMD's on x86-64, PMUv3's on aarch64. The VMM, KVM and the host's perf core are
//! real. Only the counters are emulated.

/// Declares each of these functions as a test of both architectures, in a module for each. Its argument is the static
/// of its architecture in this module, `X86_64` or `AARCH64`. The methods of this static that follow `boots` begin the
/// boots.
macro_rules! on_both {
    (boots: $boots:tt, $tests:tt) => {
        on_both! { x86_64, X86_64, $boots, $tests }
        on_both! { aarch64, AARCH64, $boots, $tests }
    };
    ($module:ident, $of:ident, [$($boot:ident),+], [$($test:ident),+ $(,)?]) => {
        mod $module {
            tests::shared_boots!($(|| { super::$of.$boot(); }),+);
            $(
                tests::host_test! {
                    fn $test() {
                        super::$test(&super::$of);
                    }
                }
            )+
        }
    };
}

/// The host's view of its guests' counts.
mod shared_host;
/// Plain `perf stat` and `perf record`.
mod stock_perf;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::Write as _;
use std::sync::OnceLock;

use guest_tests::rows::{self, Finding};
use images::{Arch, Boot, KvmHostChoice, Sources};
use tests::boots;
use vpmu_client::error::chain;

/// The results of one boot.
#[derive(Debug)]
struct Table {
    kvm_host: String,
    rows: BTreeMap<String, Finding>,
    output: String,
}

/// Boots a guest that checks the PMU of its processors. The arguments are passed to `vmm run`.
fn table(arch: Arch, more: &[&str]) -> Result<Table, String> {
    // A sample takes so long on an emulated processor that the default limit on sampling time would throttle the
    // events.
    let vmm_args = ["--max-sampling-percent", "100"].iter().chain(more);
    let boot = Boot {
        command: "guest-tests conformance".into(),
        programs: vec!["guest-tests".into()],
        vcpus: 1,
        vmm_args: vmm_args.map(|&argument| argument.into()).collect(),
        kvm_host: KvmHostChoice::Exact,
        timeout: boots::LIMIT,
        sources: Sources { arch, ..Sources::default() },
        ..Boot::default()
    };
    let outcome = boot.run().map_err(|error| chain(&error))?;
    let rows =
        outcome.output.lines().filter_map(rows::parse).map(|(row, _, finding)| (row.to_owned(), finding)).collect();
    Ok(Table { kvm_host: outcome.kvm_host.to_string(), rows, output: outcome.output })
}

/// The tables of an architecture.
#[derive(Debug)]
struct Lab {
    arch: Arch,
    /// The rows whose event the PMU of the lab lacks.
    absent: &'static [&'static str],
    ours: OnceLock<Result<Table, String>>,
    kvms: OnceLock<Result<Table, String>>,
}

static X86_64: Lab = Lab::new(Arch::X86_64, &[]);
static AARCH64: Lab = Lab::new(Arch::Aarch64, &["loop_counts_its_branches"]);

impl Lab {
    const fn new(arch: Arch, absent: &'static [&'static str]) -> Self {
        Self { arch, absent, ours: OnceLock::new(), kvms: OnceLock::new() }
    }

    fn boot_ours(&self) -> &Result<Table, String> {
        self.ours.get_or_init(|| table(self.arch, &[]))
    }

    fn boot_kvms(&self) -> &Result<Table, String> {
        self.kvms.get_or_init(|| table(self.arch, &["--guest-pmu"]))
    }

    fn ours(&self) -> &Table {
        booted(self.boot_ours())
    }

    fn kvms(&self) -> &Table {
        booted(self.boot_kvms())
    }

    fn check(&self, row: &str) {
        let table = self.ours();
        match table.rows.get(row) {
            None => panic!("the guest did not report {row}:\n{}", table.output),
            Some(Finding::Fails(reason)) => panic!("on {}: {reason}", table.kvm_host),
            Some(Finding::Absent(reason)) => {
                assert!(self.absent.contains(&row), "on {}, the rule cannot be checked: {reason}", table.kvm_host);
            }
            Some(Finding::Holds(_)) => assert!(!self.absent.contains(&row), "the lab's PMU has an event for it"),
        }
    }
}

fn booted(table: &Result<Table, String>) -> &Table {
    match table {
        Ok(table) => table,
        Err(error) => panic!("no guest: {error}"),
    }
}

/// One test for each row. The text beside a row names the tests in kvm-unit-tests and the kernel's KVM selftests that
/// check the same rule on an architectural PMU's registers. The text is empty if there are no such tests.
macro_rules! rows {
    ($($row:ident: $like:literal),+ $(,)?) => {
        const ROWS: &[(&str, &str)] = &[$((stringify!($row), $like)),+];

        $(
            fn $row(lab: &Lab) {
                lab.check(stringify!($row));
            }
        )+

        on_both! {
            boots: [boot_ours, boot_kvms],
            [$($row,)+ both_pmus_are_judged_by_the_same_rows, table_shows_vpmu_beside_kvms_own_pmu]
        }
    };
}

rows! {
    user_loop_counts_its_instructions: "x86 check_gp_counters, arm pmu-basic-event-count",
    kernel_code_counts_its_instructions: "x86 check_gp_counters, arm pmu-basic-event-count",
    loop_counts_its_branches: "x86 check_gp_counters",
    cycles_fit_the_instructions: "arm check_cpi",
    trapped_instruction_counts_at_most_once: "x86 check_emulated_instr",
    count_goes_on_past_32_bits: "arm pmu-chained-counters",
    disabled_event_stands_still: "arm pmu-event-counter-config",
    reset_while_counting_starts_from_zero: "x86 check_running_counter_wrmsr",
    mode_that_is_left_out_counts_nothing: "",
    count_in_the_page_is_the_count_read: "x86 check_rdpmc",
    as_many_events_as_counters_run_all_the_time: "x86 check_counters_many",
    one_event_more_than_counters_takes_turns: "",
    more_events_than_counters_scale_to_the_count: "",
    members_of_a_group_count_at_once: "x86 check_counters_many",
    each_period_of_instructions_is_a_sample: "x86 check_counter_overflow, arm pmu-overflow-interrupt",
    each_period_of_cycles_is_a_sample: "x86 check_counter_overflow, arm pmu-overflow-interrupt",
    samples_spread_over_the_loop_as_it_runs: "",
    period_changed_while_counting_holds_from_then_on: "x86 check_running_counter_wrmsr",
    frequency_settles_at_the_rate_asked_for: "",
    each_period_of_instructions_signals: "",
    each_period_of_a_siblings_instructions_signals: "",
    limit_of_one_period_hangs_up_each_time: "",
    each_period_of_instructions_wakes_a_poll: "",
    region_counts_its_instructions: "",
    generic_event_counts_or_is_enoent: "arm pmu-event-introspection, selftests pmu_counters_test",
    generic_events_that_open_are_listed: "arm pmu-event-introspection",
    reserved_bit_is_refused: "selftests vpmu_counter_access",
}

fn both_pmus_are_judged_by_the_same_rows(lab: &Lab) {
    let mut expected: Vec<&str> = ROWS.iter().map(|(row, _)| *row).collect();
    expected.sort_unstable();
    for table in [lab.ours(), lab.kvms()] {
        let judged: Vec<&str> = table.rows.keys().map(String::as_str).collect();
        assert_eq!(judged, expected, "on {}:\n{}", table.kvm_host, table.output);
    }
}

fn table_shows_vpmu_beside_kvms_own_pmu(lab: &Lab) {
    let (ours, kvms) = (lab.ours(), lab.kvms());
    let mut text = format!("\nOn {}:\n", ours.kvm_host);
    for (row, like) in ROWS {
        let cell = |table: &Table| table.rows.get(*row).map(ToString::to_string);
        let (ours, kvms) = (cell(ours), cell(kvms));
        assert!(ours.is_some() && kvms.is_some(), "{row}");
        let (ours, kvms) = (ours.unwrap_or_default(), kvms.unwrap_or_default());
        let like = if like.is_empty() { String::new() } else { format!(" (like {like})") };
        let _ = writeln!(text, "{row}{like}\n    vpmu  {ours}\n    KVM   {kvms}");
    }
    // The test runner captures the output of print macros, but not a direct write.
    let _ = std::io::stderr().write_all(text.as_bytes());
}
