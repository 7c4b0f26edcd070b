//! Brokers of a real Flux, started by the very command line of production.

use std::{
    future::Future,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use api::EpochSettings;
use broker::{
    command::{BrokerIdentity, launch},
    rfc3::Client,
    status::{instance, watch},
};
use futures::StreamExt;
use tokio::time::{sleep, timeout};

use crate::needs::{Need, flux_prefix, skips_without};

const PATIENCE: Duration = Duration::from_secs(30);

pub async fn soon<T>(future: impl Future<Output = T>) -> T {
    timeout(PATIENCE, future).await.expect("nothing came")
}

/// A broker of a real Flux; killed when dropped.
pub struct RealBroker {
    pub child: Child,
    directory: PathBuf,
}

impl RealBroker {
    pub fn socket(&self) -> PathBuf {
        self.directory.join("local")
    }
}

impl Drop for RealBroker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// None if the test can't run.
pub fn flux() -> Option<PathBuf> {
    if skips_without([Need::Flux]) {
        return None;
    }
    Some(flux_prefix().join("bin/flux"))
}

/// Starts rank `rank` by the very command line of production, with its directories moved.
pub fn start(flux: &Path, base: &Path, rank: u32) -> RealBroker {
    start_with(flux, base, rank, &[])
}

/// [`start`] with more in the environment.
pub fn start_with(flux: &Path, base: &Path, rank: u32, environment: &[(&str, &str)]) -> RealBroker {
    let settings = EpochSettings {
        max_size: 4,
        topology: "custom".to_owned(),
        port: 0,
        digest: "env".to_owned(),
        certificate: String::new(),
        run_as: "root".to_owned(),
        config: String::new(),
        cpu_weight: 100,
        checkpoint_period: "1m".to_owned(),
        spare_shape: None,
        pods: false,
        only_whole_cores: false,
    };
    let name = format!("node{rank}");
    let identity = BrokerIdentity {
        prefix: base,
        rank,
        broker_name: &name,
        node_uid: "",
        instance_uid: "",
        instance_id: "",
        epoch: 1,
        loads_live_configuration: false,
    };
    let directory = base.join(format!("run{rank}"));
    // An earlier broker of this rank leaves its socket there.
    let _ = std::fs::remove_dir_all(&directory);
    std::fs::create_dir(&directory).unwrap();
    let order = launch(&settings, &identity);
    let moved =
        order.argv[1..].iter().map(|word| word.replace(api::BROKER_SOCKET_DIR, &directory.display().to_string()));
    let log = std::fs::File::create(base.join(format!("log{rank}"))).unwrap();
    let child = Command::new(flux)
        .args(moved)
        .env_clear()
        .envs(&order.env)
        .envs(environment.iter().copied())
        .stdin(Stdio::null())
        .stdout(log.try_clone().unwrap())
        .stderr(log)
        .spawn()
        .unwrap();
    RealBroker { child, directory }
}

/// The lead of `size` ranks with these cores each; it is in state run.
pub async fn lead(flux: &Path, base: &Path, size: u32, cores: &str) -> (RealBroker, Client) {
    configure(flux, base, size, cores);
    let lead = start(flux, base, 0);
    let client = connect(&lead).await;
    until_online(&client, "0").await;
    (lead, client)
}

pub async fn until_online(client: &Client, ranks: &str) {
    let wanted = ranks.parse().unwrap();
    let mut changes = watch(client, true).unwrap();
    soon(async {
        while !instance(client).await.is_ok_and(|instance| instance.online == wanted) {
            changes.next().await.unwrap();
        }
    })
    .await;
}

/// A `flux` command in the instance; it must succeed.
pub fn run(flux: &Path, lead: &RealBroker, words: &[&str]) -> String {
    let uri = format!("local://{}", lead.socket().display());
    let output = Command::new(flux).args(words).env("FLUX_URI", uri).output().unwrap();
    assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

pub async fn connect(broker: &RealBroker) -> Client {
    soon(async {
        loop {
            match Client::connect(&broker.socket()).await {
                Ok(client) => return client,
                // There is no event for a socket that is listened at.
                Err(_) => sleep(Duration::from_millis(20)).await,
            }
        }
    })
    .await
}

/// Writes `etc/broker.toml` for `size` ranks with these cores each.
pub fn configure(flux: &Path, base: &Path, size: u32, cores: &str) {
    let certificate = base.join("curve.cert");
    let made = Command::new(flux).args(["keygen", "-n", "test"]).arg(&certificate).output().unwrap();
    assert!(made.status.success(), "{made:?}");
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    std::fs::create_dir_all(base.join("etc")).unwrap();
    std::fs::create_dir_all(base.join("state")).unwrap();
    let names = format!("node[0-{}]", size - 1);
    let config = format!(
        "[bootstrap]\ncurve_cert = {certificate:?}\nhosts = [{{ host = {names:?} }}, {{ host = \"node0\", bind = \"tcp://127.0.0.1:{port}\", \
         connect = \"tcp://127.0.0.1:{port}\" }}]\n[resource]\nnoverify = true\n[[resource.config]]\nhosts = {names:?}\n\
         cores = {cores:?}\n[sched-fluxion-resource]\nmatch-format = \"rv1\"\n"
    );
    std::fs::write(base.join("etc/broker.toml"), config).unwrap();
}
