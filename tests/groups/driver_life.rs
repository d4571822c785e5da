//! Tests of the guest driver while the device stops answering, the transport is unbound, the machine hibernates or the
//! module is reloaded. Programs keep using the driver during these events.

tests::group!("driver-life", appending("iomem=relaxed"));

mod kexec {
    //! A second kernel, which the first kernel starts with kexec_file_load(2). Debian's kernels for aarch64 do not have
    //! this system call.

    tests::group!("kexec", on_x86_64(), with_its_kernel());
}
