//! The API server of a local cluster: the embedded one, or a real kube-apiserver with etcd if the machine has them.

use std::{
    fs::File,
    future::Future,
    net::{Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    process::Stdio,
    sync::Arc,
    time::Duration,
};

use kube::{
    Client, CustomResourceExt,
    api::{Api, PostParams},
    runtime::wait::{await_condition, conditions},
};
use tokio::{
    process::{Child, Command},
    time::{Instant, sleep, timeout},
};

use super::{
    io::bind,
    layout::{Cluster, Layout, write_private},
    mounts,
};
use crate::error::{Context, LocalError};
use api::{FluxInstance, FluxNode};

/// Environment variable that names a directory with etcd and kube-apiserver, as in Kubernetes' envtest.
pub(crate) const ASSETS_VARIABLE: &str = "KUBEBUILDER_ASSETS";
/// Limit for kube-apiserver to start serving, which normally takes seconds.
const START_LIMIT: Duration = Duration::from_secs(90);

/// GKE configures the same: pods of critical priority need a quota.
const CRITICAL_PODS_NEED_A_QUOTA: &str = "\
apiVersion: apiserver.config.k8s.io/v1
kind: AdmissionConfiguration
plugins:
  - name: ResourceQuota
    configuration:
      apiVersion: apiserver.config.k8s.io/v1
      kind: ResourceQuotaConfiguration
      limitedResources:
        - resource: pods
          matchScopes:
            - {scopeName: PriorityClass, operator: In, values: [system-node-critical, system-cluster-critical]}
";

type Definition = k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;

/// A running API server.
pub(crate) enum ApiServer {
    /// The embedded one, in the daemon's process.
    Embedded,
    /// kube-apiserver and etcd.
    Real(Box<Real>),
}

/// Both run in the daemon's cgroup, so that `down` finds them even if the daemon is dead.
pub(crate) struct Real {
    etcd: Child,
    server: Child,
}

impl ApiServer {
    /// Starts serving on the bridge's address, until `shutdown`.
    pub(crate) async fn start(
        layout: &Layout,
        cluster: &Cluster,
        switch: apiserver::Switch,
        shutdown: impl Future<Output = ()> + Send + 'static,
    ) -> Result<Self, LocalError> {
        if let Some(assets) = &cluster.assets {
            return start_real(layout, cluster, assets).await;
        }
        let failed = || "can't make the API server's certificate".to_owned();
        let identity = apiserver::Identity::new(cluster.gateway().into()).context(failed)?;
        let file = certificate_file(layout);
        file.parent().map_or(Ok(()), mounts::make_directory)?;
        write_private(&file, identity.authority().as_bytes(), true)
            .context(|| format!("can't write {}", file.display()))?;
        let listener = bind(SocketAddr::from((cluster.gateway(), cluster.api_port))).await?;
        let (store, token) = (Arc::new(apiserver::Store::new()), cluster.token.clone());
        tokio::spawn(async move { apiserver::serve(listener, &identity, store, token, Some(switch), shutdown).await });
        Ok(Self::Embedded)
    }

    /// Waits until it serves our kinds, which the embedded one always does.
    pub(crate) async fn prepare(&mut self, layout: &Layout, client: &Client) -> Result<(), LocalError> {
        let Self::Real(real) = self else { return Ok(()) };
        let end = Instant::now() + START_LIMIT;
        while let Err(error) = client.apiserver_version().await {
            if Instant::now() > end || !matches!(real.server.try_wait(), Ok(None)) {
                let log = last_line(&layout.api().join("kube-apiserver.log"));
                return Err(error).context(|| format!("kube-apiserver does not serve: {log}"));
            }
            sleep(Duration::from_millis(100)).await;
        }
        let definitions: Api<Definition> = Api::all(client.clone());
        for definition in [FluxInstance::crd(), FluxNode::crd()] {
            let name = definition.metadata.name.clone().unwrap_or_default();
            let failed = || format!("can't create the definition {name}");
            definitions.create(&PostParams::default(), &definition).await.context(failed)?;
            let served = await_condition(definitions.clone(), &name, conditions::is_crd_established());
            timeout(START_LIMIT, served).await.context(failed)?.context(failed)?;
        }
        Ok(())
    }

    /// Stops the real one. The embedded one stops at its `shutdown`.
    pub(crate) async fn stop(self) {
        if let Self::Real(mut real) = self {
            let _ = real.server.kill().await;
            let _ = real.etcd.kill().await;
        }
    }
}

/// The certificates that clients of the API server must trust, in DER; the server generated them itself.
pub(crate) fn certificates(layout: &Layout) -> Result<Vec<Vec<u8>>, LocalError> {
    use rustls::pki_types::{CertificateDer, pem::PemObject};
    let path = certificate_file(layout);
    let failed = || format!("can't read {}", path.display());
    let certificates = CertificateDer::pem_file_iter(&path).context(failed)?;
    certificates.map(|found| found.map(|der| der.to_vec())).collect::<Result<_, _>>().context(failed)
}

/// The PEM file of these certificates, which both kinds of server write before they serve.
pub(crate) fn certificate_file(layout: &Layout) -> PathBuf {
    layout.api().join("tls/apiserver.crt")
}

async fn start_real(layout: &Layout, cluster: &Cluster, assets: &Path) -> Result<ApiServer, LocalError> {
    let directory = layout.api();
    mounts::make_directory(&directory)?;
    let files = |name: &str| directory.join(name);
    let failed = || format!("can't write into {}", directory.display());
    write_private(&files("tokens.csv"), tokens(cluster).as_bytes(), true).context(failed)?;
    write_private(&files("admission.yaml"), CRITICAL_PODS_NEED_A_QUOTA.as_bytes(), true).context(failed)?;
    let (private, public) = signing_key()?;
    write_private(&files("service-accounts.key"), private.as_bytes(), true).context(failed)?;
    write_private(&files("service-accounts.pub"), public.as_bytes(), true).context(failed)?;

    let loopback = own_loopback(cluster.gateway());
    let storage = format!("http://{loopback}:2379");
    let peers = format!("http://{loopback}:2380");
    let etcd = start(
        &assets.join("etcd"),
        &directory,
        vec![
            format!("--data-dir={}", files("etcd").display()),
            format!("--listen-client-urls={storage}"),
            format!("--advertise-client-urls={storage}"),
            format!("--listen-peer-urls={peers}"),
            format!("--initial-advertise-peer-urls={peers}"),
            format!("--initial-cluster=default={peers}"),
            // Nothing here outlives the cluster, so it needn't be synced.
            "--unsafe-no-fsync=true".to_owned(),
        ],
    )?;
    let mut server = start(
        &assets.join("kube-apiserver"),
        &directory,
        vec![
            format!("--etcd-servers={storage}"),
            format!("--bind-address={}", cluster.gateway()),
            format!("--advertise-address={}", cluster.gateway()),
            format!("--secure-port={}", cluster.api_port),
            format!("--cert-dir={}", files("tls").display()),
            format!("--token-auth-file={}", files("tokens.csv").display()),
            format!("--service-account-key-file={}", files("service-accounts.pub").display()),
            format!("--service-account-signing-key-file={}", files("service-accounts.key").display()),
            "--service-account-issuer=https://flux-distribute.local".to_owned(),
            "--service-cluster-ip-range=10.0.0.0/24".to_owned(),
            "--authorization-mode=RBAC".to_owned(),
            // The pods of the manifest need it.
            "--allow-privileged=true".to_owned(),
            format!("--admission-control-config-file={}", files("admission.yaml").display()),
            // No controllers run here that would create service accounts or remove the not-ready taint of a new node.
            "--disable-admission-plugins=ServiceAccount,TaintNodesByCondition".to_owned(),
        ],
    )?;
    let end = Instant::now() + START_LIMIT;
    // The client needs the certificate's file, which is empty for a moment. The server writes the key's after it.
    while !files("tls/apiserver.key").exists() {
        if Instant::now() > end || !matches!(server.try_wait(), Ok(None)) {
            let why = last_line(&files("kube-apiserver.log"));
            return Err(LocalError::NotStarted { who: "kube-apiserver".to_owned(), why });
        }
        sleep(Duration::from_millis(50)).await;
    }
    Ok(ApiServer::Real(Box::new(Real { etcd, server })))
}

fn start(program: &Path, directory: &Path, arguments: Vec<String>) -> Result<Child, LocalError> {
    let failed = || format!("can't start {}", program.display());
    let name = program.file_name().unwrap_or_default().to_string_lossy();
    let log = File::create(directory.join(format!("{name}.log"))).context(failed)?;
    let mut command = Command::new(program);
    command.args(arguments).env_clear().current_dir(directory).stdin(Stdio::null());
    command.stdout(log.try_clone().context(failed)?).stderr(log).kill_on_drop(true);
    command.spawn().context(failed)
}

fn tokens(cluster: &Cluster) -> String {
    format!("{},local,local,\"system:masters\"\n", cluster.token)
}

/// A key pair for service account tokens, private and public, as PEM. kube-apiserver doesn't start without one.
fn signing_key() -> Result<(String, String), LocalError> {
    let pair = rcgen::KeyPair::generate().context(|| "can't make a key".to_owned())?;
    Ok((pair.serialize_pem(), pair.public_key_pem()))
}

/// A loopback address that no other cluster uses, because each has a network of its own: two clusters that start at once can't take
/// each other's ports. `gateway`: that of the cluster's network.
fn own_loopback(gateway: Ipv4Addr) -> Ipv4Addr {
    let [_, network, subnet, host] = gateway.octets();
    Ipv4Addr::new(127, network, subnet, host)
}

/// The last line of a log, for an error message.
fn last_line(log: &Path) -> String {
    let text = std::fs::read_to_string(log).unwrap_or_default();
    let last = text.lines().rev().find(|line| !line.trim().is_empty());
    last.map_or_else(|| format!("{} is empty", log.display()), str::to_owned)
}
