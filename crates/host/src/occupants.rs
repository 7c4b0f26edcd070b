//! Which processes would miss an environment.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    os::unix::ffi::OsStrExt,
    path::Path,
};

use nix::libc;

use super::{Root, processes::processes};

/// A process that runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Occupant {
    /// In the host's PID namespace.
    pub pid: i32,
    /// What the kernel calls it.
    pub name: String,
}

impl std::fmt::Display for Occupant {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "process {} ({})", self.pid, self.name)
    }
}

/// Knows the broker and all that it has started, jobs too.
pub trait BrokerProcesses {
    /// Those that still run: pids in the PID namespace of /proc.
    ///
    /// # Errors
    /// Nobody knows.
    fn members(&self) -> io::Result<BTreeSet<i32>>;
}

/// Maps each of `names` that is in use to one process that uses it.
///
/// Compares names, not paths: a container sees the same directory at another place, and a digest occurs nowhere by accident. For the
/// broker's processes (`pids`, see [`BrokerProcesses`]) all [`EVIDENCE`] counts: a script that has the directory
/// in its PATH has nothing of it open between two commands. For other processes of the host's root only what they run counts:
/// users choose the arguments and environment of their sudo(8). Processes of other users don't count.
///
/// # Errors
/// A process can't be looked at, so what it uses is not known.
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

/// Files of /proc/PID; those that are links are read as such.
const EVIDENCE: &[&str] = &["exe", "maps", "cwd", "root", "mountinfo", "cmdline", "environ"];
const WHAT_IT_RUNS: &[&str] = &["exe", "maps"];

/// A process that ends meanwhile uses nothing.
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
            // It has ended, is about to (EINVAL of mountinfo), is a thread of the kernel, or one that even root of this host may not
            // look at, such as the first process of a virtual machine.
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
    fn whatever_holds_a_process_to_a_directory_is_seen() {
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
            // The same of a process that is none of the broker's: of a user, of a set-user-ID program, of a pod's root, of root.
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
    fn another_digest_that_begins_alike_is_another_one() {
        let host = tempfile::tempdir().unwrap();
        let process = host.path().join("proc/7");
        fs::create_dir_all(&process).unwrap();
        fs::write(process.join("cmdline"), "/envs/0123456789abcdef0/bin/flux").unwrap();
        let found = occupants(&Root::at(host.path()), &BTreeSet::from([7]), &["0123456789abcdef".to_owned()]);
        assert_eq!(found.unwrap(), BTreeMap::new());
    }
}
