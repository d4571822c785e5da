//! Sampling into rings in a stock guest's memory.

tests::group!("sampling");
