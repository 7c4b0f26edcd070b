//! Which namespaces let the bridge bind their pods: those with a RoleBinding to ClusterRole `flux-bridge`.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use futures::{StreamExt, stream};
use k8s_openapi::api::authorization::v1::{ResourceAttributes, SelfSubjectAccessReview, SelfSubjectAccessReviewSpec};
use kube::{Api, Client, api::PostParams};
use tokio::time::Instant;
use tracing::debug;

use cluster::call;

/// How long an answer counts.
const KNOWN_FOR: Duration = Duration::from_secs(20);
/// Number of namespaces that are asked about at once.
const AT_ONCE: usize = 16;

/// The answers so far.
#[derive(Default)]
pub(crate) struct OptedIn(BTreeMap<String, (bool, Instant)>);

impl OptedIn {
    /// Asks about those of `wanted` whose answer is missing or old. Returns those that have opted in; None while there was no answer
    /// about one of them: what runs there would be left without its cores.
    pub(crate) async fn among(&mut self, client: &Client, wanted: BTreeSet<String>) -> Option<BTreeSet<String>> {
        self.0.retain(|namespace, _| wanted.contains(namespace));
        let is_known = |namespace: &String| self.0.get(namespace).is_some_and(|(_, asked)| asked.elapsed() < KNOWN_FOR);
        let asked: Vec<_> = wanted.iter().filter(|namespace| !is_known(namespace)).cloned().collect();
        let answers = asked.into_iter().map(async |namespace| (may_bind(client, &namespace).await, namespace));
        let answers: Vec<_> = stream::iter(answers).buffer_unordered(AT_ONCE).collect().await;
        for (may, namespace) in answers {
            match may {
                Ok(may) => drop(self.0.insert(namespace, (may, Instant::now()))),
                Err(error) => debug!(%error, namespace, "can't find out whether pods of a namespace may be bound"),
            }
        }
        let is_complete = wanted.iter().all(|namespace| self.0.contains_key(namespace));
        let opted_in = self.0.iter().filter(|(_, (may, _))| *may).map(|(namespace, _)| namespace.clone());
        is_complete.then(|| opted_in.collect())
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
