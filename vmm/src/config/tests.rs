//! Tests of flags, configuration files and defaults, and of values that are refused.

use super::*;
use crate::cli::{Cli, Command};
use crate::policy::PolicyArgs;
use clap::{Args, Parser};
use std::collections::BTreeSet;
use std::io::Write;
use vpmu::abi::{EXIT_IO, KIND_EXITS, KIND_HARDWARE, KIND_TSC};

fn with_file(text: &str, args: RunArgs) -> Result<Config, ConfigError> {
    let mut file = tempfile::NamedTempFile::new().expect("a temporary file");
    file.write_all(text.as_bytes()).expect("written");
    Config::try_from(&RunArgs { config: Some(file.path().to_owned()), ..args })
}

fn kernel() -> RunArgs {
    RunArgs { kernel: Some("vmlinux".into()), ..Default::default() }
}

fn with(device: DeviceArgs) -> RunArgs {
    RunArgs { device, ..kernel() }
}

#[test]
fn kernel_is_the_only_required_setting() {
    let config = Config::try_from(&kernel()).expect("valid");
    assert_eq!(config.kernel.as_deref(), Some(Path::new("vmlinux")));
    assert_eq!((config.vcpus, config.memory_mib), (1, 256));
    assert!(config.vpmu && !config.summary);
    let limits = LimitArgs::default().limits(16 << 20).expect("limits");
    assert_eq!((config.limits, config.window), (limits, 16 << 20));
    assert_eq!(config.engine, Engine::Auto);
    assert_eq!((config.on_reset, config.ctl), (OnReset::Exit, None));
    assert!(matches!(Config::try_from(&RunArgs::default()), Err(ConfigError::NoKernel)));
}

#[test]
fn flags_win_over_the_file() {
    let text = r#"{"kernel": "a", "vcpus": 4, "memory": 64, "vpmu": false, "cmdline": "x",
        "limits": {"max-sample-rate": 500, "max-aux-pages": 8, "max-persistent": 3},
        "engine": "exit", "window": "64K", "on-reset": "restart"}"#;
    let config = with_file(text, RunArgs::default()).expect("valid");
    assert_eq!((config.vcpus, config.memory_mib), (4, 64));
    assert_eq!((config.vpmu, config.cmdline.as_str()), (false, "x"));
    let limits = config.limits.device;
    assert_eq!((limits.max_sample_rate, config.engine), (500, Engine::Exit));
    assert_eq!(limits.max_aux_pages, 8);
    assert_eq!((config.window, limits.max_persistent), (64 << 10, 3));
    assert_eq!(config.on_reset, OnReset::Restart);
    let flags = RunArgs {
        kernel: Some("b".into()),
        vcpus: Some(2),
        engine: Some(Engine::Batched),
        on_reset: Some(OnReset::Exit),
        device: DeviceArgs {
            limits: LimitArgs { max_sample_rate: Some(7), max_aux_pages: Some(16), ..LimitArgs::default() },
            window: Some(0),
            ..DeviceArgs::default()
        },
        ..Default::default()
    };
    let config = with_file(text, flags).expect("valid");
    let limits = config.limits.device;
    assert_eq!((config.window, limits.max_persistent), (0, 3));
    assert_eq!(config.on_reset, OnReset::Exit);
    assert_eq!((limits.max_sample_rate, limits.max_aux_pages), (7, 16));
    let kernel = config.kernel.as_deref();
    assert_eq!((kernel, config.vcpus), (Some(Path::new("b")), 2));
    assert_eq!((config.memory_mib, config.engine), (64, Engine::Batched));
}

#[test]
fn confinement_from_flags_overrides_the_file() {
    let config = Config::try_from(&kernel()).expect("valid");
    assert_eq!((config.confinement.user, config.confinement.chroot, config.confinement.seccomp), (None, None, true));
    let text = r#"{"user": "7:8", "chroot": "/a", "seccomp": false}"#;
    let user = |text: &str| text.parse().ok();
    let config = with_file(text, kernel()).expect("valid");
    assert_eq!((config.confinement.user, config.confinement.seccomp), (user("7:8"), false));
    assert_eq!(config.confinement.chroot.as_deref(), Some(Path::new("/a")));
    let flags =
        || with(DeviceArgs { user: user("1:2"), chroot: Some("/b".into()), no_seccomp: true, ..DeviceArgs::default() });
    let config = with_file(text, flags()).expect("valid");
    assert_eq!(config.confinement.user, user("1:2"));
    assert_eq!(config.confinement.chroot.as_deref(), Some(Path::new("/b")));
    let filtered = with_file(r#"{"seccomp": true}"#, flags()).expect("valid");
    assert!(!filtered.confinement.seccomp, "the flag overrides the file");
    for wrong in [r#"{"user": "nobody"}"#, r#"{"user": 7}"#] {
        let error = with_file(wrong, kernel()).expect_err("no user");
        assert!(matches!(error, ConfigError::Parse { .. }), "{error}");
    }
}

#[test]
fn hardware_events_are_kept_by_the_flag_or_else_by_the_file() {
    let config = Config::try_from(&kernel()).expect("valid");
    assert!(config.hardware.events);
    let without = r#"{"hardware-events": false}"#;
    let config = with_file(without, kernel()).expect("valid");
    assert!(!config.hardware.events);
    let flag = PolicyArgs { no_hardware_events: true, ..PolicyArgs::default() };
    let flag = with(DeviceArgs { policy: flag, ..DeviceArgs::default() });
    let config = with_file(r#"{"hardware-events": true}"#, flag).expect("valid");
    assert!(!config.hardware.events, "the flag overrides the file");
}

#[test]
fn count_mode_is_the_flags_or_else_the_files_or_else_guest() {
    let mode = |config: Result<Config, ConfigError>| config.expect("valid").hardware.count_mode;
    assert_eq!(mode(Config::try_from(&kernel())), vpmu::CountMode::Guest);
    let vcpu = r#"{"count-mode": "vcpu"}"#;
    assert_eq!(mode(with_file(vcpu, kernel())), vpmu::CountMode::Vcpu);
    let flag = with(DeviceArgs { count_mode: Some(CountMode::Guest), ..DeviceArgs::default() });
    assert_eq!(mode(with_file(vcpu, flag)), vpmu::CountMode::Guest);
    let host = with_file(r#"{"count-mode": "host"}"#, kernel());
    assert!(matches!(host, Err(ConfigError::Parse { .. })));
}

#[test]
fn raw_events_are_the_flags_or_else_the_files_or_else_none() {
    let raw = |config: Result<Config, ConfigError>| config.expect("valid").hardware.raw;
    assert_eq!(raw(Config::try_from(&kernel())), vpmu::RawEvents::default());
    let file = r#"{"raw-events": "0x11"}"#;
    assert!(raw(with_file(file, kernel())).allow(0x11));
    let flag = with(DeviceArgs {
        policy: PolicyArgs { raw_events: Some("all".parse().expect("a list")), ..PolicyArgs::default() },
        ..DeviceArgs::default()
    });
    assert_eq!(raw(with_file(file, flag)), vpmu::RawEvents::All);
    let wrong = with_file(r#"{"raw-events": "11"}"#, kernel());
    assert!(matches!(wrong, Err(ConfigError::Parse { .. })));
}

#[test]
fn hardware_is_pinned_by_the_flag_or_else_by_the_file() {
    let pinned = |config: Result<Config, ConfigError>| config.expect("valid").hardware.pinned;
    assert!(!pinned(Config::try_from(&kernel())));
    assert!(pinned(with_file(r#"{"pin-hardware": true}"#, kernel())));
    let flag = with(DeviceArgs { pin_hardware: true, ..DeviceArgs::default() });
    assert!(pinned(with_file(r#"{"pin-hardware": false}"#, flag)), "the flag overrides the file");
}

/// A limit's flag, which is also its key in the file, a value, and what the machine's limits then have.
type Limit = (&'static str, &'static str, fn(&Limits) -> u64, u64);

const LIMITS: [Limit; 18] = [
    ("max-events", "5", |it| it.device.max_events.into(), 5),
    ("max-persistent", "5", |it| it.device.max_persistent.into(), 5),
    ("max-host-counters", "5", |it| it.device.max_host_counters.into(), 5),
    ("max-active-counters", "5", |it| it.device.max_active_counters.into(), 5),
    ("max-sample-rate", "5", |it| it.device.max_sample_rate.into(), 5),
    ("max-samples", "5", |it| it.device.max_samples.into(), 5),
    ("max-record-bytes", "5K", |it| it.device.max_record_bytes, 5 << 10),
    ("max-sampling-percent", "5", |it| it.device.max_sampling_percent.into(), 5),
    ("min-hardware-period", "5", |it| it.device.min_hardware_period, 5),
    ("max-ring-pages", "4", |it| it.device.max_ring_pages.into(), 4),
    ("max-aux-pages", "4", |it| it.device.max_aux_pages.into(), 4),
    ("max-pages", "5", |it| it.device.max_pages.into(), 5),
    ("guest-window", "8K", |it| it.device.max_window_pages.into(), 2),
    ("max-guest-recording", "5K", |it| it.guest_recording, 5 << 10),
    ("max-recordings", "5K", |it| it.recordings, 5 << 10),
    ("max-resets", "5", |it| it.resets.into(), 5),
    ("max-log-lines", "5", |it| it.log_lines.into(), 5),
    ("max-console", "5K", |it| it.console, 5 << 10),
];

#[test]
fn every_limit_comes_from_its_flag_or_its_key() {
    let flags = LimitArgs::augment_args(clap::Command::new("limits"));
    let flags = flags.get_arguments().filter_map(clap::Arg::get_long);
    let named = LIMITS.iter().map(|&(name, ..)| name);
    assert_eq!(named.collect::<BTreeSet<_>>(), flags.collect());
    let usual = Config::try_from(&kernel()).expect("valid").limits;
    for (name, value, get, expected) in LIMITS {
        assert_ne!(get(&usual), expected, "{name}: the default");
        let flag = format!("--{name}");
        let line = ["vmm", "run", "--kernel", "vmlinux", &flag, value];
        let Command::Run(args) = Cli::try_parse_from(line).expect("valid").command else {
            panic!("another command");
        };
        let config = Config::try_from(&*args).expect("valid");
        assert_eq!(get(&config.limits), expected, "{name}: the flag alone");
        // Sizes are strings, numbers are numbers.
        let value = match value.parse::<u32>() {
            Ok(_) => value.to_owned(),
            Err(_) => format!("\"{value}\""),
        };
        let text = format!(r#"{{"limits": {{"{name}": {value}}}}}"#);
        let config = with_file(&text, kernel()).expect("valid");
        assert_eq!(get(&config.limits), expected, "{name}: the key alone");
    }
}

#[test]
fn persistent_events_come_from_flags_or_else_from_the_file() {
    let text = r#"{"persistent": ["marks", "exits-io,cpu=0"], "recording": "a", "symbols": "b", "vmlinux": "c"}"#;
    let config = with_file(text, kernel()).expect("valid");
    assert_eq!(config.persistent.len(), 2);
    assert_eq!(config.recording.as_deref(), Some(Path::new("a")));
    assert_eq!(config.symbols.as_deref(), Some(Path::new("b")));
    assert_eq!(config.vmlinux.as_deref(), Some(Path::new("c")));
    let flags = || {
        with(DeviceArgs {
            persistent: vec!["tsc".parse().expect("an event")],
            recording: Some("c".into()),
            ..DeviceArgs::default()
        })
    };
    let config = with_file(text, flags()).expect("valid");
    assert_eq!(config.persistent, flags().device.persistent);
    assert_eq!(config.recording.as_deref(), Some(Path::new("c")));
    let config = Config::try_from(&kernel()).expect("valid");
    assert!(config.persistent.is_empty());
    assert!(config.recording.is_none() && config.symbols.is_none() && config.vmlinux.is_none());
    let without = RunArgs { no_vpmu: true, ..flags() };
    assert!(matches!(Config::try_from(&without), Err(ConfigError::PersistentWithoutVpmu)));
    let wrong = with_file(r#"{"persistent": ["marks,size=1"]}"#, kernel());
    assert!(matches!(wrong, Err(ConfigError::Parse { .. })));
}

#[test]
fn file_with_mistakes_is_refused() {
    for text in [
        "",
        "{",
        r#"{"kernal": "a"}"#,
        r#"{"vcpus": -1}"#,
        r#"{"engine": "fast"}"#,
        r#"{"window": 65536}"#,
        r#"{"window": "64G"}"#,
        r#"{"on-reset": "again"}"#,
    ] {
        let result = with_file(text, kernel());
        assert!(matches!(result, Err(ConfigError::Parse { .. })), "{text}");
    }
    let missing = RunArgs { config: Some("/nonexistent/vm.json".into()), ..kernel() };
    assert!(matches!(Config::try_from(&missing), Err(ConfigError::Read { .. })));
}

#[test]
fn machines_out_of_bounds_are_refused() {
    for count in [0, 255, 256, u32::MAX] {
        let args = RunArgs { vcpus: Some(count), ..kernel() };
        assert!(matches!(Config::try_from(&args), Err(ConfigError::Vcpus(n)) if n == count));
    }
    let args = LimitArgs { max_sample_rate: Some(0), ..LimitArgs::default() };
    let args = with(DeviceArgs { limits: args, ..DeviceArgs::default() });
    assert!(matches!(Config::try_from(&args), Err(ConfigError::Limits(LimitError::Zero(_)))));
    for mib in [0, 3, u64::MAX] {
        let args = RunArgs { memory: Some(mib), ..kernel() };
        assert!(matches!(Config::try_from(&args), Err(ConfigError::Memory(n)) if n == mib));
    }
}

#[test]
fn policy_from_flags_overrides_the_file() {
    let text = r#"{"pmu": "clocks", "allow-events": ["cycles"], "deny-events": ["exits-*"]}"#;
    let config = with_file(text, kernel()).expect("valid");
    assert_eq!(config.policy.tier, Some(Tier::Clocks));
    let allows = |config: &Config, kind, number| config.policy.policy.allows(kind, number);
    assert!(allows(&config, KIND_HARDWARE, 0) && !allows(&config, KIND_EXITS, EXIT_IO));
    let flags = || {
        with(DeviceArgs {
            policy: PolicyArgs {
                pmu: Some(Tier::Standard),
                deny_events: vec!["tsc".parse().expect("an event")],
                ..PolicyArgs::default()
            },
            ..DeviceArgs::default()
        })
    };
    let config = with_file(text, flags()).expect("valid");
    assert_eq!(config.policy.tier, Some(Tier::Standard));
    assert!(allows(&config, KIND_EXITS, EXIT_IO) && !allows(&config, KIND_TSC, 0));
    let off = with_file(r#"{"pmu": "off"}"#, kernel()).expect("valid");
    assert!(!off.vpmu);
    let flag = with_file(r#"{"vpmu": false}"#, flags()).expect("the flag overrides the file");
    assert!(flag.vpmu);
    for wrong in [r#"{"allow-events": ["cycels"]}"#, r#"{"pmu": "all"}"#] {
        let error = with_file(wrong, kernel()).expect_err("not valid");
        assert!(matches!(error, ConfigError::Parse { .. }), "{error}");
    }
}

#[test]
fn handlers_are_traced_by_the_flag_or_else_by_the_file() {
    let traced = |config: Result<Config, ConfigError>| config.expect("valid").trace_handlers;
    assert!(!traced(Config::try_from(&kernel())));
    assert!(traced(with_file(r#"{"trace-handlers": true}"#, kernel())));
    let flag = RunArgs { trace_handlers: true, ..kernel() };
    assert!(traced(with_file(r#"{"trace-handlers": false}"#, flag)), "the flag overrides the file");
}
