//! All guest tests that boot a stock kernel, in one test program. Cargo runs test programs one after the other. So
//! separate programs would leave processors idle whenever the current program runs too few guests to keep them busy.
#![expect(clippy::expect_used, clippy::unwrap_used, reason = "tests fail by panicking")]

// `#[apply(MACRO)]` passes a function to a macro by example.
#[macro_use(apply)]
extern crate macro_rules_attribute;

mod aux;
mod baseline;
mod conformance;
mod costs;
mod counting;
mod driver_life;
mod fair;
mod flush;
mod hammer;
mod host_profile;
mod hostile;
mod lab;
mod module;
mod nesting;
mod output;
mod overflows;
mod permissions;
mod persistent;
mod policy;
mod refusals;
mod restore;
mod sampling;
mod stock_perf;
mod storms;
mod trigger;
mod vperf;

use std::process::ExitCode;

fn main() -> ExitCode {
    tests::program::run()
}
