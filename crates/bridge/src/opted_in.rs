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

/// What is known about a namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Knowledge {
    /// The bridge may bind pods there.
    OptedIn,
    /// It may not.
    OptedOut,
    /// The API server could not evaluate all rules, and has never said anything else.
    Doubtful,
}

/// The answers so far.
#[derive(Default)]
pub(crate) struct OptedIn(BTreeMap<String, (Knowledge, Instant)>);

impl OptedIn {
    /// Asks about those of `wanted` that were never asked about, and forgets all others. Returns those that have opted in, and those that
    /// are in doubt; None while there was no answer about one of them: what runs there would be left without its cores.
    pub(crate) async fn among(
        &mut self,
        client: &Client,
        wanted: BTreeSet<String>,
    ) -> Option<(BTreeSet<String>, BTreeSet<String>)> {
        self.0.retain(|namespace, _| wanted.contains(namespace));
        let unknown = wanted.iter().filter(|namespace| !self.0.contains_key(*namespace)).cloned().collect();
        self.ask(client, unknown).await;
        let is_complete = wanted.iter().all(|namespace| self.0.contains_key(namespace));
        let all = |wanted| {
            let are = self.0.iter().filter(move |(_, (knowledge, _))| *knowledge == wanted);
            are.map(|(namespace, _)| namespace.clone()).collect()
        };
        is_complete.then(|| (all(Knowledge::OptedIn), all(Knowledge::Doubtful)))
    }

    /// Asks again about those whose answer is old. Returns true if one has another answer now.
    pub(crate) async fn renew(&mut self, client: &Client) -> bool {
        let is_old = |(_, (_, asked)): &(&String, &(_, Instant))| asked.elapsed() >= KNOWN_FOR;
        let old = self.0.iter().filter(is_old).map(|(namespace, _)| namespace.clone()).collect();
        self.ask(client, old).await
    }

    /// Asks about `namespaces`. Returns true if one has another answer than before.
    async fn ask(&mut self, client: &Client, namespaces: Vec<String>) -> bool {
        let answers = namespaces.into_iter().map(async |namespace| (ask(client, &namespace).await, namespace));
        let answers: Vec<_> = stream::iter(answers).buffer_unordered(AT_ONCE).collect().await;
        let mut has_changed = false;
        for (answer, namespace) in answers {
            match answer {
                Ok(answer) => {
                    if let Some(reason) = doubt(&answer) {
                        warn!(
                            namespace,
                            reason, "can't evaluate all rules: look for a RoleBinding to a Role that is gone"
                        );
                    }
                    let before = self.0.get(&namespace).map(|(knowledge, _)| *knowledge);
                    let knowledge = after(&answer, before);
                    has_changed |= before != Some(knowledge);
                    self.0.insert(namespace, (knowledge, Instant::now()));
                }
                Err(error) => debug!(%error, namespace, "can't find out whether pods of a namespace may be bound"),
            }
        }
        has_changed
    }
}

/// Why a no is in doubt: the API server could not evaluate all rules. For a RoleBinding to a Role that is gone it says so in the reason
/// (`rbac.go` of Kubernetes), for other failures in a field of its own.
fn doubt(answer: &SubjectAccessReviewStatus) -> Option<&str> {
    let reason = answer.reason.as_deref().filter(|reason| reason.contains("RBAC: "));
    answer.evaluation_error.as_deref().or(reason).filter(|_| !answer.allowed)
}

/// What is known after `answer`. A no in doubt leaves things as they were `before`: in the moment in which somebody deletes the ClusterRole
/// and applies it again, no pod is to lose its cores. Nor may it keep all namespaces waiting, because the owner of one can cause it.
fn after(answer: &SubjectAccessReviewStatus, before: Option<Knowledge>) -> Knowledge {
    match () {
        () if answer.allowed => Knowledge::OptedIn,
        () if doubt(answer).is_some() => before.unwrap_or(Knowledge::Doubtful),
        () => Knowledge::OptedOut,
    }
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
    fn an_evaluation_error_gives_no_rights_and_takes_none_away() {
        use Knowledge::{Doubtful, OptedIn, OptedOut};
        let gone = r#"RBAC: clusterrole.rbac.authorization.k8s.io "flux-bridge" not found"#;
        let failed = |reason: &str| (false, reason.to_owned(), None);
        let with_error = |allowed| (allowed, String::new(), Some("webhook failed".to_owned()));
        for ((allowed, reason, evaluation_error), before, expected) in [
            ((true, r#"RBAC: allowed by RoleBinding "flux-bridge/default""#.to_owned(), None), None, OptedIn),
            (failed(""), Some(OptedIn), OptedOut),
            (failed(gone), Some(OptedIn), OptedIn),
            (failed(gone), Some(OptedOut), OptedOut),
            (failed(gone), None, Doubtful),
            (failed(""), Some(Doubtful), OptedOut),
            (with_error(true), Some(OptedOut), OptedIn),
            (with_error(false), Some(OptedIn), OptedIn),
            (with_error(false), None, Doubtful),
        ] {
            let what = format!("{allowed} {reason:?} {evaluation_error:?} after {before:?}");
            let reason = Some(reason);
            let answer = SubjectAccessReviewStatus { allowed, reason, evaluation_error, ..Default::default() };
            assert_eq!(after(&answer, before), expected, "{what}");
        }
    }
}
