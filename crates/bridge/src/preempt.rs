//! Makes gangs make way for another one: all of them, or none.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use futures::future::join_all;
use k8s_openapi::api::{core::v1::Pod, policy::v1::PodDisruptionBudget};
use kube::{Api, ResourceExt, api::ListParams, core::Selector};
use tracing::{info, warn};

use base::error_chain;
use cluster::{ApiError, call};
use pods::{
    action::{KubeJobRef, PodRef, Reason, Tell, Victim},
    facts::SuspendReason,
    record::GangId,
};

use crate::{
    begin::{Tools, by_api_server},
    tell,
    under_way::Outcome,
};

/// Longest time to read the PodDisruptionBudgets of a namespace, which may have thousands of them.
const ASKED_FOR: Duration = Duration::from_secs(30);
/// How long a pod that the API server did not let go makes way for none: its PodDisruptionBudget rarely changes soon.
const PROTECTED_FOR: Duration = Duration::from_hours(2);
/// The same if the budgets could not be read within [`ASKED_FOR`].
const ASKED_AGAIN_AFTER: Duration = Duration::from_mins(10);

/// What makes a part of a victim go.
#[derive(Debug, PartialEq)]
enum Step<'a> {
    Suspend(&'a KubeJobRef),
    Evict(&'a PodRef),
}

impl Tools {
    /// Makes `victims` make way for `gang`, if the API server says that all of them may go: half a gang must not go, nor one in vain.
    pub(crate) async fn preempt(&self, gang: &GangId, victims: &[Victim]) -> Outcome {
        if let Err(outcome) = self.make_way(victims).await {
            return outcome;
        }
        // One for each gang; at once, because the answer waits for them.
        let told = victims.iter().filter_map(|victim| {
            info!(victim = %victim.gang, %gang, "a gang makes way for another one");
            let pod = victim.pods.first().cloned()?;
            let message = format!("gang {} makes way for gang {gang}, which has a higher priority", victim.gang);
            Some(Tell { pod, reason: Reason::Preempted, message })
        });
        join_all(told.map(async |told| tell::event(&self.client, &self.identity, &told).await)).await;
        Outcome::Done(None)
    }

    async fn make_way(&self, victims: &[Victim]) -> Result<(), Outcome> {
        self.ask_budgets(victims).await?;
        for dry_run in [true, false] {
            for (victim, step) in steps(victims) {
                let answer = match step {
                    Step::Suspend(job) => self.set_suspended(job, Some(SuspendReason::Preempted), dry_run).await,
                    Step::Evict(pod) => self.evict(pod, dry_run).await,
                };
                answer.map_err(|error| refusal(victim, error))?;
            }
        }
        Ok(())
    }

    /// Whether PodDisruptionBudgets permit that all victims go. A dry run of each eviction would not tell, because each by itself may be
    /// permitted, and nobody asks the budgets if a Job is suspended.
    async fn ask_budgets(&self, victims: &[Victim]) -> Result<(), Outcome> {
        let mut by_namespace: BTreeMap<&str, Vec<&Victim>> = BTreeMap::new();
        for victim in victims {
            by_namespace.entry(&victim.gang.namespace).or_default().push(victim);
        }
        for (namespace, victims) in by_namespace {
            let asked = tokio::time::timeout(ASKED_FOR, self.protected(namespace, &victims)).await;
            let (pods, why, pause) = match asked {
                Ok(Ok(protected)) => match protected {
                    None => continue,
                    Some((pods, budget)) => {
                        (pods, format!("PodDisruptionBudget {budget} protects them"), PROTECTED_FOR)
                    }
                },
                Ok(Err(error)) if !would_fail_again(&error) => {
                    warn!(
                        namespace,
                        error = error_chain(&error),
                        "nothing makes way for others: can't read the budgets"
                    );
                    return Err(Outcome::Failed);
                }
                // Whoever may write in that namespace must not keep all others from getting cores.
                Ok(Err(error)) => (all_pods(&victims), error_chain(&error), PROTECTED_FOR),
                // The API server may only be slow now.
                Err(_) => {
                    (all_pods(&victims), "its PodDisruptionBudgets take too long to read".to_owned(), ASKED_AGAIN_AFTER)
                }
            };
            let minutes = pause.as_secs() / 60;
            info!(namespace, why, minutes, "pods that were to make way stay, and are left alone for a while");
            return Err(Outcome::Protected(pods, pause));
        }
        Ok(())
    }

    /// The pods in `namespace` that must stay though others may go, with the PodDisruptionBudget that says so. None if all `victims` may go.
    async fn protected(
        &self,
        namespace: &str,
        victims: &[&Victim],
    ) -> Result<Option<(BTreeSet<String>, String)>, ApiError> {
        let budgets: Api<PodDisruptionBudget> = Api::namespaced(self.client.clone(), namespace);
        let selected: Api<Pod> = Api::namespaced(self.client.clone(), namespace);
        let found = call("list PodDisruptionBudgets", budgets.list(&ListParams::default())).await?;
        let mut covered = BTreeSet::new();
        for budget in found {
            let Some(selector) = budget.spec.as_ref().and_then(|spec| spec.selector.clone()) else { continue };
            let name = budget.name_any();
            // One that can't be read may protect them.
            let Ok(selector) = Selector::try_from(selector) else { return Ok(Some((all_pods(victims), name))) };
            let parameters = ListParams::default().labels_from(&selector);
            let of_budget = call("list the pods of a PodDisruptionBudget", selected.list_metadata(&parameters)).await?;
            let uids = of_budget.iter().filter_map(ResourceExt::uid).collect();
            if let Some(victim) = beyond(&budget, &uids, victims, &mut covered) {
                // Another pod of a budget that permits nothing would be the next victim, and stay as well.
                let alike = if permitted(&budget) == 0 { uids } else { BTreeSet::new() };
                return Ok(Some((all_pods(&[victim]).into_iter().chain(alike).collect(), name)));
            }
        }
        Ok(None)
    }
}

/// True if the same question would be answered the same way: it is refused, or can't even be sent, as with a selector that is longer than a URL
/// may be.
fn would_fail_again(error: &ApiError) -> bool {
    let ApiError::Api { source, .. } = error else { return false };
    match error.code() {
        Some(code) => (400..500).contains(&code) && !matches!(code, 401 | 408 | 409 | 429),
        None => matches!(source.as_ref(), kube::Error::BuildRequest(_) | kube::Error::HttpError(_)),
    }
}

/// The uids of their pods.
fn all_pods(victims: &[&Victim]) -> BTreeSet<String> {
    victims.iter().flat_map(|victim| &victim.pods).map(|pod| pod.uid.clone()).collect()
}

/// What makes `victims` go, in order. Jobs first: each is one request for a whole gang, while some of a gang's evictions may be refused.
fn steps(victims: &[Victim]) -> Vec<(&Victim, Step<'_>)> {
    let jobs = victims.iter().filter_map(|victim| Some((victim, Step::Suspend(victim.job.as_ref()?))));
    let evicted = victims.iter().filter(|victim| victim.job.is_none());
    let evictions = evicted.flat_map(|victim| victim.pods.iter().map(move |pod| (victim, Step::Evict(pod))));
    jobs.chain(evictions).collect()
}

/// The first victim beyond what `budget` permits, or of which a pod has another budget (`covered`): the API server evicts no pod with two.
/// `uids`: of the pods of the budget.
fn beyond<'a>(
    budget: &PodDisruptionBudget,
    uids: &BTreeSet<String>,
    victims: &[&'a Victim],
    covered: &mut BTreeSet<&'a str>,
) -> Option<&'a Victim> {
    let pods = victims.iter().flat_map(|victim| victim.pods.iter().map(move |pod| (*victim, pod)));
    let mut disrupted = pods.filter(|(_, pod)| uids.contains(&pod.uid)).enumerate();
    let permitted = permitted(budget);
    disrupted.find(|(index, (_, pod))| *index >= permitted || !covered.insert(&pod.uid)).map(|(_, (victim, _))| victim)
}

/// How many disruptions `budget` permits; none if its status is not of its present spec.
fn permitted(budget: &PodDisruptionBudget) -> usize {
    let Some(status) = &budget.status else { return 0 };
    let is_current = status.observed_generation.unwrap_or(0) >= budget.metadata.generation.unwrap_or(0);
    let allowed = status.disruptions_allowed.filter(|_| is_current).unwrap_or(0);
    usize::try_from(allowed).unwrap_or(0)
}

/// What an error says about a request to let `victim` go.
fn refusal(victim: &Victim, error: ApiError) -> Outcome {
    match by_api_server(Err(error)) {
        Outcome::Refused(words) => {
            let minutes = PROTECTED_FOR.as_secs() / 60;
            warn!(victim = %victim.gang, words, minutes, "the API server does not let a gang make way: it is left alone for a while");
            Outcome::Protected(all_pods(&[victim]), PROTECTED_FOR)
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use pods::record::GangKind;
    use serde_json::json;

    use super::*;

    fn victim(name: &str, pods: u32, has_job: bool) -> Victim {
        let namespace = "default".to_owned();
        let gang = GangId { kind: GangKind::Job, namespace: namespace.clone(), name: name.into(), uid: "u".into() };
        let pod = |index: u32| {
            let name = format!("{name}-{index}");
            PodRef { namespace: namespace.clone(), uid: name.clone(), name }
        };
        let pods = (0..pods).map(pod).collect();
        let job = has_job.then(|| KubeJobRef { namespace: namespace.clone(), name: name.into(), uid: "u".into() });
        Victim { gang, pods, job }
    }

    #[test]
    fn jobs_are_suspended_before_pods_are_evicted() {
        let victims = [victim("web", 2, false), victim("train", 2, true)];
        let steps: Vec<_> = steps(&victims).into_iter().map(|(_, step)| step).collect();
        let [web, train] = &victims;
        assert_eq!(
            steps,
            [Step::Suspend(train.job.as_ref().unwrap()), Step::Evict(&web.pods[0]), Step::Evict(&web.pods[1])]
        );
    }

    #[test]
    fn a_budget_protects_the_first_gang_beyond_what_it_permits() {
        let (one, two) = (victim("one", 1, false), victim("two", 2, true));
        let uids = |uids: &[&str]| uids.iter().map(|uid| (*uid).to_owned()).collect::<BTreeSet<_>>();
        for (allowed, observed, of_budget, expected) in [
            (3, 2, uids(&["one-0", "two-0", "two-1", "other"]), None),
            (2, 2, uids(&["one-0", "two-0", "two-1"]), Some("two")),
            (1, 2, uids(&["one-0", "two-0"]), Some("two")),
            (0, 2, uids(&["one-0"]), Some("one")),
            (0, 2, uids(&["other"]), None),
            (3, 1, uids(&["two-1"]), Some("two")),
        ] {
            let budget = serde_json::from_value(json!({
                "metadata": {"generation": 2},
                "status": {"disruptionsAllowed": allowed, "observedGeneration": observed, "currentHealthy": 0,
                    "desiredHealthy": 0, "expectedPods": 0},
            }));
            let found = beyond(&budget.unwrap(), &of_budget, &[&one, &two], &mut BTreeSet::new());
            assert_eq!(found.map(|victim| victim.gang.name.as_str()), expected, "{allowed} {of_budget:?}");
        }
        assert_eq!(permitted(&PodDisruptionBudget::default()), 0, "its status is not known yet");
    }
}
