//! What a site's channels, mirrors and bundles demand of those who ask: Secret `flux-packages-access`.

use std::fmt;

use super::HttpError;

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
            authorities: text(crate::api::SECRET_PACKAGES_CA_KEY, authorities)?,
            token: text(crate::api::SECRET_PACKAGES_TOKEN_KEY, token)?.as_deref().map(Token::new),
        })
    }
}
