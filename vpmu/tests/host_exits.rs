//! The exits of a real vCPU on the machine that runs the tests, from KVM's tracepoints: a guest of
//! three instructions in ring 3, each round of which stores to an unbacked address.
#![expect(
    clippy::expect_used,
    reason = "a test that cannot set itself up ends there"
)]
#![expect(
    unsafe_code,
    reason = "guest memory, and a mount namespace of the test's own"
)]

use std::io;
use std::path::Path;

use kvm_bindings::{kvm_regs, kvm_segment, kvm_sregs, kvm_userspace_memory_region};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};
use vmm_sys_util::signal::SIGRTMIN;
use vpmu::abi::{EXIT_ALL, KIND_EXIT_TRACE};
use vpmu::host::{PerfSource, traces_exits};
use vpmu::source::{Counter, HostExit, Overflows, Recorded, Request, Source};

const MEMORY: usize = 0x40_0000;
const PML4: u64 = 0x1000;
const PROGRAM: u64 = 0x8000;
/// An address that the guest maps but that has no memory.
const WINDOW: u64 = 0x60_0000;
/// `again: mov [rsi], ecx; inc ecx; jmp again`
const LOOP: [u8; 6] = [0x89, 0x0e, 0xff, 0xc1, 0xeb, 0xfa];

/// The machine; its fields drop in this order.
struct Guest {
    vcpu: VcpuFd,
    _vm: VmFd,
    _memory: GuestMemoryMmap,
}

impl Guest {
    /// A vCPU about to loop; `None`: this machine has no KVM.
    fn new() -> Option<Self> {
        if !Path::new("/dev/kvm").exists() {
            return None;
        }
        let kvm = Kvm::new().expect("/dev/kvm opens");
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), MEMORY)]).expect("memory");
        write(&memory).expect("in memory");
        let vm = kvm.create_vm().expect("a VM");
        vm.set_tss_address(0xfffb_d000).expect("a TSS");
        let host = memory.get_host_address(GuestAddress(0)).expect("in memory");
        let region = kvm_userspace_memory_region {
            memory_size: MEMORY as u64,
            userspace_addr: host as u64,
            ..Default::default()
        };
        // SAFETY: the whole of a mapping that the guest owns and drops after the VM.
        unsafe { vm.set_user_memory_region(region) }.expect("a region");
        let vcpu = vm.create_vcpu(0).expect("a vCPU");
        let mut sregs = vcpu.get_sregs().expect("registers");
        ring_3(&mut sregs);
        vcpu.set_sregs(&sregs).expect("registers");
        let regs = kvm_regs {
            rip: PROGRAM,
            rsi: WINDOW,
            rflags: 2,
            ..Default::default()
        };
        vcpu.set_regs(&regs).expect("registers");
        Some(Self {
            vcpu,
            _vm: vm,
            _memory: memory,
        })
    }

    /// Runs to the next store.
    fn store(&mut self) {
        let exit = self.vcpu.run().expect("runs");
        assert!(matches!(exit, VcpuExit::MmioWrite(WINDOW, _)), "{exit:?}");
    }
}

/// The program, and tables that map the first 8 MiB.
fn write(memory: &GuestMemoryMmap) -> Result<(), vm_memory::GuestMemoryError> {
    const OPEN: u64 = 0b111;
    const LARGE: u64 = 1 << 7;
    memory.write_slice(&LOOP, GuestAddress(PROGRAM))?;
    memory.write_obj((PML4 + 0x1000) | OPEN, GuestAddress(PML4))?;
    memory.write_obj((PML4 + 0x2000) | OPEN, GuestAddress(PML4 + 0x1000))?;
    for index in 0..4 {
        let entry = index << 21 | LARGE | OPEN;
        memory.write_obj(entry, GuestAddress(PML4 + 0x2000 + 8 * index))?;
    }
    Ok(())
}

/// Flat 64-bit segments of ring 3, paging on.
fn ring_3(sregs: &mut kvm_sregs) {
    let data = kvm_segment {
        limit: u32::MAX,
        selector: 0x1b,
        type_: 3,
        present: 1,
        dpl: 3,
        db: 1,
        s: 1,
        g: 1,
        ..Default::default()
    };
    sregs.cs = kvm_segment {
        selector: 0x23,
        type_: 11,
        db: 0,
        l: 1,
        ..data
    };
    (sregs.ds, sregs.es, sregs.fs, sregs.gs, sregs.ss) = (data, data, data, data, data);
    sregs.cr0 = 0x8005_0033;
    sregs.cr3 = PML4;
    sregs.cr4 = 0x620;
    sregs.efer = 0x501;
}

/// Mounts tracefs where this process expects it, for the calling thread only.
fn mount_tracefs() -> io::Result<()> {
    if Path::new("/sys/kernel/tracing/events").exists() {
        return Ok(());
    }
    let check = |result| match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    };
    // SAFETY: takes no pointer; the thread's own view of the mounts.
    check(unsafe { libc::unshare(libc::CLONE_NEWNS) })?;
    let mount = |target: &std::ffi::CStr, kind: &std::ffi::CStr, flags| {
        let data = std::ptr::null();
        // SAFETY: strings that end in zero and outlive the call.
        check(unsafe { libc::mount(kind.as_ptr(), target.as_ptr(), kind.as_ptr(), flags, data) })
    };
    mount(c"/", c"none", libc::MS_REC | libc::MS_PRIVATE)?;
    mount(c"/sys/kernel/tracing", c"tracefs", 0)
}

/// A recorder of this thread's vCPU with the guest; the error says why there is none.
fn recorder() -> Result<(Box<dyn Counter>, PerfSource, Guest), String> {
    mount_tracefs().map_err(|error| format!("tracefs: {error}"))?;
    let source = PerfSource::new(SIGRTMIN()).expect("a source");
    let offered = source
        .offers()
        .iter()
        .any(|offer| (offer.kind, offer.config) == (KIND_EXIT_TRACE, EXIT_ALL));
    assert_eq!(offered, traces_exits().is_ok(), "offered where it opens");
    traces_exits().map_err(|refusal| refusal.to_string())?;
    let request = Request {
        kind: KIND_EXIT_TRACE,
        config: EXIT_ALL,
        sampling: None,
        exclude_user: false,
        exclude_kernel: false,
        exclude_host: false,
        pinned: false,
    };
    let recorder = source.open(&request, source.thread()).expect("offered");
    let guest = Guest::new().ok_or("no /dev/kvm")?;
    Ok((recorder, source, guest))
}

fn drained(recorder: &mut dyn Counter) -> (Vec<HostExit>, u64) {
    let mut overflows = Overflows::default();
    recorder.drain(&mut overflows);
    let (mut exits, mut lost) = (Vec::new(), 0);
    for recorded in overflows.exits {
        match recorded {
            Recorded::Exit(exit) => exits.push(exit),
            Recorded::Lost(some) => lost += some,
        }
    }
    (exits, lost)
}

/// VPMU-D-6.8-7.
#[test]
fn every_exit_is_recorded_with_its_place_and_its_end() {
    const STORES: usize = 100;
    let (mut recorder, source, mut guest) = match recorder() {
        Ok(all) => all,
        Err(why) => return eprintln!("nothing recorded on this machine: {why}"),
    };
    guest.store();
    let from = source.tsc();
    recorder.start().expect("starts");
    for _ in 0..STORES / 2 {
        guest.store();
    }
    let (mut exits, lost) = drained(&mut *recorder);
    for exit in &exits {
        assert!(exit.back.is_some(), "one that is not over stays: {exit:?}");
    }
    for _ in 0..STORES / 2 {
        guest.store();
    }
    recorder.stop().expect("stops");
    let until = source.tsc();
    guest.store();
    let (rest, more) = drained(&mut *recorder);
    exits.extend(rest);
    assert_eq!((lost, more), (0, 0));
    let counted = recorder.read().expect("reads").value;
    assert_eq!(exits.len() as u64, counted, "each once");
    let stores = exits.iter().filter(|exit| exit.ip == PROGRAM);
    assert!(stores.count() >= STORES, "{exits:x?}");
    let reasons: std::collections::BTreeSet<_> = exits.iter().map(|exit| exit.reason).collect();
    eprintln!(
        "{counted} exits of {STORES} stores, reasons {reasons:x?}, {:x?}",
        exits[0]
    );
    assert!(exits.is_sorted_by_key(|exit| exit.tsc));
    let (last, ended) = exits.split_last().expect("some");
    assert_eq!(last.back, None, "it had not run again");
    for (exit, next) in ended.iter().zip(&exits[1..]) {
        let back = exit.back.expect("over");
        assert!((exit.tsc..=next.tsc).contains(&back), "{exit:x?} {next:x?}");
    }
    assert!(exits.iter().all(|exit| (from..=until).contains(&exit.tsc)));
    assert_eq!(drained(&mut *recorder), (Vec::new(), 0), "drained once");
}

#[test]
fn what_finds_no_room_is_counted_to_the_exit() {
    let (mut recorder, _source, mut guest) = match recorder() {
        Ok(all) => all,
        Err(why) => return eprintln!("nothing recorded on this machine: {why}"),
    };
    for rounds in [5_000, 100, 10_000] {
        recorder.start().expect("starts");
        for _ in 0..rounds {
            guest.store();
        }
        recorder.stop().expect("stops");
    }
    let (exits, lost) = drained(&mut *recorder);
    let counted = recorder.read().expect("reads").value;
    eprintln!("{} exits, {lost} lost of {counted}", exits.len());
    assert!(lost > 0);
    assert_eq!(exits.len() as u64 + lost, counted);
    // The records after a loss are returned again, and the loss once.
    for _ in 0..2 {
        recorder.start().expect("starts");
        guest.store();
        recorder.stop().expect("stops");
        let (exits, lost) = drained(&mut *recorder);
        assert_eq!(lost, 0);
        assert!(exits.iter().any(|exit| exit.ip == PROGRAM), "{exits:x?}");
    }
}
