//! A kernel to boot with all that belongs to it: Debian's stock one, or the user's own.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;

use crate::cache::{Cache, CacheError};
use crate::digest::{DigestError, Key};
use crate::kallsyms;
use crate::packages::{self, PackageError};
use crate::progress::Step;
use crate::vmlinux::{self, VmlinuxError};

/// The series booted unless another is asked for.
pub const DEFAULT_SERIES: &str = "6.1";
const SYSTEM_MAP: &str = "System.map";

/// Why there is no kernel.
#[derive(Debug, Error)]
pub enum KernelError {
    /// Its packages could not be had.
    #[error(transparent)]
    Package(#[from] PackageError),
    /// The cache cannot be used.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// A given file could not be read.
    #[error(transparent)]
    Digest(#[from] DigestError),
    /// The package's image is not what we know.
    #[error("cannot take the kernel out of {image}")]
    Extract {
        /// The bzImage.
        image: PathBuf,
        /// Why not.
        #[source]
        source: VmlinuxError,
    },
    /// A file could not be read or written.
    #[error("cannot use {path}")]
    File {
        /// Which.
        path: PathBuf,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// Unpacked packages that do not look as expected.
    #[error("the kernel's packages hold no {0}")]
    Layout(String),
    /// A kernel of the user's without headers.
    #[error(
        "a kernel of your own needs its headers for the module: add --headers DIRECTORY (like /lib/modules/VERSION/build)"
    )]
    NoHeaders,
    /// Headers that nothing can be built against.
    #[error("{0} is no kernel build directory: it must hold a Makefile and Module.symvers")]
    BadHeaders(PathBuf),
}

/// The user's own parts, in place of stock ones.
#[derive(Clone, Debug, Default)]
pub struct Sources {
    /// Series or release of the stock kernel; `None`: [`DEFAULT_SERIES`].
    pub version: Option<String>,
    /// A vmlinux or bzImage.
    pub kernel: Option<PathBuf>,
    /// The kernel's build directory.
    pub headers: Option<PathBuf>,
    /// Its modules, like /lib/modules/VERSION. `None` with an own kernel: all is built in.
    pub modules: Option<PathBuf>,
    /// An initramfs that goes below ours: its files stay unless ours have the same names.
    pub initramfs: Option<PathBuf>,
}

/// A kernel and what belongs to it.
#[derive(Clone, Debug)]
pub struct Kernel {
    /// What boots: an ELF vmlinux, unless the user gave something else.
    pub image: PathBuf,
    /// The package's bzImage; the same as `image` for a kernel of the user's.
    pub bzimage: PathBuf,
    /// `/lib/modules/VERSION`; `None`: everything is built in.
    pub modules: Option<PathBuf>,
    /// The build directory for modules.
    pub headers: PathBuf,
    /// A digest that stands for all of this.
    pub id: String,
}

impl Kernel {
    /// The kernel that `sources` ask for.
    ///
    /// # Errors
    /// [`KernelError`].
    pub fn get(cache: &Cache, sources: &Sources) -> Result<Self, KernelError> {
        match &sources.kernel {
            Some(image) => Self::own(image, sources),
            None => Self::stock(cache, sources.version.as_deref().unwrap_or(DEFAULT_SERIES)),
        }
    }

    /// Debian's newest cloud kernel of a series.
    ///
    /// # Errors
    /// [`KernelError`].
    pub fn stock(cache: &Cache, series: &str) -> Result<Self, KernelError> {
        let found = packages::resolve(cache, series)?;
        let mut key = Key::new("kernel, layout 1");
        for package in &found.packages {
            key = key.text(&package.name, &package.version);
        }
        let id = format!("{}-{}", found.release, key.hex());
        let place = cache.get("kernel", &id, |root| {
            let step = Step::new(format!("getting kernel {}", found.release));
            for package in &found.packages {
                packages::unpack(package, root, &step)?;
            }
            step.detail("taking the kernel out of its image");
            let image = bzimage(root, &found.release);
            let bytes = fs::read(&image).map_err(|e| failed(&image, e))?;
            let kernel = vmlinux::extract(&bytes).map_err(|source| KernelError::Extract {
                image: image.clone(),
                source,
            })?;
            let path = root.join("vmlinux");
            fs::write(&path, kernel).map_err(|e| failed(&path, e))?;
            relocate(&headers(root, &found.release))?;
            step.done();
            Ok::<_, KernelError>(())
        })?;
        let modules = first_existing(&place, &["lib/modules", "usr/lib/modules"])?;
        Ok(Self {
            image: place.join("vmlinux"),
            bzimage: bzimage(&place, &found.release),
            modules: Some(modules.join(&found.release)),
            headers: headers(&place, &found.release),
            id,
        })
    }

    /// A `System.map` made from the kernel itself; `None`: it holds no names that can be found.
    ///
    /// # Errors
    /// [`KernelError`].
    pub fn symbols(&self, cache: &Cache) -> Result<Option<PathBuf>, KernelError> {
        let place = cache.get("symbols", &self.id, |root| {
            let kernel = fs::read(&self.image).map_err(|e| failed(&self.image, e))?;
            let Some(map) = kallsyms::system_map(&kernel) else {
                return Ok(());
            };
            let path = root.join(SYSTEM_MAP);
            fs::write(&path, map).map_err(|e| failed(&path, e))
        })?;
        Ok(Some(place.join(SYSTEM_MAP)).filter(|path| path.is_file()))
    }

    fn own(image: &Path, sources: &Sources) -> Result<Self, KernelError> {
        let headers = sources.headers.clone().ok_or(KernelError::NoHeaders)?;
        let symbols = headers.join("Module.symvers");
        if !symbols.is_file() || !headers.join("Makefile").is_file() {
            return Err(KernelError::BadHeaders(headers));
        }
        let mut key = Key::new("own kernel")
            .file("image", image)?
            .file("symbols", &symbols)?;
        key = key.text("headers", &headers.to_string_lossy());
        if let Some(modules) = &sources.modules {
            key = key.text("modules", &modules.to_string_lossy());
        }
        let (image, id) = (image.to_owned(), format!("own-{}", key.hex()));
        Ok(Self {
            bzimage: image.clone(),
            image,
            modules: sources.modules.clone(),
            headers,
            id,
        })
    }
}

fn bzimage(root: &Path, release: &str) -> PathBuf {
    root.join("boot").join(format!("vmlinuz-{release}"))
}

fn headers(root: &Path, release: &str) -> PathBuf {
    root.join("usr/src")
        .join(format!("linux-headers-{release}"))
}

/// Lets the headers be used where they are: their Makefile names the other half by the place
/// where installing the package would put it.
fn relocate(headers: &Path) -> Result<(), KernelError> {
    let path = headers.join("Makefile");
    let text = fs::read_to_string(&path).map_err(|e| failed(&path, e))?;
    let text = relocated(&text)
        .ok_or_else(|| KernelError::Layout("Makefile that includes the common headers".into()))?;
    fs::write(&path, text).map_err(|e| failed(&path, e))
}

fn relocated(makefile: &str) -> Option<String> {
    const INSTALLED: &str = "include /usr/src/";
    const BESIDE: &str = "include $(dir $(lastword $(MAKEFILE_LIST)))../";
    makefile
        .contains(INSTALLED)
        .then(|| makefile.replace(INSTALLED, BESIDE))
}

fn first_existing(root: &Path, names: &[&str]) -> Result<PathBuf, KernelError> {
    let found = names
        .iter()
        .map(|name| root.join(name))
        .find(|path| path.is_dir());
    found.ok_or_else(|| KernelError::Layout(names.join(" or ")))
}

fn failed(path: &Path, source: io::Error) -> KernelError {
    KernelError::File {
        path: path.to_owned(),
        source,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_headers_find_their_other_half_beside_them() {
        let text = relocated("include /usr/src/linux-headers-6.1.0-56-common/Makefile\n").unwrap();
        assert!(text.ends_with("../linux-headers-6.1.0-56-common/Makefile\n"));
        assert!(relocated("all:\n").is_none());
    }

    #[test]
    fn an_own_kernel_needs_headers_that_are_some() {
        let directory = tempfile::tempdir().unwrap();
        let cache = Cache::at(directory.path().join("cache"));
        let mut sources = Sources {
            kernel: Some("/no/kernel".into()),
            ..Sources::default()
        };
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
}
