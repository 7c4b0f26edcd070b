//! What a site's channels, mirrors and bundles demand of those who ask: Secret `flux-packages-access`.

use std::{collections::HashSet, fmt, sync::Arc};

use reqwest::{
    Request, Response,
    header::{AUTHORIZATION, HeaderMap, HeaderValue},
};
use reqwest_middleware::{Middleware, Next};
use rustls::{
    RootCertStore,
    pki_types::{CertificateDer, pem::PemObject},
};
use url::Url;

use super::HttpError;
use crate::api::{SECRET_PACKAGES_CA_KEY, SECRET_PACKAGES_TOKEN_KEY};

/// The content of Secret `flux-packages-access`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Access {
    /// PEM certificates of private authorities, besides those that are built in.
    pub authorities: Option<String>,
    /// Sent to the servers that the spec's URLs name, and to no others.
    pub token: Option<Token>,
}

/// A bearer token (RFC 6750).
#[derive(Clone, PartialEq, Eq)]
pub struct Token(String);

impl Token {
    /// White space around it, as files end with, is not part of it.
    pub fn new(token: &str) -> Self {
        Self(token.trim().to_owned())
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(***)")
    }
}

impl Access {
    /// From the values of the Secret's keys `ca.crt` and `token`; an empty value is as good as none.
    ///
    /// # Errors
    /// A value is not text.
    pub fn from_secret(authorities: Option<&[u8]>, token: Option<&[u8]>) -> Result<Self, HttpError> {
        let text = |key: &'static str, value: Option<&[u8]>| match value.map(std::str::from_utf8) {
            Some(Err(_)) => Err(HttpError::Secret { key, reason: "is not text".to_owned() }),
            Some(Ok(text)) if !text.trim().is_empty() => Ok(Some(text.to_owned())),
            _ => Ok(None),
        };
        Ok(Self {
            authorities: text(SECRET_PACKAGES_CA_KEY, authorities)?,
            token: text(SECRET_PACKAGES_TOKEN_KEY, token)?.as_deref().map(Token::new),
        })
    }

    pub(super) fn certificates(&self) -> Result<Vec<reqwest::Certificate>, HttpError> {
        let wrong = |reason: &str| HttpError::Secret { key: SECRET_PACKAGES_CA_KEY, reason: reason.to_owned() };
        let Some(pem) = &self.authorities else { return Ok(Vec::new()) };
        let mut certificates = Vec::new();
        for der in CertificateDer::pem_slice_iter(pem.as_bytes()) {
            let der = der.map_err(|_| wrong("is not whole PEM: -----BEGIN CERTIFICATE----- up to the END line"))?;
            // The client would say no more than that it could not be made.
            let added = RootCertStore::empty().add(der.clone());
            let certificate = added.ok().and_then(|()| reqwest::Certificate::from_der(&der).ok());
            certificates.push(certificate.ok_or_else(|| wrong("holds something that is not a certificate"))?);
        }
        if certificates.is_empty() {
            return Err(wrong("holds no certificate in PEM: -----BEGIN CERTIFICATE----- and so on"));
        }
        Ok(certificates)
    }

    pub(super) fn bearer(&self, urls: &[String]) -> Result<Bearer, HttpError> {
        let Some(Token(token)) = &self.token else { return Ok(Bearer::default()) };
        let reason = "is not a token: one line of letters, digits and -._~+/=";
        let wrong = |_| HttpError::Secret { key: SECRET_PACKAGES_TOKEN_KEY, reason: reason.to_owned() };
        let mut header = HeaderValue::from_str(&format!("Bearer {token}")).map_err(wrong)?;
        header.set_sensitive(true);
        let origins = urls.iter().filter_map(|url| Some(origin(&Url::parse(url).ok()?))).collect();
        Ok(Bearer(Some(Arc::new((header, origins)))))
    }
}

/// Scheme, host and port: whom a URL's server is.
fn origin(url: &Url) -> String {
    url.origin().ascii_serialization()
}

/// The token, and the servers it is for.
#[derive(Clone, Default)]
pub(super) struct Bearer(Option<Arc<(HeaderValue, HashSet<String>)>>);

impl fmt::Debug for Bearer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Bearer(***)")
    }
}

impl Bearer {
    /// What a request to `url` has to carry. A user and password that the URL itself names are stronger.
    pub(super) fn for_url(&self, url: &Url) -> HeaderMap {
        let header = self.0.as_ref().filter(|all| all.1.contains(&origin(url)) && url.username().is_empty());
        header.iter().map(|all| (AUTHORIZATION, all.0.clone())).collect()
    }

    /// The same for requests of others.
    pub(super) fn middleware(&self) -> impl Middleware {
        let bearer = self.clone();
        sending(move |mut request, extensions, next| {
            if !request.headers().contains_key(AUTHORIZATION) {
                let headers = bearer.for_url(request.url());
                request.headers_mut().extend(headers);
            }
            Box::pin(next.run(request, extensions))
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
