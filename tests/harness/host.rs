//! Commands on the lab's own KVM host: what a machine leaves behind when its guest ends, which no
//! command in the guest can tell.

use std::collections::BTreeMap;
use std::sync::OnceLock;
use std::time::Duration;

use images::foreign::Files;
use images::{Arch, Boot, PlaceChoice, Sources};
use vpmu_client::error::chain;

/// Far above what the boots of a session take on a loaded machine.
const LIMIT: Duration = Duration::from_secs(900);

/// For the session's script: `put NAME FILE` hands a file over; `boot NAME ARGUMENT...` runs a guest
/// whose files are called so, with `$VCPUS` vCPUs, which does what `$ACT` says and resets as `$RESET` says; the guest's
/// own script is the same, and ends in the first line.
const PRELUDE: &str = r#"
[ -e /guest/kernel ] || exec guest-tests act
put() {
	printf '\n@file %s ' "$1"
	xxd -p "$2" | tr -d '\n'
	printf '\n'
}
boot() {
	name=$1
	shift
	vmm run --kernel /guest/kernel --initramfs /guest/initramfs --vcpus ${VCPUS:-2} --memory 256 \
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

/// What a session left.
#[derive(Debug, Default)]
pub struct Session {
    files: BTreeMap<String, Vec<u8>>,
    exits: BTreeMap<String, i32>,
    output: String,
}

impl Session {
    /// Runs a script with these files beside our programs.
    ///
    /// # Errors
    /// There is no lab, or the script fails: what it said.
    pub fn run(script: &str, files: Files) -> Result<Self, String> {
        Self::run_on(Arch::default(), script, files)
    }

    fn run_on(arch: Arch, script: &str, files: Files) -> Result<Self, String> {
        let boot = Boot {
            command: format!("{PRELUDE}{script}"),
            programs: vec!["guest-tests".into()],
            files,
            memory_mib: 512,
            place: match arch {
                Arch::X86_64 => PlaceChoice::Lab,
                // Its counters are exact there.
                Arch::Aarch64 => PlaceChoice::Exact,
            },
            timeout: LIMIT,
            sources: Sources {
                arch,
                ..Sources::default()
            },
            ..Boot::default()
        };
        let outcome = boot.run_on_lab_host().map_err(|error| chain(&error))?;
        let session = Self::read(outcome.output);
        match outcome.status {
            0 => Ok(session),
            status => Err(format!(
                "the script ends with {status}:\n{}",
                session.output
            )),
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

    /// A file that was handed over.
    ///
    /// # Panics
    /// If it was not.
    #[must_use]
    pub fn file(&self, name: &str) -> &[u8] {
        self.files.get(name).unwrap_or_else(|| {
            let known: Vec<&String> = self.files.keys().collect();
            panic!("no file {name} among {known:?}:\n{}", self.output)
        })
    }

    /// The same as text.
    ///
    /// # Panics
    /// As [`Session::file`].
    #[must_use]
    pub fn text(&self, name: &str) -> String {
        String::from_utf8_lossy(self.file(name)).into_owned()
    }

    /// What the VMM of that boot ended with.
    ///
    /// # Panics
    /// If there was no such boot.
    #[must_use]
    pub fn exit(&self, name: &str) -> i32 {
        let exit = self.exits.get(name);
        *exit.unwrap_or_else(|| panic!("no boot {name}:\n{}", self.output))
    }

    /// The lines by which the guest of that boot said something, without their mark.
    #[must_use]
    pub fn said(&self, name: &str) -> Vec<String> {
        self.text(&format!("{name}.text"))
            .lines()
            .filter_map(|line| line.strip_prefix("@guest "))
            .map(str::to_owned)
            .collect()
    }
}

/// A session that all tests of a binary share: the first to ask for it runs the script.
#[derive(Debug)]
pub struct SharedSession {
    script: &'static str,
    arch: Arch,
    perf: bool,
    session: OnceLock<Result<Session, String>>,
}

impl SharedSession {
    /// A session with stock perf that will run `script`.
    #[must_use]
    pub const fn with_perf(script: &'static str) -> Self {
        Self {
            script,
            arch: Arch::X86_64,
            perf: true,
            session: OnceLock::new(),
        }
    }

    /// The same without perf.
    #[must_use]
    pub const fn new(script: &'static str) -> Self {
        Self {
            script,
            arch: Arch::X86_64,
            perf: false,
            session: OnceLock::new(),
        }
    }

    /// The same on the lab of aarch64, without perf.
    #[must_use]
    pub const fn on_aarch64(script: &'static str) -> Self {
        Self {
            script,
            arch: Arch::Aarch64,
            perf: false,
            session: OnceLock::new(),
        }
    }

    /// The session.
    ///
    /// # Panics
    /// The session failed, for this test or one before.
    pub fn get(&self) -> &Session {
        let session = self.session.get_or_init(|| {
            let files = match self.perf {
                true => images::foreign::perf(self.arch).map_err(|error| chain(&error))?,
                false => Files::new(),
            };
            Session::run_on(self.arch, self.script, files)
        });
        match session {
            Ok(session) => session,
            Err(error) => panic!("no session: {error}"),
        }
    }
}

/// Bytes by two digits each; what is no digit ends them.
fn unhex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text
        .chars()
        .map_while(|digit| digit.to_digit(16))
        .filter_map(|digit| u8::try_from(digit).ok())
        .collect();
    digits
        .chunks_exact(2)
        .map(|pair| pair[0] << 4 | pair[1])
        .collect()
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
