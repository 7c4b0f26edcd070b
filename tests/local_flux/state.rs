//! The queue: dumped, brought up again on another node, given up on purpose; and a host that is cleaned by hand.

use std::{
    fs::{self, OpenOptions},
    os::unix::fs::PermissionsExt,
    path::PathBuf,
    process::{Child, Output, Stdio},
    time::Instant,
};

use api::{FluxInstance, FluxInstanceSpec, FluxNode, INSTANCE};
use kube::api::{DeleteParams, PostParams};
use nix::{
    fcntl::{Flock, FlockArg},
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::json;

use crate::harness::Cluster;

const IMAGE: &str = "/var/lib/kubelet/flux-distribute-local";
const PREFIX: &str = "opt/flux-distribute";

/// As `kubectl exec` would run it in the pod of `node`.
fn in_pod(cluster: &Cluster, node: &str, words: &[&str], stdin: Option<&fs::File>) -> Output {
    let (kubeconfig, name) = (format!("KUBECONFIG={IMAGE}/kubeconfig"), format!("NODE_NAME={node}"));
    let program = format!("{IMAGE}/flux-distribute");
    let all = [&["exec", node, "--", "env", &kubeconfig, &name, &program], words].concat();
    let stdin = stdin.map_or(Stdio::null(), |file| file.try_clone().unwrap().into());
    cluster.command(&all).stdin(stdin).output().unwrap()
}

fn must(cluster: &Cluster, node: &str, words: &[&str]) -> String {
    let output = in_pod(cluster, node, words, None);
    let (said, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{words:?}: {said} {stderr}");
    said.trim().to_owned()
}

/// It changes nothing, and says why.
fn refused(cluster: &Cluster, node: &str, words: &[&str], expected: &str) {
    let output = in_pod(cluster, node, words, None);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{words:?}: {stderr}");
    assert!(stderr.contains(expected), "{words:?}: {stderr}");
}

/// The lead's disk is a new one: its broker dies and finds no queue.
fn lose_the_disk(cluster: &Cluster, lead: &str) {
    fs::remove_dir_all(cluster.root(lead).join(PREFIX).join("state")).unwrap();
    kill(Pid::from_raw(cluster.brokers()[lead].pid), Signal::SIGKILL).unwrap();
    let said = cluster.until("the lead's message", || {
        let status = cluster.wait(cluster.api::<FluxNode>().get(lead)).unwrap().status?;
        status.message.filter(|message| message.contains("is gone from this host"))
    });
    assert!(said.contains("flux-distribute recover --lead NODE --from DUMP"), "{said}");
}

/// Nothing is reset before the lead has told whether jobs run.
fn until_told(cluster: &Cluster, lead: &str) {
    cluster.until("the lead's word on jobs", || {
        cluster.wait(cluster.api::<FluxNode>().get(lead)).unwrap().status?.allocated.map(drop)
    });
}

fn instance_id(cluster: &Cluster) -> String {
    cluster.instance().status.unwrap().instance_id.unwrap()
}

#[test]
fn a_lead_whose_disk_is_gone_is_recovered_on_another_node_with_its_pending_jobs() {
    let Some(cluster) = Cluster::up(3, &[]) else { return };
    let (lead, next) = (cluster.holder(0), cluster.holder(1));
    let pending = cluster.exec(&lead, &["flux", "submit", "-N3", "--urgency=hold", "hostname"]);
    let done = cluster.exec(&lead, &["flux", "submit", "-N1", "true"]);
    cluster.exec(&lead, &["flux", "job", "wait-event", "-t", "60", &done, "clean"]);
    cluster.job(&["-N3", "-n3"]);
    let id = instance_id(&cluster);

    // Kept on the lead, for root alone, and told.
    let said = must(&cluster, &lead, &["dump"]);
    let path = said.split_whitespace().next().unwrap();
    assert!(path.starts_with(&format!("/{PREFIX}/dump/{id}-")), "{said}");
    let on_host = cluster.root(&lead).join(&path[1..]);
    assert_eq!(fs::metadata(&on_host).unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(fs::metadata(on_host.parent().unwrap()).unwrap().permissions().mode() & 0o777, 0o700);
    let kept = cluster.until("the dump in the status", || cluster.instance().status?.dump);
    assert_eq!((kept.node.as_str(), path.ends_with(&kept.dump.name)), (lead.as_str(), true));
    // Off its disk.
    let begin = Instant::now();
    let dump = in_pod(&cluster, &lead, &["dump", "--out", "-"], None);
    assert!(dump.status.success(), "{}", String::from_utf8_lossy(&dump.stderr));
    eprintln!("measured: {:.2} s for a dump of {} bytes", begin.elapsed().as_secs_f64(), dump.stdout.len());
    must(&cluster, &lead, &["dump", "--out", "/root/queue.dump"]);
    assert_eq!(cluster.exec(&lead, &["stat", "-c", "%a %u", "/root/queue.dump"]), "600 0");
    cluster.exec(&lead, &["sh", "-c", "mkdir /srv/users && chmod 777 /srv/users"]);
    let open = in_pod(&cluster, &lead, &["dump", "--out", "/srv/users/queue.dump"], None);
    let words = String::from_utf8_lossy(&open.stderr);
    assert!(!open.status.success() && words.contains("can't write /srv/users/queue.dump"), "{words}");
    assert_eq!(cluster.exec(&lead, &["ls", "/srv/users"]), "");
    let nowhere = in_pod(&cluster, &lead, &["dump", "--out", "/nonexist/x"], None);
    let words = String::from_utf8_lossy(&nowhere.stderr);
    assert_eq!(nowhere.status.code(), Some(1), "{words}");
    assert!(words.contains("can't write /nonexist/x") && words.contains(&format!("/{PREFIX}/dump/{id}-")), "{words}");
    let saved = tempfile::NamedTempFile::new().unwrap();
    fs::write(saved.path(), &dump.stdout).unwrap();
    let broken = &dump.stdout[..dump.stdout.len() - 9];
    fs::write(cluster.root(&next).join("root/broken.tgz"), broken).unwrap();
    refused(&cluster, &next, &["dump"], "the queue is on the lead");

    let from = ["--from", "/root/broken.tgz"];
    let recover = |node| [&["recover", "--lead", node][..], &from].concat();
    refused(&cluster, &next, &recover(&next), "leads and is online");
    lose_the_disk(&cluster, &lead);
    refused(&cluster, &next, &recover("node9"), "run it in the pod of node node9");
    refused(&cluster, &next, &recover(&next), "/root/broken.tgz can't be read to its end");
    let pack = "mkdir -p x/flux-distribute x/resource; echo other >x/flux-distribute/instance-id; echo >x/resource/R; \
                tar -czf other.tgz -C x flux-distribute resource; tar -czf unnamed.tgz -C x resource";
    cluster.exec(&next, &["sh", "-c", pack]);
    let other = ["recover", "--lead", &next, "--from", "/root/other.tgz"];
    refused(&cluster, &next, &other, "is a dump of instance other");
    let unnamed = ["recover", "--lead", &next, "--from", "/root/unnamed.tgz"];
    refused(&cluster, &next, &unnamed, "does not name its instance");
    assert_eq!(cluster.holder(0), lead, "nothing by itself");

    let begin = Instant::now();
    let words = ["recover", "--lead", &next, "--from", "-"];
    let output = in_pod(&cluster, &next, &words, Some(&saved.reopen().unwrap()));
    let (said, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{said} {stderr}");
    eprintln!("measured: {:.1} s from recover to the new lead online", begin.elapsed().as_secs_f64());
    cluster.until("everybody", || (cluster.instance().status?.online == 3).then_some(()));
    eprintln!("measured: {:.1} s from recover to all online", begin.elapsed().as_secs_f64());
    assert_eq!((cluster.holder(0), cluster.holder(1)), (next.clone(), lead));
    assert_eq!((instance_id(&cluster), cluster.instance().status.unwrap().epoch), (id, 2));
    let left = cluster.exec(&next, &["find", &format!("/{PREFIX}/dump"), "-name", "*.new"]);
    assert_eq!(left, "");

    let jobs = cluster.exec(&next, &["flux", "jobs", "-ano", "{id} {status_abbrev} {result}"]);
    eprintln!("jobs afterwards:\n{jobs}");
    assert!(jobs.contains(&format!("{pending} S")) && jobs.contains(&format!("{done} CD COMPLETED")), "{jobs}");
    cluster.exec(&next, &["flux", "job", "urgency", &pending, "default"]);
    cluster.exec(&next, &["flux", "job", "wait-event", "-t", "60", &pending, "clean"]);
    assert_eq!(cluster.exec(&next, &["flux", "run", "-N3", "hostname"]).lines().count(), 3);

    // The same once more, with a new disk in the machine that leads: it keeps leading, in this epoch.
    lose_the_disk(&cluster, &next);
    let output = in_pod(&cluster, &next, &words, Some(&saved.reopen().unwrap()));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    cluster.until("everybody", || (cluster.instance().status?.online == 3).then_some(()));
    assert_eq!((cluster.holder(0), cluster.instance().status.unwrap().epoch), (next.clone(), 2));
    let jobs = cluster.exec(&next, &["flux", "jobs", "-ano", "{id} {status_abbrev}"]);
    assert!(jobs.contains(&format!("{pending} S")), "{jobs}");
}

#[test]
fn an_empty_queue_begins_only_on_purpose() {
    let Some(cluster) = Cluster::up(2, &[]) else { return };
    let (lead, other) = (cluster.holder(0), cluster.holder(1));
    let first = instance_id(&cluster);
    cluster.exec(&lead, &["flux", "submit", "-N2", "--urgency=hold", "hostname"]);
    lose_the_disk(&cluster, &lead);
    let reset = ["reset", "--lead", &lead];
    refused(&cluster, &lead, &reset, &format!("all jobs of instance {first}"));
    assert!(!cluster.brokers().contains_key(&lead), "not by itself");
    assert_eq!(cluster.holder(0), lead);
    assert_eq!(instance_id(&cluster), first);

    let yes = [&reset[..], &["--yes"]].concat();
    let begin = Instant::now();
    must(&cluster, &lead, &yes);
    cluster.until("everybody", || (cluster.instance().status?.online == 2).then_some(()));
    eprintln!("measured: {:.1} s from reset to all online", begin.elapsed().as_secs_f64());
    let second = cluster.until("its name", || Some(instance_id(&cluster)).filter(|id| *id != first));
    assert_eq!(cluster.exec(&lead, &["flux", "jobs", "-ano", "{id}"]), "");

    // One that runs, on another node: only when nothing runs, or when that is said too.
    cluster.job(&["-N2", "-n2"]);
    let elsewhere = ["reset", "--lead", &other, "--yes"];
    refused(&cluster, &other, &elsewhere, "jobs run");
    must(&cluster, &other, &[&elsewhere[..], &["--force"]].concat());
    cluster.until("everybody", || (cluster.instance().status?.online == 2).then_some(()));
    assert_eq!(cluster.holder(0), other);
    cluster.until("another one", || (instance_id(&cluster) != second).then_some(()));
    assert_eq!(cluster.exec(&other, &["flux", "jobs", "-ano", "{id}"]), "");
    // What was given up is still on its host.
    let kept = cluster.exec(&lead, &["find", &format!("/{PREFIX}"), "-maxdepth", "1", "-name", "state*"]);
    assert!(!kept.is_empty());
}

#[test]
fn dumps_are_made_as_often_as_the_spec_says() {
    let Some(cluster) = Cluster::up(1, &[]) else { return };
    assert_eq!(cluster.instance().status.unwrap().dump, None);
    cluster.patch(json!({"spec": {"state": {"dumpEvery": "1h"}}}));
    let kept = cluster.until("a dump", || cluster.instance().status?.dump);
    assert_eq!(kept.node, "node1");
    assert!(kept.dump.name.starts_with(&instance_id(&cluster)), "{kept:?}");
}

/// A process that hangs until this is dropped.
struct Hanging(Pid);

impl Hanging {
    fn parent_of(pid: i32) -> Self {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let parent = status.lines().find_map(|line| line.strip_prefix("PPid:")).unwrap().trim();
        let parent = Pid::from_raw(parent.parse().unwrap());
        kill(parent, Signal::SIGSTOP).unwrap();
        Self(parent)
    }
}

impl Drop for Hanging {
    fn drop(&mut self) {
        assert!(kill(self.0, Signal::SIGCONT).is_ok() || std::thread::panicking());
    }
}

/// `flux-distribute uninstall` on a node whose agent is gone, and where a kubelet that hangs starts no other one, which would
/// install again.
struct ByHand<'a> {
    cluster: &'a Cluster,
    root: PathBuf,
    shell: Child,
    kubelet: Hanging,
}

impl<'a> ByHand<'a> {
    fn begin(cluster: &'a Cluster, node: &str) -> Self {
        let root = cluster.root(node).join("root");
        for name in ["began", "go", "signal"] {
            let _ = fs::remove_file(root.join(name));
        }
        let wait_for = |name: &str| format!("until test -s /root/{name}; do sleep 0.1; done");
        let script = format!(
            "echo > /root/began; {}; {IMAGE}/flux-distribute uninstall & pid=$!
             ({}; kill -s $(cat /root/signal) $pid) & signals=$!
             wait $pid; code=$?; kill $signals; exit $code",
            wait_for("go"),
            wait_for("signal"),
        );
        let mut command = cluster.command(&["exec", node, "--", "sh", "-c", &script]);
        let shell = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        cluster.until("the shell", || root.join("began").exists().then_some(()));
        // The kubelet starts another agent some time after the one before has ended.
        let agent = cluster.until("an agent", || cluster.node(node).agent_pid);
        let kubelet = Hanging::parent_of(agent);
        kill(Pid::from_raw(agent), Signal::SIGKILL).unwrap();
        fs::write(root.join("go"), "go").unwrap();
        Self { cluster, root, shell, kubelet }
    }

    fn signal(&self, name: &str) {
        fs::write(self.root.join("signal"), name).unwrap();
    }

    /// The kubelet continues, and starts another agent.
    fn end(self) -> Output {
        let Self { shell, kubelet, .. } = self;
        let output = shell.wait_with_output().unwrap();
        drop(kubelet);
        output
    }

    fn until_queue(&self, other: &str, words: &str) {
        self.cluster
            .until(words, || self.cluster.exec(other, &["flux", "queue", "status"]).contains(words).then_some(()));
    }
}

const STOPPED_BY_HAND: &str = "Scheduling is stopped: flux-distribute: a host is being uninstalled by hand";

#[test]
fn an_uninstall_by_hand_of_a_follower_keeps_jobs_off_that_host_alone() {
    let Some(cluster) = Cluster::up(2, &[]) else { return };
    let (lead, node) = (cluster.holder(0), cluster.holder(1));
    let output = ByHand::begin(&cluster, &node).end();
    assert!(output.status.success(), "{output:?}");
    let events = cluster.exec(&lead, &["flux", "kvs", "get", "resource.eventlog"]);
    assert!(events.contains("this host is being uninstalled by hand"), "{events}");
    let status = cluster.exec(&lead, &["flux", "queue", "status"]);
    assert!(status.contains("Scheduling is started"), "{status}");
    // Installed again, it gets jobs again.
    cluster.all_online(2);
    cluster.exec(&lead, &["flux", "run", "-N2", "true"]);
}

#[test]
fn an_interrupted_uninstall_by_hand_starts_the_queues_again() {
    let Some(cluster) = Cluster::up(2, &[]) else { return };
    let (lead, other) = (cluster.holder(0), cluster.holder(1));
    let before = cluster.brokers();
    let lock = |node: &str| {
        let path = cluster.root(node).join(PREFIX).join("lock");
        let file = || OpenOptions::new().read(true).write(true).open(&path).unwrap();
        cluster.until("the host's lock", || Flock::lock(file(), FlockArg::LockExclusiveNonblock).ok())
    };

    // Ctrl-C while the command waits for other work on the host.
    let (held, uninstall) = (lock(&lead), ByHand::begin(&cluster, &lead));
    uninstall.until_queue(&other, STOPPED_BY_HAND);
    uninstall.signal("INT");
    let output = uninstall.end();
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && stderr.contains("the queues are started again"), "{output:?}");
    drop(held);
    let status = cluster.exec(&other, &["flux", "queue", "status"]);
    assert!(status.contains("Scheduling is started"), "{status}");
    cluster.all_online(2);

    // The same on a follower.
    let drained = || cluster.exec(&lead, &["flux", "resource", "drain", "-no", "{ranks} {reason}"]);
    let (held, uninstall) = (lock(&other), ByHand::begin(&cluster, &other));
    cluster.until("the drain", || {
        drained().contains("1 flux-distribute uninstall: this host is being uninstalled").then_some(())
    });
    uninstall.signal("TERM");
    let output = uninstall.end();
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && stderr.contains("rank 1 gets jobs again"), "{output:?}");
    drop(held);
    assert_eq!(drained(), "");
    cluster.all_online(2);

    // It fails: the other work takes too long.
    let (held, uninstall) = (lock(&lead), ByHand::begin(&cluster, &lead));
    uninstall.until_queue(&other, STOPPED_BY_HAND);
    let output = uninstall.end();
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(stderr.contains("the queues are started again") && stderr.contains("other work"), "{output:?}");
    drop(held);
    cluster.all_online(2);

    // Killed, it can't do that itself: the lead's agent does.
    let (held, uninstall) = (lock(&lead), ByHand::begin(&cluster, &lead));
    uninstall.until_queue(&other, STOPPED_BY_HAND);
    uninstall.signal("KILL");
    let output = uninstall.end();
    assert!(!output.status.success(), "{output:?}");
    drop(held);
    cluster.until("the queue", || {
        cluster.exec(&other, &["flux", "queue", "status"]).contains("Scheduling is started").then_some(())
    });
    cluster.exec(&lead, &["flux", "run", "-N2", "true"]);
    assert_eq!(cluster.brokers(), before);
}

#[test]
fn a_purged_host_has_nothing_of_ours() {
    let Some(cluster) = Cluster::up(2, &[]) else { return };
    let node = cluster.holder(1);
    let job = cluster.job(&["-N2", "-n2"]);
    let uninstall = |options: &[&str]| in_pod(&cluster, &node, &[&["uninstall", "--purge"], options].concat(), None);
    let refused = |expected: &str| {
        let output = uninstall(&[]);
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(2) && stderr.contains(expected), "{stderr}");
    };
    let before = cluster.brokers();
    refused("jobs are running");
    job.finish();
    cluster.until("the end of the jobs' shells", || {
        let stderr = String::from_utf8_lossy(&uninstall(&[]).stderr).into_owned();
        stderr.contains("runs on this host and would install again").then_some(())
    });
    assert_eq!(cluster.brokers(), before);

    // An agent that does nothing meanwhile.
    let agent = Pid::from_raw(cluster.node(&node).agent_pid.unwrap());
    kill(agent, Signal::SIGSTOP).unwrap();
    let begin = Instant::now();
    let output = uninstall(&["--force"]);
    let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains("this host is clean"), "{said}");
    eprintln!("measured: {:.1} s to purge a host", begin.elapsed().as_secs_f64());
    assert!(!cluster.brokers().contains_key(&node));
    for path in [PREFIX, "opt/flux", "flux-connect.sh"] {
        assert!(fs::symlink_metadata(cluster.root(&node).join(path)).is_err(), "{path} is left");
    }
    let find = ["find", "/opt", "/run", "-mindepth", "1", "-not", "-path", "/run/boot-id"];
    assert_eq!(cluster.exec(&node, &find), "");
    let groups = cluster.exec(&node, &["find", "/sys/fs/cgroup", "-name", "flux*"]);
    assert!(!groups.contains("flux"), "{groups}");
    // Once more, by the name of what there is now.
    let output = uninstall(&["--force"]);
    assert!(String::from_utf8_lossy(&output.stdout).contains("nothing was claimed"), "{output:?}");

    // And again: it is as if it had never been there.
    kill(agent, Signal::SIGCONT).unwrap();
    cluster.until("both online again", || {
        let nodes = cluster.nodes();
        (nodes.iter().all(super::harness::NodeStatus::is_online) && cluster.brokers().len() == 2).then_some(())
    });
}

#[test]
fn the_next_instance_can_continue_a_queue_that_an_uninstall_kept() {
    let Some(cluster) = Cluster::up(2, &[]) else { return };
    let lead = cluster.holder(0);
    let instances = cluster.api::<FluxInstance>();
    let pending = cluster.exec(&lead, &["flux", "submit", "-N2", "--urgency=hold", "hostname"]);
    let first = instance_id(&cluster);
    let spec = FluxInstanceSpec { lead: Some(lead.clone()), ..cluster.instance().spec };

    // Said right before: an agent that is in the middle of something hears both at once.
    cluster.patch(json!({"spec": {"uninstall": {"keepState": true}}}));
    cluster.wait(instances.delete(INSTANCE, &DeleteParams::default())).unwrap();
    cluster.until_deleted();
    let left = cluster.exec(&lead, &["ls", "-A", &format!("/{PREFIX}")]);
    assert_eq!(left, "state");
    cluster.wait(instances.create(&PostParams::default(), &FluxInstance::new(INSTANCE, spec))).unwrap();
    cluster.all_online(2);
    assert_ne!(instance_id(&cluster), first);
    assert_eq!(cluster.exec(&lead, &["flux", "jobs", "--no-header", "-a"]), "");

    let reset = |id, more: &[&'static str]| [&["reset", "--lead", &lead, "--kept", id], more].concat();
    until_told(&cluster, &lead);
    refused(&cluster, &lead, &reset("nothing", &["--yes"]), &format!("there are {first}"));
    refused(&cluster, &lead, &reset(&first, &[]), "add --yes");
    must(&cluster, &lead, &reset(&first, &["--yes"]));
    cluster.until("the instance of before", || (instance_id(&cluster) == first).then_some(()));
    cluster.all_online(2);
    cluster.exec(&lead, &["flux", "job", "urgency", &pending, "default"]);
    cluster.exec(&lead, &["flux", "job", "wait-event", "-t", "60", &pending, "clean"]);
    refused(&cluster, &lead, &reset(&first, &["--yes"]), "no queue of instance");
}
