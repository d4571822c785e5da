//! Limits on one guest's use of its host. This module defines the default, the flag, the key in the configuration file
//! and the errors of each limit.

use clap::Args;
use serde::{Deserialize, Deserializer};
use vpmu::abi::PAGE_SIZE;
use vpmu::parse_bytes;

use crate::logger;

/// Size in bytes of a page of the rings and of the window.
const PAGE: u64 = PAGE_SIZE as u64;

/// The limits, as flags and as the object "limits" of a configuration file. The keys of the object are the long names
/// of the flags.
#[derive(Debug, Clone, Default, PartialEq, Eq, Args, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
#[command(next_help_heading = "Limits of the guest's resource use")]
pub struct LimitArgs {
    /// Maximum number of open events; the operator's events do not count towards this limit or the limits
    /// below [default: 1024]
    #[arg(long, value_name = "N")]
    pub max_events: Option<u32>,

    /// Maximum number of persistent events [default: 64]
    #[arg(long, value_name = "N")]
    pub max_persistent: Option<u32>,

    /// Maximum number of host counters that sampling events hold open; each uses one descriptor, or two for an exit
    /// trace [default: 1024, or fewer if 'ulimit -Hn' is too low]
    #[arg(long, value_name = "N")]
    pub max_host_counters: Option<u32>,

    /// Maximum number of these host counters that run on one vCPU at the same time; further events wait
    /// [default: 64]
    #[arg(long, value_name = "N")]
    pub max_active_counters: Option<u32>,

    /// Maximum number of samples per second for one event; also the maximum number of interrupts per second for
    /// all host clocks on one vCPU [default: 100000]
    #[arg(long, value_name = "N")]
    pub max_sample_rate: Option<u32>,

    /// Maximum number of samples per second of all events in total [default: 400000]
    #[arg(long, value_name = "N")]
    pub max_samples: Option<u32>,

    /// Maximum number of bytes per second in the sample records of all events in total [default: 256M]
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    #[serde(deserialize_with = "bytes")]
    pub max_record_bytes: Option<u64>,

    /// Maximum share of each vCPU's time, in percent (1 to 100), for samples that make the vCPU leave the
    /// guest; beyond this share, events are throttled [default: 25]
    #[arg(long, value_name = "PERCENT")]
    pub max_sampling_percent: Option<u32>,

    /// Minimum sampling period of hardware events [default: 1000]
    #[arg(long, value_name = "N")]
    pub min_hardware_period: Option<u64>,

    /// Maximum size of one ring in pages of 4 KiB, a power of two [default: 4096]
    #[arg(long, value_name = "N")]
    pub max_ring_pages: Option<u32>,

    /// Maximum size of one AUX area in pages of 4 KiB, a power of two [default: 16384]
    #[arg(long, value_name = "N")]
    pub max_aux_pages: Option<u32>,

    /// Maximum total size of all rings and AUX areas in pages of 4 KiB [default: 131072, or twice
    /// --max-aux-pages if that is more]
    #[arg(long, value_name = "N")]
    pub max_pages: Option<u32>,

    /// Size of the part of the window that rings of the guest's own events can use; the rest is for the events
    /// of --persistent and 'vmm ctl start' [default: three quarters of --window]
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    #[serde(deserialize_with = "bytes")]
    pub guest_window: Option<u64>,

    /// Maximum number of bytes that one recording takes from rings in the guest's own memory [default: 4M]
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    #[serde(deserialize_with = "bytes")]
    pub max_guest_recording: Option<u64>,

    /// Maximum number of bytes per minute in the recordings made at guest resets; further recordings are skipped
    /// [default: 64M]
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    #[serde(deserialize_with = "bytes")]
    pub max_recordings: Option<u64>,

    /// Maximum number of resets per minute with --on-reset restart; further resets wait [default: 30]
    #[arg(long, value_name = "N")]
    pub max_resets: Option<u32>,

    /// Maximum number of log lines per second, averaged over ten seconds; the VMM counts the lines that it
    /// omits. 0: no limit [default: 20, or none with RUST_LOG]
    #[arg(long, value_name = "N")]
    pub max_log_lines: Option<u32>,

    /// Maximum number of bytes of console output per second; the VMM counts the bytes that it omits. 0:
    /// no limit [default: 4M]
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    #[serde(deserialize_with = "bytes")]
    pub max_console: Option<u64>,
}

/// The limits of a machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// The PMU's limits.
    pub device: vpmu::Limits,
    /// Whether the user gave the limit on host counters. If so, and the host allows fewer, the configuration is
    /// refused.
    pub host_counters_asked: bool,
    /// Maximum number of bytes that one recording copies from rings in guest memory.
    pub guest_recording: u64,
    /// Bytes of recordings per minute.
    pub recordings: u64,
    /// Resets per minute.
    pub resets: u32,
    /// Log lines per second. Zero means unlimited.
    pub log_lines: u32,
    /// Bytes of console output per second. Zero means unlimited.
    pub console: u64,
}

/// An invalid limit.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum LimitError {
    /// A limit of zero.
    #[error("{0} 0: must be 1 or more")]
    Zero(&'static str),
    /// A percentage above 100.
    #[error("{flag} {given}: must be 1 to 100")]
    Percent {
        /// The flag.
        flag: &'static str,
        /// The given value.
        given: u32,
    },
    /// A number of pages that is not a power of two.
    #[error("{flag} {given}: must be a power of two")]
    PowerOfTwo {
        /// The flag.
        flag: &'static str,
        /// The given value.
        given: u32,
    },
    /// The guest's share of the window exceeds the window, or is not a whole number of pages.
    #[error(
        "--guest-window of {guest} bytes: must be a multiple of 4K, at most the {window} bytes of the \
         window"
    )]
    GuestWindow {
        /// The guest's share.
        guest: u64,
        /// The window.
        window: u64,
    },
}

/// Deserializes a size from a string, in the same format as in flags.
///
/// # Errors
/// The text is not a size.
pub(crate) fn bytes<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u64>, D::Error> {
    let text = String::deserialize(from)?;
    parse_bytes(&text).map(Some).map_err(serde::de::Error::custom)
}

impl LimitArgs {
    /// Returns these limits, with missing limits taken from `file`.
    #[must_use]
    pub fn over(self, file: Self) -> Self {
        Self {
            max_events: self.max_events.or(file.max_events),
            max_persistent: self.max_persistent.or(file.max_persistent),
            max_host_counters: self.max_host_counters.or(file.max_host_counters),
            max_active_counters: self.max_active_counters.or(file.max_active_counters),
            max_sample_rate: self.max_sample_rate.or(file.max_sample_rate),
            max_samples: self.max_samples.or(file.max_samples),
            max_record_bytes: self.max_record_bytes.or(file.max_record_bytes),
            max_sampling_percent: self.max_sampling_percent.or(file.max_sampling_percent),
            min_hardware_period: self.min_hardware_period.or(file.min_hardware_period),
            max_ring_pages: self.max_ring_pages.or(file.max_ring_pages),
            max_aux_pages: self.max_aux_pages.or(file.max_aux_pages),
            max_pages: self.max_pages.or(file.max_pages),
            guest_window: self.guest_window.or(file.guest_window),
            max_guest_recording: self.max_guest_recording.or(file.max_guest_recording),
            max_recordings: self.max_recordings.or(file.max_recordings),
            max_resets: self.max_resets.or(file.max_resets),
            max_log_lines: self.max_log_lines.or(file.max_log_lines),
            max_console: self.max_console.or(file.max_console),
        }
    }

    /// The limits of a machine with a window of `window` bytes.
    ///
    /// # Errors
    /// [`LimitError`] for the first invalid limit.
    pub fn limits(&self, window: u64) -> Result<Limits, LimitError> {
        let usual = vpmu::Limits::default();
        let guest_window = self.guest_window.unwrap_or(window / 4 * 3 / PAGE * PAGE);
        if !guest_window.is_multiple_of(PAGE) || guest_window > window {
            return Err(LimitError::GuestWindow { guest: guest_window, window });
        }
        let max_aux_pages = self.max_aux_pages.unwrap_or(usual.max_aux_pages);
        // Leave room for two AUX areas of the largest allowed size.
        let max_pages = usual.max_pages.max(max_aux_pages.saturating_mul(2));
        let device = vpmu::Limits::default().with(|limits| {
            limits.max_events = self.max_events.unwrap_or(usual.max_events);
            limits.max_persistent = self.max_persistent.unwrap_or(usual.max_persistent);
            limits.max_host_counters = self.max_host_counters.unwrap_or(usual.max_host_counters);
            limits.max_active_counters = self.max_active_counters.unwrap_or(usual.max_active_counters);
            limits.max_sample_rate = self.max_sample_rate.unwrap_or(usual.max_sample_rate);
            limits.max_samples = self.max_samples.unwrap_or(usual.max_samples);
            limits.max_record_bytes = self.max_record_bytes.unwrap_or(usual.max_record_bytes);
            limits.max_sampling_percent = self.max_sampling_percent.unwrap_or(usual.max_sampling_percent);
            limits.min_hardware_period = self.min_hardware_period.unwrap_or(usual.min_hardware_period);
            limits.max_ring_pages = self.max_ring_pages.unwrap_or(usual.max_ring_pages);
            limits.max_aux_pages = max_aux_pages;
            limits.max_pages = self.max_pages.unwrap_or(max_pages);
            limits.max_window_pages = u32::try_from(guest_window / PAGE).unwrap_or(u32::MAX);
        });
        device.check().map_err(|error| match error {
            vpmu::LimitsError::PowerOfTwo { limit, given } => LimitError::PowerOfTwo { flag: flag(limit), given },
            vpmu::LimitsError::Zero(limit) => LimitError::Zero(flag(limit)),
            vpmu::LimitsError::Percent { limit, given } => LimitError::Percent { flag: flag(limit), given },
        })?;
        let resets = self.max_resets.unwrap_or(DEFAULT_RESETS);
        if resets == 0 {
            return Err(LimitError::Zero("--max-resets"));
        }
        Ok(Limits {
            device,
            host_counters_asked: self.max_host_counters.is_some(),
            guest_recording: self.max_guest_recording.unwrap_or(DEFAULT_GUEST_RECORDING),
            recordings: self.max_recordings.unwrap_or(DEFAULT_RECORDINGS),
            resets,
            log_lines: self.max_log_lines.unwrap_or(logger::DEFAULT_LINES),
            console: self.max_console.unwrap_or(DEFAULT_CONSOLE),
        })
    }
}

const DEFAULT_GUEST_RECORDING: u64 = 4 << 20;
const DEFAULT_RECORDINGS: u64 = 64 << 20;
const DEFAULT_RESETS: u32 = 30;
const DEFAULT_CONSOLE: u64 = 4 << 20;

/// The flag of a device limit.
fn flag(limit: &'static str) -> &'static str {
    match limit {
        "max_ring_pages" => "--max-ring-pages",
        "max_aux_pages" => "--max-aux-pages",
        "max_active_counters" => "--max-active-counters",
        "max_pages" => "--max-pages",
        "max_sample_rate" => "--max-sample-rate",
        "max_samples" => "--max-samples",
        "max_record_bytes" => "--max-record-bytes",
        "max_sampling_percent" => "--max-sampling-percent",
        "min_hardware_period" => "--min-hardware-period",
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WINDOW: u64 = 16 << 20;

    #[test]
    fn without_flags_each_limit_has_its_default() {
        let limits = LimitArgs::default().limits(WINDOW).expect("limits");
        let device = vpmu::Limits::default().with(|limits| limits.max_window_pages = 3072);
        assert_eq!(limits.device, device);
        assert!(!limits.host_counters_asked);
        assert_eq!((limits.resets, limits.log_lines), (30, 20));
        assert_eq!((limits.console, limits.guest_recording), (4 << 20, 4 << 20));
    }

    #[test]
    fn flags_win_over_the_file() {
        let file: LimitArgs =
            serde_json::from_str(r#"{"max-samples": 5, "max-events": 6, "max-console": "64K"}"#).expect("limits");
        let flags = LimitArgs { max_samples: Some(7), ..LimitArgs::default() };
        let limits = flags.over(file).limits(WINDOW).expect("limits");
        assert_eq!((limits.device.max_samples, limits.device.max_events), (7, 6));
        assert_eq!(limits.console, 64 << 10);
        assert!(serde_json::from_str::<LimitArgs>(r#"{"max-simples": 5}"#).is_err());
    }

    #[test]
    fn limit_that_leaves_nothing_names_its_flag() {
        let zero = |args: LimitArgs| args.limits(WINDOW).expect_err("refused").to_string();
        let none = LimitArgs::default();
        for (args, named) in [
            (LimitArgs { max_sample_rate: Some(0), ..none.clone() }, "--max-sample-rate"),
            (LimitArgs { max_samples: Some(0), ..none.clone() }, "--max-samples"),
            (LimitArgs { max_record_bytes: Some(0), ..none.clone() }, "--max-record-bytes"),
            (LimitArgs { max_active_counters: Some(0), ..none.clone() }, "--max-active-counters"),
            (LimitArgs { max_pages: Some(0), ..none.clone() }, "--max-pages"),
            (LimitArgs { min_hardware_period: Some(0), ..none.clone() }, "--min-hardware-period"),
            (LimitArgs { max_sampling_percent: Some(0), ..none.clone() }, "--max-sampling-percent"),
            (LimitArgs { max_sampling_percent: Some(101), ..none.clone() }, "--max-sampling-percent 101"),
            (LimitArgs { max_resets: Some(0), ..none.clone() }, "--max-resets"),
            (LimitArgs { max_aux_pages: Some(3), ..none.clone() }, "--max-aux-pages 3"),
            (LimitArgs { max_ring_pages: Some(3), ..none.clone() }, "--max-ring-pages 3"),
            (LimitArgs { guest_window: Some(WINDOW + 4096), ..none.clone() }, "--guest-window"),
            (LimitArgs { guest_window: Some(100), ..none }, "--guest-window"),
        ] {
            let message = zero(args);
            assert!(message.contains(named), "{message}");
        }
    }

    #[test]
    fn large_areas_make_room_for_themselves() {
        let args = LimitArgs { max_aux_pages: Some(1 << 20), ..LimitArgs::default() };
        let limits = args.limits(0).expect("limits");
        assert_eq!(limits.device.max_pages, 1 << 21);
        assert_eq!(limits.device.max_window_pages, 0);
    }
}
