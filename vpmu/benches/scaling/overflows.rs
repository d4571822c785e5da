//! A source whose counters report overflows at every drain, because the host's own counters overflow too
//! rarely to measure the cost of a sample.

use std::io;
use std::sync::Arc;

use vpmu::Source;
use vpmu::abi::KIND_HARDWARE;
use vpmu::host::PerfSource;
use vpmu::source::{Counter, CounterSet, Mode, Offer, Overflow, Overflows, Rate, Reading, Request};

/// Number of overflows that a counter reports at every drain.
pub(crate) const OVERFLOWS: u64 = 32;

#[derive(Debug)]
pub(crate) struct OverflowSource {
    host: Arc<PerfSource>,
    offers: [Offer; 1],
}

#[derive(Debug)]
struct OverflowCounter {
    host: Arc<PerfSource>,
    count: u64,
}

impl OverflowSource {
    /// Creates a source that takes time from `host`.
    pub(crate) fn new(host: PerfSource) -> Self {
        Self {
            host: Arc::new(host),
            offers: [Offer {
                kind: KIND_HARDWARE,
                config: 0,
                any_config: false,
                name: "cycles".to_owned(),
                unit: "",
                counts: "one for each overflow",
                shortest_period: Some(1),
                guest_only: true,
                excludes: false,
            }],
        }
    }
}

impl Source for OverflowSource {
    fn tsc(&self) -> u64 {
        self.host.tsc()
    }

    fn thread(&self) -> i32 {
        self.host.thread()
    }

    fn thread_time(&self) -> Option<u64> {
        self.host.thread_time()
    }

    fn offers(&self) -> &[Offer] {
        &self.offers
    }

    fn open(&self, _what: &Request, _thread: i32) -> io::Result<Box<dyn Counter>> {
        Ok(Box::new(OverflowCounter { host: Arc::clone(&self.host), count: 0 }))
    }

    fn counters(&self, thread: i32) -> Box<dyn CounterSet> {
        self.host.counters(thread)
    }
}

impl Counter for OverflowCounter {
    fn start(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn stop(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn read(&mut self) -> io::Result<Reading> {
        Ok(Reading { value: self.count, enabled: self.count, running: self.count })
    }

    fn set_rate(&mut self, _rate: Rate) -> io::Result<()> {
        Ok(())
    }

    fn drain(&mut self, into: &mut Overflows) {
        let now = self.host.tsc();
        self.count += OVERFLOWS;
        into.samples.extend((1..=OVERFLOWS).map(|index| Overflow {
            tsc: now - (OVERFLOWS - index),
            ip: 0x40_0000,
            mode: Mode::Guest,
            period: 1,
        }));
    }
}
