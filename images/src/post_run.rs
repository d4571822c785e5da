//! A command that runs after the guest has ended, on the machine that ran the VMM: the lab's host, or this machine.

use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use crate::error::BootError;
use crate::prerequisites;
use crate::third_party::Files;

/// A command that inspects a guest's results, and the files that the command needs.
#[derive(Clone, Debug, Default)]
pub struct PostRun {
    /// The shell command. It runs in the VMM's directory after the VMM has exited. `vmm` in the command is the VMM. On
    /// this machine, `perf` is the machine's own perf; in the lab there is a `perf` only if `files` contains one.
    pub command: String,
    /// Files to put on the lab's host.
    pub files: Files,
}

/// The result of [`PostRun::command`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PostRunOutput {
    /// Its output.
    pub output: String,
    /// Its exit code.
    pub status: i32,
}

/// Returns the lab's shell script, which runs the VMM, then the command.
pub(crate) fn job(vmm: &str) -> String {
    format!(
        r#"{vmm}
code=$?
printf '\n@@vpmu:%s host\n' "$MARK"
sh /run/post-run 2>&1
printf '\n@@vpmu:%s hosted %s\n' "$MARK" $?
exit $code
"#
    )
}

impl PostRun {
    /// Runs the command on this machine, in `directory`, with the VMM `vmm`.
    ///
    /// # Errors
    /// [`BootError::Temporary`]: the command could not be started, or its directory of tools could not be
    /// created.
    pub(crate) fn run(&self, directory: &Path, vmm: &Path) -> Result<PostRunOutput, BootError> {
        let tools = directory.join("bin");
        std::fs::create_dir(&tools).map_err(BootError::Temporary)?;
        symlink(vmm, tools.join("vmm")).map_err(BootError::Temporary)?;
        if let Some(perf) = prerequisites::perf() {
            symlink(perf, tools.join("perf")).map_err(BootError::Temporary)?;
        }
        let path = std::env::var("PATH").unwrap_or_default();
        let output = Command::new("sh")
            .args(["-c", &format!("exec 2>&1\n{}", self.command)])
            .current_dir(directory)
            .env("PATH", format!("{}:{path}", tools.display()))
            .output()
            .map_err(BootError::Temporary)?;
        Ok(PostRunOutput {
            output: String::from_utf8_lossy(&output.stdout).into_owned(),
            status: output.status.code().unwrap_or(-1),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn post_run_command_runs_where_vmm_ran() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("left"), "by the guest\n").unwrap();
        let post_run = PostRun { command: "cat left; echo bad >&2; exit 3".to_owned(), ..PostRun::default() };
        let expected = PostRunOutput { output: "by the guest\nbad\n".to_owned(), status: 3 };
        assert_eq!(post_run.run(directory.path(), Path::new("/bin/vmm")).unwrap(), expected);
    }

    #[test]
    fn post_run_command_keeps_exit_code_of_vmm() {
        let job = job("sh -c 'echo vmm; exit 5'");
        let output = Command::new("sh").args(["-c", &job]).env("MARK", "t").output();
        let output = output.unwrap();
        assert_eq!(output.status.code(), Some(5));
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(text.starts_with("vmm\n\n@@vpmu:t host\n"), "{text}");
    }
}
