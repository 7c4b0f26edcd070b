//! Prevents core dumps of processes that hold a key: the brokers' certificate, or a token. The host decides where cores
//! go (`kernel.core_pattern`): to a file, or to a program that collects those of all users and may send them on.

use std::io;

use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// The soft RLIMIT_CORE, in bytes. With 1 the kernel neither writes a core, which needs at least a page, nor pipes it
/// to a program; 0 prevents only the file (core(5), fs/coredump.c). The hard limit stays: jobs inherit both, and
/// flux-submit(1) gives each job its submitter's soft limit, so jobs dump core as their users configured.
/// /proc/PID/coredump_filter could not tell jobs and brokers apart: jobs inherit it and Flux never sets it.
pub const SOFT_LIMIT: u64 = 1;

/// Keeps this process, and the processes that it starts, from dumping core.
///
/// # Errors
/// If the kernel can't read or set the limit.
pub fn forbid() -> io::Result<()> {
    let (_, mut hard) = getrlimit(Resource::RLIMIT_CORE)?;
    // If a container runtime has set the hard limit to 0, the kernel still pipes cores to a program: raise it to SOFT_LIMIT, which needs
    // CAP_SYS_RESOURCE.
    if hard < SOFT_LIMIT && setrlimit(Resource::RLIMIT_CORE, SOFT_LIMIT, SOFT_LIMIT).is_ok() {
        hard = SOFT_LIMIT;
    }
    Ok(setrlimit(Resource::RLIMIT_CORE, SOFT_LIMIT.min(hard), hard)?)
}
