//! Checks that the ABI definitions in Rust, in C, in the specification and in Linux's perf header agree, field by
//! field. For C and Linux, a C compiler checks a static assertion for each field and constant.
#![expect(clippy::expect_used, reason = "tests fail by panicking")]

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::mem::offset_of;
use std::process::{Command as Process, Stdio};

use vpmu::abi::*;

const RUST: [&str; 11] = [
    include_str!("../abi/src/lib.rs"),
    include_str!("../abi/src/catalogue.rs"),
    include_str!("../abi/src/command.rs"),
    include_str!("../abi/src/config.rs"),
    include_str!("../abi/src/control.rs"),
    include_str!("../abi/src/metadata.rs"),
    include_str!("../abi/src/notice.rs"),
    include_str!("../abi/src/open.rs"),
    include_str!("../abi/src/packet.rs"),
    include_str!("../abi/src/persistent.rs"),
    include_str!("../abi/src/task.rs"),
];
/// The driver's ioctls, in the order of `vpmu_uapi.h`.
const CALLS: &str = include_str!("../abi/src/uapi.rs");
const HEADERS: [&str; 2] =
    [include_str!("../../guest-driver/linux/vpmu_abi.h"), include_str!("../../guest-driver/linux/vpmu_uapi.h")];

const SPECIFICATION: &str = include_str!("../SPEC.md");

/// The layout of a Rust struct, and the struct's name in C.
struct Layout {
    rust: &'static str,
    c: &'static str,
    size: usize,
    fields: Vec<(&'static str, usize)>,
}

macro_rules! layouts {
    ($($rust:ident = $c:literal { $($field:ident),* $(,)? })*) => {
        vec![$(Layout {
            rust: stringify!($rust),
            c: $c,
            size: size_of::<$rust>(),
            fields: vec![$((stringify!($field), offset_of!($rust, $field))),*],
        }),*]
    };
}

macro_rules! constants {
    ($($name:ident),* $(,)?) => {
        vec![$((stringify!($name), i128::try_from($name).expect("an integer"))),*]
    };
}

fn layouts() -> Vec<Layout> {
    layouts! {
        Config = "vpmu_config" {
            version, vcpus, max_events, max_ring_pages, catalogue_len, count_mode, time_zero,
            time_mult, time_shift, refused_hardware, refused_software, tsc_khz, max_sample_rate, max_aux_pages,
            max_persistent, features,
        }
        ControlHeader = "vpmu_control_header" { op, reserved, event }
        ControlReply = "vpmu_control_reply" { status, value }
        OpenRequest = "vpmu_open_request" {
            header, kind, context, config, period, sample_type, flags, wakeup, engine, max_stack,
            parent, leader, read_format, regs_user, regs_intr, stack_user,
            aux_watermark,
        }
        OpenReply = "vpmu_open_reply" { status, engine, id }
        MapRequest = "vpmu_map_request" { header, pages, flags }
        RedirectRequest = "vpmu_redirect_request" { header, target }
        PauseRequest = "vpmu_pause_request" { header, paused, reserved }
        LinkRequest = "vpmu_link_request" { header, target, role, reserved }
        WakeupRequest = "vpmu_wakeup_request" { header, every, unit, reserved }
        SignalRequest = "vpmu_signal_request" { header, own, reserved }
        FeaturesRequest = "vpmu_features_request" { header, features }
        DetachRequest = "vpmu_detach_request" { header, name }
        PersistentRequest = "vpmu_persistent_request" { header, after, count, reserved }
        PersistentEvent = "vpmu_persistent_event" {
            id, open, pages, map, window_page, flags, name,
        }
        CatalogueRequest = "vpmu_catalogue_request" { header, first, count }
        CatalogueEntry = "vpmu_catalogue_entry" {
            kind, flags, config, name, unit, source, counts,
        }
        TaskPageRequest = "vpmu_task_page_request" { header, vcpu, reserved, address }
        TaskPage = "vpmu_task_page" { pid, tid, user_regs, switches, reserved, history }
        TaskSwitch = "vpmu_task_switch" { pid, tid, since }
        Command = "vpmu_command" { op, reserved, event, value, room }
        Reply = "vpmu_reply" { status, state, value, time_enabled, time_running, lost }
        Notice = "vpmu_notice" { kind, value, event }
        SyncPacket = "vpmu_sync_packet" {
            kind, flags, format, vcpu, magic, event, time, tsc, sequence, lost, config,
        }
        ExitPacket = "vpmu_exit_packet" {
            kind, flags, reason, vcpu, time, ip, outside, qualification, detail, pid, tid, sequence,
        }
        SamplePacket = "vpmu_sample_packet" {
            kind, flags, reserved, vcpu, time, ip, period, pid, tid, sequence, reserved_1, regs,
        }
        Metadata = "perf_event_mmap_page" {
            version, compat_version, lock, index, offset, time_enabled, time_running,
            capabilities, pmc_width, time_shift, time_mult, time_offset, time_zero, size,
            reserved_1, time_cycles, time_mask, reserved, data_head, data_tail, data_offset,
            data_size, aux_head, aux_tail, aux_offset, aux_size,
        }
    }
}

/// The arguments of the driver's ioctls, which are not in the specification.
fn call_layouts() -> Vec<Layout> {
    use vpmu::abi::uapi::*;
    layouts! {
        Info = "vpmu_info" {
            version, vcpus, max_events, max_ring_pages, catalogue_len, count_mode, time_zero,
            time_mult, time_shift, pmu_type, tsc_khz, max_sample_rate, max_aux_pages,
            max_persistent, persistent_type,
        }
        EventState = "vpmu_event_state" { id, engine, reserved }
        Detach = "vpmu_detach" { id, name }
        Persistent = "vpmu_persistent" { after, count, reserved, entries }
        PersistentEntry = "vpmu_persistent_entry" { id, name, cpu, pages, engine, flags, attr }
        Wakeup = "vpmu_wakeup" { every, unit, reserved }
        Perf = "vpmu_perf" { fd, call, arg }
        Catalogue = "vpmu_catalogue" { first, count, entries }
        CatalogueEntry = "vpmu_catalogue_entry" { kind, flags, config, name, unit, source, counts }
    }
}

fn call_constants() -> Vec<(&'static str, i128)> {
    use vpmu::abi::uapi::*;
    constants![
        ATTR_SIZE,
        PERSISTENT_WINDOW,
        PERSISTENT_OVERWRITE,
        CONFIG_KIND_SHIFT,
        CONFIG1_ENABLE_ON_STARTER,
        CONFIG1_ENGINE_SHIFT,
        CONFIG1_ENGINE,
        CONFIG1_RING,
        CONFIG1_PERSISTENT,
        CONFIG1_AUX_START_PAUSED,
        CONFIG1_AUX_PAUSE,
        CONFIG1_AUX_RESUME,
        IOC_MAGIC,
        IOC_INFO,
        IOC_RING,
        IOC_CATALOGUE,
        IOC_MARK,
        IOC_EVENT,
        IOC_PERSISTENT,
        IOC_FLUSH,
        IOC_DETACH,
        IOC_ATTACH,
        IOC_SET_STARTER,
        IOC_SET_STOPPER,
        IOC_PERF,
        IOC_WAKEUP,
    ]
}

fn constants() -> Vec<(&'static str, i128)> {
    constants![
        DEVICE_ID,
        PAGE_SIZE,
        VERSION,
        F_RING,
        F_TASK_PAGE,
        F_DOORBELL,
        F_AUX,
        F_WINDOW,
        F_PERSISTENT,
        F_LINKS,
        F_FLUSH,
        F_END,
        QUEUE_CONTROL,
        QUEUE_EVENT,
        QUEUE_VCPU,
        SHM_DOORBELL,
        SHM_WINDOW,
        COUNT_GUEST,
        COUNT_VCPU,
        KIND_HARDWARE,
        KIND_SOFTWARE,
        KIND_HW_CACHE,
        KIND_RAW,
        KIND_TSC,
        KIND_EXITS,
        KIND_HALTS,
        KIND_GUEST_TIME,
        KIND_MARK,
        MARK_ANY,
        KIND_EXIT_TRACE,
        KIND_SAMPLE_TRACE,
        KIND_HOST_TRACE,
        KIND_VMM_TRACE,
        PACE_CPU_CLOCK,
        PACE_EXITS,
        PACE_CYCLES,
        PACE_INSTRUCTIONS,
        EXIT_ALL,
        EXIT_USER,
        EXIT_IO,
        EXIT_MMIO,
        EXIT_HLT,
        EXIT_SIGNAL,
        EXIT_OTHER,
        CONTROL_OPEN,
        CONTROL_CLOSE,
        CONTROL_MAP,
        CONTROL_UNMAP,
        CONTROL_CATALOGUE,
        CONTROL_TASK_PAGE,
        CONTROL_REDIRECT,
        CONTROL_PAUSE,
        CONTROL_MAP_AUX,
        CONTROL_UNMAP_AUX,
        CONTROL_DETACH,
        CONTROL_ATTACH,
        CONTROL_PERSISTENT,
        CONTROL_LINK,
        CONTROL_WAKEUP,
        CONTROL_FEATURES,
        CONTROL_SIGNAL,
        WAKEUP_RECORDS,
        WAKEUP_BYTES,
        TASK_HISTORY,
        CONTEXT_TASK,
        OPEN_ENABLED,
        OPEN_EXCLUDE_USER,
        OPEN_EXCLUDE_KERNEL,
        OPEN_WATERMARK,
        OPEN_FREQ,
        OPEN_SAMPLE_ID_ALL,
        OPEN_BACKWARD,
        OPEN_PINNED,
        OPEN_INHERIT_STAT,
        OPEN_EXCLUDE_CHAIN_KERNEL,
        OPEN_EXCLUDE_CHAIN_USER,
        OPEN_AUX_START_PAUSED,
        OPEN_AUX_PAUSE,
        OPEN_AUX_RESUME,
        OPEN_PAUSED,
        OPEN_PERSISTENT,
        OPEN_EXCLUDE_HOST,
        SAMPLE_ALLOWED,
        READ_ALLOWED,
        DEFAULT_STACK,
        MAX_STACK,
        ENGINE_ANY,
        ENGINE_EXIT,
        ENGINE_BATCHED,
        MAP_WRITABLE,
        MAP_DRIVER_OWNED,
        MAP_WINDOW,
        LINK_STARTER,
        LINK_STOPPER,
        PERSISTENT_NAME,
        PERSISTENT_OPERATOR,
        CATALOGUE_SAMPLES,
        CATALOGUE_GUEST_ONLY,
        CATALOGUE_ANY_CONFIG,
        CATALOGUE_EXCLUDES,
        CATALOGUE_AUX,
        CATALOGUE_FORMAT_SHIFT,
        PACKET_ALIGN,
        FORMAT_EXITS,
        FORMAT_SAMPLES,
        FORMAT_VMM,
        PACKET_PADDING,
        PACKET_EXIT,
        PACKET_SAMPLE,
        PACKET_SYNC,
        SYNC_MAGIC,
        SYNC_START,
        SYNC_LOSS,
        SYNC_RESUME,
        SYNC_PAGE,
        PACKET_USER,
        PACKET_IP,
        PACKET_CUT,
        PACKET_HARDWARE,
        PACKET_REGS,
        PACKET_COLLISION,
        DETAIL_WRITE,
        DETAIL_COUNT_SHIFT,
        COMMAND_VCPU,
        COMMAND_ENABLE,
        COMMAND_DISABLE,
        COMMAND_IN,
        COMMAND_OUT,
        COMMAND_READ,
        COMMAND_RESET,
        COMMAND_PERIOD,
        COMMAND_REFRESH,
        COMMAND_AUX_BEGIN,
        COMMAND_AUX_END,
        COMMAND_FLUSH,
        COMMAND_PROMPT,
        STATE_ERROR,
        STATE_OFF,
        STATE_INACTIVE,
        STATE_ACTIVE,
        REFUSED_NOT,
        REFUSED_IN_USE,
        REFUSED_PERMISSION,
        REFUSED_DESCRIPTORS,
        REFUSED_ABSENT,
        REFUSED_POLICY,
        REFUSED_OTHER,
        REFUSED_SEVERAL_PMUS,
        REFUSED_MEDIATED,
        NOTICE_WAKEUP,
        NOTICE_ERROR,
        NOTICE_LIMIT,
        NOTICE_AUX,
        NOTICE_PERSISTENT,
        NOTICE_COUNT,
    ]
}

/// The kernel's name for a field of the metadata page.
fn kernels_name(field: &str) -> &str {
    match field {
        "reserved_1" => "__reserved_1",
        "reserved" => "__reserved",
        other => other,
    }
}

const SAMPLE_FIELDS: [&str; 14] = [
    "IP",
    "TID",
    "TIME",
    "ADDR",
    "READ",
    "CALLCHAIN",
    "ID",
    "CPU",
    "PERIOD",
    "STREAM_ID",
    "REGS_USER",
    "STACK_USER",
    "IDENTIFIER",
    "REGS_INTR",
];
const READ_FIELDS: [&str; 5] = ["TOTAL_TIME_ENABLED", "TOTAL_TIME_RUNNING", "ID", "GROUP", "LOST"];

/// Returns a C expression that combines all bits in `names` with `|`.
fn any_of(prefix: &str, names: &[&str]) -> String {
    let bits: Vec<_> = names.iter().map(|name| format!("{prefix}{name}")).collect();
    format!("({})", bits.join(" | "))
}

/// Returns a C program that compiles only if the sizes, offsets and values in C and Linux equal those in Rust.
fn program() -> String {
    let mut program = String::from("#include <stddef.h>\n#include <linux/perf_event.h>\n#include \"vpmu_abi.h\"\n");
    let mut claim = |what: String, value: i128| {
        program += &format!("_Static_assert({what} == {value}, \"{what} is not {value}\");\n");
    };
    for layout in layouts().into_iter().chain(call_layouts()) {
        let c = layout.c;
        let size = i128::try_from(layout.size).expect("a size");
        if c == "perf_event_mmap_page" {
            // Compare the end of `aux_size` instead of the size of the kernel's structure. Fields that a kernel appends
            // after `aux_size` then do not matter.
            claim(format!("offsetof(struct {c}, aux_size) + 8"), size);
        } else {
            claim(format!("sizeof(struct {c})"), size);
        }
        for (field, offset) in layout.fields {
            let field = if c == "perf_event_mmap_page" { kernels_name(field) } else { field };
            let offset = i128::try_from(offset).expect("an offset");
            claim(format!("offsetof(struct {c}, {field})"), offset);
        }
    }
    for (name, value) in constants().into_iter().chain(call_constants()) {
        claim(format!("VPMU_{name}"), value);
    }
    claim(any_of("PERF_SAMPLE_", &SAMPLE_FIELDS), SAMPLE_ALLOWED.into());
    claim(any_of("PERF_FORMAT_", &READ_FIELDS), READ_ALLOWED.into());
    claim("PERF_RECORD_LOST".to_owned(), 2);
    claim("PERF_RECORD_SAMPLE".to_owned(), 9);
    claim("PERF_RECORD_MISC_KERNEL".to_owned(), 1);
    claim("PERF_RECORD_MISC_USER".to_owned(), 2);
    claim("sizeof(struct perf_event_header)".to_owned(), 8);
    claim("offsetof(struct perf_event_header, misc)".to_owned(), 4);
    claim("offsetof(struct perf_event_header, size)".to_owned(), 6);
    claim("PERF_TYPE_SOFTWARE".to_owned(), KIND_SOFTWARE.into());
    claim("PERF_TYPE_HW_CACHE".to_owned(), KIND_HW_CACHE.into());
    claim("PERF_TYPE_RAW".to_owned(), KIND_RAW.into());
    program
}

/// Compiles `program`; returns the compiler's errors.
fn compile(program: &str) -> Result<(), String> {
    let driver = concat!(env!("CARGO_MANIFEST_DIR"), "/../guest-driver/linux");
    let mut compiler = Process::new("cc")
        .args(["-std=gnu11", "-Wall", "-Werror", "-fsyntax-only", "-I", driver, "-x", "c", "-"])
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("a C compiler named cc: apt install gcc libc6-dev linux-libc-dev");
    let mut input = compiler.stdin.take().expect("a pipe");
    input.write_all(program.as_bytes()).expect("cc reads the whole program");
    drop(input);
    let output = compiler.wait_with_output().expect("cc ends");
    if output.status.success() {
        return Ok(());
    }
    Err(String::from_utf8_lossy(&output.stderr).into_owned())
}

/// The size of a struct in the specification, and the struct's fields with their offsets.
type Written = (usize, Vec<(String, usize)>);

/// Returns the layouts of the structs in the specification, which have no padding.
fn written_layouts() -> BTreeMap<String, Written> {
    let mut structs: BTreeMap<String, Written> = BTreeMap::new();
    let blocks = SPECIFICATION.split("```c\n").skip(1);
    let code = blocks.map(|block| block.split_once("```").expect("an end").0);
    for text in code.flat_map(|code| code.split("};")) {
        let Some((head, body)) = text.split_once('{') else {
            continue;
        };
        let name = head.trim().strip_prefix("struct ").expect("a struct");
        let layout = written_layout(name.trim(), body, &structs);
        let before = structs.insert(name.trim().to_owned(), layout);
        assert_eq!(before, None, "an earlier definition of {name}");
    }
    structs
}

fn written_layout(name: &str, body: &str, structs: &BTreeMap<String, Written>) -> Written {
    let mut offset = 0;
    let mut fields = Vec::new();
    for line in body.split(';').map(str::trim).filter(|line| !line.is_empty()) {
        let (of, field) = line.rsplit_once(' ').expect("a type and a name");
        let (field, count) = match field.split_once('[') {
            Some((field, count)) => {
                let count = count.trim_end_matches(']').parse().expect("a number");
                (field, count)
            }
            None => (field, 1),
        };
        let (size, aligned) = match of {
            "u8" => (1, 1),
            "le16" => (2, 2),
            "le32" | "le32s" => (4, 4),
            "le64" => (8, 8),
            other => {
                let of = other.strip_prefix("struct ").expect("a struct");
                (structs.get(of).expect("shown before").0, 8)
            }
        };
        assert_eq!(offset % aligned, 0, "padding before {name}.{field}");
        fields.push((field.to_owned(), offset));
        offset += size * count;
    }
    (offset, fields)
}

/// Returns the names and values from each table row that starts with a name in capitals.
fn written_constants() -> Vec<(String, i128)> {
    let rows = SPECIFICATION.lines().filter_map(|line| {
        let mut cells = line.strip_prefix("| `")?.split(" | ");
        let name = cells.next()?.trim_end_matches('`');
        let is_name = |byte: u8| byte.is_ascii_uppercase() || byte.is_ascii_digit() || byte == b'_';
        if !name.bytes().all(is_name) {
            return None;
        }
        let value = cells.next()?.trim_end_matches('|').trim();
        let value = match value.strip_prefix("0x") {
            Some(digits) => i128::from_str_radix(digits, 16),
            None => value.parse(),
        };
        value.ok().map(|value| (name.to_owned(), value))
    });
    rows.collect()
}

#[test]
fn specification_has_every_layout_and_no_other() {
    let expected: BTreeMap<_, _> = layouts()
        .into_iter()
        .map(|layout| {
            let name = match layout.c {
                "perf_event_mmap_page" => "virtio_pmu_metadata".to_owned(),
                c => c.replacen("vpmu_", "virtio_pmu_", 1),
            };
            let fields = layout.fields.into_iter();
            let fields = fields.map(|(field, offset)| (field.to_owned(), offset));
            (name, (layout.size, fields.collect::<Vec<_>>()))
        })
        .collect();
    let written = written_layouts();
    for (name, layout) in &expected {
        assert_eq!(written.get(name), Some(layout), "{name}");
    }
    assert_eq!(written.len(), expected.len());
}

#[test]
fn specification_has_every_constant_with_its_value() {
    let written = written_constants();
    let own = |name: &str| !name.starts_with("PERF_") && !STATUS_CODES.contains(&name);
    let written: BTreeSet<(&str, i128)> =
        written.iter().map(|(name, value)| (name.as_str(), *value)).filter(|(name, _)| own(name)).collect();
    let expected: BTreeSet<(&str, i128)> = constants().into_iter().collect();
    let missing: Vec<_> = expected.difference(&written).collect();
    let wrong: Vec<_> = written.difference(&expected).collect();
    assert_eq!((missing, wrong), (Vec::new(), Vec::new()));
}

#[test]
fn specification_has_perfs_values() {
    let written = written_constants();
    let perfs: Vec<_> = written.into_iter().filter(|(name, _)| name.starts_with("PERF_")).collect();
    assert!(perfs.len() > 50, "only {} constants of perf", perfs.len());
    let mut program = String::from("#include <linux/perf_event.h>\n");
    for (name, value) in perfs {
        let value = u64::try_from(value).expect("positive");
        program += &format!("_Static_assert({name} == {value}ULL, \"{name} is not {value}\");\n");
    }
    compile(&program).expect("every value equals the value in Linux");
}

#[test]
fn specification_has_every_sample_field_and_format() {
    let written = written_constants();
    let bits = |prefix: &str| {
        let named = written.iter().filter(|(name, _)| name.starts_with(prefix));
        named.fold(0, |all, (_, value)| all | value)
    };
    assert_eq!(bits("PERF_SAMPLE_"), SAMPLE_ALLOWED.into());
    assert_eq!(bits("PERF_FORMAT_"), READ_ALLOWED.into());
}

/// Constants of the specification that are not in the ABI crate; `tests/device/errors.rs` compares them.
const STATUS_CODES: [&str; 16] = [
    "EPERM",
    "ENOENT",
    "EIO",
    "ENXIO",
    "E2BIG",
    "EACCES",
    "EBUSY",
    "EEXIST",
    "EXDEV",
    "ENODEV",
    "EINVAL",
    "ENFILE",
    "EMFILE",
    "ENOSPC",
    "EOVERFLOW",
    "EOPNOTSUPP",
];

#[test]
fn rust_c_and_linux_agree() {
    compile(&program()).expect("every size, offset and value is the same");
}

#[test]
fn wrong_offset_is_detected() {
    let wrong =
        program().replace("offsetof(struct vpmu_reply, value) == 8", "offsetof(struct vpmu_reply, value) == 16");
    let complaint = compile(&wrong).expect_err("the wrong offset is refused");
    assert!(complaint.contains("vpmu_reply"), "the compiler does not name vpmu_reply: {complaint}");
}

/// Returns `struct.field` for each field of each struct that `files` declare with a macro.
fn declared_fields(files: &[&str]) -> BTreeSet<String> {
    let mut declared = BTreeSet::new();
    let mut current = "";
    for line in files.iter().flat_map(|file| file.lines()) {
        if let Some(rest) = line.strip_prefix("    pub struct ") {
            current = rest.trim_end_matches(" {");
        } else if let Some(rest) = line.strip_prefix("        pub ")
            && !rest.starts_with("struct ")
        {
            let field = rest.split(':').next().expect("a field");
            declared.insert(format!("{current}.{field}"));
        }
    }
    declared
}

fn compared_fields(layouts: &[Layout]) -> BTreeSet<String> {
    let fields = layouts.iter().flat_map(|layout| {
        let fields = layout.fields.iter();
        fields.map(|(field, _)| format!("{}.{field}", layout.rust))
    });
    fields.collect()
}

#[test]
fn every_field_is_compared() {
    assert_eq!(declared_fields(&RUST), compared_fields(&layouts()));
    assert_eq!(declared_fields(&[CALLS]), compared_fields(&call_layouts()));
}

/// Names of the public constants in `files`.
fn declared_constants(files: &[&str]) -> BTreeSet<String> {
    let lines = files.iter().flat_map(|file| file.lines());
    let constants = lines.filter_map(|line| line.strip_prefix("pub const "));
    constants.map(|rest| rest.split(':').next().expect("a name").to_owned()).collect()
}

#[test]
fn every_constant_is_compared() {
    let names = |constants: Vec<(&str, i128)>| -> BTreeSet<String> {
        constants.iter().map(|(name, _)| (*name).to_owned()).collect()
    };
    let (wire, calls) = (names(constants()), names(call_constants()));
    assert_eq!(declared_constants(&RUST), wire);
    assert_eq!(declared_constants(&[CALLS]), calls);
    let in_c: BTreeSet<_> = HEADERS
        .iter()
        .flat_map(|header| header.lines())
        .filter_map(|line| line.strip_prefix("#define VPMU_"))
        .filter_map(|rest| rest.split_whitespace().next())
        .filter(|name| !name.contains('('))
        .map(str::to_owned)
        .collect();
    assert_eq!(in_c, &wire | &calls);
}
