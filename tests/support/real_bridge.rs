//! A bridge in a process of its own, as it is in the lead's agent, and its broker.

use std::{
    collections::BTreeMap,
    fs,
    path::Path,
    process::{Child, Command, Stdio},
    time::Duration,
};

use k8s_openapi::api::core::v1::Node;
use kube::{Api, ResourceExt, api::ListParams};
use pods::world::Settings;
use tokio::time::sleep;

use crate::{
    bare_cluster::{bridge_to, client},
    real_broker::{RealBroker, connect, start_with},
};

/// Cores of each node.
pub const CORES: u32 = 16;

/// The bridge alone, as the lead's agent begins it.
pub async fn run_bridge(kubeconfig: &str, socket: &Path) {
    let client = client(&fs::read_to_string(kubeconfig).unwrap()).await;
    let nodes = Api::<Node>::all(client.clone()).list(&ListParams::default()).await.unwrap();
    let uids: BTreeMap<_, _> = nodes.into_iter().map(|node| (node.name_any(), node.uid().unwrap())).collect();
    // The API server's own node has no part in this.
    let uids: Vec<_> = (0..).map_while(|rank| uids.get(&format!("machine{rank}")).cloned()).collect();
    let (_sender, bridge) = bridge_to(client, socket.to_owned(), &uids, CORES, Settings::default());
    bridge::run(bridge).await;
}

/// A bridge in a process of its own; killed when dropped.
pub struct BridgeProcess(Child);

impl BridgeProcess {
    pub fn start(kubeconfig: &Path, socket: &Path) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        // Whoever reads this process's output must not wait for the bridge.
        Self(command.arg("bridge").args([kubeconfig, socket]).stdout(Stdio::null()).spawn().unwrap())
    }

    /// The most memory that it has had, in MiB.
    pub fn memory(&self) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.0.id())).unwrap();
        let line = status.lines().find(|line| line.starts_with("VmHWM")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() / 1024
    }

    /// Processor time so far, in ticks of the kernel: hundredths of a second on all usual machines.
    pub fn used(&self) -> u64 {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.0.id())).unwrap();
        let fields: Vec<_> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
        fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
    }
}

impl Drop for BridgeProcess {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The broker of rank 0; all other ranks count as online.
pub fn start_lead(flux: &Path, base: &Path) -> RealBroker {
    let tasks = base.join("modprobe/rc1.d");
    fs::create_dir_all(&tasks).unwrap();
    let text = "def setup(context):\n    context.setopt(\"resource\", \"monitor-force-up\")\n";
    fs::write(tasks.join("up.py"), text).unwrap();
    start_with(flux, base, 0, &[("FLUX_MODPROBE_PATH_APPEND", base.join("modprobe").to_str().unwrap())])
}

pub async fn until_allocated(broker: &RealBroker, cores: usize) {
    let client = connect(broker).await;
    while !broker::status::instance(&client).await.is_ok_and(|instance| instance.allocated.cores == cores) {
        sleep(Duration::from_millis(200)).await;
    }
}
