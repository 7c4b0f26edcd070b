//! From claim to removal.

use std::{
    fs,
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::Path,
    sync::mpsc::channel,
    time::Duration,
};

use host::{HostLock, state};
use hostapi::Undo;
use stage::{claim, observe};

use crate::support::*;

#[test]
fn a_removal_undoes_all_of_our_changes_and_nothing_else() {
    need_root!();
    let host = TestHost::new();
    let before = host.everything();
    host.claim().unwrap();
    host.environment(DIGEST, Some(COMPILED));
    host.configure(&configure_order()).unwrap();
    assert!(host.at("/flux-connect.sh").exists());
    assert_eq!(fs::read_link(host.at(COMPILED)).unwrap(), Path::new(PREFIX).join("envs").join(DIGEST));
    assert_ne!(host.everything(), before);
    host.remove(false).unwrap();
    assert_eq!(host.everything(), before);
    // Once more: it is clean already.
    host.remove(false).unwrap();
    assert_eq!(host.everything(), before);
}

#[test]
fn claiming_and_configuring_again_changes_nothing() {
    need_root!();
    let host = TestHost::new();
    host.claim().unwrap();
    host.environment(DIGEST, Some(COMPILED));
    host.configure(&configure_order()).unwrap();
    let (before, inode) = (host.everything(), fs::metadata(host.below("etc/broker.toml")).unwrap().ino());
    host.claim().unwrap();
    host.configure(&configure_order()).unwrap();
    assert_eq!(host.everything(), before);
    assert_eq!(fs::metadata(host.below("etc/broker.toml")).unwrap().ino(), inode);
}

/// A process that is killed while it replaces an old lock file leaves the lock under which it did so.
#[test]
fn what_a_stage_leaves_that_was_killed_at_the_lock_is_no_foreign_file() {
    need_root!();
    let host = TestHost::new();
    for name in ["lock", "lock.replacing"] {
        host.write(&format!("{PREFIX}/{name}"), "");
        fs::set_permissions(host.below(name), fs::Permissions::from_mode(0o600)).unwrap();
    }
    let held = host::HostLock::take(&host.root, Path::new(PREFIX), Duration::ZERO).unwrap();
    host.remove(false).unwrap();
    assert!(host.below("lock").exists(), "a claim may be under way");
    drop(held);
    host.claim().unwrap();
    host.remove(false).unwrap();
    assert!(!host.below("").exists());
}

#[test]
fn a_prefix_with_foreign_files_is_refused() {
    let host = TestHost::new();
    host.write(&format!("{PREFIX}/theirs"), "");
    let refusal = host.claim().unwrap_err();
    assert!(refusal.message.contains("theirs") && refusal.message.contains("spec.prefix"), "{refusal}");
    assert!(host.state().is_none());
    for prefix in ["/opt/../etc", "/", "/opt", "opt/flux"] {
        assert!(claim(&host.root, &claim_order(prefix, "uid-1")).is_err(), "{prefix}");
    }
}

#[test]
fn a_prefix_that_lost_its_state_is_claimed_again_if_all_in_it_is_ours() {
    need_root!();
    let host = TestHost::new();
    let roster = format!("{PREFIX}/etc/roster.json");
    for (uid, other, told) in [
        ("uid-1", None, None),
        ("uid-1", Some("theirs"), Some("theirs")),
        ("uid-1", Some(".state.json.new"), None),
        ("uid-2", None, Some("uid-2")),
    ] {
        host.claim().unwrap();
        host.environment(DIGEST, None);
        host.configure(&configure_order()).unwrap();
        // A start makes it.
        fs::create_dir(host.below("run")).unwrap();
        fs::remove_file(host.below("state.json")).unwrap();
        host.write(&roster, &format!("{{\"instanceUID\": \"{uid}\"}}"));
        other.iter().for_each(|name| host.write(&format!("{PREFIX}/{name}"), ""));
        let claimed = host.claim();
        match told {
            None => claimed.unwrap(),
            Some(told) => {
                let refusal = claimed.unwrap_err();
                assert!(refusal.message.contains(told) && refusal.message.contains("state.json is gone"), "{refusal}");
            }
        }
        fs::remove_dir_all(host.below("")).unwrap();
    }
}

#[test]
fn another_instance_and_another_prefix_wait_until_the_host_is_clean() {
    need_root!();
    let host = TestHost::new();
    host.claim().unwrap();
    assert!(claim(&host.root, &claim_order(PREFIX, "uid-2")).unwrap_err().message.contains("uid-1"));
    assert!(claim(&host.root, &claim_order("/data/flux", "uid-1")).unwrap_err().message.contains(PREFIX));
    assert!(!host.at("/data").exists());
    host.remove(false).unwrap();
    claim(&host.root, &claim_order("/data/flux", "uid-2")).unwrap();
}

#[test]
fn a_claim_that_was_killed_is_finished_by_the_next_or_removed() {
    need_root!();
    for finish in [true, false] {
        let host = TestHost::new();
        let before = host.everything();
        fs::create_dir_all(host.below("")).unwrap();
        fs::write(host.below("lock"), "").unwrap();
        fs::write(host.below(".state.json.new"), "{\"form").unwrap();
        if finish {
            host.claim().unwrap();
            assert_eq!(host.state().unwrap().instance_uid, "uid-1");
        }
        host.remove(false).unwrap();
        assert_eq!(host.everything(), before);
    }
}

#[test]
fn a_custom_prefix_is_found_without_a_hint_and_removed_completely() {
    need_root!();
    let host = TestHost::new();
    let before = host.everything();
    claim(&host.root, &claim_order("/data/site/flux", "uid-1")).unwrap();
    assert_eq!(host.state().unwrap().prefix, Path::new("/data/site/flux"));
    // A removal that was killed after state.json had gone.
    fs::remove_dir_all(host.at("/data/site/flux")).unwrap();
    assert_eq!(host.state().unwrap().instance_uid, "uid-1");
    host.remove(false).unwrap();
    assert_eq!(host.everything(), before);
}

/// Versions before this one took any character.
#[test]
fn a_host_keeps_an_odd_prefix_until_it_is_cleaned_and_no_other_host_claims_it() {
    need_root!();
    const ODD: &str = "/data/my flux";
    let host = TestHost::new();
    let before = host.everything();
    let refusal = claim(&host.root, &claim_order(ODD, "uid-1")).unwrap_err();
    assert!(refusal.message.contains("spec.prefix: \"/data/my flux\" has characters other than"), "{refusal}");
    assert_eq!(host.everything(), before);

    claim(&host.root, &claim_order("/data/our_flux", "uid-1")).unwrap();
    fs::rename(host.at("/data/our_flux"), host.at(ODD)).unwrap();
    for (path, text) in host.everything().into_iter().filter(|(_, text)| text.contains("our_flux")) {
        fs::write(path, text.replace("our_flux", "my flux")).unwrap();
    }
    assert_eq!(host.state().unwrap().prefix, Path::new(ODD));
    claim(&host.root, &claim_order(ODD, "uid-1")).unwrap();
    host.remove(false).unwrap();
    assert_eq!(host.everything(), before);
}

/// A foreign file system, mounted until this is dropped.
struct Mounted(std::path::PathBuf);

impl Mounted {
    fn at(path: std::path::PathBuf) -> Self {
        fs::create_dir_all(&path).unwrap();
        nix::mount::mount(Some("theirs"), &path, Some("tmpfs"), nix::mount::MsFlags::empty(), None::<&str>).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        fs::write(path.join("precious"), "theirs").unwrap();
        Self(path)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        nix::mount::umount2(&self.0, nix::mount::MntFlags::MNT_DETACH).unwrap();
    }
}

#[test]
fn nothing_is_removed_while_something_is_mounted_in_what_is_ours() {
    need_root!();
    for place in ["data", "envs/deep/down"] {
        let host = TestHost::new();
        let before = host.everything();
        host.claim().unwrap();
        host.environment(DIGEST, None);
        let all = host.everything();
        let mounted = Mounted::at(host.below(place));
        let refusal = host.remove(false).unwrap_err();
        assert!(refusal.transient, "{refusal}");
        assert!(refusal.message.contains(&format!("{}: unmount it", mounted.0.display())), "{refusal}");
        assert_eq!(fs::read_to_string(mounted.0.join("precious")).unwrap(), "theirs");
        assert!(all.keys().all(|path| path.symlink_metadata().is_ok()), "something was removed");
        drop(mounted);
        host.remove(false).unwrap();
        assert_eq!(host.everything(), before);
    }
}

#[test]
fn files_of_a_disk_mounted_over_the_prefix_are_not_removed() {
    need_root!();
    for point in ["/data/site", "/data/site/flux"] {
        let host = TestHost::new();
        let before = host.everything();
        claim(&host.root, &claim_order("/data/site/flux", "uid-1")).unwrap();
        let mounted = Mounted::at(host.at(point));
        let precious = host.at("/data/site/flux/precious");
        fs::create_dir_all(precious.parent().unwrap()).unwrap();
        fs::write(&precious, "theirs").unwrap();
        let refusal = host.remove(false).unwrap_err();
        assert!(refusal.message.contains("it holds precious"), "{refusal}");
        assert_eq!(fs::read_to_string(&precious).unwrap(), "theirs");
        drop(mounted);
        host.remove(false).unwrap();
        assert_eq!(host.everything(), before);
    }
}

#[test]
fn a_prefix_on_a_disk_of_its_own_is_emptied() {
    need_root!();
    let host = TestHost::new();
    let mounted = Mounted::at(host.root.path(Path::new(PREFIX)));
    fs::remove_file(mounted.0.join("precious")).unwrap();
    host.claim().unwrap();
    host.environment(DIGEST, None);
    host.remove(false).unwrap();
    assert_eq!(fs::read_dir(&mounted.0).unwrap().count(), 0);
}

#[test]
fn each_change_is_recorded_in_the_undo_list_before_it_is_made() {
    need_root!();
    let host = TestHost::new();
    host.claim().unwrap();
    host.environment(DIGEST, Some(COMPILED));
    // A directory in the way of the link's rename: the record stands although the link was never made.
    fs::create_dir_all(host.at("/usr/site/.flux.new")).unwrap();
    assert!(host.configure(&configure_order()).is_err());
    let undo = host.state().unwrap().undo;
    assert!(
        undo.iter().any(|undo| matches!(undo, Undo::Symlink { path, .. } if path == Path::new(COMPILED))),
        "{undo:?}"
    );
}

#[test]
fn a_removal_that_was_killed_anywhere_is_finished_by_the_next_run() {
    need_root!();
    let host = TestHost::new();
    let before = host.everything();
    // What a killed removal can have taken off already: any of these, before state.json.
    for gone in ["envs", "etc", "state", "lock", "current", "../../flux-connect.sh", "../../usr/site/flux"] {
        host.claim().unwrap();
        host.environment(DIGEST, Some(COMPILED));
        host.configure(&configure_order()).unwrap();
        let path = host.below(gone);
        if fs::symlink_metadata(&path).unwrap().is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) }
            .unwrap();
        assert!(host.state().is_some(), "{gone}");
        host.remove(false).unwrap();
        assert_eq!(host.everything(), before, "{gone}");
    }
}

#[test]
fn the_undo_list_stays_if_a_change_can_not_be_undone() {
    need_root!();
    let host = TestHost::new();
    host.claim().unwrap();
    host.environment(DIGEST, None);
    host.configure(&configure_order()).unwrap();
    fs::remove_file(host.at("/flux-connect.sh")).unwrap();
    fs::create_dir(host.at("/flux-connect.sh")).unwrap();
    assert!(host.remove(false).unwrap_err().message.contains("flux-connect.sh"));
    assert!(host.state().is_some());
    // The others were undone all the same.
    assert_eq!(fs::read_to_string(host.at("/proc/sys/fs/inotify/max_user_instances")).unwrap(), "128");
    fs::remove_dir(host.at("/flux-connect.sh")).unwrap();
    host.remove(false).unwrap();
    assert!(host.state().is_none());
}

#[test]
fn a_broker_that_still_runs_is_stopped_before_its_host_is_cleaned() {
    need_root!();
    let host = TestHost::new();
    host.claim().unwrap();
    *host.brokers.running.borrow_mut() = Some(running(0, "id-1"));
    host.remove(false).unwrap();
    assert_eq!(*host.brokers.calls.borrow(), ["stop", "forget"]);
}

#[test]
fn one_stage_at_a_time_writes_and_a_removed_lock_is_not_held() {
    need_root!();
    let host = TestHost::new();
    host.claim().unwrap();
    let held = HostLock::take(&host.root, Path::new(PREFIX), Duration::ZERO).unwrap();
    assert!(HostLock::take(&host.root, Path::new(PREFIX), Duration::ZERO).unwrap_err().transient);
    let (send, receive) = channel();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let taken = HostLock::take(&host.root, Path::new(PREFIX), Duration::from_secs(20));
            send.send(taken).unwrap();
        });
        // The waiter may hold the file that goes: it must end up with the one that is there.
        fs::remove_file(host.below("lock")).unwrap();
        drop(held);
        let _taken = receive.recv().unwrap().unwrap();
        assert!(HostLock::take(&host.root, Path::new(PREFIX), Duration::ZERO).is_err());
    });
}

#[test]
fn a_state_json_of_a_newer_version_is_refused() {
    need_root!();
    let host = TestHost::new();
    host.claim().unwrap();
    let mut newer = host.state().unwrap();
    newer.format = state::FORMAT + 1;
    state::save(&host.root, &newer).unwrap();
    assert!(host.remove(false).unwrap_err().message.contains("newer"));
    host.write(&format!("{PREFIX}/state.json"), "{");
    assert!(observe(&host.root, &host.brokers).is_err());
    assert!(host.below("envs").exists());
}
