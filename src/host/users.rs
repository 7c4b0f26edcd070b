//! The broker's user, from the host's own files: a name service would need the host's libraries.

use std::path::PathBuf;

use super::{Refusal, Root, files::Owner};

/// A user of the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct User {
    /// Login name; the number where it has none.
    pub name: String,
    /// User.
    pub uid: u32,
    /// Primary group.
    pub gid: u32,
    /// Home directory.
    pub home: PathBuf,
    /// Login shell.
    pub shell: PathBuf,
    /// Supplementary groups.
    pub groups: Vec<u32>,
}

impl User {
    /// The superuser, who is everywhere the same.
    pub fn root() -> Self {
        Self { name: "root".to_owned(), home: "/root".into(), ..without_entry(0) }
    }

    /// Owner of this user's files.
    pub fn owner(&self) -> Owner {
        Owner { uid: self.uid, gid: self.gid }
    }
}

/// Finds `run_as`, a name or a number, in texts as of passwd(5) and group(5). A number needs no entry.
///
/// # Errors
/// A name that has no entry.
pub fn resolve(run_as: &str, passwd: &str, group: &str) -> Result<User, Refusal> {
    let number: Option<u32> = run_as.parse().ok();
    let entry = passwd.lines().filter_map(parse_passwd).find(|user| match number {
        Some(uid) => user.uid == uid,
        None => user.name == run_as,
    });
    let Some(mut user) = entry.or_else(|| number.map(without_entry)) else {
        return Err(Refusal::new(format!(
            "the user {run_as} of spec.broker.runAs is not in this host's /etc/passwd; add it there, or give its number"
        )));
    };
    user.groups = group.lines().filter_map(|line| parse_group(line, &user.name)).collect();
    Ok(user)
}

/// [`resolve`] with the host's own files.
///
/// # Errors
/// A name that has no entry.
pub fn resolve_on(root: &Root, run_as: &str) -> Result<User, Refusal> {
    let read = |path| std::fs::read(root.path(path)).unwrap_or_default();
    resolve(run_as, &String::from_utf8_lossy(&read("/etc/passwd")), &String::from_utf8_lossy(&read("/etc/group")))
}

fn without_entry(uid: u32) -> User {
    User {
        name: if uid == 0 { "root".into() } else { uid.to_string() },
        uid,
        gid: uid,
        home: if uid == 0 { "/root".into() } else { "/".into() },
        shell: "/bin/sh".into(),
        groups: Vec::new(),
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
    })
}

fn parse_group(line: &str, member: &str) -> Option<u32> {
    let fields: Vec<&str> = line.split(':').collect();
    let [_, _, gid, members] = fields[..] else { return None };
    members.trim_end().split(',').any(|name| name == member).then(|| gid.parse().ok())?
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &str =
        "root:x:0:0:root:/root:/bin/bash\n# odd\nflux:x:500:501:Flux:/var/lib/flux:/usr/sbin/nologin\n";
    const GROUP: &str = "root:x:0:\nvideo:x:44:ann,flux\nrender:x:105:flux\nfluxless:x:9:fluxless\n";

    #[test]
    fn a_name_a_number_and_a_bare_number_are_users() {
        let flux = resolve("flux", PASSWD, GROUP).unwrap();
        assert_eq!((flux.uid, flux.gid, &flux.groups[..]), (500, 501, &[44, 105][..]));
        assert_eq!(resolve("500", PASSWD, GROUP).unwrap(), flux);
        let bare = resolve("4242", PASSWD, GROUP).unwrap();
        assert_eq!((bare.uid, bare.gid, bare.name.as_str()), (4242, 4242, "4242"));
        assert_eq!(resolve("0", "", "").unwrap().home, PathBuf::from("/root"));
    }

    #[test]
    fn an_unknown_name_is_refused_with_a_remedy() {
        let refusal = resolve("nobody-here", PASSWD, GROUP).unwrap_err();
        assert!(refusal.message.contains("nobody-here") && refusal.message.contains("number"), "{refusal}");
        assert!(!refusal.transient);
    }
}
