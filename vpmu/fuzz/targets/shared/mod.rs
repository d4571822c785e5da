//! The shared part of the targets that drive a device: a device with guest memory that all executions reuse, and
//! operations made from the fuzzer's bytes.
//!
//! [`stage`] holds the device and checks it at the end, [`driver_ops`] acts as its driver, [`host_ops`] as its
//! host and its operator, and [`rings`] as a program that reads its rings.

#[path = "../../../tests/device/driver.rs"]
pub(crate) mod driver;
#[path = "../../../tests/device/fake_host.rs"]
pub(crate) mod fake_host;
#[path = "../../../tests/device/fixture.rs"]
pub(crate) mod fixture;
#[path = "../../../tests/device/forgery.rs"]
pub(crate) mod forgery;
#[path = "../../../tests/device/reader.rs"]
pub(crate) mod reader;

pub(crate) mod driver_ops;
pub(crate) mod host_ops;
pub(crate) mod input;
pub(crate) mod layout;
pub(crate) mod rings;
pub(crate) mod stage;
