//! Labels of samples: process, file, function.

use clap::ValueEnum;
use vpmu_profile::{Frame, Mode};

/// A field by which samples are grouped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, ValueEnum)]
pub(crate) enum Key {
    /// The task's name.
    Comm,
    /// The program's or library's file.
    #[value(alias = "dso")]
    Object,
    /// The function.
    #[value(alias = "sym")]
    Symbol,
    /// The CPU.
    Cpu,
    /// The process's id.
    Pid,
}

/// The name in options, table heads and JSON.
pub(crate) fn name(key: Key) -> &'static str {
    match key {
        Key::Comm => "comm",
        Key::Object => "object",
        Key::Symbol => "symbol",
        Key::Cpu => "cpu",
        Key::Pid => "pid",
    }
}

/// The label of a frame whose function is unknown.
pub(crate) const UNKNOWN: &str = "[unknown]";

/// The function, with its mode: `[k]` for the kernel, `[.]` for a program, `[g]` for a guest beside the recorded host.
pub(crate) fn symbol(frame: &Frame) -> String {
    match (frame.mode, &frame.module) {
        (Mode::Kernel, Some(module)) => format!("[k] {} [{module}]", frame.name),
        (Mode::Kernel, None) => format!("[k] {}", frame.name),
        (Mode::User, _) => format!("[.] {}", frame.name),
        (Mode::Other, _) => format!("[g] {}", frame.name),
    }
}

/// The file that contains the function.
pub(crate) fn object(frame: &Frame) -> &str {
    match (frame.mode, &frame.module) {
        (Mode::Kernel, _) => "[kernel]",
        (_, Some(module)) => module,
        (_, None) => UNKNOWN,
    }
}

/// Frames without those that follow an address outside all files: such an address means that a function kept no frame
/// pointer, so it and all later ones are not return addresses.
pub(crate) fn callers<'a>(frames: impl Iterator<Item = &'a Frame>) -> Vec<&'a Frame> {
    let is_code = |frame: &Frame| frame.mode != Mode::User || frame.module.is_some();
    let frames = frames.enumerate().take_while(|(index, frame)| *index == 0 || is_code(frame));
    frames.map(|(_, frame)| frame).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(name: &str, mode: Mode, module: Option<&str>) -> Frame {
        Frame { name: name.into(), module: module.map(str::to_owned), mode }
    }

    #[test]
    fn symbol_shows_mode_and_module() {
        let kernel = frame("do_idle", Mode::Kernel, None);
        let module = frame("probe", Mode::Kernel, Some("virtio_pmu"));
        let user = frame("main", Mode::User, Some("/bin/sh"));
        assert_eq!([&kernel, &module, &user].map(symbol), ["[k] do_idle", "[k] probe [virtio_pmu]", "[.] main"]);
        assert_eq!([&kernel, &module, &user].map(object), ["[kernel]", "[kernel]", "/bin/sh"]);
    }

    #[test]
    fn chain_ends_before_an_address_outside_all_files() {
        let kernel = frame("do_idle", Mode::Kernel, None);
        let user = frame("main", Mode::User, Some("/bin/sh"));
        let nowhere = frame(UNKNOWN, Mode::User, None);
        let names = |frames: &[&Frame]| -> Vec<String> {
            callers(frames.iter().copied()).iter().map(|frame| frame.name.clone()).collect()
        };
        assert_eq!(names(&[&kernel, &user, &nowhere, &user]), ["do_idle", "main"]);
        assert_eq!(names(&[&nowhere, &user]), ["[unknown]", "main"], "the sampled address itself");
    }
}
