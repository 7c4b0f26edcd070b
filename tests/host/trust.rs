//! What is believed of a host's own files, and of whose they are.

use std::{
    fs,
    os::unix::fs::{PermissionsExt, chown, lchown, symlink},
    path::Path,
};

use flux_distribute::host::{PreflightOrder, Undo, claim, observe, preflight, state};
use nix::{sys::stat::Mode, unistd::mkfifo};

use crate::support::*;

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
    let seen = preflight::look(&host.root, &host.brokers, &order).unwrap();
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
fn a_pipe_in_the_place_of_the_state_is_not_waited_for() {
    need_root!();
    let host = host_with_a_user();
    for name in ["state.json", "prefix.json"] {
        mkfifo(&host.at(HOME).join("flux-distribute").join(name), Mode::from_bits_truncate(0o666)).unwrap();
    }
    assert_eq!(host.state(), None);
    host.claim().unwrap();
    assert!(host.state().is_some());
    // Where only root can have put one, it is told.
    fs::remove_file(host.below("state.json")).unwrap();
    mkfifo(&host.below("state.json"), Mode::from_bits_truncate(0o600)).unwrap();
    let refusal = observe(&host.root, &host.brokers).unwrap_err();
    assert!(refusal.message.contains(&format!("{PREFIX}/state.json is not a plain file")), "{refusal}");
}

#[test]
fn a_host_that_is_claimed_where_others_can_write_is_told_the_remedy_and_goes_on_once_it_is_applied() {
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
fn a_state_is_believed_for_its_own_directory_alone() {
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
fn what_is_never_done_on_a_host_is_never_undone() {
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
fn what_a_user_put_into_a_prefix_while_it_was_open_is_neither_waited_for_nor_taken() {
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
    assert!(refusal.message.contains("is not of flux-distribute (it holds etc)"), "{refusal}");
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
fn a_prefix_that_another_machine_has_claimed_is_refused_and_only_that_machine_removes_it() {
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

/// A user who may write a directory above can put a link to our own file there.
#[test]
fn a_users_link_to_what_is_ours_is_in_nobodys_way() {
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
    host.remove(false).unwrap();
    assert!(!pointer.exists() && !host.at("/data/flux").exists());
}

#[test]
fn a_machine_that_changes_one_thing_after_the_other_stays_itself() {
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
fn a_host_that_a_version_before_has_claimed_is_the_one_that_finds_it_first() {
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
