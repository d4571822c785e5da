//! Requests and commands as a driver encodes them, and the parts of their answers.

use vpmu::abi::*;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// An errno.
pub type Errno = i32;

pub fn header(op: u32, event: u64) -> ControlHeader {
    ControlHeader { op: op.into(), reserved: 0.into(), event: event.into() }
}

/// Returns a request to open a counting event. Callers set the other fields.
pub fn open_of(kind: u32, config: u64, context: u32) -> OpenRequest {
    OpenRequest {
        header: header(CONTROL_OPEN, 0),
        kind: kind.into(),
        config: config.into(),
        context: context.into(),
        ..OpenRequest::default()
    }
}

macro_rules! fields {
    ($($field:ident: $number:ty,)*) => {
        /// Sets fields of a request: `open_of(KIND_MARK, 5, 0).sampled(1).flags(OPEN_ENABLED)`.
        pub trait Fields: Sized {
            $(fn $field(self, value: $number) -> Self;)*

            /// Makes the event sample IP, TID, TIME, ID, CPU, PERIOD, STREAM_ID and IDENTIFIER with a period.
            fn sampled(self, period: u64) -> Self {
                self.period(period).sample_type(0x1_03c7)
            }
        }

        impl Fields for OpenRequest {
            $(fn $field(self, value: $number) -> Self {
                Self { $field: value.into(), ..self }
            })*
        }
    };
}

fields! {
    kind: u32,
    config: u64,
    context: u32,
    flags: u32,
    period: u64,
    sample_type: u64,
    read_format: u64,
    wakeup: u32,
    parent: u64,
    leader: u64,
    engine: u32,
    aux_watermark: u32,
    max_stack: u32,
    regs_user: u64,
    regs_intr: u64,
    stack_user: u32,
}

/// Returns a request to map these pages as a ring if `op` is [`CONTROL_MAP`], or as an AUX area if `op` is
/// [`CONTROL_MAP_AUX`].
pub fn map_request(op: u32, event: u64, flags: u32, pages: &[u64]) -> Vec<u8> {
    let request = MapRequest {
        header: header(op, event),
        pages: u32::try_from(pages.len()).expect("few").into(),
        flags: flags.into(),
    };
    let mut bytes = request.as_bytes().to_vec();
    for page in pages {
        bytes.extend(page.to_le_bytes());
    }
    bytes
}

pub fn command(op: u32, event: u64) -> Command {
    Command { op: op.into(), event: event.into(), ..Command::default() }
}

/// Returns the same command for each event.
pub fn commands(op: u32, events: &[u64]) -> Vec<Command> {
    events.iter().map(|&event| command(op, event)).collect()
}

/// Parses `bytes` as an array of ABI structures.
pub fn structs<T: FromBytes + KnownLayout + Immutable>(bytes: &[u8]) -> Vec<T> {
    bytes.chunks(size_of::<T>()).map(|chunk| T::read_from_bytes(chunk).expect("whole")).collect()
}

pub fn outcome(status: u32) -> Result<(), Errno> {
    match i32::try_from(status).expect("an errno") {
        0 => Ok(()),
        errno => Err(errno),
    }
}
