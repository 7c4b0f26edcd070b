//! Which namespaces let the bridge bind their pods: those with a RoleBinding to ClusterRole `flux-bridge`.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use futures::{StreamExt, stream};
use k8s_openapi::api::authorization::v1::{
    ResourceAttributes, SelfSubjectAccessReview, SelfSubjectAccessReviewSpec, SubjectAccessReviewStatus,
};
use kube::{Api, Client, api::PostParams};
use tokio::time::Instant;
use tracing::{debug, warn};

use cluster::{ApiError, call};

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
        let answers = asked.into_iter().map(async |namespace| (ask(client, &namespace).await, namespace));
        let answers: Vec<_> = stream::iter(answers).buffer_unordered(AT_ONCE).collect().await;
        for (answer, namespace) in answers {
            match answer {
                Ok(answer) => {
                    if let Some(reason) = &answer.evaluation_error {
                        warn!(
                            namespace,
                            reason, "the API server can't say for sure whether pods of a namespace may be bound"
                        );
                    }
                    let before = self.0.get(&namespace).map(|(may, _)| *may);
                    self.0.insert(namespace, (may_bind(&answer, before), Instant::now()));
                }
                Err(error) => debug!(%error, namespace, "can't find out whether pods of a namespace may be bound"),
            }
        }
        let is_complete = wanted.iter().all(|namespace| self.0.contains_key(namespace));
        let opted_in = self.0.iter().filter(|(_, (may, _))| *may).map(|(namespace, _)| namespace.clone());
        is_complete.then(|| opted_in.collect())
    }
}

/// What an answer says, by the one `before` it: one that comes from an error changes nothing. The first one then is a no: whoever owns
/// the namespace can cause such errors (a RoleBinding to a Role that is gone), and must not keep pods of others waiting.
fn may_bind(answer: &SubjectAccessReviewStatus, before: Option<bool>) -> bool {
    answer.allowed || (answer.evaluation_error.is_some() && before == Some(true))
}

async fn ask(client: &Client, namespace: &str) -> Result<SubjectAccessReviewStatus, ApiError> {
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
    answer.status.ok_or_else(|| ApiError::Content {
        object: "SelfSubjectAccessReview".to_owned(),
        reason: "the API server's answer has no status".to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_that_comes_from_an_error_changes_nothing() {
        for (allowed, error, before, expected) in [
            (true, None, None, true),
            (false, None, Some(true), false),
            (true, Some("role not found"), Some(false), true),
            (false, Some("role not found"), Some(true), true),
            (false, Some("role not found"), Some(false), false),
            (false, Some("role not found"), None, false),
        ] {
            let evaluation_error = error.map(str::to_owned);
            let answer = SubjectAccessReviewStatus { allowed, evaluation_error, ..Default::default() };
            assert_eq!(may_bind(&answer, before), expected, "{allowed} {error:?} after {before:?}");
        }
    }
}
