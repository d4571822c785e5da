//! Checks that the parts of the tree depend on one another only as permitted.
#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Returns the names of a workspace member's dependencies, except its build and dev dependencies.
fn dependencies(package: &str) -> BTreeSet<String> {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--no-deps", "--offline", "--format-version", "1"])
        .current_dir(root())
        .output()
        .unwrap();
    assert!(output.status.success(), "cargo metadata failed");
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    metadata["packages"]
        .as_array()
        .unwrap()
        .iter()
        .find(|p| p["name"] == package)
        .unwrap_or_else(|| panic!("no package {package} in the workspace"))["dependencies"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|d| d["kind"].is_null())
        .map(|d| d["name"].as_str().unwrap().to_owned())
        .collect()
}

/// Returns the directories of the workspace's members, sorted by name.
fn members() -> Vec<String> {
    let manifest = fs::read_to_string(root().join("Cargo.toml")).unwrap();
    let (_, members) = manifest.split_once("default-members = [").unwrap();
    let (members, _) = members.split_once(']').unwrap();
    let mut members: Vec<String> = members.split(", ").map(|member| member.trim_matches('"').to_owned()).collect();
    members.sort();
    members
}

/// Every `.rs` file below `dir`.
fn sources(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(sources(&path));
        } else if path.extension().is_some_and(|e| e == "rs") {
            found.push(path);
        }
    }
    found
}

/// The code of a file, without comments.
fn code(path: &Path) -> String {
    fs::read_to_string(path)
        .unwrap()
        .lines()
        .filter(|l| !l.trim_start().starts_with("//"))
        .collect::<Vec<_>>()
        .join("\n")
}

#[test]
fn device_depends_on_neither_kvm_nor_event_loop_nor_cli() {
    let found = dependencies("vpmu");
    for forbidden in ["kvm-ioctls", "kvm-bindings", "event-manager", "clap", "vmm"] {
        assert!(!found.contains(forbidden), "vpmu depends on {forbidden}");
    }
}

#[test]
fn kvm_half_of_the_device_depends_on_neither_vmm_nor_event_loop_nor_cli() {
    let found = dependencies("vpmu-kvm");
    for forbidden in ["event-manager", "clap", "vmm", "images", "seccompiler"] {
        assert!(!found.contains(forbidden), "vpmu-kvm depends on {forbidden}");
    }
}

#[test]
fn client_depends_on_no_host_crate() {
    let found = dependencies("vpmu-client");
    for forbidden in ["vpmu", "vmm", "images", "kvm-ioctls"] {
        assert!(!found.contains(forbidden), "vpmu-client depends on {forbidden}");
    }
}

#[test]
fn abi_is_layouts_alone() {
    let found = dependencies("vpmu-abi");
    assert_eq!(found, BTreeSet::from(["zerocopy".to_owned()]));
}

/// Only `vpmu-perf` calls perf, maps events and reads records, both on the host and in the guest. Tests may also call
/// perf directly, to pass arguments that the safe functions of `vpmu-perf` do not accept.
#[test]
fn only_one_crate_calls_perf() {
    let mut members = members();
    members.retain(|member| {
        let manifest = fs::read_to_string(root().join(member).join("Cargo.toml")).unwrap();
        manifest.contains("\nperf-event-open-sys")
    });
    assert_eq!(members, ["tests/guest", "vpmu/perf"]);
    let found = dependencies("vpmu-perf");
    let expected = ["libc", "perf-event-open-sys"].map(str::to_owned);
    assert_eq!(found, BTreeSet::from(expected));
}

/// Only `vpmu-symbols` reads ELF symbol tables and `/proc/kallsyms`, both on the host and in the guest. Tests of other
/// crates may read them too, to check the results of `vpmu-symbols`.
#[test]
fn only_one_crate_reads_symbols() {
    let mut members = members();
    members.retain(|member| {
        let src = root().join(member).join("src");
        let files = if src.is_dir() { sources(&src) } else { Vec::new() };
        let is_test = |file: &Path| file.to_string_lossy().ends_with("tests.rs");
        let reads = |file: &PathBuf| !is_test(file) && code(file).contains("ObjectSymbol");
        files.iter().any(reads)
    });
    assert_eq!(members, ["vpmu/symbols"]);
    let found = dependencies("vpmu-symbols");
    let expected = ["object", "thiserror"].map(str::to_owned);
    assert_eq!(found, BTreeSet::from(expected));
}

/// `vpmu-profile` reads and writes files: it knows neither the device nor the VMM. Only the commands `vmm` and `vperf` use
/// it.
#[test]
fn profiles_know_files_alone() {
    let found = dependencies("vpmu-profile");
    let own: BTreeSet<&str> = found.iter().map(String::as_str).filter(|name| name.starts_with("vpmu")).collect();
    assert_eq!(own, BTreeSet::from(["vpmu-abi", "vpmu-perf", "vpmu-symbols"]));
    for forbidden in ["vmm", "images", "kvm-ioctls", "clap", "event-manager"] {
        assert!(!found.contains(forbidden), "vpmu-profile depends on {forbidden}");
    }
    for package in ["vpmu", "vpmu-kvm", "vpmu-perfdata", "vpmu-recorder"] {
        assert!(!dependencies(package).contains("vpmu-profile"), "{package} depends on vpmu-profile");
    }
}

/// The device's recorder and the guest's `vperf` write the same format, so the writer knows neither.
#[test]
fn writer_of_files_knows_only_layouts() {
    let found = dependencies("vpmu-perfdata");
    assert_eq!(found, BTreeSet::from(["vpmu-abi", "vpmu-perf", "zerocopy"].map(str::to_owned)));
}

#[test]
fn tests_import_no_internals() {
    for package in ["tests", "guest-tests"] {
        let found = dependencies(package);
        for forbidden in ["vpmu", "vmm"] {
            assert!(!found.contains(forbidden), "{package} depends on {forbidden}");
        }
    }
}

#[test]
fn only_the_host_module_of_the_device_calls_perf() {
    let src = root().join("vpmu/src");
    let files = sources(&src);
    assert!(files.len() > 5, "the device's sources moved");
    for file in files {
        let inside = file.starts_with(src.join("host"));
        // Instructions that read counters.
        let instructions = file.starts_with(src.join("arch"));
        // Access to guest memory of any type.
        let memory = file == src.join("memory.rs");
        let code = code(&file);
        let without = |word| assert!(!code.contains(word), "{} has {word}", file.display());
        if !inside {
            without("perf_event_open");
            without("vpmu_perf::call");
        }
        if !inside && !instructions && !memory {
            without("unsafe {");
        }
    }
}

/// `vpmu-kvm` has unsafe code only in the modules that access run pages, make ioctls that kvm-ioctls does not wrap, or
/// send and handle signals.
#[test]
fn only_edges_of_the_kvm_half_are_unsafe() {
    let src = root().join("vpmu/kvm/src");
    let files = sources(&src);
    assert!(files.len() > 10, "the sources of vpmu-kvm moved");
    let edges =
        ["arch", "drain.rs", "kick.rs", "micro/machine.rs", "micro/watch.rs", "run_page.rs", "stats.rs", "vcpu.rs"]
            .map(|edge| src.join(edge));
    for file in files {
        let code = code(&file);
        let edge = edges.iter().any(|edge| file.starts_with(edge));
        if !edge {
            assert!(!code.contains("unsafe {"), "{} has unsafe code", file.display());
        }
        if file != src.join("probe/events.rs") {
            let calls = code.contains("vpmu_perf::call");
            assert!(!calls, "{} calls perf", file.display());
        }
    }
}

/// `vpmu-kvm` provides run pages, kicks and statistics to every VMM that embeds the device.
#[test]
fn vmm_has_no_run_page_and_no_kick_of_its_own() {
    for file in sources(&root().join("vmm/src")) {
        let code = code(&file);
        for word in [".immediate_exit", "get_kvm_run(", "<kvm_run>", "KVM_GET_STATS_FD()"] {
            assert!(!code.contains(word), "{} has {word}", file.display());
        }
    }
}

#[test]
fn only_arch_modules_of_the_vmm_and_the_device_name_an_architecture() {
    for crate_root in ["vmm/src", "vpmu/src", "vpmu/kvm/src"] {
        let src = root().join(crate_root);
        for file in sources(&src) {
            if !file.starts_with(src.join("arch")) {
                let code = code(&file);
                for word in ["target_arch", "x86_64::", "aarch64::"] {
                    assert!(!code.contains(word), "{} has {word}", file.display());
                }
            }
        }
    }
}

/// Returns the part of a file's code that is compiled without tests: no comments, and no items under `#[cfg(test)]`.
fn built_code(path: &Path) -> String {
    let text = fs::read_to_string(path).unwrap();
    let mut kept = String::new();
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        if line.trim() != "#[cfg(test)]" {
            kept.push_str(line.split("//").next().unwrap_or_default());
            kept.push('\n');
            continue;
        }
        // In rustfmt's layout, the last line of an item has the same indentation as its first line.
        let indent = &line[..line.len() - line.trim_start().len()];
        for line in lines.by_ref() {
            let Some(item) = line.strip_prefix(indent) else {
                continue;
            };
            let is_inside = item.starts_with([' ', '#', '/']);
            if !is_inside && item.ends_with([';', ',', '}']) {
                break;
            }
        }
    }
    kept
}

/// Returns the names that follow `prefix` in paths. If a list in braces follows, returns each name in it.
fn names_after<'a>(code: &'a str, prefix: &str) -> BTreeSet<&'a str> {
    let ident = |text: &str| {
        let end = text.find(|c: char| !c.is_alphanumeric() && c != '_');
        end.unwrap_or(text.len())
    };
    let mut names = BTreeSet::new();
    for (at, prefix) in code.match_indices(prefix) {
        let path = &code[at + prefix.len()..];
        let Some(group) = path.strip_prefix('{') else {
            names.insert(&path[..ident(path)]);
            continue;
        };
        let (mut depth, mut begins) = (0, true);
        for (at, c) in group.char_indices() {
            match c {
                '{' => depth += 1,
                '}' if depth == 0 => break,
                '}' => depth -= 1,
                ',' if depth == 0 => begins = true,
                c if begins && !c.is_whitespace() => {
                    let name = &group[at..];
                    names.insert(&name[..ident(name)]);
                    begins = false;
                }
                _ => {}
            }
        }
    }
    names
}

/// Returns the top-level modules of the crate at `src`, each with the modules that it uses.
fn module_graph(src: &Path) -> BTreeMap<String, BTreeSet<String>> {
    let mut graph: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for file in sources(src) {
        let below = file.strip_prefix(src).unwrap().with_extension("");
        let parts: Vec<&str> = below.iter().map(|part| part.to_str().unwrap()).collect();
        let module = parts[0];
        // `lib` and `main` are crate roots, not modules. Files of tests are not part of a build without tests.
        if ["lib", "main"].contains(&module) || parts.contains(&"tests") {
            continue;
        }
        let code = built_code(&file);
        let depth = parts.iter().filter(|&&part| part != "mod").count();
        let mut uses = names_after(&code, "crate::");
        uses.extend(names_after(&code, &"super::".repeat(depth)));
        uses.remove(module);
        let uses = uses.into_iter().map(str::to_owned);
        graph.entry(module.to_owned()).or_default().extend(uses);
    }
    let modules: BTreeSet<String> = graph.keys().cloned().collect();
    for uses in graph.values_mut() {
        uses.retain(|name| modules.contains(name));
    }
    graph
}

/// A crate's modules by floors, from the ground up. A module may use the modules that are listed before it, on its own
/// floor or a lower one. The list therefore admits no cycle. Each floor names what its modules have in common.
type Floors = &'static [(&'static str, &'static [&'static str])];

const DEVICE: Floors = &[
    (
        "words and tools that name no other module",
        &["clock", "flush", "locks", "memory", "refusal", "saved", "size", "slots", "syscall", "throttle", "work"],
    ),
    (
        "what the guest and its vCPUs own",
        &["arch", "errno", "machine", "kind", "metrics", "pages", "queues", "source", "tasks", "vcpu", "window"],
    ),
    ("what may be asked for", &["policy", "settings", "error", "links", "period"]),
    ("what is written", &["record", "area", "ring", "notices", "producer", "unwind", "spec", "trace", "sink"]),
    ("what the host counts", &["host", "confine", "catalogue", "backend", "cpu"]),
    ("one vCPU's events", &["event", "shard"]),
    ("all events", &["persistent", "save", "control"]),
    ("the device", &["shared", "aux_writer", "session", "remote", "device", "internals"]),
];

const VMM: Floors = &[
    (
        "words and tools that name no other module",
        &[
            "boot_data",
            "bucket",
            "bus",
            "exit",
            "footprint",
            "kvm",
            "machine",
            "path_at",
            "printable",
            "probe",
            "raw_events",
            "signal",
            "terminal",
        ],
    ),
    (
        "what the machine is made of",
        &[
            "arch",
            "policy",
            "logger",
            "recording",
            "limits",
            "confine",
            "host_kernel",
            "memory",
            "check",
            "devices",
            "board",
            "vcpu",
        ],
    ),
    ("what runs it", &["snapshot", "config", "ctl", "event_loop", "internals", "operator"]),
    ("the commands", &["vm", "report", "serve", "cli"]),
];

/// Returns each use of a module by a module that is listed before it, and each module that the floors or the sources
/// lack.
fn faults(floors: Floors, graph: &BTreeMap<String, BTreeSet<String>>) -> Vec<String> {
    let listed = || floors.iter().flat_map(|(_, modules)| modules.iter().copied());
    let order: BTreeMap<&str, usize> = listed().zip(0..).collect();
    let mut faults = Vec::new();
    for module in listed().filter(|&module| !graph.contains_key(module)) {
        faults.push(format!("there is no module {module}"));
    }
    if order.len() != listed().count() {
        faults.push("a module is listed twice".to_owned());
    }
    for (module, uses) in graph {
        let Some(own) = order.get(module.as_str()) else {
            faults.push(format!("{module} is on no floor"));
            continue;
        };
        let above = uses.iter().filter(|used| order.get(used.as_str()).is_some_and(|used| used >= own));
        faults.extend(above.map(|used| format!("{module} uses {used}, which is above it")));
    }
    faults
}

#[test]
fn modules_use_only_the_floors_below_them() {
    for (floors, src, known) in [(DEVICE, "vpmu/src", ("control", "shard")), (VMM, "vmm/src", ("vm", "vcpu"))] {
        let graph = module_graph(&root().join(src));
        assert!(graph[known.0].contains(known.1), "paths in the code of {src} are not recognised");
        let faults = faults(floors, &graph);
        assert!(
            faults.is_empty(),
            "{src}: move the shared definition to the lower module, or the module to another floor:\n{}",
            faults.join("\n")
        );
    }
}

#[test]
fn floors_report_a_use_of_a_higher_module() {
    const FLOORS: Floors = &[("ground", &["a", "b"]), ("first", &["c"])];
    let graph = |edges: &[(&str, &[&str])]| {
        let owned = |uses: &[&str]| uses.iter().map(|&name| name.to_owned()).collect();
        edges.iter().map(|&(name, uses)| (name.to_owned(), owned(uses))).collect()
    };
    assert_eq!(faults(FLOORS, &graph(&[("a", &[]), ("b", &["a"]), ("c", &["a", "b"])])), [""; 0]);
    assert_eq!(faults(FLOORS, &graph(&[("a", &["c"]), ("b", &[]), ("c", &[])])), ["a uses c, which is above it"]);
    assert_eq!(faults(FLOORS, &graph(&[("a", &["b"]), ("b", &[]), ("c", &[])])), ["a uses b, which is above it"]);
    assert_eq!(
        faults(FLOORS, &graph(&[("a", &[]), ("b", &[]), ("d", &[])])),
        ["there is no module c", "d is on no floor"]
    );
}

/// Only one header accesses perf core's private fields. Its comments explain why each access is safe.
#[test]
fn only_the_drivers_header_for_perf_core_touches_its_private_fields() {
    const HEADER: &str = "perf_core_private.h";
    const FIELDS: [&str; 27] = [
        "attach_state",
        "cgrp",
        "child_list",
        "child_mutex",
        "clock",
        "event_limit",
        "event_list",
        "fasync",
        "is_active",
        "lost_samples",
        "nr_siblings",
        "ns",
        "oncpu",
        "overflow_handler",
        "pending_disable",
        "pending_disable_irq",
        "pending_irq",
        "pending_kill",
        "pending_wakeup",
        "perf_event_ctxp",
        "pin_count",
        "pmu_ctx",
        "prog",
        "rb",
        "total_time_enabled",
        "total_time_running",
        "tstamp",
    ];
    // The driver's own structures also have fields with these names, so the test looks only for accesses through
    // pointers to perf's structures. Each row has the structure, the usual name of a pointer to it, the text before the
    // pointer's name in an access, and the field.
    const SHARED_FIELDS: [(&str, &str, &str, &str); 2] =
        [("perf_event", "event", "", "ctx"), ("perf_event_context", "ctx", "&", "lock")];
    let driver = root().join("guest-driver/linux");
    let header = fs::read_to_string(driver.join(HEADER)).unwrap();
    let shared_fields = SHARED_FIELDS.map(|(.., field)| field);
    for field in FIELDS.into_iter().chain(shared_fields) {
        assert!(has_word(&header, &format!("->{field}")), "{HEADER} has no {field}");
    }
    for entry in fs::read_dir(driver).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        if name == HEADER || !(name.ends_with(".c") || name.ends_with(".h")) {
            continue;
        }
        let text = fs::read_to_string(&path).unwrap();
        for field in FIELDS {
            let access = format!("->{field}");
            assert!(!has_word(&text, &access), "{name} has {access}");
        }
        for (structure, usual, before, field) in SHARED_FIELDS {
            let mut variables = names_after(&text, &format!("struct {structure} *"));
            variables.insert(usual);
            for variable in variables {
                let access = format!("{before}{variable}->{field}");
                assert!(!has_word(&text, &access), "{name} has {access}");
            }
        }
    }
}

/// Returns whether `text` contains `word` as a whole name. A part of a longer name does not count.
fn has_word(text: &str, word: &str) -> bool {
    let is_name = |c: char| c.is_alphanumeric() || c == '_';
    let names_meet = |left: Option<char>, right: Option<char>| left.is_some_and(is_name) && right.is_some_and(is_name);
    text.match_indices(word).any(|(at, _)| {
        let (before, after) = (&text[..at], &text[at + word.len()..]);
        !names_meet(before.chars().next_back(), word.chars().next())
            && !names_meet(word.chars().next_back(), after.chars().next())
    })
}

/// One header handles the differences between kernel versions.
#[test]
fn only_the_drivers_compat_header_asks_for_a_kernel_version() {
    let driver = root().join("guest-driver/linux");
    let asks = |path: &Path| {
        let text = fs::read_to_string(path).unwrap();
        ["LINUX_VERSION", "KERNEL_VERSION", "linux/version.h"].iter().any(|word| text.contains(word))
    };
    let mut asking: Vec<String> = fs::read_dir(driver)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| {
            let name = path.file_name().unwrap().to_str().unwrap();
            let code = name.ends_with(".c") || name.ends_with(".h");
            // After a manual build, there is a `.mod.c` file, which kbuild generates. It contains the kernel version.
            let source = code && !name.ends_with(".mod.c");
            (source || name == "Kbuild" || name == "Makefile") && asks(path)
        })
        .map(|path| path.file_name().unwrap().to_str().unwrap().to_owned())
        .collect();
    asking.sort();
    assert_eq!(asking, ["compat.h"]);
}

/// Each row of the annex quotes a proposal to perf and names the tests that show what the device does.
#[test]
fn every_test_that_the_specification_names_exists() {
    let specification = fs::read_to_string(root().join("vpmu/SPEC.md")).unwrap();
    let (_, annex) = specification.split_once("## Annex").unwrap();
    let rows = annex.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| what it says"));
    let mut named = BTreeSet::new();
    for row in rows {
        let shown_by = row.trim_end_matches(" |").rsplit_once(" | ").unwrap().1;
        let tests: Vec<&str> = shown_by.split('`').skip(1).step_by(2).collect();
        assert!(!tests.is_empty(), "no test shows {row}");
        named.extend(tests);
    }
    let tests: String = ["tests", "vpmu", "vmm", "guest-driver/client"]
        .into_iter()
        .flat_map(|package| sources(&root().join(package)))
        .map(|file| code(&file))
        .collect();
    for name in named {
        assert!(tests.contains(&format!("fn {name}()")), "there is no test {name}");
    }
}

#[test]
fn profiles_that_ship_check_overflows() {
    let manifest = fs::read_to_string(root().join("Cargo.toml")).unwrap();
    let profile = |name: &str| {
        let (_, section) = manifest.split_once(&format!("[profile.{name}]")).unwrap();
        let end = section.find("\n[").unwrap_or(section.len());
        section[..end].to_owned()
    };
    assert!(profile("release").contains("overflow-checks = true"));
    let guest = profile("guest");
    assert!(guest.contains("inherits = \"release\"") && !guest.contains("overflow-checks"));
}
