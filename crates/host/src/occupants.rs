//! Finds the processes that use an environment.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    os::unix::ffi::OsStrExt,
    path::Path,
};

use nix::{
    errno::Errno,
    fcntl::{AT_FDCWD, AtFlags, OFlag, OpenHow, ResolveFlag, open, openat2},
    libc,
    sys::stat::{FileStat, Mode, fstat, fstatat},
};

use super::{Root, opening::beginning_of, processes::processes, trust::is_trusted};

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

/// Maps each of `names`, directories in `envs`, that is in use to one process that uses it.
///
/// For the broker's processes (`pids`, see [`BrokerProcesses`](crate::BrokerProcesses)) all [`EVIDENCE`] counts: a script with
/// the directory in its PATH has nothing in it open between two commands. It is compared by names, not paths: a container
/// sees the directory at another path, and a digest occurs nowhere by accident.
///
/// For other processes of the host's root only the files that they run count, because users choose the arguments and
/// environment of their sudo(8). Here a name proves nothing, because users also choose the names of what root maps for
/// them, such as those of the memfds that they send to journald: it must be the same file. Other users' processes don't
/// count.
///
/// # Errors
/// If a process can't be examined: what it uses is then unknown.
pub fn occupants(
    root: &Root,
    envs: &Path,
    pids: &BTreeSet<i32>,
    names: &[String],
) -> io::Result<BTreeMap<String, Occupant>> {
    let mut found = BTreeMap::new();
    let own = i32::try_from(std::process::id()).ok();
    for process in processes(root)? {
        if found.len() == names.len() {
            break;
        }
        let used = match () {
            () if Some(process.pid) == own => continue,
            () if pids.contains(&process.pid) => named_by(&process.dir, names)?,
            () if process.is_hosts_root() => run_by(&process.dir, envs, names)?,
            () => continue,
        };
        for name in used {
            found.entry(name.clone()).or_insert_with(|| Occupant { pid: process.pid, name: process.name() });
        }
    }
    Ok(found)
}

/// Files of /proc/PID that name what a process uses. `exe`, `cwd` and `root` are links.
const EVIDENCE: &[&str] = &["exe", "maps", "cwd", "root", "mountinfo", "cmdline", "environ"];
/// Most bytes of one of these that are read: a process may move the borders of its environment (prctl(2), `PR_SET_MM`) until it is as large as
/// its address space.
const LONGEST: u64 = 64 << 20;

/// The `names` that occur in the [`EVIDENCE`] about a process; none if it ends meanwhile.
fn named_by<'a>(process: &Path, names: &'a [String]) -> io::Result<Vec<&'a String>> {
    let texts = EVIDENCE.iter().map(|file| match *file {
        "exe" | "cwd" | "root" => {
            fs::read_link(process.join(file)).map(|target| target.as_os_str().as_bytes().to_vec())
        }
        _ => beginning_of(&process.join(file), LONGEST),
    });
    let mut used = Vec::new();
    for text in texts {
        let Some(text) = examined(text)? else { continue };
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

/// The `names` in `envs` that have a file which a process executes or maps; none if it ends meanwhile.
fn run_by<'a>(process: &Path, envs: &Path, names: &'a [String]) -> io::Result<Vec<&'a String>> {
    let mut links = vec![process.join("exe")];
    // A link for each mapping. The numbers of devices in `maps` are not those of stat(2) on btrfs and overlayfs.
    for entry in examined(fs::read_dir(process.join("map_files")))?.into_iter().flatten() {
        links.extend(examined(entry)?.map(|entry| entry.path()));
    }
    let mut used = Vec::new();
    for link in links {
        let Some(target) = examined(fs::read_link(&link))? else { continue };
        for name in names {
            if !used.contains(&name) && is_in(&link, &target, envs, name)? {
                used.push(name);
            }
        }
    }
    Ok(used)
}

/// True if `link`, one of /proc, leads to a file of the directory `name` in `envs`. The kernel names that file `target`: in
/// another mount namespace only the end is as it is here.
fn is_in(link: &Path, target: &Path, envs: &Path, name: &str) -> io::Result<bool> {
    let mut parts = target.components();
    if !parts.any(|part| part.as_os_str() == name) {
        return Ok(false);
    }
    // What the kernel knows without a question: on a file system of a user, nobody may answer.
    let known = AtFlags::from_bits_retain(libc::AT_STATX_DONT_SYNC);
    let run = match fstatat(AT_FDCWD, link, known) {
        // The kernel lets no root of a user namespace follow a mapping. What the process executes counts there alone.
        Err(Errno::EPERM) => return Ok(false),
        // A file system of a network or of a user has lost the file. What a local one has mapped, it knows.
        Err(Errno::EIO | Errno::ESTALE | Errno::ENOTCONN) => return Ok(false),
        run => examined(run.map_err(io::Error::from))?,
    };
    let Some(run) = run else { return Ok(false) };
    let directory = Path::new(name);
    if run.st_nlink == 0 {
        // A repair has replaced it. No user can make a file of root's, or hide one of the host's in a memfd.
        let is_beside = |found: FileStat| found.st_dev == run.st_dev;
        return Ok(is_trusted(run.st_uid) && below(envs, directory)?.is_some_and(is_beside));
    }
    let is_same = |found: FileStat| (found.st_dev, found.st_ino) == (run.st_dev, run.st_ino);
    Ok(below(envs, &directory.join(parts.as_path()))?.is_some_and(is_same))
}

/// Examines what is at `path` below `envs`; None if there is nothing, or if a user has mounted something on the way, which
/// may never answer.
fn below(envs: &Path, path: &Path) -> io::Result<Option<FileStat>> {
    // An administrator may have made a symlink of it.
    let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    let Some(envs) = examined(open(envs, flags, Mode::empty()).map_err(io::Error::from))? else { return Ok(None) };
    let how = OpenHow::new()
        .flags(OFlag::O_PATH | OFlag::O_CLOEXEC)
        .resolve(ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_SYMLINKS | ResolveFlag::RESOLVE_NO_XDEV);
    match openat2(&envs, path, how) {
        Ok(found) => Ok(Some(fstat(&found)?)),
        // The kernel adds ` (deleted)` to a name, which is too long then.
        Err(Errno::ENOENT | Errno::ENOTDIR | Errno::ELOOP | Errno::EXDEV | Errno::ENAMETOOLONG) => Ok(None),
        Err(errno) => Err(errno.into()),
    }
}

/// None if a process has ended, is about to (EINVAL of mountinfo), is a kernel thread, or is one that even this host's
/// root may not examine, such as the first process of a virtual machine. And if it has gone where no path leads (ENAMETOOLONG): one such
/// process must not hold up the removal of every environment.
fn examined<T>(looked: io::Result<T>) -> io::Result<Option<T>> {
    match looked {
        Err(e)
            if matches!(
                e.raw_os_error(),
                Some(libc::ENOENT | libc::ESRCH | libc::EINVAL | libc::EACCES | libc::ENAMETOOLONG)
            ) =>
        {
            Ok(None)
        }
        looked => looked.map(Some),
    }
}

#[cfg(test)]
mod tests {
    use std::{
        fs::File,
        io::Write,
        os::{fd::AsRawFd, unix::process::CommandExt},
        path::PathBuf,
        process::{Child, Command},
    };

    use nix::sys::memfd::{MFdFlags, memfd_create};

    use super::*;
    use crate::{
        needs::{Need, skips_without},
        removal::tests::nest,
    };

    const DIGEST: &str = "0123456789abcdef";

    #[test]
    fn a_process_that_has_gone_where_no_path_leads_holds_up_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let here = nest(directory.path(), &"d".repeat(200), 30);
        let there = format!("/proc/self/fd/{}", here.as_raw_fd());
        let mut child = Command::new("sleep").arg("60").current_dir(there).spawn().unwrap();
        let pid = child.id().try_into().unwrap();
        let link = fs::read_link(format!("/proc/{pid}/cwd"));
        let names = [DIGEST.to_owned()];
        let found = occupants(&Root::at("/"), directory.path(), &BTreeSet::from([pid]), &names);
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(link.unwrap_err().raw_os_error(), Some(libc::ENAMETOOLONG));
        assert_eq!(found.unwrap(), BTreeMap::new());
    }

    /// A user can give a file such a name, have root map it, and remove it.
    #[test]
    fn a_deleted_file_whose_name_is_too_long_holds_up_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let name = format!("{} (deleted)", "d".repeat(250));
        assert!(below(directory.path(), Path::new(&name)).unwrap().is_none());
    }

    #[test]
    fn no_more_than_the_beginning_of_an_endless_file_is_read() {
        assert_eq!(beginning_of(Path::new("/dev/zero"), LONGEST).unwrap().len() as u64, LONGEST);
    }

    #[test]
    fn every_way_in_which_a_process_of_the_broker_uses_a_directory_is_found() {
        let host = tempfile::tempdir().unwrap();
        let root = Root::at(host.path());
        let (envs, names) = (host.path().join("envs"), [DIGEST.to_owned(), "fedcba9876543210".to_owned()]);
        let found = |pids| occupants(&root, &envs, &BTreeSet::from(pids), &names).unwrap();
        for (file, text) in [
            ("exe", format!("/opt/flux-distribute/envs/{DIGEST}/bin/flux")),
            ("cwd", format!("/mnt/envs/{DIGEST}")),
            ("root", format!("/opt/flux-distribute/envs/{DIGEST} (deleted)")),
            ("maps", format!("7f0-7f1 r-xp 0 fe:00 1    /opt/flux-distribute/envs/{DIGEST}/lib/libc.so\n")),
            ("mountinfo", format!("30 25 0:27 /flux-distribute/envs/{DIGEST} /opt/flux rw - ext4 /dev/sda rw\n")),
            ("cmdline", format!("sh\0/opt/flux-distribute/envs/{DIGEST}/libexec/run\0")),
            ("environ", format!("HOME=/\0PATH=/opt/flux-distribute/envs/{DIGEST}/bin:/bin\0")),
        ] {
            let process = host.path().join("proc/7");
            fs::create_dir_all(&process).unwrap();
            assert_eq!(found([7, 9]), BTreeMap::new());
            match file {
                "exe" | "cwd" | "root" => std::os::unix::fs::symlink(text, process.join(file)).unwrap(),
                _ => fs::write(process.join(file), text).unwrap(),
            }
            fs::write(process.join("comm"), "sleep\n").unwrap();
            let expected = Occupant { pid: 7, name: "sleep".to_owned() };
            assert_eq!(found([7, 9]), BTreeMap::from([(DIGEST.to_owned(), expected)]), "{file}");
            // A process outside the broker's names what it likes.
            fs::write(process.join("status"), "Uid:\t0\t0\t0\t0\nNSpid:\t7\n").unwrap();
            assert_eq!(found([8, 9]), BTreeMap::new(), "{file}");
            fs::remove_dir_all(process).unwrap();
        }
    }

    #[test]
    fn the_files_that_the_hosts_root_runs_count_and_no_other_users() {
        let host = tempfile::tempdir().unwrap();
        let envs = host.path().join("envs");
        let (ours, elsewhere) = (envs.join(DIGEST).join("lib"), host.path().join("mnt").join(DIGEST).join("lib"));
        for directory in [&ours, &elsewhere] {
            fs::create_dir_all(directory).unwrap();
        }
        for name in ["one", "two"] {
            fs::write(ours.join(name), "").unwrap();
        }
        // As another mount namespace shows a file, and another file of that name.
        fs::hard_link(ours.join("one"), elsewhere.join("one")).unwrap();
        fs::write(elsewhere.join("two"), "").unwrap();
        for (link, target, is_ours) in [
            ("exe", ours.join("one"), true),
            ("map_files/1-2", elsewhere.join("one"), true),
            ("map_files/1-2", elsewhere.join("two"), false),
            ("cwd", ours.clone(), false),
        ] {
            let process = host.path().join("proc/7");
            fs::create_dir_all(process.join("map_files")).unwrap();
            std::os::unix::fs::symlink(&target, process.join(link)).unwrap();
            // The host's root's; a user's, a set-user-ID program's, a pod's root's.
            for (uids, pids, is_roots) in [
                ("0\t0\t0\t0", "7", true),
                ("65534\t65534\t65534\t65534", "7", false),
                ("65534\t0\t0\t0", "7", false),
                ("0\t0\t0\t0", "7\t1", false),
            ] {
                fs::write(process.join("status"), format!("Name:\tsleep\nUid:\t{uids}\nNSpid:\t{pids}\n")).unwrap();
                let root = Root::at(host.path());
                let found = occupants(&root, &envs, &BTreeSet::from([9]), &[DIGEST.to_owned()]).unwrap();
                assert_eq!(!found.is_empty(), is_ours && is_roots, "{link} {} {uids} {pids}", target.display());
            }
            fs::remove_dir_all(process).unwrap();
        }
    }

    /// Ends the process at the end of a test.
    struct Running(Child);

    impl Running {
        /// Returns once the child has become the program whose name in /proc ends with `end`, and has mapped it.
        fn spawn(command: &mut Command, end: &str) -> Self {
            let child = loop {
                match command.spawn() {
                    // A process that another test starts has the program open for writing until it executes its own.
                    Err(error) if error.kind() == io::ErrorKind::ExecutableFileBusy => {}
                    child => break child.unwrap(),
                }
            };
            let process = PathBuf::from(format!("/proc/{}", child.id()));
            let is_mapped = || fs::read_to_string(process.join("maps")).unwrap().contains(end);
            while !(fs::read_link(process.join("exe")).unwrap().to_string_lossy().ends_with(end) && is_mapped()) {
                std::thread::yield_now();
            }
            Self(child)
        }

        fn uses(&self, envs: &Path) -> bool {
            let process = PathBuf::from(format!("/proc/{}", self.0.id()));
            !run_by(&process, envs, &[DIGEST.to_owned()]).unwrap().is_empty()
        }
    }

    impl Drop for Running {
        fn drop(&mut self) {
            let _ = self.0.kill().and_then(|()| self.0.wait());
        }
    }

    /// As root maps a memfd that a user has sent, such as journald.
    #[test]
    fn the_name_that_a_user_gives_a_memfd_keeps_no_environment_in_use() {
        if skips_without([Need::Root]) {
            return;
        }
        let host = tempfile::tempdir().unwrap();
        let sleep = host.path().join(DIGEST).join("sleep");
        fs::create_dir(host.path().join(DIGEST)).unwrap();
        fs::copy("/bin/sleep", &sleep).unwrap();
        for name in [format!("x/{DIGEST}/sleep"), format!("{}", sleep.display()), format!("/{DIGEST}")] {
            let mut memory = File::from(memfd_create(name.as_str(), MFdFlags::MFD_CLOEXEC).unwrap());
            memory.write_all(&fs::read("/bin/sleep").unwrap()).unwrap();
            // Nothing is executed that is open for writing.
            let readable = File::open(format!("/proc/self/fd/{}", memory.as_raw_fd())).unwrap();
            drop(memory);
            let program = format!("/proc/self/fd/{}", readable.as_raw_fd());
            let running = Running::spawn(Command::new(program).arg0("sleep").arg("1000"), &format!("{name} (deleted)"));
            assert!(!running.uses(host.path()), "{name}");
        }
    }

    #[test]
    fn a_file_that_root_runs_counts_in_every_mount_namespace_and_after_a_repair() {
        if skips_without([Need::Namespaces]) {
            return;
        }
        let host = tempfile::tempdir().unwrap();
        let (envs, mounted) = (host.path().join("envs"), host.path().join("mounted"));
        let sleep = envs.join(DIGEST).join("sleep");
        for directory in [&envs.join(DIGEST), &mounted] {
            fs::create_dir_all(directory).unwrap();
        }
        fs::copy("/bin/sleep", &sleep).unwrap();
        let script = "mount --bind \"$0\" \"$1\" && exec \"$1/$2/sleep\" 1000";
        let mut elsewhere = Command::new("unshare");
        elsewhere.args(["--mount", "sh", "-c", script]).args([&envs, &mounted]).arg(DIGEST);
        let elsewhere = Running::spawn(&mut elsewhere, &format!("mounted/{DIGEST}/sleep"));
        let here = Running::spawn(Command::new(&sleep).arg("1000"), &format!("envs/{DIGEST}/sleep"));
        assert!(here.uses(&envs) && elsewhere.uses(&envs));
        // Another file has its name then.
        fs::copy("/bin/sleep", host.path().join("new")).unwrap();
        fs::rename(host.path().join("new"), &sleep).unwrap();
        assert!(here.uses(&envs) && elsewhere.uses(&envs));
        // As a removal begins.
        fs::rename(envs.join(DIGEST), envs.join("aside")).unwrap();
        assert!(!here.uses(&envs));
    }

    #[test]
    fn a_digest_with_the_same_beginning_does_not_match() {
        let host = tempfile::tempdir().unwrap();
        let process = host.path().join("proc/7");
        fs::create_dir_all(&process).unwrap();
        fs::write(process.join("cmdline"), format!("/envs/{DIGEST}0/bin/flux")).unwrap();
        let found = occupants(&Root::at(host.path()), host.path(), &BTreeSet::from([7]), &[DIGEST.to_owned()]);
        assert_eq!(found.unwrap(), BTreeMap::new());
    }
}
