//! Builds the guest driver as packagers do, for each verified series of stock kernels. Checks that there are no warnings, that
//! the code follows the kernel's style, and that DKMS can build it.
#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

use std::fs;
use std::path::Path;
use std::process::Command;

use images::cache::Cache;
use images::kernel::Kernel;
use images::{dkms, module, style};

const SERIES: [&str; 3] = ["6.1", "6.12", "7.3"];

/// A module of one file, `vpmu_odd.c`, which ends with `line`. It builds much faster than the whole driver would with
/// this line.
fn module_with(line: &str) -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    let kbuild = "obj-m := virtio_pmu.o\nvirtio_pmu-y := vpmu_odd.o\n";
    let code = "// SPDX-License-Identifier: GPL-2.0\n#include <linux/module.h>\n\n\
        MODULE_DESCRIPTION(\"test\");\nMODULE_LICENSE(\"GPL\");\n\n";
    fs::write(directory.path().join("Kbuild"), kbuild).unwrap();
    let source = directory.path().join("vpmu_odd.c");
    fs::write(source, format!("{code}{line}\n")).unwrap();
    directory
}

#[test]
fn driver_builds_for_each_series_without_a_warning() {
    let cache = Cache::user().unwrap();
    for series in SERIES {
        let kernel = Kernel::stock(cache, series).unwrap();
        assert!(module::build(cache, &kernel).unwrap().is_file(), "{series}");
    }
}

#[test]
fn driver_for_a_series_that_is_not_verified_is_refused() {
    let kernel = Kernel::stock(Cache::user().unwrap(), SERIES[0]).unwrap();
    let directory = tempfile::tempdir().unwrap();
    for file in ["Kbuild", "vpmu_link.c"] {
        fs::copy(module::driver().join(file), directory.path().join(file)).unwrap();
    }
    let make = |more: &[&str]| {
        let mut make = Command::new("make");
        make.arg("-C").arg(&kernel.headers).arg(format!("M={}", directory.path().display()));
        let output = make.args(["VERSION=6", "PATCHLEVEL=13", "--dry-run", "modules"]).args(more).output().unwrap();
        String::from_utf8(output.stderr).unwrap()
    };
    let refusal = "virtio_pmu is verified on Linux 6.1 6.12 7.3, not on 6.13: use one of these kernels, or build with UNVERIFIED=1";
    assert!(make(&[]).contains(refusal), "{}", make(&[]));
    assert!(!make(&["UNVERIFIED=1"]).contains(refusal));
}

#[test]
fn module_with_a_function_that_nothing_uses_does_not_build() {
    let cache = Cache::user().unwrap();
    let module = module_with("static void unused(void) { }");
    for series in SERIES {
        let kernel = Kernel::stock(cache, series).unwrap();
        let error = module::build_from(cache, &kernel, module.path()).unwrap_err();
        assert!(format!("{error:?}").contains("unused-function"), "{series}: {error:?}");
    }
}

#[test]
fn sparse_has_no_complaint_about_the_driver() {
    let cache = Cache::user().unwrap();
    for series in SERIES {
        let kernel = Kernel::stock(cache, series).unwrap();
        let complaints = module::sparse(&kernel, &module::driver()).unwrap();
        assert!(complaints.is_empty(), "{series}: {complaints:#?}");
    }
}

#[test]
fn sparse_complains_of_a_byte_order_for_each_series() {
    let cache = Cache::user().unwrap();
    let module = module_with("int vpmu_odd(__le32 order); int vpmu_odd(__le32 order) { return order + 1; }");
    for series in SERIES {
        let kernel = Kernel::stock(cache, series).unwrap();
        let complaints = module::sparse(&kernel, module.path()).unwrap();
        let about = |line: &String| line.contains("vpmu_odd.c") && line.contains("restricted __le32");
        assert!(complaints.len() == 1 && about(&complaints[0]), "{series}: {complaints:#?}");
    }
}

#[test]
fn sparse_complains_of_a_lock_that_stays_held() {
    let held = "void vpmu_held(spinlock_t *lock); void vpmu_held(spinlock_t *lock) { spin_lock(lock); }";
    let module = module_with(held);
    let kernel = Kernel::stock(Cache::user().unwrap(), SERIES[0]).unwrap();
    let complaints = module::sparse(&kernel, module.path()).unwrap();
    let about = |line: &String| line.contains("vpmu_held") && line.contains("context imbalance");
    assert!(complaints.iter().any(about), "{complaints:#?}");
}

#[test]
fn checkpatch_has_no_complaint_about_the_driver() {
    let complaints = style::check(Cache::user().unwrap(), &module::driver()).unwrap();
    assert!(complaints.is_empty(), "{complaints:#?}");
}

#[test]
fn checkpatch_complains_of_code_in_another_style() {
    let module = module_with("static int  odd( void ){return 0 ;}");
    let complaints = style::check(Cache::user().unwrap(), module.path()).unwrap();
    let about = |line: &String| line.starts_with("vpmu_odd.c:") && line.contains("ERROR:");
    assert!(complaints.iter().any(about), "{complaints:#?}");
}

#[test]
fn dkms_installs_the_driver_for_each_series() {
    let cache = Cache::user().unwrap();
    for series in SERIES {
        let kernel = Kernel::stock(cache, series).unwrap();
        let directory = tempfile::tempdir().unwrap();
        let module = dkms::install(&kernel, directory.path()).unwrap();
        let place = Path::new("updates/dkms").join(module::NAME);
        assert!(module.ends_with(&place), "{series}: {module:?}");
        let bytes = fs::read(module).unwrap();
        let version = format!("vermagic={} ", kernel.release().unwrap());
        let found = bytes.windows(version.len()).any(|part| part == version.as_bytes());
        assert!(found, "{series}: the module lacks {version}");
    }
}
