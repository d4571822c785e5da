//! Checks that return an error instead of panicking, because a panic would print a backtrace on the serial console.

/// Fails the test with a message unless the condition holds.
macro_rules! ensure {
    ($condition:expr, $($message:tt)+) => {
        if !$condition {
            return Err(format!($($message)+).into());
        }
    };
}

/// Fails the test unless both values are equal, and reports both values.
macro_rules! ensure_eq {
    ($left:expr, $right:expr, $($message:tt)+) => {
        match (&$left, &$right) {
            (left, right) => {
                if *left != *right {
                    let what = format_args!($($message)+);
                    return Err(format!("{what}: {left:?}, expected {right:?}").into());
                }
            }
        }
    };
}

pub(crate) use {ensure, ensure_eq};

/// Returns the last errno in the chain that consists of an error and its causes, or zero if the chain has no errno.
pub(crate) fn errno(error: &(dyn std::error::Error + 'static)) -> i32 {
    let mut cause = Some(error);
    let mut found = 0;
    while let Some(error) = cause {
        if let Some(code) = error.downcast_ref::<std::io::Error>().and_then(std::io::Error::raw_os_error) {
            found = code;
        }
        cause = error.source();
    }
    found
}
