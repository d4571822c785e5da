//! The device's MSI-X vectors, which the VMM gives as eventfds.

use std::fs::File;
use std::io::{self, Write};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The number that means "no vector" in virtio's registers.
pub(super) const NO_VECTOR: u16 = 0xffff;

/// The vectors, and the queues that use them.
#[derive(Debug)]
pub(super) struct Interrupts(Mutex<Vectors>);

#[derive(Debug)]
struct Vectors {
    /// The eventfd of each vector that the VMM has connected.
    events: Vec<Option<File>>,
    /// The vector of each queue.
    of_queues: Vec<u16>,
    /// The vector of configuration changes.
    of_config: u16,
}

impl Interrupts {
    /// Vectors for `queues` queues and for configuration changes, none of them in use.
    pub(super) fn new(queues: usize) -> Self {
        Self(Mutex::new(Vectors {
            events: (0..=queues).map(|_| None).collect(),
            of_queues: vec![NO_VECTOR; queues],
            of_config: NO_VECTOR,
        }))
    }

    fn vectors(&self) -> MutexGuard<'_, Vectors> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Number of vectors.
    pub(super) fn count(&self) -> usize {
        self.vectors().events.len()
    }

    /// Connects `files` to the vectors from `start` on. Without files, disconnects `count` vectors. Returns false if
    /// the device does not have these vectors.
    pub(super) fn connect(&self, start: u32, count: u32, files: Vec<File>) -> bool {
        let mut vectors = self.vectors();
        let (start, count) = (start as usize, count as usize);
        let end = start.saturating_add(count.max(files.len()));
        let Some(events) = vectors.events.get_mut(start..end) else {
            return false;
        };
        let mut files = files.into_iter();
        for event in events {
            *event = files.next();
        }
        true
    }

    /// Disconnects all vectors.
    pub(super) fn disconnect(&self) {
        self.vectors().events.fill_with(|| None);
    }

    /// The vector of `queue`, or of configuration changes.
    pub(super) fn vector(&self, queue: Option<u32>) -> u16 {
        let vectors = self.vectors();
        match queue {
            Some(queue) => vectors.of_queues.get(queue as usize).copied().unwrap_or(NO_VECTOR),
            None => vectors.of_config,
        }
    }

    /// Sets the vector of `queue`, or of configuration changes. A vector that the device does not have means none.
    pub(super) fn set_vector(&self, queue: Option<u32>, vector: u16) {
        let mut vectors = self.vectors();
        let vector = if usize::from(vector) < vectors.events.len() { vector } else { NO_VECTOR };
        match queue {
            Some(queue) => {
                if let Some(of) = vectors.of_queues.get_mut(queue as usize) {
                    *of = vector;
                }
            }
            None => vectors.of_config = vector,
        }
    }

    /// Gives no queue a vector, as at power-on. The eventfds stay.
    pub(super) fn reset(&self) {
        let mut vectors = self.vectors();
        vectors.of_queues.fill(NO_VECTOR);
        vectors.of_config = NO_VECTOR;
    }

    /// Tells the driver that the configuration or the device status has changed.
    pub(super) fn config_changed(&self) -> io::Result<()> {
        let vectors = self.vectors();
        vectors.raise(vectors.of_config)
    }
}

impl Vectors {
    fn raise(&self, vector: u16) -> io::Result<()> {
        match self.events.get(usize::from(vector)) {
            Some(Some(event)) => (&*event).write_all(&1u64.to_ne_bytes()),
            // The driver polls, or the VMM has not connected the vector.
            _ => Ok(()),
        }
    }
}

impl vpmu::Interrupt for Interrupts {
    fn used(&self, queues: &[u16]) -> io::Result<()> {
        let vectors = self.vectors();
        queues.iter().try_for_each(|&queue| {
            let vector = vectors.of_queues.get(usize::from(queue)).copied();
            vectors.raise(vector.unwrap_or(NO_VECTOR))
        })
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use rustix::event::{EventfdFlags, eventfd};
    use vpmu::Interrupt;

    use super::*;

    #[test]
    fn queue_raises_its_own_vector() {
        let interrupts = Interrupts::new(3);
        let event = File::from(eventfd(0, EventfdFlags::NONBLOCK).expect("an eventfd"));
        let file = event.try_clone().expect("a descriptor");
        assert!(interrupts.connect(2, 1, vec![file]));
        interrupts.used(&[1]).expect("no vector yet");
        interrupts.set_vector(Some(1), 2);
        interrupts.used(&[0, 1]).expect("raised");
        let mut count = [0; 8];
        (&event).read_exact(&mut count).expect("raised");
        assert_eq!(u64::from_ne_bytes(count), 1);
        interrupts.set_vector(Some(1), 4);
        assert_eq!(interrupts.vector(Some(1)), NO_VECTOR, "there are four vectors");
        assert!(!interrupts.connect(3, 2, Vec::new()) && !interrupts.connect(u32::MAX, 2, Vec::new()));
    }
}
