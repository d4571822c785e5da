//! Shows the progress of builds: a spinner on a terminal, plain lines elsewhere, on stderr.

use std::io::{IsTerminal, stderr};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

const FRAME: Duration = Duration::from_millis(100);

/// One step that takes a while. Ends when dropped.
#[derive(Debug)]
pub struct Step {
    bar: Option<ProgressBar>,
    what: String,
    started: Instant,
}

impl Step {
    /// Shows that the step `what` begins.
    pub fn new(what: impl Into<String>) -> Self {
        let what = what.into();
        let bar = if stderr().is_terminal() {
            let bar = ProgressBar::new_spinner().with_message(what.clone());
            if let Ok(style) = ProgressStyle::with_template("{spinner} {msg} ({elapsed})") {
                bar.set_style(style);
            }
            bar.enable_steady_tick(FRAME);
            Some(bar)
        } else {
            eprintln!("{what}…");
            None
        };
        Self { bar, what, started: Instant::now() }
    }

    /// Reports the current part of the step.
    pub fn detail(&self, detail: &str) {
        match &self.bar {
            Some(bar) => bar.set_message(format!("{}: {detail}", self.what)),
            None => eprintln!("  {detail}"),
        }
    }

    /// Ends the step and leaves one line about it.
    pub fn done(self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
            eprintln!("{}: {:.1} s", self.what, self.started.elapsed().as_secs_f64());
        }
    }
}

impl Drop for Step {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
