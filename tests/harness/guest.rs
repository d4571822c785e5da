//! Groups of guest tests. The tests of a group share one boot of a stock guest. For each guest test, a host test
//! reports the verdict.

use std::collections::BTreeMap;
use std::env;
use std::io::{Write, stderr};
use std::sync::OnceLock;
use std::time::Duration;

use guest_tests::wire::{self, Verdict};
use images::kernel::DEFAULT_SERIES;
use images::third_party::{self, Files, ThirdPartyError};
use images::{Arch, Boot, Debug, Error as BootError, KvmHostChoice, Sources};
use vpmu_errors::chain;

use crate::{boots, slowest};

#[doc(hidden)]
pub use guest_tests::wire::KERNEL_LOG;

/// The environment variable that selects the kernel of all guests: a series, like `6.12`, or a series with a checker
/// (lockdep or KASAN), like `6.1-kasan`.
const KERNEL: &str = "VPMU_TEST_KERNEL";
/// The environment variable that names an architecture, like `aarch64`. If it is set, groups run in that architecture's
/// lab instead of their own architecture's lab. A group stays in its own architecture's lab if it tests features that
/// only this architecture has.
const ARCH: &str = "VPMU_TEST_ARCH";
/// The time limit of a boot with a checker, which makes the guest many times slower.
const LIMIT_WITH_CHECKER: Duration = Duration::from_secs(3600);
/// Additional guest memory in MiB that a checker needs, for example for KASAN's shadow memory and for the metadata of
/// each object.
const MEMORY_OF_CHECKER_MIB: u32 = 768;
const MIB: usize = 1 << 20;

/// The results of a boot.
#[derive(Debug)]
struct Booted {
    kernel: String,
    kvm_host: String,
    verdicts: BTreeMap<String, (u64, Verdict)>,
    output: String,
}

/// The verdicts in a guest's output.
fn verdicts(output: &str) -> BTreeMap<String, (u64, Verdict)> {
    let verdicts = output.lines().filter_map(wire::parse);
    verdicts.map(|(test, millis, verdict)| (test.to_owned(), (millis, verdict))).collect()
}

/// Returns the verdicts of a guest that failed during a test, or `None` if it failed before its first test. The test
/// during which the guest failed has failed for the same reason. The tests after it have no verdict.
fn verdicts_until(error: &BootError) -> Option<BTreeMap<String, (u64, Verdict)>> {
    let output = error.output();
    let begun = output.lines().filter_map(wire::parse_begins).next_back()?;
    let mut verdicts = verdicts(output);
    let reason = chain(error);
    let during = format!("the machine failed during this test: {reason}");
    let log = format!("the machine failed, so its log was not read: {reason}");
    for (test, reason) in [(begun, during), (KERNEL_LOG, log)] {
        let verdict = (0, Verdict::Failed(reason));
        verdicts.entry(test.to_owned()).or_insert(verdict);
    }
    Some(verdicts)
}

/// A group, identified by its name in the guest's program.
#[derive(Debug)]
pub struct Group {
    name: &'static str,
    files: fn(Arch) -> Result<Files, ThirdPartyError>,
    /// Whether the guest gets its own kernel's image as a file.
    with_kernel: bool,
    vmm: Option<&'static str>,
    vmm_args: &'static [&'static str],
    append: &'static str,
    kvm_host: KvmHostChoice,
    /// The number of vCPUs, if not the usual number.
    vcpus: Option<u32>,
    arch: Arch,
    /// Whether the group tests features that only `arch` has.
    bound: bool,
    booted: OnceLock<Result<Booted, String>>,
}

impl Group {
    /// Returns a group with default settings. The first test that needs the group's guest boots it.
    #[must_use]
    pub const fn new(name: &'static str) -> Self {
        Self::with(name, |_| Ok(Files::new()))
    }

    /// Like [`Group::new`], but starts the machine with these arguments for `vmm run` instead of the usual arguments.
    #[must_use]
    pub const fn started(name: &'static str, vmm_args: &'static [&'static str]) -> Self {
        let mut group = Self::new(name);
        group.vmm_args = vmm_args;
        group
    }

    /// Like [`Group::new`], but adds words to the guest kernel's command line.
    #[must_use]
    pub const fn appending(name: &'static str, append: &'static str) -> Self {
        let mut group = Self::new(name);
        group.append = append;
        group
    }

    /// Like [`Group::new`], but always in the lab of x86. Use this for tests that trace exits by the processor's own
    /// exit numbers. The VMM reads these numbers from the host's tracepoints, and the lab's host permits this.
    #[must_use]
    pub const fn in_lab(name: &'static str) -> Self {
        let mut group = Self::new(name);
        group.kvm_host = KvmHostChoice::Lab;
        group.on_x86_64()
    }

    /// Like [`Group::with`], but runs the guest with one vCPU on the exact lab of x86. The program that the argument
    /// `vmm` names runs the guest, instead of the project's VMM.
    #[must_use]
    pub const fn run_by(
        vmm: &'static str,
        vmm_args: &'static [&'static str],
        name: &'static str,
        files: fn(Arch) -> Result<Files, ThirdPartyError>,
    ) -> Self {
        let mut group = Self::with(name, files);
        group.vmm = Some(vmm);
        group.vmm_args = vmm_args;
        group.kvm_host = KvmHostChoice::Exact;
        group.on_x86_64()
    }

    /// Restricts the group to x86-64, because the group tests features that only x86 has.
    #[must_use]
    pub const fn on_x86_64(mut self) -> Self {
        self.arch = Arch::X86_64;
        self.bound = true;
        self
    }

    /// Adds the image of the guest's kernel as `/boot/kernel`.
    #[must_use]
    pub const fn with_its_kernel(mut self) -> Self {
        self.with_kernel = true;
        self
    }

    /// Like [`Group::new`], but adds files to the guest.
    #[must_use]
    pub const fn with(name: &'static str, files: fn(Arch) -> Result<Files, ThirdPartyError>) -> Self {
        Self {
            name,
            files,
            with_kernel: false,
            vmm: None,
            vmm_args: UNTHROTTLED,
            append: "",
            kvm_host: KvmHostChoice::Auto,
            vcpus: None,
            arch: Arch::X86_64,
            bound: false,
            booted: OnceLock::new(),
        }
    }

    /// Runs the group on one vCPU of the exact lab of aarch64.
    #[must_use]
    pub const fn on_aarch64(mut self) -> Self {
        self.arch = Arch::Aarch64;
        self.kvm_host = KvmHostChoice::Exact;
        self
    }

    /// Runs the group on one vCPU of the exact lab of its architecture.
    #[must_use]
    pub const fn in_exact_lab(mut self) -> Self {
        self.kvm_host = KvmHostChoice::Exact;
        self
    }

    /// Gives the machine this number of vCPUs.
    #[must_use]
    pub const fn with_vcpus(mut self, vcpus: u32) -> Self {
        self.vcpus = Some(vcpus);
        self
    }

    /// Starts the machine with these arguments for `vmm run` instead of the usual arguments.
    #[must_use]
    pub const fn with_arguments(mut self, vmm_args: &'static [&'static str]) -> Self {
        self.vmm_args = vmm_args;
        self
    }

    /// Passes if the guest's test named `test` passed.
    ///
    /// # Panics
    /// If the test failed or was not run, or if no guest booted.
    pub fn check(&self, test: &str) {
        let booted = self.booted();
        let (kernel, kvm_host) = (&booted.kernel, &booted.kvm_host);
        let (millis, verdict) = booted
            .verdicts
            .get(test)
            .unwrap_or_else(|| panic!("the guest with {kernel} did not run {test}:\n{}", booted.output));
        say(&format!("{}::{test}: a guest with {kernel} on {kvm_host}, {millis} ms", self.name));
        if let Verdict::Failed(reason) = verdict {
            panic!("in the guest with {kernel}, on {kvm_host}: {reason}");
        }
    }

    /// Passes if the guest ran exactly these tests.
    ///
    /// # Panics
    /// If the lists differ, for example because a test was added on only one side, or if no guest booted.
    pub fn check_names(&self, expected: &[&str]) {
        let mut expected: Vec<&str> = expected.to_vec();
        expected.push(KERNEL_LOG);
        expected.sort_unstable();
        let verdicts = &self.booted().verdicts;
        let ran: Vec<&str> = verdicts.keys().map(String::as_str).collect();
        assert_eq!(ran, expected, "the guest's tests and the host's list differ");
    }

    /// Boots the guest, unless it has already booted. Returns when the guest has run.
    #[doc(hidden)]
    pub fn boot(&self) {
        let _ = self.result();
    }

    fn booted(&self) -> &Booted {
        boots::begin();
        match self.result() {
            Ok(booted) => booted,
            Err(error) => panic!("no guest: {error}"),
        }
    }

    fn result(&self) -> &Result<Booted, String> {
        self.booted.get_or_init(|| {
            let booted = run(self)?;
            for (test, (millis, _)) in &booted.verdicts {
                slowest::note_test(self.name, test, Duration::from_millis(*millis));
            }
            Ok(booted)
        })
    }
}

/// A sample takes so long on an emulated processor that the default limit on sampling time would throttle ordinary
/// clocks. Tests of this limit set their own limit.
const UNTHROTTLED: &[&str] = &["--max-sampling-percent", "100"];

/// The name of the guests' kernel.
fn kernel() -> String {
    env::var(KERNEL).unwrap_or_else(|_| DEFAULT_SERIES.to_owned())
}

/// Returns the series and the checker in a kernel's name.
fn named(kernel: &str) -> Result<(String, Option<Debug>), String> {
    let Some((series, checker)) = kernel.split_once('-') else {
        return Ok((kernel.to_owned(), None));
    };
    let known = [Debug::Lockdep, Debug::Kasan];
    let debug = known.into_iter().find(|debug| debug.name() == checker);
    debug
        .map(|debug| (series.to_owned(), Some(debug)))
        .ok_or_else(|| format!("{KERNEL}={kernel}: expected a series, like 6.12 or 6.1-kasan"))
}

/// Returns the kernel series for the host and the guests of a session. If [`KERNEL`] names a checker, drops it, because
/// only the guests of groups run with a checker.
pub(crate) fn series() -> Result<String, String> {
    named(&kernel()).map(|(series, _)| series)
}

/// Returns the architecture that `wanted` names. Returns `own` if `wanted` is `None`, or if the group is `bound` to its
/// own architecture.
fn arch(wanted: Option<&str>, own: Arch, bound: bool) -> Result<Arch, String> {
    let known = [("x86_64", Arch::X86_64), ("aarch64", Arch::Aarch64)];
    let Some(wanted) = wanted else {
        return Ok(own);
    };
    let found = known.into_iter().find(|(name, _)| *name == wanted);
    found
        .map(|(_, arch)| if bound { own } else { arch })
        .ok_or_else(|| format!("{ARCH}={wanted}: expected x86_64 or aarch64"))
}

/// Returns the architecture that the environment selects, or `own` if it selects none.
pub(crate) fn asked_arch(own: Arch) -> Result<Arch, String> {
    arch(env::var(ARCH).ok().as_deref(), own, false)
}

fn run(group: &Group) -> Result<Booted, String> {
    let kernel = kernel();
    let (series, debug) = named(&kernel)?;
    let arch = arch(env::var(ARCH).ok().as_deref(), group.arch, group.bound)?;
    let sources = Sources { arch, version: Some(series), debug, ..Sources::default() };
    let mut files = (group.files)(arch).map_err(|error| chain(&error))?;
    if group.with_kernel {
        files.extend(third_party::kernel(&sources).map_err(|error| chain(&error))?);
    }
    let size: usize = files.iter().map(|(_, contents)| contents.len()).sum();
    // The guest's memory holds the packed files and the root file system. The root file system may use at most half of
    // the memory that the packed files leave free.
    let more = u32::try_from(size * 3 / MIB).map_err(|error| error.to_string())?;
    let usual = Boot::default();
    let boot = Boot {
        command: format!("guest-tests run {}", group.name),
        programs: vec!["guest-tests".into()],
        memory_mib: usual.memory_mib.saturating_add(more).saturating_add(debug.map_or(0, |_| MEMORY_OF_CHECKER_MIB)),
        files,
        vmm: group.vmm.map_or(usual.vmm, str::to_owned),
        vcpus: match (group.vcpus, group.kvm_host) {
            (Some(vcpus), _) => vcpus,
            (None, KvmHostChoice::Exact) => 1,
            (None, _) => usual.vcpus,
        },
        vmm_args: group.vmm_args.iter().map(|&arg| arg.into()).collect(),
        append: group.append.into(),
        kvm_host: group.kvm_host,
        timeout: debug.map_or(boots::LIMIT, |_| LIMIT_WITH_CHECKER),
        sources,
        ..usual
    };
    match boot.run() {
        Ok(outcome) => Ok(Booted {
            kernel,
            kvm_host: outcome.kvm_host.to_string(),
            verdicts: verdicts(&outcome.output),
            output: outcome.output,
        }),
        Err(error) => Ok(Booted {
            kernel,
            kvm_host: "a machine that failed".to_owned(),
            verdicts: verdicts_until(&error).ok_or_else(|| chain(&error))?,
            output: format!("{}\n{}", error.output(), chain(&error)),
        }),
    }
}

/// Prints a line even if the test passes, because the test runner captures only the output of print macros.
pub(crate) fn say(line: &str) {
    // A closed stderr must not fail the test.
    let _ = writeln!(stderr(), "{line}");
}

/// Defines a host test for each test of a guest group, one for the guest kernel's log, and one that compares the host's
/// list of tests with the guest's. `with` names the function that adds files for the guest.
#[macro_export]
macro_rules! guest_tests {
    ($group:literal: $($test:ident),+ $(,)?) => {
        $crate::guest_tests! { @of $crate::guest::Group::new($group); $($test),+ }
    };
    ($group:literal with $files:path: $($test:ident),+ $(,)?) => {
        $crate::guest_tests! { @of $crate::guest::Group::with($group, $files); $($test),+ }
    };
    ($group:literal on x86_64 with its kernel: $($test:ident),+ $(,)?) => {
        $crate::guest_tests! {
            @of $crate::guest::Group::new($group).with_its_kernel().on_x86_64(); $($test),+
        }
    };
    ($group:literal on aarch64 with $files:path: $($test:ident),+ $(,)?) => {
        $crate::guest_tests! {
            @of $crate::guest::Group::with($group, $files).on_aarch64(); $($test),+
        }
    };
    ($group:literal started $args:expr; $($test:ident),+ $(,)?) => {
        $crate::guest_tests! { @of $crate::guest::Group::started($group, $args); $($test),+ }
    };
    ($group:literal with $files:path, started $args:expr; $($test:ident),+ $(,)?) => {
        $crate::guest_tests! {
            @of $crate::guest::Group::with($group, $files).with_arguments($args); $($test),+
        }
    };
    ($group:literal with $files:path, run by $vmm:literal $args:expr; $($test:ident),+ $(,)?) => {
        $crate::guest_tests! {
            @of $crate::guest::Group::run_by($vmm, $args, $group, $files); $($test),+
        }
    };
    ($group:literal appending $words:literal, started $args:expr; $($test:ident),+ $(,)?) => {
        $crate::guest_tests! {
            @of $crate::guest::Group::appending($group, $words).with_arguments($args); $($test),+
        }
    };
    ($group:literal appending $words:literal; $($test:ident),+ $(,)?) => {
        $crate::guest_tests! { @of $crate::guest::Group::appending($group, $words); $($test),+ }
    };
    ($group:literal in exact lab: $($test:ident),+ $(,)?) => {
        $crate::guest_tests! { @of $crate::guest::Group::new($group).in_exact_lab(); $($test),+ }
    };
    ($group:literal with $vcpus:literal vcpus: $($test:ident),+ $(,)?) => {
        $crate::guest_tests! {
            @of $crate::guest::Group::new($group).with_vcpus($vcpus); $($test),+
        }
    };
    ($group:literal in lab: $($test:ident),+ $(,)?) => {
        $crate::guest_tests! { @of $crate::guest::Group::in_lab($group); $($test),+ }
    };
    (@of $made:expr; $($test:ident),+) => {
        static GROUP: $crate::guest::Group = $made;
        $crate::shared_boots!([$(stringify!($test)),+].len(); || GROUP.boot());

        $(
            #[test]
            fn $test() {
                GROUP.check(stringify!($test));
            }
        )+

        #[test]
        fn guest_ran_exactly_the_listed_tests() {
            GROUP.check_names(&[$(stringify!($test)),+]);
        }

        #[test]
        fn guest_kernel_log_has_no_fault() {
            GROUP.check($crate::guest::KERNEL_LOG);
        }
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arch_of_the_environment_replaces_the_groups_own_unless_bound() {
        assert_eq!(arch(None, Arch::Aarch64, false), Ok(Arch::Aarch64));
        assert_eq!(arch(Some("aarch64"), Arch::X86_64, false), Ok(Arch::Aarch64));
        assert_eq!(arch(Some("aarch64"), Arch::X86_64, true), Ok(Arch::X86_64));
        for bound in [false, true] {
            let refused = arch(Some("arm"), Arch::X86_64, bound).unwrap_err();
            assert!(refused.contains(ARCH), "{refused}");
        }
    }

    #[test]
    fn machine_that_fails_fails_the_test_that_had_begun() {
        let failed = |output: &str| BootError::Ended {
            kvm_host: images::KvmHost::Direct,
            what: "the guest's kernel panicked".into(),
            console: "console.log".into(),
            output: output.into(),
        };
        let output = "@test first begins\n@test first 3 ok\n@test second begins\n";
        let verdicts = verdicts_until(&failed(output)).unwrap();
        assert_eq!(verdicts["first"], (3, Verdict::Passed));
        for test in ["second", KERNEL_LOG] {
            let (_, Verdict::Failed(reason)) = &verdicts[test] else {
                panic!("{test} passed");
            };
            assert!(reason.contains("panicked"), "{reason}");
        }
        assert_eq!(verdicts.len(), 3);
        assert!(verdicts_until(&failed("")).is_none());
    }

    #[test]
    fn kernels_name_has_a_series_and_a_checker() {
        assert_eq!(named("6.12"), Ok(("6.12".into(), None)));
        let lockdep = ("6.1".into(), Some(Debug::Lockdep));
        assert_eq!(named("6.1-lockdep"), Ok(lockdep));
        assert!(named("6.1-nothing").unwrap_err().contains("VPMU_TEST_KERNEL"));
    }
}
