//! The lead's statedir. It holds the queue, so it is the one directory of a host that can't be made again if it is
//! lost.

#[cfg(test)]
mod tests;

use std::{
    collections::BTreeSet,
    ffi::{CStr, OsStr, OsString},
    fs::{self, File},
    io,
    io::Read,
    os::{
        fd::AsFd,
        unix::{
            ffi::OsStrExt,
            fs::{MetadataExt, PermissionsExt},
        },
    },
    path::{Path, PathBuf},
};

use k8s_openapi::jiff::civil::DateTime;
use nix::{
    dir::Dir,
    fcntl::{AtFlags, OFlag, openat},
    sys::stat::{Mode, SFlag, fstat},
    unistd::{Gid, Uid, fchownat},
};

use super::{
    files::{Owner, make_dir, remove_if_there, sync_parent, write_atomic},
    opening::{self, look_in, open_in, open_only_path_below, open_plain_below, open_uncovered, path_of},
    removal::{refuse_mounts, remove_all_if_there},
    trust::{self, is_by_user},
    underneath::rename_in,
};
use crate::dumps::DUMPS;
use hostapi::{Refusal, StateDir};

/// Name of the statedir below the prefix.
pub const STATEDIR: &str = "state";
const ID: &str = "instance-id";
/// Most bytes in an instance's ID: with `state.` before and a number behind, it is still a file's name. Our own are UUIDs.
const LONGEST_ID: usize = 200;
/// Name of the dump in a statedir that was made from a dump.
const RECOVERED: &str = "recovered.tgz";
/// Directory in which flux-core's rc3 writes dumps at a clean stop (`content.dump=auto`).
const FLUX_DUMPS: &str = "dump";
/// Name format of those dumps, in local time.
const FLUX_DUMP: &str = "%Y%m%d_%H%M%S.tgz";
/// Link in that directory by which rc3 tells rc1 which dump to restore.
const RESTORE: &str = "RESTORE";
/// Number of those dumps that stay.
const KEEP: usize = 3;
/// Most entries of the directory of dumps that one removal reads, of which it keeps the newest. The brokers' user can make millions.
const MOST_LOOKED_AT: usize = 10_000;
/// Database of flux-core's content-sqlite module, which holds the whole KVS.
pub const CONTENT: &str = "content.sqlite";
const MODE: u32 = 0o700;
/// Mode of a statedir while its owner is being changed: no user can enter it.
const UNFINISHED: u32 = 0;

/// Ensures that `<prefix>/state` is the instance's statedir and belongs to the broker's user. `prefix` is this
/// process's path.
///
/// # Errors
/// If the instance was online once and its statedir is not here: an empty one would mean an empty queue. If its queue is here and
/// belongs to a user other than root and `owner`.
pub fn prepare(prefix: &Path, order: &StateDir, owner: Owner) -> Result<(), Refusal> {
    let dir = prefix.join(STATEDIR);
    keep_private(prefix)?;
    let found = read_id(&dir);
    if found.as_deref() == Some(&order.instance_id) {
        match refuse_other_owner(&dir, owner) {
            Ok(()) => return change_owner(&dir, owner),
            Err(refusal) if order.established || !is_empty(&dir) => return Err(refusal),
            // There is no queue in it.
            Err(_) => return make(prefix, &order.instance_id, owner, |_| Ok(())),
        }
    }
    if order.established {
        let instead = match (&found, trust::open_unless_user_mounted(&dir)) {
            (Some(other), _) => format!("the one here is of instance {other}"),
            (None, Ok(_)) => "the one here has no instance-id".to_owned(),
            (None, Err(error)) if error.kind() == io::ErrorKind::NotFound => "there is none".to_owned(),
            (None, Err(error)) => format!("the one here can't be opened: {error}"),
        };
        return Err(Refusal::new(format!(
            "the statedir of instance {} is gone from this host ({} should be it, but {instead}), and with it the \
             queue: put it back; or run `flux-distribute recover --lead NODE --from DUMP` in the pod of the node that \
             shall lead; or give the queue up with `flux-distribute reset --lead NODE`",
            order.instance_id,
            dir.display()
        )));
    }
    if bring_back(prefix, &order.instance_id, owner)? {
        return change_owner(&dir, owner);
    }
    make(prefix, &order.instance_id, owner, |_| Ok(()))
}

/// Moves the statedir of a kept instance back, which was moved aside for another instance. False if there is none.
fn bring_back(prefix: &Path, id: &str, owner: Owner) -> Result<bool, Refusal> {
    let name = format!("{STATEDIR}.{id}");
    let kept = prefix.join(&name);
    if read_id(&kept).as_deref() != Some(id) {
        return Ok(false);
    }
    refuse_other_owner(&kept, owner)?;
    move_aside(prefix)?;
    let moved = rename_in(prefix, &name, STATEDIR).and_then(|()| sync_parent(&kept));
    moved.map(|()| true).map_err(|error| Refusal::io("bring back", &kept, &error))
}

/// Makes a statedir that the broker fills from a dump when it starts: with `content.restore=auto` its rc1 restores the
/// dump that `dump/RESTORE` points to, and then removes the link. `read_dump` must write the dump to its argument.
///
/// # Errors
/// If `read_dump` fails, or the statedir can't be made; the present statedir stays then.
pub fn prepare_from_dump(
    prefix: &Path,
    instance_id: &str,
    owner: Owner,
    read_dump: impl FnOnce(&Path) -> Result<(), Refusal>,
) -> Result<(), Refusal> {
    make(prefix, instance_id, owner, |new| {
        let dumps = new.join(FLUX_DUMPS);
        make_dir(&dumps, MODE, Owner::ROOT)?;
        let file = dumps.join(RECOVERED);
        read_dump(&file)?;
        let link = dumps.join(RESTORE);
        let made = || -> io::Result<()> {
            std::os::unix::fs::symlink(RECOVERED, &link)?;
            sync_parent(&link)
        };
        made().map_err(|error| Refusal::io("make", &link, &error))
    })
}

/// Makes a new statedir, and moves the present one aside. The new one is made under a temporary name, so that a
/// statedir without an ID is never ours. Its owner is changed last: root reads and writes in it for a long time, and
/// its owner could put a symlink in place of any file meanwhile.
fn make(prefix: &Path, id: &str, owner: Owner, fill: impl FnOnce(&Path) -> Result<(), Refusal>) -> Result<(), Refusal> {
    let (dir, new) = (prefix.join(STATEDIR), prefix.join(format!(".{STATEDIR}.new")));
    let remove = |path: &Path| remove_all_if_there(path).map_err(|error| Refusal::io("remove", path, &error));
    remove(&new)?;
    make_dir(&new, MODE, Owner::ROOT)?;
    fill(&new).inspect_err(|_| drop(remove_all_if_there(&new)))?;
    write_atomic(&new.join(ID), format!("{id}\n").as_bytes(), 0o644, Owner::ROOT)?;
    let give_new = || give(&trust::open_unless_user_mounted(&new)?, owner);
    give_new().map_err(|error| Refusal::io("change the owner of", &new, &error))?;
    // A statedir that was made from a dump and never used can go: it holds only a copy of the dump.
    let has_dump =
        trust::open_unless_user_mounted(&dir).and_then(|dir| open_only_path_below(dir, &recovered())).is_ok();
    if has_dump && is_without(&dir, Path::new(CONTENT)) {
        remove(&dir)?;
    }
    move_aside(prefix)?;
    let made = rename_in(prefix, format!(".{STATEDIR}.new"), STATEDIR).and_then(|()| sync_parent(&dir));
    made.map_err(|error| Refusal::io("make", &dir, &error))
}

/// Where a statedir that was made from a dump has it.
fn recovered() -> PathBuf {
    Path::new(FLUX_DUMPS).join(RECOVERED)
}

/// True if the statedir `dir` certainly holds no queue, and no dump of which one is to be made.
fn is_empty(dir: &Path) -> bool {
    is_without(dir, Path::new(CONTENT)) && is_without(dir, &recovered())
}

/// True if `path` below the statedir `dir` certainly does not exist: a user may have mounted something over it, or an administrator
/// have put a symlink there.
fn is_without(dir: &Path, path: &Path) -> bool {
    let opened = trust::open_unless_user_mounted(dir).and_then(|dir| open_only_path_below(dir, path));
    opened.is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
}

/// Refuses if the queue of instance `id`, in use or kept, belongs to a user other than root and `owner`.
///
/// # Errors
/// A [`Refusal`] with the remedy.
pub fn check_owner(prefix: &Path, id: &str, owner: Owner) -> Result<(), Refusal> {
    let kept = [STATEDIR.to_owned(), format!("{STATEDIR}.{id}")].map(|name| prefix.join(name));
    kept.iter().filter(|dir| read_id(dir).as_deref() == Some(id)).try_for_each(|dir| refuse_other_owner(dir, owner))
}

/// Removes old dumps that Flux itself wrote: it adds one at each clean stop and removes none. Call it only while the
/// lead's broker is up: a broker that can't restore its dump may write another one at each try, and they would displace
/// the good ones. Returns how many were removed, and their bytes.
pub fn prune_dumps(prefix: &Path) -> (u64, u64) {
    // The broker's user owns the directories above and could put a link there, or a mount; root must not remove other files through
    // it.
    let opened = trust::open_unless_user_mounted(&prefix.join(STATEDIR))
        .and_then(|state| open_in(&state, OsStr::new(FLUX_DUMPS)));
    let Ok(dir) = opened else { return (0, 0) };
    let dir_path = path_of(&dir);
    let names = fs::read_dir(&dir_path).into_iter().flatten().flatten().map(|entry| entry.file_name());
    let is_flux_dump = |name: &OsString| name.to_str().is_some_and(|name| DateTime::strptime(FLUX_DUMP, name).is_ok());
    let mut names: Vec<_> = names.take(MOST_LOOKED_AT).filter(is_flux_dump).collect();
    names.sort();
    let restored = fs::read_link(dir_path.join(RESTORE)).ok();
    let restored = restored.as_deref().and_then(Path::file_name);
    // The dump that `recover --from` started from has no use either, once Flux has written a younger one.
    let recovered = (!names.is_empty()).then(|| OsString::from(RECOVERED));
    let old = names.iter().rev().skip(KEEP).chain(&recovered).filter(|name| Some(name.as_os_str()) != restored);
    let removed = old.filter_map(|name| {
        let bytes = look_in(&dir, name).ok()?.len();
        remove_if_there(&dir_path.join(name)).is_ok().then_some(bytes)
    });
    removed.fold((0, 0), |(count, sum), bytes| (count + 1, sum + bytes))
}

fn move_aside(prefix: &Path) -> Result<(), Refusal> {
    let dir = prefix.join(STATEDIR);
    let failed = |error: io::Error| Refusal::io("move aside", &dir, &error);
    if !opening::is_there(&dir).map_err(failed)? {
        return Ok(());
    }
    refuse_mounts(&dir, is_by_user).map_err(failed)?;
    let aside = free_name(prefix, read_id(&dir).as_deref().unwrap_or("unnamed")).map_err(failed)?;
    rename_in(prefix, STATEDIR, aside).map_err(failed)
}

/// IDs of the instances whose statedirs are below `prefix` (this process's path): in use, or moved aside once.
pub fn kept(prefix: &Path) -> BTreeSet<String> {
    let entries = fs::read_dir(prefix).into_iter().flatten().flatten();
    let found = entries.filter_map(|entry| {
        let id = read_id(&entry.path())?;
        let name = entry.file_name();
        (name == STATEDIR || name.to_str() == Some(&format!("{STATEDIR}.{id}"))).then_some(id)
    });
    found.collect()
}

/// True if the statedir of instance `id` is at `prefix`.
pub fn is_there(prefix: &Path, id: &str) -> bool {
    read_id(&prefix.join(STATEDIR)).as_deref() == Some(id)
}

/// Closes the statedir at `prefix` to other users. If a statedir was removed under a running lead, Flux makes a new one
/// for its dump when it stops, readable for all users, with all jobs' environments in it.
///
/// # Errors
/// If its mode can't be changed.
pub fn keep_private(prefix: &Path) -> Result<(), Refusal> {
    let dir = &prefix.join(STATEDIR);
    // If a user has mounted something over it, there is nothing of ours to close.
    let Ok(opened) = trust::open_unless_user_mounted(dir) else { return Ok(()) };
    let close = || match opened.metadata()?.permissions().mode() & 0o077 {
        0 => Ok(()),
        _ => opened.set_permissions(fs::Permissions::from_mode(MODE)),
    };
    close().map_err(|error: io::Error| Refusal::io("change the mode of", dir, &error))
}

fn read_id(dir: &Path) -> Option<String> {
    // The broker's user owns the directory, and could make root read another file by a link, or block on a pipe or a mount.
    let file = open_plain_below(trust::open_unless_user_mounted(dir).ok()?, Path::new(ID)).ok()?;
    let mut id = String::new();
    file.take(256).read_to_string(&mut id).ok()?;
    let id = id.trim();
    let plain = (1..=LONGEST_ID).contains(&id.len())
        && !id.starts_with('.')
        && id.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c));
    plain.then(|| id.to_owned())
}

fn free_name(prefix: &Path, id: &str) -> io::Result<String> {
    let mut name = format!("{STATEDIR}.{id}");
    let mut number = 0;
    while opening::is_there(&prefix.join(&name))? {
        number += 1;
        name = format!("{STATEDIR}.{id}.{number}");
    }
    Ok(name)
}

/// True for what a removal keeps if it shall keep the queue: `state`, a `state.<id>` that was moved aside, and dumps. Also
/// true if what it holds is unknown, such as because something is mounted on it.
pub fn is_kept(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let is_statedir = name == STATEDIR || name.starts_with("state.");
    (is_statedir || name == DUMPS)
        && match open_uncovered(path).map_err(|error| error.kind()) {
            Ok(directory) => !is_statedir || opening::is_there(&path_of(&directory).join(ID)).unwrap_or(true),
            Err(io::ErrorKind::NotFound) => false,
            // A file of that name, or an administrator's symlink to another place.
            Err(io::ErrorKind::NotADirectory) => fs::symlink_metadata(path).is_ok_and(|found| found.is_symlink()),
            Err(_) => true,
        }
}

/// Refuses a statedir of a user other than root and `owner`: whoever has had it could write jobs into the queue, and they would run as
/// `owner`.
fn refuse_other_owner(dir: &Path, owner: Owner) -> Result<(), Refusal> {
    let opened = trust::open_unless_user_mounted(dir).and_then(|dir| dir.metadata());
    let found = opened.map_err(|error| Refusal::io("examine", dir, &error))?.uid();
    if [0, owner.uid].contains(&found) {
        return Ok(());
    }
    let dir = dir.display();
    Err(Refusal::new(format!(
        "{dir} belongs to the user with uid {found}, and the brokers to the one with uid {}, so jobs that the former wrote into this queue \
         would run as the latter: if you trust what is in it, run `chown root {dir}`; or run `flux-distribute recover --lead NODE --from DUMP`; \
         or give the queue up with `flux-distribute reset --lead NODE`",
        owner.uid
    )))
}

/// Gives the statedir to `owner`. If its top is root's, its content too: it is new, an earlier change was not completed, or
/// somebody gave root the top alone, whose group tells it. If its top is `owner`'s already ([`refuse_other_owner`] lets nobody else's through), only the top's group and mode are set: that user may have moved
/// files of root's into it, which must stay root's.
fn change_owner(dir: &Path, owner: Owner) -> Result<(), Refusal> {
    let change = || -> io::Result<()> {
        let top = trust::open_unless_user_mounted(dir)?;
        let found = top.metadata()?;
        if found.uid() == 0 && (Owner::of(&found) != owner || found.mode() & 0o7777 == UNFINISHED) {
            give(&top, owner)
        } else {
            give_top(&top, owner)
        }
    };
    change().map_err(|error| Refusal::io("change the owner of", dir, &error))
}

/// Gives `top` and its content to `owner`. Processes of the former owner may still run and change files during the
/// walk. So each directory is closed to them before it is read, files are changed through open descriptors, and no
/// symlink is followed.
fn give(top: &File, owner: Owner) -> io::Result<()> {
    own(top, Owner::ROOT)?;
    top.set_permissions(fs::Permissions::from_mode(UNFINISHED))?;
    give_below(top, owner)?;
    give_top(top, owner)
}

fn give_top(top: &File, owner: Owner) -> io::Result<()> {
    own(top, owner)?;
    top.set_permissions(fs::Permissions::from_mode(MODE))
}

fn give_below(dir: &File, owner: Owner) -> io::Result<()> {
    for entry in Dir::from_fd(dir.try_clone()?.into())?.iter() {
        let entry = entry?;
        let name: &CStr = entry.file_name();
        if name == c"." || name == c".." {
            continue;
        }
        let found = match open_only_path_below(dir, Path::new(OsStr::from_bytes(name.to_bytes()))) {
            // What is mounted there is not ours to give.
            Err(error) if error.kind() == io::ErrorKind::CrossesDevices => continue,
            found => found?,
        };
        let status = fstat(&found)?;
        let kind = SFlag::from_bits_truncate(status.st_mode) & SFlag::S_IFMT;
        if kind == SFlag::S_IFDIR {
            let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
            let below = File::from(openat(&found, c".", flags, Mode::empty())?);
            own(&below, Owner::ROOT)?;
            below.set_permissions(fs::Permissions::from_mode(MODE))?;
            give_below(&below, owner)?;
        } else if kind == SFlag::S_IFREG && status.st_nlink > 1 {
            // Flux makes no hard links: the other name belongs to another user's file.
            continue;
        }
        own(&found, owner)?;
    }
    Ok(())
}

/// Sets the owner of the open `file` itself, even if it is a symlink.
fn own(file: impl AsFd, owner: Owner) -> io::Result<()> {
    let (uid, gid) = (Uid::from_raw(owner.uid), Gid::from_raw(owner.gid));
    Ok(fchownat(file, c"", Some(uid), Some(gid), AtFlags::AT_EMPTY_PATH)?)
}
