//! The shared part of the targets that drive a device: a device with guest memory that all executions reuse, and
//! operations made from the fuzzer's bytes.
//!
//! [`stage`] holds the device and checks it at the end, [`driver_ops`] acts as its driver, [`host_ops`] as its
//! host and its operator, and [`rings`] as a program that reads its rings.

pub(crate) mod driver_ops;
pub(crate) mod host_ops;
pub(crate) mod input;
pub(crate) mod layout;
pub(crate) mod rings;
pub(crate) mod stage;
