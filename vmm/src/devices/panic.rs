//! The pvpanic device, through which the guest's kernel reports a panic.

use std::sync::Arc;

use crate::bus::{Caller, Device};
use crate::exit::{Ending, StopLatch};

/// The pvpanic device. It reports which events it supports, and receives reports of panics.
#[derive(Debug)]
pub struct Panic(pub Arc<StopLatch>);

const PANICKED: u8 = 1;

impl Device for Panic {
    fn read(&self, _offset: u64, data: &mut [u8]) {
        data.fill(PANICKED);
    }

    fn write(&self, _offset: u64, data: &[u8], _caller: &mut Caller<'_>) {
        if data.first().is_some_and(|value| value & PANICKED != 0) {
            self.0.announce(Ok(Ending::GuestPanic));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bus::tests::as_vcpu;

    #[test]
    fn panic_is_distinguished_from_other_events() {
        let panic = |value| {
            let end = Arc::new(StopLatch::new().expect("an event descriptor"));
            let device = Panic(Arc::clone(&end));
            as_vcpu(0, |caller| device.write(0, &[value], caller));
            end.take().map(|how| how.expect("an ending"))
        };
        assert_eq!(panic(1), Some(Ending::GuestPanic));
        assert_eq!(panic(2), None);
    }
}
