//! One thread acts as driver, host and operator of a device. The device must not panic. It must answer every request,
//! keep its rings consistent, write only to pages that the driver named, and free everything at the end.
#![no_main]
#![allow(dead_code, clippy::expect_used, reason = "not every target uses all of the shared module")]

mod shared;

use libfuzzer_sys::arbitrary::{Result, Unstructured};
use libfuzzer_sys::fuzz_target;

use crate::shared::stage::{Stage, features};
use crate::shared::{driver_ops, host_ops};

fn run(stage: &mut Stage, input: &mut Unstructured<'_>) -> Result<()> {
    stage.movable = true;
    stage.activate(features(input)?);
    while !input.is_empty() {
        if stage.forged {
            // Don't act as a driver that sends requests. The indices of the restored queues may have any values, so
            // the device may leave requests unanswered.
            stage.notify_all();
            host_ops::step(stage, input)?;
            continue;
        }
        if input.arbitrary()? { driver_ops::step(stage, input)? } else { host_ops::step(stage, input)? }
    }
    Ok(())
}

fuzz_target!(|input: &[u8]| {
    let mut input = Unstructured::new(input);
    let Ok(mut stage) = Stage::new(&mut input) else {
        return;
    };
    // Ends when the bytes run out.
    let _ = run(&mut stage, &mut input);
    stage.account();
    stage.finish();
});
