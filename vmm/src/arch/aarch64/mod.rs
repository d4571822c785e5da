//! The aarch64 machine: its addresses, the state in which its kernel starts, its device tree.

pub mod board;
pub mod boot;
pub mod calls;
pub mod check;
pub mod clock;
pub mod cpus;
pub mod emulation;
pub(crate) mod exits;
mod fdt;
mod gic;
pub mod kernel;
pub mod layout;
pub mod platform;
mod reg;
pub(crate) mod registers;
