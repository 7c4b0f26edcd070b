use std::os::unix::fs::symlink;

use super::*;
use crate::needs::{Need, skips_without};

const FLUX: Owner = Owner { uid: 500, gid: 501 };

/// A directory for the test. None if the test can't run: only root can give files away.
fn directory() -> Option<tempfile::TempDir> {
    if skips_without([Need::Root]) { None } else { Some(tempfile::tempdir().unwrap()) }
}

fn owner(path: &Path) -> Owner {
    Owner::of(&fs::symlink_metadata(path).unwrap())
}

#[test]
fn a_statedir_from_a_dump_is_roots_until_it_is_complete() {
    let Some(dir) = directory() else { return };
    let (prefix, shadow) = (dir.path().join("prefix"), dir.path().join("shadow"));
    fs::create_dir(&prefix).unwrap();
    fs::write(&shadow, "secret").unwrap();
    let read_dump = |path: &Path| {
        for above in [path.parent().unwrap(), path.parent().unwrap().parent().unwrap()] {
            assert_eq!(owner(above), Owner::ROOT);
        }
        // If the directory were the user's already, that user could do this while the dump is read.
        symlink(&shadow, path).unwrap();
        Ok(())
    };
    prepare_from_dump(&prefix, "id-1", FLUX, read_dump).unwrap();
    assert_eq!(owner(&shadow), Owner::ROOT);
    for path in ["state", "state/instance-id", "state/dump", "state/dump/recovered.tgz", "state/dump/RESTORE"] {
        assert_eq!(owner(&prefix.join(path)), FLUX, "{path}");
    }
}

#[test]
fn a_kept_queue_comes_back_with_its_instance_and_the_other_is_kept() {
    let Some(dir) = directory() else { return };
    let prefix = dir.path();
    let order = |id: &str, established| StateDir { instance_id: id.into(), established };
    let queue = |path: &str| fs::read_to_string(prefix.join(path).join(CONTENT)).ok();
    let ids = |ids: &[&str]| ids.iter().map(|id| (*id).to_owned()).collect();
    for id in ["old", "new"] {
        prepare(prefix, &order(id, false), FLUX).unwrap();
        fs::write(prefix.join("state").join(CONTENT), id).unwrap();
    }
    assert_eq!((queue("state").as_deref(), queue("state.old").as_deref()), (Some("new"), Some("old")));
    assert_eq!(kept(prefix), ids(&["new", "old"]));
    assert!(prepare(prefix, &order("old", true), FLUX).is_err(), "only an administrator may bring back a lost queue");
    for _ in 0..2 {
        prepare(prefix, &order("old", false), FLUX).unwrap();
        assert_eq!((queue("state").as_deref(), queue("state.new").as_deref()), (Some("old"), Some("new")));
        assert_eq!(owner(&prefix.join("state").join(CONTENT)), Owner::ROOT, "files change only with the owner");
        assert!(!prefix.join("state.old").exists());
        assert_eq!(kept(prefix), ids(&["new", "old"]));
        // As if killed between the two renames.
        fs::rename(prefix.join("state"), prefix.join("state.old")).unwrap();
    }
}

#[test]
fn a_new_owner_gets_the_whole_statedir_and_nothing_that_it_links_to() {
    let Some(dir) = directory() else { return };
    let prefix = dir.path();
    fs::create_dir(prefix.join("etc")).unwrap();
    fs::write(prefix.join("etc/shadow"), "secret").unwrap();
    let order = StateDir { instance_id: "id-1".into(), established: false };
    prepare(prefix, &order, FLUX).unwrap();
    fs::create_dir(prefix.join("state/dump")).unwrap();
    fs::write(prefix.join("state/dump/1.tgz"), "jobs").unwrap();
    symlink("../etc/shadow", prefix.join("state/link")).unwrap();
    symlink("../etc", prefix.join("state/etc")).unwrap();
    fs::hard_link(prefix.join("etc/shadow"), prefix.join("state/hard")).unwrap();

    let other = Owner { uid: 4242, gid: 4242 };
    // As it was put back from a backup.
    own(File::open(prefix.join("state")).unwrap(), Owner::ROOT).unwrap();
    for _ in 0..2 {
        prepare(prefix, &order, other).unwrap();
        for path in ["state", "state/instance-id", "state/dump", "state/dump/1.tgz", "state/link", "state/etc"] {
            assert_eq!(owner(&prefix.join(path)), other, "{path}");
        }
        for path in ["etc", "etc/shadow"] {
            assert_eq!(owner(&prefix.join(path)), Owner::ROOT, "{path}");
        }
        // The state after an interrupted change.
        std::os::unix::fs::chown(prefix.join("state/dump"), Some(FLUX.uid), Some(FLUX.gid)).unwrap();
        own(File::open(prefix.join("state")).unwrap(), Owner::ROOT).unwrap();
        fs::set_permissions(prefix.join("state"), fs::Permissions::from_mode(UNFINISHED)).unwrap();
    }
}

#[test]
fn a_file_of_roots_that_the_brokers_user_has_moved_into_the_statedir_stays_roots() {
    let Some(dir) = directory() else { return };
    let prefix = dir.path();
    let order = StateDir { instance_id: "id-1".into(), established: true };
    prepare(prefix, &StateDir { established: false, ..order.clone() }, FLUX).unwrap();
    let (state, moved) = (prefix.join("state"), prefix.join("state/notes"));
    fs::write(&moved, "root's").unwrap();
    let of_another_group = || std::os::unix::fs::chown(&state, None, Some(4242)).unwrap();
    let sticky = || fs::set_permissions(&state, fs::Permissions::from_mode(0o1700)).unwrap();
    for change in [&of_another_group as &dyn Fn(), &sticky] {
        change();
        prepare(prefix, &order, FLUX).unwrap();
        assert_eq!((owner(&moved), owner(&state)), (Owner::ROOT, FLUX));
        assert_eq!(fs::metadata(&state).unwrap().permissions().mode() & 0o7777, MODE);
    }
}

#[test]
fn root_gets_all_of_a_statedir_of_which_it_was_given_the_top() {
    let Some(dir) = directory() else { return };
    let prefix = dir.path();
    let order = StateDir { instance_id: "id-1".into(), established: false };
    prepare(prefix, &order, FLUX).unwrap();
    fs::write(prefix.join("state/content.sqlite"), "jobs").unwrap();
    std::os::unix::fs::chown(prefix.join("state/content.sqlite"), Some(FLUX.uid), Some(FLUX.gid)).unwrap();
    // The remedy that `refuse_other_owner` names.
    std::os::unix::fs::chown(prefix.join("state"), Some(0), None).unwrap();
    prepare(prefix, &order, Owner::ROOT).unwrap();
    for path in ["state", "state/instance-id", "state/content.sqlite"] {
        assert_eq!(owner(&prefix.join(path)), Owner::ROOT, "{path}");
    }
}

#[test]
fn a_statedir_is_moved_aside_however_long_an_id_its_user_wrote() {
    let Some(dir) = directory() else { return };
    let prefix = dir.path();
    for (length, aside) in
        [(LONGEST_ID, format!("state.{}", "a".repeat(LONGEST_ID))), (251, "state.unnamed".to_owned())]
    {
        fs::create_dir(prefix.join("state")).unwrap();
        fs::write(prefix.join("state/instance-id"), "a".repeat(length)).unwrap();
        prepare(prefix, &StateDir { instance_id: "id-1".into(), established: false }, FLUX).unwrap();
        assert!(prefix.join(aside).is_dir(), "{:?}", left(prefix));
        fs::remove_dir_all(prefix.join("state")).unwrap();
    }
}

fn left(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn the_newest_of_fluxs_own_dumps_and_the_one_to_restore_are_kept() {
    let prefix = tempfile::tempdir().unwrap();
    let dir = prefix.path().join("state/dump");
    assert_eq!(prune_dumps(prefix.path()), (0, 0), "there is none");
    fs::create_dir_all(&dir).unwrap();
    let day = |day: usize| format!("2026110{day}_080910.tgz");
    let others = ["20261101.tgz", "RESTORE", "mine_20261101_080910.tgz"];
    (1..=6).for_each(|n| fs::write(dir.join(day(n)), "dump").unwrap());
    others.iter().filter(|name| **name != "RESTORE").for_each(|name| fs::write(dir.join(name), "").unwrap());
    fs::write(dir.join("recovered.tgz"), "theirs").unwrap();
    symlink(day(2), dir.join("RESTORE")).unwrap();
    assert_eq!(prune_dumps(prefix.path()), (3, 14));
    let mut expected: Vec<_> = [2, 4, 5, 6].map(day).into_iter().chain(others.map(str::to_owned)).collect();
    expected.sort();
    assert_eq!(left(&dir), expected);
    assert_eq!(prune_dumps(prefix.path()), (0, 0), "a second run removes nothing more");
}

#[test]
fn of_millions_of_files_among_the_dumps_only_some_are_looked_at() {
    let prefix = tempfile::tempdir().unwrap();
    let dir = prefix.path().join("state/dump");
    fs::create_dir_all(&dir).unwrap();
    let name = |second: usize| format!("20261101_{:02}{:02}{:02}.tgz", second / 3600, second / 60 % 60, second % 60);
    (0..MOST_LOOKED_AT + 100).for_each(|second| drop(fs::File::create(dir.join(name(second))).unwrap()));
    assert_eq!(prune_dumps(prefix.path()).0, (MOST_LOOKED_AT - KEEP) as u64);
    assert_eq!(prune_dumps(prefix.path()).0, 100, "the next run goes on");
    assert_eq!(left(&dir).last().unwrap(), &name(MOST_LOOKED_AT + 99));
}

#[test]
fn the_dump_of_a_recovery_stays_until_flux_has_written_another() {
    let prefix = tempfile::tempdir().unwrap();
    let dir = prefix.path().join("state/dump");
    fs::create_dir_all(&dir).unwrap();
    fs::write(dir.join("recovered.tgz"), "dump").unwrap();
    assert_eq!(prune_dumps(prefix.path()), (0, 0), "it is the only one");
    fs::write(dir.join("20261101_080910.tgz"), "dump").unwrap();
    symlink("recovered.tgz", dir.join("RESTORE")).unwrap();
    assert_eq!(prune_dumps(prefix.path()), (0, 0), "it is to be restored");
    // Flux removes the link once it has restored the dump.
    fs::remove_file(dir.join("RESTORE")).unwrap();
    assert_eq!(prune_dumps(prefix.path()), (1, 4));
    assert_eq!(left(&dir), ["20261101_080910.tgz"]);
}

#[test]
fn a_link_in_place_of_the_dumps_is_not_followed() {
    let (prefix, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    (1..=6).for_each(|n| fs::write(elsewhere.path().join(format!("2026110{n}_080910.tgz")), "").unwrap());
    fs::create_dir(prefix.path().join("state")).unwrap();
    symlink(elsewhere.path(), prefix.path().join("state/dump")).unwrap();
    assert_eq!(prune_dumps(prefix.path()), (0, 0));
    assert_eq!(left(elsewhere.path()).len(), 6);
}
