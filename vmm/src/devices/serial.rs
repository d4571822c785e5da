//! A 16550 serial port.

use std::io::{self, Write};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};
use vm_superio::serial::{SerialEvents, SerialState};
use vm_superio::{Serial as Uart, Trigger};
use vmm_sys_util::eventfd::EventFd;

use crate::bus::{Caller, Device};
use crate::devices::console::{ConsoleBytes, Output};

/// Number of registers of a 16550.
pub const SERIAL_SIZE: u64 = 8;

/// The interrupt line.
#[derive(Debug, Clone)]
pub struct Line(pub Arc<EventFd>);

impl Trigger for Line {
    type E = io::Error;

    fn trigger(&self) -> io::Result<()> {
        self.0.write(1)
    }
}

/// Notifies the event loop that the guest has read all input, so the port has room for more.
#[derive(Debug, Clone)]
pub struct FifoSpace(pub Arc<EventFd>);

impl SerialEvents for FifoSpace {
    fn buffer_read(&self) {}
    fn out_byte(&self) {}
    fn tx_lost_byte(&self) {}
    fn in_buffer_empty(&self) {
        if let Err(error) = self.0.write(1) {
            log::error!("console input has stopped: {error}");
        }
    }
}

/// The output, which is kept when the port is reset.
#[derive(Debug, Clone)]
struct SerialSink(Arc<Mutex<Output>>);

impl SerialSink {
    fn lock(&self) -> MutexGuard<'_, Output> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Write for SerialSink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.lock().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.lock().flush()
    }
}

/// The registers of the port, and input that the guest has not read.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SavedSerial {
    divisor: [u8; 2],
    interrupt_enable: u8,
    interrupt_identification: u8,
    line_control: u8,
    line_status: u8,
    modem_control: u8,
    modem_status: u8,
    scratch: u8,
    input: Vec<u8>,
}

/// The serial console.
#[derive(Debug)]
pub struct Serial {
    uart: Mutex<Uart<Line, FifoSpace, SerialSink>>,
    line: Line,
    room: FifoSpace,
    wire: SerialSink,
}

impl Serial {
    /// A port that raises interrupts through `line`, signals `room` when its input buffer is empty, and writes to
    /// `output`.
    #[must_use]
    pub fn new(line: Line, room: FifoSpace, output: Output) -> Self {
        let wire = SerialSink(Arc::new(Mutex::new(output)));
        let uart = Uart::with_events(line.clone(), room.clone(), wire.clone());
        Self { uart: Mutex::new(uart), line, room, wire }
    }

    fn lock(&self) -> MutexGuard<'_, Uart<Line, FifoSpace, SerialSink>> {
        self.uart.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The interrupt line, which the caller connects to the VM.
    #[must_use]
    pub fn line(&self) -> &EventFd {
        &self.line.0
    }

    /// Resets every register to its power-on value, and drops unread input.
    pub fn reset(&self) {
        let (line, room, wire) = (self.line.clone(), self.room.clone(), self.wire.clone());
        *self.lock() = Uart::with_events(line, room, wire);
    }

    /// The current state, for a snapshot.
    pub(crate) fn save(&self) -> SavedSerial {
        let state = self.lock().state();
        SavedSerial {
            divisor: [state.baud_divisor_low, state.baud_divisor_high],
            interrupt_enable: state.interrupt_enable,
            interrupt_identification: state.interrupt_identification,
            line_control: state.line_control,
            line_status: state.line_status,
            modem_control: state.modem_control,
            modem_status: state.modem_status,
            scratch: state.scratch,
            input: state.in_buffer,
        }
    }

    /// Restores a saved port. If an interrupt was pending, raises it again.
    ///
    /// # Errors
    /// The saved input exceeds the buffer, or the interrupt cannot be raised.
    pub(crate) fn restore(&self, saved: SavedSerial) -> Result<(), vm_superio::serial::Error<io::Error>> {
        let [low, high] = saved.divisor;
        let state = SerialState {
            baud_divisor_low: low,
            baud_divisor_high: high,
            interrupt_enable: saved.interrupt_enable,
            interrupt_identification: saved.interrupt_identification,
            line_control: saved.line_control,
            line_status: saved.line_status,
            modem_control: saved.modem_control,
            modem_status: saved.modem_status,
            scratch: saved.scratch,
            in_buffer: saved.input,
        };
        let (line, room, wire) = (self.line.clone(), self.room.clone(), self.wire.clone());
        *self.lock() = Uart::from_state(&state, line, room, wire)?;
        Ok(())
    }

    /// Number of input bytes that the port can currently accept.
    #[must_use]
    pub fn room(&self) -> usize {
        self.lock().fifo_capacity()
    }

    /// Passes input to the guest, and returns the number of bytes that the port accepted.
    pub fn input(&self, bytes: &[u8]) -> usize {
        match self.lock().enqueue_raw_bytes(bytes) {
            // In loopback mode the receiver is disconnected from the serial line, so the input is lost.
            Ok(0) => bytes.len(),
            Ok(count) => count,
            Err(vm_superio::serial::Error::FullFifo) => 0,
            Err(error) => {
                // The input is in the FIFO, and only the interrupt failed. A guest that polls the port still gets the
                // input.
                log::error!("cannot raise the console's interrupt: {error}");
                bytes.len()
            }
        }
    }

    /// Totals of the guest's output.
    #[must_use]
    pub fn bytes(&self) -> ConsoleBytes {
        self.wire.lock().bytes()
    }

    /// Writes the guest's pending output.
    pub fn write_out(&self) {
        self.wire.lock().write_out();
    }
}

/// A serial port, and the event descriptors through which it signals the event loop.
#[derive(Debug, Clone)]
pub struct Console {
    /// The device.
    pub serial: Arc<Serial>,
    /// Signalled when the guest has read all its input.
    pub room: Arc<EventFd>,
    /// Signalled when output waits to be written.
    pub waiting: Arc<EventFd>,
}

impl Device for Serial {
    fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0xff);
        if let (Some(byte), Ok(register)) = (data.first_mut(), u8::try_from(offset)) {
            *byte = self.lock().read(register);
        }
    }

    fn write(&self, offset: u64, data: &[u8], _caller: &mut Caller<'_>) {
        if let (Some(byte), Ok(register)) = (data.first(), u8::try_from(offset))
            && let Err(error) = self.lock().write(register, *byte)
        {
            log::warn!("the console failed: {error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bus::tests::as_vcpu;
    use crate::devices::console::StallPolicy;
    use crate::exit::StopLatch;
    use crate::signal::EndingSignals;

    const DATA: u64 = 0;
    const INTERRUPTS: u64 = 1;
    const MODEM: u64 = 4;
    const LOOPBACK: u8 = 0x10;

    #[test]
    fn reset_clears_registers_and_unread_input() {
        let event = || Arc::new(EventFd::new(libc::EFD_NONBLOCK).expect("a descriptor"));
        let stall = StallPolicy {
            end: Arc::new(StopLatch::new().expect("event descriptors")),
            signals: EndingSignals::new().expect("a signal descriptor"),
        };
        let output = Output::new(event(), stall, 0).expect("an output");
        let serial = Serial::new(Line(event()), FifoSpace(event()), output);
        let read = |offset| {
            let mut byte = [0];
            serial.read(offset, &mut byte);
            byte[0]
        };
        let fresh = [read(INTERRUPTS), read(MODEM)];
        assert_eq!(serial.input(b"unread"), 6);
        for (offset, value) in [(INTERRUPTS, 1), (MODEM, LOOPBACK)] {
            as_vcpu(0, |caller| serial.write(offset, &[value], caller));
        }
        assert_ne!([read(INTERRUPTS), read(MODEM)], fresh);
        let room = serial.room();
        serial.reset();
        assert_eq!([read(INTERRUPTS), read(MODEM)], fresh);
        assert_eq!(serial.room(), room + 6);
        assert_eq!(serial.input(b"a"), 1);
        assert_eq!(read(DATA), b'a');
    }
}
