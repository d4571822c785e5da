//! The tests of this program. Each test registers itself, with the attribute `#[apply(guest_test)]` at its function.
//! The host has no list of its own: it asks this program for the names (`guest-tests list`).

use linkme::distributed_slice;

use crate::Outcome;

/// A test.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Test {
    /// The tests that share a boot.
    pub(crate) group: &'static str,
    pub(crate) name: &'static str,
    pub(crate) run: fn() -> Outcome,
    /// Whether the test changes the guest for good, and so runs after the others of its group.
    pub(crate) is_last: bool,
    /// Module and line, which are the order of the other tests.
    pub(crate) place: (&'static str, u32),
}

#[distributed_slice]
pub(crate) static TESTS: [Test];

/// Returns the tests of all groups in the order in which they run.
pub(crate) fn all() -> Vec<Test> {
    let mut tests = TESTS.to_vec();
    tests.sort_by_key(|test| (test.group, test.is_last, test.place));
    tests
}

/// Returns the tests of a group in the order in which they run.
pub(crate) fn group(name: &str) -> Vec<Test> {
    all().into_iter().filter(|test| test.group == name).collect()
}

macro_rules! register {
    ($group:expr, $is_last:literal, $name:ident, $run:expr) => {
        #[expect(unsafe_code, reason = "linkme collects statics in a section of their own")]
        const _: () = {
            #[linkme::distributed_slice($crate::registry::TESTS)]
            static TEST: $crate::registry::Test = $crate::registry::Test {
                group: $group,
                name: stringify!($name),
                run: $run,
                is_last: $is_last,
                place: (module_path!(), line!()),
            };
        };
    };
}

/// Registers a function as a test: `#[apply(guest_test)]`. The test belongs to the group that the module's `GROUP`
/// names, or to the one that `#[group = "..."]` below the attribute names. `#[last]` there makes it run after the others.
macro_rules! guest_test {
    ($(#[doc = $doc:literal])* #[group = $group:literal] fn $name:ident() -> Outcome $body:block) => {
        guest_test! { @ $group, false; $(#[doc = $doc])* fn $name() -> Outcome $body }
    };
    ($(#[doc = $doc:literal])* #[last] fn $name:ident() -> Outcome $body:block) => {
        guest_test! { @ GROUP, true; $(#[doc = $doc])* fn $name() -> Outcome $body }
    };
    ($(#[doc = $doc:literal])* fn $name:ident() -> Outcome $body:block) => {
        guest_test! { @ GROUP, false; $(#[doc = $doc])* fn $name() -> Outcome $body }
    };
    (@ $group:expr, $is_last:literal; $(#[doc = $doc:literal])* fn $name:ident() -> Outcome $body:block) => {
        $(#[doc = $doc])*
        fn $name() -> Outcome $body

        register!($group, $is_last, $name, $name);
    };
}

/// Registers tests that only call another function, each with other arguments. They belong to the module's `GROUP`.
macro_rules! guest_tests {
    ($($name:ident => $call:expr;)+) => {
        $(register!(GROUP, false, $name, || $call);)+
    };
}
