//! The HTTP clients of the pod: one for sources, one for peers.

use std::{path::PathBuf, time::Duration};

use reqwest::{RequestBuilder, redirect};
use url::Url;

use crate::{
    Access,
    fetch::credentials::{CredentialStore, CredentialsError},
};
use base::redact::{decoded, token_positions};

/// Long enough for a distant proxy, short enough that a wrong address is reported while the user still watches.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(15);
/// Between two reads. The whole transfer has no limit: an archive may be large and the line slow.
pub(crate) const READ_TIMEOUT: Duration = Duration::from_mins(1);
/// Short, because a peer is in the same data centre, and there are other peers.
const PEERS_CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
const PEERS_READ_TIMEOUT: Duration = Duration::from_secs(5);
/// As long as the planner waits for a node that fetches the packages itself.
const TIME_FOR_A_PEER: Duration = Duration::from_mins(15);
/// Shorter than a peer's server waits for the next request, so that no request goes into a closing connection.
const PEERS_IDLE_TIMEOUT: Duration = Duration::from_secs(2);
const USER_AGENT: &str = concat!("flux-distribute/", env!("CARGO_PKG_VERSION"));

/// The HTTP client of this process. Cheap to clone.
///
/// Trusts Mozilla's roots, which are compiled in, and also the CA bundle of the system or of `SSL_CERT_FILE`.
/// Proxies come from `HTTPS_PROXY`, `HTTP_PROXY`, `ALL_PROXY` and `NO_PROXY`; requests to peers use none.
#[derive(Clone, Debug)]
pub struct HttpClient {
    client: reqwest::Client,
    peers: reqwest::Client,
    credentials: CredentialStore,
    patience_with_peers: Duration,
    time_for_a_peer: Duration,
}

/// Why the client can't be set up.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HttpError {
    /// A proxy variable or the system's CA bundle is unusable.
    #[error("can't set up the HTTP client; check the proxy variables and SSL_CERT_FILE")]
    Client(#[source] reqwest::Error),
    /// A value in Secret `flux-packages-access` is unusable.
    #[error("Secret {} can't be used: its key {key} {reason}", api::SECRET_PACKAGES)]
    Secret {
        /// The key in the Secret.
        key: &'static str,
        /// What is wrong with the value, without the value.
        reason: String,
    },
    /// The file named by `RATTLER_AUTH_FILE` can't be read.
    #[error("can't read {}, which RATTLER_AUTH_FILE names", path.display())]
    AuthFile {
        /// The file's path.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// The file named by `RATTLER_AUTH_FILE` has unusable content.
    #[error("{}, which RATTLER_AUTH_FILE names, can't be used: it {reason}", path.display())]
    AuthContent {
        /// The file's path.
        path: PathBuf,
        /// What is wrong with the content.
        reason: CredentialsError,
    },
}

impl HttpClient {
    /// A client with the default settings and no credentials.
    ///
    /// # Errors
    /// A proxy variable or a CA bundle in the process's environment is unusable.
    pub fn new() -> Result<Self, HttpError> {
        Self::with_access(&Access::default(), &[])
    }

    /// A client that trusts the authorities of `access`, sends its token to the servers of `urls` (the spec's channels,
    /// mirror and bundle), and sends its other credentials to the servers that they are for. No other server gets any
    /// of them: peers don't, and neither do redirects to other servers.
    ///
    /// # Errors
    /// The process's environment or the Secret contains something unusable.
    pub fn with_access(access: &Access, urls: &[String]) -> Result<Self, HttpError> {
        let peers = reqwest::Client::builder()
            .tls_certs_only([])
            .no_proxy()
            .http1_only()
            .redirect(redirect::Policy::none())
            .connect_timeout(PEERS_CONNECT_TIMEOUT)
            .pool_idle_timeout(PEERS_IDLE_TIMEOUT)
            .user_agent(USER_AGENT);
        Ok(Self {
            client: build(base().tls_certs_merge(access.certificates()?))?,
            peers: build(peers)?,
            credentials: access.credentials(urls)?,
            patience_with_peers: PEERS_READ_TIMEOUT,
            time_for_a_peer: TIME_FOR_A_PEER,
        })
    }

    /// Sets how long a peer may be silent before other peers are asked. Default: 5 seconds.
    pub fn with_patience_with_peers(self, patience: Duration) -> Self {
        Self { patience_with_peers: patience, ..self }
    }

    /// Sets how long the archives of one fetch may wait for a peer in all, whatever it answers, besides the time that
    /// they take at the least rate. Default: 15 minutes.
    pub fn with_time_for_a_peer(self, time: Duration) -> Self {
        Self { time_for_a_peer: time, ..self }
    }

    pub(crate) fn time_for_a_peer(&self) -> Duration {
        self.time_for_a_peer
    }

    pub(crate) fn patience_with_peers(&self) -> Duration {
        self.patience_with_peers
    }

    pub(crate) fn ask(&self, url: &Url) -> RequestBuilder {
        let (url, headers) = self.credentials.open(url);
        self.client.get(url).headers(headers)
    }

    /// A clause for the error message about a request that `url`'s server refused; empty if no credential was withheld.
    pub(crate) fn withheld(&self, url: &Url) -> String {
        self.credentials.withheld(url)
    }

    pub(crate) fn ask_peer(&self, url: &str) -> RequestBuilder {
        self.peers.get(url)
    }

    /// A HEAD request, which asks the peer only whether it has the archive.
    pub(crate) fn look_at_peer(&self, url: &str) -> RequestBuilder {
        self.peers.head(url)
    }

    pub(crate) fn for_rattler(&self) -> rattler_networking::LazyClient {
        reqwest_middleware::ClientBuilder::new(self.client.clone()).with(self.credentials.middleware()).build().into()
    }
}

fn build(builder: reqwest::ClientBuilder) -> Result<reqwest::Client, HttpError> {
    // Only the process's first call has an effect; the error of any later one is expected.
    let _ = rustls::crypto::ring::default_provider().install_default();
    builder.build().map_err(HttpError::Client)
}

fn base() -> reqwest::ClientBuilder {
    // Without a CA bundle, as on some hosts and images, the client could otherwise not be built, even for http://.
    let roots =
        webpki_root_certs::TLS_SERVER_ROOT_CERTS.iter().filter_map(|der| reqwest::Certificate::from_der(der).ok());
    reqwest::Client::builder()
        .tls_certs_merge(roots)
        .connect_timeout(CONNECT_TIMEOUT)
        .read_timeout(READ_TIMEOUT)
        // A Referer would carry a URL's `/t/<token>` along a redirect.
        .referer(false)
        .redirect(redirect::Policy::custom(|attempt| match check_redirect(attempt.previous(), attempt.url()) {
            Ok(()) => attempt.follow(),
            Err(refused) => attempt.error(refused),
        }))
        .user_agent(USER_AGENT)
}

/// The most redirects that one request follows.
const MOST_REDIRECTS: usize = 10;

/// Why a redirect is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
enum RedirectRefusal {
    #[error("it redirects more than {MOST_REDIRECTS} times")]
    TooOften,
    #[error("it redirects from https to http, where anyone on the way could read and change the data")]
    ToHttp,
    #[error("it redirects to another server with the token in the URL")]
    WithToken,
}

/// Whether a request may follow a redirect to `next`. The client itself removes headers if the server changes.
fn check_redirect(previous: &[Url], next: &Url) -> Result<(), RedirectRefusal> {
    let Some((first, last)) = previous.first().zip(previous.last()) else { return Ok(()) };
    let is_other = |url: &Url| url.origin() != first.origin();
    match () {
        () if previous.len() > MOST_REDIRECTS => Err(RedirectRefusal::TooOften),
        () if last.scheme() == "https" && next.scheme() != "https" => Err(RedirectRefusal::ToHttp),
        () if is_other(next) && has_token_of(first, next) => Err(RedirectRefusal::WithToken),
        () => Ok(()),
    }
}

/// True if a conda token in the path of `first` is in `next`, however either encodes it.
fn has_token_of(first: &Url, next: &Url) -> bool {
    let (path, next) = (decoded(first.path()), decoded(next.as_str()));
    let segments: Vec<_> = path.split('/').collect();
    token_positions(first.scheme(), &path).any(|at| next.contains(segments[at]))
}

/// What went wrong, with all causes in one line, and without the URL: it may hold a password.
pub(crate) fn error_text(error: reqwest::Error) -> String {
    base::error_chain(&error.without_url())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn no_redirect_takes_a_credential_to_another_server_or_to_http() {
        for (previous, next, expected) in [
            (&["https://h/t/tk/c/x"][..], "https://h/t/tk/d/x", Ok(())),
            (&["https://h/t/tk/c/x"], "https://cdn/c/x", Ok(())),
            (&["https://h/t/tk/c/x"], "https://cdn/t/tk/c/x", Err(RedirectRefusal::WithToken)),
            (&["https://h/t/tk/c/x"], "https://cdn/x?back=/t/tk/c/x", Err(RedirectRefusal::WithToken)),
            (&["https://h/t/tk/c/x"], "https://h:8/t/tk/c/x", Err(RedirectRefusal::WithToken)),
            (&["https://h/t/tk/c/x", "https://cdn/x"], "https://other/tk", Err(RedirectRefusal::WithToken)),
            (&["https://h/t/%74k/c/x"], "https://cdn/tk/c/x", Err(RedirectRefusal::WithToken)),
            (&["https://h/t/tk/c/x"], "https://cdn/x?back=%2Ft%2F%74%6B%2Fc", Err(RedirectRefusal::WithToken)),
            (&["https://h/t/tk/c/x"], "https://cdn/x?back=%252Ft%252F%2574k", Err(RedirectRefusal::WithToken)),
            (&["https://h/a%2Ft%2Ftk/c/x"], "https://cdn/tk/c/x", Err(RedirectRefusal::WithToken)),
            (&["https://h/%74/tk/c/x"], "https://cdn/tk/c/x", Err(RedirectRefusal::WithToken)),
            (&["https://h/t/tk/c/x"], "https://cdn/c/%78", Ok(())),
            (&["https://h/c/x"], "http://h/c/x", Err(RedirectRefusal::ToHttp)),
            (&["https://h:8/c/x"], "http://h:8/c/x", Err(RedirectRefusal::ToHttp)),
            (&["http://h/c/x"], "http://cdn/c/x", Ok(())),
            (&["http://h/c/x"], "https://h/c/x", Ok(())),
            (&["https://h/x"; 11], "https://h/x", Err(RedirectRefusal::TooOften)),
        ] {
            let url = |url: &str| Url::parse(url).unwrap();
            let before = previous.iter().map(|one| url(one)).collect::<Vec<_>>();
            assert_eq!(check_redirect(&before, &url(next)), expected, "{previous:?} {next}");
        }
    }

    #[test]
    fn secrets_in_urls_are_never_shown() {
        for (url, safe) in [
            ("https://me:secret@host/channel", "https://host/channel"),
            ("https://host/t/secret/channel/x.conda", "https://host/t/***/channel/x.conda"),
            ("https://host/x.tar.gz?X-Amz-Signature=secret", "https://host/x.tar.gz"),
            ("file:///srv/t/x.tar.gz", "file:///srv/t/x.tar.gz"),
            ("https://host/t/x.tar.gz", "https://host/t/x.tar.gz"),
            ("//me:secret@host/channel", "(not a URL)"),
            ("me:secret@host/channel", "(not a URL)"),
            ("conda-forge", "conda-forge"),
        ] {
            assert_eq!(base::redact::shown(url), safe);
        }
    }
}
