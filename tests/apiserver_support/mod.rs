//! A server on a loopback port, and a client of it.
#![allow(dead_code, reason = "each test binary uses its part")]
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use api::NAMESPACE;
use apiserver::{Identity, Store, serve};
use k8s_openapi::{
    ByteString, NamespaceResourceScope,
    api::core::v1::{ConfigMap, Namespace},
};
use kube::{
    Api, Client, Config, Resource,
    api::{ObjectMeta, PostParams},
    core::Status,
};
use rustls::{
    ClientConfig, RootCertStore,
    pki_types::{CertificateDer, pem::PemObject},
};
use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::{TlsConnector, client::TlsStream};

pub const TOKEN: &str = "sesame";
pub const LONG: Duration = Duration::from_secs(20);

pub struct Server {
    pub store: Arc<Store>,
    pub address: std::net::SocketAddr,
    /// What its clients trust.
    pub authority: CertificateDer<'static>,
    /// A kubeconfig for it.
    pub kubeconfig: Value,
    pub client: Client,
    pub stop: Option<tokio::sync::oneshot::Sender<()>>,
    pub task: tokio::task::JoinHandle<std::io::Result<()>>,
}

pub fn client(address: std::net::SocketAddr, authority: &CertificateDer<'_>, token: &str) -> Client {
    // Several crates install a rustls provider; the first one counts.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let mut config = Config::new(format!("https://{address}").parse().unwrap());
    config.root_cert = Some(vec![authority.to_vec()]);
    config.auth_info.token = Some(token.to_owned().into());
    config.default_namespace = NAMESPACE.into();
    Client::try_from(config).unwrap()
}

pub async fn start_with(store: Store) -> Server {
    let store = Arc::new(store);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let shutdown = async move { drop(stopped.await) };
    let identity = Identity::new(address.ip()).unwrap();
    let authority = CertificateDer::from_pem_slice(identity.authority().as_bytes()).unwrap();
    let kubeconfig = json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "local", "cluster": {
            "server": format!("https://{address}"),
            "certificate-authority-data": ByteString(identity.authority().into()),
        }}],
        "users": [{"name": "local", "user": {"token": TOKEN}}],
        "contexts": [{"name": "local", "context": {"cluster": "local", "user": "local", "namespace": NAMESPACE}}],
        "current-context": "local",
    });
    let served = store.clone();
    let task = tokio::spawn(async move { serve(listener, &identity, served, TOKEN.into(), None, shutdown).await });
    let client = client(address, &authority, TOKEN);
    Server { store, address, client, authority, kubeconfig, stop: Some(stop), task }
}

pub async fn start() -> Server {
    let server = start_with(Store::new()).await;
    server.create_namespace(NAMESPACE).await;
    server
}

impl Server {
    pub fn api<K>(&self) -> Api<K>
    where
        K: Resource<Scope = NamespaceResourceScope>,
        K::DynamicType: Default,
    {
        Api::default_namespaced(self.client.clone())
    }

    pub async fn create_namespace(&self, name: &str) {
        let metadata = ObjectMeta { name: Some(name.into()), ..ObjectMeta::default() };
        let namespace = Namespace { metadata, ..Namespace::default() };
        Api::all(self.client.clone()).create(&PostParams::default(), &namespace).await.unwrap();
    }

    /// A connection that speaks what is written into it.
    pub async fn connect(&self) -> TlsStream<TcpStream> {
        let mut trusted = RootCertStore::empty();
        trusted.add(self.authority.clone()).unwrap();
        let config = ClientConfig::builder().with_root_certificates(trusted).with_no_client_auth();
        let stream = TcpStream::connect(self.address).await.unwrap();
        let name = self.address.ip().into();
        TlsConnector::from(Arc::new(config)).connect(name, stream).await.unwrap()
    }

    pub async fn raw(&self, method: &str, path: &str, headers: &[(&str, &str)], body: Value) -> Result<Value, Status> {
        let mut request = http::Request::builder().method(method).uri(path);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let body = if body.is_null() { Vec::new() } else { body.to_string().into_bytes() };
        match self.client.request::<Value>(request.body(body).unwrap()).await {
            Ok(answer) => Ok(answer),
            Err(kube::Error::Api(status)) => Err(*status),
            Err(error) => panic!("{error}"),
        }
    }
}

pub fn config_map(name: &str, text: &str) -> ConfigMap {
    ConfigMap {
        metadata: ObjectMeta { name: Some(name.into()), ..ObjectMeta::default() },
        data: Some(BTreeMap::from([("text".into(), text.into())])),
        ..ConfigMap::default()
    }
}

pub fn code<T: std::fmt::Debug>(result: Result<T, kube::Error>) -> (u16, String) {
    match result {
        Err(kube::Error::Api(status)) => (status.code, status.reason.clone()),
        other => panic!("expected a Status, not {other:?}"),
    }
}

pub fn refused(code: u16, reason: &str) -> (u16, String) {
    (code, reason.into())
}
