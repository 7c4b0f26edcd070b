//! The mounts that a thread sees, from proc_pid_mountinfo(5).

use std::{
    ffi::OsString,
    fs, io,
    os::{
        fd::{AsFd, AsRawFd},
        unix::ffi::OsStringExt,
    },
    path::{Path, PathBuf},
};

/// One line of mountinfo.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    /// Number of the mount; unique while it exists, then reused.
    pub id: u64,
    /// The directory of the file system that is mounted.
    pub root: PathBuf,
    /// Mount point.
    pub point: PathBuf,
    /// Options of this mount, such as `rw,noatime`.
    pub options: String,
    /// File system type.
    pub kind: String,
    /// Options of the file system, shared by all of its mounts.
    pub super_options: String,
}

impl Mount {
    /// uid of the user who mounted it, if it is a FUSE mount (`user_id` in mount.fuse3(8)).
    pub fn fuse_user(&self) -> Option<u32> {
        let option = |option: &str| option.strip_prefix("user_id=")?.parse().ok();
        self.super_options.split(',').find_map(option).filter(|_| self.kind.starts_with("fuse"))
    }

    /// True if neither the mount nor its file system is read-only.
    pub fn is_writable(&self) -> bool {
        [&self.options, &self.super_options].iter().all(|options| options.split(',').any(|option| option == "rw"))
    }
}

/// The mounts that this thread sees, in mount order.
///
/// # Errors
/// If /proc can't be read.
pub fn own() -> io::Result<Vec<Mount>> {
    Ok(parse(&read(Path::new("/proc/thread-self/mountinfo"))?))
}

/// Reads a mountinfo file. The kernel escapes only blanks, line ends and backslashes, and a user may give a FUSE mount
/// any other byte as its name: a name that is not UTF-8 must not hide the other mounts.
///
/// # Errors
/// If the file can't be read.
pub fn read(path: &Path) -> io::Result<String> {
    Ok(String::from_utf8_lossy(&fs::read(path)?).into_owned())
}

/// Number of the mount through which `file` was opened, from proc_pid_fdinfo(5). Does not query the file system, which
/// may hang.
///
/// # Errors
/// If /proc can't be read, or has no such number.
pub fn id(file: impl AsFd) -> io::Result<u64> {
    let text = fs::read_to_string(format!("/proc/thread-self/fdinfo/{}", file.as_fd().as_raw_fd()))?;
    let id = text.lines().find_map(|line| line.strip_prefix("mnt_id:")?.trim().parse().ok());
    id.ok_or_else(|| io::Error::other("/proc shows no mount number for the file"))
}

/// uid of the user who mounted mount `id`, if it is a FUSE mount (`user_id` in mount.fuse3(8)).
///
/// # Errors
/// If /proc can't be read, or lists no such mount: a user may have unmounted it meanwhile, and what was opened on it still
/// answers as that user's program likes.
pub fn fuse_user(id: u64) -> io::Result<Option<u32>> {
    match own()?.iter().find(|mount| mount.id == id) {
        Some(mount) => Ok(mount.fuse_user()),
        None => Err(io::Error::other("it was unmounted meanwhile")),
    }
}

/// Parses mountinfo, without the lines that have another format.
pub fn parse(text: &str) -> Vec<Mount> {
    text.lines()
        .filter_map(|line| {
            let (mount, file_system) = line.split_once(" - ")?;
            let mut mount = mount.split(' ');
            let id = mount.next()?.parse().ok()?;
            let mut mount = mount.skip(2);
            let mut file_system = file_system.split(' ');
            Some(Mount {
                id,
                root: unescape(mount.next()?),
                point: unescape(mount.next()?),
                options: mount.next().unwrap_or_default().to_owned(),
                kind: file_system.next()?.to_owned(),
                super_options: file_system.nth(1).unwrap_or_default().to_owned(),
            })
        })
        .collect()
}

/// Decodes the kernel's escapes: a backslash and three octal digits.
fn unescape(field: &str) -> PathBuf {
    let bytes = field.as_bytes();
    let mut plain = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let octal = field.get(at + 1..at + 4).and_then(|digits| u8::from_str_radix(digits, 8).ok());
        match (bytes[at], octal) {
            (b'\\', Some(byte)) => {
                plain.push(byte);
                at += 4;
            }
            (byte, _) => {
                plain.push(byte);
                at += 1;
            }
        }
    }
    PathBuf::from(OsString::from_vec(plain))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_escaped_mount_point_is_decoded() {
        let table = parse("36 35 98:0 / /mnt/a\\040b\\134 rw,noatime shared:1 - ext3 /dev/root rw,errors=continue\n");
        assert_eq!(table[0].point, Path::new("/mnt/a b\\"));
        assert_eq!((table[0].id, table[0].kind.as_str()), (36, "ext3"));
        assert_eq!(table[0].super_options, "rw,errors=continue");
    }

    #[test]
    fn a_mount_that_is_not_listed_is_not_taken_for_one_of_root() {
        let listed = id(fs::File::open("/proc").unwrap()).unwrap();
        assert_eq!(fuse_user(listed).unwrap(), None);
        assert!(fuse_user(u64::MAX).is_err());
    }

    #[test]
    fn a_mount_name_that_is_not_utf_8_hides_no_other_mount() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("mountinfo");
        let table = b"36 35 98:0 / /mnt/\xff rw - fuse \xff rw,user_id=1000\n37 35 98:0 / /opt rw - ext4 /dev/sda rw\n";
        fs::write(&path, table).unwrap();
        let points: Vec<_> = parse(&read(&path).unwrap()).into_iter().map(|mount| (mount.id, mount.point)).collect();
        assert_eq!(points, [(36, "/mnt/\u{fffd}".into()), (37, "/opt".into())]);
    }
}
