//! The wire: every number and layout that the guest sees, and no logic.
//!
//! `SPEC.md` gives the meaning; this module is the source of truth for sizes, offsets and
//! values. `guest-driver/linux/vpmu_abi.h` is its C twin, compared field by field by
//! `tests/abi.rs`. All integers are little-endian; reserved fields are zero.

/// A struct of the wire: its bytes are its fields in order, without padding.
macro_rules! wire {
    ($(#[$about:meta])* pub struct $name:ident { $($fields:tt)* }) => {
        $(#[$about])*
        #[derive(
            Debug,
            Clone,
            Copy,
            PartialEq,
            Eq,
            zerocopy::FromBytes,
            zerocopy::IntoBytes,
            zerocopy::Immutable,
            zerocopy::KnownLayout,
            zerocopy::Unaligned,
        )]
        #[repr(C)]
        pub struct $name { $($fields)* }

        impl Default for $name {
            /// Every byte zero.
            fn default() -> Self {
                zerocopy::FromZeros::new_zeroed()
            }
        }
    };
}

mod catalogue;
mod command;
mod config;
mod control;
mod metadata;
mod notice;
mod open;
mod packet;
mod persistent;
mod task;

pub use catalogue::*;
pub use command::*;
pub use config::*;
pub use control::*;
pub use metadata::*;
pub use notice::*;
pub use open::*;
pub use packet::*;
pub use persistent::*;
pub use task::*;

/// What a page is, everywhere in this interface.
pub const PAGE_SIZE: usize = 4096;
