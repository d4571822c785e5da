//! Constants and structs of the interface between the device and the driver. The module [`uapi`] holds the
//! constants and structs of the ioctls that the driver offers to guest programs. The crate contains no logic.
//!
//! `vpmu/SPEC.md` defines the meaning of the fields; this crate is the source of truth for sizes, offsets and values.
//! `guest-driver/linux/vpmu_abi.h` and `vpmu_uapi.h` have the same definitions in C; `vpmu/tests/abi.rs`
//! compares C and Rust field by field. Integers between device and driver are little-endian; reserved fields
//! are zero.

/// Defines a struct of the interface. Its fields are laid out in order, without padding.
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
