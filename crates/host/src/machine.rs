//! The identity of this machine, and whether machines share a directory.

use std::{fs, path::Path};

use hostapi::{Machine, first_label};
use sha2::{Digest, Sha256};

use super::Root;

/// The identity of this host's machine. None if the host has none of the ids.
pub fn here(root: &Root) -> Option<Machine> {
    let read = |path: &str| fs::read_to_string(root.path(path)).unwrap_or_default().trim().to_owned();
    let name = read("/proc/sys/kernel/hostname");
    let machine = Machine {
        name: Some(name).filter(|name| !["localhost", "(none)"].contains(&first_label(name))).unwrap_or_default(),
        id: Some(read("/etc/machine-id")).filter(|id| is_id(id)).map(|id| digest(&id)).unwrap_or_default(),
        hardware: Some(read("/sys/class/dmi/id/product_uuid"))
            .filter(|uuid| is_id(uuid))
            .map(|uuid| digest(&uuid.to_lowercase()))
            .unwrap_or_default(),
    };
    (machine != Machine::default()).then_some(machine)
}

/// False for the UUID of firmware that was never given one: it repeats one digit.
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
    #[allow(clippy::unnecessary_cast, clippy::cast_sign_loss, reason = "the type differs by platform")]
    shared_file_system(found.filesystem_type().0 as u64 & 0xFFFF_FFFF)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn placeholders_identify_no_machine() {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::at(dir.path());
        assert_eq!(here(&root), None);
        let write = |path: &str, text: &str| {
            fs::create_dir_all(root.path(path).parent().unwrap()).unwrap();
            fs::write(root.path(path), text).unwrap();
        };
        write("/proc/sys/kernel/hostname", "localhost.localdomain\n");
        write("/etc/machine-id", "uninitialized\n");
        write("/sys/class/dmi/id/product_uuid", "FFFFFFFF-FFFF-FFFF-FFFF-FFFFFFFFFFFF\n");
        assert_eq!(here(&root), None);
        write("/proc/sys/kernel/hostname", "n1.example.org\n");
        write("/etc/machine-id", "4d1f0c6f3a5e4b2f8d7c6b5a49382716\n");
        let told = here(&root).unwrap();
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
