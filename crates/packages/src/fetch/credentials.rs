//! What lets a client into a server, kept apart from the URLs that name it: a URL is written down in many places, a credential in none.

use std::{collections::BTreeMap, fmt, sync::Arc};

use base64::{Engine, prelude::BASE64_STANDARD};
use rattler_networking::Authentication;
use reqwest::{
    Request, Response,
    header::{AUTHORIZATION, HeaderMap, HeaderValue},
};
use reqwest_middleware::{Middleware, Next};
use url::Url;

use api::SECRET_PACKAGES;
use base::redact::take_apart;

/// Which part of a server a client is let into, and by what.
#[derive(Clone, PartialEq, Eq)]
pub struct Credential {
    scope: Scope,
    /// It may be sent where everybody on the way can read it.
    over_http: bool,
    presentation: Presentation,
}

/// How a credential is shown to a server.
#[derive(Clone, PartialEq, Eq)]
enum Presentation {
    /// `Authorization`.
    Header(HeaderValue),
    /// conda's `/t/<token>`, before the part of the path that is below the scope.
    Path(String),
}

impl fmt::Debug for Credential {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Credential({:?}, ***)", self.scope)
    }
}

/// What a credential is for: `host`, `host:port`, either followed by a path, or `*.domain`.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Scope {
    /// In lower case; with `*.` before it, all hosts below this domain.
    host: String,
    /// None: the usual one of the URL's scheme.
    port: Option<u16>,
    /// The first segments of the path.
    path: Vec<String>,
}

impl Scope {
    fn parse(text: &str) -> Option<Self> {
        let (wildcard, rest) = text.strip_prefix("*.").map_or((false, text), |rest| (true, rest));
        // Whatever the scheme: it is not part of a scope.
        let url = Url::parse(&format!("https://{rest}")).ok()?;
        let is_plain = url.username().is_empty() && url.password().is_none() && url.query().is_none();
        let host = url.host_str().filter(|_| is_plain && !rest.contains(['@', '#', '?']))?;
        let host = if wildcard { format!("*.{host}") } else { host.to_owned() };
        Some(Self { host, port: url.port(), path: segments(&url) })
    }

    fn of(url: &Url, path: Vec<String>) -> Option<Self> {
        Some(Self { host: url.host_str()?.to_owned(), port: url.port(), path })
    }

    /// How exactly it means `url`; None: it does not.
    fn fits(&self, url: &Url) -> Option<(bool, usize)> {
        let host = url.host_str()?;
        let is_host = match self.host.strip_prefix('*') {
            Some(domain) => host.ends_with(domain) && host.len() > domain.len(),
            None => host == self.host,
        };
        let fits = is_host && self.port == url.port() && segments(url).starts_with(&self.path);
        fits.then(|| (!self.host.starts_with('*'), self.path.len()))
    }
}

/// Of the path, without empty ones at its end.
fn segments(url: &Url) -> Vec<String> {
    let all = url.path_segments().into_iter().flatten();
    all.filter(|segment| !segment.is_empty()).map(str::to_owned).collect()
}

impl Credential {
    /// A bearer token (RFC 6750) for the whole server of `url`. None for a URL without a server.
    ///
    /// # Errors
    /// No header can hold it.
    pub(crate) fn bearer(url: &Url, token: &str, over_http: bool) -> Result<Option<Self>, Unusable> {
        let presentation = Presentation::header(&format!("Bearer {token}"))?;
        Ok(Scope::of(url, Vec::new()).map(|scope| Self { scope, over_http, presentation }))
    }

    /// Reads what pixi and rattler-build keep in `credentials.json`: `{"HOST": {"CondaToken": "…"}}`, and so on.
    ///
    /// # Errors
    /// What is wrong, without the value.
    pub(crate) fn parse_all(json: &str, over_http: bool) -> Result<Vec<Self>, String> {
        let all: BTreeMap<String, Authentication> = serde_json::from_str(json).map_err(|error| {
            // Its own words may quote a secret.
            let (line, column) = (error.line(), error.column());
            format!("is not JSON such as {{\"HOST\": {{\"CondaToken\": \"TOKEN\"}}}}: line {line}, column {column}")
        })?;
        let parse = |(key, authentication): (String, Authentication)| {
            let scope = Scope::parse(&key).ok_or("has a key that is not HOST, HOST:PORT, HOST/PATH or *.DOMAIN")?;
            let presentation = Presentation::from(&authentication).map_err(|Unusable| {
                format!("has an entry for {} that is not a usable BearerToken, BasicHTTP or CondaToken", scope.host)
            })?;
            Ok(Self { scope, over_http, presentation })
        };
        all.into_iter().map(parse).collect()
    }
}

/// A value that can't be sent.
#[derive(Debug)]
pub(crate) struct Unusable;

impl Presentation {
    fn header(value: &str) -> Result<Self, Unusable> {
        let mut value = HeaderValue::from_str(value).map_err(|_| Unusable)?;
        value.set_sensitive(true);
        Ok(Self::Header(value))
    }

    fn basic(user: &str, password: &str) -> Result<Self, Unusable> {
        Self::header(&format!("Basic {}", BASE64_STANDARD.encode(format!("{user}:{password}"))))
    }

    fn from(authentication: &Authentication) -> Result<Self, Unusable> {
        match authentication {
            Authentication::BearerToken(token) => Self::header(&format!("Bearer {token}")),
            Authentication::BasicHTTP { username, password } => Self::basic(username, password),
            Authentication::CondaToken(token) => {
                let is_segment = |c: char| c.is_ascii_alphanumeric() || "-._~+=:".contains(c);
                let fits = !token.is_empty() && token.chars().all(is_segment);
                fits.then(|| Self::Path(token.clone())).ok_or(Unusable)
            }
            _ => Err(Unusable),
        }
    }
}

/// `url` as it may be written down, and what it holds besides.
pub(crate) fn taken_from(url: &Url) -> (Url, Vec<Credential>) {
    let (plain, user, token) = take_apart(url);
    let over_http = url.scheme() == "http";
    let mut credentials = Vec::new();
    if let Some((user, password)) = user
        && let Some(scope) = Scope::of(&plain, Vec::new())
        && let Ok(presentation) = Presentation::basic(&user, &password)
    {
        credentials.push(Credential { scope, over_http, presentation });
    }
    if let Some((before, token)) = token
        && let Some(scope) = Scope::of(&plain, before)
    {
        credentials.push(Credential { scope, over_http, presentation: Presentation::Path(token) });
    }
    (plain, credentials)
}

/// Attaches credentials to the requests that they are for, and to no others.
#[derive(Clone, Debug, Default)]
pub(crate) struct CredentialStore(Arc<[Credential]>);

impl CredentialStore {
    /// Of several that fit, the one that means a URL most exactly is sent; of two as exact ones the first.
    pub(crate) fn new(credentials: Vec<Credential>) -> Self {
        Self(credentials.into())
    }

    /// The most exact one for `url` that is of a kind.
    fn find<T>(&self, url: &Url, kind: impl Fn(&Presentation) -> Option<T>) -> Option<(&Credential, T)> {
        let fitting = self.0.iter().filter_map(|one| Some((one.scope.fits(url)?, one, kind(&one.presentation)?)));
        let best = fitting.rev().max_by_key(|(fits, ..)| *fits);
        best.filter(|(_, one, _)| one.over_http || url.scheme() == "https")
            .map(|(_, one, presentation)| (one, presentation))
    }

    /// What is really asked for `url`, and with which headers.
    pub(crate) fn open(&self, url: &Url) -> (Url, HeaderMap) {
        let header = self.find(url, |presentation| match presentation {
            Presentation::Header(value) => Some(value.clone()),
            Presentation::Path(_) => None,
        });
        let token = self.find(url, |presentation| match presentation {
            Presentation::Path(token) => Some(token.clone()),
            Presentation::Header(_) => None,
        });
        let mut asked = url.clone();
        if let Some((one, token)) = token {
            let path = url.path().split('/').collect::<Vec<_>>();
            // The first is what is before the first slash: nothing.
            let (before, rest) = path.split_at((1 + one.scope.path.len()).min(path.len()));
            asked.set_path(&[before, &["t", &token], rest].concat().join("/"));
        }
        (asked, header.into_iter().map(|(_, value)| (AUTHORIZATION, value)).collect())
    }

    /// For the end of a sentence on a refused request: there is a credential for `url`, and it was not sent.
    pub(crate) fn withheld(&self, url: &Url) -> String {
        let is_withheld = |one: &Credential| !one.over_http && one.scope.fits(url).is_some();
        match url.scheme() == "http" && self.0.iter().any(is_withheld) {
            true => format!(
                "; the credential for this server was not sent, since everybody on the way can read http: use https, or, for \
                 those of Secret {SECRET_PACKAGES}, set spec.packages.allowHttpCredentials"
            ),
            false => String::new(),
        }
    }

    /// The same for requests of others.
    pub(crate) fn middleware(&self) -> impl Middleware {
        let credentials = self.clone();
        sending(move |mut request, extensions, next| {
            let (url, headers) = credentials.open(request.url());
            let given = std::mem::replace(request.url_mut(), url);
            request.headers_mut().extend(headers);
            Box::pin(async move {
                let sent = next.run(request, extensions).await;
                // What went wrong names the URL that was asked.
                sent.map_err(|error| match error {
                    reqwest_middleware::Error::Reqwest(error) => error.with_url(given).into(),
                    other => other,
                })
            })
        })
    }
}

/// Tells the compiler of which kind a closure is.
fn sending<F>(closure: F) -> F
where
    F: for<'a> Fn(
        Request,
        &'a mut axum::http::Extensions,
        Next<'a>,
    ) -> futures::future::BoxFuture<'a, reqwest_middleware::Result<Response>>,
{
    closure
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// What is asked for `url`, and the header that is sent.
    fn asked(credentials: &CredentialStore, url: &str) -> (String, Option<String>) {
        let (url, headers) = credentials.open(&Url::parse(url).unwrap());
        (url.to_string(), headers.get(AUTHORIZATION).map(|value| value.to_str().unwrap().to_owned()))
    }

    #[test]
    fn a_credential_goes_to_the_server_and_the_path_that_it_is_for_and_over_https_only() {
        let json = r#"{
            "h": {"BearerToken": "b"}, "h:8": {"BasicHTTP": {"username": "me", "password": "pw"}},
            "*.d.org": {"CondaToken": "w"}, "a.d.org": {"CondaToken": "a"}, "p/conda": {"CondaToken": "p"}
        }"#;
        let credentials = CredentialStore::new(Credential::parse_all(json, false).unwrap());
        let allowed = CredentialStore::new(Credential::parse_all(json, true).unwrap());
        for (url, url_asked, header) in [
            ("https://h/c/x", "https://h/c/x", Some("Bearer b")),
            ("https://h:443/x", "https://h/x", Some("Bearer b")),
            ("https://h:8/x", "https://h:8/x", Some("Basic bWU6cHc=")),
            ("https://h:9/x", "https://h:9/x", None),
            ("https://hh/x", "https://hh/x", None),
            ("https://x.d.org/c/x?q", "https://x.d.org/t/w/c/x?q", None),
            ("https://a.d.org/c/x", "https://a.d.org/t/a/c/x", None),
            ("https://d.org/x", "https://d.org/x", None),
            ("https://evil-d.org/x", "https://evil-d.org/x", None),
            ("https://p/conda/c/x", "https://p/conda/t/p/c/x", None),
            ("https://p/condas/x", "https://p/condas/x", None),
            ("http://h/x", "http://h/x", None),
            ("http://a.d.org/x", "http://a.d.org/x", None),
        ] {
            assert_eq!(asked(&credentials, url), (url_asked.to_owned(), header.map(str::to_owned)), "{url}");
        }
        assert_eq!(asked(&allowed, "http://a.d.org/x").0, "http://a.d.org/t/a/x");
        assert_eq!(asked(&allowed, "http://h/x").1.as_deref(), Some("Bearer b"));
        let withheld =
            |credentials: &CredentialStore, url: &str| !credentials.withheld(&Url::parse(url).unwrap()).is_empty();
        assert!(
            withheld(&credentials, "http://h/x")
                && !withheld(&credentials, "http://i/x")
                && !withheld(&credentials, "https://h/x")
        );
        assert!(!withheld(&allowed, "http://h/x"));
        assert!(!format!("{allowed:?}").contains("pw"));
    }

    #[test]
    fn what_is_taken_from_a_url_makes_the_same_request_again() {
        for (given, plain, header) in [
            ("https://h/c/x", "https://h/c/x", None),
            ("https://me:p%40w@h:8/c/x", "https://h:8/c/x", Some("Basic bWU6cEB3")),
            ("http://h/t/tk/c/x", "http://h/c/x", None),
            ("http://h/t/tk", "http://h/", None),
            ("https://me@h/conda/t/e.y.J/c/x", "https://h/conda/c/x", Some("Basic bWU6")),
        ] {
            let url = Url::parse(given).unwrap();
            let (found, credentials) = taken_from(&url);
            assert_eq!(found.as_str(), plain);
            let mut expected = url;
            let _ = (expected.set_username(""), expected.set_password(None));
            let (asked, sent) = asked(&CredentialStore::new(credentials), plain);
            assert_eq!((asked.trim_end_matches('/'), sent.as_deref()), (expected.as_str(), header));
        }
        let signed = Url::parse("https://h/x.tar.gz?X-Amz-Signature=s").unwrap();
        assert_eq!(base::redact::stripped(&signed).as_str(), "https://h/x.tar.gz");
        let file = Url::parse("file:///srv/t/x/y.conda").unwrap();
        assert_eq!(base::redact::stripped(&file), file);
    }

    #[test]
    fn what_can_not_be_a_credential_is_refused_without_its_value() {
        for json in [
            r#"{"h": {"s3cret": 1}}"#,
            r#"{"h": "s3cret"}"#,
            r#"{"h": {"CondaToken": "s3cret/x"}}"#,
            r#"{"h": {"BearerToken": "s3cret\n"}}"#,
            r#"{"me:s3cret@h": {"BearerToken": "b"}}"#,
            r#"{"h": {"S3Credentials": {"access_key_id": "a", "secret_access_key": "s3cret", "session_token": null}}}"#,
            "s3cret",
        ] {
            let reason = Credential::parse_all(json, true).unwrap_err();
            assert!(!reason.contains("s3cret"), "{reason}");
        }
    }
}
