//! Provides what an epoch needs before it can begin: packages and a certificate. Also remembers where the published
//! packages come from.

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
};

use tracing::info;

use super::{ApiError, Planner};
use crate::package_set::{Published, ResolveError};
use api::{CONFIGMAP_PACKAGES, PackageSet, Roster, SECRET_CURVE, rules::PLATFORMS};
use base::error_chain;
use cluster::{certificate, published};
use locks::lock_urls;
use model::{
    conditions::CERTIFICATE_IS_GONE,
    nodes::Nodes,
    observed::{Observed, Reports, is_certificate_in_use, is_certificate_of_another},
    obstacle::Obstacle,
    peers::is_on_every_host,
};

/// The digest or fingerprint of what is published, if anything, and what is wrong with it, if anything.
type DigestAndObstacle = (Option<String>, Option<Obstacle>);

/// Where the published package sets come from, by digest.
#[derive(Default)]
pub(super) struct Sources(HashMap<String, Source>);

/// Where a package set comes from.
struct Source {
    /// `spec.packages.mirror` replaces the channels of a lock, but not the URL of a bundle.
    is_mirrored: bool,
    urls: Vec<String>,
}

impl From<&PackageSet> for Source {
    fn from(set: &PackageSet) -> Self {
        match set {
            PackageSet::Bundle(source) => Self { is_mirrored: false, urls: vec![source.url.clone()] },
            PackageSet::Lock { lock, .. } => Self { is_mirrored: true, urls: lock_urls(lock).unwrap_or_default() },
        }
    }
}

impl Sources {
    /// Remembers where the set comes from; returns its digest.
    fn remember(&mut self, set: &PackageSet) -> String {
        let digest = set.digest();
        self.0.entry(digest.clone()).or_insert_with(|| Source::from(set));
        digest
    }

    /// True if every URL of set `digest` is a file on each host, given that `mirror` replaces the channels of a lock.
    pub(super) fn is_local(&self, digest: &str, mirror: Option<&String>) -> bool {
        self.0.get(digest).is_some_and(|source| match mirror {
            Some(mirror) if source.is_mirrored => is_on_every_host(std::slice::from_ref(mirror)),
            _ => is_on_every_host(&source.urls),
        })
    }
}

/// The platforms of these nodes for which there are packages. A node is left out if its platform has no packages, or does not fit the
/// architecture that its kubelet reports: it gets no packages, but the others get theirs.
fn platforms(nodes: &Nodes, reports: &Reports) -> Vec<String> {
    let reported = nodes.iter().filter_map(|node| {
        let platform = reports.get(node.name.as_str())?.facts.as_ref()?.platform.as_str();
        let fits_architecture = match node.architecture.as_str() {
            "amd64" => platform == "linux-64",
            "arm64" => platform == "linux-aarch64",
            architecture => architecture.is_empty() && PLATFORMS.contains(&platform),
        };
        fits_architecture.then_some(platform)
    });
    reported.collect::<BTreeSet<_>>().into_iter().map(str::to_owned).collect()
}

impl Planner {
    /// Returns the digest of the published package set, and why it is not the one that the spec asks for, if so.
    pub(super) async fn packages(&mut self, seen: &Observed<'_>) -> Result<DigestAndObstacle, ApiError> {
        let platforms = platforms(&seen.nodes, &seen.reports);
        let running = seen.roster.map(|roster| roster.settings.digest.as_str());
        let is_own = seen.roster.is_some_and(|roster| roster.instance_uid == seen.instance_uid);
        let may_keep = is_own || seen.status.instance_id.is_some();
        let version = self.versions.of(CONFIGMAP_PACKAGES);
        let published =
            self.resolver.published(&self.client, &seen.spec.packages, &platforms, running, may_keep, version);
        Ok(match published.await? {
            Published::Is(set) => (Some(self.sources.remember(&set)), None),
            Published::Pending => (None, Some(Obstacle::Waiting("the packages are being resolved".to_owned()))),
            Published::Still(set, error) => (Some(self.sources.remember(&set)), Some(unresolved(&error))),
            Published::Failed(error) => (None, Some(unresolved(&error))),
        })
    }

    /// Makes sure that the source of the running epoch's package set is known: the spec may ask for another set by now.
    pub(super) async fn remember_running_set(&mut self, roster: Option<&Roster>) -> Result<(), ApiError> {
        if roster.is_some_and(|roster| !self.sources.0.contains_key(&roster.settings.digest)) {
            self.sources.0.clear();
            for set in published::read_packages(&self.client).await? {
                self.sources.remember(&set);
            }
        }
        Ok(())
    }

    /// Returns the fingerprint of the certificate, or why there is none. Makes a certificate only if no broker can be
    /// using one.
    pub(super) async fn certificate(&mut self, seen: &mut Observed<'_>) -> Result<DigestAndObstacle, ApiError> {
        let read = async { Ok(certificate::read_published(&self.client).await?.map(Arc::new)) };
        match self.certificate.or_read(self.versions.of(SECRET_CURVE), read).await {
            Ok(Some(published)) if is_certificate_of_another(seen, published.made_for(seen.instance_uid)) => {
                info!("the certificate belongs to a previous instance: making a new one");
                self.certificate.forget();
                certificate::discard(&self.client, &published).await?;
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
            // The API server refused the call, for example because the role is not bound yet.
            Err(error) if error.code().is_some() => Ok((None, Some(Obstacle::Waiting(error_chain(&error))))),
            Err(error) => Err(error),
        }
    }

    async fn make_certificate(&mut self, instance_uid: &str) -> Result<(), ApiError> {
        self.certificate.forget();
        let made = certificate::generate().map_err(|error| ApiError::Content {
            object: "the kernel's randomness".to_owned(),
            reason: error.to_string(),
        })?;
        certificate::create(&self.client, &made, instance_uid).await
    }
}

fn unresolved(error: &ResolveError) -> Obstacle {
    Obstacle::Problem { reason: "PackagesUnresolved", message: error_chain(error) }
}

#[cfg(test)]
mod tests {
    use api::FluxNodeStatus;
    use k8s_openapi::api::core::v1::Node;
    use model::eligibility::NodeView;
    use serde_json::json;

    use super::*;

    #[test]
    fn packages_are_resolved_only_for_platforms_that_there_are() {
        let found = |nodes: &[(&str, &str)]| {
            let named = |number: usize| format!("n{number}");
            let report = |(number, (_, platform)): (usize, &(&str, &str))| -> (String, FluxNodeStatus) {
                let facts = json!({"platform": platform, "glibc": "2.36", "resources": {"cores": 1}, "systemd": true, "prefix": "/p", "memoryMiB": 1, "bootID": ""});
                (named(number), serde_json::from_value(json!({"facts": facts})).unwrap())
            };
            let view = |(number, (architecture, _)): (usize, &(&str, &str))| {
                let info = json!({"architecture": architecture, "bootID": "", "containerRuntimeVersion": "", "kernelVersion": "", "kubeProxyVersion": "",
                    "kubeletVersion": "", "machineID": "", "operatingSystem": "linux", "osImage": "", "systemUUID": ""});
                let node: Node =
                    serde_json::from_value(json!({"metadata": {"name": named(number)}, "status": {"nodeInfo": info}}))
                        .unwrap();
                NodeView::from(&node)
            };
            let views: Vec<_> = nodes.iter().enumerate().map(view).collect();
            let reports: Vec<_> = nodes.iter().enumerate().map(report).collect();
            let reports = reports.iter().map(|(name, report)| (name.as_str(), report)).collect();
            platforms(&views.iter().collect(), &reports)
        };
        assert_eq!(
            found(&[("arm64", "linux-aarch64"), ("s390x", "bogus"), ("amd64", "linux-64"), ("amd64", "")]),
            ["linux-64", "linux-aarch64"]
        );
        assert_eq!(
            found(&[("amd64", "linux-64"), ("amd64", "linux-aarch64"), ("s390x", "linux-64")]),
            ["linux-64"],
            "a node can't be what it reports"
        );
        assert_eq!(found(&[("", "linux-aarch64")]), ["linux-aarch64"]);
    }
}
