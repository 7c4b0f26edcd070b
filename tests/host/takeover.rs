//! A host is prepared to lead.

use std::{
    fs,
    io::Write,
    os::unix::fs::{PermissionsExt, chown, symlink},
    path::{Path, PathBuf},
};

use api::Takeover;
use flate2::{Compression, write::GzEncoder};
use hostapi::{LaunchRecord, Refusal, RunningBroker, StateDir, TakeoverOrder};
use stage::{
    launch::{UnknownBroker, Unrestored},
    observe, takeover,
};

use crate::support::*;

const DUMP: &str = "/root/dump.tgz";

fn dump(host: &TestHost, instance_id: &str) -> Vec<u8> {
    let mut builder = tar::Builder::new(GzEncoder::new(Vec::new(), Compression::fast()));
    for (path, content) in [("flux-distribute/instance-id", instance_id), ("resource/R", "{}")] {
        let mut header = tar::Header::new_ustar();
        header.set_size(content.len() as u64);
        builder.append_data(&mut header, path, content.as_bytes()).unwrap();
    }
    let bytes = builder.into_inner().unwrap().finish().unwrap();
    host.write(DUMP, "");
    fs::File::create(host.at(DUMP)).unwrap().write_all(&bytes).unwrap();
    bytes
}

fn order(from: Option<&str>) -> TakeoverOrder {
    let word = Takeover {
        instance_id: "id-1".into(),
        epoch: 3,
        at: 1000,
        dump: from.map(str::to_owned),
        new_instance_id: from.is_none().then(|| "id-2".to_owned()),
        force: false,
    };
    TakeoverOrder {
        prefix: PREFIX.into(),
        run_as: "flux".into(),
        dump: from.map(Into::into),
        unnamed: false,
        takeover: word,
    }
}

fn take_over(host: &TestHost, order: &TakeoverOrder) -> Result<(), Refusal> {
    takeover(&host.root, &host.brokers, order)
}

fn word(host: &TestHost) -> Option<Takeover> {
    observe(&host.root, &host.brokers).unwrap().takeover
}

/// All but the dump, which is no text.
fn everything(host: &TestHost) -> Vec<PathBuf> {
    let found = fs::read_dir(host.below("")).unwrap().chain(fs::read_dir(host.below("state")).unwrap());
    let mut found: Vec<_> = found.map(|entry| entry.unwrap().path()).collect();
    found.sort();
    found
}

fn host() -> TestHost {
    let host = TestHost::new();
    host.claim().unwrap();
    host.environment(DIGEST, None);
    host
}

#[test]
fn a_dump_becomes_the_leads_statedir_and_the_older_statedir_is_kept() {
    need_root!();
    let host = host();
    let bytes = dump(&host, "id-1");
    // A former lead's.
    host.write(&format!("{PREFIX}/state/instance-id"), "id-1\n");
    host.write(&format!("{PREFIX}/state/content.sqlite"), "old");
    // Again and again: it is as after the first time.
    for _ in 0..3 {
        take_over(&host, &order(Some(DUMP))).unwrap();
        assert_eq!(fs::read(host.below("state/dump/RESTORE")).unwrap(), bytes);
        assert!(!host.below("state/content.sqlite").exists());
        assert_eq!(fs::read_to_string(host.below("state.id-1/content.sqlite")).unwrap(), "old");
        assert!(!host.below("state.id-1.1").exists());
    }
    assert_eq!(word(&host).unwrap().epoch, 3);
    let mut configured = configure_order();
    configured.statedir = Some(StateDir { instance_id: "id-1".into(), established: true });
    host.configure(&configured).unwrap();
    assert_eq!(fs::read(host.below("state/dump/RESTORE")).unwrap(), bytes);
    // Used: from now on it is a queue like any other.
    host.write(&format!("{PREFIX}/state/content.sqlite"), "newer");
    take_over(&host, &order(Some(DUMP))).unwrap();
    assert_eq!(fs::read_to_string(host.below("state.id-1.1/content.sqlite")).unwrap(), "newer");
}

/// Its jobs run as the brokers' user.
#[test]
fn a_dump_that_another_user_may_have_written_is_refused() {
    need_root!();
    let host = host();
    dump(&host, "id-1");
    let put = |directory: &str, mode: u32, file: u32, owner: u32| {
        let path = format!("{directory}/dump.tgz");
        fs::create_dir_all(host.at(directory)).unwrap();
        fs::set_permissions(host.at(directory), fs::Permissions::from_mode(mode)).unwrap();
        fs::copy(host.at(DUMP), host.at(&path)).unwrap();
        fs::set_permissions(host.at(&path), fs::Permissions::from_mode(file)).unwrap();
        chown(host.at(&path), Some(owner), None).unwrap();
        path
    };
    for (path, words) in [
        (put("/tmp", 0o1777, 0o644, 500), "belongs to the user with uid 500"),
        (put("/srv", 0o777, 0o644, 0), "users other than root can write to /srv"),
        (put("/mnt", 0o755, 0o664, 0), "can write to /mnt/dump.tgz"),
    ] {
        let refusal = take_over(&host, &order(Some(&path))).unwrap_err();
        assert!(refusal.message.contains(words) && refusal.message.contains("`--from -`"), "{refusal}");
    }
    symlink("/root/dump.tgz", host.at("/mnt/link")).unwrap();
    assert!(take_over(&host, &order(Some("/mnt/link"))).is_err());
    assert!(word(&host).is_none());
    take_over(&host, &order(Some(&put("/tmp", 0o1777, 0o600, 0)))).unwrap();
}

#[test]
fn a_takeover_that_is_refused_changes_nothing() {
    need_root!();
    let host = host();
    host.write(&format!("{PREFIX}/state/instance-id"), "id-1\n");
    let bytes = dump(&host, "id-9");
    let record = LaunchRecord {
        rank: 0,
        broker_name: "node1".into(),
        node_uid: String::new(),
        instance_uid: String::new(),
        instance_id: "id-1".into(),
        epoch: 3,
        digest: DIGEST.into(),
        launch: String::new(),
    };
    let lead = RunningBroker { pid: 7, start_time: 7, systemd: false, record };
    let before = everything(&host);
    let refused = |from: &str, expected: &str| {
        let refusal = take_over(&host, &order(Some(from))).unwrap_err();
        assert!(refusal.message.contains(expected), "{refusal}");
        assert_eq!(everything(&host), before);
        assert_eq!(word(&host), None);
    };
    refused(DUMP, "is a dump of instance id-9, but the instance without a lead is id-1");
    fs::write(host.at(DUMP), &bytes[..bytes.len() - 4]).unwrap();
    refused(DUMP, "can't be read to its end");
    refused("/root/nothing.tgz", "/root/nothing.tgz");
    refused("/root", "/root is not a plain file");
    host.brokers.running.replace(Some(lead));
    refused(DUMP, "the lead's broker runs here as process 7");
}

#[test]
fn an_empty_queue_needs_only_a_request_which_a_removal_deletes() {
    need_root!();
    let host = TestHost::new();
    let before = host.everything();
    assert!(take_over(&host, &order(None)).unwrap_err().message.contains("is not claimed"));
    host.claim().unwrap();
    take_over(&host, &order(None)).unwrap();
    assert_eq!(word(&host).unwrap().new_instance_id.as_deref(), Some("id-2"));
    assert!(!host.below("state").exists());
    host.remove(false).unwrap();
    assert_eq!(host.everything(), before);
}

#[test]
fn dumps_stay_where_the_queue_stays() {
    need_root!();
    let host = host();
    for path in ["state/instance-id", "dump/id-1-20261120T222003Z.tgz"] {
        host.write(&format!("{PREFIX}/{path}"), "id-1\n");
    }
    assert_eq!(observe(&host.root, &host.brokers).unwrap().dumps.len(), 1);
    host.remove(true).unwrap();
    assert!(host.below("dump/id-1-20261120T222003Z.tgz").exists() && host.below("state/instance-id").exists());
    assert!(!host.below("etc").exists());
    // And the next order finds them.
    host.claim().unwrap();
    host.remove(false).unwrap();
    assert!(!Path::new(&host.below("")).exists());
}

#[test]
fn takeover_and_removal_refuse_while_an_unknown_broker_runs() {
    need_root!();
    let host = host();
    let before = host.everything();
    let unknown = UnknownBroker { pid: 590, place: "its unit".to_owned(), why: Unrestored::NoName };
    *host.brokers.unknown.borrow_mut() = Some(unknown);
    for refusal in [take_over(&host, &order(None)), host.remove(false)] {
        let refusal = refusal.unwrap_err();
        assert!(refusal.message.contains("kill 590"), "{refusal}");
    }
    assert_eq!(host.everything(), before);
    assert!(host.brokers.calls.borrow().is_empty());
}
