//! The lead's statedir: the one directory of a host whose loss loses something, the queue.

use std::{
    fs, io,
    io::Read,
    os::unix::fs::{OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
};

use nix::libc::O_NOFOLLOW;

use super::{
    Refusal, StateDir,
    dump::DUMPS,
    files::{Owner, make_dir, remove_all_if_there, sync_parent, write_atomic},
};

/// Name below the prefix.
pub const STATEDIR: &str = "state";
const ID: &str = "instance-id";
/// Of a statedir that was made from a dump: the dump.
const RECOVERED: &str = "recovered.tgz";
/// Where flux-core's content-sqlite keeps everything.
const CONTENT: &str = "content.sqlite";

/// Sees to it that `<prefix>/state` is the instance's, and the broker user's. `prefix` is as this process sees it.
///
/// # Errors
/// Where the instance was online once and its statedir is not here: an empty one would be an empty queue.
pub fn prepare(prefix: &Path, order: &StateDir, owner: Owner) -> Result<(), Refusal> {
    let dir = prefix.join(STATEDIR);
    let there = fs::symlink_metadata(&dir).is_ok();
    keep_private(&dir)?;
    let found = read_id(&dir);
    if found.as_deref() == Some(&order.instance_id) {
        return change_owner(&dir, owner);
    }
    if order.established {
        let instead = match (there, &found) {
            (false, _) => "there is none".to_owned(),
            (true, None) => "the one here has no instance-id".to_owned(),
            (true, Some(other)) => format!("the one here is of instance {other}"),
        };
        return Err(Refusal::new(format!(
            "the statedir of instance {} is gone from this host ({} should be it, {instead}), and with it the queue: \
             put it back; or run `flux-distribute recover --lead NODE --from DUMP` in the pod of the node that shall lead; \
             or give the queue up with `flux-distribute reset --lead NODE`",
            order.instance_id,
            dir.display()
        )));
    }
    make(prefix, &order.instance_id, owner, |_| Ok(()))
}

/// Makes a statedir that the broker fills from a dump when it starts: with `content.restore=auto` its rc1 restores what
/// `dump/RESTORE` points to, and removes the link when that is done. `read_dump` writes the dump to the path it is given.
///
/// # Errors
/// Those of `read_dump`; what is there stays then.
pub fn prepare_from_dump(
    prefix: &Path,
    instance_id: &str,
    owner: Owner,
    read_dump: impl FnOnce(&Path) -> Result<(), Refusal>,
) -> Result<(), Refusal> {
    make(prefix, instance_id, owner, |new| {
        let dumps = new.join("dump");
        make_dir(&dumps, 0o700, owner)?;
        let file = dumps.join(RECOVERED);
        read_dump(&file)?;
        let link = dumps.join("RESTORE");
        let made = || -> io::Result<()> {
            std::os::unix::fs::chown(&file, Some(owner.uid), Some(owner.gid))?;
            std::os::unix::fs::symlink(RECOVERED, &link)?;
            std::os::unix::fs::lchown(&link, Some(owner.uid), Some(owner.gid))?;
            sync_parent(&link)
        };
        made().map_err(|error| Refusal::io("make", &link, &error))
    })
}

/// Made whole under another name, so that a statedir without id is never ours. One that is there is moved aside.
fn make(prefix: &Path, id: &str, owner: Owner, fill: impl FnOnce(&Path) -> Result<(), Refusal>) -> Result<(), Refusal> {
    let (dir, new) = (prefix.join(STATEDIR), prefix.join(format!(".{STATEDIR}.new")));
    let remove = |path: &Path| remove_all_if_there(path).map_err(|error| Refusal::io("remove", path, &error));
    remove(&new)?;
    make_dir(&new, 0o700, owner)?;
    fill(&new).inspect_err(|_| drop(remove_all_if_there(&new)))?;
    write_atomic(&new.join(ID), format!("{id}\n").as_bytes(), 0o644, owner)?;
    // What was made from a dump and never used: the dump is there still.
    if dir.join("dump").join(RECOVERED).is_file() && !dir.join(CONTENT).exists() {
        remove(&dir)?;
    } else if fs::symlink_metadata(&dir).is_ok() {
        let aside = free_name(prefix, read_id(&dir).as_deref().unwrap_or("unnamed"));
        fs::rename(&dir, &aside).map_err(|error| Refusal::io("move aside", &dir, &error))?;
    }
    fs::rename(&new, &dir).and_then(|()| sync_parent(&dir)).map_err(|error| Refusal::io("make", &dir, &error))
}

/// True where the statedir of instance `id` is at `prefix`.
pub fn is_there(prefix: &Path, id: &str) -> bool {
    read_id(&prefix.join(STATEDIR)).as_deref() == Some(id)
}

/// A lead that ends after its statedir was removed makes it again for its dump, with all jobs' environments in it, and
/// everybody could read them.
fn keep_private(dir: &Path) -> Result<(), Refusal> {
    match fs::symlink_metadata(dir) {
        Ok(found) if found.is_dir() && found.permissions().mode() & 0o077 != 0 => {
            let made = fs::set_permissions(dir, fs::Permissions::from_mode(0o700));
            made.map_err(|error| Refusal::io("change the mode of", dir, &error))
        }
        _ => Ok(()),
    }
}

fn read_id(dir: &Path) -> Option<String> {
    // The broker's user owns the directory; what he puts there must not make root read other files.
    let file = fs::OpenOptions::new().read(true).custom_flags(O_NOFOLLOW).open(dir.join(ID)).ok()?;
    let mut id = String::new();
    file.take(256).read_to_string(&mut id).ok()?;
    let id = id.trim();
    let plain =
        !id.is_empty() && !id.starts_with('.') && id.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c));
    plain.then(|| id.to_owned())
}

fn free_name(prefix: &Path, id: &str) -> PathBuf {
    let name = |n: u32| match n {
        0 => prefix.join(format!("{STATEDIR}.{id}")),
        n => prefix.join(format!("{STATEDIR}.{id}.{n}")),
    };
    (0..).map(name).find(|path| fs::symlink_metadata(path).is_err()).unwrap_or_else(|| name(0))
}

/// What a removal keeps where it is told to keep the queue: `state`, `state.<id>` that was moved aside, and dumps.
pub fn is_kept(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    (name == DUMPS && path.is_dir())
        || ((name == STATEDIR || name.starts_with("state.")) && path.is_dir() && path.join(ID).is_file())
}

/// The top is changed last: its owner tells whether a change was finished.
fn change_owner(dir: &Path, owner: Owner) -> Result<(), Refusal> {
    let failed = |error: io::Error| Refusal::io("change the owner of", dir, &error);
    if Owner::of(&fs::symlink_metadata(dir).map_err(failed)?) == owner {
        return Ok(());
    }
    change_below(dir, owner).map_err(failed)?;
    make_dir(dir, 0o700, owner)
}

fn change_below(dir: &Path, owner: Owner) -> io::Result<()> {
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            change_below(&entry.path(), owner)?;
        }
        std::os::unix::fs::lchown(entry.path(), Some(owner.uid), Some(owner.gid))?;
    }
    Ok(())
}
