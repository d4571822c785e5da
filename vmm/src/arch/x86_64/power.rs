//! The ports through which a guest ends its run: sleep, reset and keyboard controller.

use std::sync::Arc;

use super::layout::SLEEP_TYPE_S5;
use crate::bus::{Caller, Device};
use crate::exit::{Ending, StopLatch};

/// ACPI sleep control at offset 0, sleep status at 1.
#[derive(Debug)]
pub struct Sleep(pub Arc<StopLatch>);

const SLEEP_ENABLE: u8 = 1 << 5;
const SLEEP_TYPE_SHIFT: u32 = 2;
const SLEEP_TYPE_MASK: u8 = 7;

impl Device for Sleep {
    fn read(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
    }

    fn write(&self, offset: u64, data: &[u8], _caller: &mut Caller<'_>) {
        let Some(value) = data.first().filter(|_| offset == 0) else {
            return;
        };
        let kind = value >> SLEEP_TYPE_SHIFT & SLEEP_TYPE_MASK;
        if value & SLEEP_ENABLE != 0 && kind == SLEEP_TYPE_S5 {
            self.0.announce(Ok(Ending::Poweroff));
        }
    }
}

/// The reset control register. Bit 2 resets the machine. The other bits choose the kind of reset.
#[derive(Debug)]
pub struct Reset(pub Arc<StopLatch>);

const RESET_CPU: u8 = 1 << 2;

impl Device for Reset {
    fn read(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
    }

    fn write(&self, _offset: u64, data: &[u8], _caller: &mut Caller<'_>) {
        if data.first().is_some_and(|value| value & RESET_CPU != 0) {
            self.0.announce(Ok(Ending::Reset));
        }
    }
}

/// A keyboard controller without a keyboard. It is always ready, and only its reset line works.
#[derive(Debug)]
pub struct I8042(pub Arc<StopLatch>);

/// Number of ports of the keyboard controller: from the data port 0x60 to the command and status port 0x64.
pub const I8042_SIZE: u64 = 5;
const I8042_COMMAND: u64 = 4;
const I8042_RESET: u8 = 0xfe;

impl Device for I8042 {
    fn read(&self, offset: u64, data: &mut [u8]) {
        // A status of zero means that there is nothing to read and that the guest may write. The other ports have no
        // register.
        data.fill(if offset == I8042_COMMAND { 0 } else { 0xff });
    }

    fn write(&self, offset: u64, data: &[u8], _caller: &mut Caller<'_>) {
        if offset == I8042_COMMAND && data.first() == Some(&I8042_RESET) {
            self.0.announce(Ok(Ending::Reset));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bus::tests::as_vcpu;

    fn after(make: impl FnOnce(Arc<StopLatch>) -> Box<dyn Device>, offset: u64, value: u8) -> Option<Ending> {
        let end = Arc::new(StopLatch::new().expect("an event descriptor"));
        let device = make(Arc::clone(&end));
        as_vcpu(0, |caller| device.write(offset, &[value], caller));
        end.take().map(|how| how.expect("an ending"))
    }

    #[test]
    fn only_type_five_with_the_enable_bit_powers_off() {
        let sleep = |offset, value| after(|end| Box::new(Sleep(end)), offset, value);
        assert_eq!(sleep(0, 5 << 2 | 1 << 5), Some(Ending::Poweroff));
        assert_eq!(sleep(0, 5 << 2), None);
        assert_eq!(sleep(0, 3 << 2 | 1 << 5), None);
        assert_eq!(sleep(1, 5 << 2 | 1 << 5), None);
    }

    #[test]
    fn every_reset_line_resets() {
        let reset = |value| after(|end| Box::new(Reset(end)), 0, value);
        assert_eq!(reset(0x06), Some(Ending::Reset));
        assert_eq!(reset(0x0e), Some(Ending::Reset));
        assert_eq!(reset(0x02), None);
        let keyboard = |offset, value| after(|end| Box::new(I8042(end)), offset, value);
        assert_eq!(keyboard(4, 0xfe), Some(Ending::Reset));
        assert_eq!(keyboard(4, 0xd1), None);
        assert_eq!(keyboard(0, 0xfe), None);
    }
}
