//! Runs commands on the lab's own KVM host, so that tests can check files that the VMM finishes only after its guest has
//! ended. A session boots this host once, and runs one script there.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use images::third_party::Files;
use images::{Arch, Boot, KvmHostChoice, Sources};
use vpmu_errors::chain;

use crate::{boots, guest};

/// Shell functions that a session's script can call. `put NAME FILE` outputs a file. `boot NAME ARGUMENT...` runs a
/// guest with `$VCPUS` vCPUs, and outputs the guest's console, log, recording and report as files `NAME.*`. `$ACT`
/// selects what the guest does (`tests/guest/end_scenarios.rs`), and `$RESET` selects how the guest resets. The guest
/// also runs this script. In the guest, the first line runs `guest-tests act`, and the rest is not executed.
const PRELUDE: &str = r#"
[ -e /guest/kernel ] || exec guest-tests act
put() {
	printf '\n@file %s ' "$1"
	xxd -p "$2" | tr -d '\n'
	printf '\n'
}
# Prints the id of a machine that has its vCPUs' threads. The parent of this process only waits for it.
machine() {
	for process in $(pidof vmm); do
		if grep -q vcpu0 /proc/$process/task/*/comm 2> /dev/null; then
			echo $process
			return
		fi
	done
	false
}
# Runs a command with a time limit, which is far longer than any command needs. Beyond it, the status is 137.
limited() {
	timeout -s KILL 600 "$@"
}
# Boots a machine. VMM, if it is set, is the command that runs it, with its first arguments.
boot() {
	name=$1
	shift
	limited ${VMM:-vmm} run --kernel /guest/kernel --initramfs /guest/initramfs --vcpus ${VCPUS:-2} --memory 256 \
		--cmdline "console=ttyS0 quiet nokaslr mitigations=off reboot=${RESET:-t} panic=-1 random.trust_cpu=on cryptomgr.notests act=$ACT" \
		--report "/tmp/$name.json" --recording "/tmp/$name.data" "$@" \
		> "/tmp/$name.console" 2> "/tmp/$name.log" < /dev/null
	printf '\n@exit %s %s\n' "$name" $?
	tr -d '\r' < "/tmp/$name.console" > "/tmp/$name.text"
	put "$name.text" "/tmp/$name.text"
	put "$name.log" "/tmp/$name.log"
	[ ! -e "/tmp/$name.data" ] || put "$name.data" "/tmp/$name.data"
	put "$name.json" "/tmp/$name.json"
}
"#;

/// The results of a session.
#[derive(Debug, Default)]
pub struct Session {
    files: BTreeMap<String, Vec<u8>>,
    exits: BTreeMap<String, i32>,
    output: String,
}

impl Session {
    /// Runs a script on a lab's host that has these files in addition to the project's programs. If the script fails, the
    /// error contains its output.
    fn run(arch: Arch, kvm_host: KvmHostChoice, script: &str, files: Files) -> Result<Self, String> {
        let boot = Boot {
            command: format!("{PRELUDE}{script}"),
            programs: vec!["guest-tests".into()],
            files,
            // The host's root file system is in memory, so the memory must also have room for the snapshots.
            memory_mib: 1024,
            kvm_host,
            timeout: boots::LIMIT,
            sources: Sources { arch, version: Some(guest::series()?), ..Sources::default() },
            ..Boot::default()
        };
        let outcome = boot.run_on_lab_host().map_err(|error| chain(&error))?;
        let session = Self::read(outcome.output);
        match outcome.status {
            0 => Ok(session),
            status => Err(format!("the script ends with {status}:\n{}", session.output)),
        }
    }

    fn read(output: String) -> Self {
        let mut session = Self::default();
        for line in output.lines() {
            let mut words = line.splitn(3, ' ');
            match (words.next(), words.next(), words.next()) {
                (Some("@file"), Some(name), bytes) => {
                    let bytes = unhex(bytes.unwrap_or(""));
                    session.files.insert(name.to_owned(), bytes);
                }
                (Some("@exit"), Some(name), Some(status)) => {
                    let status = status.trim().parse().unwrap_or(-1);
                    session.exits.insert(name.to_owned(), status);
                }
                _ => {
                    session.output.push_str(line);
                    session.output.push('\n');
                }
            }
        }
        session
    }

    /// A file that the script output.
    ///
    /// # Panics
    /// If it is missing.
    #[must_use]
    pub fn file(&self, name: &str) -> &[u8] {
        self.files.get(name).unwrap_or_else(|| {
            let known: Vec<&String> = self.files.keys().collect();
            panic!("no file {name} among {known:?}:\n{}", self.output)
        })
    }

    /// Like [`Session::file`], as text.
    ///
    /// # Panics
    /// See [`Session::file`].
    #[must_use]
    pub fn text(&self, name: &str) -> String {
        String::from_utf8_lossy(self.file(name)).into_owned()
    }

    /// The VMM's exit code in boot `name`.
    ///
    /// # Panics
    /// If the boot does not exist.
    #[must_use]
    pub fn exit(&self, name: &str) -> i32 {
        let exit = self.exits.get(name);
        *exit.unwrap_or_else(|| panic!("no boot {name}:\n{}", self.output))
    }

    /// Returns the lines that begin with `@guest` in the output of boot `name`, without this prefix.
    #[must_use]
    pub fn said(&self, name: &str) -> Vec<String> {
        self.text(&format!("{name}.text"))
            .lines()
            .filter_map(|line| line.strip_prefix("@guest "))
            .map(str::to_owned)
            .collect()
    }
}

/// A session that all tests of a test program share. The first test that uses it runs the script.
#[derive(Debug)]
pub struct SharedSession {
    script: &'static str,
    arch: Arch,
    kvm_host: KvmHostChoice,
    /// Whether `VPMU_TEST_ARCH` can select another architecture.
    free: bool,
    perf: bool,
    session: OnceLock<Result<Session, String>>,
}

impl SharedSession {
    /// Returns a session that will run `script`.
    #[must_use]
    pub const fn new(script: &'static str) -> Self {
        Self {
            script,
            arch: Arch::X86_64,
            kvm_host: KvmHostChoice::Lab,
            free: false,
            perf: false,
            session: OnceLock::new(),
        }
    }

    /// Adds stock perf to the session's host.
    #[must_use]
    pub const fn with_perf(mut self) -> Self {
        self.perf = true;
        self
    }

    /// Runs the session on the exact lab of `arch`, whose counters are exact.
    #[must_use]
    pub const fn in_exact_lab(mut self, arch: Arch) -> Self {
        self.arch = arch;
        self.kvm_host = KvmHostChoice::Exact;
        self
    }

    /// Runs the session on the architecture that `VPMU_TEST_ARCH` names, if it is set.
    #[must_use]
    pub const fn on_any(mut self) -> Self {
        self.free = true;
        self
    }

    /// The architecture of the session's host.
    ///
    /// # Panics
    /// If `VPMU_TEST_ARCH` names an unknown architecture.
    #[must_use]
    pub fn arch(&self) -> Arch {
        match self.asked_arch() {
            Ok(arch) => arch,
            Err(error) => panic!("no session: {error}"),
        }
    }

    fn asked_arch(&self) -> Result<Arch, String> {
        match self.free {
            true => guest::asked_arch(self.arch),
            false => Ok(self.arch),
        }
    }

    /// The session.
    ///
    /// # Panics
    /// If the session failed, whether this test or an earlier test started it.
    pub fn get(&self) -> &Session {
        match self.booted() {
            Ok(session) => session,
            Err(error) => panic!("no session: {error}"),
        }
    }

    /// Runs the session, unless it has run.
    pub fn boot(&self) {
        // Each test reports the error.
        let _ = self.booted();
    }

    fn booted(&self) -> &Result<Session, String> {
        self.session.get_or_init(|| {
            let arch = self.asked_arch()?;
            let files = match self.perf {
                true => images::third_party::perf(arch).map_err(|error| chain(&error))?,
                false => Files::new(),
            };
            Session::run(arch, self.kvm_host, self.script, files)
        })
    }
}

/// Converts pairs of hexadecimal digits to bytes. Stops at the first other character.
fn unhex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> =
        text.chars().map_while(|digit| digit.to_digit(16)).filter_map(|digit| u8::try_from(digit).ok()).collect();
    digits.chunks_exact(2).map(|pair| pair[0] << 4 | pair[1]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_session_parses_from_console() {
        let output = "noise\n@file a.data 00ff7f\n@exit a 5\n@file a.text 4067756573742068690a\n@file none \nmore\n";
        let session = Session::read(output.to_owned());
        assert_eq!(session.file("a.data"), [0, 0xff, 0x7f]);
        assert_eq!(session.exit("a"), 5);
        assert_eq!(session.said("a"), ["hi"]);
        assert!(session.file("none").is_empty());
        assert_eq!(session.output, "noise\nmore\n");
    }
}
