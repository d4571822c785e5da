//! Guests of a stock QEMU, with the device in a process of its own that QEMU reaches by vfio-user. The tests are those of
//! the groups that run in this project's VMM. QEMU emulates the guest here, so the tests run on every machine.

mod counting {
    tests::group!("counting", beside_qemu(&[]));
}

mod flush {
    tests::group!("flush", beside_qemu(&[]));
}

mod output {
    tests::group!("output", with_files(crate::output::reader), beside_qemu(&[]));
}

mod permissions {
    tests::group!("permissions", beside_qemu(&[]));
}

mod persistent {
    tests::group!("persistent", with_files(images::third_party::perf), beside_qemu(&[]));
}

mod sampling {
    tests::group!("sampling", beside_qemu(&[]));
}

mod trigger {
    tests::group!("trigger", beside_qemu(&[]));
}
