use super::*;

fn good() -> Finding {
    Finding::yes("good")
}

impl Guest {
    /// Findings on a machine without faults.
    pub(crate) fn good() -> Self {
        Guest {
            port_io: good(),
            mmio: good(),
            syscall: good(),
            breakpoint: good(),
            cmpxchg16b: good(),
            signal: good(),
            ..Guest::default()
        }
    }

    /// Asserts findings that hold for every KVM, even on an emulated processor.
    pub(crate) fn assert_small_guests_run(&self) {
        for finding in [&self.port_io, &self.mmio, &self.signal, &self.sync_regs] {
            assert!(finding.ok, "{finding:?}");
        }
        assert_ne!(self.port_io_rip, ExitRip::Unknown);
        assert_ne!(self.tsc, GuestTsc::Unknown);
    }

    /// Findings on a machine that can run guests, but lacks everything else.
    pub(crate) fn small() -> Self {
        Self { port_io: good(), ..Self::default() }
    }
}

#[test]
fn failed_probe_is_an_obstacle_to_stock_kernels() {
    assert!(Guest::good().obstacles().is_empty());
    let spoil: [fn(&mut Guest); 6] = [
        |g| g.port_io.ok = false,
        |g| g.mmio.ok = false,
        |g| g.syscall.ok = false,
        |g| g.breakpoint.ok = false,
        |g| g.cmpxchg16b.ok = false,
        |g| g.signal.ok = false,
    ];
    for spoil in spoil {
        let mut guest = Guest::good();
        spoil(&mut guest);
        assert_eq!(guest.obstacles().len(), 1, "{guest:?}");
    }
}

#[test]
fn small_guest_runs_if_its_port_write_works() {
    let small = Guest::small();
    assert!(small.runs() && !small.obstacles().is_empty());
    assert!(!Guest::default().runs());
}

/// Whether the flags in /proc/cpuinfo show that the processor has hardware virtualisation.
pub(crate) fn has_hardware_virtualisation() -> bool {
    let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap();
    let mut flags = cpuinfo.split_whitespace();
    flags.any(|flag| flag == "vmx" || flag == "svm")
}
