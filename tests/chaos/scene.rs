//! A cluster with a job that runs over all of its nodes: what the faults are brought into.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
    thread::sleep,
    time::{Duration, Instant},
};

use api::FluxInstanceSpec;
use nix::sys::signal::Signal;

use crate::{
    dice::Dice,
    gang::Gang,
    harness::{Broker, Cluster, ran_well},
    processes::{self, Kind, Process},
    rosters::Rosters,
    rows::Shape,
};

/// For one command in a node.
pub const COMMAND: Duration = Duration::from_secs(20);

/// What a fault has hit, and since when it can heal.
pub struct Hit {
    pub since: Instant,
    /// Nodes whose brokers may be others afterwards.
    pub restarted: BTreeSet<String>,
}

impl Hit {
    /// Everything that ran must still run afterwards.
    pub fn none() -> Self {
        Self { since: Instant::now(), restarted: BTreeSet::new() }
    }

    pub fn brokers_of(nodes: impl IntoIterator<Item = String>) -> Self {
        Self { since: Instant::now(), restarted: nodes.into_iter().collect() }
    }
}

/// A job that runs until it is let go, on a core of each of its nodes.
pub struct Job {
    id: String,
    nodes: u32,
    /// Ends it, in every node's root.
    signal: String,
}

pub struct Scene {
    pub cluster: Cluster,
    pub shape: &'static Shape,
    /// How many must be there.
    pub nodes: u32,
    /// Of the last instance that was deleted.
    pub spec: FluxInstanceSpec,
    /// The row that it is in, and which run of it.
    pub row: &'static str,
    pub run: u32,
    pub dice: Dice,
    /// How long what is cut off stays so.
    pub outage: Duration,
    pub rosters: Rosters,
    /// There are cores beside the job.
    pub has_free_core: bool,
    jobs: u32,
    job: Option<Job>,
    /// Pods are on.
    pods: bool,
    gangs: u32,
    gang: Option<Gang>,
}

impl Scene {
    pub fn set(shape: &'static Shape, outage: Duration, pods: bool) -> Self {
        // Each node unpacks a bundle: many clusters at once would be up later than one after the other.
        static BEGINNING: Mutex<()> = Mutex::new(());
        let cluster = {
            let _turn = BEGINNING.lock().unwrap_or_else(PoisonError::into_inner);
            let more: &[&str] = if pods { &["--pods"] } else { &[] };
            Cluster::up(shape.nodes, &[shape.options, more].concat()).expect("a bundle")
        };
        let rosters = Rosters::default();
        cluster.spawn(rosters.clone().follow(cluster.client()));
        let dice = Dice::new(0, "", 0);
        let mut scene = Self {
            cluster,
            shape,
            nodes: shape.nodes,
            spec: FluxInstanceSpec::default(),
            row: "",
            run: 0,
            dice,
            outage,
            rosters,
            has_free_core: false,
            jobs: 0,
            job: None,
            pods,
            gangs: 0,
            gang: None,
        };
        let nodes = shape.nodes.to_string();
        scene.until("all nodes up", Duration::from_mins(1), |scene| {
            let up = scene.ask(&["flux", "resource", "list", "-s", "up", "-no", "{nnodes}"])?;
            if up == nodes { Ok(()) } else { Err(format!("{up} nodes are up")) }
        });
        let cores = scene.ask(&["flux", "resource", "list", "-s", "up", "-no", "{ncores}"]).unwrap();
        scene.has_free_core = cores.parse::<u32>().unwrap() >= if pods { 3 } else { 2 } * shape.nodes;
        scene.begin_job();
        scene.begin_gang();
        scene
    }

    /// Begins a gang of pods on the nodes that the job is not on, if pods are on: a machine of two cores gives Flux one.
    fn begin_gang(&mut self) {
        if self.pods {
            self.gangs += 1;
            let size = match self.job.as_ref().map_or(0, |job| job.nodes) {
                0 => self.nodes / 2,
                of_job => self.nodes.saturating_sub(of_job).max(1),
            };
            self.gang = Some(Gang::begin(self, format!("g{}", self.gangs), size));
        }
    }

    /// What has become of the gang of pods. See [`Gang::look`].
    pub fn look_at_gang(&self) -> Result<(), String> {
        self.gang.as_ref().map_or(Ok(()), |gang| gang.look(self))
    }

    /// Begins another gang if machines have taken pods with them, and another job if that `is_lost`, or has ended.
    pub fn renew(&mut self, is_lost: bool) {
        if is_lost {
            self.job = None;
        }
        if let Some(gang) = self.gang.take() {
            if gang.is_incomplete(self) {
                gang.remove(self);
                self.begin_gang();
            } else {
                self.gang = Some(gang);
            }
        }
        if self.job.is_none() {
            self.begin_job();
        }
    }

    /// Waits for something; it must come.
    pub fn until<T>(&self, what: &str, limit: Duration, mut look: impl FnMut(&Self) -> Result<T, String>) -> T {
        let end = Instant::now() + limit;
        loop {
            match look(self) {
                Ok(found) => return found,
                Err(why) if Instant::now() > end => panic!("waited in vain for {what}: {why}"),
                Err(_) => sleep(Duration::from_millis(100)),
            }
        }
    }

    pub fn processes(&self) -> Vec<Process> {
        processes::of(self.cluster.bridge())
    }

    /// By node.
    pub fn agents(&self) -> BTreeMap<String, Process> {
        let agents = self.processes().into_iter().filter(|process| process.kind == Kind::Agent);
        agents.map(|agent| (agent.node.clone(), agent)).collect()
    }

    /// A node's PID 1, on the machine: its namespaces last as long as the node is on.
    pub fn init(&self, node: &str) -> i32 {
        *self.inits().get(node).unwrap_or_else(|| panic!("{node} is off"))
    }

    /// The same of all nodes that are on.
    pub fn inits(&self) -> BTreeMap<String, i32> {
        let is_init = |process: &Process| {
            let name = format!("init [{}]", process.node);
            matches!(&process.kind, Kind::Other(command) if command.starts_with(&name))
        };
        let inits = self.processes().into_iter().filter(is_init);
        inits.map(|process| (process.node, process.pid)).collect()
    }

    pub fn brokers(&self) -> BTreeMap<String, Broker> {
        self.cluster.brokers()
    }

    pub fn names(&self) -> Vec<String> {
        self.brokers().into_keys().collect()
    }

    /// The node whose broker has `rank`.
    pub fn holder(&self, rank: u32) -> String {
        let brokers = self.brokers();
        let found = brokers.iter().find(|(_, broker)| broker.rank == rank);
        found.unwrap_or_else(|| panic!("no broker has rank {rank}: {brokers:?}")).0.clone()
    }

    /// In the tree kary:2: the nodes of `rank` and of all ranks below it.
    pub fn below(&self, rank: u32) -> Vec<String> {
        let is_below = |mut of: u32| {
            while of > rank {
                of = (of - 1) / 2;
            }
            of == rank
        };
        self.brokers().into_iter().filter(|(_, broker)| is_below(broker.rank)).map(|(node, _)| node).collect()
    }

    /// In the same tree: a rank but the lead's with others below it, or one without children. A broker that was below a node that is
    /// gone may have another place since.
    pub fn pick_rank(&mut self, interior: bool) -> u32 {
        let ranks: Vec<_> = self.brokers().values().map(|broker| broker.rank).filter(|rank| *rank != 0).collect();
        let fit: Vec<_> = ranks.into_iter().filter(|rank| (self.below(*rank).len() > 1) == interior).collect();
        assert!(!fit.is_empty(), "interior {interior}: {:?}", self.brokers());
        self.dice.pick(&fit)
    }

    pub fn lead(&self) -> String {
        self.holder(0)
    }

    pub fn pick_node(&mut self) -> String {
        let names = self.names();
        self.dice.pick(&names)
    }

    /// A node that is not the lead.
    pub fn pick_follower(&mut self) -> String {
        let lead = self.lead();
        let names: Vec<_> = self.names().into_iter().filter(|name| *name != lead).collect();
        self.dice.pick(&names)
    }

    /// What a command says on the lead's node.
    pub fn ask(&self, words: &[&str]) -> Result<String, String> {
        let lead = self.brokers().into_iter().find(|(_, broker)| broker.rank == 0);
        let (lead, _) = lead.ok_or("the lead's broker does not run")?;
        self.ask_on(&lead, words)
    }

    pub fn ask_on(&self, node: &str, words: &[&str]) -> Result<String, String> {
        let limit = COMMAND.as_secs().to_string();
        let words = [&["exec", node, "--", "timeout", "-k", "1", &limit], words].concat();
        let output = self.cluster.run(&words);
        let said = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        if output.status.success() {
            return Ok(said);
        }
        let error = String::from_utf8_lossy(&output.stderr);
        Err(format!("{}: {} {said} {}", words[7..].join(" "), output.status, error.trim()))
    }

    /// SIGSTOP, and SIGCONT after `pause`.
    pub fn stop_for(&self, pids: &[i32], pause: Duration) {
        pids.iter().for_each(|pid| processes::send(*pid, Signal::SIGSTOP));
        sleep(pause);
        pids.iter().for_each(|pid| processes::send(*pid, Signal::SIGCONT));
    }

    /// Starts the job. It is on all nodes, or on those that the gang of pods is not on.
    pub fn begin_job(&mut self) {
        let of_pods = match &self.gang {
            Some(gang) => gang.size(),
            None if self.pods => self.nodes / 2,
            None => 0,
        };
        self.job = Some(self.submit(self.nodes - of_pods, &[]));
    }

    /// Starts a job on these two nodes: beside the other job if there is a core for it, else instead of that one, and beside a new gang of pods.
    pub fn submit_on(&mut self, nodes: [&str; 2]) -> Job {
        let hosts = format!("--requires=host:{}", nodes.join(","));
        if self.has_free_core {
            return self.submit(2, &[&hosts]);
        }
        self.end_job().unwrap();
        if let Some(gang) = self.gang.take() {
            gang.remove(self);
        }
        let job = self.submit(2, &[&hosts]);
        self.begin_gang();
        job
    }

    /// Starts a job; returns once it runs. `options`: of flux-submit(1).
    fn submit(&mut self, nodes: u32, options: &[&str]) -> Job {
        self.jobs += 1;
        let signal = format!("root/end-{}", self.jobs);
        let script = format!("until test -e /{signal}; do sleep 0.5; done; touch /{signal}-seen");
        let number = nodes.to_string();
        let words = [&["flux", "submit", "-N", &number, "-n", &number], options, &["sh", "-c", &script]].concat();
        let id = self.until("the job", Duration::from_secs(30), |scene| scene.ask(&words));
        let begun = self.ask(&["flux", "job", "wait-event", "-t", "15", "-W", "-p", "exec", &id, "shell.start"]);
        begun.unwrap_or_else(|why| panic!("the job does not start: {why}"));
        Job { id, nodes, signal }
    }

    /// How many nodes the job is on.
    pub fn job_nodes(&self) -> usize {
        self.job.as_ref().map_or(0, |job| job.nodes as usize)
    }

    /// Why the job does not run as if nothing had been.
    pub fn job_is_lost(&self) -> Option<String> {
        let job = self.job.as_ref()?;
        match self.ask(&["flux", "job", "eventlog", &job.id]) {
            Err(why) => Some(why),
            Ok(events) => {
                events.lines().find(|line| line.contains(" exception ") || line.contains(" finish ")).map(str::to_owned)
            }
        }
    }

    /// The job's end, which must be a good one.
    pub fn end_job(&mut self) -> Result<(), String> {
        self.job.take().map_or(Ok(()), |job| self.end(&job))
    }

    /// A job's end, which must be a good one.
    pub fn end(&self, job: &Job) -> Result<(), String> {
        self.let_end(job);
        self.ask(&["flux", "job", "wait-event", "-t", "15", &job.id, "clean"])?;
        let events = self.ask(&["flux", "job", "eventlog", &job.id])?;
        if ran_well(&events) { Ok(()) } else { Err(events) }
    }

    /// For the job whose end may be Flux's as well, so that Flux can't be asked about it: how many nodes it is on, and what it leaves on these
    /// when it ends by itself.
    pub fn let_job_end(&mut self) -> (usize, Vec<PathBuf>) {
        let nodes = self.job_nodes();
        let job = self.job.take().expect("a job");
        self.let_end(&job);
        let left = |node: &String| self.cluster.root(node).join(format!("{}-seen", job.signal));
        (nodes, self.names().iter().map(left).collect())
    }

    fn let_end(&self, job: &Job) {
        for node in self.names() {
            let _ = fs::write(self.cluster.root(&node).join(&job.signal), "");
        }
    }

    /// Logs and status, for people who look into a failure.
    pub fn save(&self, directory: &Path) {
        let _ = fs::create_dir_all(directory);
        let state = self.cluster.state();
        let _ = fs::copy(state.join("daemon.log"), directory.join("daemon.log"));
        let _ = fs::write(directory.join("status"), self.cluster.run(&["status"]).stdout);
        let asked = "flux queue status; flux resource list; flux resource status; flux overlay status; flux jobs -a; flux dmesg";
        let said = self.ask(&["sh", "-c", asked]).unwrap_or_else(|why| why);
        let _ = fs::write(directory.join("flux"), said);
        let _ = fs::write(directory.join("processes"), format!("{:#?}", self.processes()));
        for node in fs::read_dir(state.join("nodes")).into_iter().flatten().flatten() {
            let name = node.file_name();
            let name = name.to_string_lossy();
            let _ = fs::copy(node.path().join("agent.log"), directory.join(format!("{name}.agent.log")));
            let broker = node.path().join("root/opt/flux-distribute/log/broker.log");
            let _ = fs::copy(broker, directory.join(format!("{name}.broker.log")));
        }
    }
}
