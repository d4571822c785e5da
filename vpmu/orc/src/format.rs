//! Entries of ORC tables. Kernels encode them in three ways; all of them become a [`Rule`].

/// Bytes of an entry in `.orc_unwind`.
pub(crate) const ENTRY: usize = 6;

/// A register that an entry can refer to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the processor's names")]
pub enum Register {
    Ax,
    Dx,
    Di,
    Bp,
    Sp,
    R10,
    R13,
}

/// The location of the caller's stack pointer. It is the address after the frame's last word.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SpRule {
    /// The sum of a register and an offset.
    Sum(Register, i16),
    /// The word on the stack at `register` plus `before`, plus `after`.
    Loaded {
        /// The register.
        register: Register,
        /// Offset of the word's address.
        before: i16,
        /// Offset of the result.
        after: i16,
    },
}

/// The location of the caller's BP.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum BpRule {
    /// BP has not changed. In a frame that holds registers, it is the saved BP.
    Same,
    /// The word at this offset from the address of [`SpRule`].
    FromSp(i16),
    /// The word at this offset from BP.
    FromBp(i16),
}

/// The kind of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FrameKind {
    /// A call: the return address is the word below the address of [`SpRule`].
    Call,
    /// An entry into the kernel, such as an interrupt: the address of [`SpRule`] is that of a `struct pt_regs`.
    Regs,
    /// The same, but only the words that the processor pushes are there: IP, CS, FLAGS, SP and SS. The address of
    /// [`SpRule`] is that of IP.
    PartialRegs,
}

/// How to find the caller of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FrameRule {
    /// The caller's SP.
    pub sp: SpRule,
    /// The caller's BP.
    pub bp: BpRule,
    /// The kind of the frame.
    pub kind: FrameKind,
    /// Whether the caller was interrupted, so that its address is that of its next instruction. The address that a call
    /// returns to may belong to another function, so the lookup then uses the byte before it.
    pub interrupted: bool,
}

/// An entry of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Rule {
    /// The outermost frame.
    End,
    /// The kernel does not know the caller either.
    Unknown,
    /// A frame with a caller.
    Frame(FrameRule),
}

/// An encoding of entries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Format {
    /// Linux 4.14 to 6.2, and Debian's 6.1.
    First,
    /// Since Linux 6.4.
    Typed,
    /// The same with other numbers of registers, as in Linux 7.3.
    Renumbered,
}

/// Hashes in `.orc_header`: SHA-1 of the definitions in `asm/orc_types.h`, as `scripts/orc_hash.sh` makes it.
const HASHES: [([u8; 20], Format); 2] = [
    (*b"\xfe\x5d\x32\xbf\x58\x1b\xd6\x3b\x2c\xa9\xa5\xc6\x5b\xa5\xa6\x25\xea\xb3\xfe\x24", Format::Typed),
    (*b"\x13\x7c\x36\xad\x76\x27\xc4\xdd\x55\x93\x21\x76\xbb\x0e\xcd\xbd\x50\x41\xfc\x82", Format::Renumbered),
];

/// Meanings of the number of a base register.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Base {
    Undefined,
    Register(Register),
    PreviousSp,
    /// The word at SP.
    AtSp,
    /// The word at BP plus the offset.
    AtBp,
}

const FIRST_BASES: [Base; 10] = [
    Base::Undefined,
    Base::PreviousSp,
    Base::Register(Register::Dx),
    Base::Register(Register::Di),
    Base::Register(Register::Bp),
    Base::Register(Register::Sp),
    Base::Register(Register::R10),
    Base::Register(Register::R13),
    Base::AtBp,
    Base::AtSp,
];
const RENUMBERED_BASES: [Base; 11] = [
    Base::Undefined,
    Base::Register(Register::Ax),
    Base::Register(Register::Dx),
    Base::Register(Register::Sp),
    Base::Register(Register::Bp),
    Base::Register(Register::Di),
    Base::Register(Register::R10),
    Base::Register(Register::R13),
    Base::PreviousSp,
    Base::AtSp,
    Base::AtBp,
];

impl Format {
    /// The format of a kernel with this `.orc_header`. `None` if it is not known.
    pub(crate) fn of(header: Option<&[u8]>) -> Option<Self> {
        let Some(header) = header else {
            return Some(Self::First);
        };
        HASHES.iter().find(|(hash, _)| hash == header).map(|(_, format)| *format)
    }

    /// Decodes an entry. `None` if the format has no such entry.
    pub(crate) fn decode(self, entry: [u8; ENTRY]) -> Option<Rule> {
        let [sp0, sp1, bp0, bp1, bases, kind] = entry;
        let offsets = [i16::from_le_bytes([sp0, sp1]), i16::from_le_bytes([bp0, bp1])];
        let sp = self.base(bases & 15)?;
        let bp = self.base(bases >> 4)?;
        let (kind, interrupted) = match self {
            Self::First => {
                // Two bits of the type, then whether the stack ends here.
                let kind = match kind & 3 {
                    _ if kind > 7 => return None,
                    _ if sp == Base::Undefined => return Some(if kind & 4 != 0 { Rule::End } else { Rule::Unknown }),
                    0 => FrameKind::Call,
                    1 => FrameKind::Regs,
                    2 => FrameKind::PartialRegs,
                    _ => return None,
                };
                (kind, kind != FrameKind::Call)
            }
            Self::Typed | Self::Renumbered => {
                // Three bits of the type, then whether the caller was interrupted.
                let frame = match kind & 7 {
                    0 => return Some(Rule::Unknown),
                    1 => return Some(Rule::End),
                    2 => FrameKind::Call,
                    3 => FrameKind::Regs,
                    4 => FrameKind::PartialRegs,
                    _ => return None,
                };
                (frame, kind & 8 != 0)
            }
        };
        let frame = |sp, bp| Rule::Frame(FrameRule { sp, bp, kind, interrupted });
        Some(match (sp_rule(sp, offsets[0]), bp_rule(bp, offsets[1])) {
            (Some(sp), Some(bp)) => frame(sp, bp),
            // The kernel's unwinder gives up here, too.
            _ => Rule::Unknown,
        })
    }

    fn base(self, number: u8) -> Option<Base> {
        let bases: &[Base] = match self {
            Self::First | Self::Typed => &FIRST_BASES,
            Self::Renumbered => &RENUMBERED_BASES,
        };
        bases.get(usize::from(number)).copied()
    }
}

fn sp_rule(base: Base, offset: i16) -> Option<SpRule> {
    Some(match base {
        Base::Register(register @ (Register::Sp | Register::Bp)) => SpRule::Sum(register, offset),
        // A function that aligns its stack keeps the caller's stack pointer in such a register. The offset means nothing.
        Base::Register(register) => SpRule::Sum(register, 0),
        Base::AtSp => SpRule::Loaded { register: Register::Sp, before: 0, after: offset },
        Base::AtBp => SpRule::Loaded { register: Register::Bp, before: offset, after: 0 },
        Base::Undefined | Base::PreviousSp => return None,
    })
}

fn bp_rule(base: Base, offset: i16) -> Option<BpRule> {
    Some(match base {
        Base::Undefined => BpRule::Same,
        Base::PreviousSp => BpRule::FromSp(offset),
        Base::Register(Register::Bp) => BpRule::FromBp(offset),
        _ => return None,
    })
}
