//! Persistent events as programs and the operator use them. These events outlive their creators, the driver and the
//! guest.

/// Persistent events of the guest.
mod own {
    tests::group!("persistent", with_files(images::third_party::perf));
}

/// Persistent events of the operator, started from the VMM's command line.
mod operator {
    tests::group!(
        "persistent-operator",
        started(&["--persistent", "marks,name=flight,size=64K", "--persistent", "exits-user,cpu=0,name=boot,size=1M"])
    );
}

/// Recordings of a guest that has ended.
pub(crate) mod ends;
