//! A kernel to boot, with its modules and headers: Debian's stock kernel, or the user's own.

use std::fs;
use std::path::{Path, PathBuf};

use thiserror::Error;

use crate::apt::{Apt, AptError, Release, Stale};
use crate::arch::Arch;
use crate::cache::{Cache, CacheError};
use crate::debug::{self, Debug};
use crate::digest::{DigestError, Key};
use crate::file_error::FileError;
use crate::kallsyms;
use crate::orc;
use crate::packages::{self, KernelPackages, PackageError};
use crate::prerequisites::PrerequisiteError;
use crate::process::ProcessError;
use crate::progress::Step;
use crate::toolchain;
use crate::vmlinux::{self, VmlinuxError};

/// The series that is booted by default.
pub const DEFAULT_SERIES: &str = "6.1";
const SYSTEM_MAP: &str = "System.map";
/// Name of the file with the ORC tables.
const ORC: &str = "vmlinux.orc";
/// Directories of unpacked packages: programs, the compiler's own programs, and the kernel's build tools.
const PROGRAMS: &str = "usr/bin";
const LIBEXEC: &str = "usr/libexec";
const LIBRARIES: &str = "usr/lib";

/// Errors of getting a kernel.
#[derive(Debug, Error)]
pub enum KernelError {
    /// Its packages could not be fetched.
    #[error(transparent)]
    Package(#[from] PackageError),
    /// The package lists could not be refreshed.
    #[error(transparent)]
    Apt(#[from] AptError),
    /// The cache cannot be used.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// A given file could not be read.
    #[error(transparent)]
    Digest(#[from] DigestError),
    /// The package's image has an unknown form.
    #[error("cannot extract the kernel from {image}")]
    Extract {
        /// The bzImage.
        image: PathBuf,
        /// The cause.
        #[source]
        source: VmlinuxError,
    },
    /// A file could not be read or written.
    #[error(transparent)]
    File(#[from] FileError),
    /// Unpacked packages that do not look as expected.
    #[error("the kernel's packages lack a {0}")]
    Layout(String),
    /// The host lacks something to build a kernel with.
    #[error(transparent)]
    Prerequisite(#[from] PrerequisiteError),
    /// Debug kernels are built only for this machine's architecture.
    #[error("debug kernels are built only for x86, not for {0}")]
    ForeignDebug(Arch),
    /// Kernels of Debian 13 are fetched only for this machine's architecture.
    #[error("kernel {wanted} is fetched only for x86, not for {arch}")]
    ForeignBackport {
        /// The requested version.
        wanted: String,
        /// The requested architecture.
        arch: Arch,
    },
    /// A debug kernel does not build.
    #[error("cannot build the debug kernel")]
    Build(#[source] ProcessError),
    /// The kernel's source lacks an option of the debug kernel.
    #[error("the kernel's source does not accept {0}")]
    Option(String),
    /// The user gave a kernel without its headers.
    #[error(
        "a kernel of your own needs its headers for the module: add --headers DIRECTORY (like /lib/modules/VERSION/build)"
    )]
    NoHeaders,
    /// The directory given as headers is not a build directory.
    #[error("{0} is not a kernel build directory: it must contain a Makefile and Module.symvers")]
    BadHeaders(PathBuf),
}

impl Stale for KernelError {
    fn is_stale(&self) -> bool {
        matches!(self, Self::Package(error) if error.is_stale())
    }
}

/// The kernel to use: a stock one, one built with a checker, or files of the user's own.
#[derive(Clone, Debug, Default)]
pub struct Sources {
    /// The guests' architecture.
    pub arch: Arch,
    /// Series or release of the stock kernel; `None` for [`DEFAULT_SERIES`].
    pub version: Option<String>,
    /// The checker with which to build the kernel of that series; `None` for the stock kernel.
    pub debug: Option<Debug>,
    /// A vmlinux or bzImage.
    pub kernel: Option<PathBuf>,
    /// The kernel's build directory.
    pub headers: Option<PathBuf>,
    /// The kernel's modules, like /lib/modules/VERSION. `None` with a kernel of the user's own means that all
    /// drivers are built in.
    pub modules: Option<PathBuf>,
    /// An initramfs of the user's own. The guest's initramfs is unpacked after it, and replaces files of the
    /// same names.
    pub initramfs: Option<PathBuf>,
}

/// A kernel with its modules and headers.
#[derive(Clone, Debug)]
pub struct Kernel {
    /// The image to boot: on x86 an ELF vmlinux, unless the user gave another.
    pub image: PathBuf,
    /// The image as packaged: on x86, a bzImage. On aarch64 and for the user's own kernel, it is the same as `image`.
    pub bzimage: PathBuf,
    /// `/lib/modules/VERSION`; `None` if everything is built in.
    pub modules: Option<PathBuf>,
    /// The build directory for modules.
    pub headers: PathBuf,
    /// The compiler for modules; `None` for this host's, or, if the kernel is for another architecture, for that
    /// architecture's.
    pub compiler: Option<PathBuf>,
    /// An identifier: kernels that differ in any part have different identifiers.
    pub id: String,
    /// Its architecture.
    pub arch: Arch,
}

impl Kernel {
    /// The kernel that `sources` ask for.
    ///
    /// # Errors
    /// [`KernelError`].
    pub fn get(cache: &Cache, sources: &Sources) -> Result<Self, KernelError> {
        let version = sources.version.as_deref().unwrap_or(DEFAULT_SERIES);
        match (&sources.kernel, sources.debug) {
            (Some(image), _) => Self::own(image, sources),
            (None, Some(_)) if !sources.arch.is_native() => Err(KernelError::ForeignDebug(sources.arch)),
            (None, Some(debug)) => debug::get(cache, version, debug),
            (None, None) => Self::stock_of(cache, sources.arch, version),
        }
    }

    /// Debian's newest cloud kernel of a series, for this machine's architecture.
    ///
    /// # Errors
    /// [`KernelError`].
    pub fn stock(cache: &Cache, series: &str) -> Result<Self, KernelError> {
        Self::stock_of(cache, Arch::default(), series)
    }

    /// Debian's newest cloud kernel of a series.
    ///
    /// # Errors
    /// [`KernelError`].
    pub fn stock_of(cache: &Cache, arch: Arch, series: &str) -> Result<Self, KernelError> {
        let release = packages::release_of(series);
        if release == Release::Trixie && !arch.is_native() {
            return Err(KernelError::ForeignBackport { wanted: series.to_owned(), arch });
        }
        Self::stock_from(Apt::of_release(release, arch)?, cache, series)
    }

    fn stock_from(apt: &Apt, cache: &Cache, series: &str) -> Result<Self, KernelError> {
        // Look the kernel up in each attempt, because refreshed lists may name another kernel.
        let get = || Self::fetch(apt, cache, &packages::resolve(apt, cache, series)?);
        match apt.arch().is_native() {
            true => apt.refreshing(get),
            // Refresh the lists of both architectures: the missing package may be a tool for this machine's
            // architecture.
            false => apt.native().refreshing(|| apt.refreshing(get)),
        }
    }

    fn fetch(apt: &Apt, cache: &Cache, found: &KernelPackages) -> Result<Self, KernelError> {
        let mut key = Key::new("kernel, layout 1");
        for package in found.packages.iter().chain(&found.tools) {
            key = key.text(&package.name, &package.version);
        }
        if let Some(compiler) = &found.compiler {
            key = key.text("compiler", compiler).text("wrapper", toolchain::LOADER);
        }
        let id = format!("{}-{}", found.release, key.hex());
        let compressed = apt.arch().compresses_kernels();
        let place = cache.get(&apt.arch().kind("kernel"), &id, |root| {
            let step = Step::new(format!("getting kernel {}", found.release));
            for package in &found.packages {
                packages::unpack(apt, package, root, &step)?;
            }
            for package in &found.tools {
                packages::unpack(apt.native(), package, root, &step)?;
            }
            to_boot(root, &found.release)?;
            if found.compiler.is_some() {
                toolchain::wrap_with_loader(root, &[PROGRAMS, LIBEXEC, LIBRARIES])?;
            }
            if compressed {
                step.detail("extracting the kernel from its image");
                extract(&bzimage(root, &found.release), &root.join("vmlinux"))?;
            }
            relocate(&headers(root, &found.release))?;
            step.done();
            Ok::<_, KernelError>(())
        })?;
        let modules = first_existing(&place, &["lib/modules", "usr/lib/modules"])?;
        let bzimage = bzimage(&place, &found.release);
        let vmlinux = compressed.then(|| place.join("vmlinux"));
        Ok(Self {
            image: vmlinux.unwrap_or_else(|| bzimage.clone()),
            bzimage,
            modules: Some(modules.join(&found.release)),
            headers: headers(&place, &found.release),
            compiler: found.compiler.as_ref().map(|name| compiler(&place, apt.arch(), name)),
            id,
            arch: apt.arch(),
        })
    }

    /// The release as `uname -r` prints it, if the image's name is `vmlinuz-RELEASE`, as in Debian's packages; `None`
    /// if the image has another name.
    pub fn release(&self) -> Option<&str> {
        self.bzimage.file_name()?.to_str()?.strip_prefix("vmlinuz-")
    }

    /// The configuration file beside the image, as in Debian's packages; `None` if the file is missing.
    pub fn config(&self) -> Option<PathBuf> {
        let release = self.release()?;
        let path = self.bzimage.with_file_name(format!("config-{release}"));
        Some(path).filter(|path| path.is_file())
    }

    /// A `System.map` made from the kernel itself; `None` if no symbols are found in it.
    ///
    /// # Errors
    /// [`KernelError`].
    pub fn symbols(&self, cache: &Cache) -> Result<Option<PathBuf>, KernelError> {
        let place = cache.get(&self.arch.kind("symbols"), &self.id, |root| {
            let kernel = fs::read(&self.image).map_err(FileError::at(&self.image))?;
            let Some(map) = kallsyms::system_map(&kernel) else {
                return Ok::<_, KernelError>(());
            };
            let path = root.join(SYSTEM_MAP);
            fs::write(&path, map).map_err(FileError::at(&path))?;
            Ok(())
        })?;
        Ok(Some(place.join(SYSTEM_MAP)).filter(|path| path.is_file()))
    }

    /// An ELF file with the kernel's ORC tables, for `vmm run --vmlinux`; `None` if the kernel has none.
    ///
    /// # Errors
    /// [`KernelError`].
    pub fn orc(&self, cache: &Cache) -> Result<Option<PathBuf>, KernelError> {
        let place = cache.get(&self.arch.kind("orc"), &self.id, |root| {
            let kernel = fs::read(&self.image).map_err(FileError::at(&self.image))?;
            let Some(tables) = orc::tables(&kernel) else {
                return Ok::<_, KernelError>(());
            };
            let path = root.join(ORC);
            fs::write(&path, tables).map_err(FileError::at(&path))?;
            Ok(())
        })?;
        Ok(Some(place.join(ORC)).filter(|path| path.is_file()))
    }

    fn own(image: &Path, sources: &Sources) -> Result<Self, KernelError> {
        let headers = sources.headers.clone().ok_or(KernelError::NoHeaders)?;
        let symbols = headers.join("Module.symvers");
        if !symbols.is_file() || !headers.join("Makefile").is_file() {
            return Err(KernelError::BadHeaders(headers));
        }
        let mut key = Key::new("own kernel").file("image", image)?.file("symbols", &symbols)?;
        // A relative path would name other directories in other working directories.
        let absolute = |path: &Path| fs::canonicalize(path).map_err(FileError::at(path));
        let headers = absolute(&headers)?;
        key = key.text("headers", &headers.to_string_lossy());
        let modules = sources.modules.as_deref().map(absolute).transpose()?;
        if let Some(modules) = &modules {
            key = key.text("modules", &modules.to_string_lossy()).state("modules", modules)?;
        }
        let (image, id) = (image.to_owned(), format!("own-{}", key.hex()));
        Ok(Self { bzimage: image.clone(), image, modules, headers, compiler: None, id, arch: sources.arch })
    }
}

/// Extracts the kernel proper from `image`.
fn extract(image: &Path, vmlinux: &Path) -> Result<(), KernelError> {
    let bytes = fs::read(image).map_err(FileError::at(image))?;
    let kernel = vmlinux::extract(&bytes).map_err(|source| KernelError::Extract { image: image.to_owned(), source })?;
    Ok(fs::write(vmlinux, kernel).map_err(FileError::at(vmlinux))?)
}

fn bzimage(root: &Path, release: &str) -> PathBuf {
    root.join("boot").join(format!("vmlinuz-{release}"))
}

/// Puts the image and its configuration where older packages have them. Since Linux 7.2, they are beside the modules, and
/// a script of the package copies them when it is installed.
fn to_boot(root: &Path, release: &str) -> Result<(), KernelError> {
    let (modules, boot) = (root.join("usr/lib/modules").join(release), root.join("boot"));
    if !modules.join("vmlinuz").is_file() {
        return Ok(());
    }
    fs::create_dir_all(&boot).map_err(FileError::at(&boot))?;
    for name in ["vmlinuz", "config"] {
        let path = modules.join(name);
        fs::rename(&path, boot.join(format!("{name}-{release}"))).map_err(FileError::at(&path))?;
    }
    Ok(())
}

/// The compiler `name` of the packages in `root`.
fn compiler(root: &Path, arch: Arch, name: &str) -> PathBuf {
    root.join(PROGRAMS).join(format!("{}{name}", arch.gnu()))
}

fn headers(root: &Path, release: &str) -> PathBuf {
    root.join("usr/src").join(format!("linux-headers-{release}"))
}

/// Makes the headers usable where they were unpacked. Their Makefile names the common headers' Makefile, and since Linux
/// 6.13 also its own directory, by their installed paths, below /usr/src. Replaces these paths with relative ones.
fn relocate(headers: &Path) -> Result<(), KernelError> {
    let path = headers.join("Makefile");
    let text = fs::read_to_string(&path).map_err(FileError::at(&path))?;
    let text =
        relocated(&text).ok_or_else(|| KernelError::Layout("Makefile that includes the common headers".into()))?;
    Ok(fs::write(&path, text).map_err(FileError::at(&path))?)
}

fn relocated(makefile: &str) -> Option<String> {
    const BESIDE: &str = "$(dir $(lastword $(MAKEFILE_LIST)))../";
    let include = format!("include {BESIDE}");
    // Expand the path at once: later, the last makefile is another.
    let output = format!("KBUILD_OUTPUT := {BESIDE}");
    makefile
        .contains("include /usr/src/")
        .then(|| makefile.replace("include /usr/src/", &include).replace("KBUILD_OUTPUT=/usr/src/", &output))
}

fn first_existing(root: &Path, names: &[&str]) -> Result<PathBuf, KernelError> {
    let found = names.iter().map(|name| root.join(name)).find(|path| path.is_dir());
    found.ok_or_else(|| KernelError::Layout(format!("directory {}", names.join(" or "))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::apt::archive::{Archive, Deb};
    use crate::vmlinux::tests::image;
    use vpmu_errors::chain;

    /// The packages of a kernel, like Debian's.
    fn debs(release: &str, version: &str) -> Vec<Deb> {
        let abi = release.strip_suffix("-cloud-amd64").unwrap();
        let common = format!("linux-headers-{abi}-common");
        let makefile = format!("include /usr/src/{common}/Makefile\n");
        let mut kernel = Deb::new(&format!("linux-image-{release}"), version);
        kernel.files = vec![
            (format!("boot/vmlinuz-{release}"), image(b"\x7fELF!")),
            (format!("lib/modules/{release}/modules.dep"), Vec::new()),
        ];
        let mut headers = Deb::new(&format!("linux-headers-{release}"), version);
        headers.fields = format!("Depends: {common} (= {version}), linux-kbuild-6.1, gcc-12\n");
        headers.files = vec![(format!("usr/src/linux-headers-{release}/Makefile"), makefile.into_bytes())];
        let parts = [&*common, "linux-kbuild-6.1"].map(|name| Deb::new(name, version));
        [kernel, headers].into_iter().chain(parts).collect()
    }

    const FIRST: &str = "6.1.0-1-cloud-amd64";
    const SECOND: &str = "6.1.0-2-cloud-amd64";

    /// An archive that has replaced the first kernel with the second, while apt's lists still name the first.
    fn stale() -> (Archive, Cache) {
        let archive = Archive::new();
        archive.publish(&debs(FIRST, "6.1.1-1"), &[]);
        archive.update_lists();
        archive.publish(&debs(SECOND, "6.1.2-1"), &[]);
        let cache = Cache::at(archive.root().join("cache"));
        (archive, cache)
    }

    #[test]
    fn stock_kernel_replaced_in_archive_is_the_new_one_after_one_refresh() {
        let (archive, cache) = stale();
        // The cache contains the packages that the stale lists name.
        let named = packages::resolve(&archive.apt(), &cache, "6.1").unwrap();
        assert_eq!(named.release, FIRST);
        let kernel = Kernel::stock_from(&archive.apt(), &cache, "6.1").unwrap();
        assert!(kernel.id.starts_with(SECOND), "{kernel:?}");
        assert_eq!(fs::read(&kernel.image).unwrap(), b"\x7fELF!");
        assert!(kernel.headers.join("Makefile").is_file() && kernel.modules.unwrap().is_dir());
        assert_eq!(archive.answers_for(&debs(FIRST, "6.1.1-1")[0]), [404]);
        for deb in debs(SECOND, "6.1.2-1") {
            assert_eq!(archive.answers_for(&deb), [200], "{}", deb.name);
        }
        assert_eq!(archive.updates(), 2);
        let again = Kernel::stock_from(&archive.apt(), &cache, "6.1").unwrap();
        assert_eq!((again.id, archive.updates()), (kernel.id, 2));
    }

    #[test]
    fn stock_kernel_of_several_packages_is_put_together() {
        const RELEASE: &str = "7.3.4+deb13-cloud-amd64";
        let archive = Archive::new();
        let mut debs = debs(RELEASE, "7.3.4-1");
        debs[0].fields = format!("Depends: linux-base (>= 4), linux-base-{RELEASE}, linux-binary-{RELEASE}\n");
        debs[0].files.clear();
        let parts = [("base", "config", b"CONFIG_A=y\n".to_vec()), ("binary", "vmlinuz", image(b"\x7fELF!"))];
        for (part, file, contents) in parts {
            let mut deb = Deb::new(&format!("linux-{part}-{RELEASE}"), "7.3.4-1");
            deb.files = vec![(format!("usr/lib/modules/{RELEASE}/{file}"), contents)];
            debs.push(deb);
        }
        archive.publish(&debs, &[]);
        archive.update_lists();
        let cache = Cache::at(archive.root().join("cache"));
        let kernel = Kernel::stock_from(&archive.apt(), &cache, "7.3").unwrap();
        assert_eq!(fs::read(&kernel.image).unwrap(), b"\x7fELF!");
        assert_eq!(kernel.release(), Some(RELEASE));
        assert_eq!(fs::read(kernel.config().unwrap()).unwrap(), b"CONFIG_A=y\n");
        assert!(kernel.modules.unwrap().is_dir());
    }

    #[test]
    fn stock_kernel_rebuilt_under_the_same_name_is_the_new_one() {
        let archive = Archive::new();
        let cache = Cache::at(archive.root().join("cache"));
        archive.publish(&debs(FIRST, "6.1.1-1"), &[]);
        archive.update_lists();
        let first = packages::resolve(&archive.apt(), &cache, "6.1").unwrap();
        archive.publish(&debs(FIRST, "6.1.1-2"), &[]);
        Kernel::stock_from(&archive.apt(), &cache, "6.1").unwrap();
        let second = packages::resolve(&archive.apt(), &cache, "6.1").unwrap();
        let version = |found: KernelPackages| found.packages[0].version.clone();
        assert_eq!([version(first), version(second)], ["6.1.1-1", "6.1.1-2"]);
        assert_eq!(archive.updates(), 2);
    }

    #[test]
    fn stock_kernel_half_replaced_is_taken_from_one_version() {
        // The archive still has the first image, but not the headers.
        let (archive, cache) = stale();
        let mut both = debs(SECOND, "6.1.2-1");
        both.push(debs(FIRST, "6.1.1-1").remove(0));
        archive.publish(&both, &[]);
        let kernel = Kernel::stock_from(&archive.apt(), &cache, "6.1").unwrap();
        assert!(kernel.id.starts_with(SECOND), "{kernel:?}");
        assert!(!kernel.headers.with_file_name(format!("linux-headers-{FIRST}")).exists());
        assert_eq!(archive.answers_for(&both[4]), [200]);
        let kernels = fs::read_dir(cache.directory().join("results/kernel")).unwrap();
        assert_eq!(kernels.filter(|entry| entry.as_ref().unwrap().path().is_dir()).count(), 1);
    }

    #[test]
    fn stock_kernel_missing_from_archive_fails_with_package_and_cause() {
        let (archive, cache) = stale();
        archive.drop_file(&debs(SECOND, "6.1.2-1")[0]);
        let error = chain(&Kernel::stock_from(&archive.apt(), &cache, "6.1").unwrap_err());
        let package = format!("cannot fetch linux-image-{SECOND} 6.1.2-1: ");
        assert!(error.starts_with(&package) && error.contains("404"), "{error}");
        assert_eq!(archive.updates(), 2);
    }

    #[test]
    fn stock_kernel_of_unknown_series_fails_after_one_refresh() {
        let (archive, cache) = stale();
        let error = chain(&Kernel::stock_from(&archive.apt(), &cache, "9.9").unwrap_err());
        assert!(error.contains("no cloud kernel 9.9; they have: 6.1"), "{error}");
        assert_eq!(archive.updates(), 2);
    }

    #[test]
    fn stock_kernel_is_fetched_when_there_are_no_lists() {
        let archive = Archive::new();
        archive.publish(&debs(FIRST, "6.1.1-1"), &[]);
        let cache = Cache::at(archive.root().join("cache"));
        let kernel = Kernel::stock_from(&archive.apt(), &cache, "6.1").unwrap();
        assert!(kernel.id.starts_with(FIRST), "{kernel:?}");
        assert_eq!(archive.updates(), 1);
    }

    #[test]
    fn stock_kernel_installed_without_lists_is_fetched_after_one_refresh() {
        // Without lists, apt-cache shows the installed packages, but apt-get does not know where to fetch them.
        let archive = Archive::new();
        archive.publish(&debs(SECOND, "6.1.2-1"), &[]);
        archive.pretend_installed(&debs(FIRST, "6.1.1-1"));
        let cache = Cache::at(archive.root().join("cache"));
        let kernel = Kernel::stock_from(&archive.apt(), &cache, "6.1").unwrap();
        assert!(kernel.id.starts_with(SECOND), "{kernel:?}");
        assert_eq!(archive.updates(), 1);
    }

    #[test]
    fn headers_include_the_common_headers_beside_them() {
        let text = relocated("include /usr/src/linux-headers-6.1.0-56-common/Makefile\n").unwrap();
        assert!(text.ends_with("../linux-headers-6.1.0-56-common/Makefile\n"));
        assert!(relocated("all:\n").is_none());
        let own = "KBUILD_OUTPUT=/usr/src/linux-headers-7.3.4+deb13-cloud-amd64\n";
        let text = relocated(&format!("{own}include /usr/src/linux-headers-7.3.4+deb13-common/Makefile\n")).unwrap();
        assert!(text.starts_with("KBUILD_OUTPUT := $(dir ") && !text.contains("/usr/src"), "{text}");
    }

    #[test]
    fn own_kernel_without_a_build_directory_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let cache = Cache::at(directory.path().join("cache"));
        let mut sources = Sources { kernel: Some("/no/kernel".into()), ..Sources::default() };
        let error = Kernel::get(&cache, &sources).unwrap_err();
        assert!(matches!(error, KernelError::NoHeaders));
        sources.headers = Some(directory.path().to_owned());
        let error = Kernel::get(&cache, &sources).unwrap_err();
        assert!(matches!(error, KernelError::BadHeaders(_)));
        for name in ["Makefile", "Module.symvers"] {
            fs::write(directory.path().join(name), "").unwrap();
        }
        let error = Kernel::get(&cache, &sources).unwrap_err();
        assert!(matches!(error, KernelError::Digest(_)), "{error}");
        sources.kernel = Some(directory.path().join("Makefile"));
        assert!(Kernel::get(&cache, &sources).unwrap().modules.is_none());
    }

    /// A kernel of the user's own with one module. Returns its sources and the module.
    fn own(directory: &Path) -> (Sources, PathBuf) {
        for name in ["Makefile", "Module.symvers", "modules/kernel/a.ko"] {
            let path = directory.join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "1").unwrap();
        }
        let sources = Sources {
            kernel: Some(directory.join("Makefile")),
            headers: Some(directory.to_owned()),
            modules: Some(directory.join("modules")),
            ..Sources::default()
        };
        (sources, directory.join("modules/kernel/a.ko"))
    }

    #[test]
    fn own_kernel_with_a_changed_module_has_another_id() {
        let directory = tempfile::tempdir().unwrap();
        let cache = Cache::at(directory.path().join("cache"));
        let (sources, module) = own(&directory.path().join("kernel"));
        let id = || Kernel::get(&cache, &sources).unwrap().id;
        let first = id();
        assert_eq!(id(), first);
        fs::write(module, "22").unwrap();
        assert_ne!(id(), first);
    }

    #[test]
    fn own_kernel_is_known_by_its_place_and_not_by_a_relative_path() {
        let directory = tempfile::tempdir().unwrap();
        let cache = Cache::at(directory.path().join("cache"));
        let (sources, _) = own(&directory.path().join("kernel"));
        let up = "../".repeat(std::env::current_dir().unwrap().components().count());
        let relative = |path: &Option<PathBuf>| {
            let path = path.as_deref().unwrap();
            Some(Path::new(&up).join(path.strip_prefix("/").unwrap()))
        };
        let (headers, modules) = (relative(&sources.headers), relative(&sources.modules));
        let other = Kernel::get(&cache, &Sources { headers, modules, ..sources.clone() }).unwrap();
        assert_eq!(other.id, Kernel::get(&cache, &sources).unwrap().id);
    }
}
