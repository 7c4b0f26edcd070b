//! A real API server with nothing in it, for kubectl and helm: no nodes, no controllers.

use std::{
    fs,
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

/// How long it may take to start.
const PATIENCE: Duration = Duration::from_mins(1);

/// etcd and kube-apiserver; ended when dropped.
pub struct ApiServer {
    processes: Vec<Child>,
    directory: tempfile::TempDir,
}

impl ApiServer {
    /// Starts one from the directory that `KUBEBUILDER_ASSETS` names.
    pub fn up() -> Self {
        Self::up_with(&[])
    }

    /// The same with these further arguments for kube-apiserver.
    pub fn up_with(arguments: &[&str]) -> Self {
        let assets = PathBuf::from(std::env::var_os("KUBEBUILDER_ASSETS").unwrap());
        let mut server = Self { processes: Vec::new(), directory: tempfile::tempdir().unwrap() };
        let [storage, peers, port] = free_ports();
        let [storage, peers] = [storage, peers].map(|port| format!("http://127.0.0.1:{port}"));
        let file = |name: &str| server.directory.path().join(name).display().to_string();
        fs::write(file("tokens.csv"), "token,admin,admin,\"system:masters\"\n").unwrap();
        let key = rcgen::KeyPair::generate().unwrap();
        fs::write(file("key"), key.serialize_pem()).unwrap();
        fs::write(file("key.pub"), key.public_key_pem()).unwrap();
        let etcd = [
            format!("--data-dir={}", file("etcd")),
            format!("--listen-client-urls={storage}"),
            format!("--advertise-client-urls={storage}"),
            format!("--listen-peer-urls={peers}"),
            format!("--initial-advertise-peer-urls={peers}"),
            format!("--initial-cluster=default={peers}"),
            "--unsafe-no-fsync=true".to_owned(),
        ];
        let apiserver = [
            format!("--etcd-servers={storage}"),
            "--bind-address=127.0.0.1".to_owned(),
            format!("--secure-port={port}"),
            format!("--cert-dir={}", file("tls")),
            format!("--token-auth-file={}", file("tokens.csv")),
            format!("--service-account-key-file={}", file("key.pub")),
            format!("--service-account-signing-key-file={}", file("key")),
            "--service-account-issuer=https://flux-distribute.test".to_owned(),
            "--service-cluster-ip-range=10.0.0.0/24".to_owned(),
            "--authorization-mode=RBAC".to_owned(),
            "--allow-privileged=true".to_owned(),
        ];
        let apiserver: Vec<_> = apiserver.into_iter().chain(arguments.iter().map(|word| (*word).to_owned())).collect();
        let kubeconfig = serde_json::json!({
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": {
                "server": format!("https://127.0.0.1:{port}"), "certificate-authority": file("tls/apiserver.crt"),
            }}],
            "users": [{"name": "admin", "user": {"token": "token"}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "admin"}}],
            "current-context": "test",
        });
        fs::write(file("kubeconfig"), kubeconfig.to_string()).unwrap();
        let processes = [start(&assets.join("etcd"), &etcd), start(&assets.join("kube-apiserver"), &apiserver)];
        server.processes.extend(processes);
        server
    }

    /// What `KUBECONFIG` may name.
    pub fn kubeconfig(&self) -> PathBuf {
        self.directory.path().join("kubeconfig")
    }

    /// Waits until kubectl finds it ready.
    pub fn wait(&self, kubectl: &Path) {
        let end = Instant::now() + PATIENCE;
        let mut ready = Command::new(kubectl);
        ready.args(["get", "--raw", "/readyz"]).env("KUBECONFIG", self.kubeconfig()).stdin(Stdio::null());
        loop {
            let output = ready.output().unwrap();
            if output.status.success() {
                return;
            }
            assert!(Instant::now() < end, "{}", String::from_utf8_lossy(&output.stderr));
            std::thread::sleep(Duration::from_millis(200));
        }
    }
}

impl Drop for ApiServer {
    fn drop(&mut self) {
        for process in self.processes.iter_mut().rev() {
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

fn start(program: &Path, arguments: &[String]) -> Child {
    let mut command = Command::new(program);
    command.args(arguments).env_clear().stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.spawn().unwrap_or_else(|error| panic!("{}: {error}", program.display()))
}

fn free_ports<const N: usize>() -> [u16; N] {
    let listeners = [(); N].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
    listeners.map(|listener| listener.local_addr().unwrap().port())
}
