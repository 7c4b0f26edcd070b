//! Builds `envs/<digest>` from the archives in `pkgs/`, without network, in the host stage.
//!
//! The environment is built as `.<digest>.partial`, already with the paths of its final place, checked, marked, synced,
//! and put in place by one rename. Before that rename nothing uses it, so a kill at any instruction costs only time:
//! the next run removes the remains and starts again.
//!
//! Packages' link scripts don't run: they are shell scripts, and no package that Flux needs has one.

pub(crate) mod arrivals;
mod clobbers;
pub(crate) mod collect;
pub(crate) mod conda;
mod digests;
pub(crate) mod entry_points;
pub(crate) mod extract;
pub(crate) mod guard;
pub(crate) mod limits;
pub(crate) mod mend;
pub(crate) mod opened;
mod places;
pub(crate) mod records;
pub(crate) mod room;
pub(crate) mod transaction;
mod tree;
pub(crate) mod verify;

use std::{
    fs, io,
    os::{fd::BorrowedFd, unix::fs::PermissionsExt},
    path::{Component, Path, PathBuf},
    sync::{Mutex, PoisonError},
};

use serde::{Deserialize, Serialize};

use crate::{
    ENVIRONMENT_MARKER,
    environment::{
        clobbers::settle_clobbers,
        records::{RECORDS, Records, read_own, write_public},
        transaction::{Environments, UNPACKED, make_public_directory},
        tree::Tree,
    },
    fetch::archive::{self, archives},
};
use api::PackageSet;
use base::error_chain;
use host::{
    BrokerProcesses,
    files::remove_if_there,
    state::{ENVIRONMENTS, environment},
};
use hostapi::{LinkOrder, Linked, Progress, Refusal};
use locks::estimate_bytes;

/// Content of [`ENVIRONMENT_MARKER`].
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Marker {
    digest: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) compiled_prefix: Option<PathBuf>,
    pub(crate) bytes: u64,
    /// The archives in `pkgs/` that it was built from.
    pub(crate) archives: Vec<String>,
}

/// The digests of all environments under `prefix` that are ready, sorted.
pub fn ready(prefix: &Path) -> Vec<String> {
    let entries = fs::read_dir(prefix.join(ENVIRONMENTS)).into_iter().flatten().flatten();
    let names = entries.filter_map(|e| e.file_name().into_string().ok());
    let mut digests = names.filter(|digest| linked(prefix, digest).is_some()).collect::<Vec<_>>();
    digests.sort();
    digests
}

/// Describes the environment `digest` under `prefix`, if it is ready.
pub fn linked(prefix: &Path, digest: &str) -> Option<Linked> {
    marker(prefix, digest).map(Marker::linked)
}

impl Marker {
    fn linked(self) -> Linked {
        Linked { compiled_prefix: self.compiled_prefix, bytes: self.bytes, warnings: Vec::new() }
    }
}

/// The marker of an environment, if it is ready.
pub(crate) fn marker(prefix: &Path, digest: &str) -> Option<Marker> {
    read_marker(prefix, digest).ok()
}

/// The marker of an environment, or why it is not ready.
pub(crate) fn read_marker(prefix: &Path, digest: &str) -> io::Result<Marker> {
    let content = read_own(&environment(prefix, digest), ENVIRONMENT_MARKER)?;
    let marker: Marker = serde_json::from_slice(&content)?;
    let is_its = archive::is_digest(digest) && marker.digest == digest;
    if is_its { Ok(marker) } else { Err(io::ErrorKind::InvalidData.into()) }
}

/// Builds the environment of `order` unless it is ready.
///
/// Blocks for as long as the work takes, which may be minutes.
///
/// # Errors
/// A sentence for people. Transient where fetching or trying again can help: an archive that is missing or damaged (it
/// is removed, so that the next fetch brings it again), or the disk.
pub fn link(
    order: &LinkOrder,
    broker: &dyn BrokerProcesses,
    progress: &mut dyn FnMut(Progress),
) -> Result<Linked, Refusal> {
    link_while(order, broker, None, progress)
}

/// Like [`link`], but archives may still arrive until `more`, the reading end of a pipe, ends. Archives of a lock are
/// unpacked as they arrive; those that are missing or damaged when the pipe ends are an error.
///
/// # Errors
/// As for [`link`].
pub fn link_while(
    order: &LinkOrder,
    broker: &dyn BrokerProcesses,
    more: Option<BorrowedFd<'_>>,
    progress: &mut dyn FnMut(Progress),
) -> Result<Linked, Refusal> {
    let LinkOrder { prefix, digest, set, platform, .. } = order;
    if !archive::is_digest(digest) {
        return Err(refused(format!("`{digest}` is not the digest of a package set")));
    }
    let mut environments = Environments::hold(prefix, broker)?;
    if let Some(linked) = linked(prefix, digest) {
        return Ok(linked);
    }
    let archives = archives(set, platform).map_err(|e| refused(error_chain(&e)))?;
    environments.clear(digest)?;
    let partial = environments.partial(digest);
    let mut warnings = std::mem::take(&mut environments.warnings);
    let made = build_tree(order, more, &partial, archives, progress).and_then(|linked| {
        let committed = environments.commit(&partial, digest).map(|()| linked);
        committed.map_err(|e| environments.failure("finish the environment in", &e))
    });
    match made {
        Ok(linked) => {
            warnings.extend(linked.warnings);
            Ok(Linked { warnings, ..linked })
        }
        Err(refusal) => {
            let refusal = environments.with_room(refusal, estimate_bytes(set, platform));
            // This only frees the space early; the next run would do it too. At this point no thread writes there any
            // more, not even one of an unpacking that was given up.
            environments.drop_leftovers();
            Err(refusal)
        }
    }
}

/// Builds the environment of `order` in `partial`, which must not exist yet, including its records and its marker, as
/// if it were in its final place. Temporary files go beside `partial`, under names that begin with its name.
pub(crate) fn build_tree(
    order: &LinkOrder,
    more: Option<BorrowedFd<'_>>,
    partial: &Path,
    archives: Vec<String>,
    progress: &mut dyn FnMut(Progress),
) -> Result<Linked, Refusal> {
    let LinkOrder { prefix, digest, set, platform, .. } = order;
    make_public_directory(partial)?;
    let ready = environment(prefix, digest);
    let warnings = Mutex::default();
    let build =
        Build { pkgs: prefix.join("pkgs"), more, digest, platform, ready: &ready, partial, warnings: &warnings };
    let compiled_prefix = match set {
        PackageSet::Lock { lock, .. } => build.conda(lock, progress).map(|()| None),
        PackageSet::Bundle(source) => build.bundle(source, progress),
    }?;
    build.check_flux(compiled_prefix.as_deref())?;
    progress(Progress::begun("syncing"));
    let linked = build.finish(compiled_prefix, archives);
    let linked = linked.map_err(|e| failed(format!("can't finish the environment in {}: {e}", partial.display())))?;
    Ok(Linked { warnings: warnings.into_inner().unwrap_or_else(PoisonError::into_inner), ..linked })
}

/// An environment that is being built.
pub(crate) struct Build<'a> {
    pub(crate) pkgs: PathBuf,
    /// A pipe: more archives may arrive until it ends. `None`: no more arrive.
    pub(crate) more: Option<BorrowedFd<'a>>,
    pub(crate) digest: &'a str,
    pub(crate) platform: &'a str,
    /// The final path.
    pub(crate) ready: &'a Path,
    /// The temporary path under which it is built.
    pub(crate) partial: &'a Path,
    /// Collected for [`Linked::warnings`].
    pub(crate) warnings: &'a Mutex<Vec<String>>,
}

impl Build<'_> {
    /// A path beside the tree for unpacking `what`. The next run recognises its name as a leftover.
    pub(crate) fn beside(&self, what: &str) -> PathBuf {
        let name = self.partial.file_name().unwrap_or_default().to_string_lossy();
        self.partial.with_file_name(format!("{name}{what}{UNPACKED}"))
    }

    /// The prefix, for messages about free space.
    pub(crate) fn prefix(&self) -> &Path {
        self.pkgs.parent().unwrap_or(&self.pkgs)
    }

    /// Adds a warning if `privileged`, a file of `name`, had a set-user-ID or set-group-ID bit.
    pub(crate) fn warn_of(&self, name: &str, privileged: Option<&Path>) {
        let Some(path) = privileged else { return };
        self.warnings.lock().unwrap_or_else(PoisonError::into_inner).push(format!(
            "{name} has files with set-user-ID or set-group-ID bits, such as {}; they are installed without these bits, as conda does",
            path.display(),
        ));
    }

    pub(crate) fn missing_or_damaged(&self, archive: &Path, name: &str) -> Refusal {
        match fs::remove_file(archive) {
            Ok(()) => failed(format!("the archive of {name} on this host was damaged; it must be fetched again")),
            Err(_) => failed(format!("the archive of {name} is not on this host; it must be fetched")),
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

    /// Writes the last files of the tree. The marker comes last, and counts only once everything is on the disk.
    fn finish(&self, compiled_prefix: Option<PathBuf>, archives: Vec<String>) -> io::Result<Linked> {
        // A bundle may contain files of these names.
        remove_if_there(&self.partial.join(RECORDS))?;
        remove_if_there(&self.partial.join(ENVIRONMENT_MARKER))?;
        let conda = compiled_prefix.is_none();
        if conda {
            settle_clobbers(self.partial)?;
        }
        let mut tree = Tree::walk(self.partial)?;
        // rattler makes the scripts of Python packages group-writable.
        tree.close_to_others(self.partial)?;
        if let Some(shared) = tree.shared() {
            return Err(io::Error::other(format!(
                "{} is a hard link to a file outside the environment",
                shared.display()
            )));
        }
        Records::of(self.partial, &tree, conda)?.write(self.partial)?;
        let bytes = tree.bytes();
        let marker = Marker { digest: self.digest.to_owned(), compiled_prefix, bytes, archives };
        write_public(&self.partial.join(ENVIRONMENT_MARKER), &serde_json::to_vec(&marker)?)?;
        Ok(marker.linked())
    }
}

/// Follows symlinks within the tree as if the tree were already in its final place.
fn find_in_tree(tree: &Path, path: &Path, places: &[Option<&Path>]) -> Option<PathBuf> {
    let mut path = path.to_owned();
    // Linux follows as many.
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

/// A transient refusal: trying again can help.
pub(crate) fn failed(message: String) -> Refusal {
    Refusal { message, transient: true }
}

/// A permanent refusal: only a change of the input can help.
pub(crate) fn refused(message: String) -> Refusal {
    Refusal { message, transient: false }
}
