//! The interface between device and driver, and in [`uapi`] the driver's ioctls for guest programs:
//! every number and layout, without logic.
//!
//! `vpmu/SPEC.md` gives the meaning; this crate is the source of truth for sizes, offsets and values.
//! `guest-driver/linux/vpmu_abi.h` and `vpmu_uapi.h` are its C twins, compared field by field by
//! `vpmu/tests/abi.rs`. All integers of the wire are little-endian; reserved fields are zero.

/// A struct of the interface: its fields in order, without padding.
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
            /// All bytes zero.
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
pub mod uapi;

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

/// Page size throughout the interface.
pub const PAGE_SIZE: usize = 4096;
