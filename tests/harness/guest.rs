//! Groups of guest tests. The tests of a group share one boot of a stock guest. For each guest test, a host test
//! reports the verdict.

use std::collections::{BTreeMap, BTreeSet};
use std::env;
use std::ffi::OsString;
use std::io::{Write, stderr};
use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;

use guest_tests::wire::{self, Verdict};
use images::cache::Cache;
use images::kernel::DEFAULT_SERIES;
use images::programs::Programs;
use images::third_party::{self, Files, ThirdPartyError};
use images::{Arch, Boot, Carrier, Debug, Error as BootError, KvmHostChoice, Sources};
use vpmu_errors::chain;

use crate::{boots, slowest};

pub(crate) use guest_tests::wire::KERNEL_LOG;

/// The program that has the guests' tests.
const PROGRAM: &str = "guest-tests";
/// The environment variable that selects the kernel of all guests: a series, like `6.12`, or a series with a checker
/// (lockdep or KASAN), like `6.1-kasan`.
const KERNEL: &str = "VPMU_TEST_KERNEL";
/// The environment variable that names an architecture, like `aarch64`. If it is set, groups run in that architecture's
/// lab instead of their own architecture's lab. A group stays in its own architecture's lab if it tests features that
/// only this architecture has.
const ARCH: &str = "VPMU_TEST_ARCH";
/// The environment variable that selects how QEMU runs the guests of groups that are beside it: `tcg`, the default, or
/// `kvm` for the lab's KVM.
const BESIDE: &str = "VPMU_TEST_BESIDE_QEMU";
/// The environment variable that names a program of Cloud Hypervisor. If it is set, the groups beside QEMU are beside this
/// program instead, on the lab's KVM.
const CLOUD_HYPERVISOR: &str = "VPMU_CLOUD_HYPERVISOR";
/// The time limit of a boot with a checker, which makes the guest many times slower.
const LIMIT_WITH_CHECKER: Duration = Duration::from_secs(3600);
/// Additional guest memory in MiB that a checker needs, for example for KASAN's shadow memory and for the metadata of
/// each object.
const MEMORY_OF_CHECKER_MIB: u32 = 768;

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

/// The VMM that runs the guests of groups beside whose VMM the device is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OtherVmm {
    /// A stock QEMU that emulates its guests.
    QemuTcg,
    /// A stock QEMU on the lab's KVM.
    QemuKvm,
    /// Cloud Hypervisor on the lab's KVM.
    CloudHypervisor,
}

/// Tests of a group that must fail on the group's machine, all for one reason.
#[derive(Debug)]
pub struct Refusal {
    /// The missing feature of the machine, with the cause.
    pub reason: &'static str,
    /// A part of each test's failure message, which shows that the test failed for this reason.
    pub message: &'static str,
    /// The VMMs in whose guests the tests fail.
    pub on: &'static [OtherVmm],
    /// The tests' names.
    pub tests: &'static [&'static str],
}

/// A group, identified by its name in the guest's program.
#[derive(Debug)]
pub struct Group {
    name: &'static str,
    files: fn(Arch) -> Result<Files, ThirdPartyError>,
    /// Whether the guest gets its own kernel's image as a file.
    with_kernel: bool,
    vmm_args: &'static [&'static str],
    /// Whether the VMM gets the ORC tables of the guest's kernel.
    with_orc: bool,
    append: &'static str,
    kvm_host: KvmHostChoice,
    /// Whether the device is in a process of its own, beside another VMM.
    beside: bool,
    /// The tests that must fail.
    refused: &'static [Refusal],
    /// The number of vCPUs, if not the usual number.
    vcpus: Option<u32>,
    arch: Arch,
    /// Whether the group tests features that only `arch` has.
    bound: bool,
    booted: OnceLock<Result<Booted, String>>,
}

impl Group {
    /// Returns a group with default settings.
    #[must_use]
    pub const fn new(name: &'static str) -> Self {
        Self {
            name,
            files: |_| Ok(Files::new()),
            with_kernel: false,
            vmm_args: UNTHROTTLED,
            with_orc: false,
            append: "",
            kvm_host: KvmHostChoice::Auto,
            beside: false,
            refused: &[],
            vcpus: None,
            arch: Arch::X86_64,
            bound: false,
            booted: OnceLock::new(),
        }
    }

    /// Adds files to the guest.
    #[must_use]
    pub const fn with_files(mut self, files: fn(Arch) -> Result<Files, ThirdPartyError>) -> Self {
        self.files = files;
        self
    }

    /// Adds the image of the guest's kernel as `/boot/kernel`.
    #[must_use]
    pub const fn with_its_kernel(mut self) -> Self {
        self.with_kernel = true;
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
    pub const fn started(mut self, vmm_args: &'static [&'static str]) -> Self {
        self.vmm_args = vmm_args;
        self
    }

    /// Gives the VMM the ORC tables of the guest's kernel.
    #[must_use]
    pub const fn with_orc(mut self) -> Self {
        self.with_orc = true;
        self
    }

    /// Adds words to the guest kernel's command line.
    #[must_use]
    pub const fn appending(mut self, words: &'static str) -> Self {
        self.append = words;
        self
    }

    /// Restricts the group to x86-64, because the group tests features that only x86 has.
    #[must_use]
    pub const fn on_x86_64(mut self) -> Self {
        self.arch = Arch::X86_64;
        self.bound = true;
        self
    }

    /// Restricts the group to aarch64, because a group of the same tests is restricted to x86-64.
    #[must_use]
    pub const fn on_aarch64(mut self) -> Self {
        self.arch = Arch::Aarch64;
        self.bound = true;
        self
    }

    /// Runs the group on one vCPU of the exact lab of its architecture.
    #[must_use]
    pub const fn in_exact_lab(mut self) -> Self {
        self.kvm_host = KvmHostChoice::Exact;
        self
    }

    /// Always runs the group in the lab of x86. Use this for tests that trace exits by the processor's own exit
    /// numbers. The VMM reads these numbers from the host's tracepoints, and the lab's host permits this.
    #[must_use]
    pub const fn in_lab(mut self) -> Self {
        self.kvm_host = KvmHostChoice::Lab;
        self.on_x86_64()
    }

    /// Runs the group in a guest of another VMM, by default a stock QEMU, with the device in a process of its own. That
    /// process cannot do everything that the VMM does, so the tests in `refused` must fail.
    #[must_use]
    pub const fn beside(mut self, refused: &'static [Refusal]) -> Self {
        self.beside = true;
        self.refused = refused;
        self.on_x86_64()
    }

    pub(crate) fn name(&self) -> &'static str {
        self.name
    }

    /// Returns an error if the guest's test named `test` failed or was not run, or if no guest booted.
    pub(crate) fn check(&self, test: &str) -> Result<(), String> {
        let booted = self.booted()?;
        let (kernel, kvm_host) = (&booted.kernel, &booted.kvm_host);
        let Some((millis, verdict)) = booted.verdicts.get(test) else {
            return Err(format!("the guest with {kernel} did not run {test}:\n{}", booted.output));
        };
        say(&format!("{}::{test}: a guest with {kernel} on {kvm_host}, {millis} ms", self.name));
        let guest = format!("in the guest with {kernel}, on {kvm_host}");
        let refusal = self.refusals()?.find(|refusal| refusal.tests.contains(&test));
        match (verdict, refusal) {
            (Verdict::Passed, None) => Ok(()),
            (Verdict::Passed, Some(refusal)) => Err(format!(
                "{guest}: passed, but its group lists it as refused: {}; remove it from that list",
                refusal.reason
            )),
            (Verdict::Failed(message), Some(refusal)) if message.contains(refusal.message) => {
                say(&format!("{}::{test}: refused as expected: {}", self.name, refusal.reason));
                Ok(())
            }
            (Verdict::Failed(message), _) => Err(format!("{guest}: {message}")),
        }
    }

    /// The tests that must fail on the selected machine.
    fn refusals(&self) -> Result<impl Iterator<Item = &'static Refusal>, String> {
        let (other, _) = asked_other()?;
        Ok(self.refused.iter().filter(move |refusal| refusal.on.contains(&other)))
    }

    /// Returns an error if the group refuses a test that is not one of `listed`, or refuses a test twice.
    pub(crate) fn check_refusals(&self, listed: &[String]) -> Result<(), String> {
        let mut seen = BTreeSet::new();
        for test in self.refusals()?.flat_map(|refusal| refusal.tests) {
            if !listed.iter().any(|name| name == test) {
                return Err(format!("the group {} refuses the test {test}, which it does not have", self.name));
            }
            if !seen.insert(test) {
                return Err(format!("the group {} refuses the test {test} twice", self.name));
            }
        }
        Ok(())
    }

    /// Returns an error if the guest ran other tests than these, or if no guest booted. A guest of another architecture
    /// has another program than the one that listed the tests.
    pub(crate) fn check_names(&self, listed: &[String]) -> Result<(), String> {
        let listed: BTreeSet<&str> = listed.iter().map(String::as_str).chain([KERNEL_LOG]).collect();
        let ran: BTreeSet<&str> = self.booted()?.verdicts.keys().map(String::as_str).collect();
        match ran == listed {
            true => Ok(()),
            false => Err(format!(
                "the guest did not run {:?}, and ran {:?}, which are not listed",
                listed.difference(&ran),
                ran.difference(&listed)
            )),
        }
    }

    /// Boots the guest, unless it has already booted. Returns when the guest has run.
    #[doc(hidden)]
    pub fn boot(&self) {
        // Each test reports the error.
        let _ = self.booted();
    }

    fn booted(&self) -> Result<&Booted, String> {
        let booted = self.result().as_ref();
        booted.map_err(|error| format!("no guest: {error}"))
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

/// Returns the VMM of groups that are beside one, and what carries their device. `qemu` selects how QEMU runs the guests,
/// and `cloud_hypervisor` is a program to use instead.
fn other(qemu: Option<&str>, cloud_hypervisor: Option<OsString>) -> Result<(OtherVmm, Carrier), String> {
    match (qemu, cloud_hypervisor) {
        (Some(_), Some(_)) => Err(format!("{BESIDE} and {CLOUD_HYPERVISOR} select different VMMs: unset one of them")),
        (None, Some(program)) => {
            Ok((OtherVmm::CloudHypervisor, Carrier::BesideCloudHypervisor(PathBuf::from(program))))
        }
        (None | Some("tcg"), None) => Ok((OtherVmm::QemuTcg, Carrier::BesideEmulation)),
        (Some("kvm"), None) => Ok((OtherVmm::QemuKvm, Carrier::BesideQemu)),
        (Some(other), None) => Err(format!("{BESIDE}={other}: expected tcg or kvm")),
    }
}

/// Returns [`other`] as the environment selects it.
fn asked_other() -> Result<(OtherVmm, Carrier), String> {
    other(env::var(BESIDE).ok().as_deref(), env::var_os(CLOUD_HYPERVISOR))
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
    let (carrier, kvm_host) = match group.beside.then(asked_other).transpose()? {
        None => (Carrier::Vmm, group.kvm_host),
        Some((OtherVmm::QemuTcg, carrier)) => (carrier, group.kvm_host),
        Some((_, carrier)) => (carrier, KvmHostChoice::Lab),
    };
    let more = third_party::memory_mib(&files);
    let usual = Boot::default();
    let boot = Boot {
        command: format!("{PROGRAM} run {}", group.name),
        programs: vec![PROGRAM.into()],
        memory_mib: usual.memory_mib.saturating_add(more).saturating_add(debug.map_or(0, |_| MEMORY_OF_CHECKER_MIB)),
        files,
        vcpus: match (group.vcpus, group.kvm_host) {
            (Some(vcpus), _) => vcpus,
            (None, KvmHostChoice::Exact) => 1,
            (None, _) => usual.vcpus,
        },
        vmm_args: group.vmm_args.iter().map(|&arg| arg.into()).collect(),
        orc: group.with_orc,
        append: group.append.into(),
        kvm_host,
        carrier,
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

/// Returns the names of all guest tests by group, as the guests' program for this machine's architecture lists them.
pub(crate) fn listed() -> Result<BTreeMap<String, Vec<String>>, String> {
    let cache = Cache::user().map_err(|error| chain(&error))?;
    let programs = Programs::build(cache, Arch::default(), &[PROGRAM.into()]).map_err(|error| chain(&error))?;
    let program = programs.one(PROGRAM).map_err(|error| chain(&error))?;
    let output =
        Command::new(program).arg("list").output().map_err(|error| format!("cannot start {PROGRAM}: {error}"))?;
    if !output.status.success() {
        return Err(format!("{PROGRAM} list: {}", output.status));
    }
    let mut listed: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for line in String::from_utf8_lossy(&output.stdout).lines() {
        let (group, test) = line.split_once(' ').ok_or_else(|| format!("{PROGRAM} lists {line:?}"))?;
        listed.entry(group.to_owned()).or_default().push(test.to_owned());
    }
    Ok(listed)
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
    fn other_vmm_is_an_emulating_qemu_unless_the_environment_selects_another() {
        assert_eq!(other(None, None), Ok((OtherVmm::QemuTcg, Carrier::BesideEmulation)));
        assert_eq!(other(Some("kvm"), None), Ok((OtherVmm::QemuKvm, Carrier::BesideQemu)));
        assert!(other(Some("hvf"), None).unwrap_err().contains(BESIDE));
        let cloud = Carrier::BesideCloudHypervisor("/c".into());
        assert_eq!(other(None, Some("/c".into())), Ok((OtherVmm::CloudHypervisor, cloud)));
        assert!(other(Some("kvm"), Some("/c".into())).unwrap_err().contains(CLOUD_HYPERVISOR));
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
    fn guest_that_ran_other_tests_than_the_listed_fails() {
        let group = Group::new("group");
        let output = "@test first 3 ok\n@test kernel_log 4 ok\n".to_owned();
        let booted = Booted { kernel: "6.1".into(), kvm_host: "lab".into(), verdicts: verdicts(&output), output };
        group.booted.set(Ok(booted)).unwrap();
        let check = |names: &[&str]| group.check_names(&names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>());
        assert_eq!(check(&["first"]), Ok(()));
        assert!(check(&["first", "second"]).unwrap_err().contains("second"));
        assert!(check(&[]).unwrap_err().contains("first"));
    }

    const ALL: &[OtherVmm] = &[OtherVmm::QemuTcg, OtherVmm::QemuKvm, OtherVmm::CloudHypervisor];
    const REFUSALS: &[Refusal] = &[Refusal { reason: "no engine", message: "os error 95", on: ALL, tests: &["first"] }];

    #[test]
    fn refused_test_must_fail_in_the_expected_way() {
        let check = |verdict: &str| {
            let group = Group::new("group").beside(REFUSALS);
            let output = format!("@test first 3 {verdict}\n");
            let booted = Booted { kernel: "6.1".into(), kvm_host: "QEMU".into(), verdicts: verdicts(&output), output };
            group.booted.set(Ok(booted)).unwrap();
            group.check("first")
        };
        assert_eq!(check("failed not supported (os error 95)"), Ok(()));
        assert!(check("failed wrong count").unwrap_err().contains("wrong count"));
        assert!(check("ok").unwrap_err().contains("no engine; remove it"));
    }

    #[test]
    fn refusal_of_unknown_test_or_same_test_twice_is_an_error() {
        let listed = ["first".to_owned()];
        assert_eq!(Group::new("group").beside(REFUSALS).check_refusals(&listed), Ok(()));
        let unknown = Group::new("group").beside(REFUSALS).check_refusals(&[]).unwrap_err();
        assert!(unknown.contains("first"), "{unknown}");
        const TWICE: &[Refusal] = &[Refusal { reason: "", message: "", on: ALL, tests: &["first", "first"] }];
        let twice = Group::new("group").beside(TWICE).check_refusals(&listed).unwrap_err();
        assert!(twice.ends_with("first twice"), "{twice}");
    }

    #[test]
    fn kernels_name_has_a_series_and_a_checker() {
        assert_eq!(named("6.12"), Ok(("6.12".into(), None)));
        let lockdep = ("6.1".into(), Some(Debug::Lockdep));
        assert_eq!(named("6.1-lockdep"), Ok(lockdep));
        assert!(named("6.1-nothing").unwrap_err().contains("VPMU_TEST_KERNEL"));
    }
}
