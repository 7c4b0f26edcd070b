//! Looks up the broker's user in the host's own files: a name service would need the host's libraries.

use std::{
    fs,
    io::{self, Read},
    path::{Path, PathBuf},
};

use nix::unistd::{Gid, Uid, setgroups, setresgid, setresuid};

use super::{Root, files::Owner, host_root::open_host_file};
use hostapi::Refusal;

/// A user of the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct User {
    /// Login name; the uid as text if there is none.
    pub name: String,
    /// User id.
    pub uid: u32,
    /// Primary group id.
    pub gid: u32,
    /// Home directory.
    pub home: PathBuf,
    /// Login shell.
    pub shell: PathBuf,
    /// Ids of the supplementary groups, without the primary one.
    pub groups: Vec<u32>,
    /// True if /etc/passwd has the user: systemd starts nothing as a user without an entry.
    pub known: bool,
}

impl User {
    /// The superuser, who is the same on every host.
    pub fn root() -> Self {
        Self { name: "root".to_owned(), home: "/root".into(), ..without_entry(0) }
    }

    /// Owner ids for this user's files.
    pub fn owner(&self) -> Owner {
        Owner { uid: self.uid, gid: self.gid }
    }

    /// A function that makes the calling process run as this user, with the user's groups. It only makes system calls,
    /// so it may run between fork and exec.
    pub fn becoming(&self) -> impl Fn() -> io::Result<()> + Send + Sync + use<> {
        let (uid, gid) = (Uid::from_raw(self.uid), Gid::from_raw(self.gid));
        let groups: Vec<Gid> = self.groups.iter().copied().map(Gid::from_raw).collect();
        move || {
            setgroups(&groups)?;
            setresgid(gid, gid, gid)?;
            setresuid(uid, uid, uid)?;
            Ok(())
        }
    }
}

/// An id that no user has: chown(2) and setresuid(2) take it for "unchanged", which would be root.
pub const NOBODYS: u32 = u32::MAX;

/// Finds `run_as`, a name or a uid, in the texts of passwd(5) and group(5). A uid needs no entry, nor does root.
///
/// # Errors
/// If the name has no entry, or its uid or gid is [`NOBODYS`].
pub fn resolve(run_as: &str, passwd: &str, group: &str) -> Result<User, Refusal> {
    let number: Option<u32> = run_as.parse().ok();
    let entry = passwd.lines().filter_map(parse_passwd).find(|user| match number {
        Some(uid) => user.uid == uid,
        None => user.name == run_as && !run_as.is_empty(),
    });
    let without_entry = || number.map(without_entry).or_else(|| (run_as == "root").then(User::root));
    let Some(mut user) = entry.or_else(without_entry) else {
        return Err(Refusal::new(format!(
            "this host has no user {run_as:?}; add it to /etc/passwd here or, if the instance was never online, set spec.broker.runAs to \
             another name or a number"
        )));
    };
    if user.uid == NOBODYS || user.gid == NOBODYS {
        return Err(Refusal::new(format!(
            "user {run_as:?} has the number {NOBODYS}, which means no user or group; set spec.broker.runAs to another \
             user"
        )));
    }
    let groups = group.lines().filter_map(|line| parse_group(line, &user.name));
    user.groups = groups.filter(|gid| *gid != user.gid).collect();
    user.groups.sort_unstable();
    user.groups.dedup();
    Ok(user)
}

/// [`resolve`] with the /etc/passwd and /etc/group of `root`. One that can't be read has no entries.
///
/// # Errors
/// As for [`resolve`].
pub fn resolve_on(root: &Root, run_as: &str) -> Result<User, Refusal> {
    let read = |path| String::from_utf8_lossy(&fs::read(root.path(path)).unwrap_or_default()).into_owned();
    resolve(run_as, &read("/etc/passwd"), &read("/etc/group"))
}

/// The host's file for users, from the pod's side.
const PASSWD: &str = "/etc/passwd";

/// Reads the host's /etc/passwd from the pod's side; empty if it has none.
///
/// # Errors
/// It can't be read.
pub fn passwd_from_pod() -> io::Result<String> {
    let mut text = Vec::new();
    match open_host_file(Path::new(PASSWD)).and_then(|mut file| file.read_to_end(&mut text)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(String::from_utf8_lossy(&text).into_owned()),
    }
}

/// Finds `run_as` as [`resolve`] does, without its supplementary groups, in what [`passwd_from_pod`] has returned.
///
/// # Errors
/// As [`resolve`]; transient if the file could not be read.
pub fn resolve_in_pod(run_as: &str, passwd: io::Result<String>) -> Result<User, Refusal> {
    let unread = |error| Refusal::transient(format!("can't read the host's {PASSWD}: {error}"));
    resolve(run_as, &passwd.map_err(unread)?, "")
}

fn without_entry(uid: u32) -> User {
    User {
        name: if uid == 0 { "root".into() } else { uid.to_string() },
        uid,
        gid: uid,
        home: if uid == 0 { "/root".into() } else { "/".into() },
        shell: "/bin/sh".into(),
        groups: Vec::new(),
        known: false,
    }
}

fn parse_passwd(line: &str) -> Option<User> {
    let fields: Vec<&str> = line.split(':').collect();
    let [name, _, uid, gid, _, home, shell] = fields[..] else {
        return None;
    };
    let or = |given: &str, default: &str| PathBuf::from(if given.is_empty() { default } else { given });
    Some(User {
        name: name.to_owned(),
        uid: uid.parse().ok()?,
        gid: gid.parse().ok()?,
        home: or(home, "/"),
        shell: or(shell.trim_end(), "/bin/sh"),
        groups: Vec::new(),
        known: true,
    })
}

fn parse_group(line: &str, member: &str) -> Option<u32> {
    let fields: Vec<&str> = line.split(':').collect();
    let [_, _, gid, members] = fields[..] else { return None };
    members.split(',').any(|name| name.trim() == member).then(|| gid.parse().ok())?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_is_found_by_name_or_by_number_and_a_bare_number_needs_no_entry() {
        let passwd = "root:x:0:0:root:/root:/bin/bash\nflux:x:998:997::/:/sbin/nologin\nbroken:x\n\
                      odd:x:4294967295:7::/:/bin/sh\nodder:x:7:4294967295::/:/bin/sh\n";
        let group = "root:x:0:\nvideo:x:44:flux,other\nrender:x:105:other, flux\nflux:x:997:flux\nbroken\n";
        let found = |user, passwd, group| {
            resolve(user, passwd, group).ok().map(|user| (user.uid, user.gid, user.groups, user.known))
        };
        let flux = (998, 997, vec![44, 105], true);
        let bare = |uid, known| (uid, uid, vec![], known);
        for (user, expected) in [
            ("root", Some(bare(0, true))),
            ("flux", Some(flux.clone())),
            ("998", Some(flux)),
            ("54321", Some(bare(54321, false))),
            ("nobody-here", None),
            ("", None),
            ("-1", None),
            ("4294967294", Some(bare(NOBODYS - 1, false))),
            ("4294967295", None),
            ("odd", None),
            ("odder", None),
        ] {
            assert_eq!(found(user, passwd, group), expected, "{user}");
        }
        for root in ["root", "0"] {
            assert_eq!(found(root, "", ""), Some(bare(0, false)));
            assert_eq!(resolve(root, "", "").unwrap().home, PathBuf::from("/root"));
        }
    }

    #[test]
    fn an_unknown_name_is_refused_with_a_remedy() {
        let refusal = resolve("nobody-here", "", "").unwrap_err();
        assert!(refusal.message.contains("nobody-here") && refusal.message.contains("number"), "{refusal}");
        assert!(!refusal.transient);
    }
}
