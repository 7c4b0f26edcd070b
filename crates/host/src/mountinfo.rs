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
    /// The kernel's mount ID; unique while the mount exists, then reused.
    pub id: u64,
    /// Which directory of the file system is mounted; `/` if all of it.
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

/// The mounts that this thread sees: a thread may have a mount namespace of its own. A mount comes after the one that it is on.
///
/// # Errors
/// If /proc can't be read.
pub fn own() -> io::Result<Vec<Mount>> {
    Ok(parse(&fs::read("/proc/thread-self/mountinfo")?))
}

/// Reads a mountinfo file to look for mounts whose names are UTF-8. The kernel escapes only blanks, line ends and
/// backslashes, and a user may give a FUSE mount any other byte as its name: such a name must not hide the other mounts.
///
/// # Errors
/// If the file can't be read.
pub fn read(path: &Path) -> io::Result<String> {
    Ok(String::from_utf8_lossy(&fs::read(path)?).into_owned())
}

/// Mount ID of the mount through which `file` was opened, from proc_pid_fdinfo(5). Does not query the file system, which
/// may hang. Keep the file open while you use the ID.
///
/// # Errors
/// If /proc can't be read, or has no such number.
pub fn id(file: impl AsFd) -> io::Result<u64> {
    let text = fs::read_to_string(format!("/proc/thread-self/fdinfo/{}", file.as_fd().as_raw_fd()))?;
    let id = text.lines().find_map(|line| line.strip_prefix("mnt_id:")?.trim().parse().ok());
    id.ok_or_else(|| io::Error::other("/proc shows no mount ID for the file"))
}

/// uid of the user who mounted the mount with this ID, if it is a FUSE mount (`user_id` in mount.fuse3(8)).
///
/// # Errors
/// If /proc can't be read, or lists no such mount: then a user has unmounted it since, and a file that was opened on it
/// still gets its answers from that user's program.
pub fn fuse_user(id: u64) -> io::Result<Option<u32>> {
    // A file that was opened through /proc/1/root is on a mount of the host's, which the pod's table does not list.
    let hosts = || fs::read("/proc/1/mountinfo").map(|table| parse(&table)).unwrap_or_default();
    let known = own()?.into_iter().find(|mount| mount.id == id);
    match known.or_else(|| hosts().into_iter().find(|mount| mount.id == id)) {
        Some(mount) => Ok(mount.fuse_user()),
        None => Err(io::Error::other("the mount was unmounted meanwhile")),
    }
}

/// Parses mountinfo, without the lines that have another format. Paths keep their bytes, UTF-8 or not: what a user has
/// mounted must be found under its name.
pub fn parse(table: &(impl AsRef<[u8]> + ?Sized)) -> Vec<Mount> {
    let text = |field: &[u8]| String::from_utf8_lossy(field).into_owned();
    let parse_line = |line: &[u8]| {
        // The kernel escapes blanks in every field, so that none but the separator is a lone hyphen.
        let mut fields = line.split(|byte| *byte == b' ');
        let id = text(fields.next()?).parse().ok()?;
        let mut fields = fields.skip(2);
        let (root, point) = (unescape(fields.next()?), unescape(fields.next()?));
        let options = fields.next().map(text)?;
        let mut file_system = fields.skip_while(|field| *field != b"-").skip(1);
        let kind = file_system.next().map(text)?;
        let super_options = file_system.nth(1).map(text).unwrap_or_default();
        Some(Mount { id, root, point, options, kind, super_options })
    };
    table.as_ref().split(|byte| *byte == b'\n').filter_map(parse_line).collect()
}

/// Decodes the kernel's escapes: a backslash and three octal digits.
fn unescape(field: &[u8]) -> PathBuf {
    let mut plain = Vec::with_capacity(field.len());
    let mut at = 0;
    while at < field.len() {
        let digits = field.get(at + 1..at + 4).and_then(|digits| std::str::from_utf8(digits).ok());
        match (field[at], digits.and_then(|digits| u8::from_str_radix(digits, 8).ok())) {
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
        let table: &[u8] =
            b"36 35 98:0 / /mnt/\xff rw - fuse \xff rw,user_id=1000\n37 35 98:0 / /opt rw - ext4 /dev/sda rw\n";
        fs::write(&path, table).unwrap();
        let points = |table| parse(table).into_iter().map(|mount| (mount.id, mount.point)).collect::<Vec<_>>();
        let theirs = PathBuf::from(OsString::from_vec(b"/mnt/\xff".to_vec()));
        assert_eq!(points(table), [(36, theirs), (37, "/opt".into())]);
        assert_eq!(points(read(&path).unwrap().as_bytes()), [(36, "/mnt/\u{fffd}".into()), (37, "/opt".into())]);
    }
}
