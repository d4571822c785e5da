//! `vmm ctl`: sends a request to a running machine, and prints the reply.

use std::fs::{self, File};
use std::hash::{BuildHasher, RandomState};
use std::io::{self, BufRead, BufReader, IsTerminal, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::thread;
use std::time::Duration;

use clap::{Args, Subcommand};

use super::descriptor;
use super::protocol::{Answer, Reply, Request};
use super::table;
use crate::path_at::PathAt;
use crate::snapshot::directory::Directory;
use crate::snapshot::{Base, SnapshotError, Taken};

/// Maximum size of a reply in bytes. No reply of a VMM is that large. The limit protects this client if another program
/// listens on the socket.
const MAX_ANSWER: u64 = 64 << 20;

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
the machine continues. If this command is killed, the machine continues, too; the next snapshot into DIR \
removes the leftover files.

With --diff BASE, DIR has only the pages written since BASE: the snapshot is small, and the pause is short. DIR \
refers to BASE, and 'vmm run --restore DIR' reads both, and the bases of BASE. Don't change BASE, and keep it at its \
path, or beside DIR if it is beside DIR now. The machine must run with --track-dirty, and BASE must be its last \
snapshot, or the snapshot that the machine was restored from.

DIR holds all of the guest's memory, secrets included; only its owner can read it. Don't change its files while \
machines run from it: they read their memory from there. 'vmm run --restore DIR' works any number of times; the \
copies have the same random numbers, keys and addresses.";

const HELP: &str = "\
Examples:
  vmm ctl --socket vm.sock list
  vmm ctl --socket vm.sock start marks,size=1M,name=steps
  vmm ctl --socket vm.sock dump now.data && perf script -i now.data
  vmm ctl --socket vm.sock list --json | jq .events
  vmm ctl --socket vm.sock snapshot here && vmm run --restore here

The VM's owner and root may use the socket.

Exit status:
  0  done
  1  the machine refused, for the reason printed; or no machine answered
  2  wrong usage";

/// Errors of `vmm ctl`.
#[derive(Debug, thiserror::Error)]
pub enum CtlError {
    /// The socket does not exist.
    #[error("no control socket at {0}: start the machine with 'vmm run --ctl {0}'")]
    Missing(PathBuf),
    /// No process listens on the socket.
    #[error("no machine listens on {0}: the machine that created the socket has ended")]
    Dead(PathBuf),
    /// The path is not a socket.
    #[error("{0} is not a control socket: give --socket the same path as 'vmm run --ctl'")]
    NoSocket(PathBuf),
    /// The caller lacks permission.
    #[error(
        "no permission for the control socket {0}: run as the owner of the machine, or as root"
    )]
    Permission(PathBuf),
    /// Communication failed.
    #[error("cannot communicate on the control socket {path}")]
    Socket {
        /// The path.
        path: PathBuf,
        /// The host's reason.
        #[source]
        source: io::Error,
    },
    /// The machine ended, or rejected the connection.
    #[error("the machine at {0} closed the connection without a reply")]
    Closed(PathBuf),
    /// The reply does not come from a VMM, or comes from a VMM of a different version.
    #[error("unexpected reply on {path}: use the version of 'vmm' that runs the machine")]
    Stranger {
        /// The path.
        path: PathBuf,
        /// The parser's error.
        #[source]
        source: serde_json::Error,
    },
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
    /// The directory of a snapshot cannot be written.
    #[error("cannot make the snapshot {directory}{remedy}")]
    Directory {
        /// The directory.
        directory: PathBuf,
        /// The remedy, or nothing.
        remedy: &'static str,
        /// The host's reason.
        #[source]
        source: io::Error,
    },
    /// The snapshot is complete, but the machine may still be running.
    #[error(
        "the snapshot {directory} is complete, but the machine did not confirm that its run ends: check whether it still runs"
    )]
    Unconfirmed {
        /// The directory.
        directory: PathBuf,
        /// The reason why there is no confirmation.
        #[source]
        source: Box<CtlError>,
    },
    /// The reply does not match the request.
    #[error("unexpected reply on {0}: use the version of 'vmm' that runs the machine")]
    Other(PathBuf),
    /// The machine refused the request, with this reason.
    #[error("{0}")]
    Refused(String),
    /// The request or reply cannot be encoded.
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
    let request = request(&args.command)?;
    let answer = match (&request, &args.command) {
        (Request::Snapshot { id, then_exit, .. }, CtlCommand::Snapshot { directory, .. }) => {
            let asked = (id.as_str(), *then_exit);
            return snapshot(&args.socket, &request, asked, directory, args.json);
        }
        (Request::Dump { file: Some(path) }, _) => dump(&args.socket, &request, path)?,
        _ => ask(&args.socket, &request, None)?,
    };
    let text = if args.json {
        serde_json::to_string_pretty(&answer).map_err(CtlError::Json)? + "\n"
    } else {
        text(&answer)
    };
    print(&text)
}

fn print(text: &str) -> Result<(), CtlError> {
    match io::stdout().lock().write_all(text.as_bytes()) {
        // The reader closed the output early.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        written => written.map_err(CtlError::Output),
    }
}

/// The request, with absolute paths, because the machine may run in another directory.
fn request(command: &CtlCommand) -> Result<Request, CtlError> {
    Ok(match command.clone() {
        CtlCommand::List => Request::List {},
        CtlCommand::Dump { file } => Request::Dump {
            file: file.map(absolute).transpose()?,
        },
        CtlCommand::Flush { event } => Request::Flush { event },
        CtlCommand::Start { spec } => Request::Start { spec },
        CtlCommand::End { event } => Request::End { event },
        CtlCommand::Snapshot {
            directory,
            diff,
            then_exit,
        } => Request::Snapshot {
            id: new_id(),
            then_exit,
            base: diff.map(|base| read_base(base, &directory)).transpose()?,
        },
    })
}

fn read_base(base: PathBuf, directory: &Path) -> Result<Base, CtlError> {
    Base::read(&base, directory).map_err(|source| CtlError::Base { base, source })
}

fn absolute(file: PathBuf) -> Result<PathBuf, CtlError> {
    std::path::absolute(&file).map_err(|source| CtlError::File { file, source })
}

/// Writes a recording. This process opens the file, with the caller's rights, and passes it to the machine. An older
/// recording is kept as FILE.old.
fn dump(socket: &Path, request: &Request, path: &Path) -> Result<Answer, CtlError> {
    let place = PathAt::open(path);
    if place.is_taken() {
        return Err(CtlError::Taken(path.to_owned()));
    }
    let failed = |source| CtlError::Recording {
        path: path.to_owned(),
        source,
    };
    let temporary = place.create_temporary().map_err(failed)?;
    let answer = ask(socket, request, Some(temporary.file()))?;
    temporary
        .persist_and_keep_older()
        .map_err(|error| failed(io::Error::other(error)))?;
    Ok(answer)
}

/// Writes a snapshot. This process opens the memory file. The machine writes its memory to that file, and replies with
/// its state. A second request then reports to the machine whether both files are complete.
fn snapshot(
    socket: &Path,
    request: &Request,
    (id, then_exit): (&str, bool),
    directory: &Path,
    json: bool,
) -> Result<(), CtlError> {
    let failed = |remedy| {
        move |source: io::Error| CtlError::Directory {
            directory: directory.to_owned(),
            remedy,
            source,
        }
    };
    let place = Directory::make(directory).map_err(|source| {
        let remedy = match source.kind() {
            io::ErrorKind::DirectoryNotEmpty => ": give an empty or new directory",
            io::ErrorKind::WouldBlock => ": another snapshot is being written there",
            _ => "",
        };
        failed(remedy)(source)
    })?;
    let mut machine = Connection::open(socket)?;
    let taken = match ask_with_progress(&mut machine, request, place.memory())? {
        Answer::Snapshot(taken) => taken,
        _ => return Err(CtlError::Other(socket.to_owned())),
    };
    let finished = place.finish(&taken.state);
    let finish = Request::Finish {
        id: id.to_owned(),
        error: finished.as_ref().err().map(ToString::to_string),
    };
    let confirmed = machine.ask(&finish, None);
    finished.map_err(failed("; the machine continues"))?;
    // Without --then-exit, a missing confirmation is not an error: the snapshot is complete, and the machine may have
    // ended in the meantime.
    if let (true, Err(source)) = (then_exit, confirmed) {
        return Err(CtlError::Unconfirmed {
            directory: directory.to_owned(),
            source: source.into(),
        });
    }
    let Taken {
        memory,
        written,
        paused_ns,
        ..
    } = taken;
    if json {
        let answer = serde_json::json!({"snapshot": {
            "directory": directory, "memory": memory, "written": written, "paused_ns": paused_ns,
        }});
        return print(&(serde_json::to_string_pretty(&answer).map_err(CtlError::Json)? + "\n"));
    }
    print(&format!(
        "{}: {} MiB of memory, {} MiB written, the guest was paused for {} ms\n",
        directory.display(),
        memory >> 20,
        written.div_ceil(1 << 20),
        paused_ns / 1_000_000,
    ))
}

/// Time between two updates of the progress line.
const PROGRESS: Duration = Duration::from_millis(200);

/// Sends `request`, and waits for the answer. While it waits, it shows the growing size of `file` on standard error, if
/// that is a terminal.
fn ask_with_progress(
    machine: &mut Connection<'_>,
    request: &Request,
    file: &File,
) -> Result<Answer, CtlError> {
    if !io::stderr().is_terminal() {
        return machine.ask(request, Some(file));
    }
    let socket = machine.socket;
    thread::scope(|scope| {
        let (tell, answered) = sync_channel(1);
        scope.spawn(move || {
            // The loop below waits for this message.
            let _ = tell.send(machine.ask(request, Some(file)));
        });
        loop {
            match answered.recv_timeout(PROGRESS) {
                Ok(answer) => {
                    eprint!("\r\x1b[K");
                    return answer;
                }
                Err(RecvTimeoutError::Timeout) => {
                    let blocks = file.metadata().map_or(0, |status| status.blocks());
                    eprint!("\r{} MiB of memory written", blocks >> 11);
                }
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(CtlError::Closed(socket.to_owned()));
                }
            }
        }
    })
}

/// Returns a name that no other snapshot has.
fn new_id() -> String {
    let [high, low] = [0u8, 1].map(|half| RandomState::new().hash_one(half));
    format!("{high:016x}{low:016x}")
}

fn ask(socket: &Path, request: &Request, file: Option<&File>) -> Result<Answer, CtlError> {
    Connection::open(socket)?.ask(request, file)
}

/// A connection to a machine.
struct Connection<'a> {
    socket: &'a Path,
    stream: BufReader<UnixStream>,
}

impl<'a> Connection<'a> {
    fn open(socket: &'a Path) -> Result<Self, CtlError> {
        let path = || socket.to_owned();
        let stream = UnixStream::connect(socket).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => CtlError::Missing(path()),
            io::ErrorKind::ConnectionRefused => match is_socket(socket) {
                true => CtlError::Dead(path()),
                false => CtlError::NoSocket(path()),
            },
            io::ErrorKind::PermissionDenied => CtlError::Permission(path()),
            _ => CtlError::Socket {
                path: path(),
                source: error,
            },
        })?;
        let stream = BufReader::new(stream);
        Ok(Self { socket, stream })
    }

    fn ask(&mut self, request: &Request, file: Option<&File>) -> Result<Answer, CtlError> {
        let path = || self.socket.to_owned();
        let mut line = serde_json::to_vec(request).map_err(CtlError::Json)?;
        line.push(b'\n');
        let mut answer = Vec::new();
        let sent = descriptor::send(self.stream.get_ref(), &line, file.map(AsFd::as_fd));
        // Read the reply even if sending failed, because a machine that closes the connection may have sent the reason
        // first.
        let read = (&mut self.stream)
            .take(MAX_ANSWER)
            .read_until(b'\n', &mut answer);
        if answer.is_empty() {
            return match sent.and_then(|()| read.map(|_| ())) {
                Err(source) if source.kind() != io::ErrorKind::BrokenPipe => {
                    Err(CtlError::Socket {
                        path: path(),
                        source,
                    })
                }
                _ => Err(CtlError::Closed(path())),
            };
        }
        match serde_json::from_slice(&answer) {
            Ok(Reply::Ok(answer)) => Ok(answer),
            Ok(Reply::Error(why)) => Err(CtlError::Refused(why)),
            Err(source) => Err(CtlError::Stranger {
                path: path(),
                source,
            }),
        }
    }
}

fn is_socket(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|found| found.file_type().is_socket())
}

/// The answer as text for people.
fn text(answer: &Answer) -> String {
    match answer {
        Answer::Events(events) => table::render(events),
        Answer::Recording(recorded) => format!("{recorded}\n"),
        // `snapshot` prints its own text.
        Answer::Snapshot(_) | Answer::Done => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_sent_as_the_caller_sees_them() {
        let dump = |file: &str| CtlCommand::Dump {
            file: Some(file.into()),
        };
        let sent = |file| request(&dump(file)).expect("a path");
        let here = std::env::current_dir().expect("a directory");
        let file = Some(here.join("now.data"));
        assert_eq!(sent("now.data"), Request::Dump { file });
        let file = Some("/tmp/now.data".into());
        assert_eq!(sent("/tmp/now.data"), Request::Dump { file });
    }
}
