//! Boots the guests of a test program in parallel. Otherwise, most processors would be idle, because an emulated
//! machine keeps at most one processor busy, and most tests of a program wait for the same guest.

use std::cmp::Reverse;
use std::collections::VecDeque;
use std::env;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Once};
use std::thread;
use std::time::{Duration, Instant};

use images::cache;

use crate::guest::say;
use crate::slowest;

#[doc(hidden)]
pub use linkme::{self, distributed_slice};

/// The time limit of a boot. The longest groups take up to ten minutes when three machines share two processors with
/// other work.
pub const LIMIT: Duration = Duration::from_secs(1800);

/// A boot that tests of a module share.
#[derive(Debug)]
pub struct SharedBoot {
    /// The module's path.
    pub module: &'static str,
    /// The number of tests in the guest, or `None` for a session of the lab's host, which may run several guests.
    pub tests: Option<usize>,
    /// Boots the guest, unless it has already booted. Returns when the guest has run.
    pub run: fn(),
}

/// The shared boots of this program.
#[doc(hidden)]
#[distributed_slice]
pub static BOOTS: [SharedBoot];

/// Registers shared boots of this module, which [`begin`] runs. The arguments have one of two forms. In the form
/// `tests; boot`, the function `boot` boots a guest with `tests` tests. The form `boot, ...` lists functions, each of
/// which boots one guest or runs one session.
#[macro_export]
macro_rules! shared_boots {
    (@ $tests:expr, $boot:expr) => {
        const _: () = {
            #[$crate::boots::distributed_slice($crate::boots::BOOTS)]
            #[linkme(crate = $crate::boots::linkme)]
            static BOOT: $crate::boots::SharedBoot = $crate::boots::SharedBoot {
                module: module_path!(),
                tests: $tests,
                run: $boot,
            };
        };
    };
    ($tests:expr; $boot:expr) => {
        $crate::shared_boots!(@ Some($tests), $boot);
    };
    ($($boot:expr),+ $(,)?) => {
        $($crate::shared_boots!(@ None, $boot);)+
    };
}

/// On its first call, starts the shared boots of each module whose tests are all selected. At most as many boots run at
/// a time as there are slots for emulated machines. Sessions and large groups start first, because a long boot that
/// starts last would leave processors idle. The guests of other modules boot when a test needs them.
pub fn begin() {
    static BEGUN: Once = Once::new();
    BEGUN.call_once(|| {
        let Some(filters) = filters(env::args().skip(1)) else {
            return;
        };
        let mut boots: Vec<&SharedBoot> = BOOTS.iter().filter(|boot| is_whole(boot.module, &filters)).collect();
        boots.sort_by_key(|boot| Reverse(boot.tests.unwrap_or(usize::MAX)));
        let all = boots.len();
        let shared = Arc::new((Mutex::new(VecDeque::from(boots)), AtomicUsize::new(0)));
        for _ in 0..cache::slots() {
            let shared = Arc::clone(&shared);
            // If the host cannot create the thread, the tests boot their guests themselves.
            let _ = thread::Builder::new().spawn(move || {
                let (boots, done) = &*shared;
                let next = || boots.lock().ok()?.pop_front();
                while let Some(boot) = next() {
                    let begun = Instant::now();
                    (boot.run)();
                    let time = begun.elapsed();
                    slowest::note_boot(boot.module, time);
                    let done = done.fetch_add(1, Ordering::Relaxed) + 1;
                    say(&format!("boot {done} of {all}: {}, {:.1} s", boot.module, time.as_secs_f64()));
                    if done == all {
                        say(&slowest::tables());
                    }
                }
            });
        }
    });
}

/// Returns the filters among a test program's arguments, or `None` if other arguments may also select tests.
fn filters(arguments: impl Iterator<Item = String>) -> Option<Vec<String>> {
    /// libtest's options that only change the output.
    const OUTPUT: &[&str] = &["--nocapture", "--no-capture", "--show-output", "--quiet", "-q"];
    let (options, filters): (Vec<String>, Vec<String>) = arguments.partition(|argument| argument.starts_with('-'));
    options.iter().all(|option| OUTPUT.contains(&option.as_str())).then_some(filters)
}

/// Returns whether libtest's `filters` select all tests of the module with this path.
fn is_whole(module: &str, filters: &[String]) -> bool {
    // Test names do not contain the crate's name.
    let path = module.split_once("::").map_or("", |(_, path)| path);
    let start = format!("{path}::");
    filters.is_empty() || filters.iter().any(|filter| start.contains(filter.as_str()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owned(words: &[&str]) -> Vec<String> {
        words.iter().map(|&word| word.to_owned()).collect()
    }

    #[test]
    fn options_that_may_select_tests_have_no_filters() {
        let of = |words: &[&str]| filters(owned(words).into_iter());
        assert_eq!(of(&[]), Some(Vec::new()));
        assert_eq!(of(&["-q", "aux::"]), Some(owned(&["aux::"])));
        assert_eq!(of(&["aux::", "--skip", "area"]), None);
        assert_eq!(of(&["--list"]), None);
    }

    #[test]
    fn module_is_whole_if_a_filter_is_part_of_its_path() {
        let whole = |filters: &[&str]| is_whole("groups::output::capped", &owned(filters));
        assert!(whole(&[]));
        assert!(whole(&["output"]));
        assert!(whole(&["output::"]));
        assert!(whole(&["aux::", "output::capped::"]));
        assert!(!whole(&["aux::"]));
        assert!(!whole(&["cap_throttles_and_unthrottles"]));
        assert!(!whole(&["output::capped::cap_throttles_and_unthrottles"]));
    }
}
