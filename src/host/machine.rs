//! Identifies this machine: if nodes share a directory, the files below a prefix may belong to another machine.

use std::{fs, path::Path};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::Root;

/// What identifies a machine. No part is certain: images are cloned with their machine-id(5), which may be replaced
/// later; nodes of one host share its hardware; hosts are renamed. So [`Machine::may_be`] goes by the majority. An
/// empty part is unknown.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct Machine {
    /// Host name, with the domain if the kernel's host name has one.
    pub name: String,
    /// Digest of /etc/machine-id, which should stay private to the machine.
    pub id: String,
    /// Digest of the firmware's product UUID, which only root can read.
    pub hardware: String,
}

impl Machine {
    /// This machine; None if no part is known.
    pub fn here(root: &Root) -> Option<Self> {
        let read = |path: &str| fs::read_to_string(root.path(path)).unwrap_or_default().trim().to_owned();
        let name = read("/proc/sys/kernel/hostname");
        let machine = Self {
            name: Some(name).filter(|name| !["localhost", "(none)"].contains(&first_label(name))).unwrap_or_default(),
            id: Some(read("/etc/machine-id")).filter(|id| is_id(id)).map(|id| digest(&id)).unwrap_or_default(),
            hardware: Some(read("/sys/class/dmi/id/product_uuid"))
                .filter(|uuid| is_id(uuid))
                .map(|uuid| digest(&uuid.to_lowercase()))
                .unwrap_or_default(),
        };
        (machine != Self::default()).then_some(machine)
    }

    /// True if both can be the same machine: most of the parts that both know are equal. On a tie the host name
    /// decides, and if it is unknown, they may be the same.
    pub fn may_be(&self, other: &Self) -> bool {
        let known = |one: &str, other: &str, is_same: fn(&str, &str) -> bool| {
            (!one.is_empty() && !other.is_empty()).then(|| is_same(one, other))
        };
        let is_equal: fn(&str, &str) -> bool = |one, other| one == other;
        let name = known(&self.name, &other.name, is_one_name);
        let parts = [name, known(&self.id, &other.id, is_equal), known(&self.hardware, &other.hardware, is_equal)];
        let count = |wanted| parts.iter().filter(|part| **part == Some(wanted)).count();
        match count(true).cmp(&count(false)) {
            std::cmp::Ordering::Equal => name.unwrap_or(true),
            order => order.is_gt(),
        }
    }
}

fn first_label(name: &str) -> &str {
    name.split_once('.').map_or(name, |(first, _)| first)
}

/// True if the host names are equal, or one is the other without its domain.
fn is_one_name(one: &str, other: &str) -> bool {
    one == other || [(one, other), (other, one)].into_iter().any(|(short, long)| short == first_label(long))
}

/// False for a firmware UUID that was never set: it repeats one character.
fn is_id(text: &str) -> bool {
    if !text.chars().all(|letter| letter.is_ascii_hexdigit() || letter == '-') {
        return false;
    }
    let mut letters = text.chars().filter(char::is_ascii_hexdigit);
    letters.next().is_some_and(|first| letters.any(|letter| letter != first))
}

/// The first half of a SHA-256, in hex.
fn digest(text: &str) -> String {
    hex::encode(&Sha256::digest(format!("flux-distribute {text}"))[..16])
}

/// Name of the file system with magic number `kind` (statfs(2) `f_type`), if nodes can share it.
pub fn shared_file_system(kind: u64) -> Option<&'static str> {
    Some(match kind {
        0x6969 => "NFS",
        0x0BD0_0BD0 => "Lustre",
        0x4750_4653 => "GPFS",
        0x0102_1997 => "9p",
        0x517B | 0xFF53_4D42 | 0xFE53_4D42 => "SMB",
        0x00C3_6400 => "Ceph",
        0x5346_414F | 0x6B41_4653 => "AFS",
        0x1983_0326 => "BeeGFS",
        0xAAD7_AAEA => "PanFS",
        0x2003_0528 => "OrangeFS",
        0x7461_636F => "OCFS2",
        0x0116_1970 => "GFS2",
        0x7375_7245 => "Coda",
        _ => return None,
    })
}

/// Name of the file system at `directory` (this process's path), if nodes can share it.
pub fn shared_by_nodes(directory: &Path) -> Option<&'static str> {
    let found = nix::sys::statfs::statfs(directory).ok()?;
    // Magic numbers have 32 bits, but some C libraries sign-extend them.
    #[allow(clippy::unnecessary_cast, reason = "the type differs by platform")]
    shared_file_system(found.filesystem_type().0 as u64 & 0xFFFF_FFFF)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(name: &str, id: &str, hardware: &str) -> Machine {
        Machine { name: name.into(), id: id.into(), hardware: hardware.into() }
    }

    #[test]
    fn a_machine_is_recognized_by_the_majority_of_its_parts() {
        let first = machine("n1", "id1", "hw1");
        for (other, is_it, what) in [
            (machine("n1", "id1", "hw1"), true, "itself"),
            (machine("n1", "new", "hw1"), true, "it has a new machine-id"),
            (machine("new", "id1", "hw1"), true, "it was renamed"),
            (machine("n1", "id1", "new"), true, "its disks are in other hardware"),
            (machine("n1", "id1", ""), true, "its firmware can no longer be read"),
            (machine("", "", ""), true, "nothing is known of it"),
            (machine("n2", "id2", "hw2"), false, "another node"),
            (machine("n2", "id1", "hw2"), false, "a clone with the same machine-id"),
            (machine("n2", "id2", "hw1"), false, "two nodes of one host, as with kind"),
            (machine("n1", "id2", ""), true, "it has a new machine-id, and its firmware is unknown"),
            (machine("n2", "id1", ""), false, "a clone without firmware"),
            (machine("n1.site", "id1", "hw2"), true, "it has its domain in its name now, on other hardware"),
        ] {
            assert_eq!(first.may_be(&other), is_it, "{what}");
            assert_eq!(other.may_be(&first), is_it, "{what}");
        }
        // Like two clones at two sites that share a directory.
        assert!(!machine("n1.here", "id1", "").may_be(&machine("n1.there", "id1", "")));
    }

    #[test]
    fn placeholders_identify_no_machine() {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::at(dir.path());
        assert_eq!(Machine::here(&root), None);
        let write = |path: &str, text: &str| {
            fs::create_dir_all(root.path(path).parent().unwrap()).unwrap();
            fs::write(root.path(path), text).unwrap();
        };
        write("/proc/sys/kernel/hostname", "localhost.localdomain\n");
        write("/etc/machine-id", "uninitialized\n");
        write("/sys/class/dmi/id/product_uuid", "FFFFFFFF-FFFF-FFFF-FFFF-FFFFFFFFFFFF\n");
        assert_eq!(Machine::here(&root), None);
        write("/proc/sys/kernel/hostname", "n1.example.org\n");
        write("/etc/machine-id", "4d1f0c6f3a5e4b2f8d7c6b5a49382716\n");
        let machine = Machine::here(&root).unwrap();
        assert_eq!(machine.name, "n1.example.org");
        assert!(!machine.id.is_empty() && !machine.id.contains("4d1f0c6f"), "{machine:?}");
    }

    #[test]
    fn nodes_can_share_network_file_systems_but_not_disks_or_memory() {
        for (kind, expected) in [(0xEF53, None), (0x5846_5342, None), (0x9123_683E, None), (0x0102_1994, None)] {
            assert_eq!(shared_file_system(kind), expected, "{kind:x}");
        }
        assert_eq!(shared_file_system(0x6969), Some("NFS"));
        assert_eq!(shared_file_system(0x0BD0_0BD0), Some("Lustre"));
        assert_eq!(shared_by_nodes(Path::new("/proc")), None);
    }
}
