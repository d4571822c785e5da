//! Finds, fetches and unpacks Debian's source packages.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::apt::Apt;
use crate::cache::Cache;
use crate::digest::Key;
use crate::file_error::FileError;
use crate::packages::{self, PackageError};
use crate::prerequisites::{self, Prerequisite};
use crate::process;
use crate::progress::Step;

/// The version of the source that the newest `package` was built from. Does not refresh stale lists: call it
/// within [`Apt::refreshing`].
///
/// # Errors
/// [`PackageError`].
pub fn version(apt: &Apt, cache: &Cache, package: &str) -> Result<String, PackageError> {
    let key = apt.state(Key::new("source").text("package", package))?.hex();
    let place = cache.get("sources", &key, |dir| {
        let version =
            source(&packages::show(apt, package)?).ok_or_else(|| PackageError::NoPackage(package.to_owned()))?;
        let file = dir.join("version");
        fs::write(&file, version).map_err(FileError::at(&file))?;
        Ok::<_, PackageError>(())
    })?;
    let file = place.join("version");
    Ok(fs::read_to_string(&file).map_err(FileError::at(&file))?)
}

/// Fetches the source `name` and unpacks it, with Debian's patches, into `dir/source`. Does not refresh stale lists.
///
/// # Errors
/// [`PackageError`].
pub fn unpack(apt: &Apt, name: &str, version: &str, dir: &Path, step: &Step) -> Result<(), PackageError> {
    prerequisites::ensure(&[Prerequisite::DpkgSource, Prerequisite::Xz])?;
    let source = format!("the source of {name} {version}");
    step.detail(&format!("fetching {source}"));
    let mut fetch = apt.get()?;
    fetch.args(["-q", "source", "--download-only", &format!("{name}={version}")]).current_dir(dir);
    process::output(&mut fetch).map_err(|error| PackageError::Fetch { package: source, source: error })?;
    step.detail(&format!("unpacking the source of {name}"));
    let mut unpack = Command::new("dpkg-source");
    unpack.arg("-x").arg(description(name, version)).arg("source").current_dir(dir);
    process::output(&mut unpack)
        .map(drop)
        .map_err(|source| PackageError::Unpack { package: format!("the source of {name}"), source })
}

/// The source version in the output of `apt-cache show` for a binary package.
fn source(text: &str) -> Option<String> {
    let field = |label: &str| text.lines().find_map(|line| line.strip_prefix(label));
    let own = field("Source: ").and_then(|source| source.split_once('('));
    let version = match own {
        Some((_, version)) => version.trim_end_matches(')'),
        None => field("Version: ")?,
    };
    Some(version.to_owned())
}

/// The name of the file that describes a source. This name contains the version without its epoch.
fn description(name: &str, version: &str) -> String {
    let version = version.split_once(':').map_or(version, |(_, rest)| rest);
    format!("{name}_{version}.dsc")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rebuilt_package_version_differs_from_source() {
        let text = "Package: a\nSource: s (1:7.2-7)\nVersion: 1:7.2-7+b3\n";
        assert_eq!(source(text).as_deref(), Some("1:7.2-7"));
        let text = "Package: a\nSource: s\nVersion: 1:7.2-7\n";
        assert_eq!(source(text).as_deref(), Some("1:7.2-7"));
        assert_eq!(source("Package: a\nVersion: 1.2\n").as_deref(), Some("1.2"));
        assert_eq!(source("Package: a\n"), None);
    }

    #[test]
    fn files_are_named_without_epochs() {
        assert_eq!(description("s", "1:7.2+dfsg-7"), "s_7.2+dfsg-7.dsc");
        assert_eq!(description("s", "7.2-1"), "s_7.2-1.dsc");
    }
}
