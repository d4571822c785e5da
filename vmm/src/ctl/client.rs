//! `vmm ctl`: sends a request to a running machine, and prints the reply.

use std::io::{self, IsTerminal, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::thread;
use std::time::Duration;

use clap::{Args, Subcommand};

use super::connection::{Connection, ConnectionError};
use super::protocol::{Answer, Request};
use super::table;
use crate::path_at::{PathAt, PersistError};
use crate::printable::Printable;
use crate::snapshot::directory::Directory;
use crate::snapshot::{DirectoryError, Owners, SnapshotError, Taken, Wanted, state_file};

/// Arguments of `vmm ctl`.
#[derive(Debug, Clone, Args)]
#[command(after_help = HELP)]
pub struct CtlArgs {
    /// The socket of 'vmm run --ctl SOCKET'
    #[arg(long, value_name = "SOCKET")]
    pub socket: PathBuf,

    /// Print the reply as JSON with stable keys
    #[arg(long, global = true)]
    pub json: bool,

    /// The command to run
    #[command(subcommand)]
    pub command: CtlCommand,
}

/// Commands for a running machine.
#[derive(Debug, Clone, Subcommand)]
pub enum CtlCommand {
    /// Show every persistent event, including those that the guest opened
    List,
    /// Write the recording now
    Dump {
        /// File to write [default: the file of 'vmm run --recording']
        file: Option<PathBuf>,
    },
    /// Write pending samples to the rings
    Flush {
        /// Name or id of an event [default: all]
        event: Option<String>,
    },
    /// Start an event, as 'vmm run --persistent' does
    Start {
        /// EVENT[,period=N|freq=N][,cpu=N|all][,size=BYTES][,name=NAME]
        spec: String,
    },
    /// End an event, even one that the guest opened. The event's records are lost
    End {
        /// Name or id of the event
        event: String,
    },
    /// Save the machine, for 'vmm run --restore DIR'
    #[command(after_help = SNAPSHOT_HELP)]
    Snapshot {
        /// Directory to write, empty or new
        #[arg(value_name = "DIR")]
        directory: PathBuf,
        /// Save only the pages written since BASE: the machine's last snapshot, or the snapshot from which the
        /// machine was restored. 'vmm run --restore DIR' then needs BASE, too
        #[arg(long, value_name = "BASE")]
        diff: Option<PathBuf>,
        /// End the run when the snapshot is complete
        #[arg(long)]
        then_exit: bool,
    },
}

const SNAPSHOT_HELP: &str = "\
The guest is paused while its memory is written, and then continues. With --then-exit it stays paused until \
DIR is complete and on disk; then the run ends with status 6. If the snapshot fails, its files are removed and \
the machine continues. If this command is killed, the machine nevertheless completes the snapshot.

With --diff BASE, DIR has only the pages written since BASE: the snapshot is small, and the pause is short. DIR \
refers to BASE by the name of its directory, and 'vmm run --restore DIR' reads both, and the bases of BASE. Don't \
change BASE, and keep it beside DIR under its name; or give its path to 'vmm run --restore DIR --base BASE'. The \
machine must run with --track-dirty, and BASE must be its last snapshot, or the snapshot that the machine was \
restored from.

DIR is new, or an empty directory of your own, and no symbolic link. It holds all of the guest's memory, secrets \
included; only its owner can read it. Don't change its files while machines run from it: they read their memory \
from there. 'vmm run --restore DIR' works any number of times; the copies have the same random numbers, keys and \
addresses.";

const HELP: &str = "\
Examples:
  vmm ctl --socket vm.sock list
  vmm ctl --socket vm.sock start marks,size=1M,name=steps
  vmm ctl --socket vm.sock dump now.data && perf script -i now.data
  vmm ctl --socket vm.sock list --json | jq .events
  vmm ctl --socket vm.sock snapshot here && vmm run --restore here

The VM's owner and root may use the socket. As root, you speak to the user whom the socket's file belongs to: \
'ls -l vm.sock' shows who that is. If that user is not root, only root or that user may be able to create files in \
the socket's directory.

Exit status:
  0  done
  1  the machine refused, for the reason printed; or no machine answered
  2  wrong usage";

/// Errors of `vmm ctl`.
#[derive(Debug, thiserror::Error)]
pub enum CtlError {
    /// There is no machine, it cannot be trusted, or it refused.
    #[error(transparent)]
    Connection(#[from] ConnectionError),
    /// The file's path cannot be made absolute.
    #[error("cannot make the path {file} absolute")]
    File {
        /// The path as given.
        file: PathBuf,
        /// The host's reason.
        #[source]
        source: io::Error,
    },
    /// A directory or a device exists at the path.
    #[error("{0} is not a regular file: dump to another path")]
    Taken(PathBuf),
    /// The recording cannot be written at its path.
    #[error("cannot write the recording {path}")]
    Recording {
        /// The path.
        path: PathBuf,
        /// The host's reason.
        #[source]
        source: io::Error,
    },
    /// The base of a diff cannot be used.
    #[error("cannot make a diff based on {base}")]
    Base {
        /// The directory of the base.
        base: PathBuf,
        /// The reason.
        #[source]
        source: SnapshotError,
    },
    /// The directory cannot take a snapshot.
    #[error("cannot make the snapshot {directory}")]
    Directory {
        /// The directory.
        directory: PathBuf,
        /// The reason.
        #[source]
        source: DirectoryError,
    },
    /// The machine's files are not the snapshot that was requested.
    #[error(
        "the machine's files are not the requested snapshot, so {directory} was removed: use the version of \
         'vmm' that runs the machine; if it is the same, do not trust the machine"
    )]
    Forged {
        /// The directory.
        directory: PathBuf,
        /// The difference from the requested snapshot.
        #[source]
        source: SnapshotError,
    },
    /// The machine has completed the snapshot, but its state cannot be read or copied.
    #[error("the machine has completed the snapshot {directory}, but it cannot be checked")]
    Unchecked {
        /// The directory.
        directory: PathBuf,
        /// The host's reason.
        #[source]
        source: io::Error,
    },
    /// The reply does not match the request.
    #[error("unexpected reply on {0}: use the version of 'vmm' that runs the machine")]
    Other(PathBuf),
    /// The reply cannot be encoded.
    #[error("cannot encode JSON")]
    Json(#[source] serde_json::Error),
    /// Standard output cannot be written.
    #[error("cannot write to standard output")]
    Output(#[source] io::Error),
}

/// Sends the request and prints the reply on standard output.
///
/// # Errors
/// [`CtlError`].
pub fn run(args: &CtlArgs) -> Result<(), CtlError> {
    let mut machine = Connection::open(&args.socket)?;
    let request = match args.command.clone() {
        CtlCommand::List => Request::List {},
        CtlCommand::Dump { file: Some(file) } => {
            let answer = dump(&mut machine, file)?;
            return report(&answer, args.json);
        }
        CtlCommand::Dump { file: None } => Request::Dump { file: None },
        CtlCommand::Flush { event } => Request::Flush { event },
        CtlCommand::Start { spec } => Request::Start { spec },
        CtlCommand::End { event } => Request::End { event },
        CtlCommand::Snapshot { directory, diff, then_exit } => {
            let taken = snapshot(machine, &directory, diff, then_exit)?;
            return report_snapshot(&taken, &directory, args.json);
        }
    };
    report(&machine.ask(&request, &[])?, args.json)
}

fn report(answer: &Answer, json: bool) -> Result<(), CtlError> {
    print(&match (json, answer) {
        (true, answer) => Printable::json(answer).map_err(CtlError::Json)?,
        (false, Answer::Events(events)) => table::render(events),
        (false, Answer::Recording(recorded)) => Printable::line(recorded),
        (false, Answer::Snapshot(_) | Answer::Done) => Printable::default(),
    })
}

fn print(text: &Printable) -> Result<(), CtlError> {
    match io::stdout().lock().write_all(text.as_bytes()) {
        // The reader closed the output early.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        written => written.map_err(CtlError::Output),
    }
}

/// The path as the machine sees it, which may run in another directory.
fn absolute(file: PathBuf) -> Result<PathBuf, CtlError> {
    std::path::absolute(&file).map_err(|source| CtlError::File { file, source })
}

/// Writes a recording. This process opens the file, with the caller's rights, and passes it to the machine. An older
/// recording is kept as FILE.old.
fn dump(machine: &mut Connection<'_>, file: PathBuf) -> Result<Answer, CtlError> {
    let path = absolute(file)?;
    let place = PathAt::open(&path);
    if place.is_taken() {
        return Err(CtlError::Taken(path));
    }
    let failed = |source| CtlError::Recording { path: path.clone(), source };
    let temporary = place.create_temporary().map_err(failed)?;
    let request = Request::Dump { file: Some(path.clone()) };
    let answer = machine.ask(&request, &[temporary.file()])?;
    temporary.persist_and_keep_older().map_err(|error: PersistError| failed(io::Error::other(error)))?;
    Ok(answer)
}

/// Makes a snapshot. This process creates the files for memory and state, and the machine writes both to disk.
///
/// The machine's state is checked and then copied, because a restore trusts files of the caller.
fn snapshot(
    mut machine: Connection<'_>,
    directory: &Path,
    base: Option<PathBuf>,
    then_exit: bool,
) -> Result<Taken, CtlError> {
    let owners = Owners::new(Some(machine.owner()));
    let wanted = Wanted::new(base.as_deref(), owners)
        .map_err(|source| CtlError::Base { base: base.unwrap_or_default(), source })?;
    let place =
        Directory::make(directory).map_err(|source| CtlError::Directory { directory: directory.to_owned(), source })?;
    let request = Request::Snapshot { id: wanted.id, then_exit, base: wanted.base().cloned() };
    let taken = match ask_with_progress(&mut machine, &request, &place)? {
        Answer::Snapshot(taken) => taken,
        _ => return Err(CtlError::Other(machine.socket().to_owned())),
    };
    let unchecked = |source| CtlError::Unchecked { directory: directory.to_owned(), source };
    let state = match state_file::read(place.state()) {
        Ok(state) => state,
        Err(source) => {
            place.keep();
            return Err(unchecked(source));
        }
    };
    wanted
        .check(directory, &state, place.memory())
        .map_err(|source| CtlError::Forged { directory: directory.to_owned(), source })?;
    place.finish(&state).map_err(unchecked)?;
    Ok(taken)
}

fn report_snapshot(taken: &Taken, directory: &Path, json: bool) -> Result<(), CtlError> {
    let Taken { memory, written, paused_ns } = taken;
    print(&match json {
        true => {
            let answer = serde_json::json!({"snapshot": {
                "directory": directory, "memory": memory, "written": written, "paused_ns": paused_ns,
            }});
            Printable::json(&answer).map_err(CtlError::Json)?
        }
        false => Printable::line(format_args!(
            "{}: {} MiB of memory, {} MiB written, the guest was paused for {} ms",
            directory.display(),
            memory >> 20,
            written.div_ceil(1 << 20),
            paused_ns / 1_000_000,
        )),
    })
}

/// Time between two updates of the progress line.
const PROGRESS: Duration = Duration::from_millis(200);

/// Sends `request` with the files of `place`, and waits for the answer. While it waits, it shows the growing size of the
/// memory file on standard error, if that is a terminal.
fn ask_with_progress(
    machine: &mut Connection<'_>,
    request: &Request,
    place: &Directory,
) -> Result<Answer, ConnectionError> {
    let files = [place.memory(), place.state()];
    if !io::stderr().is_terminal() {
        return machine.ask(request, &files);
    }
    let socket = machine.socket();
    thread::scope(|scope| {
        let (tell, answered) = sync_channel(1);
        scope.spawn(move || {
            // The loop below waits for this message.
            let _ = tell.send(machine.ask(request, &files));
        });
        loop {
            match answered.recv_timeout(PROGRESS) {
                Ok(answer) => {
                    eprint!("\r\x1b[K");
                    return answer;
                }
                Err(RecvTimeoutError::Timeout) => {
                    let blocks = place.memory().metadata().map_or(0, |status| status.blocks());
                    eprint!("\r{} MiB of memory written", blocks >> 11);
                }
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(ConnectionError::Closed(socket.to_owned()));
                }
            }
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_sent_as_the_caller_sees_them() {
        let sent = |file: &str| absolute(file.into()).expect("a path");
        let here = std::env::current_dir().expect("a directory");
        assert_eq!(sent("now.data"), here.join("now.data"));
        assert_eq!(sent("/tmp/now.data"), Path::new("/tmp/now.data"));
    }
}
