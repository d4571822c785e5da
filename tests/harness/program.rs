//! A test program with a host test for each guest test. The program for the guests knows the names, so the host learns
//! them from it. Tests that run on the host alone register themselves.
//!
//! libtest cannot make tests at run time. libtest-mimic can, and understands the same options.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::panic;
use std::process::ExitCode;

use clap::Parser;
use libtest_mimic::{Failed, Trial};
use linkme::distributed_slice;

use crate::boots::{self, BOOTS, SharedBoot};
use crate::guest::{self, Group, KERNEL_LOG};

/// A group, and the module whose tests are the group's tests.
#[derive(Debug)]
pub struct Declared {
    /// The module's path.
    pub module: &'static str,
    /// The group.
    pub group: &'static Group,
    /// Boots the group's guest, unless it has already booted. Returns when the guest has run.
    pub boot: fn(),
}

/// A test that runs on the host.
#[derive(Debug)]
pub struct HostTest {
    /// The path of the test's module.
    pub module: &'static str,
    /// The function's name.
    pub name: &'static str,
    /// Panics if the test fails.
    pub run: fn(),
}

/// The groups of this program.
#[doc(hidden)]
#[distributed_slice]
pub static GROUPS: [Declared];

/// The tests of this program that run on the host.
#[doc(hidden)]
#[distributed_slice]
pub static HOST_TESTS: [HostTest];

/// Declares the group of this module: its name and its settings, which are methods of [`Group`]. The module gets a host
/// test for each test of the group, one for the guest kernel's log, and one that compares the tests that the guest ran
/// with those that are listed.
#[macro_export]
macro_rules! group {
    ($name:literal $(, $setting:ident($($value:expr)?))* $(,)?) => {
        const _: () = {
            static GROUP: $crate::guest::Group = $crate::guest::Group::new($name)$(.$setting($($value)?))*;
            #[$crate::linkme::distributed_slice($crate::program::GROUPS)]
            #[linkme(crate = $crate::linkme)]
            static DECLARED: $crate::program::Declared = $crate::program::Declared {
                module: module_path!(),
                group: &GROUP,
                boot: || GROUP.boot(),
            };
        };
    };
}

/// Registers a function as a test that runs on the host: `#[apply(tests::host_test)]`.
#[macro_export]
macro_rules! host_test {
    ($(#[doc = $doc:literal])* fn $name:ident() $body:block) => {
        $(#[doc = $doc])*
        fn $name() $body

        const _: () = {
            #[$crate::linkme::distributed_slice($crate::program::HOST_TESTS)]
            #[linkme(crate = $crate::linkme)]
            static TEST: $crate::program::HostTest =
                $crate::program::HostTest { module: module_path!(), name: stringify!($name), run: $name };
        };
    };
}

/// libtest's command line.
#[derive(Debug, Parser)]
struct CommandLine {
    #[command(flatten)]
    libtest: libtest_mimic::Arguments,
    /// Further filters: a test runs if any filter selects it
    more_filters: Vec<String>,
}

impl CommandLine {
    /// Returns whether the test of this name runs.
    fn select(&self, name: &str) -> bool {
        let is_in = |filter: &String| match self.libtest.exact {
            true => name == filter,
            false => name.contains(filter.as_str()),
        };
        let filters: Vec<&String> = self.libtest.filter.iter().chain(&self.more_filters).collect();
        (filters.is_empty() || filters.into_iter().any(is_in)) && !self.libtest.skip.iter().any(is_in)
    }
}

/// libtest's exit code when a test has failed.
const FAILED: u8 = 101;

/// A test of this program, and the path of its module.
type Test = (&'static str, Trial);

/// Runs the tests that the command line selects. Guests whose tests are all selected boot at once, in parallel. The
/// other guests boot when a test needs them.
#[must_use]
pub fn run() -> ExitCode {
    let arguments = CommandLine::parse();
    let tests = match guest::listed().and_then(|listed| tests(&listed)) {
        Ok(tests) => tests,
        Err(error) => {
            eprintln!("cannot list the tests: {error}");
            return ExitCode::from(FAILED);
        }
    };
    let (skipped, partial): (Vec<String>, BTreeSet<&str>) = tests
        .iter()
        .filter(|(_, trial)| !arguments.select(trial.name()))
        .map(|(module, trial)| (trial.name().to_owned(), module))
        .unzip();
    if !arguments.libtest.list {
        let mut boots = shared_boots(&tests);
        boots.retain(|boot| !partial.contains(boot.module));
        boots::begin(boots);
    }
    // libtest-mimic counts the tests that it leaves out itself.
    let selected = libtest_mimic::Arguments { filter: None, skip: skipped, exact: true, ..arguments.libtest };
    keep_panics();
    libtest_mimic::run(&selected, tests.into_iter().map(|(_, trial)| trial).collect()).exit_code()
}

/// Returns the boots of all groups and sessions.
fn shared_boots(tests: &[Test]) -> Vec<SharedBoot> {
    let size = |module| tests.iter().filter(|&&(of, _)| of == module).count();
    let groups =
        GROUPS.iter().map(|&Declared { module, boot, .. }| SharedBoot { module, run: boot, tests: Some(size(module)) });
    groups.chain(BOOTS.iter().copied()).collect()
}

/// Returns the tests by name.
fn tests(listed: &BTreeMap<String, Vec<String>>) -> Result<Vec<Test>, String> {
    let mut tests: Vec<Test> =
        HOST_TESTS.iter().map(|test| self::test(test.module, test.name, || call(test.run))).collect();
    let mut undeclared: BTreeSet<&str> = listed.keys().map(String::as_str).collect();
    for &Declared { module, group, .. } in GROUPS {
        undeclared.remove(group.name());
        let names = listed.get(group.name());
        let names = names.ok_or_else(|| format!("the guests' program has no test of the group {}", group.name()))?;
        group.check_refusals(names)?;
        for name in names {
            let tested = name.clone();
            tests.push(test(module, name, move || group.check(&tested)));
        }
        let names = names.clone();
        tests.push(test(module, "guest_ran_exactly_the_listed_tests", move || group.check_names(&names)));
        tests.push(test(module, "guest_kernel_log_has_no_fault", || group.check(KERNEL_LOG)));
    }
    if !undeclared.is_empty() {
        return Err(format!("no module declares the groups {undeclared:?}: declare each with tests::group!"));
    }
    tests.sort_by(|(_, one), (_, other)| one.name().cmp(other.name()));
    match tests.windows(2).find(|pair| pair[0].1.name() == pair[1].1.name()) {
        Some(pair) => Err(format!("two tests are named {}", pair[0].1.name())),
        None => Ok(tests),
    }
}

fn test(module: &'static str, name: &str, check: impl FnOnce() -> Result<(), String> + Send + 'static) -> Test {
    // Test names do not contain the crate's name.
    let path = module.split_once("::").map_or("", |(_, path)| path);
    (module, Trial::test(format!("{path}::{name}"), || check().map_err(Failed::from)))
}

thread_local! {
    /// The message of the last panic in this thread, if this thread runs a test.
    static PANIC: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Runs a test. If it panics, returns the message.
fn call(test: fn()) -> Result<(), String> {
    PANIC.set(Some(String::new()));
    let result = panic::catch_unwind(test);
    let message = PANIC.take();
    result.map_err(|_| message.unwrap_or_default())
}

/// Keeps the messages of tests that panic, so that they are printed with the failures.
fn keep_panics() {
    let usual = panic::take_hook();
    panic::set_hook(Box::new(move |panic| {
        let is_in_a_test = PANIC.with_borrow_mut(|message| {
            let message = message.as_mut();
            message.map(|message| *message = panic.to_string()).is_some()
        });
        if !is_in_a_test {
            usual(panic);
        }
    }));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_filter_selects_and_each_skip_excludes() {
        let select = |words: &[&str], name| {
            let arguments = ["groups"].iter().chain(words);
            CommandLine::try_parse_from(arguments).unwrap().select(name)
        };
        assert!(select(&["-q"], "aux::area"));
        assert!(select(&["output::", "aux::"], "aux::area"));
        assert!(!select(&["output::", "trigger::"], "aux::area"));
        assert!(!select(&["aux::", "--skip", "area"], "aux::area"));
        assert!(select(&["aux::area", "--exact"], "aux::area"));
        assert!(!select(&["aux::", "--exact"], "aux::area"));
    }

    #[test]
    fn test_that_panics_fails_with_its_message() {
        keep_panics();
        assert_eq!(call(|| ()), Ok(()));
        let message = call(|| panic!("seven")).unwrap_err();
        assert!(message.contains("program.rs") && message.contains("seven"), "{message}");
    }
}
