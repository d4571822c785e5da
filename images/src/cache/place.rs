//! Chooses the directory and the size of a user's cache. Refuses a directory into which other users can put results,
//! because the results include a kernel and programs that run as this user.

use std::ffi::OsString;
use std::fs::{self, DirBuilder};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use super::{CacheError, failed};
use crate::size::Size;
use crate::sys;

const DIRECTORY: &str = "VPMU_CACHE";
const SIZE: &str = "VPMU_CACHE_SIZE";
/// Twice what the kernels, compilers and labs of both architectures need.
const DEFAULT_SIZE: Size = Size::gib(20);

/// The file that marks a directory as a cache of this program. Its first line is from the Cache Directory Tagging
/// Specification; programs that make backups leave out directories with this line.
const TAG: &str = "CACHEDIR.TAG";
const TAGGED: &str = "Signature: 8a477f597d28d172789f06886806bc55\n\
    # This directory is a cache of vpmu. `images clean` removes its results.\n";
/// The beginning of the names of tags that are not yet complete.
const NEW_TAG: &str = ".tag-";

/// The cache's directory according to the environment's variables: `VPMU_CACHE`, else `vpmu` in the user's directory
/// for caches, as in the XDG Base Directory Specification.
pub(super) fn directory(variable: impl Fn(&str) -> Option<OsString>) -> Result<PathBuf, CacheError> {
    let path = |name| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    if let Some(named) = path(DIRECTORY) {
        return if named.is_absolute() { Ok(named) } else { Err(CacheError::Relative(named)) };
    }
    let absolute = |name| path(name).filter(|path| path.is_absolute());
    let caches = absolute("XDG_CACHE_HOME").or_else(|| Some(absolute("HOME")?.join(".cache")));
    Ok(caches.ok_or(CacheError::NoHome)?.join("vpmu"))
}

/// The cache's size according to the environment's variable `VPMU_CACHE_SIZE`.
pub(super) fn size(variable: impl Fn(&str) -> Option<OsString>) -> Result<Size, CacheError> {
    let Some(value) = variable(SIZE).filter(|value| !value.is_empty()) else {
        return Ok(DEFAULT_SIZE);
    };
    let text = value.to_string_lossy();
    text.parse().map_err(|_| CacheError::Size(text.into_owned()))
}

/// Makes `directory` a cache, unless it is one already.
pub(super) fn prepare(directory: &Path) -> Result<(), CacheError> {
    let make = DirBuilder::new().recursive(true).mode(0o700).create(directory);
    make.map_err(|source| failed("make", directory, source))?;
    let meta = fs::metadata(directory).map_err(|source| failed("read", directory, source))?;
    let (owner, user) = (meta.uid(), sys::user());
    if owner != user {
        return Err(CacheError::Owner { directory: directory.to_owned(), owner, user });
    }
    if meta.mode() & 0o022 != 0 {
        return Err(CacheError::Writable(directory.to_owned()));
    }
    tag(directory)
}

/// Writes the tag if `directory` is empty. Fails if `directory` contains other files but no tag.
fn tag(directory: &Path) -> Result<(), CacheError> {
    let path = directory.join(TAG);
    // List the files before the tag is read: a process that has just made the cache adds files only after the tag.
    let entries = fs::read_dir(directory).and_then(Iterator::collect::<io::Result<Vec<_>>>);
    let entries = entries.map_err(|source| failed("read", directory, source))?;
    let is_empty = entries.iter().all(|entry| entry.file_name().as_encoded_bytes().starts_with(NEW_TAG.as_bytes()));
    match fs::read(&path) {
        Ok(found) if found == TAGGED.as_bytes() => return Ok(()),
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed("read", &path, error)),
        Err(_) if is_empty => {}
        _ => return Err(CacheError::NotCache(directory.to_owned())),
    }
    let written = tempfile::Builder::new().prefix(NEW_TAG).tempfile_in(directory).and_then(|mut file| {
        file.write_all(TAGGED.as_bytes())?;
        file.persist(&path).map_err(|error| error.error)
    });
    written.map(drop).map_err(|source| failed("write", &path, source))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, chown};

    use super::*;

    fn place(variables: &[(&str, &str)]) -> Result<PathBuf, CacheError> {
        directory(|name| variables.iter().find(|(n, _)| *n == name).map(|(_, value)| OsString::from(value)))
    }

    #[test]
    fn variables_name_the_directory() {
        let home = ("HOME", "/home/me");
        for (variables, expected) in [
            (&[home][..], "/home/me/.cache/vpmu"),
            (&[home, ("XDG_CACHE_HOME", "/big")], "/big/vpmu"),
            (&[("XDG_CACHE_HOME", "/big")], "/big/vpmu"),
            (&[home, ("XDG_CACHE_HOME", "relative")], "/home/me/.cache/vpmu"),
            (&[home, ("XDG_CACHE_HOME", "")], "/home/me/.cache/vpmu"),
            (&[home, ("XDG_CACHE_HOME", "/big"), ("VPMU_CACHE", "/mine")], "/mine"),
            (&[home, ("VPMU_CACHE", "")], "/home/me/.cache/vpmu"),
            (&[("VPMU_CACHE", "/mine")], "/mine"),
        ] {
            assert_eq!(place(variables).unwrap(), Path::new(expected), "{variables:?}");
        }
    }

    #[test]
    fn variables_without_a_place_are_refused_with_the_remedy() {
        for variables in [&[][..], &[("HOME", "")], &[("HOME", "relative")]] {
            let error = place(variables).unwrap_err();
            assert!(matches!(error, CacheError::NoHome), "{variables:?}: {error:?}");
            assert!(error.to_string().contains("set VPMU_CACHE"), "{error}");
        }
        let error = place(&[("HOME", "/home/me"), ("VPMU_CACHE", "cache")]).unwrap_err();
        assert!(matches!(error, CacheError::Relative(_)), "{error:?}");
    }

    #[test]
    fn size_has_a_unit_and_a_default() {
        let size_of = |text: Option<&str>| size(|_| text.map(OsString::from));
        assert_eq!(size_of(None).unwrap(), DEFAULT_SIZE);
        assert_eq!(size_of(Some("")).unwrap(), DEFAULT_SIZE);
        assert_eq!(size_of(Some("1536M")).unwrap(), Size(1536 << 20));
        assert_eq!(size_of(Some("4096")).unwrap(), Size(4096));
        for wrong in ["much", "-1", "20 parsecs"] {
            let error = size_of(Some(wrong)).unwrap_err().to_string();
            assert!(error.contains(wrong) && error.contains("such as 20G"), "{error}");
        }
    }

    #[test]
    fn new_directory_becomes_a_cache_of_this_user_only() {
        let parent = tempfile::tempdir().unwrap();
        let directory = parent.path().join("a/b");
        prepare(&directory).unwrap();
        fs::write(directory.join("other"), "").unwrap();
        prepare(&directory).unwrap();
        assert_eq!(fs::metadata(&directory).unwrap().mode() & 0o777, 0o700);
    }

    #[test]
    fn directory_of_another_user_is_refused() {
        let own = tempfile::tempdir().unwrap();
        let other = if sys::is_root() {
            chown(own.path(), Some(65534), None).unwrap();
            own.path()
        } else {
            Path::new("/")
        };
        let error = prepare(other).unwrap_err();
        assert!(matches!(error, CacheError::Owner { .. }), "{error:?}");
        assert!(error.to_string().contains("set VPMU_CACHE"), "{error}");
    }

    #[test]
    fn directory_that_others_can_write_to_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        for mode in [0o777, 0o720, 0o702] {
            fs::set_permissions(directory.path(), fs::Permissions::from_mode(mode)).unwrap();
            let error = prepare(directory.path()).unwrap_err();
            assert!(matches!(error, CacheError::Writable(_)), "{mode:o}: {error:?}");
        }
        fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).unwrap();
        prepare(directory.path()).unwrap();
    }

    #[test]
    fn directory_with_other_files_is_refused_and_left_alone() {
        let directory = tempfile::tempdir().unwrap();
        fs::create_dir(directory.path().join("results")).unwrap();
        let refused = || matches!(prepare(directory.path()), Err(CacheError::NotCache(_)));
        assert!(refused());
        // cargo tags its directories, too.
        let of_cargo = TAGGED.lines().next().unwrap();
        fs::write(directory.path().join(TAG), of_cargo).unwrap();
        assert!(refused());
        assert_eq!(fs::read_to_string(directory.path().join(TAG)).unwrap(), of_cargo);
    }
}
