//! Boots the guests of a test program in parallel. An emulated machine keeps only one processor busy, and
//! while a test waits for its guest, most other tests wait for the same guest.

use std::env;
use std::sync::{Arc, Mutex, Once};
use std::thread;

#[doc(hidden)]
pub use linkme::{self, distributed_slice};

/// Boots that tests of this program share. Each function boots its guest once, and returns when the guest has run.
#[doc(hidden)]
#[distributed_slice]
pub static BOOTS: [fn()];

/// Registers functions that each boot one guest, for [`begin`] to call.
#[macro_export]
macro_rules! shared_boots {
    ($($boot:expr),+ $(,)?) => {$(
        const _: () = {
            #[$crate::boots::distributed_slice($crate::boots::BOOTS)]
            #[linkme(crate = $crate::boots::linkme)]
            static BOOT: fn() = $boot;
        };
    )+};
}

/// Starts all shared boots once, as many at a time as there are processors. Does nothing if only some of the
/// tests run: their guests boot when a test needs them.
pub fn begin() {
    static BEGUN: Once = Once::new();
    // Arguments may choose tests.
    if env::args_os().len() > 1 {
        return;
    }
    BEGUN.call_once(|| {
        let boots = Arc::new(Mutex::new(BOOTS.iter()));
        for _ in 0..thread::available_parallelism().map_or(1, usize::from) {
            let boots = Arc::clone(&boots);
            let next = move || boots.lock().ok()?.next();
            // If the host refuses a thread, tests boot their guests themselves.
            let _ = thread::Builder::new().spawn(move || {
                while let Some(boot) = next() {
                    boot();
                }
            });
        }
    });
}
