//! What a configured host looks like.

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::{MetadataExt, PermissionsExt, chown, lchown, symlink},
    path::{Path, PathBuf},
};

use broker::command::CONNECT_HEADER;
use hostapi::{ConfigureOrder, HostFile, StateDir};
use stage::{claim, observe, observe_again};

use crate::support::*;

fn not_established(id: &str) -> Option<StateDir> {
    Some(StateDir { instance_id: id.into(), established: false })
}

fn established(id: &str) -> Option<StateDir> {
    Some(StateDir { instance_id: id.into(), established: true })
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().mode() & 0o7777
}

fn owner(path: &Path) -> (u32, u32) {
    let metadata = fs::symlink_metadata(path).unwrap();
    (metadata.uid(), metadata.gid())
}

#[test]
fn configured_files_have_their_owner_mode_and_content() {
    need_root!();
    let host = TestHost::new();
    host.claim().unwrap();
    host.environment(DIGEST, None);
    host.configure(&configure_order()).unwrap();
    assert_eq!((mode(&host.below("etc/broker.toml")), owner(&host.below("etc/broker.toml"))), (0o644, (0, 0)));
    assert_eq!((mode(&host.below("etc/curve.cert")), owner(&host.below("etc/curve.cert"))), (0o600, (500, 501)));
    assert_eq!((mode(&host.below("state")), owner(&host.below("state"))), (0o700, (500, 501)));
    assert_eq!(fs::read_to_string(host.below("state/instance-id")).unwrap(), "id-1\n");
    assert_eq!(fs::read_link(host.below("current")).unwrap(), Path::new("envs").join(DIGEST));
    assert_eq!(fs::read_to_string(host.at("/proc/sys/fs/inotify/max_user_instances")).unwrap(), "8192");
    let view = observe(&host.root, &host.brokers).unwrap();
    assert_eq!(
        (view.environments, view.roster.map(|copy| copy.text().to_owned()), view.boot_id),
        (vec![DIGEST.into()], Some("{}".into()), "boot-1".into())
    );
}

/// Each round of each agent observes its host, and the roster of thousands of ranks has a megabyte.
#[test]
fn the_rosters_copy_is_left_out_until_its_file_is_another_one() {
    need_root!();
    let host = TestHost::new();
    host.claim().unwrap();
    host.environment(DIGEST, None);
    host.configure(&configure_order()).unwrap();
    let look = |known| {
        let view = observe_again(&host.root, &host.brokers, known).unwrap();
        (view.roster.map(|copy| copy.text().to_owned()), view.roster_version)
    };
    let (first, version) = look(None);
    assert!(first.as_deref() == Some("{}") && version.is_some());
    assert_eq!(look(version), (None, version));
    // As many bytes, in another file of that name.
    fs::write(host.below("etc/new"), "[]").unwrap();
    fs::rename(host.below("etc/new"), host.below("etc/roster.json")).unwrap();
    let (again, other) = look(version);
    assert_eq!(again.as_deref(), Some("[]"));
    assert_ne!(other, version);
    fs::remove_file(host.below("etc/roster.json")).unwrap();
    assert_eq!(look(other), (None, None));
}

/// Whoever was the brokers' user could write jobs of root's into the queue.
#[test]
fn no_user_inherits_the_queue_of_another() {
    need_root!();
    let host = TestHost::new();
    host.claim().unwrap();
    host.environment(DIGEST, None);
    let of = |run_as: &str, statedir| ConfigureOrder { run_as: run_as.into(), statedir, ..configure_order() };
    let queue = |path: &str| fs::read_to_string(host.below(path)).ok();
    host.configure(&of("4242", not_established("id-1"))).unwrap();
    host.write(&format!("{PREFIX}/state/content.sqlite"), "forged");
    for other in ["root", "4343"] {
        let refusal = host.configure(&of(other, established("id-1"))).unwrap_err();
        assert!(refusal.message.contains("belongs to the user with uid 4242"), "{refusal}");
        assert_eq!(owner(&host.below("state")), (4242, 4242));
    }
    // It is kept aside for the next instance, whose administrator asks for it.
    host.configure(&of("root", not_established("id-2"))).unwrap();
    let refusal = host.configure(&of("root", not_established("id-1"))).unwrap_err();
    assert!(refusal.message.contains("state.id-1 belongs to the user with uid 4242"), "{refusal}");
    host.configure(&of("4242", not_established("id-1"))).unwrap();
    assert_eq!((queue("state/content.sqlite").as_deref(), owner(&host.below("state"))), (Some("forged"), (4242, 4242)));

    // A broker has kept a queue in this one, whether the instance was online or not.
    host.configure(&of("root", not_established("id-1"))).unwrap_err();
    fs::remove_file(host.below("state/content.sqlite")).unwrap();
    host.write(&format!("{PREFIX}/state/dump/recovered.tgz"), "a queue to be restored");
    host.configure(&of("root", not_established("id-1"))).unwrap_err();
    fs::remove_dir_all(host.below("state/dump")).unwrap();
    host.configure(&of("root", not_established("id-1"))).unwrap();
    assert_eq!((queue("state/content.sqlite"), owner(&host.below("state"))), (None, (0, 0)));
}

#[test]
fn a_lost_statedir_of_an_established_instance_is_refused_before_anything_is_written() {
    need_root!();
    let host = TestHost::new();
    host.claim().unwrap();
    host.environment(DIGEST, None);
    let before = host.everything();
    let refusal = host.configure(&ConfigureOrder { statedir: established("id-1"), ..configure_order() }).unwrap_err();
    assert!(!refusal.transient);
    for word in ["id-1", "recover", "reset"] {
        assert!(refusal.message.contains(word), "{refusal}");
    }
    assert_eq!(host.everything(), before);
    host.configure(&configure_order()).unwrap();
    host.configure(&ConfigureOrder { statedir: established("id-1"), ..configure_order() }).unwrap();
    let other = host.configure(&ConfigureOrder { statedir: established("id-2"), ..configure_order() }).unwrap_err();
    assert!(other.message.contains("id-2") && other.message.contains("id-1"), "{other}");
}

#[test]
fn the_queue_of_an_older_instance_is_kept_aside() {
    need_root!();
    let host = TestHost::new();
    host.claim().unwrap();
    host.environment(DIGEST, None);
    host.configure(&configure_order()).unwrap();
    fs::write(host.below("state/content.sqlite"), "queue").unwrap();
    host.configure(&ConfigureOrder { statedir: not_established("id-2"), ..configure_order() }).unwrap();
    assert_eq!(fs::read_to_string(host.below("state.id-1/content.sqlite")).unwrap(), "queue");
    assert_eq!(fs::read_to_string(host.below("state/instance-id")).unwrap(), "id-2\n");
    // A second one of the same name doesn't overwrite the first.
    fs::write(host.below("state/instance-id"), "id-1").unwrap();
    host.configure(&ConfigureOrder { statedir: not_established("id-3"), ..configure_order() }).unwrap();
    assert!(host.below("state.id-1/content.sqlite").exists() && host.below("state.id-1.1").is_dir());
}

#[test]
fn a_kept_statedir_outlives_the_removal_and_serves_the_next_claim() {
    need_root!();
    let host = TestHost::new();
    host.claim().unwrap();
    host.environment(DIGEST, None);
    host.configure(&configure_order()).unwrap();
    fs::write(host.below("state/content.sqlite"), "queue").unwrap();
    host.remove(true).unwrap();
    assert!(host.state().is_none());
    let left: Vec<_> = fs::read_dir(host.below("")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, ["state"]);
    claim(&host.root, &claim_order(PREFIX, "uid-2")).unwrap();
    host.environment(DIGEST, None);
    host.configure(&ConfigureOrder { statedir: established("id-1"), ..configure_order() }).unwrap();
    assert_eq!(fs::read_to_string(host.below("state/content.sqlite")).unwrap(), "queue");
}

#[test]
fn a_sysctl_is_raised_never_lowered_and_put_back_only_if_it_is_ours() {
    need_root!();
    let sysctl = "/proc/sys/fs/inotify/max_user_instances";
    let raise = |host: &TestHost, to| {
        let sysctls = BTreeMap::from([("fs.inotify.max_user_instances".to_owned(), to)]);
        host.configure(&ConfigureOrder { sysctls, ..configure_order() }).unwrap();
    };
    for (what, steps, by_hand, expected) in [
        ("put back", &[8192][..], None, "128"),
        ("raised twice", &[8192, 16384], None, "128"),
        ("asked for less later", &[8192, 4096], None, "128"),
        ("never raised", &[64], None, "128"),
        ("changed by the admin since", &[8192], Some("9999"), "9999"),
        ("the second raise was recorded and killed", &[8192, 16384], Some("8192"), "128"),
        ("a reboot has put it back", &[8192], Some("128"), "128"),
    ] {
        let host = TestHost::new();
        host.claim().unwrap();
        host.environment(DIGEST, None);
        steps.iter().for_each(|&to| raise(&host, to));
        if let Some(value) = by_hand {
            host.write(sysctl, value);
        }
        host.remove(false).unwrap();
        assert_eq!(fs::read_to_string(host.at(sysctl)).unwrap().trim(), expected, "{what}");
    }
}

#[test]
fn the_compiled_in_prefix_of_others_is_refused_and_survives_our_removal() {
    need_root!();
    for make in [(|path: &Path| fs::create_dir(path)) as fn(&Path) -> std::io::Result<()>, |path| {
        symlink("/srv/their-flux", path)
    }] {
        let host = TestHost::new();
        fs::create_dir_all(host.at("/usr/site")).unwrap();
        make(&host.at(COMPILED)).unwrap();
        host.claim().unwrap();
        host.environment(DIGEST, Some(COMPILED));
        let refusal = host.configure(&configure_order()).unwrap_err();
        assert!(refusal.message.contains(COMPILED), "{refusal}");
        host.remove(false).unwrap();
        assert!(fs::symlink_metadata(host.at(COMPILED)).is_ok());
    }
}

#[test]
fn the_compiled_in_prefix_is_linked_only_if_root_alone_can_change_its_path() {
    need_root!();
    type Change = fn(&TestHost);
    let wrong: [(&str, Change, &str); 4] = [
        ("it is a user's", |host| chown(host.at("/usr/site"), Some(500), None).unwrap(), "chown root /usr/site"),
        (
            "the group can write",
            |host| fs::set_permissions(host.at("/usr/site"), fs::Permissions::from_mode(0o775)).unwrap(),
            "chmod go-w /usr/site",
        ),
        (
            "all can write above it",
            |host| fs::set_permissions(host.at("/usr"), fs::Permissions::from_mode(0o1777)).unwrap(),
            "chmod go-w /usr",
        ),
        (
            "a user's link leads there",
            |host| {
                fs::rename(host.at("/usr/site"), host.at("/srv/site")).unwrap();
                symlink("/srv/site", host.at("/usr/site")).unwrap();
                lchown(host.at("/usr/site"), Some(500), None).unwrap();
            },
            "/usr/site belongs to the user with uid 500",
        ),
    ];
    for (what, change, words) in wrong {
        let host = TestHost::new();
        for directory in ["/usr/site", "/srv"] {
            fs::create_dir_all(host.at(directory)).unwrap();
        }
        host.claim().unwrap();
        host.environment(DIGEST, Some(COMPILED));
        change(&host);
        let refusal = host.configure(&configure_order()).unwrap_err();
        assert!(refusal.message.contains(words), "{what}: {refusal}");
        assert!(fs::symlink_metadata(host.at(COMPILED)).is_err(), "{what}");
        host.remove(false).unwrap();
    }
}

/// A host on which a user has put a link in the place of the directory above our link: the user leads the way to another directory,
/// with a link of ours that another instance needs.
fn with_a_users_way_to_our_link() -> TestHost {
    let host = TestHost::new();
    host.claim().unwrap();
    host.environment(DIGEST, Some(COMPILED));
    host.configure(&configure_order()).unwrap();
    fs::create_dir_all(host.at("/srv/site")).unwrap();
    fs::rename(host.at(COMPILED), host.at("/srv/site/flux")).unwrap();
    fs::remove_dir(host.at("/usr/site")).unwrap();
    symlink("../srv/site", host.at("/usr/site")).unwrap();
    lchown(host.at("/usr/site"), Some(500), None).unwrap();
    host
}

/// As a link of an older version can lie, or one whose directory was opened afterwards.
#[test]
fn a_link_in_a_users_directory_is_left_there_and_does_not_block_a_removal() {
    need_root!();
    let host = with_a_users_way_to_our_link();
    host.remove(false).unwrap();
    assert!(host.state().is_none());
    assert!(fs::symlink_metadata(host.at("/srv/site/flux")).is_ok());
}

/// A version before this one made links in such directories, and an instance that runs must come up again.
#[test]
fn a_link_of_ours_is_flipped_wherever_it_is() {
    need_root!();
    const NEXT: &str = "fedcba9876543210";
    let host = TestHost::new();
    host.claim().unwrap();
    for digest in [DIGEST, NEXT] {
        host.environment(digest, Some(COMPILED));
    }
    host.configure(&configure_order()).unwrap();
    fs::set_permissions(host.at("/usr/site"), fs::Permissions::from_mode(0o2775)).unwrap();
    host.configure(&configure_order()).unwrap();
    host.configure(&ConfigureOrder { digest: NEXT.into(), ..configure_order() }).unwrap();
    assert_eq!(fs::read_link(host.at(COMPILED)).unwrap(), Path::new(PREFIX).join("envs").join(NEXT));
}

/// A user who can write there could replace it with another Flux, which root's broker would run.
#[test]
fn a_link_that_a_user_has_put_in_the_place_of_ours_is_refused() {
    need_root!();
    type Plant = fn(&TestHost);
    let link = |host: &TestHost, at: &str, owner: u32| {
        symlink(Path::new(PREFIX).join("envs/x"), host.at(at)).unwrap();
        lchown(host.at(at), Some(owner), None).unwrap();
    };
    let plants: [(&str, Plant, &str); 3] = [
        (
            "a user's, in a directory of the same user",
            |host| chown(host.at("/usr/site"), Some(500), None).unwrap(),
            "chown root /usr/site",
        ),
        (
            "a user's, in the place of one that we have made",
            |host| {
                host.configure(&configure_order()).unwrap();
                fs::set_permissions(host.at("/usr/site"), fs::Permissions::from_mode(0o2775)).unwrap();
                fs::remove_file(host.at(COMPILED)).unwrap();
            },
            "chmod go-w /usr/site",
        ),
        (
            "root's, but nothing is remembered of it",
            |host| fs::set_permissions(host.at("/usr/site"), fs::Permissions::from_mode(0o2775)).unwrap(),
            "chmod go-w /usr/site",
        ),
    ];
    for (what, plant, words) in plants {
        let host = TestHost::new();
        fs::create_dir_all(host.at("/usr/site")).unwrap();
        host.claim().unwrap();
        host.environment(DIGEST, Some(COMPILED));
        plant(&host);
        link(&host, COMPILED, if what.starts_with("root's") { 0 } else { 500 });
        let refusal = host.configure(&configure_order()).unwrap_err();
        assert!(refusal.message.contains(words), "{what}: {refusal}");
        assert_eq!(fs::read_link(host.at(COMPILED)).unwrap().file_name().unwrap(), "x", "{what}");
    }
}

#[test]
fn no_link_is_searched_for_through_a_users_link() {
    need_root!();
    let host = with_a_users_way_to_our_link();
    let refusal = host.configure(&configure_order()).unwrap_err();
    assert!(refusal.message.contains("/usr/site belongs to the user with uid 500"), "{refusal}");
}

#[test]
fn links_are_flipped_between_epochs_and_left_alone_under_a_running_broker() {
    need_root!();
    const NEXT: &str = "fedcba9876543210";
    let host = TestHost::new();
    host.claim().unwrap();
    for digest in [DIGEST, NEXT] {
        host.environment(digest, Some(COMPILED));
    }
    let target = |path: PathBuf| fs::read_link(path).unwrap().file_name().unwrap().to_owned();
    host.configure(&configure_order()).unwrap();
    host.configure(&ConfigureOrder { digest: NEXT.into(), live: true, ..configure_order() }).unwrap();
    assert_eq!((target(host.at(COMPILED)), target(host.below("current"))), (DIGEST.into(), DIGEST.into()));
    host.configure(&ConfigureOrder { digest: NEXT.into(), ..configure_order() }).unwrap();
    assert_eq!((target(host.at(COMPILED)), target(host.below("current"))), (NEXT.into(), NEXT.into()));
    host.remove(false).unwrap();
    assert!(!host.at("/usr/site").exists() && host.at("/usr").exists());
}

#[test]
fn a_foreign_script_at_the_root_stays() {
    need_root!();
    let host = TestHost::new();
    host.write("/flux-connect.sh", "theirs");
    host.claim().unwrap();
    host.environment(DIGEST, None);
    host.configure(&configure_order()).unwrap();
    host.remove(false).unwrap();
    assert_eq!(fs::read_to_string(host.at("/flux-connect.sh")).unwrap(), "theirs");
}

#[test]
fn files_do_not_leave_the_prefix_and_secrets_do_not_leave_their_file() {
    need_root!();
    let host = TestHost::new();
    host.claim().unwrap();
    host.environment(DIGEST, None);
    for path in ["../etc/passwd", "/etc/passwd", "etc/../../x"] {
        let file = HostFile { path: path.into(), content: "hunter2".into(), mode: 0o644, broker_owned: false };
        let refusal = host.configure(&ConfigureOrder { files: vec![file], ..configure_order() }).unwrap_err();
        assert!(refusal.message.contains("prefix") && !refusal.message.contains("hunter2"), "{refusal}");
    }
    assert!(!format!("{:?}", configure_order()).contains("secret"));
}

#[test]
fn our_links_and_scripts_are_recognized_after_the_prefix_was_removed() {
    need_root!();
    const LINK: &str = "/opt/flux";
    let order = || {
        let mut order = configure_order();
        let script = order.files.iter_mut().find(|file| file.path == Path::new("bin/flux-connect.sh")).unwrap();
        script.content = format!("{CONNECT_HEADER}\n");
        order
    };
    for claimed_again in [true, false] {
        let host = TestHost::new();
        host.claim().unwrap();
        host.environment(DIGEST, Some(LINK));
        host.configure(&order()).unwrap();
        fs::remove_dir_all(host.below("")).unwrap();
        symlink("/srv/their-flux", host.at("/opt/theirs")).unwrap();
        if claimed_again {
            host.claim().unwrap();
            host.environment(DIGEST, Some(LINK));
            host.configure(&order()).unwrap();
        }
        host.remove(false).unwrap();
        for path in [LINK, "/flux-connect.sh"] {
            assert!(fs::symlink_metadata(host.at(path)).is_err(), "{path} {claimed_again}");
        }
        assert!(fs::symlink_metadata(host.at("/opt/theirs")).is_ok());
    }
}

#[test]
fn a_statedir_that_a_lead_recreated_at_its_stop_is_closed_to_other_users() {
    need_root!();
    let host = TestHost::new();
    host.claim().unwrap();
    host.environment(DIGEST, None);
    fs::create_dir_all(host.below("state/dump")).unwrap();
    assert_eq!(mode(&host.below("state")), 0o755);
    host.configure(&ConfigureOrder { statedir: established("id-1"), ..configure_order() }).unwrap_err();
    assert_eq!(mode(&host.below("state")), 0o700);
}

#[test]
fn a_lead_that_runs_without_its_statedir_is_detected() {
    need_root!();
    let host = TestHost::new();
    host.claim().unwrap();
    host.environment(DIGEST, None);
    host.configure(&configure_order()).unwrap();
    let lost = || observe(&host.root, &host.brokers).unwrap().statedir_lost;
    for (rank, instance_id, expected) in [(0, "id-1", false), (0, "id-2", true), (1, "id-2", false)] {
        *host.brokers.running.borrow_mut() = Some(running(rank, instance_id));
        assert_eq!(lost(), expected, "{rank} {instance_id}");
    }
    *host.brokers.running.borrow_mut() = Some(running(0, "id-1"));
    fs::remove_dir_all(host.below("state")).unwrap();
    assert!(lost());
    // What a user puts at another candidate for the prefix is no statedir of ours.
    let theirs = "/home/kubernetes/flux-distribute";
    host.write(&format!("{theirs}/state/instance-id"), "id-1");
    chown(host.at(theirs), Some(500), None).unwrap();
    assert!(lost());
    host.brokers.running.take();
    assert!(!lost());
}

/// Flux makes one that all users may read for its dump, if it ends after its own was removed.
#[test]
fn a_statedir_that_a_broker_has_left_open_is_closed_by_the_next_look() {
    need_root!();
    let host = TestHost::new();
    host.claim().unwrap();
    host.environment(DIGEST, None);
    host.configure(&configure_order()).unwrap();
    fs::set_permissions(host.below("state"), fs::Permissions::from_mode(0o755)).unwrap();
    observe(&host.root, &host.brokers).unwrap();
    assert_eq!(mode(&host.below("state")), 0o700);
}
