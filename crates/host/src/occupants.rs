//! Finds the processes that use an environment.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    os::unix::ffi::OsStrExt,
    path::Path,
};

use nix::libc;

use super::{Root, processes::processes};

/// A process that uses an environment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Occupant {
    /// Process id in the host's PID namespace.
    pub pid: i32,
    /// The kernel's name for it (`comm`).
    pub name: String,
}

impl std::fmt::Display for Occupant {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "process {} ({})", self.pid, self.name)
    }
}

/// The processes of the broker, including jobs.
pub trait BrokerProcesses {
    /// Those that still run, as pids in the PID namespace of /proc.
    ///
    /// # Errors
    /// They could not be determined.
    fn members(&self) -> io::Result<BTreeSet<i32>>;
}

/// Maps each of `names` that is in use to one process that uses it.
///
/// Compares names, not paths: a container sees the directory at another path, and a digest occurs nowhere by accident.
/// For the broker's processes (`pids`, see [`BrokerProcesses`](crate::BrokerProcesses)) all [`EVIDENCE`] counts: a script with
/// the directory in its PATH has nothing in it open between two commands. For other processes of the host's root only
/// the files that they run count, because users choose the arguments and environment of their sudo(8). Other users'
/// processes don't count.
///
/// # Errors
/// If a process can't be examined: what it uses is then unknown.
pub fn occupants(root: &Root, pids: &BTreeSet<i32>, names: &[String]) -> io::Result<BTreeMap<String, Occupant>> {
    let mut found = BTreeMap::new();
    let own = i32::try_from(std::process::id()).ok();
    for process in processes(root)? {
        if found.len() == names.len() {
            break;
        }
        let evidence = match () {
            () if Some(process.pid) == own => continue,
            () if pids.contains(&process.pid) => EVIDENCE,
            () if process.is_hosts_root() => WHAT_IT_RUNS,
            () => continue,
        };
        for name in used_by(&process.dir, evidence, names)? {
            found.entry(name.clone()).or_insert_with(|| Occupant { pid: process.pid, name: process.name() });
        }
    }
    Ok(found)
}

/// Files of /proc/PID that name what a process uses. `exe`, `cwd` and `root` are links.
const EVIDENCE: &[&str] = &["exe", "maps", "cwd", "root", "mountinfo", "cmdline", "environ"];
const WHAT_IT_RUNS: &[&str] = &["exe", "maps"];

/// The `names` that occur in the `evidence` about a process; none if it ends meanwhile.
fn used_by<'a>(process: &Path, evidence: &[&str], names: &'a [String]) -> io::Result<Vec<&'a String>> {
    let texts = evidence.iter().map(|file| match *file {
        "exe" | "cwd" | "root" => {
            fs::read_link(process.join(file)).map(|target| target.as_os_str().as_bytes().to_vec())
        }
        _ => fs::read(process.join(file)),
    });
    let mut used = Vec::new();
    for text in texts {
        let text = match text {
            // The process has ended, is about to (EINVAL of mountinfo), is a kernel thread, or is one that even this
            // host's root may not examine, such as the first process of a virtual machine.
            Err(e) if matches!(e.raw_os_error(), Some(libc::ENOENT | libc::ESRCH | libc::EINVAL | libc::EACCES)) => {
                continue;
            }
            text => text?,
        };
        for word in text.split(|byte| matches!(byte, b'/' | b':' | b'=' | b' ' | b'\n' | 0)) {
            if let Some(name) = names.iter().find(|name| name.as_bytes() == word)
                && !used.contains(&name)
            {
                used.push(name);
            }
        }
    }
    Ok(used)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_way_in_which_a_process_uses_a_directory_is_found() {
        let digest = "0123456789abcdef";
        let host = tempfile::tempdir().unwrap();
        let root = Root::at(host.path());
        let names = [digest.to_owned(), "fedcba9876543210".to_owned()];
        let pids = BTreeSet::from([7, 9]);
        for (file, text) in [
            ("exe", format!("/opt/flux-distribute/envs/{digest}/bin/flux")),
            ("cwd", format!("/mnt/envs/{digest}")),
            ("root", format!("/opt/flux-distribute/envs/{digest} (deleted)")),
            ("maps", format!("7f0-7f1 r-xp 0 fe:00 1    /opt/flux-distribute/envs/{digest}/lib/libc.so\n")),
            ("mountinfo", format!("30 25 0:27 /flux-distribute/envs/{digest} /opt/flux rw - ext4 /dev/sda rw\n")),
            ("cmdline", format!("sh\0/opt/flux-distribute/envs/{digest}/libexec/run\0")),
            ("environ", format!("HOME=/\0PATH=/opt/flux-distribute/envs/{digest}/bin:/bin\0")),
        ] {
            let process = host.path().join("proc/7");
            fs::create_dir_all(&process).unwrap();
            assert_eq!(occupants(&root, &pids, &names).unwrap(), BTreeMap::new());
            match file {
                "exe" | "cwd" | "root" => std::os::unix::fs::symlink(text, process.join(file)).unwrap(),
                _ => fs::write(process.join(file), text).unwrap(),
            }
            fs::write(process.join("comm"), "sleep\n").unwrap();
            let expected = Occupant { pid: 7, name: "sleep".to_owned() };
            assert_eq!(
                occupants(&root, &pids, &names).unwrap(),
                BTreeMap::from([(digest.to_owned(), expected)]),
                "{file}"
            );
            // The same for a process outside the broker's: a user's, a set-user-ID program's, a pod's root's, the
            // host's root's.
            let runs = ["exe", "maps"].contains(&file);
            for (uids, pids, counts) in [
                ("65534\t65534\t65534\t65534", "7", false),
                ("65534\t0\t0\t0", "7", false),
                ("0\t0\t0\t0", "7\t1", false),
                ("0\t0\t0\t0", "7", runs),
            ] {
                fs::write(process.join("status"), format!("Name:\tsleep\nUid:\t{uids}\nNSpid:\t{pids}\n")).unwrap();
                let found = occupants(&root, &BTreeSet::from([9]), &names).unwrap();
                assert_eq!(!found.is_empty(), counts, "{file} {uids} {pids}");
            }
            fs::remove_dir_all(process).unwrap();
        }
    }

    #[test]
    fn a_digest_with_the_same_beginning_does_not_match() {
        let host = tempfile::tempdir().unwrap();
        let process = host.path().join("proc/7");
        fs::create_dir_all(&process).unwrap();
        fs::write(process.join("cmdline"), "/envs/0123456789abcdef0/bin/flux").unwrap();
        let found = occupants(&Root::at(host.path()), &BTreeSet::from([7]), &["0123456789abcdef".to_owned()]);
        assert_eq!(found.unwrap(), BTreeMap::new());
    }
}
