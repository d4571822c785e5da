//! The result of a walk through the guest's page tables, in the same form for all architectures.

/// The translation of one page, which can have any size.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Page {
    /// Its first guest-virtual address.
    pub(crate) first: u64,
    /// Its size minus one.
    pub(crate) mask: u64,
    /// Its first guest-physical address.
    pub(crate) physical: u64,
    /// Whether programs may access it.
    pub(crate) user: bool,
    /// Whether the kernel may execute it.
    pub(crate) executable: bool,
}
