//! A script that runs as user nobody on a node, and the check of its effects.

use std::{
    collections::BTreeSet,
    io::{BufRead, BufReader, Lines},
    process::{Child, ChildStdin, ChildStdout, Stdio},
};

use crate::harness::Cluster;

/// The attacker: a user of the node without any right, as `nobody` is.
pub const USER: &str = "65534";

/// What a script prints once its attack is under way.
const UNDER_WAY: &str = "under way";

/// A script that attacks until its stdin ends, which happens when this is dropped.
pub struct Attack {
    script: Child,
    stdin: Option<ChildStdin>,
    said: Lines<BufReader<ChildStdout>>,
    /// What the script printed before it was under way.
    pub found: Vec<String>,
}

impl Attack {
    /// Starts `script`, the text of a file of this directory, as user nobody on `node`, with `words` as its arguments. Returns once
    /// the script says that it is under way.
    pub fn begin(cluster: &Cluster, node: &str, script: &str, words: &[&str]) -> Self {
        let shell = ["setpriv", "--reuid", USER, "--regid", USER, "--clear-groups"];
        let clean = ["env", "--ignore-environment", "--chdir=/tmp", "HOME=/tmp", "PATH=/usr/sbin:/usr/bin:/sbin:/bin"];
        let command = [&["exec", node, "--"], &shell[..], &clean, &["sh", "-uc", script, "attack"], words].concat();
        let mut script = cluster.command(&command).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let stdin = script.stdin.take();
        let mut said = BufReader::new(script.stdout.take().unwrap()).lines();
        let mut found = Vec::new();
        loop {
            match said.next() {
                Some(line) if line.as_ref().unwrap() == UNDER_WAY => break,
                Some(line) => found.push(line.unwrap()),
                None => panic!("the attack ended before it was under way: {found:?}"),
            }
        }
        Self { script, stdin, said, found }
    }

    /// Ends the attack. What the script printed since it was under way.
    pub fn end(mut self) -> Vec<String> {
        drop(self.stdin.take());
        self.said.by_ref().map(Result::unwrap).collect()
    }
}

impl Drop for Attack {
    fn drop(&mut self) {
        drop(self.stdin.take());
        let status = self.script.wait();
        assert!(status.is_ok_and(|status| status.success()) || std::thread::panicking(), "the script failed");
    }
}

/// Files and directories of the nodes that user nobody owns or may write, except those that every user may write.
pub fn owned_or_writable_by_users(cluster: &Cluster) -> BTreeSet<(String, String)> {
    let places = ["/etc", "/home", "/opt", "/root", "/run", "/srv", "/var/lib", "/var/log"];
    let theirs = ["(", "-uid", USER, "-o", "-gid", USER, "-o", "-perm", "-o=w", "!", "-type", "l", ")"];
    let look = |node: String| {
        cluster.exec(&node, &[&["ls", "-d"], &places[..]].concat());
        let find = [&["exec", &node, "--", "find"], &places[..], &["-xdev"], &theirs, &["!", "-type", "s"]].concat();
        let output = cluster.run(&find);
        // An agent may remove a directory between find's look at it and its opening, which find(1) calls a failure even with
        // -ignore_readdir_race.
        let said = String::from_utf8(output.stderr).unwrap();
        let is_gone = |line: &str| line.starts_with("find: ") && line.ends_with(": No such file or directory");
        assert!(said.lines().all(is_gone), "{find:?}: {said}");
        assert!(output.status.success() || !said.is_empty(), "{find:?}: {}", output.status);
        let found = String::from_utf8(output.stdout).unwrap();
        found.lines().map(|path| (node.clone(), path.to_owned())).collect::<Vec<_>>()
    };
    cluster.nodes().into_iter().flat_map(|node| look(node.name)).collect()
}

/// The verdict: the user owns and can write no more than `before`, all nodes are online, the FluxInstance is Ready, and a job runs
/// on all nodes.
pub fn nothing_gained(cluster: &Cluster, before: &BTreeSet<(String, String)>) {
    let gained: Vec<_> = owned_or_writable_by_users(cluster).difference(before).cloned().collect();
    assert!(gained.is_empty(), "the user has gained {gained:?}");
    let nodes = cluster.nodes().len();
    cluster.all_online(u32::try_from(nodes).unwrap());
    cluster.until("the instance Ready", || cluster.instance().status?.holding("Ready").map(drop));
    let count = format!("-N{nodes}");
    let hosts = cluster.until("a job on all nodes", || cluster.ask("node1", &["flux", "run", &count, "hostname"]));
    assert_eq!(hosts.lines().count(), nodes, "{hosts}");
}
