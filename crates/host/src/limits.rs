//! Resource limits that jobs need (getrlimit(2)).

use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit, setrlimit};

use crate::core_dump;

/// Sets the limits of a login session, which jobs need and containerd lowers, and prevents the broker's own core dumps.
/// Returns the limits that could not be raised.
pub fn raise_for_jobs() -> Vec<&'static str> {
    let wanted = [
        ("NOFILE", Resource::RLIMIT_NOFILE, 1_048_576, 1_048_576),
        ("MEMLOCK", Resource::RLIMIT_MEMLOCK, RLIM_INFINITY, RLIM_INFINITY),
        ("CORE", Resource::RLIMIT_CORE, core_dump::SOFT_LIMIT, RLIM_INFINITY),
    ];
    let raise = |(name, resource, soft, hard)| {
        if setrlimit(resource, soft, hard).is_ok() {
            return None;
        }
        // Raising a hard limit needs CAP_SYS_RESOURCE. Without it, raise the soft limit up to the present hard one.
        if let Ok((_, hard)) = getrlimit(resource) {
            let _ = setrlimit(resource, hard.min(soft), hard);
        }
        Some(name)
    };
    wanted.into_iter().filter_map(raise).collect()
}

/// True if jobs can lock any amount of memory. Tries it on this process, which keeps the limit.
pub fn lift_memlock() -> bool {
    getrlimit(Resource::RLIMIT_MEMLOCK).is_ok_and(|(_, hard)| hard == RLIM_INFINITY)
        || setrlimit(Resource::RLIMIT_MEMLOCK, RLIM_INFINITY, RLIM_INFINITY).is_ok()
}
