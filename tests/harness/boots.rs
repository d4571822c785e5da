//! Boots the guests of a test program in parallel. Otherwise, most processors would be idle, because an emulated
//! machine keeps at most one processor busy, and most tests of a program wait for the same guest.

use std::cmp::Reverse;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use images::cache;
use linkme::distributed_slice;

use crate::guest::say;
use crate::slowest;

/// The time limit of a boot. The longest groups take up to ten minutes when three machines share two processors with
/// other work.
pub const LIMIT: Duration = Duration::from_secs(1800);

/// A boot that tests of a module share.
#[derive(Clone, Copy, Debug)]
pub struct SharedBoot {
    /// The module's path.
    pub module: &'static str,
    /// Boots the guest or runs the session, unless this has happened. Returns when it has ended.
    pub run: fn(),
    /// The number of tests in the guest, or `None` for a session of the lab's host, which may run several guests.
    pub tests: Option<usize>,
}

/// The shared boots of this program that are not those of groups.
#[doc(hidden)]
#[distributed_slice]
pub static BOOTS: [SharedBoot];

/// Registers functions of this module, each of which boots one guest or runs one session.
#[macro_export]
macro_rules! shared_boots {
    ($($boot:expr),+ $(,)?) => {
        $(const _: () = {
            #[$crate::linkme::distributed_slice($crate::boots::BOOTS)]
            #[linkme(crate = $crate::linkme)]
            static BOOT: $crate::boots::SharedBoot =
                $crate::boots::SharedBoot { module: module_path!(), run: $boot, tests: None };
        };)+
    };
}

/// Starts boots, as many at a time as there are slots for emulated machines. Sessions and large groups start first,
/// because a long boot that starts last would leave processors idle.
pub(crate) fn begin(mut boots: Vec<SharedBoot>) {
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
}
