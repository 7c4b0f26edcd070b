//! Keeps an environment that was just linked from being used until its Flux has run on this host ([`crate::trial`]).

use std::{
    fs::{self, File},
    os::fd::BorrowedFd,
    path::{Path, PathBuf},
};

use crate::{
    launch::HostPlaces,
    trial::{Tried, try_flux},
};
use host::{
    Root,
    files::{remove_if_there, sync_parent},
    state::{ENVIRONMENTS, environment},
};
use hostapi::{LinkOrder, Linked, Progress, Refusal};

/// Links the environment of `order` ([`packages::link_while`]) and tries its Flux. An environment that can't be used
/// here is kept, and the next order tries it again: the host may have changed.
///
/// # Errors
/// As for [`packages::link_while`] and [`try_flux`].
pub fn link_and_try(
    root: &Root,
    order: &LinkOrder,
    more: Option<BorrowedFd<'_>>,
    progress: &mut dyn FnMut(Progress),
) -> Result<Linked, Refusal> {
    let LinkOrder { prefix, digest, .. } = order;
    let below = root.path(prefix);
    if packages::linked(&below, digest).is_none() {
        // Marked before the environment exists, so that no agent ever takes it for one that runs.
        let path = untried(&below, digest);
        let envs = fs::create_dir_all(below.join(ENVIRONMENTS));
        let made = envs.and_then(|()| File::create(&path)).and_then(|_| sync_parent(&path));
        made.map_err(|error| Refusal::io("make", &path, &error))?;
    }
    let linked = packages::link_while(order, &HostPlaces::of_host(), more, progress);
    let mut linked = linked.inspect_err(|_| drop(forget_trial(&below, digest)))?;
    if is_untried(&below, digest) {
        progress(Progress::begun("trying Flux on this host"));
        let tried = try_flux(&root.path(environment(prefix, digest)), digest, linked.compiled_prefix.as_deref())?;
        if let Tried::Unknown(why) = tried {
            linked.warnings.push(format!("can't tell whether Flux runs on this host: {why}"));
        }
        forget_trial(&below, digest)?;
    }
    Ok(linked)
}

/// True until the Flux of environment `digest` has run on this host. The mark is a file beside the environment, because
/// an environment never changes.
pub fn is_untried(prefix: &Path, digest: &str) -> bool {
    untried(prefix, digest).is_file()
}

/// Removes that mark, because Flux ran or the environment is gone.
///
/// # Errors
/// If the file can't be removed.
pub fn forget_trial(prefix: &Path, digest: &str) -> Result<(), Refusal> {
    let path = untried(prefix, digest);
    remove_if_there(&path).map_err(|error| Refusal::io("remove", &path, &error))
}

fn untried(prefix: &Path, digest: &str) -> PathBuf {
    prefix.join(ENVIRONMENTS).join(format!(".{digest}.untried"))
}
