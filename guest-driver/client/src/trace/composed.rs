//! Composes packets byte by byte, as the host writes them, for tests.

/// An exit packet of the vCPU `vcpu`; `reason` and `flags` are wire values.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Exit {
    pub(crate) flags: u8,
    pub(crate) reason: u16,
    pub(crate) vcpu: u32,
    pub(crate) time: u64,
    pub(crate) ip: u64,
    pub(crate) outside: u64,
    pub(crate) qualification: u64,
    pub(crate) detail: u64,
    pub(crate) pid: u32,
    pub(crate) sequence: u64,
}

impl Exit {
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![1, self.flags];
        bytes.extend(self.reason.to_le_bytes());
        bytes.extend(self.vcpu.to_le_bytes());
        for word in [self.time, self.ip, self.outside, self.qualification, self.detail] {
            bytes.extend(word.to_le_bytes());
        }
        bytes.extend(self.pid.to_le_bytes());
        bytes.extend((self.pid + 1).to_le_bytes());
        bytes.extend(self.sequence.to_le_bytes());
        assert_eq!(bytes.len(), 64);
        bytes
    }
}
