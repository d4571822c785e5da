//! What a guest does while its host saves it: numbered lines, by both vCPUs in turn.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use crate::acts::say;
use crate::kernel_log::ensure_none_of;
use crate::{Outcome, cpu};

/// Lines of a run.
const LINES: u32 = 300;
/// Between two of them, for the host to get a word in.
const PAUSE: Duration = Duration::from_millis(20);

/// Numbered lines, each with the guest's time in nanoseconds.
pub(crate) fn lines() -> Outcome {
    let (to_other, from_one) = channel();
    let (to_one, from_other) = channel();
    let start = Instant::now();
    let other = move || turns(1, start, &from_one, &to_one).map_err(|e| e.to_string());
    let other = thread::spawn(other);
    to_other.send(1)?;
    turns(0, start, &from_other, &to_other)?;
    drop(to_other);
    other.join().map_err(|_| "a thread panicked")??;
    // A pause is not to look like a hang, nor like a clock that went wrong.
    ensure_none_of(&["soft lockup", "self-detected stall", "Marking clocksource"])?;
    say("whole");
    Ok(())
}

/// Says the next line on `place` whenever it is this thread's turn.
fn turns(place: usize, start: Instant, mine: &Receiver<u32>, others: &Sender<u32>) -> Outcome {
    cpu::pin(place)?;
    while let Ok(number) = mine.recv() {
        if number <= LINES {
            say(&format!("line {number} {}", start.elapsed().as_nanos()));
            thread::sleep(PAUSE);
        }
        // The other has heard of the end if it is gone.
        if others.send(number + 1).is_err() || number >= LINES {
            break;
        }
    }
    Ok(())
}
