//! The instance's CURVE certificate: CZMQ's ZPL text with Curve25519 keys in Z85, as flux-keygen(1) writes it. All
//! brokers of an instance share one certificate, which the planner makes once.

use sha2::{Digest, Sha256};
use x25519_dalek::{PublicKey, StaticSecret};

/// A certificate that a broker accepts. `Debug` does not show the secret.
#[derive(Clone, PartialEq, Eq)]
pub struct Certificate {
    text: String,
    public: [u8; 32],
}

/// Why a text is not a certificate. The message never quotes the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum CertificateError {
    /// This section or key is missing.
    #[error("it has no {0}")]
    Missing(&'static str),
    /// This key is not 40 characters of Z85.
    #[error("its {0} is not a Z85 key of 40 characters")]
    NotAKey(&'static str),
    /// The name has characters that flux refuses (underscore, comma, quote).
    #[error("its metadata name is empty or has a character that Flux refuses")]
    BadName,
    /// The public key does not belong to the secret key.
    #[error("its public-key does not belong to its secret-key")]
    Mismatch,
}

impl Certificate {
    /// Makes a certificate from 32 random bytes. Its metadata gets `name`, because Flux requires one; the name must not
    /// have an underscore.
    pub fn from_secret(name: &str, secret: [u8; 32]) -> Self {
        let secret = StaticSecret::from(secret);
        let public = PublicKey::from(&secret).to_bytes();
        let text = format!(
            "#  ZeroMQ CURVE **Secret** Certificate\n#  DO NOT DISTRIBUTE\n\nmetadata\n    name = \"{name}\"\ncurve\n    \
             public-key = \"{}\"\n    secret-key = \"{}\"\n",
            z85::encode(public),
            z85::encode(secret.to_bytes()),
        );
        Self { text, public }
    }

    /// Parses a certificate as flux-core's cert.c does, and checks that its keys are a pair.
    ///
    /// # Errors
    /// The first problem for which a broker would refuse it.
    pub fn parse(text: &str) -> Result<Self, CertificateError> {
        let (mut section, mut name, mut public, mut secret) = ("", None, None, None);
        for line in text.lines() {
            if line.trim().is_empty() || line.starts_with('#') {
                continue;
            }
            if !line.starts_with([' ', '\t']) {
                section = line.trim();
                continue;
            }
            let Some((key, value)) = line.split_once('=') else { continue };
            let value = value.trim().trim_matches('"').to_owned();
            match (section, key.trim()) {
                ("metadata", "name") => name = Some(value),
                ("curve", "public-key") => public = Some(value),
                ("curve", "secret-key") => secret = Some(value),
                _ => {}
            }
        }
        let name = name.ok_or(CertificateError::Missing("metadata name"))?;
        let allowed = |c: char| c.is_ascii_alphanumeric() || ".-:+=^!/*?&<>()[]{}@%$# \t".contains(c);
        if name.is_empty() || !name.chars().all(allowed) {
            return Err(CertificateError::BadName);
        }
        let public = decode("public-key", public)?;
        let secret = StaticSecret::from(decode("secret-key", secret)?);
        if PublicKey::from(&secret).to_bytes() != public {
            return Err(CertificateError::Mismatch);
        }
        Ok(Self { text: text.to_owned(), public })
    }

    /// The content of the certificate file. It contains the secret key.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// sha256 of the public key, in hex. It identifies the certificate without revealing the secret key.
    pub fn fingerprint(&self) -> String {
        hex::encode(Sha256::digest(self.public))
    }
}

impl std::fmt::Debug for Certificate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Certificate({})", self.fingerprint())
    }
}

fn decode(which: &'static str, value: Option<String>) -> Result<[u8; 32], CertificateError> {
    let value = value.ok_or(CertificateError::Missing(which))?;
    let bytes = z85::decode(value).map_err(|_| CertificateError::NotAKey(which))?;
    bytes.try_into().map_err(|_| CertificateError::NotAKey(which))
}

#[cfg(test)]
mod tests {
    use super::{Certificate, CertificateError};

    fn sample() -> Certificate {
        Certificate::from_secret("flux", [7; 32])
    }

    #[test]
    fn a_generated_certificate_can_be_parsed() {
        assert_eq!(Certificate::parse(sample().text()).unwrap(), sample());
    }

    #[test]
    fn the_secret_does_not_show_in_debug_or_errors() {
        let text = sample().text().to_owned();
        let secret = text.lines().find_map(|line| line.trim().strip_prefix("secret-key = ")).unwrap();
        let secret = secret.trim_matches('"');
        assert!(!format!("{:?}", sample()).contains(secret));
        let broken = text.replace("public-key = \"", "public-key = \"!");
        let error = Certificate::parse(&broken).unwrap_err();
        assert!(!format!("{error} {error:?}").contains(secret));
    }

    #[test]
    fn a_certificate_that_a_broker_would_refuse_is_refused() {
        let text = sample().text().to_owned();
        let other = Certificate::from_secret("flux", [8; 32]);
        let public = other.text().lines().find(|line| line.contains("public-key")).unwrap().to_owned();
        let own = text.lines().find(|line| line.contains("public-key")).unwrap().to_owned();
        for (broken, expected) in [
            (String::new(), CertificateError::Missing("metadata name")),
            (text.replace("name = \"flux\"", "name = \"a_b\""), CertificateError::BadName),
            (text.replace("name = \"flux\"", "name = \"\""), CertificateError::BadName),
            (text.replace("secret-key", "secret"), CertificateError::Missing("secret-key")),
            (text.replace(&own, "    public-key = \"short\""), CertificateError::NotAKey("public-key")),
            (text.replace(&own, &public), CertificateError::Mismatch),
        ] {
            assert_eq!(Certificate::parse(&broken).unwrap_err(), expected);
        }
    }
}
