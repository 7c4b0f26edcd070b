//! TLS connections. kubectl sends a token only over TLS.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use axum::serve::Listener;
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair,
    KeyUsagePurpose,
};
use rustls::{ServerConfig, crypto::ring, pki_types::PrivatePkcs8KeyDer};
use tokio::{
    net::{TcpListener, TcpStream},
    task::JoinSet,
    time::timeout,
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};

/// A client that needs longer for its handshake is gone, or doesn't speak TLS.
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(10);

/// Why the server has no certificate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum IdentityError {
    /// Generating it failed.
    #[error("can't generate a certificate")]
    Certificate(#[from] rcgen::Error),
    /// rustls refuses it.
    #[error("can't use the generated certificate")]
    Tls(#[from] rustls::Error),
}

/// The server's identity: a key that never leaves the process, and a certificate from an authority that can't sign
/// anything else, because its key is dropped at once.
pub struct Identity {
    authority: String,
    config: Arc<ServerConfig>,
}

impl Identity {
    /// Generates an identity for a server at `address`. Also valid for localhost, for clients that forward its port.
    ///
    /// # Errors
    /// No key or certificate can be generated.
    pub fn new(address: IpAddr) -> Result<Self, IdentityError> {
        let mut authority = named("flux-distribute local authority", Vec::new())?;
        authority.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        authority.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let authority = CertifiedIssuer::self_signed(authority, KeyPair::generate()?)?;

        let names = vec![address.to_string(), "127.0.0.1".into(), "::1".into(), "localhost".into()];
        let mut server = named("flux-distribute local API server", names)?;
        server.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        server.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        server.use_authority_key_identifier_extension = true;
        let key = KeyPair::generate()?;
        let certificate = server.signed_by(&key, &authority)?;

        let key = PrivatePkcs8KeyDer::from(key.serialize_der());
        let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_single_cert(vec![certificate.into()], key.into())?;
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        Ok(Self { authority: authority.pem(), config: Arc::new(config) })
    }

    /// The certificate that clients must trust, as PEM.
    pub fn authority(&self) -> &str {
        &self.authority
    }
}

fn named(name: &str, addresses: Vec<String>) -> Result<CertificateParams, rcgen::Error> {
    let mut params = CertificateParams::new(addresses)?;
    params.distinguished_name.push(DnType::CommonName, name);
    Ok(params)
}

/// Accepts connections and completes their handshakes concurrently, so that a silent client delays no other one.
pub struct TlsListener {
    listener: TcpListener,
    acceptor: TlsAcceptor,
    handshakes: JoinSet<Option<(TlsStream<TcpStream>, SocketAddr)>>,
}

impl TlsListener {
    pub fn new(listener: TcpListener, identity: &Identity) -> Self {
        Self { listener, acceptor: identity.config.clone().into(), handshakes: JoinSet::new() }
    }
}

impl Listener for TlsListener {
    type Io = TlsStream<TcpStream>;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        loop {
            tokio::select! {
                (stream, peer) = Listener::accept(&mut self.listener) => {
                    self.handshakes.spawn(shake_hands(self.acceptor.clone(), stream, peer));
                }
                Some(done) = self.handshakes.join_next() => {
                    if let Ok(Some(connection)) = done {
                        return connection;
                    }
                }
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

async fn shake_hands(
    acceptor: TlsAcceptor,
    stream: TcpStream,
    peer: SocketAddr,
) -> Option<(TlsStream<TcpStream>, SocketAddr)> {
    // A watch's events are small and must be sent at once.
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "can't set TCP_NODELAY");
    }
    match timeout(HANDSHAKE_LIMIT, acceptor.accept(stream)).await {
        Ok(Ok(stream)) => Some((stream, peer)),
        Ok(Err(error)) => {
            tracing::debug!(%peer, %error, "a TLS handshake failed");
            None
        }
        Err(_) => {
            tracing::debug!(%peer, "a TLS handshake took too long");
            None
        }
    }
}
