//! A group of guest tests: one boot of a stock guest, shared by the host tests that each
//! stand for one of the guest's.

use std::collections::BTreeMap;
use std::io::{Write, stderr};
use std::sync::OnceLock;
use std::time::Duration;

use images::foreign::{Files, ForeignError};
use images::{Boot, PlaceChoice};
use vpmu_client::error::chain;

use crate::wire::{self, Verdict};

/// Far above a boot in the lab and the group's tests on a loaded machine.
const LIMIT: Duration = Duration::from_secs(600);
const MIB: usize = 1 << 20;

/// What a boot told.
#[derive(Debug)]
struct Booted {
    place: String,
    verdicts: BTreeMap<String, (u64, Verdict)>,
    output: String,
}

/// A group by its name in the guest's program.
#[derive(Debug)]
pub struct Group {
    name: &'static str,
    files: fn() -> Result<Files, ForeignError>,
    vmm: Option<&'static str>,
    vmm_args: &'static [&'static str],
    append: &'static str,
    place: PlaceChoice,
    booted: OnceLock<Result<Booted, String>>,
}

impl Group {
    /// Nothing is booted before the first test asks.
    #[must_use]
    pub const fn new(name: &'static str) -> Self {
        Self::with(name, || Ok(Files::new()))
    }

    /// The same in a machine that is started with more arguments for `vmm run`.
    #[must_use]
    pub const fn started(name: &'static str, vmm_args: &'static [&'static str]) -> Self {
        let mut group = Self::new(name);
        group.vmm_args = vmm_args;
        group
    }

    /// The same with more words on the guest kernel's command line.
    #[must_use]
    pub const fn appending(name: &'static str, append: &'static str) -> Self {
        let mut group = Self::new(name);
        group.append = append;
        group
    }

    /// The same in the lab, whatever this machine can do: for what takes a host that shows the VMM
    /// everything.
    #[must_use]
    pub const fn in_lab(name: &'static str) -> Self {
        let mut group = Self::new(name);
        group.place = PlaceChoice::Lab;
        group
    }

    /// The same with more files, on one vCPU of the exact lab: `vmm` runs the guest in place of the
    /// product's program.
    #[must_use]
    pub const fn run_by(
        vmm: &'static str,
        vmm_args: &'static [&'static str],
        name: &'static str,
        files: fn() -> Result<Files, ForeignError>,
    ) -> Self {
        let mut group = Self::with(name, files);
        group.vmm = Some(vmm);
        group.vmm_args = vmm_args;
        group.place = PlaceChoice::Exact;
        group
    }

    /// The same with more files for the guest.
    #[must_use]
    pub const fn with(name: &'static str, files: fn() -> Result<Files, ForeignError>) -> Self {
        Self {
            name,
            files,
            vmm: None,
            vmm_args: &[],
            append: "",
            place: PlaceChoice::Auto,
            booted: OnceLock::new(),
        }
    }

    /// Passes if the guest's test of that name passed.
    ///
    /// # Panics
    /// If it failed, was not run, or no guest booted: the test fails.
    pub fn check(&self, test: &str) {
        let booted = self.boot();
        let (millis, verdict) = booted
            .verdicts
            .get(test)
            .unwrap_or_else(|| panic!("the guest did not run {test}:\n{}", booted.output));
        let place = &booted.place;
        say(&format!(
            "{}::{test}: a guest on {place}, {millis} ms",
            self.name
        ));
        if let Verdict::Failed(reason) = verdict {
            panic!("in the guest, on {place}: {reason}");
        }
    }

    /// Passes if the guest ran these tests and no other.
    ///
    /// # Panics
    /// If the lists differ: a test was added on one side alone.
    pub fn check_names(&self, expected: &[&str]) {
        let mut expected: Vec<&str> = expected.to_vec();
        expected.sort_unstable();
        let ran: Vec<&str> = self.boot().verdicts.keys().map(String::as_str).collect();
        assert_eq!(
            ran, expected,
            "the guest's tests and the host's list differ"
        );
    }

    fn boot(&self) -> &Booted {
        let booted = self.booted.get_or_init(|| run(self));
        match booted {
            Ok(booted) => booted,
            Err(error) => panic!("no guest: {error}"),
        }
    }
}

fn run(group: &Group) -> Result<Booted, String> {
    let files = (group.files)().map_err(|error| chain(&error))?;
    let size: usize = files.iter().map(|(_, contents)| contents.len()).sum();
    // The guest holds them twice while it unpacks them.
    let more = u32::try_from(size * 2 / MIB).map_err(|error| error.to_string())?;
    let usual = Boot::default();
    let boot = Boot {
        command: format!("guest-tests run {}", group.name),
        programs: vec!["guest-tests".into()],
        memory_mib: usual.memory_mib.saturating_add(more),
        files,
        vmm: group.vmm.map_or(usual.vmm, str::to_owned),
        vcpus: match group.place {
            PlaceChoice::Exact => 1,
            _ => usual.vcpus,
        },
        vmm_args: group.vmm_args.iter().map(|&arg| arg.into()).collect(),
        append: group.append.into(),
        place: group.place,
        timeout: LIMIT,
        ..Boot::default()
    };
    let outcome = boot.run().map_err(|error| chain(&error))?;
    let verdicts = outcome
        .output
        .lines()
        .filter_map(wire::parse)
        .map(|(test, millis, verdict)| (test.to_owned(), (millis, verdict)))
        .collect();
    Ok(Booted {
        place: outcome.place.to_string(),
        verdicts,
        output: outcome.output,
    })
}

/// Says where a test ran also when it passes: the test runner keeps only what macros print.
fn say(line: &str) {
    // A closed stderr is no reason to fail.
    let _ = writeln!(stderr(), "{line}");
}

/// A host test for each test of a guest group, and one that compares the lists. `with` names
/// what brings more files for the guest.
#[macro_export]
macro_rules! guest_tests {
    ($group:literal: $($test:ident),+ $(,)?) => {
        $crate::guest_tests! { @of $crate::guest::Group::new($group); $($test),+ }
    };
    ($group:literal with $files:path: $($test:ident),+ $(,)?) => {
        $crate::guest_tests! { @of $crate::guest::Group::with($group, $files); $($test),+ }
    };
    ($group:literal started $args:expr; $($test:ident),+ $(,)?) => {
        $crate::guest_tests! { @of $crate::guest::Group::started($group, $args); $($test),+ }
    };
    ($group:literal with $files:path, run by $vmm:literal $args:expr; $($test:ident),+ $(,)?) => {
        $crate::guest_tests! {
            @of $crate::guest::Group::run_by($vmm, $args, $group, $files); $($test),+
        }
    };
    ($group:literal appending $words:literal; $($test:ident),+ $(,)?) => {
        $crate::guest_tests! { @of $crate::guest::Group::appending($group, $words); $($test),+ }
    };
    ($group:literal in lab: $($test:ident),+ $(,)?) => {
        $crate::guest_tests! { @of $crate::guest::Group::in_lab($group); $($test),+ }
    };
    (@of $made:expr; $($test:ident),+) => {
        static GROUP: $crate::guest::Group = $made;

        $(
            #[test]
            fn $test() {
                GROUP.check(stringify!($test));
            }
        )+

        #[test]
        fn the_guest_ran_these_tests_and_no_other() {
            GROUP.check_names(&[$(stringify!($test)),+]);
        }
    };
}
