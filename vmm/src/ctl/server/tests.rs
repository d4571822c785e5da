//! Tests of the server with well-behaved and misbehaving clients, on a real socket.

use std::io::{BufRead, BufReader, Write};
use std::net::Shutdown;
use std::path::{Path, PathBuf};

use super::super::protocol::Answer;
use super::*;

/// A server on a socket in a temporary directory. It accepts a request to end the event `known`, answers a list request
/// with a long error, and refuses all other requests.
struct Bench {
    server: Option<Server>,
    path: PathBuf,
    _directory: tempfile::TempDir,
}

impl Bench {
    fn new() -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("ctl");
        let socket = Socket::listen(&path, None).expect("listens");
        let serve = |request, _files| match request {
            Request::End { event } if event == "known" => Reply::Ok(Answer::Done),
            // Longer than a socket's buffers, so part of the reply stays unsent until the client reads.
            Request::List {} => Reply::Error("x".repeat(1 << 20)),
            _ => Reply::Error("unknown".to_owned()),
        };
        Self {
            server: Some(Server::start(socket, Box::new(serve), &Confinement::none()).expect("serves")),
            path,
            _directory: directory,
        }
    }

    fn client(&self) -> UnixStream {
        connect(&self.path).expect("answers")
    }
}

fn connect(path: &Path) -> io::Result<UnixStream> {
    UnixStream::connect(path)
}

fn ask(client: &mut BufReader<UnixStream>, line: &str) -> String {
    let text = format!("{line}\n");
    client.get_mut().write_all(text.as_bytes()).expect("taken");
    answer(client)
}

fn answer(client: &mut BufReader<UnixStream>) -> String {
    let mut line = String::new();
    client.read_line(&mut line).expect("an answer");
    line
}

const END: &str = r#"{"do":"end","event":"known"}"#;
const DONE: &str = "{\"ok\":\"done\"}\n";

#[test]
fn requests_are_answered_one_by_one_in_their_order() {
    let bench = Bench::new();
    let mut client = BufReader::new(bench.client());
    assert_eq!(ask(&mut client, END), DONE);
    let both = format!("{}\n{END}", r#"{"do":"end","event":"other"}"#);
    assert_eq!(ask(&mut client, &both), "{\"error\":\"unknown\"}\n");
    assert_eq!(answer(&mut client), DONE);
}

#[test]
fn request_in_pieces_is_answered() {
    let bench = Bench::new();
    let mut client = BufReader::new(bench.client());
    for piece in END.as_bytes().chunks(5) {
        client.get_mut().write_all(piece).expect("taken");
    }
    client.get_mut().write_all(b"\n").expect("taken");
    client.get_mut().shutdown(Shutdown::Write).expect("a socket");
    assert_eq!(answer(&mut client), DONE);
    assert_eq!(answer(&mut client), "", "closed");
}

#[test]
fn garbage_is_answered_and_the_client_stays() {
    let bench = Bench::new();
    let mut client = BufReader::new(bench.client());
    for garbage in ["", "}", "\u{0}\u{1}", r#"{"do":"walk"}"#, r#"{"do":"list","fast":true}"#, r#"[1]"#] {
        let reported = ask(&mut client, garbage);
        assert!(reported.starts_with("{\"error\":\"invalid request: "), "{reported}");
    }
    client.get_mut().write_all(b"\xff\xfe\n").expect("taken");
    assert!(answer(&mut client).starts_with("{\"error\":"));
    assert_eq!(ask(&mut client, END), DONE);
}

#[test]
fn endless_line_disconnects_only_its_client() {
    let bench = Bench::new();
    let mut other = BufReader::new(bench.client());
    let mut client = BufReader::new(bench.client());
    let line = vec![b'x'; MAX_REQUEST];
    client.get_mut().write_all(&line).expect("taken");
    assert!(answer(&mut client).contains("more than 16384 bytes"));
    assert_eq!(answer(&mut client), "", "closed");
    assert_eq!(ask(&mut other, END), DONE);
}

#[test]
fn client_that_does_not_read_blocks_no_other() {
    let bench = Bench::new();
    let mut stuck = bench.client();
    for _ in 0..3 {
        stuck.write_all(b"{\"do\":\"list\"}\n").expect("taken");
    }
    let mut client = BufReader::new(bench.client());
    assert_eq!(ask(&mut client, END), DONE);
    // The stuck client gets its replies as soon as it reads again.
    let mut stuck = BufReader::new(stuck);
    for _ in 0..3 {
        assert_eq!(answer(&mut stuck).len(), (1 << 20) + "{\"error\":\"\"}\n".len());
    }
}

#[test]
fn one_client_too_many_takes_the_place_of_the_first() {
    let bench = Bench::new();
    let mut clients: Vec<_> = (0..MAX_CLIENTS).map(|_| BufReader::new(bench.client())).collect();
    for client in &mut clients {
        assert_eq!(ask(client, END), DONE);
    }
    let mut last = BufReader::new(bench.client());
    assert_eq!(ask(&mut last, END), DONE);
    assert_eq!(answer(&mut clients[0]), "", "closed");
    assert_eq!(ask(&mut clients[1], END), DONE);
}

#[test]
fn end_of_the_server_closes_clients_and_socket() {
    let mut bench = Bench::new();
    let mut client = BufReader::new(bench.client());
    assert_eq!(ask(&mut client, END), DONE);
    drop(bench.server.take());
    assert_eq!(answer(&mut client), "", "closed");
    assert!(connect(&bench.path).is_err() && !bench.path.exists());
}
