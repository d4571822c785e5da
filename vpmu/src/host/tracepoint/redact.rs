//! Filters an exit's information words, which are `info1` and `info2` of a `kvm_exit` record, before the guest sees
//! them. Only bits that describe the guest's own instruction or access remain. Bits that describe the host, and words
//! of unknown meaning, become zero.

/// Values of the field `isa` in `kvm_exit`. The meaning of the exit reason and of the information words depends on this
/// field.
pub(super) const VMX: u64 = 1;
pub(super) const SVM: u64 = 2;

/// Bits of a page fault's error code that the guest may see: write, user mode, instruction fetch, and protection
/// key. The other bits concern page tables of the host.
const FAULT_OWN: u64 = 1 << 1 | 1 << 2 | 1 << 4 | 1 << 5;
/// Bits of a nested page fault's error code that the guest may see: write, user mode, instruction fetch, and
/// whether the fault was at the final address or during the walk of the guest's page tables.
const NESTED_OWN: u64 = 1 << 1 | 1 << 2 | 1 << 4 | 1 << 32 | 1 << 33;
/// Bits of an EPT violation's exit qualification that the guest may see: read, write, instruction fetch, whether
/// the linear address is valid, and whether the access was to that address rather than to the guest's page tables.
const VIOLATION_OWN: u64 = 0b111 | 1 << 7 | 1 << 8;

/// Returns the information words `info` of an exit with `reason`. Bits that the guest must not see are zero.
pub(super) fn guest_visible(isa: u64, reason: u64, info: [u64; 2]) -> [u64; 2] {
    match isa {
        VMX => vmx(reason & 0xffff, info),
        SVM => svm(reason, info),
        _ => [0; 2],
    }
}

/// The first word is the exit qualification. The second word is the IDT-vectoring information, which identifies the
/// event that was being delivered.
fn vmx(reason: u64, [qualification, vectoring]: [u64; 2]) -> [u64; 2] {
    match reason {
        // Task switch, INVLPG, access to a control or debug register, port I/O, access to the local APIC, end of an
        // interrupt, access to a descriptor-table register, APIC write.
        9 | 14 | 28 | 29 | 30 | 44 | 45 | 46 | 47 | 56 => [qualification, vectoring],
        48 => [qualification & VIOLATION_OWN, vectoring],
        _ => [0; 2],
    }
}

/// EXITINFO1 and EXITINFO2.
fn svm(reason: u64, [first, second]: [u64; 2]) -> [u64; 2] {
    match reason {
        // Control and debug registers: the number of the general-purpose register.
        0x00..=0x3f => [first, 0],
        // Page fault: the error code and the faulting address. Machine check (0x52): nothing, because the words
        // describe the host.
        0x4e => [first & FAULT_OWN, second],
        0x52 => [0; 2],
        0x40..=0x5f => [first, 0],
        // INT: the vector. INVLPG: the address. MSR: read or write.
        0x75 | 0x79 | 0x7c => [first, 0],
        // Port I/O: the access, and the address of the next instruction. Task switch: both words.
        0x7b | 0x7d => [first, second],
        // Nested page fault: the error code and the guest-physical address.
        0x400 => [first & NESTED_OWN, second],
        // All others, such as interrupts, NMI, SMI and INIT: nothing, because the words are stale or describe the host.
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
        assert_eq!(guest_visible(SVM, 0x7b, io), io);
        assert_eq!(guest_visible(VMX, 30, io), io);
        assert_eq!(guest_visible(VMX, 0x8000_0000 | 30, io), io, "flags above the reason");
        assert_eq!(guest_visible(SVM, 0x7c, [1, 7]), [1, 0]);
        assert_eq!(guest_visible(SVM, 0x400, [0x1_0000_0007, 0xfee0_0000]), [0x1_0000_0006, 0xfee0_0000]);
        assert_eq!(guest_visible(VMX, 48, [0x18a, 0]), [0x182, 0]);
    }

    /// VPMU-D-6.8-9.
    #[test]
    fn interrupts_of_the_host_report_no_details() {
        for reason in [0x52, 0x60, 0x61, 0x62, 0x63, 0x64, 0x78, 0x401, 0x402, 0x403, u64::MAX] {
            assert_eq!(guest_visible(SVM, reason, ALL), [0; 2], "{reason:#x}");
        }
        for reason in [0, 1, 2, 3, 6, 10, 12, 31, 32, 41, 49, 52, 62, 74] {
            assert_eq!(guest_visible(VMX, reason, ALL), [0; 2], "{reason}");
        }
    }

    /// VPMU-D-6.8-9.
    #[test]
    fn host_page_table_state_is_hidden() {
        assert_eq!(guest_visible(SVM, 0x4e, ALL), [0x36, u64::MAX]);
        assert_eq!(guest_visible(SVM, 0x400, ALL), [0x3_0000_0016, u64::MAX]);
        assert_eq!(guest_visible(VMX, 48, ALL), [0x187, u64::MAX]);
    }

    #[test]
    fn unknown_instruction_set_reports_no_values() {
        for isa in [0, 3, u64::MAX] {
            assert!((0..0x500).all(|reason| guest_visible(isa, reason, ALL) == [0; 2]));
        }
    }
}
