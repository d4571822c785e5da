//! Readers of profiles that are not this project's, out of Debian's packages, which are unpacked, not installed: the
//! pprof of Go, and the parser of the profiler hotspot.

use std::process::Command;

use crate::apt::Apt;
use crate::arch::Arch;
use crate::cache::Cache;
use crate::unpacked::{self, UnpackedError};

/// The package with Go's tools. Of its dependencies, pprof needs only the C library, which every host has.
const GO: &str = "golang-1.19-go";
const PPROF: &str = "usr/lib/go-1.19/pkg/tool/linux_amd64/pprof";
/// The packages with hotspot's parser and its libraries, and the dependencies that only hotspot's windows need.
const HOTSPOT: [&str; 3] = ["hotspot", "libqt5network5", "libdw1"];
const WINDOWS: [&str; 17] = [
    "kio",
    "libkf5completion5",
    "libkf5configcore5",
    "libkf5configwidgets5",
    "libkf5coreaddons5",
    "libkf5i18n5",
    "libkf5kiowidgets5",
    "libkf5solid5",
    "libkf5threadweaver5",
    "libkf5widgetsaddons5",
    "libkf5windowsystem5",
    "libqt5dbus5",
    "libqt5gui5",
    "libqt5svg5",
    "libqt5widgets5",
    "linux-perf",
    "policykit-1",
];
/// Dependencies of the libraries that no program needs to read a profile.
const UNUSED: [&str; 3] = ["qtbase-abi-5-15-8", "shared-mime-info", "debconf"];
const PERFPARSER: &str = "usr/lib/x86_64-linux-gnu/libexec/hotspot-perfparser";
const LOADER: &str = "lib/x86_64-linux-gnu/ld-linux-x86-64.so.2";
const LIBRARIES: [&str; 2] = ["usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu"];

/// Returns the command `pprof`, as `go tool pprof` runs it.
///
/// # Errors
/// [`UnpackedError`].
pub fn pprof() -> Result<Command, UnpackedError> {
    let apt = Apt::of(Arch::X86_64)?;
    let root = unpacked::directory_without(Cache::user()?, apt, &[GO], &["golang-1.19-src", "libc6"])?;
    Ok(Command::new(root.join(PPROF)))
}

/// Returns hotspot's parser of `perf.data` files, with the libraries of its own Debian.
///
/// # Errors
/// [`UnpackedError`].
pub fn perfparser() -> Result<Command, UnpackedError> {
    let without = [&WINDOWS[..], &UNUSED].concat();
    let root = unpacked::directory_without(Cache::user()?, Apt::of(Arch::X86_64)?, &HOTSPOT, &without)?;
    let places = LIBRARIES.map(|place| root.join(place).display().to_string()).join(":");
    // The libraries are not those of this host, so their own loader runs the program.
    let mut command = Command::new(root.join(LOADER));
    command.args(["--library-path", &places]).arg(root.join(PERFPARSER));
    Ok(command)
}
