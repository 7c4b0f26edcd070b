//! Which namespaces let the bridge bind their pods: those with a RoleBinding to ClusterRole `flux-bridge`.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use k8s_openapi::api::authorization::v1::{ResourceAttributes, SelfSubjectAccessReview, SelfSubjectAccessReviewSpec};
use kube::{Api, Client, api::PostParams};
use tokio::time::Instant;
use tracing::debug;

use cluster::call;

/// How long an answer counts.
const KNOWN_FOR: Duration = Duration::from_secs(20);

/// The answers so far.
#[derive(Default)]
pub(crate) struct OptedIn(BTreeMap<String, (bool, Instant)>);

impl OptedIn {
    /// Asks about those of `wanted` whose answer is missing or old. Returns those that have opted in.
    pub(crate) async fn among(&mut self, client: &Client, wanted: BTreeSet<String>) -> BTreeSet<String> {
        self.0.retain(|namespace, _| wanted.contains(namespace));
        for namespace in &wanted {
            if self.0.get(namespace).is_some_and(|(_, asked)| asked.elapsed() < KNOWN_FOR) {
                continue;
            }
            match may_bind(client, namespace).await {
                Ok(may) => drop(self.0.insert(namespace.clone(), (may, Instant::now()))),
                Err(error) => debug!(%error, namespace, "can't find out whether pods of a namespace may be bound"),
            }
        }
        self.0.iter().filter(|(_, (may, _))| *may).map(|(namespace, _)| namespace.clone()).collect()
    }
}

async fn may_bind(client: &Client, namespace: &str) -> Result<bool, cluster::ApiError> {
    let attributes = ResourceAttributes {
        namespace: Some(namespace.to_owned()),
        verb: Some("create".to_owned()),
        resource: Some("pods".to_owned()),
        subresource: Some("binding".to_owned()),
        ..ResourceAttributes::default()
    };
    let spec = SelfSubjectAccessReviewSpec { resource_attributes: Some(attributes), ..Default::default() };
    let review = SelfSubjectAccessReview { spec, ..Default::default() };
    let reviews: Api<SelfSubjectAccessReview> = Api::all(client.clone());
    let answer = call("ask for our own rights", reviews.create(&PostParams::default(), &review)).await?;
    Ok(answer.status.is_some_and(|status| status.allowed))
}
