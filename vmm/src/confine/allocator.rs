//! Keeps the C library's allocator from making system calls that the filters refuse.

/// Makes all threads allocate from one arena. Call this before the first thread starts.
///
/// The GNU C library gives each thread its own arena. It opens `/proc/sys/vm/overcommit_memory` when such an arena
/// first returns memory to the kernel, which can happen at any time on any thread. The main arena grows and shrinks
/// with `brk`, which opens no file.
#[cfg(target_env = "gnu")]
#[expect(unsafe_code, reason = "mallopt has no safe wrapper")]
pub(super) fn use_one_arena() {
    // SAFETY: the call only sets a parameter of the allocator, and no other thread runs yet.
    if unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) } != 1 {
        log::warn!("the allocator uses several arenas: it may make a system call that a filter refuses");
    }
}

/// Other C libraries have no such arenas.
#[cfg(not(target_env = "gnu"))]
pub(super) fn use_one_arena() {}
