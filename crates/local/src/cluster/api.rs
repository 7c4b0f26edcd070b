//! The API server of a local cluster: the embedded one, or a real kube-apiserver with its etcd where there is one.

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
    daemon::bind,
    layout::{Cluster, Layout, write_private},
    mounts,
};
use crate::error::{Context, LocalError};
use api::{FluxInstance, FluxNode};

/// Names a directory with etcd and kube-apiserver (the convention of Kubernetes' envtest).
pub(crate) const ASSETS_VARIABLE: &str = "KUBEBUILDER_ASSETS";
/// A kube-apiserver serves some seconds after its start.
const START_LIMIT: Duration = Duration::from_secs(90);

/// As GKE has it.
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

/// What serves the API.
pub(crate) enum ApiServer {
    /// Ours, in the daemon's process.
    Embedded,
    /// The real thing.
    Real(Box<Real>),
}

/// Both are in the daemon's cgroup: whatever becomes of it, `down` finds them.
pub(crate) struct Real {
    etcd: Child,
    server: Child,
}

impl ApiServer {
    /// Serves on the bridge's address until `shutdown`.
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
        file.parent().map_or(Ok(()), mounts::make_closed_directory)?;
        write_private(&file, identity.authority().as_bytes(), true)
            .context(|| format!("can't write {}", file.display()))?;
        let listener = bind(SocketAddr::from((cluster.gateway(), cluster.api_port))).await?;
        let (store, token) = (Arc::new(apiserver::Store::new()), cluster.token.clone());
        tokio::spawn(async move { apiserver::serve(listener, &identity, store, token, Some(switch), shutdown).await });
        Ok(Self::Embedded)
    }

    /// Waits until it serves our kinds; the embedded one always does.
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
            let failed = || format!("can't make the definition {name}");
            definitions.create(&PostParams::default(), &definition).await.context(failed)?;
            let served = await_condition(definitions.clone(), &name, conditions::is_crd_established());
            timeout(START_LIMIT, served).await.context(failed)?.context(failed)?;
        }
        Ok(())
    }

    /// The embedded one has been told already.
    pub(crate) async fn stop(self) {
        if let Self::Real(mut real) = self {
            let _ = real.server.kill().await;
            let _ = real.etcd.kill().await;
        }
    }
}

/// What a client of the API server trusts: the server has made it itself.
pub(crate) fn certificates(layout: &Layout) -> Result<Vec<Vec<u8>>, LocalError> {
    use rustls::pki_types::{CertificateDer, pem::PemObject};
    let path = certificate_file(layout);
    let failed = || format!("can't read {}", path.display());
    let certificates = CertificateDer::pem_file_iter(&path).context(failed)?;
    certificates.map(|found| found.map(|der| der.to_vec())).collect::<Result<_, _>>().context(failed)
}

/// Where that is, as PEM: both servers put it there before they serve.
pub(crate) fn certificate_file(layout: &Layout) -> PathBuf {
    layout.api().join("tls/apiserver.crt")
}

async fn start_real(layout: &Layout, cluster: &Cluster, assets: &Path) -> Result<ApiServer, LocalError> {
    let directory = layout.api();
    mounts::make_closed_directory(&directory)?;
    let files = |name: &str| directory.join(name);
    let failed = || format!("can't write into {}", directory.display());
    write_private(&files("tokens.csv"), tokens(cluster).as_bytes(), true).context(failed)?;
    write_private(&files("admission.yaml"), CRITICAL_PODS_NEED_A_QUOTA.as_bytes(), true).context(failed)?;
    let (private, public) = signing_key()?;
    write_private(&files("service-accounts.key"), private.as_bytes(), true).context(failed)?;
    write_private(&files("service-accounts.pub"), public.as_bytes(), true).context(failed)?;

    let (client_port, peer_port) = (free_port().await?, free_port().await?);
    let storage = format!("http://127.0.0.1:{client_port}");
    let peers = format!("http://127.0.0.1:{peer_port}");
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
            // Nothing here outlives the cluster.
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
            // As kubelets want it of the manifest's pods.
            "--allow-privileged=true".to_owned(),
            format!("--admission-control-config-file={}", files("admission.yaml").display()),
            // No controllers run here: nobody would make accounts, or take a new node's not-ready taint off.
            "--disable-admission-plugins=ServiceAccount,TaintNodesByCondition".to_owned(),
        ],
    )?;
    let end = Instant::now() + START_LIMIT;
    // The client trusts nothing else.
    while !certificate_file(layout).exists() {
        if Instant::now() > end || !matches!(server.try_wait(), Ok(None)) {
            let log = last_line(&files("kube-apiserver.log"));
            return Err(LocalError::Refused(format!("kube-apiserver does not start: {log}")));
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
    command.args(arguments).current_dir(directory).stdin(Stdio::null());
    command.stdout(log.try_clone().context(failed)?).stderr(log).kill_on_drop(true);
    command.spawn().context(failed)
}

fn tokens(cluster: &Cluster) -> String {
    format!("{},local,local,\"system:masters\"\n", cluster.token)
}

/// kube-apiserver does not start without a pair of keys for tokens of service accounts: private and public, as PEM.
fn signing_key() -> Result<(String, String), LocalError> {
    let pair = rcgen::KeyPair::generate().context(|| "can't make a key".to_owned())?;
    Ok((pair.serialize_pem(), pair.public_key_pem()))
}

async fn free_port() -> Result<u16, LocalError> {
    let listener = bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).await?;
    Ok(listener.local_addr().context(|| "can't find a free port".to_owned())?.port())
}

/// What a log says at its end, for an error message.
fn last_line(log: &Path) -> String {
    let text = std::fs::read_to_string(log).unwrap_or_default();
    let last = text.lines().rev().find(|line| !line.trim().is_empty());
    last.map_or_else(|| format!("{} is empty", log.display()), str::to_owned)
}
