//! What the brokers' user has mounted over the directories and files that it owns.

use std::{
    fs::{self, File, OpenOptions},
    os::fd::AsRawFd,
    path::PathBuf,
    sync::mpsc,
    thread,
    time::Duration,
};

use hostapi::{ConfigureOrder, DumpOrder, StateDir};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use stage::{dump, observe};

use crate::{
    needs::{Need, skips_without},
    support::*,
};

/// A FUSE file system as fusermount3(1) mounts it for a user, until this is dropped. No process serves it.
pub struct UsersMount {
    pub point: PathBuf,
    _device: File,
}

impl UsersMount {
    /// The kernel refuses this one to other users, root too, before it asks.
    pub fn at(point: PathBuf) -> Self {
        Self::with(point, "rootmode=40000")
    }

    /// Root may ask this one, and waits for ever.
    pub fn that_never_answers(point: PathBuf) -> Self {
        let root = if point.is_dir() { "40000" } else { "100000" };
        Self::with(point, &format!("rootmode={root},allow_other"))
    }

    fn with(point: PathBuf, options: &str) -> Self {
        let device = OpenOptions::new().read(true).write(true).open("/dev/fuse").unwrap();
        let options = format!("fd={},{options},user_id=500,group_id=501", device.as_raw_fd());
        mount(Some("theirs"), &point, Some("fuse"), MsFlags::MS_NOSUID | MsFlags::MS_NODEV, Some(options.as_str()))
            .unwrap();
        Self { point, _device: device }
    }

    /// Fails if root waits for the user's file system in `work`.
    pub fn is_not_asked(&self, work: impl FnOnce()) {
        let point = self.point.clone();
        let (done, is_done) = mpsc::channel::<()>();
        // MNT_FORCE ends a question that nobody answers, so that this test ends.
        let asked = thread::spawn(move || {
            let hangs = is_done.recv_timeout(Duration::from_secs(10)).is_err();
            hangs && umount2(&point, MntFlags::MNT_FORCE).is_ok()
        });
        work();
        done.send(()).unwrap();
        assert!(!asked.join().unwrap(), "root asks the user's file system at {}", self.point.display());
    }
}

impl Drop for UsersMount {
    fn drop(&mut self) {
        // A removal takes it away.
        let _ = umount2(&self.point, MntFlags::MNT_DETACH);
    }
}

#[test]
fn a_mount_of_the_brokers_user_stops_neither_a_new_certificate_nor_a_removal() {
    need_root!();
    if skips_without([Need::Fuse]) {
        return;
    }
    let places = ["state", "state/mine", "state/instance-id", "etc/curve.cert"];
    for (place, keep_state) in places.iter().flat_map(|place| [(*place, false), (*place, true)]) {
        let host = TestHost::new();
        let before = host.everything();
        host.claim().unwrap();
        host.environment(DIGEST, None);
        host.configure(&configure_order()).unwrap();
        fs::create_dir(host.below("state/mine")).unwrap();
        let mut order = ConfigureOrder { live: true, ..configure_order() };
        order.files[1].content = "another secret".to_owned();
        let mounted = UsersMount::that_never_answers(host.below(place));
        mounted.is_not_asked(|| {
            observe(&host.root, &host.brokers).unwrap();
            host.configure(&order).unwrap();
            let removed = host.remove(keep_state);
            // What the mount hides may be the queue.
            if place == "state" && keep_state {
                let refusal = removed.unwrap_err();
                assert!(refusal.message.contains("something is mounted on"), "{refusal}");
                assert_eq!(fs::read_to_string(host.below("etc/curve.cert")).unwrap(), "another secret");
                return host.remove(false).unwrap();
            }
            removed.unwrap();
        });
        drop(mounted);
        if keep_state && place != "state" {
            assert_eq!(fs::read_to_string(host.below("state/instance-id")).unwrap(), "id-1\n");
        } else {
            assert_eq!(host.everything(), before, "{place}");
        }
    }
}

#[test]
fn a_dump_does_not_ask_a_mount_over_the_statedir() {
    need_root!();
    if skips_without([Need::Fuse]) {
        return;
    }
    let order = DumpOrder {
        prefix: PREFIX.into(),
        digest: DIGEST.to_owned(),
        run_as: "flux".to_owned(),
        instance_id: "id-1".to_owned(),
    };
    for place in ["state", "state/content.sqlite"] {
        let host = TestHost::new();
        host.claim().unwrap();
        host.environment(DIGEST, None);
        host.configure(&configure_order()).unwrap();
        fs::write(host.below("state/content.sqlite"), "").unwrap();
        UsersMount::that_never_answers(host.below(place)).is_not_asked(|| {
            let refusal = dump(&host.root, &order).unwrap_err();
            assert!(refusal.message.contains("flux"), "it ends only where it asks the broker: {refusal}");
        });
    }
}

#[test]
fn a_statedir_that_its_user_has_covered_is_named_or_moved_aside() {
    need_root!();
    if skips_without([Need::Fuse]) {
        return;
    }
    let host = TestHost::new();
    host.claim().unwrap();
    host.environment(DIGEST, None);
    host.configure(&configure_order()).unwrap();
    let mut mounted = UsersMount::that_never_answers(host.below("state"));
    let with = |established| {
        let statedir = Some(StateDir { instance_id: "id-1".into(), established });
        host.configure(&ConfigureOrder { statedir, ..configure_order() })
    };
    mounted.is_not_asked(|| {
        let refusal = with(true).unwrap_err();
        assert!(refusal.message.contains("the user with uid 500 has mounted"), "{refusal}");
        with(false).unwrap();
    });
    assert_eq!(fs::read_to_string(host.below("state/instance-id")).unwrap(), "id-1\n");
    mounted.point = host.below("state.unnamed");
    assert!(host::opening::is_there(&mounted.point).unwrap(), "the mount has gone with what it is on");
}
