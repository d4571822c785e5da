//! The registers of each kind of PMU, and the CPUID leaves that describe them.

use std::ops::Range;

use kvm_bindings::kvm_cpuid_entry2;

/// Width of the counters on every emulated processor.
pub(crate) const WIDTH: u32 = 48;

const LEAF_VENDOR: u32 = 0;
const LEAF_FEATURES: u32 = 1;
const LEAF_PMU: u32 = 0xa;
const LEAF_EXTENDED: u32 = 0x8000_0000;
const LEAF_AMD_FEATURES: u32 = 0x8000_0001;
const LEAF_AMD_PMU: u32 = 0x8000_0022;
const AMD_ECX_PERFCTR_CORE: u32 = 1 << 23;
const AMD_EAX_PERFMON_V2: u32 = 1;

/// `GenuineIntel`, in the order EBX, EDX, ECX.
const INTEL: [u32; 3] = [0x756e_6547, 0x4965_6e69, 0x6c65_746e];
/// Family 6 with an unused model. The guest's driver does not know this model, so it identifies the PMU only by the
/// CPUID leaf.
const INTEL_MODEL: u32 = 0x0002_0600;
const MODEL_BITS: u32 = 0x0fff_3ff0;
const INTEL_VERSION: u32 = 2;
const INTEL_EVENTS: u32 = 7;
const INTEL_GENERAL: u32 = 8;
const INTEL_FIXED: u32 = 3;

const K7_SELECTS: u32 = 0xc001_0000;
const K7_COUNTERS: u32 = 0xc001_0004;
const CORE: u32 = 0xc001_0200;
const GLOBAL_STATUS: u32 = 0xc000_0300;
const GLOBAL_CONTROL: u32 = 0xc000_0301;
const GLOBAL_STATUS_CLEAR: u32 = 0xc000_0302;
const INTEL_COUNTERS: u32 = 0xc1;
const INTEL_SELECTS: u32 = 0x186;
const INTEL_FIXED_COUNTERS: u32 = 0x309;
const INTEL_FIXED_CONTROL: u32 = 0x38d;
const INTEL_STATUS: u32 = 0x38e;
const INTEL_CONTROL: u32 = 0x38f;
const INTEL_STATUS_CLEAR: u32 = 0x390;
/// RDPMC's indices of fixed counters.
const INTEL_FIXED_INDEX: u32 = 1 << 30;
/// The first fixed counter's bit in registers that have one bit for each counter.
const INTEL_FIXED_BIT: u32 = 32;

/// The function of a register.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Register {
    /// Selects and enables a counter's event.
    Select(usize),
    Counter(usize),
    /// Enables fixed counters.
    FixedControl,
    /// Bit mask of enabled counters.
    Control,
    /// Bit mask of overflowed counters.
    Status,
    /// Clears bits of the status.
    StatusClear,
}

/// A kind of PMU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Layout {
    /// The four counters that every AMD processor has.
    Amd,
    /// Intel's architectural PMU, version 2: eight general-purpose counters and three fixed counters.
    IntelV2,
    /// AMD's PerfMonV2: six counters, and global registers that control all of them together.
    AmdV2,
}

impl Layout {
    const ALL: [(&'static str, Self); 3] = [("amd", Self::Amd), ("amd-v2", Self::AmdV2), ("intel-v2", Self::IntelV2)];

    pub(crate) fn named(name: &str) -> Option<Self> {
        let found = Self::ALL.into_iter().find(|(known, _)| *known == name);
        found.map(|(_, layout)| layout)
    }

    pub(crate) fn names() -> String {
        Self::ALL.map(|(name, _)| name).join(", ")
    }

    /// Number of counters without the fixed ones.
    fn general(self) -> u32 {
        match self {
            Self::Amd => 4,
            Self::AmdV2 => 6,
            Self::IntelV2 => INTEL_GENERAL,
        }
    }

    /// Returns the number of counters. Fixed counters come last.
    pub(crate) fn counters(self) -> u32 {
        self.general() + self.fixed()
    }

    pub(crate) fn fixed(self) -> u32 {
        match self {
            Self::IntelV2 => INTEL_FIXED,
            Self::Amd | Self::AmdV2 => 0,
        }
    }

    /// Returns the bit of a counter in [`Register::Control`] and [`Register::Status`].
    pub(crate) fn bit(self, counter: usize) -> u64 {
        let general = self.general() as usize;
        match counter.checked_sub(general) {
            None => 1 << counter,
            Some(fixed) => 1 << (INTEL_FIXED_BIT as usize + fixed),
        }
    }

    /// Returns whether a counter counts only while its bit in [`Register::Control`] is set.
    pub(crate) fn has_control(self) -> bool {
        self != Self::Amd
    }

    /// Returns the numbers of all trapped registers. The patched RDPMC reads the registers whose numbers start at 0 and
    /// at [`INTEL_FIXED_INDEX`]: see [`rdpmc`](crate::rdpmc).
    pub(crate) fn ranges(self) -> Vec<Range<u32>> {
        let mut ranges = Vec::from([Range { start: 0, end: self.general() }]);
        match self {
            Self::Amd => ranges.push(K7_SELECTS..K7_COUNTERS + 4),
            Self::AmdV2 => ranges.extend([CORE..CORE + 2 * self.counters(), GLOBAL_STATUS..GLOBAL_STATUS_CLEAR + 1]),
            Self::IntelV2 => ranges.extend([
                INTEL_FIXED_INDEX..INTEL_FIXED_INDEX + INTEL_FIXED,
                INTEL_COUNTERS..INTEL_COUNTERS + INTEL_GENERAL,
                INTEL_SELECTS..INTEL_SELECTS + INTEL_GENERAL,
                INTEL_FIXED_COUNTERS..INTEL_FIXED_COUNTERS + INTEL_FIXED,
                INTEL_FIXED_CONTROL..INTEL_STATUS_CLEAR + 1,
            ]),
        }
        ranges
    }

    /// The function of register `number`.
    pub(crate) fn find(self, number: u32) -> Option<Register> {
        let index = |base: u32| usize::try_from(number - base).ok();
        if number < self.general() {
            return index(0).map(Register::Counter);
        }
        match self {
            Self::Amd => match number {
                K7_SELECTS..K7_COUNTERS => index(K7_SELECTS).map(Register::Select),
                _ if (K7_COUNTERS..K7_COUNTERS + 4).contains(&number) => index(K7_COUNTERS).map(Register::Counter),
                _ => None,
            },
            Self::AmdV2 => match number {
                GLOBAL_STATUS => Some(Register::Status),
                GLOBAL_CONTROL => Some(Register::Control),
                GLOBAL_STATUS_CLEAR => Some(Register::StatusClear),
                _ if (CORE..CORE + 2 * self.counters()).contains(&number) => {
                    let at = index(CORE)?;
                    Some(match at % 2 {
                        0 => Register::Select(at / 2),
                        _ => Register::Counter(at / 2),
                    })
                }
                _ => None,
            },
            Self::IntelV2 => Self::find_intel(number),
        }
    }

    fn find_intel(number: u32) -> Option<Register> {
        let within = |base: u32, count: u32| {
            let index = number.checked_sub(base).filter(|&index| index < count)?;
            usize::try_from(index).ok()
        };
        let fixed = |index: usize| Register::Counter(INTEL_GENERAL as usize + index);
        match number {
            INTEL_FIXED_CONTROL => Some(Register::FixedControl),
            INTEL_STATUS => Some(Register::Status),
            INTEL_CONTROL => Some(Register::Control),
            INTEL_STATUS_CLEAR => Some(Register::StatusClear),
            _ => None,
        }
        .or_else(|| within(INTEL_COUNTERS, INTEL_GENERAL).map(Register::Counter))
        .or_else(|| within(INTEL_SELECTS, INTEL_GENERAL).map(Register::Select))
        .or_else(|| within(INTEL_FIXED_COUNTERS, INTEL_FIXED).map(fixed))
        .or_else(|| within(INTEL_FIXED_INDEX, INTEL_FIXED).map(fixed))
    }

    /// Adds the CPUID leaves that describe these registers.
    pub(crate) fn describe(self, leaves: &mut Vec<kvm_cpuid_entry2>) {
        match self {
            // No leaf describes these registers, because every AMD processor has them.
            Self::Amd => {}
            Self::AmdV2 => self.describe_amd(leaves),
            Self::IntelV2 => Self::describe_intel(leaves),
        }
    }

    fn describe_intel(leaves: &mut Vec<kvm_cpuid_entry2>) {
        leaves.retain(|leaf| leaf.function != LEAF_PMU);
        for leaf in leaves.iter_mut() {
            match leaf.function {
                LEAF_VENDOR => {
                    leaf.eax = leaf.eax.max(LEAF_PMU);
                    [leaf.ebx, leaf.edx, leaf.ecx] = INTEL;
                }
                LEAF_FEATURES => leaf.eax = leaf.eax & !MODEL_BITS | INTEL_MODEL,
                _ => {}
            }
        }
        leaves.push(kvm_cpuid_entry2 {
            function: LEAF_PMU,
            eax: INTEL_VERSION | INTEL_GENERAL << 8 | WIDTH << 16 | INTEL_EVENTS << 24,
            edx: INTEL_FIXED | WIDTH << 5,
            ..Default::default()
        });
    }

    fn describe_amd(self, leaves: &mut Vec<kvm_cpuid_entry2>) {
        leaves.retain(|leaf| leaf.function != LEAF_AMD_PMU);
        for leaf in leaves.iter_mut() {
            match leaf.function {
                LEAF_EXTENDED => leaf.eax = leaf.eax.max(LEAF_AMD_PMU),
                LEAF_AMD_FEATURES => leaf.ecx |= AMD_ECX_PERFCTR_CORE,
                _ => {}
            }
        }
        leaves.push(kvm_cpuid_entry2 {
            function: LEAF_AMD_PMU,
            eax: AMD_EAX_PERFMON_V2,
            ebx: self.general(),
            ..Default::default()
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn leaf(function: u32) -> kvm_cpuid_entry2 {
        kvm_cpuid_entry2 { function, eax: 1, ..Default::default() }
    }

    #[test]
    fn every_trapped_register_is_known_and_no_other() {
        for (name, layout) in Layout::ALL {
            let ranges = layout.ranges();
            assert!(ranges.len() <= 16, "{name}");
            for range in &ranges {
                for number in range.clone() {
                    assert!(layout.find(number).is_some(), "{name}: {number:#x}");
                }
                let trapped = |number| ranges.iter().any(|range| range.contains(&number));
                assert!(trapped(range.end) == layout.find(range.end).is_some());
            }
            // The TSC is not a register of the PMU.
            assert_eq!(layout.find(0x10), None, "{name}");
        }
    }

    #[test]
    fn each_counter_has_a_register_and_an_rdpmc_index() {
        for (name, layout) in Layout::ALL {
            for counter in 0..layout.counters() as usize {
                let numbers = layout.ranges().into_iter().flatten();
                let found = numbers.filter(|&number| layout.find(number) == Some(Register::Counter(counter))).count();
                assert_eq!(found, 2, "{name}, counter {counter}");
            }
        }
    }

    #[test]
    fn each_counter_has_a_bit_of_its_own() {
        assert_eq!(Layout::AmdV2.bit(5), 1 << 5);
        assert_eq!(Layout::IntelV2.bit(7), 1 << 7);
        assert_eq!(Layout::IntelV2.bit(8), 1 << 32);
    }

    #[test]
    fn cpuid_leaves_describe_the_layout() {
        let described = |layout: Layout| {
            let functions = [LEAF_VENDOR, LEAF_FEATURES, LEAF_EXTENDED, LEAF_AMD_FEATURES];
            let mut leaves = functions.map(leaf).to_vec();
            layout.describe(&mut leaves);
            leaves
        };
        let find = |leaves: &[kvm_cpuid_entry2], function| {
            *leaves.iter().find(|leaf| leaf.function == function).expect("the leaf is there")
        };
        let amd = described(Layout::AmdV2);
        assert_eq!(find(&amd, LEAF_EXTENDED).eax, LEAF_AMD_PMU);
        assert_eq!(find(&amd, LEAF_AMD_PMU).ebx, 6);
        let intel = described(Layout::IntelV2);
        assert_eq!(find(&intel, LEAF_VENDOR).eax, LEAF_PMU);
        assert_eq!(find(&intel, LEAF_PMU).eax, 0x0730_0802);
        assert_eq!(described(Layout::Amd).len(), 4);
    }
}
