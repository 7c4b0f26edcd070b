//! The daemon of a local cluster: bridge, API server, proxy, and a [`Kubelet`] for each node. It serves the control
//! socket, and stops all nodes at SIGTERM. If it is killed, the nodes keep running.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    process::ExitCode,
    sync::{Arc, Mutex, PoisonError},
};

use futures::future::join_all;
use nix::unistd::setsid;
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader},
    net::{UnixListener, UnixStream},
    signal::unix::{SignalKind, signal},
    sync::{mpsc, oneshot, watch},
};
use tracing::{info, warn};

use super::{
    api::ApiServer,
    bound::AllPods,
    cgroup,
    control::{Answer, NodeView, Request, report_line},
    io::{bind, write},
    kind::Kind,
    kubelet::{Action, Kubelet, Order, Views},
    layout::{Cluster, Layout, node_name, node_number},
    objects, proxy, root,
};
use crate::error::{Context, LocalError};
use apiserver::Fault;
use base::error_chain;

struct Daemon {
    layout: Layout,
    cluster: Arc<Cluster>,
    client: kube::Client,
    views: Views,
    pods: AllPods,
    faults: watch::Sender<Fault>,
    kubelets: Mutex<BTreeMap<u32, mpsc::Sender<Order>>>,
}

/// Reads the FluxInstance's spec from stdin, reports "ready" once it serves, and runs until SIGTERM.
pub(crate) async fn run(layout: &Layout) -> Result<ExitCode, LocalError> {
    // Fails if this process leads a process group because a user started it by hand: then the terminal's signals are
    // fine.
    let _ = setsid();
    let mut terminate = signal(SignalKind::terminate()).context(|| "can't handle signals".to_owned())?;
    let entering = layout.lock()?;
    let cluster = Arc::new(layout.load()?);
    cgroup::enter(&cluster.daemon_cgroup())?;
    drop(entering);
    let mut spec = String::new();
    std::io::Read::read_to_string(&mut std::io::stdin(), &mut spec).context(|| "can't read the spec".to_owned())?;

    let (stop, stopped) = watch::channel(false);
    let (faults, switch) = watch::channel(Fault::None);
    let mut api = ApiServer::start(layout, &cluster, switch, wait(stopped.clone())).await?;
    let listener = bind(SocketAddr::from((cluster.gateway(), cluster.proxy_port))).await?;
    tokio::spawn(proxy::serve(listener, cluster.clone(), wait(stopped)));
    let client = objects::client(layout, &cluster)?;
    api.prepare(layout, &client).await?;
    objects::install(&client, &spec).await?;
    let control =
        UnixListener::bind(layout.control()).context(|| format!("can't listen on {}", layout.control().display()))?;

    let daemon = Arc::new(Daemon {
        layout: layout.clone(),
        cluster,
        pods: AllPods::follow(&client),
        client,
        views: Views::default(),
        faults,
        kubelets: Mutex::default(),
    });
    report_line("ready")?;
    loop {
        tokio::select! {
            _ = terminate.recv() => break,
            asked = control.accept() => match asked {
                Ok((stream, _)) => { tokio::spawn(converse(daemon.clone(), stream)); }
                Err(error) => warn!(%error, "can't accept a command"),
            },
        }
    }
    info!("shutting down");
    daemon.shut_down().await;
    let _ = stop.send(true);
    api.stop().await;
    Ok(ExitCode::SUCCESS)
}

/// Returns when `stopped` becomes true or its sender is gone.
async fn wait(mut stopped: watch::Receiver<bool>) {
    let _ = stopped.wait_for(|stopped| *stopped).await;
}

async fn converse(daemon: Arc<Daemon>, stream: UnixStream) {
    let (reader, mut writer) = stream.into_split();
    let mut lines = BufReader::new(reader).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        let answer: Answer = match serde_json::from_str::<Request>(&line) {
            Ok(request) => daemon.carry_out(request).await.map_err(|error| error_chain(&error)),
            Err(error) => Err(format!("the daemon can't read this request: {error}")),
        };
        let Ok(mut text) = serde_json::to_string(&answer) else {
            return;
        };
        text.push('\n');
        if writer.write_all(text.as_bytes()).await.is_err() {
            return;
        }
    }
}

impl Daemon {
    async fn carry_out(&self, request: Request) -> Result<Vec<NodeView>, LocalError> {
        let (node, action) = match request {
            Request::Status => return Ok(self.all()),
            Request::Add { count, kind } => return self.add(count, &kind).await,
            Request::Remove { node } => (node, Action::Remove),
            Request::RestartAgent { node } => (node, Action::RestartAgent),
            Request::KillAgent { node } => (node, Action::KillAgent),
            Request::PowerOff { node } => (node, Action::PowerOff),
            Request::PowerOn { node } => (node, Action::PowerOn),
            Request::Api { fault } => {
                self.faults.send_replace(fault);
                return Ok(self.all());
            }
        };
        let no_node = || LocalError::NoNode(node.clone());
        let number = node_number(&node).ok_or_else(no_node)?;
        let kubelet = self.kubelets().get(&number).cloned().ok_or_else(no_node)?;
        let (reply, done) = oneshot::channel();
        kubelet.send((action, reply)).await.map_err(|_| no_node())?;
        let ended = |_| LocalError::KubeletEnded { node: node.clone(), log: self.layout.daemon_log() };
        done.await.map_err(ended)??;
        if action == Action::Remove {
            self.kubelets().remove(&number);
            self.write_hosts()?;
        }
        Ok(self.all())
    }

    fn all(&self) -> Vec<NodeView> {
        self.views.lock().unwrap_or_else(PoisonError::into_inner).values().cloned().collect()
    }

    fn kubelets(&self) -> std::sync::MutexGuard<'_, BTreeMap<u32, mpsc::Sender<Order>>> {
        self.kubelets.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn add(&self, count: u32, kind: &Kind) -> Result<Vec<NodeView>, LocalError> {
        let mut receivers = Vec::new();
        {
            let mut kubelets = self.kubelets();
            let mut views = self.views.lock().unwrap_or_else(PoisonError::into_inner);
            for number in (1..).filter(|number| !views.contains_key(number)).take(count as usize).collect::<Vec<_>>() {
                let (sender, receiver) = mpsc::channel(8);
                let address = self.cluster.address(number).to_string();
                views.insert(number, NodeView { name: node_name(number), address, ..NodeView::default() });
                kubelets.insert(number, sender);
                receivers.push((number, receiver));
            }
        }
        let numbers: Vec<u32> = receivers.iter().map(|(number, _)| *number).collect();
        for number in &numbers {
            let name = node_name(*number);
            kind.save(&self.layout.node_kind(&name))?;
            // Register in the order of the nodes, which gives the order of ranks, because booting is concurrent.
            objects::register(&self.client, kind.node_of(&name), kind).await?;
        }
        objects::count_agents(&self.client).await?;
        let hosts = self.hosts();
        let (all_up, others) = watch::channel(false);
        let booted =
            receivers.into_iter().map(|(number, orders)| self.boot(number, orders, hosts.clone(), others.clone()));
        let results = join_all(booted).await;
        let _ = all_up.send(true);
        self.write_hosts()?;
        results.into_iter().collect::<Result<(), LocalError>>()?;
        Ok(self
            .all()
            .into_iter()
            .filter(|view| node_number(&view.name).is_some_and(|n| numbers.contains(&n)))
            .collect())
    }

    async fn boot(
        &self,
        number: u32,
        orders: mpsc::Receiver<Order>,
        hosts: String,
        others: watch::Receiver<bool>,
    ) -> Result<(), LocalError> {
        let name = node_name(number);
        let (root, root_name) = (self.layout.node_root(&name), name.clone());
        let prepared = tokio::task::spawn_blocking(move || root::prepare(&root, &root_name, &hosts)).await;
        prepared.context(|| format!("the preparation of {name} panicked"))??;
        let kubelet = Kubelet {
            layout: self.layout.clone(),
            cluster: self.cluster.clone(),
            client: self.client.clone(),
            number,
            name: name.clone(),
            views: self.views.clone(),
            pods: self.pods.clone(),
            others,
        };
        let (reply, booted) = oneshot::channel();
        tokio::spawn(kubelet.run(orders, reply));
        booted.await.map_err(|_| LocalError::KubeletEnded { node: name, log: self.layout.daemon_log() })?
    }

    fn hosts(&self) -> String {
        let mut hosts = "127.0.0.1 localhost\n::1 localhost\n".to_owned();
        for view in self.all() {
            hosts.push_str(&format!("{} {}\n", view.address, view.name));
        }
        hosts
    }

    fn write_hosts(&self) -> Result<(), LocalError> {
        let hosts = self.hosts();
        for view in self.all() {
            let file = self.layout.node_root(&view.name).join("etc/hosts");
            if file.exists() {
                write(&file, &hosts)?;
            }
        }
        Ok(())
    }

    async fn shut_down(&self) {
        let kubelets: Vec<_> = std::mem::take(&mut *self.kubelets()).into_values().collect();
        let ends = kubelets.into_iter().map(|kubelet| async move {
            let (reply, done) = oneshot::channel();
            if kubelet.send((Action::Shutdown, reply)).await.is_ok() {
                let _ = done.await;
            }
        });
        join_all(ends).await;
    }
}
