//! Who the broker runs as: looked up in the host's files, never through the host's libraries.

use std::{fs, path::Path};

/// A user of the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Account {
    /// User id.
    pub uid: u32,
    /// Primary group.
    pub gid: u32,
    /// Supplementary groups, without the primary one.
    pub groups: Vec<u32>,
    /// It has an entry in /etc/passwd; systemd starts nothing as a user that has none.
    pub known: bool,
}

impl Account {
    /// Looks up a name or a number in the texts of /etc/passwd and /etc/group. A number needs no entry: its group is then
    /// the same number.
    pub fn find(user: &str, passwd: &str, group: &str) -> Option<Self> {
        if user.is_empty() {
            return None;
        }
        let number = user.parse::<u32>().ok();
        let entry = passwd.lines().find_map(|line| {
            let fields: Vec<&str> = line.split(':').collect();
            let (uid, gid) = (fields.get(2)?.parse::<u32>().ok()?, fields.get(3)?.parse::<u32>().ok()?);
            let ours = number.map_or_else(|| fields.first() == Some(&user), |number| number == uid);
            ours.then(|| (fields[0].to_owned(), uid, gid))
        });
        match (entry, number, user) {
            (Some((name, uid, gid)), ..) => Some(Self { uid, gid, groups: groups_of(&name, gid, group), known: true }),
            (None, Some(number), _) => Some(Self { uid: number, gid: number, groups: Vec::new(), known: false }),
            (None, None, "root") => Some(Self { uid: 0, gid: 0, groups: Vec::new(), known: false }),
            (None, None, _) => None,
        }
    }

    /// Looks `user` up below `root`, the host's root directory.
    pub fn on_host(user: &str, root: &Path) -> Option<Self> {
        let text = |path: &str| fs::read_to_string(root.join(path)).unwrap_or_default();
        Self::find(user, &text("etc/passwd"), &text("etc/group"))
    }
}

fn groups_of(name: &str, primary: u32, group: &str) -> Vec<u32> {
    let mut groups: Vec<u32> = group
        .lines()
        .filter_map(|line| {
            let mut fields = line.split(':').skip(2);
            let gid = fields.next()?.parse::<u32>().ok()?;
            fields.next()?.split(',').any(|member| member.trim() == name).then_some(gid)
        })
        .filter(|gid| *gid != primary)
        .collect();
    groups.sort_unstable();
    groups.dedup();
    groups
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &str = "root:x:0:0:root:/root:/bin/bash\nflux:x:998:997::/:/sbin/nologin\nbroken:x\n";
    const GROUP: &str = "root:x:0:\nvideo:x:44:flux,other\nrender:x:105:other, flux\nflux:x:997:flux\nbroken\n";

    #[test]
    fn a_user_is_found_by_name_or_by_number_and_a_bare_number_needs_no_entry() {
        let flux = Account { uid: 998, gid: 997, groups: vec![44, 105], known: true };
        let bare = |uid| Account { uid, gid: uid, groups: vec![], known: false };
        for (user, expected) in [
            ("root", Some(Account { known: true, ..bare(0) })),
            ("flux", Some(flux.clone())),
            ("998", Some(flux)),
            ("54321", Some(bare(54321))),
            ("nobody-here", None),
            ("", None),
            ("-1", None),
        ] {
            assert_eq!(Account::find(user, PASSWD, GROUP), expected, "{user}");
        }
        assert_eq!(Account::find("root", "", ""), Some(bare(0)));
    }
}
