//! Which of a host's files the program trusts, depending on their owners.

use std::{
    fs,
    os::unix::fs::{MetadataExt, PermissionsExt, chown, lchown, symlink},
    path::Path,
    thread,
    time::Duration,
};

use host::{HostLock, Root, state};
use hostapi::{PreflightOrder, RemoveOrder, Undo};
use nix::{
    errno::Errno,
    sys::{
        inotify::{AddWatchFlags, InitFlags, Inotify},
        stat::Mode,
    },
    unistd::mkfifo,
};
use stage::{claim, observe, preflight, remove};

use crate::{
    needs::{Need, skips_without},
    support::*,
    users_mounts::UsersMount,
};

/// A user of the host, whose home is where GKE's containerized tools are on other hosts.
const USER: u32 = 500;
const HOME: &str = "/home/kubernetes";

fn host_with_a_user() -> TestHost {
    let host = TestHost::new();
    host.write("/srv/victim/precious", "theirs");
    fs::create_dir_all(host.at(HOME).join("flux-distribute")).unwrap();
    for path in [host.at(HOME), host.at(HOME).join("flux-distribute")] {
        chown(path, Some(USER), None).unwrap();
    }
    host
}

fn plant(host: &TestHost, prefix: &str) {
    let text = serde_json::json!({
        "format": 1, "instanceUID": "planted", "prefix": prefix,
        "undo": [{ "kind": "file", "path": "/etc/passwd" }],
    });
    for name in ["state.json", "prefix.json"] {
        let path = format!("{HOME}/flux-distribute/{name}");
        host.write(&path, &text.to_string());
        chown(host.at(&path), Some(USER), None).unwrap();
    }
}

fn troubles(host: &TestHost, prefix: Option<&str>) -> Vec<Option<String>> {
    let order = PreflightOrder { prefix: prefix.map(Into::into), endpoint: ([0; 4], 8050).into(), need_bytes: 0 };
    let seen = preflight::examine(&host.root, &host.brokers, &order).unwrap();
    seen.places.into_iter().map(|place| place.trouble).collect()
}

#[test]
fn a_state_that_a_user_has_planted_claims_nothing_and_deletes_nothing() {
    need_root!();
    for prefix in ["/srv/victim", "/home/kubernetes/flux-distribute"] {
        let host = host_with_a_user();
        plant(&host, prefix);
        let before = host.everything();
        assert_eq!(host.state(), None);
        host.remove(false).unwrap();
        assert_eq!(host.everything(), before);

        host.claim().unwrap();
        assert_eq!(host.state().unwrap().instance_uid, "uid-1");
        host.remove(false).unwrap();
        assert_eq!(host.everything(), before);

        // One that is claimed where only a pointer leads: the candidates are looked at before it.
        claim(&host.root, &claim_order("/data/flux", "uid-1")).unwrap();
        assert_eq!(host.state().unwrap().prefix, Path::new("/data/flux"));
        host.remove(false).unwrap();
        assert_eq!(host.everything(), before);
    }
}

#[test]
fn a_pipe_in_place_of_state_json_does_not_block() {
    need_root!();
    let host = host_with_a_user();
    for name in ["state.json", "prefix.json"] {
        mkfifo(&host.at(HOME).join("flux-distribute").join(name), Mode::from_bits_truncate(0o666)).unwrap();
    }
    assert_eq!(host.state(), None);
    host.claim().unwrap();
    assert!(host.state().is_some());
    // If only root can have put it there, it is reported.
    fs::remove_file(host.below("state.json")).unwrap();
    mkfifo(&host.below("state.json"), Mode::from_bits_truncate(0o600)).unwrap();
    let refusal = observe(&host.root, &host.brokers).unwrap_err();
    assert!(refusal.message.contains(&format!("{PREFIX}/state.json is not a plain file")), "{refusal}");
}

#[test]
fn a_claim_that_others_can_write_to_is_refused_with_the_remedy_until_it_is_closed() {
    need_root!();
    let host = TestHost::new();
    host.claim().unwrap();
    let state = host.state().unwrap();
    for (path, mode) in [("/opt", 0o775), (PREFIX, 0o1777), ("/opt/flux-distribute/state.json", 0o646)] {
        let before = fs::metadata(host.at(path)).unwrap().permissions();
        fs::set_permissions(host.at(path), fs::Permissions::from_mode(mode)).unwrap();
        for refusal in [observe(&host.root, &host.brokers).unwrap_err(), host.remove(false).unwrap_err()] {
            assert!(refusal.message.contains(&format!("`chmod go-w {path}`")), "{refusal}");
        }
        assert!(host.below("envs").exists());
        fs::set_permissions(host.at(path), before).unwrap();
        assert_eq!(host.state().as_ref(), Some(&state), "{path}");
    }
}

#[test]
fn preflight_and_claim_refuse_a_place_where_others_can_write_with_the_remedy() {
    need_root!();
    let host = host_with_a_user();
    fs::create_dir(host.at("/shared")).unwrap();
    fs::set_permissions(host.at("/shared"), fs::Permissions::from_mode(0o1777)).unwrap();
    let before = host.everything();
    for (prefix, words) in [
        ("/shared/flux", "`chmod go-w /shared`"),
        ("/home/kubernetes/flux", "/home/kubernetes belongs to the user with uid 500"),
    ] {
        let trouble = troubles(&host, Some(prefix)).remove(0).unwrap();
        assert!(trouble.contains(words), "{trouble}");
        let refusal = claim(&host.root, &claim_order(prefix, "uid-1")).unwrap_err();
        assert!(refusal.message.contains(words), "{refusal}");
    }
    assert_eq!(host.everything(), before);
    // Among the candidates, the next one is taken.
    let troubles = troubles(&host, None);
    assert!(troubles[0].is_none() && troubles[1].is_none() && troubles[2].is_some(), "{troubles:?}");
}

#[test]
fn a_state_json_counts_only_for_its_own_directory() {
    need_root!();
    let host = TestHost::new();
    host.write("/srv/victim/precious", "theirs");
    host.claim().unwrap();
    let text = fs::read_to_string(host.below("state.json")).unwrap();
    fs::write(host.below("state.json"), text.replace(PREFIX, "/srv/victim")).unwrap();
    let refusal = host.remove(false).unwrap_err();
    assert!(refusal.message.contains("below /srv/victim, which is another directory"), "{refusal}");
    assert!(host.at("/srv/victim/precious").exists() && host.below("envs").exists());
}

#[test]
fn changes_that_we_never_make_are_never_undone() {
    need_root!();
    let host = TestHost::new();
    host.write("/proc/sys/kernel/core_pattern", "1\n");
    fs::create_dir_all(host.at("/srv/empty")).unwrap();
    let before = host.everything();
    host.claim().unwrap();
    let mut state = host.state().unwrap();
    state.undo.extend([
        Undo::File { path: "/etc/passwd".into() },
        Undo::File { path: "/opt/../etc/passwd".into() },
        Undo::Sysctl { name: "kernel.core_pattern".into(), old: 2, new: 1 },
        Undo::Directory { path: "/srv/empty".into() },
        Undo::Symlink { path: "/usr/bin/other".into(), made_parent: Some("/srv/empty".into()) },
    ]);
    state::save(&host.root, &state).unwrap();
    host.remove(false).unwrap();
    assert_eq!(host.everything(), before);
}

#[test]
fn no_directory_is_made_or_given_away_through_a_users_link() {
    need_root!();
    let host = host_with_a_user();
    fs::remove_dir(host.at(HOME).join("flux-distribute")).unwrap();
    symlink("/srv/victim", host.at(HOME).join("flux-distribute")).unwrap();
    std::os::unix::fs::lchown(host.at(HOME).join("flux-distribute"), Some(USER), None).unwrap();
    let before = host.everything();
    assert!(claim(&host.root, &claim_order("/home/kubernetes/flux-distribute", "uid-1")).is_err());
    assert!(claim(&host.root, &claim_order("/home/kubernetes/flux-distribute/below", "uid-1")).is_err());
    assert_eq!(host.everything(), before);
}

#[test]
fn files_that_a_user_put_into_an_open_prefix_neither_block_nor_count() {
    need_root!();
    let host = TestHost::new();
    let open = || fs::set_permissions(host.below(""), fs::Permissions::from_mode(0o1777)).unwrap();
    fs::create_dir(host.below("")).unwrap();
    open();
    host.claim().unwrap();
    assert_eq!(fs::metadata(host.below("")).unwrap().permissions().mode() & 0o7777, 0o755);
    host.remove(false).unwrap();

    fs::create_dir_all(host.below("etc")).unwrap();
    open();
    mkfifo(&host.below("etc/roster.json"), Mode::from_bits_truncate(0o666)).unwrap();
    chown(host.below("etc"), Some(USER), None).unwrap();
    let refusal = host.claim().unwrap_err();
    assert!(refusal.message.contains(&format!("it holds etc, owned by uid {USER}")), "{refusal}");
}

/// What a removal keeps looks the same, and its owner is any brokers' user: in an open prefix it is unknown who put it there.
#[test]
fn an_open_prefix_is_claimed_only_if_root_owns_everything_in_it() {
    need_root!();
    let planted: [(&str, &str); 4] = [
        ("dump/id-1-20261120T222003Z.tgz", "dump"),
        ("state.id-1/instance-id", "id-1\n"),
        ("state/instance-id", "id-1\n"),
        ("state.json", "{}"),
    ];
    for (path, content) in planted {
        let host = TestHost::new();
        let top = Path::new(path).iter().next().unwrap().to_str().unwrap();
        host.write(&format!("{PREFIX}/{path}"), content);
        chown(host.below(top), Some(USER), None).unwrap();
        fs::set_permissions(host.below(""), fs::Permissions::from_mode(0o1777)).unwrap();
        let before = host.everything();
        let refusal = host.claim().unwrap_err();
        let words = [format!("holds {top}, owned by uid {USER}"), format!("chmod go-w {PREFIX}")];
        assert!(words.iter().all(|word| refusal.message.contains(word)), "{refusal}");
        assert_eq!(host.everything(), before);
        assert_eq!(fs::metadata(host.below("")).unwrap().permissions().mode() & 0o7777, 0o1777);

        chown(host.below(top), Some(0), None).unwrap();
        let is_kept = top != "state.json";
        assert_eq!(host.claim().is_ok(), is_kept, "{top}");
    }
}

#[test]
fn files_that_a_removal_kept_are_recognized_whoever_the_brokers_user_was() {
    need_root!();
    let host = TestHost::new();
    host.claim().unwrap();
    host.environment(DIGEST, None);
    host.configure(&configure_order()).unwrap();
    host.remove(true).unwrap();
    assert_eq!(fs::metadata(host.below("state")).unwrap().uid(), USER);
    host.claim().unwrap();
}

/// A user may mount a file system over a home, and then even root is refused a look at what is there.
#[test]
fn a_file_system_that_a_user_has_mounted_does_not_block_a_claim() {
    if skips_without([Need::Fuse]) {
        return;
    }
    for prefix in [PREFIX, "/data/flux"] {
        let host = host_with_a_user();
        let before = host.everything();
        let mounted = UsersMount::at(host.at(HOME));
        assert_eq!(fs::metadata(&mounted.point).unwrap_err().raw_os_error(), Some(Errno::EACCES as i32));
        assert_eq!(host.state(), None);
        assert!(troubles(&host, Some(prefix))[0].is_none());
        assert!(troubles(&host, None)[2].as_ref().unwrap().contains(HOME));
        claim(&host.root, &claim_order(prefix, "uid-1")).unwrap();
        assert_eq!(host.state().unwrap().prefix, Path::new(prefix));
        let refusal = claim(&host.root, &claim_order("/home/kubernetes/flux-distribute", "uid-1")).unwrap_err();
        assert!(refusal.message.contains("is already claimed"), "{refusal}");
        host.remove(false).unwrap();
        let refusal = claim(&host.root, &claim_order("/home/kubernetes/flux-distribute", "uid-1")).unwrap_err();
        assert!(refusal.message.contains(HOME), "{refusal}");
        drop(mounted);
        assert_eq!(host.everything(), before);
    }
}

/// It may show a file of root there, or never answer. FUSE mounts over a file too, and root may look into one that is mounted with
/// `allow_other`.
#[test]
fn a_file_system_that_a_user_has_mounted_over_a_file_is_not_asked() {
    if skips_without([Need::Fuse]) {
        return;
    }
    let host = host_with_a_user();
    for name in ["state.json", "prefix.json"] {
        host.write(&format!("{HOME}/flux-distribute/{name}"), "{}");
        let mounted = UsersMount::that_never_answers(host.at(HOME).join("flux-distribute").join(name));
        mounted.is_not_asked(|| {
            assert_eq!(host.state(), None, "{name}");
            assert!(observe(&host.root, &host.brokers).is_ok(), "{name}");
        });
    }
}

/// In a prefix that is open to users it would show a claim of root's, which counts once the prefix is closed.
#[test]
fn a_claim_that_a_user_shows_over_a_file_of_the_prefix_is_refused_and_not_asked() {
    if skips_without([Need::Fuse]) {
        return;
    }
    for name in ["state.json", "state.id-1"] {
        let host = TestHost::new();
        host.write(&format!("{PREFIX}/{name}"), "theirs");
        chown(host.below(name), Some(USER), None).unwrap();
        let words = format!("{PREFIX}/{name} is on a file system that the user with uid {USER} has mounted");
        for mode in [0o1777, 0o777, 0o755] {
            fs::set_permissions(host.below(""), fs::Permissions::from_mode(mode)).unwrap();
            let mounted = UsersMount::that_never_answers(host.below(name));
            mounted.is_not_asked(|| {
                let refusal = host.claim().unwrap_err();
                assert!(refusal.message.contains(&words), "{mode:o}: {refusal}");
            });
            assert_eq!(fs::metadata(host.below("")).unwrap().permissions().mode() & 0o7777, mode);
        }
    }
}

/// A claim in a directory that can't be examined still exists.
#[test]
fn a_host_claimed_below_a_users_mount_does_not_count_as_unclaimed() {
    if skips_without([Need::Fuse]) {
        return;
    }
    let host = TestHost::new();
    claim(&host.root, &claim_order("/data/flux", "uid-1")).unwrap();
    let mounted = UsersMount::at(host.at("/data"));
    let refusal = observe(&host.root, &host.brokers).unwrap_err();
    assert!(refusal.message.contains("/data"), "{refusal}");
    drop(mounted);
    host.remove(false).unwrap();
}

/// What a machine says of itself.
fn be(host: &TestHost, name: &str, id: &str, hardware: &str) {
    host.write("/proc/sys/kernel/hostname", name);
    host.write("/etc/machine-id", id);
    host.write("/sys/class/dmi/id/product_uuid", hardware);
}

const FIRST: [&str; 3] = ["node1.example.org\n", "11112222333344445555666677778888\n", "4c4c4544-0035-3510-8052\n"];
const OTHER: [&str; 3] = ["node2.example.org\n", "99998888777766665555444433332222\n", "4c4c4544-0035-3510-8053\n"];

#[test]
fn a_prefix_claimed_by_another_machine_is_refused_and_only_that_one_removes_it() {
    need_root!();
    // A directory that nodes share is here one that two machines find below the same root.
    for prefix in [PREFIX, "/shared/flux"] {
        let host = TestHost::new();
        let is = |[name, id, hardware]: [&str; 3]| be(&host, name, id, hardware);
        is(FIRST);
        claim(&host.root, &claim_order(prefix, "uid-1")).unwrap();
        // The clone of an image has the same machine-id.
        for other in [OTHER, [OTHER[0], FIRST[1], OTHER[2]]] {
            is(other);
            assert_eq!(host.state(), None);
            let before = host.everything();
            let refusal = claim(&host.root, &claim_order(prefix, "uid-1")).unwrap_err();
            let trouble = troubles(&host, Some(prefix)).remove(0).unwrap();
            for said in [refusal.message, trouble] {
                assert!(
                    said.contains(&format!("{prefix} is claimed by another machine (host name node1.example.org)")),
                    "{said}"
                );
            }
            host.remove(false).unwrap();
            assert_eq!(host.everything(), before);
        }
        is(FIRST);
        assert!(host.state().is_some());
        host.remove(false).unwrap();
        assert!(!host.at(prefix).exists());
    }
}

/// Does `work` while this test has the lock of the prefix, and makes `change` once it waits for it.
fn before_it_has_the_lock<T: Send>(root: &Root, work: impl FnOnce(&Root) -> T + Send, change: impl FnOnce()) -> T {
    let lock = HostLock::take(root, Path::new(PREFIX), Duration::ZERO).unwrap();
    let opened = Inotify::init(InitFlags::IN_CLOEXEC).unwrap();
    opened.add_watch(&root.path(PREFIX).join("lock"), AddWatchFlags::IN_OPEN).unwrap();
    thread::scope(|scope| {
        let working = scope.spawn(|| work(root));
        opened.read_events().unwrap();
        change();
        drop(lock);
        working.join().unwrap()
    })
}

#[test]
fn a_prefix_that_another_machine_claims_meanwhile_is_left_alone() {
    need_root!();
    let host = TestHost::new();
    let [name, id, hardware] = OTHER;
    be(&host, name, id, hardware);
    host.claim().unwrap();
    let theirs = fs::read_to_string(host.below("state.json")).unwrap();
    host.remove(false).unwrap();
    let claimed_by_them = || fs::write(host.below("state.json"), &theirs).unwrap();

    let [name, id, hardware] = FIRST;
    be(&host, name, id, hardware);
    fs::create_dir(host.below("")).unwrap();
    let order = claim_order(PREFIX, "uid-2");
    let refusal = before_it_has_the_lock(&host.root, |root| claim(root, &order).unwrap_err(), claimed_by_them);
    assert!(refusal.message.contains("claimed by another machine (host name node2.example.org)"), "{refusal}");
    assert_eq!(fs::read_to_string(host.below("state.json")).unwrap(), theirs);

    fs::remove_file(host.below("state.json")).unwrap();
    host.claim().unwrap();
    let clean = |root: &Root| remove(root, &FakeBrokers::default(), &RemoveOrder { keep_state: false });
    before_it_has_the_lock(&host.root, clean, claimed_by_them).unwrap();
    assert!(host.below("envs").exists());
    assert_eq!(fs::read_to_string(host.below("state.json")).unwrap(), theirs);
}

/// A user who may write a directory above can put a link to our own file there.
#[test]
fn a_users_link_to_our_files_changes_nothing() {
    need_root!();
    let host = host_with_a_user();
    for directory in ["/opt", "/var/lib"] {
        fs::create_dir_all(host.at(directory)).unwrap();
    }
    chown(host.at("/opt"), Some(USER), None).unwrap();
    claim(&host.root, &claim_order("/data/flux", "uid-1")).unwrap();
    let pointer = host.at("/var/lib/flux-distribute/prefix.json");
    assert!(pointer.exists());
    let link = host.at("/opt/flux-distribute");
    symlink("/var/lib/flux-distribute", &link).unwrap();
    lchown(&link, Some(USER), None).unwrap();
    assert_eq!(host.state().unwrap().prefix, Path::new("/data/flux"));
    // A hard link, too, which a user can make where the kernel does not protect what is root's.
    fs::remove_file(&link).unwrap();
    fs::create_dir(&link).unwrap();
    chown(&link, Some(USER), None).unwrap();
    fs::hard_link(&pointer, link.join("prefix.json")).unwrap();
    assert_eq!(host.state().unwrap().prefix, Path::new("/data/flux"));
    host.remove(false).unwrap();
    assert!(!pointer.exists() && !host.at("/data/flux").exists());
}

#[test]
fn a_machine_whose_ids_change_one_by_one_stays_the_same_machine() {
    need_root!();
    let host = TestHost::new();
    let is = |[name, id, hardware]: [&str; 3]| be(&host, name, id, hardware);
    is(FIRST);
    host.claim().unwrap();
    for changed in [[FIRST[0], OTHER[1], FIRST[2]], [OTHER[0], OTHER[1], FIRST[2]], OTHER] {
        is(changed);
        assert!(host.state().is_some(), "{changed:?}");
        host.claim().unwrap();
    }
    host.remove(false).unwrap();
    assert!(!host.below("").exists());
}

#[test]
fn the_first_host_that_finds_the_claim_of_an_older_version_owns_it() {
    need_root!();
    let host = TestHost::new();
    let is = |[name, id, hardware]: [&str; 3]| be(&host, name, id, hardware);
    is(FIRST);
    host.claim().unwrap();
    let mut text: serde_json::Value = serde_json::from_slice(&fs::read(host.below("state.json")).unwrap()).unwrap();
    assert!(text.as_object_mut().unwrap().remove("machine").is_some());
    fs::write(host.below("state.json"), text.to_string()).unwrap();
    assert_eq!(host.state().unwrap().machine, None);
    host.claim().unwrap();
    assert_eq!(host.state().unwrap().machine.unwrap().name, "node1.example.org");
    is(OTHER);
    assert_eq!(host.state(), None);
}
