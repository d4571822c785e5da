//! The guest driver's build for packagers: without warnings, in the kernel's style, and with DKMS,
//! for both series of stock kernels.
#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

use std::fs;
use std::path::Path;

use images::cache::Cache;
use images::kernel::Kernel;
use images::{dkms, module, style};

const SERIES: [&str; 2] = ["6.1", "6.12"];

/// A copy of the driver with a line appended to `file`.
fn driver_with(file: &str, line: &str) -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    for source in module::sources(&module::driver()).unwrap() {
        fs::copy(&source, directory.path().join(source.file_name().unwrap())).unwrap();
    }
    let path = directory.path().join(file);
    let text = fs::read_to_string(&path).unwrap();
    fs::write(&path, format!("{text}{line}\n")).unwrap();
    directory
}

#[test]
fn driver_builds_for_each_series_without_a_warning() {
    let cache = Cache::project();
    for series in SERIES {
        let kernel = Kernel::stock(&cache, series).unwrap();
        assert!(
            module::build(&cache, &kernel).unwrap().is_file(),
            "{series}"
        );
    }
}

#[test]
fn driver_with_a_function_that_nothing_uses_does_not_build() {
    let cache = Cache::project();
    let driver = driver_with("vpmu_read.c", "static void unused(void) { }");
    for series in SERIES {
        let kernel = Kernel::stock(&cache, series).unwrap();
        let error = module::build_from(&cache, &kernel, driver.path()).unwrap_err();
        assert!(
            format!("{error:?}").contains("unused-function"),
            "{series}: {error:?}"
        );
    }
}

#[test]
fn sparse_has_no_complaint_about_the_driver() {
    let cache = Cache::project();
    for series in SERIES {
        let kernel = Kernel::stock(&cache, series).unwrap();
        let complaints = module::sparse(&kernel, &module::driver()).unwrap();
        assert!(complaints.is_empty(), "{series}: {complaints:#?}");
    }
}

#[test]
fn sparse_complains_of_a_lock_that_stays_held() {
    let held =
        "void vpmu_held(spinlock_t *lock); void vpmu_held(spinlock_t *lock) { spin_lock(lock); }";
    let driver = driver_with("vpmu_read.c", held);
    let kernel = Kernel::stock(&Cache::project(), SERIES[0]).unwrap();
    let complaints = module::sparse(&kernel, driver.path()).unwrap();
    let about = |line: &String| line.contains("vpmu_held") && line.contains("context imbalance");
    assert!(complaints.iter().any(about), "{complaints:#?}");
}

#[test]
fn checkpatch_has_no_complaint_about_the_driver() {
    let complaints = style::check(&Cache::project(), &module::driver()).unwrap();
    assert!(complaints.is_empty(), "{complaints:#?}");
}

#[test]
fn checkpatch_complains_of_code_in_another_style() {
    let driver = driver_with("vpmu_read.c", "static int  odd( void ){return 0 ;}");
    let complaints = style::check(&Cache::project(), driver.path()).unwrap();
    let about = |line: &String| line.starts_with("vpmu_read.c:") && line.contains("ERROR:");
    assert!(complaints.iter().any(about), "{complaints:#?}");
}

#[test]
fn dkms_installs_the_driver_for_each_series() {
    let cache = Cache::project();
    for series in SERIES {
        let kernel = Kernel::stock(&cache, series).unwrap();
        let directory = tempfile::tempdir().unwrap();
        let module = dkms::install(&kernel, directory.path()).unwrap();
        let place = Path::new("updates/dkms").join(module::NAME);
        assert!(module.ends_with(&place), "{series}: {module:?}");
        let bytes = fs::read(module).unwrap();
        let version = format!("vermagic={} ", kernel.release().unwrap());
        let found = bytes
            .windows(version.len())
            .any(|part| part == version.as_bytes());
        assert!(found, "{series}: not {version}");
    }
}
