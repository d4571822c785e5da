//! Frames and stacks, each stored once.

use std::collections::HashMap;

/// Maximum number of different stacks. Each chain adds a stack for each of its frames.
const MOST_STACKS: usize = 1 << 24;

/// The mode of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Mode {
    /// Kernel mode.
    Kernel,
    /// User mode.
    User,
    /// Unknown, or the mode of a guest beside the host that was recorded.
    Other,
}

/// A function on a stack.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Frame {
    /// The name; in brackets if it names only the file or the mode.
    pub name: String,
    /// The file or the kernel's module.
    pub module: Option<String>,
    /// The mode.
    pub mode: Mode,
}

/// A frame's number.
pub(crate) type FrameId = u32;

/// A stack's number: a frame and the stack of its caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StackId(u32);

/// Frames and stacks.
#[derive(Debug, Default)]
pub struct Stacks {
    frames: Vec<Frame>,
    frame_ids: HashMap<Frame, FrameId>,
    stacks: Vec<(Option<StackId>, FrameId)>,
    stack_ids: HashMap<(Option<StackId>, FrameId), StackId>,
}

impl Stacks {
    /// Stores a frame; `None` if there are too many.
    pub(crate) fn frame(&mut self, frame: Frame) -> Option<FrameId> {
        if let Some(&id) = self.frame_ids.get(&frame) {
            return Some(id);
        }
        let id = u32::try_from(self.frames.len()).ok()?;
        self.frames.push(frame.clone());
        self.frame_ids.insert(frame, id);
        Some(id)
    }

    /// Stores the stack of a frame that `caller` called; `None` if there are too many.
    pub(crate) fn push(&mut self, caller: Option<StackId>, frame: FrameId) -> Option<StackId> {
        if let Some(&id) = self.stack_ids.get(&(caller, frame)) {
            return Some(id);
        }
        if self.stacks.len() >= MOST_STACKS {
            return None;
        }
        let id = StackId(u32::try_from(self.stacks.len()).ok()?);
        self.stacks.push((caller, frame));
        self.stack_ids.insert((caller, frame), id);
        Some(id)
    }

    /// Returns the frames of a stack, innermost first.
    pub fn frames(&self, stack: Option<StackId>) -> impl Iterator<Item = &Frame> {
        self.frame_ids(stack).filter_map(|id| self.frames.get(id as usize))
    }

    /// Returns the numbers of a stack's frames, innermost first.
    pub(crate) fn frame_ids(&self, stack: Option<StackId>) -> impl Iterator<Item = FrameId> {
        let mut next = stack;
        std::iter::from_fn(move || {
            let &(caller, frame) = self.stacks.get(next?.0 as usize)?;
            next = caller;
            Some(frame)
        })
    }

    /// Returns all frames. The position of a frame is its number.
    pub(crate) fn all_frames(&self) -> &[Frame] {
        &self.frames
    }

    /// Returns all stacks. The position of a stack is its number; a caller's number is lower than its callees'.
    pub(crate) fn all(&self) -> &[(Option<StackId>, FrameId)] {
        &self.stacks
    }
}

impl StackId {
    /// The position in [`Stacks::all`].
    pub(crate) fn index(self) -> usize {
        self.0 as usize
    }
}
