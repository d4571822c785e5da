//! The guest's CPUID: the leaves that KVM supports, with the machine's topology, and without KVM's own PMU unless the
//! machine has it.
//!
//! The paravirtual PMU replaces KVM's. A guest that finds KVM's in CPUID uses it for the CPU's events.

use kvm_bindings::{CpuId, kvm_cpuid_entry2};

const LEAF_FEATURES: u32 = 0x1;
const LEAF_CACHES: u32 = 0x4;
const LEAF_PMU: u32 = 0xa;
const LEAF_TOPOLOGY: u32 = 0xb;
const LEAF_TOPOLOGY_V2: u32 = 0x1f;
const LEAF_KVM: u32 = 0x4000_0000;
const LEAF_KVM_TIMING: u32 = 0x4000_0010;
const LEAF_AMD_FEATURES: u32 = 0x8000_0001;
const LEAF_AMD_SIZES: u32 = 0x8000_0008;
const LEAF_AMD_CACHES: u32 = 0x8000_001d;
const LEAF_AMD_TOPOLOGY: u32 = 0x8000_001e;
const LEAF_AMD_PMU: u32 = 0x8000_0022;

const FEATURES_ECX_PDCM: u32 = 1 << 15;
const FEATURES_ECX_TSC_DEADLINE: u32 = 1 << 24;
const FEATURES_ECX_HYPERVISOR: u32 = 1 << 31;
const FEATURES_EDX_HTT: u32 = 1 << 28;
const AMD_ECX_CORE_COUNTERS: u32 = 1 << 23;
const AMD_ECX_PERFORMANCE_COUNTERS: u32 = AMD_ECX_CORE_COUNTERS | 1 << 24 | 1 << 28;

/// Frequency in kHz of the local APIC timer, which runs on the bus clock that KVM emulates.
const APIC_BUS_KHZ: u32 = 1_000_000;

/// Parameters of one vCPU's CPUID leaves.
#[derive(Debug, Clone, Copy)]
pub struct Cpu {
    /// The vCPU's index, which is also its APIC id.
    pub index: u8,
    /// The number of vCPUs. Each vCPU is a core with one thread. All cores are in one package.
    pub count: u8,
    /// Guest TSC frequency in kHz.
    pub tsc_khz: u32,
    /// Whether KVM emulates the TSC deadline timer.
    pub tsc_deadline: bool,
    /// Whether the vCPU has KVM's own PMU.
    pub pmu: bool,
}

impl Cpu {
    /// Number of low bits of an APIC id that identify a core within its package.
    fn core_bits(&self) -> u32 {
        u32::from(self.count).next_power_of_two().trailing_zeros()
    }
}

/// KVM's `supported` leaves, adapted to `cpu`.
///
/// # Errors
/// Fails if KVM's bindings cannot hold that many leaves.
pub fn leaves(supported: &CpuId, cpu: &Cpu) -> Result<CpuId, vmm_sys_util::fam::Error> {
    let mut entries: Vec<kvm_cpuid_entry2> = supported
        .as_slice()
        .iter()
        .filter(|entry| {
            let topology = matches!(entry.function, LEAF_TOPOLOGY | LEAF_TOPOLOGY_V2);
            !topology && entry.function != LEAF_KVM_TIMING
        })
        .copied()
        .collect();
    let has_topology = supported.as_slice().iter().any(|entry| entry.function == LEAF_TOPOLOGY);
    for entry in &mut entries {
        adapt(entry, cpu);
    }
    if has_topology {
        entries.extend(topology(cpu));
    }
    if entries.iter().any(|entry| entry.function == LEAF_KVM) {
        entries.push(kvm_cpuid_entry2 {
            function: LEAF_KVM_TIMING,
            eax: cpu.tsc_khz,
            ebx: APIC_BUS_KHZ,
            ..Default::default()
        });
    }
    CpuId::from_entries(&entries)
}

fn adapt(entry: &mut kvm_cpuid_entry2, cpu: &Cpu) {
    let index = u32::from(cpu.index);
    let count = u32::from(cpu.count);
    match entry.function {
        LEAF_FEATURES => {
            // The field for the number of APIC ids has 8 bits; 255 means 255 or more.
            let ids = (1 << cpu.core_bits()).min(0xff);
            entry.ebx = entry.ebx & 0xffff | ids << 16 | index << 24;
            entry.ecx |= FEATURES_ECX_HYPERVISOR;
            if !cpu.pmu {
                entry.ecx &= !FEATURES_ECX_PDCM;
            }
            if cpu.tsc_deadline {
                entry.ecx |= FEATURES_ECX_TSC_DEADLINE;
            }
            if cpu.count > 1 {
                entry.edx |= FEATURES_EDX_HTT;
            } else {
                entry.edx &= !FEATURES_EDX_HTT;
            }
        }
        LEAF_CACHES if entry.eax & 0x1f != 0 => {
            let level = entry.eax >> 5 & 7;
            let sharing = if level >= 3 { (1 << cpu.core_bits()) - 1 } else { 0 };
            let cores = (1 << cpu.core_bits()) - 1;
            entry.eax = entry.eax & 0x3fff | (sharing & 0xfff) << 14 | (cores & 0x3f) << 26;
        }
        LEAF_AMD_CACHES if entry.eax & 0x1f != 0 => {
            let level = entry.eax >> 5 & 7;
            let sharing = if level >= 3 { count - 1 } else { 0 };
            entry.eax = entry.eax & 0x3fff | sharing << 14;
        }
        LEAF_PMU | LEAF_AMD_PMU if !cpu.pmu => {
            (entry.eax, entry.ebx, entry.ecx, entry.edx) = (0, 0, 0, 0);
        }
        LEAF_KVM => entry.eax = entry.eax.max(LEAF_KVM_TIMING),
        LEAF_AMD_FEATURES if !cpu.pmu => entry.ecx &= !AMD_ECX_PERFORMANCE_COUNTERS,
        LEAF_AMD_SIZES => {
            entry.ecx = entry.ecx & !0xf0ff | (count - 1) | cpu.core_bits() << 12;
        }
        LEAF_AMD_TOPOLOGY => {
            entry.eax = index;
            entry.ebx = index;
            entry.ecx = 0;
        }
        _ => {}
    }
}

/// The topology levels: "thread" with one thread per core, "core" with `count` cores, and the end of the list.
fn topology(cpu: &Cpu) -> [kvm_cpuid_entry2; 3] {
    let level = |index: u32, shift: u32, below: u32, kind: u32| kvm_cpuid_entry2 {
        function: LEAF_TOPOLOGY,
        index,
        flags: kvm_bindings::KVM_CPUID_FLAG_SIGNIFCANT_INDEX,
        eax: shift,
        ebx: below,
        ecx: index | kind << 8,
        edx: u32::from(cpu.index),
        ..Default::default()
    };
    [level(0, 0, 1, 1), level(1, cpu.core_bits(), u32::from(cpu.count), 2), level(2, 0, 0, 0)]
}

/// Whether KVM has a PMU for guests: Intel's architectural PMU, or AMD's core counters.
#[must_use]
pub fn has_pmu(supported: &CpuId) -> bool {
    supported.as_slice().iter().any(|entry| match entry.function {
        // The version, which is 0 if there is no PMU.
        LEAF_PMU => entry.eax & 0xff > 0,
        LEAF_AMD_FEATURES => entry.ecx & AMD_ECX_CORE_COUNTERS != 0,
        _ => false,
    })
}

/// Width of a guest-physical address in bits, from leaf 0x8000_0008. If that leaf is absent, the width is 36.
#[must_use]
pub fn physical_bits(leaves: &CpuId) -> u32 {
    leaves.as_slice().iter().find(|entry| entry.function == LEAF_AMD_SIZES).map_or(36, |entry| entry.eax & 0xff)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(function: u32, index: u32, value: u32) -> kvm_cpuid_entry2 {
        kvm_cpuid_entry2 { function, index, eax: value, ebx: value, ecx: value, edx: value, ..Default::default() }
    }

    fn offered() -> CpuId {
        CpuId::from_entries(&[
            entry(LEAF_FEATURES, 0, u32::MAX),
            entry(LEAF_PMU, 0, 0x0730_0404),
            entry(LEAF_TOPOLOGY, 0, 7),
            entry(LEAF_TOPOLOGY, 1, 7),
            entry(LEAF_KVM, 0, 0x4000_0001),
            entry(LEAF_AMD_FEATURES, 0, u32::MAX),
            entry(LEAF_AMD_SIZES, 0, 0x3030),
            entry(LEAF_AMD_TOPOLOGY, 0, 9),
        ])
        .expect("few leaves")
    }

    fn for_cpu(index: u8, count: u8) -> Vec<kvm_cpuid_entry2> {
        let cpu = Cpu { index, count, tsc_khz: 2_000_000, tsc_deadline: true, pmu: false };
        leaves(&offered(), &cpu).expect("few leaves").as_slice().to_vec()
    }

    fn find(leaves: &[kvm_cpuid_entry2], function: u32, index: u32) -> kvm_cpuid_entry2 {
        *leaves.iter().find(|e| e.function == function && e.index == index).expect("leaf is there")
    }

    #[test]
    fn no_sign_of_a_hardware_pmu_remains() {
        let leaves = for_cpu(0, 1);
        let pmu = find(&leaves, LEAF_PMU, 0);
        assert_eq!((pmu.eax, pmu.ebx, pmu.ecx, pmu.edx), (0, 0, 0, 0));
        assert_eq!(find(&leaves, LEAF_FEATURES, 0).ecx & FEATURES_ECX_PDCM, 0);
        let amd = find(&leaves, LEAF_AMD_FEATURES, 0);
        assert_eq!(amd.ecx & AMD_ECX_PERFORMANCE_COUNTERS, 0);
    }

    #[test]
    fn pmu_that_the_machine_has_remains() {
        let cpu = Cpu { index: 0, count: 1, tsc_khz: 2_000_000, tsc_deadline: true, pmu: true };
        let leaves = leaves(&offered(), &cpu).expect("few leaves");
        assert!(has_pmu(&leaves));
        assert_eq!(find(leaves.as_slice(), LEAF_PMU, 0), find(offered().as_slice(), LEAF_PMU, 0));
        let without = CpuId::from_entries(&for_cpu(0, 1)).expect("few leaves");
        assert!(!has_pmu(&without));
    }

    #[test]
    fn every_leaf_agrees_on_the_apic_id() {
        for (index, count) in [(0, 1), (1, 2), (2, 3), (253, 254)] {
            let leaves = for_cpu(index, count);
            let id = u32::from(index);
            assert_eq!(find(&leaves, LEAF_FEATURES, 0).ebx >> 24, id);
            assert_eq!(find(&leaves, LEAF_TOPOLOGY, 0).edx, id);
            let cores = find(&leaves, LEAF_TOPOLOGY, 1);
            assert_eq!((cores.edx, cores.ebx), (id, u32::from(count)));
            assert!(1 << cores.eax >= u32::from(count));
            assert_eq!(find(&leaves, LEAF_AMD_TOPOLOGY, 0).eax, id);
            let sizes = find(&leaves, LEAF_AMD_SIZES, 0);
            assert_eq!(sizes.ecx & 0xff, u32::from(count) - 1);
        }
    }

    #[test]
    fn number_of_ids_of_many_cpus_leaves_the_apic_id_alone() {
        for (index, count) in [(0, 128), (0, 129), (200, 254)] {
            let features = find(&for_cpu(index, count), LEAF_FEATURES, 0).ebx;
            assert_eq!(features >> 24, u32::from(index), "of {count}");
            let ids = features >> 16 & 0xff;
            assert!(ids >= u32::from(count), "{ids} ids for {count}");
        }
    }

    #[test]
    fn tsc_frequency_is_in_the_kvm_timing_leaf() {
        let leaves = for_cpu(0, 1);
        assert_eq!(find(&leaves, LEAF_KVM, 0).eax, LEAF_KVM_TIMING);
        assert_eq!(find(&leaves, LEAF_KVM_TIMING, 0).eax, 2_000_000);
    }
}
