//! No core of a process that holds a key: the brokers' certificate, or a token. Where a core goes is the host's to say
//! (`kernel.core_pattern`): into a file, or to a program that keeps those of all users in one place and may send them on.

use std::io;

use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// The soft RLIMIT_CORE, in bytes. With 1 the kernel neither writes a core, which is at least a page, nor gives it to a
/// program; a limit of 0 stops only the first (core(5), fs/coredump.c). The hard limit stays infinite: jobs inherit both,
/// and flux-submit(1) gives each job the soft limit of its submitter, so jobs dump core as their users have it. Those two
/// could not be told apart by /proc/PID/coredump_filter, which jobs inherit and Flux never sets.
pub const SOFT_LIMIT: u64 = 1;

/// Keeps the calling process, and what it starts, from dumping core.
///
/// # Errors
/// The kernel's.
pub fn forbid() -> io::Result<()> {
    let (_, hard) = getrlimit(Resource::RLIMIT_CORE)?;
    Ok(setrlimit(Resource::RLIMIT_CORE, SOFT_LIMIT.min(hard), hard)?)
}
