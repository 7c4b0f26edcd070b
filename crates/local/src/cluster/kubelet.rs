//! The kubelet of one simulated node: boots it, keeps the agent's pod running, and reports the node's state to the API.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use kube::Client;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use tokio::{
    process::Child,
    sync::{mpsc, oneshot, watch},
    time::{Instant, sleep, timeout},
};
use tracing::{info, warn};

use super::{
    bound::{AllPods, BoundPods},
    cgroup,
    control::{NodeView, START_LIMIT, read_pid, read_report, start_helper},
    layout::{Cluster, Layout},
    mounts, objects,
};
use crate::error::{Context, LocalError};
use base::error_chain;
use host::{Root, facts};

/// Shortest and longest pause between two starts of an agent: shorter than a real kubelet's, so that tests end sooner.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(5));
/// After an agent has run this long, the next pause is the shortest again.
const STEADY: Duration = Duration::from_secs(10);
/// The DaemonSet's terminationGracePeriodSeconds.
const GRACE: Duration = Duration::from_mins(2);

/// An order to a kubelet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Action {
    RestartAgent,
    KillAgent,
    PowerOff,
    PowerOn,
    Remove,
    /// The daemon ends: like [`Action::PowerOff`], but the API server is not updated.
    Shutdown,
}

/// Receives the result of an action.
pub(crate) type Reply = oneshot::Sender<Result<(), LocalError>>;
pub(crate) type Order = (Action, Reply);
/// All nodes, by number.
pub(crate) type Views = Arc<Mutex<BTreeMap<u32, NodeView>>>;

/// One node and the daemon's shared state.
pub(crate) struct Kubelet {
    pub(crate) layout: Layout,
    pub(crate) cluster: Arc<Cluster>,
    pub(crate) client: Client,
    pub(crate) number: u32,
    pub(crate) name: String,
    pub(crate) views: Views,
    pub(crate) pods: AllPods,
    /// True once all nodes of the same order are up.
    pub(crate) others: watch::Receiver<bool>,
}

/// A node that is up.
struct Machine {
    helper: Child,
    init: i32,
}

/// An agent that runs.
struct Pod {
    shim: Child,
    agent: i32,
}

/// Why a node is no longer up.
enum Off {
    /// Its PID 1 is gone, or it never came up.
    Died,
    Ordered(Action, Reply),
}

/// Why a pod ended or must end.
enum PodEnd {
    Ended,
    Restart(Reply),
    Node(Off),
}

impl Kubelet {
    /// Runs until the node is removed or the daemon ends. `first` answers the order that created the node.
    pub(crate) async fn run(self, mut orders: mpsc::Receiver<Order>, first: Reply) {
        let mut booting = Some(first);
        while let Some(reply) = booting.take() {
            let off = self.run_until_off(reply, &mut orders).await;
            if let Err(error) = self.kill(&self.cluster.node_cgroup(&self.name)).await {
                warn!(node = self.name, error = error_chain(&error), "can't kill the node's remaining processes");
            }
            self.show(|view| (view.init_pid, view.agent_pid) = (None, None));
            let next = match off {
                Off::Ordered(Action::Shutdown, reply) => return answer(reply, Ok(())),
                Off::Ordered(Action::Remove, reply) => return answer(reply, self.remove().await),
                Off::Ordered(_, reply) => {
                    answer(reply, self.report(None).await);
                    self.wait_for_power(&mut orders).await
                }
                Off::Died => {
                    warn!(node = self.name, "the node is down");
                    if let Err(error) = self.report(None).await {
                        warn!(node = self.name, error = error_chain(&error), "can't report the node's state");
                    }
                    self.wait_for_power(&mut orders).await
                }
            };
            match next {
                Some((Action::PowerOn, reply)) => booting = Some(reply),
                Some((Action::Remove, reply)) => return answer(reply, self.remove().await),
                Some((_, reply)) => return answer(reply, Ok(())),
                None => return,
            }
        }
    }

    /// Waits for the first order that makes a difference to a node that is off.
    async fn wait_for_power(&self, orders: &mut mpsc::Receiver<Order>) -> Option<Order> {
        loop {
            match orders.recv().await? {
                (Action::PowerOff, reply) => answer(reply, Ok(())),
                (Action::RestartAgent | Action::KillAgent, reply) => {
                    answer(reply, Err(LocalError::PoweredOff(self.name.clone())));
                }
                order => return Some(order),
            }
        }
    }

    /// Boots the node and runs it until it is off again.
    async fn run_until_off(&self, reply: Reply, orders: &mut mpsc::Receiver<Order>) -> Off {
        let booted = async {
            let machine = self.boot().await?;
            let kind = self.layout.kind(&self.name)?;
            objects::register(&self.client, kind.node_of(&self.name), &kind).await?;
            self.report(Some(machine.init)).await?;
            Ok::<_, LocalError>((machine, kind.node_of(&self.name).to_owned()))
        };
        let (mut machine, node) = match booted.await {
            Ok(booted) => booted,
            Err(error) => {
                self.show(|view| view.error = Some(error_chain(&error)));
                answer(reply, Err(error));
                return Off::Died;
            }
        };
        info!(node = self.name, pid = machine.init, "the node is up");
        self.show(|view| (view.init_pid, view.error) = (Some(machine.init), None));
        answer(reply, Ok(()));
        // As when a DaemonSet is applied to an existing cluster: a planner that started earlier would consider a node
        // that boots slowly as joining later, and such nodes get the names of spares.
        let _ = self.others.clone().wait_for(|all_up| *all_up).await;
        let bound = self.bound_pods(node, machine.init);
        // Once the node is going off, nothing is reported about its pods any more: a node without power says nothing.
        let off = tokio::select! {
            off = self.keep_agent(&mut machine, orders) => off,
            never = bound.run() => match never {},
        };
        // The kernel kills the whole PID namespace with its PID 1; then the helper exits too.
        let _ = kill(Pid::from_raw(machine.init), Signal::SIGKILL);
        let _ = machine.helper.wait().await;
        off
    }

    async fn boot(&self) -> Result<Machine, LocalError> {
        let log = self.layout.node_log(&self.name);
        let (helper, mut lines) = start_helper(&self.layout, &["make-node", &self.name], &log, b"").await?;
        let init = read_pid(&mut lines, &self.name).await?;
        // The second line comes from PID 1 itself.
        read_report(&mut lines, START_LIMIT, &self.name).await?;
        Ok(Machine { helper, init })
    }

    /// Keeps an agent running until the node goes off.
    async fn keep_agent(&self, machine: &mut Machine, orders: &mut mpsc::Receiver<Order>) -> Off {
        let mut uid = uuid::Uuid::new_v4().to_string();
        let mut backoff = BACKOFF.0;
        let mut waiting: Option<Reply> = None;
        loop {
            let since = Instant::now();
            let mut pod = match self.start_pod(machine.init, &uid).await {
                Ok(pod) => {
                    self.show(|view| (view.agent_pid, view.error) = (Some(pod.agent), None));
                    if let Some(reply) = waiting.take() {
                        answer(reply, Ok(()));
                    }
                    Some(pod)
                }
                Err(error) => {
                    warn!(node = self.name, error = error_chain(&error), "the pod does not start");
                    self.show(|view| view.error = Some(error_chain(&error)));
                    if let Some(reply) = waiting.take() {
                        answer(reply, Err(error));
                    }
                    None
                }
            };
            let mut end = match &mut pod {
                Some(pod) => self.watch(machine, pod, orders).await,
                None => PodEnd::Ended,
            };
            if let (Some(pod), PodEnd::Restart(_)) = (&mut pod, &end) {
                // A rollout: SIGTERM first, like a kubelet; after the grace period, `clear` kills the rest.
                let _ = kill(Pid::from_raw(pod.agent), Signal::SIGTERM);
                let _ = timeout(GRACE, pod.shim.wait()).await;
            }
            self.clear(&uid, pod).await;
            self.show(|view| (view.agent_pid, view.restarts) = (None, view.restarts + 1));
            if matches!(end, PodEnd::Ended) {
                backoff = if since.elapsed() >= STEADY { BACKOFF.0 } else { backoff };
                end = self.pause(backoff, machine, orders).await;
                backoff = (backoff * 2).min(BACKOFF.1);
            }
            match end {
                PodEnd::Ended => {}
                PodEnd::Restart(reply) => {
                    uid = uuid::Uuid::new_v4().to_string();
                    backoff = BACKOFF.0;
                    waiting = Some(reply);
                }
                PodEnd::Node(off) => return off,
            }
        }
    }

    async fn start_pod(&self, init: i32, uid: &str) -> Result<Pod, LocalError> {
        // A DaemonSet's pods have such names, ending with five characters that are unique in the cluster.
        let pod = format!("{}-{}", api::DAEMONSET, &uid[..5]);
        let log = self.layout.agent_log(&self.name);
        let words = ["make-pod", &self.name, &init.to_string(), uid, &pod];
        let (shim, mut lines) = start_helper(&self.layout, &words, &log, b"").await?;
        let agent = read_pid(&mut lines, &format!("the agent of {}", self.name)).await?;
        Ok(Pod { shim, agent })
    }

    async fn watch(&self, machine: &mut Machine, pod: &mut Pod, orders: &mut mpsc::Receiver<Order>) -> PodEnd {
        loop {
            tokio::select! {
                _ = machine.helper.wait() => return PodEnd::Node(Off::Died),
                status = pod.shim.wait() => {
                    info!(node = self.name, status = status.map(|s| s.to_string()).unwrap_or_default(), "the agent ended");
                    return PodEnd::Ended;
                }
                order = orders.recv() => match order {
                    Some((Action::KillAgent, reply)) => {
                        let killed = kill(Pid::from_raw(pod.agent), Signal::SIGKILL);
                        answer(reply, killed.context(|| format!("can't kill the agent of {}", self.name)));
                    }
                    Some(order) => if let Some(end) = after(order) { return end },
                    None => return PodEnd::Node(Off::Died),
                },
            }
        }
    }

    async fn pause(&self, backoff: Duration, machine: &mut Machine, orders: &mut mpsc::Receiver<Order>) -> PodEnd {
        let end = Instant::now() + backoff;
        loop {
            tokio::select! {
                () = sleep(end.saturating_duration_since(Instant::now())) => return PodEnd::Ended,
                _ = machine.helper.wait() => return PodEnd::Node(Off::Died),
                order = orders.recv() => match order {
                    Some((Action::KillAgent, reply)) => {
                        answer(reply, Err(LocalError::NoAgent(self.name.clone())));
                    }
                    Some(order) => if let Some(end) = after(order) { return end },
                    None => return PodEnd::Node(Off::Died),
                },
            }
        }
    }

    /// Kills what is left in the pod's cgroup, as the container runtime does, and reaps the pod.
    async fn clear(&self, uid: &str, pod: Option<Pod>) {
        let group = self.cluster.pod_cgroup(&self.name, uid);
        if let Err(error) = self.kill(&group).await {
            warn!(node = self.name, error = error_chain(&error), "can't clear the pod");
        }
        if let Some(mut pod) = pod {
            let _ = pod.shim.wait().await;
        }
        let removed = tokio::task::spawn_blocking(move || cgroup::remove(&group)).await;
        if let Ok(Err(error)) = removed {
            warn!(node = self.name, error = error_chain(&error), "can't remove the pod's cgroup");
        }
    }

    async fn kill(&self, group: &str) -> Result<(), LocalError> {
        let group = group.to_owned();
        let killed = tokio::task::spawn_blocking(move || cgroup::kill_all(&group)).await;
        killed.context(|| "the task that kills the processes panicked".to_owned())?
    }

    /// Writes the Node's status. `init`: the process id of the node's first process; None if the node is off.
    async fn report(&self, init: Option<i32>) -> Result<(), LocalError> {
        let kind = self.layout.kind(&self.name)?;
        let boot_id = init.map(|init| facts::boot_id(&Root::at(format!("/proc/{init}/root"))));
        objects::report(&self.client, &self.cluster, self.number, kind.node_of(&self.name), &kind, boot_id).await
    }

    /// The pods that are bound to Node `node`, which runs until its process `init` ends.
    fn bound_pods(&self, node: String, init: i32) -> BoundPods {
        BoundPods {
            layout: self.layout.clone(),
            cluster: self.cluster.clone(),
            client: self.client.clone(),
            all: self.pods.clone(),
            machine: self.name.clone(),
            node,
            address: self.cluster.address(self.number),
            init,
        }
    }

    /// Deletes the Node object, the pods that are bound to it, and the node's files.
    async fn remove(&self) -> Result<(), LocalError> {
        self.pods.forget_node(&self.client, self.layout.kind(&self.name)?.node_of(&self.name)).await;
        objects::unregister(&self.client, self.layout.kind(&self.name)?.node_of(&self.name)).await?;
        objects::count_agents(&self.client).await?;
        let (group, directory) = (self.cluster.node_cgroup(&self.name), self.layout.node(&self.name));
        let removed = tokio::task::spawn_blocking(move || {
            cgroup::remove(&group)?;
            mounts::remove_files(&directory)
        });
        removed.await.context(|| "the task that removes the node's files panicked".to_owned())??;
        self.views.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.number);
        Ok(())
    }

    fn show(&self, change: impl FnOnce(&mut NodeView)) {
        if let Some(view) = self.views.lock().unwrap_or_else(PoisonError::into_inner).get_mut(&self.number) {
            change(view);
        }
    }
}

/// The effect of an order on a pod that runs or is about to start.
fn after(order: Order) -> Option<PodEnd> {
    match order {
        (Action::RestartAgent, reply) => Some(PodEnd::Restart(reply)),
        (Action::PowerOn | Action::KillAgent, reply) => {
            answer(reply, Ok(()));
            None
        }
        (action, reply) => Some(PodEnd::Node(Off::Ordered(action, reply))),
    }
}

fn answer(reply: Reply, result: Result<(), LocalError>) {
    // The receiver may be gone.
    let _ = reply.send(result);
}
