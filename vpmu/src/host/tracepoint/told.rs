//! Filters the information words of an exit for the guest. Only the parts that describe the guest's
//! own request remain; the host's parts, and words of unknown meaning, become zero.

/// KVM's numbers of the instruction sets that define an exit's reason and words.
pub(super) const VMX: u64 = 1;
pub(super) const SVM: u64 = 2;

/// For a page fault: the bits for a write, user mode, a fetch, and the guest's protection keys. The
/// other bits concern page tables of the host.
const FAULT_OWN: u64 = 1 << 1 | 1 << 2 | 1 << 4 | 1 << 5;
/// For a nested page fault: the bits for a write, user mode, a fetch, and for a fault at the address itself
/// or on the walk of the guest's tables.
const NESTED_OWN: u64 = 1 << 1 | 1 << 2 | 1 << 4 | 1 << 32 | 1 << 33;
/// For an EPT violation: the bits for a read, a write and a fetch; the bit for a valid linear address; and
/// the bit for an access to that address rather than to the guest's tables.
const VIOLATION_OWN: u64 = 0b111 | 1 << 7 | 1 << 8;

/// The guest's part of the words `info` about an exit for `reason`.
pub(super) fn told(isa: u64, reason: u64, info: [u64; 2]) -> [u64; 2] {
    match isa {
        VMX => vmx(reason & 0xffff, info),
        SVM => svm(reason, info),
        _ => [0; 2],
    }
}

/// The first word is the exit qualification, the second the event that was being delivered.
fn vmx(reason: u64, [qualification, vectoring]: [u64; 2]) -> [u64; 2] {
    match reason {
        // Task switch, INVLPG, control and debug registers, ports, local APIC accesses, end of an
        // interrupt, descriptor tables, APIC write.
        9 | 14 | 28 | 29 | 30 | 44 | 45 | 46 | 47 | 56 => [qualification, vectoring],
        48 => [qualification & VIOLATION_OWN, vectoring],
        _ => [0; 2],
    }
}

/// EXITINFO1 and EXITINFO2.
fn svm(reason: u64, [first, second]: [u64; 2]) -> [u64; 2] {
    match reason {
        // Control and debug registers: the number of the general register.
        0x00..=0x3f => [first, 0],
        // A page fault has its address. A machine check is the host's.
        0x4e => [first & FAULT_OWN, second],
        0x52 => [0; 2],
        0x40..=0x5f => [first, 0],
        // INT: the vector. INVLPG: the address. MSR: read or write.
        0x75 | 0x79 | 0x7c => [first, 0],
        // Ports with the address of the next instruction; task switch.
        0x7b | 0x7d => [first, second],
        // A nested page fault has the guest-physical address.
        0x400 => [first & NESTED_OWN, second],
        // Words that are stale, or the host's: interrupts, NMI, SMI, INIT, and reasons without words.
        _ => [0; 2],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [u64; 2] = [u64::MAX; 2];

    #[test]
    fn exit_details_are_the_guests_request() {
        let io = [0x5f0_0011, 0x1234];
        assert_eq!(told(SVM, 0x7b, io), io);
        assert_eq!(told(VMX, 30, io), io);
        assert_eq!(
            told(VMX, 0x8000_0000 | 30, io),
            io,
            "flags above the reason"
        );
        assert_eq!(told(SVM, 0x7c, [1, 7]), [1, 0]);
        assert_eq!(
            told(SVM, 0x400, [0x1_0000_0007, 0xfee0_0000]),
            [0x1_0000_0006, 0xfee0_0000]
        );
        assert_eq!(told(VMX, 48, [0x18a, 0]), [0x182, 0]);
    }

    /// VPMU-D-6.8-9.
    #[test]
    fn interrupts_of_the_host_report_no_details() {
        for reason in [
            0x52,
            0x60,
            0x61,
            0x62,
            0x63,
            0x64,
            0x78,
            0x401,
            0x402,
            0x403,
            u64::MAX,
        ] {
            assert_eq!(told(SVM, reason, ALL), [0; 2], "{reason:#x}");
        }
        for reason in [0, 1, 2, 3, 6, 10, 12, 31, 32, 41, 49, 52, 62, 74] {
            assert_eq!(told(VMX, reason, ALL), [0; 2], "{reason}");
        }
    }

    /// VPMU-D-6.8-9.
    #[test]
    fn host_page_table_state_is_hidden() {
        assert_eq!(told(SVM, 0x4e, ALL), [0x36, u64::MAX]);
        assert_eq!(told(SVM, 0x400, ALL), [0x3_0000_0016, u64::MAX]);
        assert_eq!(told(VMX, 48, ALL), [0x187, u64::MAX]);
    }

    #[test]
    fn unknown_instruction_set_reports_no_values() {
        for isa in [0, 3, u64::MAX] {
            assert!((0..0x500).all(|reason| told(isa, reason, ALL) == [0; 2]));
        }
    }
}
