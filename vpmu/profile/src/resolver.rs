//! Finds the function at an address: what is mapped there, and its name.

use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;

use vpmu_symbols::printable;

use crate::maps::{FileKey, Maps};
use crate::model::Task;
use crate::names::{NAME_MAX, Names, Program};
use crate::stacks::{Frame, Mode};

/// Where an address is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Place {
    Kernel,
    File(u32),
    Nowhere(Mode),
}

/// A function of the kernel.
#[derive(Debug)]
struct Function {
    end: u64,
    name: String,
    module: Option<String>,
}

/// Mappings and names of tasks, and functions of the kernel, at one moment.
#[derive(Debug)]
pub struct Resolver {
    names: Names,
    /// The kernel's functions that the recording has, by start.
    kernel: BTreeMap<u64, Function>,
    slide: u64,
    maps: Maps,
    programs: HashMap<u32, Option<Program>>,
    comms: HashMap<i32, Rc<str>>,
}

impl Resolver {
    /// Creates a resolver without tasks. `names` finds the names of functions.
    #[must_use]
    pub fn new(names: Names) -> Self {
        Self {
            names,
            kernel: BTreeMap::new(),
            slide: 0,
            maps: Maps::default(),
            programs: HashMap::new(),
            comms: HashMap::new(),
        }
    }

    /// Forgets all tasks, but not the functions of their programs.
    pub fn clear(&mut self) {
        self.maps.clear_all();
        self.comms.clear();
    }

    /// Returns the number of programs whose functions are in memory.
    #[must_use]
    pub fn programs(&self) -> usize {
        self.programs.len()
    }

    /// Whether there are names for the kernel's functions.
    #[must_use]
    pub fn names_kernel(&self) -> bool {
        self.names.have_kernel()
    }

    /// Names a thread of the process `pid`. After an exec, the process has no mappings.
    pub fn comm(&mut self, pid: i32, tid: i32, name: &str, is_exec: bool) {
        if is_exec {
            self.maps.clear(pid);
        }
        self.comms.insert(tid, printable(name, NAME_MAX).into());
    }

    /// Returns the name of a thread, or of its process if the thread has none.
    pub(crate) fn comm_of(&self, pid: i32, tid: i32) -> Option<&Rc<str>> {
        self.comms.get(&tid).or_else(|| self.comms.get(&pid))
    }

    /// Returns the name of a thread that ran on the CPU `cpu`, or a substitute if the name is unknown.
    #[must_use]
    pub fn task_name(&self, pid: u32, tid: u32, cpu: u32) -> String {
        let name = self.comm_of(pid.cast_signed(), tid.cast_signed());
        Task::new(Some(pid), Some(tid), Some(cpu), name.map(|name| &**name)).name
    }

    /// Creates a thread; parent and child are a process and a thread. Returns whether the mappings that forks copy are
    /// within the limit.
    #[must_use]
    pub fn fork(&mut self, parent: (i32, i32), child: (i32, i32)) -> bool {
        if let Some(name) = self.comms.get(&parent.1) {
            self.comms.insert(child.1, Rc::clone(name));
        }
        self.maps.fork(parent.0, child.0)
    }

    /// Ends a process.
    pub fn exit(&mut self, pid: i32) {
        self.maps.clear(pid);
    }

    /// Maps `length` bytes of a file at `start`, from `offset` in the file.
    pub fn map(&mut self, pid: i32, start: u64, length: u64, offset: u64, path: &str) {
        self.map_file(pid, (start, length, offset), (printable(path, NAME_MAX), None));
    }

    pub(crate) fn map_file(&mut self, pid: i32, (start, length, offset): (u64, u64, u64), file: FileKey) {
        self.maps.map(pid, start, length, offset, file);
    }

    /// Adds a function of the kernel. The name of a module can follow the name of the function, as in
    /// `/proc/kallsyms`: `function [module]`.
    pub(crate) fn add_function(&mut self, start: u64, size: u64, name: &str) {
        let (name, module) = match name.strip_suffix(']').and_then(|name| name.rsplit_once(" [")) {
            Some((name, module)) => (name, Some(printable(module, NAME_MAX))),
            None => (name, None),
        };
        let function = Function { end: start.saturating_add(size), name: printable(name, NAME_MAX), module };
        self.kernel.insert(start, function);
    }

    pub(crate) fn remove_function(&mut self, start: u64) {
        self.kernel.remove(&start);
    }

    /// Notes that the kernel's symbol `reference` is at `address`. Returns whether this moves the names.
    pub(crate) fn kernel_is_at(&mut self, reference: &str, address: u64) -> bool {
        match self.names.slide(reference, address) {
            Some(slide) => {
                self.slide = slide;
                true
            }
            None => false,
        }
    }

    pub(crate) fn recorded_kernel(&mut self, build_id: &[u8]) {
        self.names.recorded_kernel(build_id);
    }

    /// Returns where an address is, and its offset there.
    pub(crate) fn place(&self, pid: i32, mode: Mode, address: u64) -> (Place, u64) {
        match mode {
            Mode::Kernel => (Place::Kernel, address),
            Mode::User => match self.maps.at(pid, address) {
                Some((file, offset)) => (Place::File(file), offset),
                None => (Place::Nowhere(mode), 0),
            },
            Mode::Other => (Place::Nowhere(mode), 0),
        }
    }

    /// Returns the function at an address. The name is in brackets if it names only the file or the mode.
    pub fn frame(&mut self, pid: i32, mode: Mode, address: u64) -> Frame {
        let (place, at) = self.place(pid, mode, address);
        self.frame_at(place, at)
    }

    pub(crate) fn frame_at(&mut self, place: Place, at: u64) -> Frame {
        match place {
            Place::Kernel => self.kernel_frame(at),
            Place::File(file) => self.user_frame(file, at),
            Place::Nowhere(mode) => {
                let name = if mode == Mode::User { "[unknown]" } else { "[guest]" };
                Frame { name: name.to_owned(), module: None, mode }
            }
        }
    }

    fn kernel_frame(&self, address: u64) -> Frame {
        let own = self.kernel.range(..=address).next_back().filter(|(_, function)| address < function.end);
        let (name, module) = match own {
            Some((_, function)) => (function.name.as_str(), function.module.as_deref()),
            // A kernel that has moved is of another boot, at which its modules are elsewhere.
            None => self
                .names
                .kernel(address.wrapping_sub(self.slide))
                .filter(|(_, module)| module.is_none() || self.slide == 0)
                .unwrap_or(("[kernel]", None)),
        };
        Frame { name: name.to_owned(), module: module.map(str::to_owned), mode: Mode::Kernel }
    }

    fn user_frame(&mut self, file: u32, offset: u64) -> Frame {
        let Some((path, build_id)) = self.maps.get(file) else {
            return Frame { name: "[unknown]".to_owned(), module: None, mode: Mode::User };
        };
        let names = &self.names;
        let read = || names.program(path, build_id.as_deref());
        let program = self.programs.entry(file).or_insert_with(read);
        let base = path.rsplit('/').next().unwrap_or(path);
        let name = match program.as_ref().and_then(|program| program.at(offset)) {
            Some(name) => name.to_owned(),
            // Such as [vdso].
            None if base.starts_with('[') => base.to_owned(),
            None => format!("[{base}]"),
        };
        Frame { name, module: Some(path.clone()), mode: Mode::User }
    }
}
