//! The log on standard error. A guest can cause messages at any rate, so the log limits the number of lines, and
//! reports how many were dropped.

use std::io::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Instant;

use env_logger::{Env, Logger};
use log::{Log, Metadata, Record};

use crate::bucket::Bucket;

/// Default limit on lines per second.
pub const DEFAULT_LINES: u32 = 20;
/// The size of a burst, as a multiple of the limit on lines per second.
const BURST: u64 = 10;
/// The default filter. The crate virtio-queue logs each mistake of a driver. The filter drops these messages, because
/// the device counts the mistakes.
const FILTER: &str = "warn,virtio_queue=off";

/// The process's log.
static LOG: OnceLock<Limited> = OnceLock::new();

/// Totals of written and dropped lines.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Lines {
    /// Lines written.
    pub written: u64,
    /// Lines dropped.
    pub left_out: u64,
}

struct Limited {
    inner: Logger,
    /// `None`: unlimited.
    bucket: Mutex<Option<Bucket>>,
    written: AtomicU64,
    left_out: AtomicU64,
    /// Dropped lines that the log has reported.
    reported: AtomicU64,
}

/// Starts the log, without a limit. `RUST_LOG` sets the filter. By default, the filter selects warnings and errors.
pub fn start() {
    let inner = env_logger::Builder::from_env(Env::default().default_filter_or(FILTER))
        .format(|out, record| {
            let level = record.level().as_str().to_lowercase();
            writeln!(out, "vmm: {level}: {}", record.args())
        })
        .build();
    log::set_max_level(inner.filter());
    let limited = LOG.get_or_init(|| Limited {
        inner,
        bucket: Mutex::new(None),
        written: AtomicU64::new(0),
        left_out: AtomicU64::new(0),
        reported: AtomicU64::new(0),
    });
    // `set_logger` fails only if a logger is already set.
    let _ = log::set_logger(limited);
}

/// Limits the log to about `lines` lines per second. Zero means unlimited. Does nothing if `RUST_LOG` is set, because a
/// user who sets this filter wants every line that the filter selects.
pub fn limit(lines: u32) {
    let Some(log) = LOG.get().filter(|_| std::env::var_os("RUST_LOG").is_none()) else {
        return;
    };
    let lines = u64::from(lines);
    let bucket = (lines > 0).then(|| Bucket::per_second(lines * BURST, lines));
    *log.bucket.lock().unwrap_or_else(PoisonError::into_inner) = bucket;
}

/// Reports how many lines were dropped since the last report, and returns the totals.
pub fn finish() -> Lines {
    let Some(log) = LOG.get() else {
        return Lines::default();
    };
    log.report_left_out();
    Lines { written: log.written.load(Ordering::Relaxed), left_out: log.left_out.load(Ordering::Relaxed) }
}

impl Limited {
    fn admits(&self) -> bool {
        let mut bucket = self.bucket.lock().unwrap_or_else(PoisonError::into_inner);
        let bucket = bucket.as_mut();
        bucket.is_none_or(|bucket| bucket.take(1, Instant::now()) == 1)
    }

    fn report_left_out(&self) {
        let all = self.left_out.load(Ordering::Relaxed);
        let before = self.reported.swap(all, Ordering::Relaxed);
        let more = all.saturating_sub(before);
        if more > 0 {
            let lines = if more == 1 { "line" } else { "lines" };
            let args = format_args!("{more} {lines} omitted from this log; see --max-log-lines");
            let record = Record::builder().level(log::Level::Warn).target(module_path!()).args(args).build();
            self.inner.log(&record);
        }
    }
}

impl Log for Limited {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        self.inner.enabled(metadata)
    }

    fn log(&self, record: &Record<'_>) {
        if !self.inner.matches(record) {
            return;
        }
        if self.admits() {
            self.report_left_out();
            self.inner.log(record);
            self.written.fetch_add(1, Ordering::Relaxed);
        } else {
            self.left_out.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn flush(&self) {
        self.inner.flush();
    }
}
