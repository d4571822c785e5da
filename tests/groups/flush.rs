//! Flushes as a user sees them. When the call returns, the mapped pages contain all samples and packets from before the
//! call.

/// In the guest.
mod guest {
    tests::group!("flush");
}
