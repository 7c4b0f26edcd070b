//! Makes `envs/<digest>` from what `pkgs/` holds, without network: in the host stage.
//!
//! Built as `.<digest>.partial`, with every path in it already that of its final place, checked, marked, synced, and
//! switched by one rename. Before that rename it does not exist for anybody, so a kill at any instruction costs nothing
//! but time: the next run removes what it finds and begins again.
//!
//! Packages' link scripts are not run: they are shell, and nothing that Flux needs has one.

use std::{
    fs::{self, File},
    io::{self, Write},
    os::unix::fs::PermissionsExt,
    path::{Component, Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use super::{ENVIRONMENT_MARKER, archive};
use crate::{
    api::PackageSet,
    host::{LinkOrder, Linked, Progress, Refusal},
};

/// Content of [`ENVIRONMENT_MARKER`].
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Marker {
    digest: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    compiled_prefix: Option<PathBuf>,
    bytes: u64,
}

/// The digests of all environments under `prefix` that are ready, sorted.
pub fn ready(prefix: &Path) -> Vec<String> {
    let entries = fs::read_dir(prefix.join("envs")).into_iter().flatten().flatten();
    let names = entries.filter_map(|e| e.file_name().into_string().ok());
    let mut digests = names.filter(|digest| linked(prefix, digest).is_some()).collect::<Vec<_>>();
    digests.sort();
    digests
}

/// What is in the environment `digest` under `prefix`, if it is ready.
pub fn linked(prefix: &Path, digest: &str) -> Option<Linked> {
    let marker = prefix.join("envs").join(digest).join(ENVIRONMENT_MARKER);
    let marker: Marker = serde_json::from_slice(&fs::read(marker).ok()?).ok()?;
    let of_this = archive::is_digest(digest) && marker.digest == digest;
    of_this.then_some(Linked { compiled_prefix: marker.compiled_prefix, bytes: marker.bytes })
}

/// Makes the environment of `order`, or finds it ready.
///
/// Brings its own small runtime, so it must not be called from within another one.
///
/// # Errors
/// A sentence for people. Transient where fetching or trying again can help: an archive that is missing or damaged (it
/// is removed, so that the next fetch brings it again), or the disk.
pub fn link(order: &LinkOrder, progress: &mut dyn FnMut(Progress)) -> Result<Linked, Refusal> {
    let LinkOrder { prefix, digest, set, platform } = order;
    if !archive::is_digest(digest) {
        return Err(refused(format!("`{digest}` is not the digest of a package set")));
    }
    if let Some(linked) = linked(prefix, digest) {
        return Ok(linked);
    }
    let envs = prefix.join("envs");
    let io = |what: &'static str| {
        let envs = envs.clone();
        move |e: io::Error| failed(format!("can't {what} {}: {e}", envs.display()))
    };
    fs::create_dir_all(&envs).map_err(io("make"))?;
    let directory = File::open(&envs).map_err(io("open"))?;
    let _lock = nix::fcntl::Flock::lock(directory, nix::fcntl::FlockArg::LockExclusive)
        .map_err(|(_, e)| failed(format!("can't lock {}: {e}", envs.display())))?;
    // Somebody else may have made it while we waited.
    if let Some(linked) = linked(prefix, digest) {
        return Ok(linked);
    }
    let (ready, partial) = (envs.join(digest), envs.join(format!(".{digest}.partial")));
    // A broker may run from it, so it is not ours to remove.
    if fs::symlink_metadata(&ready).is_ok() {
        let ready = ready.display();
        return Err(refused(format!(
            "{ready} is there but has no {ENVIRONMENT_MARKER}; remove it if nothing runs from it"
        )));
    }
    drop_leftovers(&envs).map_err(io("clean"))?;
    fs::create_dir(&partial).map_err(io("write to"))?;
    fs::set_permissions(&partial, fs::Permissions::from_mode(0o755)).map_err(io("write to"))?;

    let build = Build { pkgs: prefix.join("pkgs"), digest, platform, ready: &ready, partial: &partial };
    let compiled_prefix = match set {
        PackageSet::Lock { lock, .. } => build.conda(lock, progress).map(|()| None),
        PackageSet::Bundle(source) => build.bundle(source, progress),
    };
    let done = compiled_prefix.and_then(|compiled_prefix| {
        build.check_flux(compiled_prefix.as_deref())?;
        build.finish(compiled_prefix, progress).map_err(io("finish the environment in"))
    });
    if done.is_err() {
        // Only to give back the space; the next run would do it.
        let _ = fs::remove_dir_all(&partial);
    }
    done
}

/// Removes what killed runs left, for any digest: under the lock nobody else is at it.
fn drop_leftovers(envs: &Path) -> io::Result<()> {
    for entry in fs::read_dir(envs)? {
        let entry = entry?;
        let name = entry.file_name();
        let name = name.to_string_lossy();
        let leftover = name.starts_with('.') && (name.ends_with(".partial") || name.ends_with(".unpacked"));
        if leftover {
            match entry.file_type()?.is_dir() {
                true => fs::remove_dir_all(entry.path())?,
                false => fs::remove_file(entry.path())?,
            }
        }
    }
    Ok(())
}

/// An environment that is being made.
pub(super) struct Build<'a> {
    pub(super) pkgs: PathBuf,
    pub(super) digest: &'a str,
    pub(super) platform: &'a str,
    /// Its final place.
    pub(super) ready: &'a Path,
    /// Where it grows.
    pub(super) partial: &'a Path,
}

impl Build<'_> {
    /// For people: where room is needed.
    pub(super) fn prefix(&self) -> &Path {
        self.pkgs.parent().unwrap_or(&self.pkgs)
    }

    pub(super) fn missing_or_damaged(&self, archive: &Path, name: &str) -> Refusal {
        match fs::remove_file(archive) {
            Ok(()) => failed(format!("the archive of {name} on this host was damaged; it has to be fetched again")),
            Err(_) => failed(format!("the archive of {name} is not on this host; it has to be fetched")),
        }
    }

    fn check_flux(&self, compiled_prefix: Option<&Path>) -> Result<(), Refusal> {
        let found = find_in_tree(self.partial, Path::new("bin/flux"), &[Some(self.ready), compiled_prefix]);
        match found.and_then(|path| fs::symlink_metadata(path).ok()) {
            Some(flux) if flux.is_file() && flux.permissions().mode() & 0o111 != 0 => Ok(()),
            Some(_) => Err(refused(format!("package set {} has a bin/flux that can't be executed", self.digest))),
            None => Err(refused(format!(
                "package set {} has no bin/flux; add flux-core to packages.specs, or make the bundle from Flux's prefix",
                self.digest
            ))),
        }
    }

    fn finish(&self, compiled_prefix: Option<PathBuf>, progress: &mut dyn FnMut(Progress)) -> io::Result<Linked> {
        progress(Progress::begun("syncing"));
        let bytes = bytes_below(self.partial)?;
        let marker = Marker { digest: self.digest.to_owned(), compiled_prefix, bytes };
        // Removed first: a bundle may have brought a symlink of this name.
        let path = self.partial.join(ENVIRONMENT_MARKER);
        match fs::remove_file(&path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
        File::create_new(&path)?.write_all(&serde_json::to_vec(&marker)?)?;
        // Thousands of files, so not one by one. After this a power cut can't leave a marker without its files.
        nix::unistd::syncfs(File::open(self.partial)?)?;
        fs::rename(self.partial, self.ready)?;
        File::open(self.ready.parent().unwrap_or(self.ready))?.sync_all()?;
        Ok(Linked { compiled_prefix: marker.compiled_prefix, bytes })
    }
}

/// Follows symlinks within the tree as they will be followed once the tree is in its place.
fn find_in_tree(tree: &Path, path: &Path, places: &[Option<&Path>]) -> Option<PathBuf> {
    let mut path = path.to_owned();
    // As many as Linux follows.
    for _ in 0..40 {
        let full = tree.join(&path);
        let Ok(target) = fs::read_link(&full) else {
            return full.exists().then_some(full);
        };
        let next = if target.is_absolute() {
            places.iter().flatten().find_map(|place| target.strip_prefix(place).ok())?.to_owned()
        } else {
            path.parent().unwrap_or(Path::new("")).join(target)
        };
        path = PathBuf::new();
        for component in next.components() {
            match component {
                Component::Normal(name) => path.push(name),
                Component::CurDir => {}
                _ if path.pop() => {}
                _ => return None,
            }
        }
    }
    None
}

fn bytes_below(directory: &Path) -> io::Result<u64> {
    let mut bytes = 0;
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let metadata = entry.metadata()?;
        bytes += if metadata.is_dir() { bytes_below(&entry.path())? } else { metadata.len() };
    }
    Ok(bytes)
}

/// Trying again can help.
pub(super) fn failed(message: String) -> Refusal {
    Refusal { message, transient: true }
}

/// Only a change can help.
pub(super) fn refused(message: String) -> Refusal {
    Refusal { message, transient: false }
}
