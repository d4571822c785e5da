//! What the operator decides about hardware events, on a host that may have none.

use perf_event_open_sys::bindings::perf_event_attr;
use vpmu_client::Vpmu;

use crate::ensure::{ensure, ensure_eq};
use crate::raw::{Device, How, KIND_SOFTWARE, SW_TASK_CLOCK, refused};
use crate::{Outcome, Test, os};

pub(crate) const TESTS: &[Test] = &[
    (
        "count_mode_of_the_operator_is_reported",
        count_mode_of_the_operator_is_reported,
    ),
    (
        "hypervisor_is_excluded_where_a_program_asks",
        hypervisor_is_excluded_where_a_program_asks,
    ),
];

const KIND_HARDWARE: u64 = 0;
const COUNT_VCPU: u32 = 1;

fn count_mode_of_the_operator_is_reported() -> Outcome {
    let device = Device::open()?;
    ensure_eq!(device.info.count_mode, COUNT_VCPU, "the driver's");
    let vpmu = Vpmu::open()?;
    ensure!(vpmu.info().host_work_counted, "the library's");
    for entry in vpmu.catalogue().entries() {
        let of_hardware = u64::from(entry.kind) == KIND_HARDWARE;
        ensure!(!(of_hardware && entry.guest_only), "{entry:?}");
    }
    Ok(())
}

/// The device takes the driver's word for it, by both doors, also of an event that cannot tell.
fn hypervisor_is_excluded_where_a_program_asks() -> Outcome {
    let device = Device::open()?;
    let mut clock = device.attr(KIND_SOFTWARE, SW_TASK_CLOCK);
    clock.set_exclude_hv(1);
    for attr in [clock, device.marks(5, 1, 0)] {
        let mut attr: perf_event_attr = attr;
        attr.set_exclude_hv(1);
        ensure_eq!(
            refused(device.open_event(&attr, How::OWN)),
            None,
            "/dev/vpmu"
        );
        ensure_eq!(refused(os::open_perf_attr(&attr)), None, "perf core");
    }
    Ok(())
}
