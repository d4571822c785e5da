//! Limits on what programs without privileges take from others by their events.

tests::group!("fair", with_vcpus(4));
