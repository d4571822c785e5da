//! Formats the reasons and accesses of exits as text.

use vpmu_client::trace::{Exit, Reason};

/// The virtualization extension of a processor, which defines the numbers of hardware exit reasons.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Processor {
    Svm,
    Vmx,
    #[default]
    Unknown,
}

impl Processor {
    /// The extension of the processor `cpu_id`, whose first word is the vendor.
    pub(super) fn of(cpu_id: &str) -> Self {
        match cpu_id.split(',').next() {
            Some("AuthenticAMD" | "HygonGenuine") => Self::Svm,
            Some("GenuineIntel" | "CentaurHauls" | "Shanghai") => Self::Vmx,
            _ => Self::Unknown,
        }
    }
}

/// The reason of an exit.
pub(super) fn reason(exit: &Exit, processor: Processor) -> String {
    let known = match exit.reason() {
        Reason::Io => Some("io"),
        Reason::Mmio => Some("mmio"),
        Reason::Hlt => Some("hlt"),
        Reason::Signal => Some("signal"),
        Reason::Other => Some("other"),
        Reason::Hardware(number) => hardware(number, processor),
        _ => None,
    };
    match (known, exit.reason()) {
        (Some(name), _) => name.into(),
        (None, Reason::Hardware(number)) => match processor {
            Processor::Svm => format!("svm:{number:#x}"),
            Processor::Vmx => format!("vmx:{number}"),
            Processor::Unknown => format!("hardware:{number:#x}"),
        },
        (None, Reason::Unknown(number)) => format!("unknown:{number}"),
        (None, reason) => format!("{reason:?}").to_lowercase(),
    }
}

/// Formats the access that caused the exit; empty if the packet does not describe it.
pub(super) fn what(exit: &Exit, processor: Processor) -> String {
    if let Some(access) = exit.access() {
        let place = if access.memory { "memory" } else { "port" };
        return described(place, access.address, access.write, access.size.into(), access.count);
    }
    let Reason::Hardware(number) = exit.reason() else {
        return String::new();
    };
    let (first, second) = (exit.qualification(), exit.detail());
    match (processor, number) {
        // SVM, EXITINFO1 of an I/O instruction: the direction (1 to read) in bit 0, the number of
        // bytes in bits 4 to 6, the port in bits 16 to 31.
        (Processor::Svm, 0x7b) => described("port", first >> 16 & 0xffff, first & 1 == 0, first >> 4 & 7, 1),
        (Processor::Svm, 0x7c) => if first & 1 == 0 { "read" } else { "write" }.into(),
        (Processor::Svm, 0x400) if second != 0 => {
            let access = match first & 0x12 {
                0 => "read",
                2 => "write",
                _ => "fetch",
            };
            format!("memory {second:#x} {access}")
        }
        // VMX, exit qualification of an I/O instruction: the number of bytes minus one in bits 0 to
        // 2, the direction (1 to read) in bit 3, the port in bits 16 to 31.
        (Processor::Vmx, 30) => {
            let size = (first & 7) + 1;
            described("port", first >> 16 & 0xffff, first & 8 == 0, size, 1)
        }
        (Processor::Vmx, 48) => match first & 7 {
            1 => "read".into(),
            2 => "write".into(),
            4 => "fetch".into(),
            _ => String::new(),
        },
        _ => String::new(),
    }
}

fn described(place: &str, address: u64, write: bool, size: u64, count: u32) -> String {
    let direction = if write { "write" } else { "read" };
    let bytes = if size == 1 { "byte" } else { "bytes" };
    let times = if count > 1 { format!(" x{count}") } else { String::new() };
    format!("{place} {address:#x} {direction} {size} {bytes}{times}")
}

/// The name of a hardware exit reason, from the processor's manual.
fn hardware(number: u16, processor: Processor) -> Option<&'static str> {
    let names = match processor {
        Processor::Svm => SVM,
        Processor::Vmx => VMX,
        Processor::Unknown => return None,
    };
    let at = names.binary_search_by_key(&number, |&(number, _)| number);
    at.ok().and_then(|at| names.get(at)).map(|&(_, name)| name)
}

/// Exit codes of AMD's SVM, sorted.
const SVM: &[(u16, &str)] = &[
    (0x00, "read cr0"),
    (0x02, "read cr2"),
    (0x03, "read cr3"),
    (0x04, "read cr4"),
    (0x08, "read cr8"),
    (0x10, "write cr0"),
    (0x12, "write cr2"),
    (0x13, "write cr3"),
    (0x14, "write cr4"),
    (0x18, "write cr8"),
    (0x20, "read dr0"),
    (0x26, "read dr6"),
    (0x27, "read dr7"),
    (0x30, "write dr0"),
    (0x36, "write dr6"),
    (0x37, "write dr7"),
    (0x41, "exception db"),
    (0x43, "exception bp"),
    (0x46, "exception ud"),
    (0x47, "exception nm"),
    (0x4d, "exception gp"),
    (0x4e, "exception pf"),
    (0x51, "exception ac"),
    (0x52, "exception mc"),
    (0x60, "interrupt"),
    (0x61, "nmi"),
    (0x62, "smi"),
    (0x63, "init"),
    (0x64, "interrupt window"),
    (0x65, "write cr0 selective"),
    (0x66, "read idtr"),
    (0x67, "read gdtr"),
    (0x68, "read ldtr"),
    (0x69, "read tr"),
    (0x6a, "write idtr"),
    (0x6b, "write gdtr"),
    (0x6c, "write ldtr"),
    (0x6d, "write tr"),
    (0x6e, "rdtsc"),
    (0x6f, "rdpmc"),
    (0x70, "pushf"),
    (0x71, "popf"),
    (0x72, "cpuid"),
    (0x73, "rsm"),
    (0x74, "iret"),
    (0x75, "software interrupt"),
    (0x76, "invd"),
    (0x77, "pause"),
    (0x78, "hlt"),
    (0x79, "invlpg"),
    (0x7a, "invlpga"),
    (0x7b, "port io"),
    (0x7c, "msr"),
    (0x7d, "task switch"),
    (0x7e, "ferr freeze"),
    (0x7f, "shutdown"),
    (0x80, "vmrun"),
    (0x81, "vmmcall"),
    (0x82, "vmload"),
    (0x83, "vmsave"),
    (0x84, "stgi"),
    (0x85, "clgi"),
    (0x86, "skinit"),
    (0x87, "rdtscp"),
    (0x88, "icebp"),
    (0x89, "wbinvd"),
    (0x8a, "monitor"),
    (0x8b, "mwait"),
    (0x8c, "mwait armed"),
    (0x8d, "xsetbv"),
    (0x8e, "rdpru"),
    (0x8f, "write efer"),
    (0xa2, "invpcid"),
    (0xa5, "bus lock"),
    (0xa6, "idle hlt"),
    (0x400, "nested page fault"),
    (0x401, "avic incomplete ipi"),
    (0x402, "avic unaccelerated access"),
    (0x403, "vmgexit"),
    (0xffff, "invalid guest state"),
];

/// Basic exit reasons of Intel's VMX, sorted.
const VMX: &[(u16, &str)] = &[
    (0, "exception or nmi"),
    (1, "interrupt"),
    (2, "triple fault"),
    (3, "init"),
    (4, "startup ipi"),
    (5, "io smi"),
    (6, "smi"),
    (7, "interrupt window"),
    (8, "nmi window"),
    (9, "task switch"),
    (10, "cpuid"),
    (11, "getsec"),
    (12, "hlt"),
    (13, "invd"),
    (14, "invlpg"),
    (15, "rdpmc"),
    (16, "rdtsc"),
    (17, "rsm"),
    (18, "vmcall"),
    (19, "vmclear"),
    (20, "vmlaunch"),
    (21, "vmptrld"),
    (22, "vmptrst"),
    (23, "vmread"),
    (24, "vmresume"),
    (25, "vmwrite"),
    (26, "vmxoff"),
    (27, "vmxon"),
    (28, "control register"),
    (29, "debug register"),
    (30, "port io"),
    (31, "read msr"),
    (32, "write msr"),
    (33, "invalid guest state"),
    (34, "msr loading"),
    (36, "mwait"),
    (37, "monitor trap"),
    (39, "monitor"),
    (40, "pause"),
    (41, "machine check"),
    (43, "tpr below threshold"),
    (44, "apic access"),
    (45, "virtualised eoi"),
    (46, "gdtr or idtr"),
    (47, "ldtr or tr"),
    (48, "ept violation"),
    (49, "ept misconfiguration"),
    (50, "invept"),
    (51, "rdtscp"),
    (52, "preemption timer"),
    (53, "invvpid"),
    (54, "wbinvd"),
    (55, "xsetbv"),
    (56, "apic write"),
    (57, "rdrand"),
    (58, "invpcid"),
    (59, "vmfunc"),
    (60, "encls"),
    (61, "rdseed"),
    (62, "page log full"),
    (63, "xsaves"),
    (64, "xrstors"),
    (67, "umwait"),
    (68, "tpause"),
    (74, "bus lock"),
    (75, "notify"),
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exits::composed;
    use vpmu_abi::PACKET_HARDWARE;
    use vpmu_client::Packet;
    use vpmu_client::trace::Packets;

    fn words(exit: composed::Exit, processor: Processor) -> (String, String) {
        let bytes = exit.bytes();
        let Some(Ok(Packet::Exit(exit))) = Packets::new(64, &bytes).next() else {
            panic!("{bytes:?}");
        };
        (reason(exit, processor), what(exit, processor))
    }

    #[test]
    fn reasons_are_of_the_processors_maker() {
        assert_eq!(Processor::of("AuthenticAMD,25,1,1"), Processor::Svm);
        assert_eq!(Processor::of("GenuineIntel,6,85,7"), Processor::Vmx);
        assert_eq!(Processor::of("somebody,1,2,3"), Processor::Unknown);
        assert_eq!(Processor::of(""), Processor::Unknown);
    }

    fn exit(flags: u8, reason: u16, qualification: u64, detail: u64) -> composed::Exit {
        composed::Exit { flags, reason, qualification, detail, ..composed::Exit::default() }
    }

    #[test]
    fn accesses_are_described_in_words() {
        let of = |reason, address, detail| words(exit(0, reason, address, detail), Processor::Unknown).1;
        assert_eq!(of(2, 0x3f8, 1 | 1 << 8 | 1 << 32), "port 0x3f8 write 1 byte");
        assert_eq!(of(2, 0x60, 2 | 7 << 32), "port 0x60 read 2 bytes x7");
        assert_eq!(of(3, 0xd000_0000, 4 | 1 << 8), "memory 0xd0000000 write 4 bytes");
        assert_eq!(of(4, 0, 0), "");
        assert_eq!(of(2, 0, 0), "", "an unknown access has no text");
    }

    #[test]
    fn hardware_reasons_have_vendor_names() {
        let of = |number, processor, first, second| words(exit(PACKET_HARDWARE, number, first, second), processor);
        let pair = |reason: &str, what: &str| (reason.to_owned(), what.to_owned());
        let (svm, vmx) = (Processor::Svm, Processor::Vmx);
        assert_eq!(of(0x7b, svm, 0x3f8 << 16 | 1 << 4, 0), pair("port io", "port 0x3f8 write 1 byte"));
        assert_eq!(of(0x7b, svm, 0x60 << 16 | 2 << 4 | 1, 0), pair("port io", "port 0x60 read 2 bytes"));
        assert_eq!(of(0x7c, svm, 1, 0), pair("msr", "write"));
        assert_eq!(of(0x400, svm, 4 | 2, 0xd000_0000), pair("nested page fault", "memory 0xd0000000 write"));
        assert_eq!(of(30, vmx, 0x3f8 << 16 | 8 | 3, 0), pair("port io", "port 0x3f8 read 4 bytes"));
        assert_eq!(of(48, vmx, 2, 0), pair("ept violation", "write"));
        assert_eq!(of(12, vmx, 0, 0), pair("hlt", ""));
        assert_eq!(of(0x300, svm, 0, 0), pair("svm:0x300", ""));
        assert_eq!(of(300, vmx, 0, 0), pair("vmx:300", ""));
        assert_eq!(of(0x78, Processor::Unknown, 0, 0), pair("hardware:0x78", ""));
        assert_eq!(words(exit(0, 99, 0, 0), svm), pair("unknown:99", ""));
        assert_eq!(words(exit(0, 5, 0, 0), svm), pair("signal", ""));
    }

    #[test]
    fn names_are_found_by_bisection() {
        for names in [SVM, VMX] {
            assert!(names.is_sorted_by(|(a, _), (b, _)| a < b));
        }
    }
}
