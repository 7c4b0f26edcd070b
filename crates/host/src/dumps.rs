//! Dumps of the running instance's KVS (flux-dump(1)) that are kept on the lead's host. They hold the jobs of all users, so only
//! root may read them, whichever user owns the brokers.

use std::{
    fs::{self, OpenOptions},
    io,
    os::{
        fd::OwnedFd,
        unix::fs::{OpenOptionsExt, PermissionsExt},
    },
    path::{Path, PathBuf},
};

use api::Dump;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::{files::remove_if_there, host_root::make_dirs_in_host_root, opening::path_of};

/// Name below the prefix.
pub const DUMPS: &str = "dump";
/// The key in the KVS that holds the ID of the dump's instance.
pub const ID_KEY: &str = "flux-distribute.instance-id";
/// Format of the time in a dump's name.
pub const FORMAT: &str = "%Y%m%dT%H%M%SZ";
/// Suffix of a dump's name.
pub const SUFFIX: &str = ".tgz";

/// A dump from stdin, kept on the host until this is dropped. Its name marks it as temporary, so that the next dump removes what
/// a killed process has left.
#[derive(Debug)]
pub struct Incoming {
    dir: OwnedFd,
    path: PathBuf,
}

impl Incoming {
    const NAME: &str = ".incoming.new";

    /// Writes all of `from` to a file below the host's `prefix` that only root can read.
    ///
    /// # Errors
    /// `from` can't be read, or the file can't be written; then nothing of it remains.
    pub fn receive(prefix: &Path, from: &mut impl io::Read) -> io::Result<Self> {
        let dir = make_dirs_in_host_root(&prefix.join(DUMPS))?;
        fs::set_permissions(path_of(&dir), fs::Permissions::from_mode(0o700))?;
        let incoming = Self { dir, path: prefix.join(DUMPS).join(Self::NAME) };
        remove_if_there(&incoming.here())?;
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(incoming.here())?;
        io::copy(from, &mut file)?;
        Ok(incoming)
    }

    /// Where it is, as the host sees it.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Where it is, as this process sees it.
    fn here(&self) -> PathBuf {
        path_of(&self.dir).join(Self::NAME)
    }
}

impl Drop for Incoming {
    fn drop(&mut self) {
        let _ = remove_if_there(&self.here());
    }
}

/// Dumps that are kept below `prefix`, as this process sees it, oldest first.
pub fn dumps(prefix: &Path) -> Vec<Dump> {
    let mut found: Vec<Dump> = files(&prefix.join(DUMPS)).filter_map(|path| named(&path)).collect();
    found.sort_by(|a, b| (a.time.0, &a.name).cmp(&(b.time.0, &b.name)));
    found
}

/// True if the dump's name shows that it is of this instance.
pub fn is_of(dump: &Dump, instance_id: &str) -> bool {
    dump.name.rsplit_once('-').is_some_and(|(id, _)| id == instance_id)
}

/// All files in `dir`.
pub fn files(dir: &Path) -> impl Iterator<Item = PathBuf> {
    fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path())
}

fn named(path: &Path) -> Option<Dump> {
    let name = path.file_name()?.to_str()?.to_owned();
    let (_, time) = name.strip_suffix(SUFFIX)?.rsplit_once('-')?;
    let time = k8s_openapi::jiff::civil::DateTime::strptime(FORMAT, time).ok()?;
    let time = time.to_zoned(k8s_openapi::jiff::tz::TimeZone::UTC).ok()?.timestamp();
    let metadata = fs::symlink_metadata(path).ok().filter(fs::Metadata::is_file)?;
    Some(Dump { name, time: Time(time), bytes: metadata.len() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dump_tells_its_instance_and_its_time_by_its_name() {
        let prefix = tempfile::tempdir().unwrap();
        let dir = prefix.path().join(DUMPS);
        fs::create_dir(&dir).unwrap();
        let names = [
            "4f-1-20261120T222003Z.tgz",
            "4f-1-20261120T212003Z.tgz",
            "4f-20261120T202003Z.tgz",
            ".4f-1-20261120T232003Z.tgz.new",
            "4f-1-yesterday.tgz",
            ".lock",
        ];
        names.iter().for_each(|name| fs::write(dir.join(name), "dump").unwrap());
        let found = dumps(prefix.path());
        let order: Vec<_> = found.iter().map(|dump| dump.name.as_str()).collect();
        assert_eq!(order, [names[2], names[1], names[0]]);
        assert_eq!(found[2].time.0.to_string(), "2026-11-20T22:20:03Z");
        assert_eq!(found.iter().map(|dump| is_of(dump, "4f-1")).collect::<Vec<_>>(), [false, true, true]);
        assert!(is_of(&found[0], "4f") && !is_of(&found[1], "4f"));
    }
}
