//! All guest tests that boot a stock kernel, in one test program. Cargo runs test programs one after the other. So
//! separate programs would leave processors idle whenever the current program runs too few guests to keep them busy.
#![expect(clippy::expect_used, clippy::unwrap_used, reason = "tests fail by panicking")]

// `#[apply(MACRO)]` passes a function to a macro by example.
#[macro_use(apply)]
extern crate macro_rules_attribute;

mod baseline;
mod conformance;
mod exports;
mod host_profile;
mod lab;
mod module;
mod output;
mod persistent;
mod remote;
mod restore;
mod stock_perf;
mod storms;

use std::process::ExitCode;

/// AUX areas as a user sees them: how areas are mapped and written, the traces in them, the areas that perf core
/// manages, and vperf. The tests check exact counts and sizes.
mod aux {
    tests::group!("aux");

    /// Compares the trace of every exit with the host hypervisor's counts. The host must let the VMM use the host's
    /// tracepoints, as the lab's host does.
    mod hardware {
        tests::group!("aux-hardware", in_lab());
    }
}

/// Costs of events to programs of the guest. In the exact lab, each instruction takes a nanosecond, so times repeat.
mod costs {
    tests::group!("costs", in_exact_lab());
}

/// Counting in a stock guest, through `/dev/vpmu`.
mod counting {
    tests::group!("counting");
}

/// Tests of the guest driver while the device stops answering, the transport is unbound, the machine hibernates or the
/// module is reloaded. Programs keep using the driver during these events. The kernel checks each allocation, so that
/// a use of memory that was freed is found.
mod driver_life {
    tests::group!("driver-life", appending("iomem=relaxed slub_debug=FZPU"));

    mod kexec {
        //! A second kernel, which the first kernel starts with kexec_file_load(2). Debian's kernels for aarch64 do not have
        //! this system call.

        tests::group!("kexec", on_x86_64(), with_its_kernel());
    }
}

/// Limits on what programs without privileges take from others by their events.
mod fair {
    tests::group!("fair", with_vcpus(4));
}

/// Flushes as a user sees them. When the call returns, the mapped pages contain all samples and packets from before the
/// call.
mod flush {
    /// In the guest.
    mod guest {
        tests::group!("flush");
    }
}

/// Several processes make random calls to the driver at the same time, in a guest whose kernel checks each allocation.
mod hammer {
    // `started &[]` replaces the usual `--max-sampling-percent 100`, so the default limit applies. Without that limit,
    // clock events with the shortest sampling period would leave an emulated processor no time for anything else.
    tests::group!("hammer", appending("slub_debug=FZPU"), started(&[]));
}

/// Attacks on the machine by an unprivileged guest program. `tests/hostile.rs` contains attacks by the guest's kernel.
mod hostile {
    tests::group!("hostile");
}

/// Callers in a kernel without frame pointers. The VMM has the kernel's ORC tables.
mod kernel_chains {
    tests::group!("kernel-chains", on_x86_64(), with_orc(), with_files(images::third_party::perf));
}

/// Counts that the guest's kernel reads while its driver works on the same CPU.
mod nesting {
    // A driver that waits for itself hangs its CPU. The kernel then panics, so that the test fails soon, with its name.
    tests::group!("nesting", appending("softlockup_panic=1 sysctl.kernel.panic_on_rcu_stall=1"));
}

/// perf's rules for overflows, for events with both kinds of rings and of the kernel itself. `guest-tests overflows` prints them
/// as a table.
mod overflows {
    tests::group!("overflows");
}

/// Permissions for calls to the driver: perf's rules, capabilities, and the limit on events for users without
/// `CAP_PERFMON`.
mod permissions {
    tests::group!("permissions");
}

/// The operator's policy on events, as the guest sees it.
mod policy {
    mod hardware {
        tests::group!("policy", started(&["--count-mode", "vcpu", "--raw-events", "0x11"]));
    }

    /// A machine whose operator allows only the named events.
    mod allowed {
        tests::group!("policy-allowed", started(&["--allow-event", "tsc,exits-mmio,mark:7,exit-trace-mmio"]));
    }

    /// A machine whose operator denies the guest some events. The operator can still use these events.
    mod denied {
        tests::group!(
            "policy-denied",
            started(&[
                "--deny-event",
                "tsc,exits-mmio,mark:7,exit-trace-mmio,software",
                "--persistent",
                "exits-mmio,cpu=0,size=0,name=kept",
            ])
        );
    }
}

/// Tests of counters that the host or its operator refuses: the catalogue, the kernel log and the event in the guest.
mod refusals {
    tests::group!("refusals", started(&["--no-hardware-events", "--max-active-counters", "1"]));
}

/// Sampling into rings in a stock guest's memory.
mod sampling {
    tests::group!("sampling");
}

/// Tests starters and stoppers from user space. An event must count exactly the exits in its region, and placing a mark
/// must cost exactly one exit.
mod trigger {
    tests::group!("trigger");
}

/// The vperf command and its library in a stock guest, as users use them.
mod vperf {
    tests::group!("vperf");

    /// Events that the host started.
    mod operator {
        tests::group!("vperf-operator", started(&["--persistent", "marks,cpu=0,size=64K,name=boot"]));
    }
}

fn main() -> ExitCode {
    tests::program::run()
}
