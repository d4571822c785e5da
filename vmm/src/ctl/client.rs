//! `vmm ctl`: sends a request to a running machine, and prints its reply.

use std::fs;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};

use super::descriptor;
use super::protocol::{Answer, Reply, Request};
use super::table;
use crate::place::{Place, Temporary};

/// Longer than any reply, to limit what a foreign server can send.
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
    /// Show every persistent event, the guest's own too
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
    /// End an event, the guest's own too; its records are lost
    End {
        /// Name or id of the event
        event: String,
    },
}

const HELP: &str = "\
Examples:
  vmm ctl --socket vm.sock list
  vmm ctl --socket vm.sock start marks,size=1M,name=steps
  vmm ctl --socket vm.sock dump now.data && perf script -i now.data
  vmm ctl --socket vm.sock list --json | jq .events

The socket belongs to whoever started the machine; root may use it too.

Exit status:
  0  it is done
  1  the machine refuses, or there is none; what it says is printed
  2  wrong usage";

/// Errors of `vmm ctl`.
#[derive(Debug, thiserror::Error)]
pub enum CtlError {
    /// The socket does not exist.
    #[error("there is no control socket {0}: 'vmm run --ctl {0}' makes one")]
    Missing(PathBuf),
    /// No process listens.
    #[error("nobody listens on {0}: the machine that made it has ended")]
    Dead(PathBuf),
    /// The path is not a socket.
    #[error("{0} is not a control socket: give the one of 'vmm run --ctl' with --socket")]
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
    #[error("the machine behind {0} has closed its control socket without an answer")]
    Closed(PathBuf),
    /// The reply is not a VMM's, or is of another version.
    #[error("unexpected reply on {path}: use the 'vmm' of the same version as the machine")]
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
    /// The path is taken by a directory or a device.
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
    /// The machine's error text.
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
    let answer = match &request {
        Request::Dump { file: Some(path) } => dump(&args.socket, &request, path)?,
        _ => ask(&args.socket, &request, None)?,
    };
    let text = if args.json {
        serde_json::to_string_pretty(&answer).map_err(CtlError::Json)? + "\n"
    } else {
        told(&answer)
    };
    match io::stdout().lock().write_all(text.as_bytes()) {
        // The reader closed the output early.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        written => written.map_err(CtlError::Output),
    }
}

/// The request, with absolute paths: the machine may run in another directory.
fn request(command: &CtlCommand) -> Result<Request, CtlError> {
    Ok(match command.clone() {
        CtlCommand::List => Request::List {},
        CtlCommand::Dump { file } => Request::Dump {
            file: file.map(absolute).transpose()?,
        },
        CtlCommand::Flush { event } => Request::Flush { event },
        CtlCommand::Start { spec } => Request::Start { spec },
        CtlCommand::End { event } => Request::End { event },
    })
}

fn absolute(file: PathBuf) -> Result<PathBuf, CtlError> {
    std::path::absolute(&file).map_err(|source| CtlError::File { file, source })
}

/// Writes a recording. The file is opened here, with the caller's rights, and passed to the
/// machine. An older one is kept as FILE.old.
fn dump(socket: &Path, request: &Request, path: &Path) -> Result<Answer, CtlError> {
    let place = Place::open(path);
    if place.is_taken() {
        return Err(CtlError::Taken(path.to_owned()));
    }
    let failed = |source| CtlError::Recording {
        path: path.to_owned(),
        source,
    };
    let temporary = place.create_temporary().map_err(failed)?;
    let answer = ask(socket, request, Some(&temporary))?;
    place.keep_older().map_err(failed)?;
    temporary.persist().map_err(failed)?;
    Ok(answer)
}

fn ask(socket: &Path, request: &Request, file: Option<&Temporary<'_>>) -> Result<Answer, CtlError> {
    let path = || socket.to_owned();
    let failed = |source| CtlError::Socket {
        path: path(),
        source,
    };
    let stream = UnixStream::connect(socket).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => CtlError::Missing(path()),
        io::ErrorKind::ConnectionRefused => match is_socket(socket) {
            true => CtlError::Dead(path()),
            false => CtlError::NoSocket(path()),
        },
        io::ErrorKind::PermissionDenied => CtlError::Permission(path()),
        _ => failed(error),
    })?;
    let mut line = serde_json::to_vec(request).map_err(CtlError::Json)?;
    line.push(b'\n');
    let mut answer = Vec::new();
    let file = file.map(|file| file.file().as_fd());
    let sent = descriptor::send(&stream, &line, file);
    // A server that refuses to read may have sent a reason.
    let read = BufReader::new(stream.take(MAX_ANSWER)).read_until(b'\n', &mut answer);
    if answer.is_empty() {
        return match sent.and_then(|()| read.map(|_| ())) {
            Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(failed(error)),
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

fn is_socket(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|found| found.file_type().is_socket())
}

/// Text for people.
fn told(answer: &Answer) -> String {
    match answer {
        Answer::Events(events) => table::render(events),
        Answer::Recording(recorded) => format!("{recorded}\n"),
        Answer::Done => String::new(),
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
