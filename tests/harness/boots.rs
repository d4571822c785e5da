//! The guests of a test program, booted side by side: an emulated machine keeps one processor busy, and while a
//! test waits for its guest, the other tests mostly wait for the same one.

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

/// Begins all shared boots, once, as many at a time as there are processors. Does nothing if only some of the
/// tests run: their guests are booted when they are needed.
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
