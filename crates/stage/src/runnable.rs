//! Checks whether an environment's Flux runs on this host. A bundle often relies on libraries of the machine it was
//! built on, and a broker that lacks one dies before it can report that. So we ask the host's own loader, as it will be
//! asked when the broker starts.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File},
    io::{self, ErrorKind, Read},
    os::{
        fd::BorrowedFd,
        unix::process::{CommandExt, ExitStatusExt},
    },
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use crate::launch::Places;
use host::{
    Root, boundary,
    child::{Kept, code, is_of_another_architecture, wait_until},
    files::{remove_if_there, sync_parent},
    process::Signal,
    state::{ENVIRONMENTS, environment},
    users::User,
};
use hostapi::{LinkOrder, Linked, Progress, Refusal};

/// The programs to try, relative to the environment, with an option that makes each exit at once if it really starts.
const PROGRAMS: [(&str, &str); 2] = [("bin/flux", "--version"), ("libexec/flux/cmd/flux-broker", "--help")];
/// Long, because a slow disk is no reason to refuse an environment.
const TIMEOUT: Duration = Duration::from_secs(20);
/// uid and gid of a trial. Programs of a package set get no rights that their broker would not have, and an id that no
/// other process has: a user with the same uid could kill the trial, or forge its result by ptrace(2), as any process
/// of nobody(5) could. The id is in an unassigned range: above systemd's for containers, which end at 1879048191, and
/// SSSD's for directories, which end at 2000200000, and below systemd's for foreign images, which begin at 2147352576
/// (https://systemd.io/UIDS-GIDS/, sssd-ldap(5)).
const TRIAL_ID: u32 = 2_100_000_000;
/// nobody(5), for a user namespace that does not have [`TRIAL_ID`].
const NOBODY: u32 = 65534;
/// Makes the loader list a program's libraries instead of starting it (ld.so(8)).
const TRACE: &str = "LD_TRACE_LOADED_OBJECTS";
const WORDS: usize = 300;

/// Links the environment of `order` ([`packages::link_while`]) and tries its Flux. An environment that can't be used
/// here is kept, and the next order tries it again: the host may have changed.
///
/// # Errors
/// As for [`packages::link_while`] and [`try_flux`].
pub fn link_and_try(
    root: &Root,
    order: &LinkOrder,
    more: Option<BorrowedFd<'_>>,
    progress: &mut dyn FnMut(Progress),
) -> Result<Linked, Refusal> {
    let LinkOrder { prefix, digest, .. } = order;
    let below = root.path(prefix);
    if packages::linked(&below, digest).is_none() {
        // Marked before the environment exists, so that no agent ever takes it for one that runs.
        let path = untried(&below, digest);
        let envs = fs::create_dir_all(below.join(ENVIRONMENTS));
        let made = envs.and_then(|()| File::create(&path)).and_then(|_| sync_parent(&path));
        made.map_err(|error| Refusal::io("make", &path, &error))?;
    }
    let linked = packages::link_while(order, &Places::of_host(), more, progress);
    let mut linked = linked.inspect_err(|_| drop(forget(&below, digest)))?;
    if is_untried(&below, digest) {
        progress(Progress::begun("trying Flux on this host"));
        let tried = try_flux(&root.path(environment(prefix, digest)), digest, linked.compiled_prefix.as_deref())?;
        if let Tried::Unknown(why) = tried {
            linked.warnings.push(format!("can't tell whether Flux runs on this host: {why}"));
        }
        forget(&below, digest)?;
    }
    Ok(linked)
}

/// True until the Flux of environment `digest` has run on this host. The mark is a file beside the environment, because
/// an environment never changes.
pub fn is_untried(prefix: &Path, digest: &str) -> bool {
    untried(prefix, digest).is_file()
}

/// Removes that mark, because Flux ran or the environment is gone.
///
/// # Errors
/// If the file can't be removed.
pub fn forget(prefix: &Path, digest: &str) -> Result<(), Refusal> {
    let path = untried(prefix, digest);
    remove_if_there(&path).map_err(|error| Refusal::io("remove", &path, &error))
}

fn untried(prefix: &Path, digest: &str) -> PathBuf {
    prefix.join(ENVIRONMENTS).join(format!(".{digest}.untried"))
}

/// The result of a trial that found no certain fault.
#[derive(Debug, PartialEq, Eq)]
pub enum Tried {
    /// It runs.
    Runs,
    /// The trial could not decide, for this reason.
    Unknown(String),
}

/// Tries the programs of `environment`, which holds package set `digest`. `compiled_prefix` is the path that is
/// compiled into them, if that is another one; at this moment it may lead to another environment.
///
/// # Errors
/// If this host lacks libraries (named in the message, with a remedy), or a program certainly can't run on it.
pub fn try_flux(environment: &Path, digest: &str, compiled_prefix: Option<&Path>) -> Result<Tried, Refusal> {
    let libraries = compiled_prefix.map(|_| ["lib", "lib64"].map(|name| environment.join(name)));
    let ask = |program: &Path, option: &str, traced: bool| {
        let mut command = Command::new(program);
        command.arg(option).env_clear().env("PATH", "/usr/bin:/bin").env("LANG", "C.UTF-8");
        if let Some([lib, lib64]) = &libraries {
            command.env("LD_LIBRARY_PATH", format!("{}:{}", lib.display(), lib64.display()));
        }
        if traced {
            command.env(TRACE, "1");
        }
        run(command)
    };
    let cant_run =
        |what: String| Refusal::new(format!("the Flux of package set {digest:.12} can't run on this host: {what}"));
    // The programs that need each library which this host lacks.
    let mut lacking = BTreeMap::<String, Vec<&str>>::new();
    let mut unsure = None;
    for (name, option) in PROGRAMS {
        let program = environment.join(name);
        if !is_elf(&program) {
            continue;
        }
        match ask(&program, option, true) {
            Ok(Ended::Exited { text, .. }) => {
                let missing = missing(&text);
                let (there, absent): (Vec<_>, Vec<_>) =
                    missing.into_iter().partition(|library| libraries.is_some() && is_within(environment, library));
                if let Some(library) = there.first() {
                    unsure = Some(format!("{library} is in the package set, but its loader does not find it yet"));
                }
                absent.into_iter().for_each(|library| lacking.entry(library).or_default().push(name));
            }
            Ok(Ended::Inconclusive(how)) => unsure = Some(format!("{name} {how}")),
            Err(error) if is_of_another_architecture(&error) => {
                return Err(cant_run(format!(
                    "{name} is built for another architecture; use a package set for this one"
                )));
            }
            Err(error) if error.kind() == ErrorKind::NotFound => {
                return Err(cant_run(format!(
                    "the loader of {name} does not exist on this host; use a bundle or a channel for this host's C \
                     library"
                )));
            }
            Err(error) => unsure = Some(format!("{name} can't be started: {error}")),
        }
    }
    if !lacking.is_empty() {
        let named = lacking.iter().map(|(library, programs)| format!("{library} (for {})", programs.join(" and ")));
        return Err(cant_run(format!(
            "it lacks {}; install them on the hosts, or use a bundle or a channel that contains them",
            named.collect::<Vec<_>>().join(", ")
        )));
    }
    let flux = environment.join("bin/flux");
    if unsure.is_none() && is_elf(&flux) {
        match ask(&flux, "--version", false) {
            Ok(Ended::Exited { code, text }) if code != 0 => {
                let last = text.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("no message");
                let last: String = last.trim().chars().take(WORDS).collect();
                return Err(cant_run(format!("`flux --version` ended with code {code}: {last}")));
            }
            Ok(Ended::Exited { .. }) => {}
            Ok(Ended::Inconclusive(how)) => unsure = Some(format!("`flux --version` {how}")),
            Err(error) => unsure = Some(format!("`flux --version` can't be started: {error}")),
        }
    }
    Ok(unsure.map_or(Tried::Runs, Tried::Unknown))
}

/// How a tried program ended.
enum Ended {
    /// It exited. `text` is its stdout, then its stderr.
    Exited { code: i32, text: String },
    /// Nothing follows from its end, described here. A signal may come from a kernel without memory, or from a person.
    Inconclusive(String),
}

fn run(mut command: Command) -> io::Result<Ended> {
    command.current_dir("/").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
    let id = trial_id(
        &["uid_map", "gid_map"].map(|map| fs::read_to_string(format!("/proc/self/{map}")).unwrap_or_default()),
    );
    let nobody_else = User {
        name: id.to_string(),
        uid: id,
        gid: id,
        home: PathBuf::from("/"),
        shell: PathBuf::new(),
        groups: Vec::new(),
        known: false,
    };
    boundary::become_user(&mut command, &nobody_else);
    let mut child = command.spawn()?;
    let (stdout, stderr) = (Kept::of(child.stdout.take()), Kept::of(child.stderr.take()));
    let status = wait_until(&mut child, Instant::now() + TIMEOUT)?;
    let text = stdout.text() + &stderr.text();
    let Some(status) = status else {
        return Ok(Ended::Inconclusive(format!("did not end within {} s", TIMEOUT.as_secs())));
    };
    Ok(match status.signal() {
        None => Ended::Exited { code: code(status), text },
        // SIGILL comes from the processor: it lacks an instruction, and a broker would die in the same way.
        Some(signal) if signal == Signal::SIGILL as i32 => {
            Ended::Exited { code: code(status), text: "it is built for a newer processor (SIGILL)".to_owned() }
        }
        Some(signal) => Ended::Inconclusive(format!("was killed by signal {signal}")),
    })
}

/// uid and gid of the trial: [`TRIAL_ID`], if the uid_map and gid_map of this user namespace include it
/// (user_namespaces(7)).
fn trial_id(maps: &[String; 2]) -> u32 {
    let has_it = |map: &String| {
        map.lines().any(|line| {
            let numbers: Vec<u64> = line.split_whitespace().filter_map(|number| number.parse().ok()).collect();
            matches!(numbers[..], [first, _, count] if (first..first.saturating_add(count)).contains(&TRIAL_ID.into()))
        })
    };
    if maps.iter().all(has_it) { TRIAL_ID } else { NOBODY }
}

/// True for an ELF file. Scripts are not tried: they have no libraries, and running them could do anything.
fn is_elf(path: &Path) -> bool {
    let mut magic = [0; 4];
    File::open(path).and_then(|mut file| file.read_exact(&mut magic)).is_ok() && magic == *b"\x7fELF"
}

/// The libraries and versions that the loader did not find, from its list: `libx.so.1 => not found`, and
/// ``/lib/libc.so.6: version `GLIBC_2.38' not found (required by flux)``.
fn missing(list: &str) -> BTreeSet<String> {
    let of_line = |line: &str| {
        if let Some(name) = line.trim().strip_suffix("=> not found") {
            return Some(name.trim().to_owned());
        }
        let (before, after) = line.split_once("version `")?;
        let (version, rest) = after.split_once('\'')?;
        let library = Path::new(before.trim().trim_end_matches(':').rsplit(": ").next()?).file_name()?;
        rest.starts_with(" not found").then(|| format!("{version} of {}", library.to_string_lossy()))
    };
    list.lines().filter_map(of_line).collect()
}

/// True if a file with this name is somewhere below `directory`.
fn is_within(directory: &Path, name: &str) -> bool {
    fs::read_dir(directory).into_iter().flatten().flatten().any(|entry| {
        entry.file_name() == name || entry.file_type().is_ok_and(|kind| kind.is_dir()) && is_within(&entry.path(), name)
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::needs::{Need, skips_without};

    #[test]
    fn libraries_that_the_loader_does_not_find_are_read_from_its_list() {
        let list = "\tlinux-vdso.so.1 (0x7f)\n\tlibarchive.so.13 => not found\n\tlibc.so.6 => /lib/libc.so.6 (0x7f)\n\
                    bin/flux: /lib/x86_64-linux-gnu/libc.so.6: version `GLIBC_2.99' not found (required by bin/flux)\n\
                    \tlibarchive.so.13 => not found\n";
        assert_eq!(Vec::from_iter(missing(list)), ["GLIBC_2.99 of libc.so.6", "libarchive.so.13"]);
        assert!(missing("\tlibc.so.6 => /lib/libc.so.6 (0x7f)\n").is_empty());
    }

    /// The smallest program possible, with a single instruction that no processor has.
    #[cfg(target_arch = "x86_64")]
    #[test]
    fn a_program_for_a_newer_processor_is_refused() {
        if skips_without([Need::Root]) {
            return;
        }
        let words = |words: &[u64]| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<_>>();
        let program = [
            b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0\x02\0\x3e\0\x01\0\0\0".to_vec(),
            words(&[
                0x40_0078,
                64,
                0,
                0x38_0040_0000_0000,
                1,
                0x5_0000_0001,
                0,
                0x40_0000,
                0x40_0000,
                0x7a,
                0x7a,
                0x1000,
            ]),
            b"\x0f\x0b".to_vec(),
        ]
        .concat();
        let environment = tempfile::tempdir().unwrap();
        fs::set_permissions(environment.path(), fs::Permissions::from_mode(0o755)).unwrap();
        fs::create_dir(environment.path().join("bin")).unwrap();
        let flux = environment.path().join("bin/flux");
        fs::write(&flux, program).unwrap();
        fs::set_permissions(&flux, fs::Permissions::from_mode(0o755)).unwrap();
        let refusal = try_flux(environment.path(), "digest", None).unwrap_err();
        assert!(refusal.message.contains("it is built for a newer processor"), "{refusal}");
        assert!(!refusal.transient);
    }

    #[test]
    fn the_trial_uses_its_own_id_if_the_user_namespace_has_it() {
        let whole = "         0          0 4294967295\n";
        for (maps, expected) in [
            ([whole, whole], TRIAL_ID),
            (["0 100000 65536\n", "0 100000 65536\n"], NOBODY),
            ([whole, "0 0 1\n1 100000 65536\n"], NOBODY),
            (["", ""], NOBODY),
        ] {
            assert_eq!(trial_id(&maps.map(str::to_owned)), expected, "{maps:?}");
        }
    }

    /// A signal kills a truncated program, in the kernel or in the loader.
    #[test]
    fn a_program_that_a_signal_kills_is_not_reported_as_unable_to_run() {
        if skips_without([Need::Root]) {
            return;
        }
        let environment = tempfile::tempdir().unwrap();
        // The trial runs as another user than root, who must be able to read it.
        fs::set_permissions(environment.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let flux = environment.path().join("bin/flux");
        fs::create_dir(environment.path().join("bin")).unwrap();
        fs::copy("/bin/sleep", &flux).unwrap();
        File::options().write(true).open(&flux).unwrap().set_len(4096).unwrap();
        let tried = try_flux(environment.path(), "digest", None).unwrap();
        assert!(matches!(&tried, Tried::Unknown(why) if why.contains("bin/flux was killed by signal ")), "{tried:?}");
    }

    #[test]
    fn scripts_are_not_run() {
        let environment = tempfile::tempdir().unwrap();
        fs::create_dir(environment.path().join("bin")).unwrap();
        fs::write(environment.path().join("bin/flux"), "#!/bin/sh\nexit 1\n").unwrap();
        assert_eq!(try_flux(environment.path(), "digest", None).unwrap(), Tried::Runs);
    }
}
