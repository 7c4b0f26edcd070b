//! Which machine this is: what is below a prefix may be another one's, if nodes share that directory.

use std::{fs, path::Path};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::Root;

/// What a machine says of itself. No part of it is certain: images are cloned with their machine-id(5), which may be made anew;
/// nodes of one host share its hardware; hosts are renamed. So [`Machine::may_be`] goes by the majority. A part that is empty is
/// not known.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct Machine {
    /// Its host name, with its domain if the kernel knows one.
    pub name: String,
    /// Made from /etc/machine-id, which is not for everybody to know.
    pub id: String,
    /// Made from the UUID that the firmware tells, which root alone can read.
    pub hardware: String,
}

impl Machine {
    /// The machine of this host. None if it tells nothing of itself.
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

    /// Whether both can be one machine: most of what both tell is equal, and between two parts that contradict each other the
    /// host name decides.
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

/// A host may tell its name with its domain at one time and without at another.
fn is_one_name(one: &str, other: &str) -> bool {
    one == other || [(one, other), (other, one)].into_iter().any(|(short, long)| short == first_label(long))
}

/// Firmware that was never given a UUID tells one letter over and over.
fn is_id(text: &str) -> bool {
    if !text.chars().all(|letter| letter.is_ascii_hexdigit() || letter == '-') {
        return false;
    }
    let mut letters = text.chars().filter(char::is_ascii_hexdigit);
    letters.next().is_some_and(|first| letters.any(|letter| letter != first))
}

/// Half of a SHA-256.
fn digest(text: &str) -> String {
    hex::encode(&Sha256::digest(format!("flux-distribute {text}"))[..16])
}

/// The file system of `kind` (statfs(2) `f_type`), if it is one that nodes share.
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

/// The same of what is at `directory`, as this process sees it.
pub fn shared_by_nodes(directory: &Path) -> Option<&'static str> {
    let found = nix::sys::statfs::statfs(directory).ok()?;
    // Magic numbers have 32 bits; some C libraries widen them with their sign.
    #[allow(clippy::unnecessary_cast, reason = "the type is another one on each platform")]
    shared_file_system(found.filesystem_type().0 as u64 & 0xFFFF_FFFF)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(name: &str, id: &str, hardware: &str) -> Machine {
        Machine { name: name.into(), id: id.into(), hardware: hardware.into() }
    }

    #[test]
    fn a_machine_is_known_again_by_most_of_what_it_says() {
        let first = machine("n1", "id1", "hw1");
        for (other, is_it, what) in [
            (machine("n1", "id1", "hw1"), true, "itself"),
            (machine("n1", "new", "hw1"), true, "its machine-id was made anew"),
            (machine("new", "id1", "hw1"), true, "it was renamed"),
            (machine("n1", "id1", "new"), true, "its disks are in other hardware"),
            (machine("n1", "id1", ""), true, "its firmware can't be asked any more"),
            (machine("", "", ""), true, "it tells nothing"),
            (machine("n2", "id2", "hw2"), false, "another node"),
            (machine("n2", "id1", "hw2"), false, "a clone with the same machine-id"),
            (machine("n2", "id2", "hw1"), false, "two nodes of one host, as those of kind"),
            (machine("n1", "id2", ""), true, "its machine-id was made anew, and no firmware tells anything"),
            (machine("n2", "id1", ""), false, "a clone without firmware"),
            (machine("n1.site", "id1", "hw2"), true, "it tells its domain now, in other hardware"),
        ] {
            assert_eq!(first.may_be(&other), is_it, "{what}");
            assert_eq!(other.may_be(&first), is_it, "{what}");
        }
        // As two clones at two sites that share a directory.
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
        let told = Machine::here(&root).unwrap();
        assert_eq!(told.name, "n1.example.org");
        assert!(!told.id.is_empty() && !told.id.contains("4d1f0c6f"), "{told:?}");
    }

    #[test]
    fn file_systems_of_disks_and_memory_are_not_shared_and_those_of_networks_are() {
        for (kind, expected) in [(0xEF53, None), (0x5846_5342, None), (0x9123_683E, None), (0x0102_1994, None)] {
            assert_eq!(shared_file_system(kind), expected, "{kind:x}");
        }
        assert_eq!(shared_file_system(0x6969), Some("NFS"));
        assert_eq!(shared_file_system(0x0BD0_0BD0), Some("Lustre"));
        assert_eq!(shared_by_nodes(Path::new("/proc")), None);
    }
}
