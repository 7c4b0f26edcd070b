//! A directory that stands for the host's root.

use std::{
    cell::RefCell,
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use host::Root;
use hostapi::{
    ClaimOrder, ConfigureOrder, HostFile, HostState, LaunchRecord, Refusal, RemoveOrder, RunningBroker, StateDir,
    StopOrder,
};
use stage::{
    Brokers, claim, configure,
    launch::{BrokerView, UnknownBroker},
    observe, remove,
};

pub const PREFIX: &str = "/opt/flux-distribute";
pub const DIGEST: &str = "0123456789abcdef";
pub const COMPILED: &str = "/usr/site/flux";

#[derive(Default)]
pub struct FakeBrokers {
    pub running: RefCell<Option<RunningBroker>>,
    pub unknown: RefCell<Option<UnknownBroker>>,
    pub calls: RefCell<Vec<&'static str>>,
}

impl Brokers for FakeBrokers {
    fn observe(&self, _prefix: Option<&Path>) -> BrokerView {
        BrokerView {
            running: self.running.borrow().clone(),
            unknown: self.unknown.borrow().clone(),
            ..BrokerView::default()
        }
    }

    fn stop(&self, _order: &StopOrder) -> Result<(), Refusal> {
        self.running.take();
        self.calls.borrow_mut().push("stop");
        Ok(())
    }

    fn forget(&self) -> Result<(), Refusal> {
        self.calls.borrow_mut().push("forget");
        Ok(())
    }
}

pub struct TestHost {
    pub dir: tempfile::TempDir,
    pub root: Root,
    pub brokers: FakeBrokers,
}

impl TestHost {
    pub fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let host = Self { root: Root::at(dir.path()), dir, brokers: FakeBrokers::default() };
        for (path, content) in [
            ("/etc/passwd", "root:x:0:0:root:/root:/bin/sh\nflux:x:500:501::/var/lib/flux:/bin/sh\n"),
            ("/etc/group", "video:x:44:flux\n"),
            ("/proc/sys/fs/inotify/max_user_instances", "128\n"),
            ("/proc/sys/kernel/random/boot_id", "boot-1\n"),
            ("/opt/others/file", "theirs"),
            ("/run/other", ""),
            ("/usr/bin/other", ""),
        ] {
            host.write(path, content);
        }
        host
    }

    pub fn at(&self, path: &str) -> PathBuf {
        self.root.path(path)
    }

    pub fn below(&self, path: &str) -> PathBuf {
        self.root.path(PREFIX).join(path)
    }

    pub fn write(&self, path: &str, content: &str) {
        fs::create_dir_all(self.at(path).parent().unwrap()).unwrap();
        fs::write(self.at(path), content).unwrap();
    }

    pub fn environment(&self, digest: &str, compiled_prefix: Option<&str>) {
        let marker =
            serde_json::json!({ "digest": digest, "compiledPrefix": compiled_prefix, "bytes": 1, "archives": [] });
        self.write(&format!("{PREFIX}/envs/{digest}/.flux-distribute.json"), &marker.to_string());
    }

    pub fn claim(&self) -> Result<(), Refusal> {
        claim(&self.root, &claim_order(PREFIX, "uid-1"))
    }

    pub fn configure(&self, order: &ConfigureOrder) -> Result<(), Refusal> {
        configure(&self.root, order)
    }

    pub fn remove(&self, keep_state: bool) -> Result<(), Refusal> {
        remove(&self.root, &self.brokers, &RemoveOrder { keep_state })
    }

    pub fn state(&self) -> Option<HostState> {
        observe(&self.root, &self.brokers).unwrap().state
    }

    /// Everything below the root, with contents and link targets.
    pub fn everything(&self) -> BTreeMap<PathBuf, String> {
        fn walk(dir: &Path, found: &mut BTreeMap<PathBuf, String>) {
            for path in fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()) {
                let content = match fs::symlink_metadata(&path).unwrap().file_type() {
                    kind if kind.is_symlink() => fs::read_link(&path).unwrap().display().to_string(),
                    kind if kind.is_dir() => {
                        walk(&path, found);
                        "directory".into()
                    }
                    _ => fs::read_to_string(&path).unwrap().trim().to_owned(),
                };
                found.insert(path, content);
            }
        }
        let mut found = BTreeMap::new();
        walk(self.dir.path(), &mut found);
        found
    }
}

/// A broker of `rank` and of the instance `instance_id`.
pub fn running(rank: u32, instance_id: &str) -> RunningBroker {
    let record = LaunchRecord {
        rank,
        broker_name: "n0".into(),
        node_uid: "n".into(),
        instance_uid: "uid-1".into(),
        instance_id: instance_id.into(),
        epoch: 1,
        digest: DIGEST.into(),
        launch: "l".into(),
    };
    RunningBroker { pid: 1, start_time: 1, systemd: false, record }
}

pub fn claim_order(prefix: &str, uid: &str) -> ClaimOrder {
    ClaimOrder { prefix: prefix.into(), instance_uid: uid.into(), uninstall: Default::default() }
}

pub fn configure_order() -> ConfigureOrder {
    let file = |path: &str, content: &str, mode, broker_owned| HostFile {
        path: path.into(),
        content: content.into(),
        mode,
        broker_owned,
    };
    ConfigureOrder {
        prefix: PREFIX.into(),
        digest: DIGEST.into(),
        files: vec![
            file("etc/broker.toml", "[bootstrap]\n", 0o644, false),
            file("etc/curve.cert", "secret", 0o600, true),
            file("etc/roster.json", "{}", 0o644, false),
            file("bin/flux-connect.sh", "#!/bin/sh\n", 0o755, false),
        ],
        run_as: "flux".into(),
        statedir: Some(StateDir { instance_id: "id-1".into(), established: false }),
        sysctls: BTreeMap::from([
            ("fs.inotify.max_user_instances".into(), 8192),
            ("net.core.not_on_this_kernel".into(), 5),
        ]),
        live: false,
    }
}
