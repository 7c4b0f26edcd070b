//! What an epoch needs before it can begin: packages and a certificate. Also where the published packages come from.

use std::collections::HashMap;

use tracing::info;

use super::{ApiError, Planner};
use crate::package_set::Published;
use api::{PackageSet, Roster};
use base::error_chain;
use cluster::{certificate, published};
use locks::lock_urls;
use model::{
    peers::is_on_every_host,
    roster::{Observed, is_certificate_in_use, is_certificate_of_another},
    status::{CERTIFICATE_IS_GONE, Obstacle},
};

/// What was found, and what there is to say of it.
type Found = (Option<String>, Option<Obstacle>);

/// Where the published package sets come from, by digest.
#[derive(Default)]
pub(super) struct Sources(HashMap<String, Source>);

/// Where a package set comes from.
struct Source {
    /// A mirror stands in for a lock's channels, and for nothing else.
    mirrored: bool,
    urls: Vec<String>,
}

impl From<&PackageSet> for Source {
    fn from(set: &PackageSet) -> Self {
        match set {
            PackageSet::Bundle(source) => Self { mirrored: false, urls: vec![source.url.clone()] },
            PackageSet::Lock { lock, .. } => Self { mirrored: true, urls: lock_urls(lock).unwrap_or_default() },
        }
    }
}

impl Sources {
    /// Remembers the set; returns its digest.
    fn know(&mut self, set: &PackageSet) -> String {
        let digest = set.digest();
        self.0.entry(digest.clone()).or_insert_with(|| Source::from(set));
        digest
    }

    /// All of set `digest` is on every host already, where `mirror` stands in for the channels.
    pub(super) fn is_local(&self, digest: &str, mirror: Option<&String>) -> bool {
        self.0.get(digest).is_some_and(|source| match mirror {
            Some(mirror) if source.mirrored => is_on_every_host(std::slice::from_ref(mirror)),
            _ => is_on_every_host(&source.urls),
        })
    }
}

impl Planner {
    /// Digest of the published package set, and what keeps the one that is asked for from being it.
    pub(super) async fn packages(&mut self, seen: &Observed<'_>) -> Result<Found, ApiError> {
        let mut platforms: Vec<_> =
            seen.reports.values().filter_map(|report| Some(report.facts.as_ref()?.platform.clone())).collect();
        platforms.sort();
        platforms.dedup();
        let running = seen.roster.map(|roster| roster.settings.digest.as_str());
        Ok(match self.resolver.published(&self.client, &seen.spec.packages, &platforms, running).await? {
            Published::Is(set) => (Some(self.sources.know(&set)), None),
            Published::Pending => (None, Some(Obstacle::Waiting("the packages are being resolved".to_owned()))),
            Published::Still(set, message) => (Some(self.sources.know(&set)), Some(unresolved(message))),
            Published::Failed(message) => (None, Some(unresolved(message))),
        })
    }

    /// The package set of the running epoch, where the spec asks for another one by now.
    pub(super) async fn know_running_set(&mut self, roster: Option<&Roster>) -> Result<(), ApiError> {
        if roster.is_some_and(|roster| !self.sources.0.contains_key(&roster.settings.digest)) {
            self.sources.0.clear();
            for set in published::read_packages(&self.client).await? {
                self.sources.know(&set);
            }
        }
        Ok(())
    }

    /// Fingerprint of the certificate, or what keeps it away. One is made only where none can be in use.
    pub(super) async fn certificate(&self, seen: &mut Observed<'_>) -> Result<Found, ApiError> {
        match certificate::read_published(&self.client).await {
            Ok(Some(published)) if is_certificate_of_another(seen, published.made_for(seen.instance_uid)) => {
                info!("the certificate is of the instance before: making another one");
                certificate::discard(&self.client, published).await?;
                self.make_certificate(seen.instance_uid).await?;
                Ok((None, None))
            }
            Ok(Some(published)) => Ok((Some(published.certificate.fingerprint()), None)),
            Ok(None) if is_certificate_in_use(seen) => {
                seen.is_certificate_gone = true;
                Ok((None, Some(Obstacle::Waiting(CERTIFICATE_IS_GONE.to_owned()))))
            }
            Ok(None) => {
                self.make_certificate(seen.instance_uid).await?;
                Ok((None, None))
            }
            Err(ApiError::Content { object, reason }) => {
                let message = format!("{object}: {reason}");
                Ok((None, Some(Obstacle::Problem { reason: "MalformedCertificate", message })))
            }
            // Refused by the API server, such as a role that is not bound yet.
            Err(error) if error.code().is_some() => Ok((None, Some(Obstacle::Waiting(error_chain(&error))))),
            Err(error) => Err(error),
        }
    }

    async fn make_certificate(&self, instance_uid: &str) -> Result<(), ApiError> {
        let made = certificate::generate().map_err(|error| ApiError::Content {
            object: "the kernel's randomness".to_owned(),
            reason: error.to_string(),
        })?;
        certificate::create(&self.client, &made, instance_uid).await
    }
}

fn unresolved(message: String) -> Obstacle {
    Obstacle::Problem { reason: "PackagesUnresolved", message }
}
