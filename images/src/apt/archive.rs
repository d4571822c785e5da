//! A Debian archive for tests, served over HTTP from this process, and an apt that fetches only from it.
//! Like a mirror, the archive drops the files of a version when it publishes the next.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::io::{self, BufRead, BufReader, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use sha2::{Digest, Sha256};
use tempfile::TempDir;

use super::{Apt, Release};
use crate::arch::Arch;
use crate::cache::Cache;
use crate::process;

/// The release of the published packages.
const RELEASE: &str = Release::Bookworm.name();
/// A release that has none of the published packages.
pub(crate) const NEXT: &str = Release::Trixie.name();
/// The backports of [`NEXT`].
const BACKPORTS: &str = "trixie-backports";

/// A binary package.
pub(crate) struct Deb {
    pub(crate) name: String,
    pub(crate) version: String,
    /// `None` for `all`.
    pub(crate) arch: Option<Arch>,
    /// More fields of the package's record; each line ends with a newline.
    pub(crate) fields: String,
    pub(crate) files: Vec<(String, Vec<u8>)>,
}

impl Deb {
    /// A package that contains its version in `usr/share/NAME`.
    pub(crate) fn new(name: &str, version: &str) -> Self {
        Self {
            name: name.to_owned(),
            version: version.to_owned(),
            arch: None,
            fields: String::new(),
            files: vec![(format!("usr/share/{name}"), version.into())],
        }
    }

    pub(crate) fn record(&self) -> String {
        let Self { name, version, fields, .. } = self;
        let arch = self.arch.map_or("all", Arch::debian);
        format!(
            "Package: {name}\nVersion: {version}\n{fields}Architecture: {arch}\n\
            Maintainer: Nobody <nobody@example.org>\nDescription: for a test\n"
        )
    }

    fn path(&self) -> String {
        let arch = self.arch.map_or("all", Arch::debian);
        format!("pool/{}_{}_{arch}.deb", self.name, file_version(&self.version))
    }

    fn build(&self) -> Vec<u8> {
        let directory = tempfile::tempdir().unwrap();
        let (tree, deb) = (directory.path().join("tree"), directory.path().join("deb"));
        write(&tree.join("DEBIAN/control"), self.record().as_bytes());
        for (name, contents) in &self.files {
            write(&tree.join(name), contents);
        }
        let mut command = Command::new("dpkg-deb");
        command.args(["--build", "--root-owner-group"]);
        process::output(command.arg(&tree).arg(&deb)).unwrap();
        fs::read(&deb).unwrap()
    }
}

/// A source package that contains its version in `version`.
pub(crate) struct Source {
    pub(crate) name: String,
    pub(crate) version: String,
}

impl Source {
    /// Its files, the description first.
    fn build(&self) -> Vec<(String, Vec<u8>)> {
        let Self { name, version } = self;
        let directory = tempfile::tempdir().unwrap();
        let tree = directory.path().join("tree");
        let control = format!(
            "Source: {name}\nMaintainer: Nobody <nobody@example.org>\n\n\
            Package: {name}\nArchitecture: all\nDescription: for a test\n"
        );
        let changelog = format!(
            "{name} ({version}) stable; urgency=low\n\n  * For a test.\n\n \
            -- Nobody <nobody@example.org>  Thu, 01 Jan 1970 00:00:00 +0000\n"
        );
        write(&tree.join("debian/control"), control.as_bytes());
        write(&tree.join("debian/changelog"), changelog.as_bytes());
        write(&tree.join("debian/source/format"), b"3.0 (native)\n");
        write(&tree.join("version"), version.as_bytes());
        let mut command = Command::new("dpkg-source");
        command.args(["--build", "tree"]);
        process::output(command.current_dir(directory.path())).unwrap();
        let mut files: Vec<(String, Vec<u8>)> = fs::read_dir(directory.path())
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .filter(|path| path.is_file())
            .map(|path| {
                let name = path.file_name().unwrap().to_string_lossy().into_owned();
                (name, fs::read(&path).unwrap())
            })
            .collect();
        files.sort_by_key(|(name, _)| !name.ends_with(".dsc"));
        files
    }
}

/// The archive and the directory of its apt.
pub(crate) struct Archive {
    directory: TempDir,
    server: Server,
}

impl Archive {
    /// Makes an empty archive; its apt has no lists yet.
    pub(crate) fn new() -> Self {
        let archive = Self { directory: tempfile::tempdir().unwrap(), server: Server::start() };
        let root = archive.root();
        for name in [
            "etc/apt/apt.conf.d",
            "etc/apt/preferences.d",
            "etc/apt/sources.list.d",
            "etc/apt/trusted.gpg.d",
            "var/cache/apt/archives/partial",
            "var/lib/apt/lists/partial",
            "var/log/apt",
        ] {
            fs::create_dir_all(root.join(name)).unwrap();
        }
        let config = format!(
            "Dir \"{root}\";\n\
            Dir::State::status \"{root}/status\";\n\
            Dir::Bin::dpkg \"/bin/true\";\n\
            APT::Architecture \"amd64\";\n\
            APT::Architectures {{ \"amd64\"; }};\n\
            APT::Sandbox::User \"root\";\n\
            APT::Get::AllowUnauthenticated \"true\";\n\
            Acquire::AllowInsecureRepositories \"true\";\n\
            Acquire::http::Proxy \"DIRECT\";\n\
            Acquire::Languages \"none\";\n",
            root = root.display()
        );
        write(&root.join("config"), config.as_bytes());
        archive.pretend_installed(&[]);
        archive.set_sources(RELEASE, &["debian"]);
        archive
    }

    /// Makes apt fetch the release from these directories of the server.
    pub(crate) fn set_sources(&self, release: &str, directories: &[&str]) {
        let line = |directory: &&str| {
            let archive = format!("http://{}/{directory}/ {release} main\n", self.server.address);
            format!("deb {archive}deb-src {archive}")
        };
        let lines: String = directories.iter().map(line).collect();
        write(&self.root().join("etc/apt/sources.list"), lines.as_bytes());
    }

    /// Makes dpkg's database list these packages as installed, and no others.
    pub(crate) fn pretend_installed(&self, debs: &[Deb]) {
        let record = |deb: &Deb| format!("{}Status: install ok installed\n\n", deb.record());
        let records: String = debs.iter().map(record).collect();
        write(&self.root().join("status"), records.as_bytes());
    }

    /// Replaces everything in the archive.
    pub(crate) fn publish(&self, debs: &[Deb], sources: &[Source]) {
        let mut files = BTreeMap::new();
        let [packages, foreign] = add_debs(&mut files, debs);
        let mut dscs = String::new();
        for source in sources {
            let Source { name, version } = source;
            let parts = source.build();
            let names = ["Checksums-Sha256:".to_owned()]
                .into_iter()
                .chain(parts.iter().map(|(name, part)| format!(" {} {} {name}", digest(part), part.len())));
            let names = names.collect::<Vec<_>>().join("\n");
            writeln!(
                dscs,
                "Package: {name}\nBinary: {name}\nVersion: {version}\nArchitecture: all\n\
                Format: 3.0 (native)\nDirectory: pool\n{names}\n"
            )
            .unwrap();
            for (name, part) in parts {
                files.insert(format!("/debian/pool/{name}"), part);
            }
        }
        add_release(&mut files, RELEASE, [packages, foreign, dscs]);
        let other = Deb::new("base-files", "13").record();
        add_release(&mut files, NEXT, [other.clone(), other, String::new()]);
        self.server.state.lock().unwrap().files = files;
    }

    /// Adds the packages of [`NEXT`], and of its backports.
    pub(crate) fn publish_next(&self, released: &[Deb], backports: &[Deb]) {
        let files = &mut self.server.state.lock().unwrap().files;
        for (release, debs) in [(NEXT, released), (BACKPORTS, backports)] {
            let [packages, foreign] = add_debs(files, debs);
            add_release(files, release, [packages, foreign, String::new()]);
        }
    }

    /// Drops the file of `deb`, but keeps `deb` in the index.
    pub(crate) fn drop_file(&self, deb: &Deb) {
        let path = format!("/debian/{}", deb.path());
        let dropped = self.server.state.lock().unwrap().files.remove(&path);
        assert!(dropped.is_some(), "{path}");
    }

    /// Stops answering.
    pub(crate) fn shut_down(&mut self) {
        self.server.stop();
    }

    /// Returns an apt that may refresh its lists but has not done so yet, as if in a new process run by root.
    pub(crate) fn apt(&self) -> Apt {
        let root = self.root();
        Apt {
            config: Some(root.join("config")),
            preferences: None,
            lists: root.join("var/lib/apt/lists"),
            may_update: true,
            locks: Some(Cache::at(root.join("locks"))),
            lock: "apt".to_owned(),
            updated: Mutex::new(false),
            arch: Arch::default(),
            release: None,
            native: None,
            sources: None,
        }
    }

    /// Like [`Archive::apt`], for an ordinary user.
    pub(crate) fn user_apt(&self) -> Apt {
        Apt { may_update: false, ..self.apt() }
    }

    /// Fetches the lists as an administrator does.
    pub(crate) fn update_lists(&self) {
        process::output(self.apt().get().unwrap().arg("update")).unwrap();
    }

    /// Number of times that the lists of [`RELEASE`] were updated: each update requests `InRelease`, even if the lists
    /// are unchanged.
    pub(crate) fn updates(&self) -> usize {
        self.answers(&format!("{}/InRelease", dist(RELEASE))).len()
    }

    /// The statuses of the answers to requests for `deb`'s file.
    pub(crate) fn answers_for(&self, deb: &Deb) -> Vec<u16> {
        self.answers(&format!("/debian/{}", deb.path()))
    }

    fn answers(&self, path: &str) -> Vec<u16> {
        let state = self.server.state.lock().unwrap();
        let answers = state.answers.iter().filter(|(asked, _)| asked == path);
        answers.map(|(_, status)| *status).collect()
    }

    /// The root directory of the archive's apt; tests may put more files there.
    pub(crate) fn root(&self) -> &Path {
        self.directory.path()
    }
}

#[derive(Default)]
struct State {
    files: BTreeMap<String, Vec<u8>>,
    answers: Vec<(String, u16)>,
    stopped: bool,
}

/// A web server of files in memory.
struct Server {
    address: SocketAddr,
    state: Arc<Mutex<State>>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let state = Arc::new(Mutex::new(State::default()));
        let shared = Arc::clone(&state);
        let thread = std::thread::spawn(move || {
            for connection in listener.incoming() {
                if shared.lock().unwrap().stopped {
                    return;
                }
                let (connection, state) = (connection.unwrap(), Arc::clone(&shared));
                // Ignore errors: apt closes connections once it has what it wants.
                std::thread::spawn(move || drop(serve(&connection, &state)));
            }
        });
        Self { address, state, thread: Some(thread) }
    }

    fn stop(&mut self) {
        let Some(thread) = self.thread.take() else {
            return;
        };
        self.state.lock().unwrap().stopped = true;
        drop(TcpStream::connect(self.address)); // wakes the thread up
        thread.join().unwrap();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Answers the requests of one connection until apt closes it.
fn serve(mut connection: &TcpStream, state: &Mutex<State>) -> io::Result<()> {
    let mut lines = BufReader::new(connection.try_clone()?).lines();
    while let Some(request) = lines.next() {
        let request = request?;
        for header in lines.by_ref() {
            if header?.is_empty() {
                break;
            }
        }
        let path = request.split(' ').nth(1).unwrap_or_default();
        let path = path.replace("%2b", "+"); // the one character that apt encodes here
        let (status, contents) = {
            let mut state = state.lock().unwrap();
            let answer = match state.files.get(&path) {
                Some(contents) => (200, contents.clone()),
                None => (404, Vec::new()),
            };
            state.answers.push((path, answer.0));
            answer
        };
        let reason = if status == 200 { "OK" } else { "Not Found" };
        write!(connection, "HTTP/1.1 {status} {reason}\r\nContent-Length: {}\r\n\r\n", contents.len())?;
        connection.write_all(&contents)?;
    }
    Ok(())
}

/// Adds the packages' files. Returns their records for the two architectures.
fn add_debs(files: &mut BTreeMap<String, Vec<u8>>, debs: &[Deb]) -> [String; 2] {
    let (mut packages, mut foreign) = (String::new(), String::new());
    for deb in debs {
        let (path, contents) = (deb.path(), deb.build());
        let (size, digest) = (contents.len(), digest(&contents));
        let record = format!("{}Filename: {path}\nSize: {size}\nSHA256: {digest}\n\n", deb.record());
        if deb.arch != Some(Arch::Aarch64) {
            packages.push_str(&record);
        }
        if deb.arch != Some(Arch::X86_64) {
            foreign.push_str(&record);
        }
        files.insert(format!("/debian/{path}"), contents);
    }
    [packages, foreign]
}

/// Adds the indices of a release: of packages for the two architectures, and of sources.
fn add_release(files: &mut BTreeMap<String, Vec<u8>>, name: &str, indices: [String; 3]) {
    // apt installs from such a release only what the user asks it for.
    let automatic = if name == BACKPORTS { "NotAutomatic: yes\nButAutomaticUpgrades: yes\n" } else { "" };
    let mut release = format!(
        "Origin: Debian\nLabel: Debian\nCodename: {name}\n{automatic}Components: main\nArchitectures: amd64 arm64\nSHA256:\n"
    );
    let paths = ["main/binary-amd64/Packages", "main/binary-arm64/Packages", "main/source/Sources"];
    for (path, index) in paths.into_iter().zip(indices) {
        let (size, digest) = (index.len(), digest(index.as_bytes()));
        writeln!(release, " {digest} {size} {path}").unwrap();
        files.insert(format!("{}/{path}", dist(name)), index.into_bytes());
    }
    files.insert(format!("{}/Release", dist(name)), release.into_bytes());
}

fn dist(release: &str) -> String {
    format!("/debian/dists/{release}")
}

/// The version as it appears in file names, without the epoch.
fn file_version(version: &str) -> &str {
    version.split_once(':').map_or(version, |(_, rest)| rest)
}

fn digest(contents: &[u8]) -> String {
    let mut text = String::new();
    for byte in Sha256::digest(contents) {
        write!(text, "{byte:02x}").unwrap();
    }
    text
}

fn write(path: &Path, contents: &[u8]) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, contents).unwrap();
}
