//! Separates a command's output from everything else on a console. The guest's and the lab's `/init` write a line
//! before and after each part. In this module, such a line is called a mark; it is unrelated to the PMU's marks. A mark
//! contains a digest of the run, so a program cannot write one by accident.

const START: &str = "\n@@vpmu:";

/// The parts of a console's output. Outside the lab the console has only the command's output and exit code;
/// the caller fills in the VMM's and the host's parts.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Transcript {
    /// The command's output.
    pub output: Vec<u8>,
    /// The command's exit code, once it ended.
    pub status: Option<i32>,
    /// Output of the command that ran after the guest's end, where the VMM ran.
    pub host: Vec<u8>,
    /// That command's exit code.
    pub host_status: Option<i32>,
    /// The VMM's exit code.
    pub vmm: Option<i32>,
    /// The VMM's stderr.
    pub log: Vec<u8>,
    /// The VMM's report.
    pub report: Vec<u8>,
    /// Whether the command ever started.
    pub begun: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Elsewhere,
    Output,
    Host,
    Log,
    Report,
}

/// Splits a console's output into its parts as it arrives. Drops carriage returns before newlines.
#[derive(Debug)]
pub struct Frames {
    mark: Vec<u8>,
    held: Vec<u8>,
    part: Part,
    /// Whether `held` begins with the newline that ended the last mark.
    after_mark: bool,
    transcript: Transcript,
}

impl Frames {
    /// Splits at marks that carry `token`.
    pub fn new(token: &str) -> Self {
        let mark = format!("{START}{token} ").into_bytes();
        // The console's first byte begins a line.
        Self { mark, held: vec![b'\n'], part: Part::Elsewhere, after_mark: false, transcript: Transcript::default() }
    }

    /// Takes the console's next bytes; returns those that belong to the command's output.
    pub fn push(&mut self, bytes: &[u8]) -> Vec<u8> {
        for &byte in bytes {
            if byte == b'\n' && self.held.last() == Some(&b'\r') {
                self.held.pop();
            }
            self.held.push(byte);
        }
        let shown = self.transcript.output.len();
        while self.step() {}
        self.transcript.output[shown..].to_vec()
    }

    /// Returns the parts. Call it once the console has ended.
    pub fn finish(mut self) -> Transcript {
        let rest = std::mem::take(&mut self.held);
        self.keep(&rest);
        self.transcript
    }

    /// Assigns the bytes before the next mark to the current part, then interprets the mark. Returns false if it
    /// needs more bytes.
    fn step(&mut self) -> bool {
        let Some(at) = find(&self.held, &self.mark) else {
            let safe = self.held.len() - self.could_begin_a_mark();
            let passed: Vec<u8> = self.held.drain(..safe).collect();
            self.keep(&passed);
            return false;
        };
        let line = at + self.mark.len();
        let Some(end) = self.held[line..].iter().position(|&b| b == b'\n') else {
            return false;
        };
        let word = String::from_utf8_lossy(&self.held[line..line + end]).trim().to_owned();
        let before: Vec<u8> = self.held[..at].to_vec();
        self.keep(&before);
        // The newline that ends this mark stays in `held`, because it may begin the next mark.
        self.held.drain(..line + end);
        self.mark_says(&word);
        self.after_mark = true;
        true
    }

    fn mark_says(&mut self, words: &str) {
        let (word, value) = words.split_once(' ').unwrap_or((words, ""));
        self.part = match word {
            "begin" => {
                self.transcript.begun = true;
                Part::Output
            }
            "host" => Part::Host,
            "log" => Part::Log,
            "report" => Part::Report,
            _ => Part::Elsewhere,
        };
        match word {
            "exit" => self.transcript.status = value.parse().ok(),
            "hosted" => self.transcript.host_status = value.parse().ok(),
            "vmm" => self.transcript.vmm = value.parse().ok(),
            _ => {}
        }
    }

    fn keep(&mut self, mut bytes: &[u8]) {
        if self.after_mark && !bytes.is_empty() {
            bytes = &bytes[1..];
            self.after_mark = false;
        }
        match self.part {
            Part::Elsewhere => {}
            Part::Output => self.transcript.output.extend_from_slice(bytes),
            Part::Host => self.transcript.host.extend_from_slice(bytes),
            Part::Log => self.transcript.log.extend_from_slice(bytes),
            Part::Report => self.transcript.report.extend_from_slice(bytes),
        }
    }

    /// The number of bytes at the end of `held` that may begin a mark or a line end.
    fn could_begin_a_mark(&self) -> usize {
        let longest = self.mark.len().min(self.held.len());
        let partial = (1..=longest).rev().find(|&n| self.held.ends_with(&self.mark[..n]));
        partial.unwrap_or_else(|| usize::from(self.held.last() == Some(&b'\r')))
    }
}

fn find(bytes: &[u8], wanted: &[u8]) -> Option<usize> {
    bytes.windows(wanted.len()).position(|w| w == wanted)
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONSOLE: &[u8] = b"Linux booting\r\nnoise\r\n@@vpmu:t begin\r\none\r\n\r\ntwo no newline\r\n\
        @@vpmu:t exit 3\r\n@@vpmu:t host\nafter it\n@@vpmu:t hosted 4\n@@vpmu:t vmm 0\r\n@@vpmu:t log\r\nall well\r\n@@vpmu:t report\r\n{\r\n}\r\n@@vpmu:t end\r\nbye";

    fn parsed(chunk: usize) -> (Vec<u8>, Transcript) {
        let mut frames = Frames::new("t");
        let mut live = Vec::new();
        for bytes in CONSOLE.chunks(chunk) {
            live.extend(frames.push(bytes));
        }
        (live, frames.finish())
    }

    #[test]
    fn frames_split_at_any_byte_parse() {
        for chunk in [1, 2, 3, 7, 1000] {
            let (live, transcript) = parsed(chunk);
            assert_eq!(transcript.output, b"one\n\ntwo no newline", "chunks of {chunk}");
            assert_eq!(live, transcript.output);
            assert_eq!((transcript.status, transcript.vmm), (Some(3), Some(0)));
            assert_eq!((transcript.host.as_slice(), transcript.host_status), (&b"after it"[..], Some(4)));
            assert_eq!(transcript.log, b"all well");
            assert_eq!(transcript.report, b"{\n}");
        }
    }

    #[test]
    fn output_is_shown_as_soon_as_it_cannot_be_a_mark() {
        let mut frames = Frames::new("t");
        assert!(frames.push(b"@@vpmu:t begin\r\n").is_empty());
        assert_eq!(frames.push(b"half a li"), b"half a li");
        assert_eq!(frames.push(b"ne\n@@vp"), b"ne");
        assert_eq!(frames.push(b"x"), b"\n@@vpx");
    }

    #[test]
    fn empty_output_is_empty() {
        let mut frames = Frames::new("t");
        frames.push(b"\n@@vpmu:t begin\n@@vpmu:t exit 0\n");
        let transcript = frames.finish();
        assert!(transcript.begun);
        assert_eq!((transcript.output, transcript.status), (Vec::new(), Some(0)));
    }

    #[test]
    fn another_runs_mark_is_output_and_a_cut_console_has_no_status() {
        let mut frames = Frames::new("t");
        frames.push(b"\n@@vpmu:t begin\n@@vpmu:other exit 0\ncut");
        let transcript = frames.finish();
        assert_eq!(transcript.output, b"@@vpmu:other exit 0\ncut");
        assert_eq!(transcript.status, None);
    }
}
