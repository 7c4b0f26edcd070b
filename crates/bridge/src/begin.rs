//! Carries out one action.

use std::{sync::Arc, time::Duration};

use k8s_openapi::{
    api::{
        batch::v1::Job,
        core::v1::{Binding as KubeBinding, ObjectReference, Pod},
        policy::v1::Eviction,
    },
    apimachinery::pkg::apis::meta::v1::{DeleteOptions, Preconditions},
};
use kube::{
    Api, Client,
    api::{ObjectMeta, Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};
use tracing::{info, warn};

use base::error_chain;
use broker::{
    job_id::JobId,
    jobs::{SubmitError, cancel, finish, submit},
    queues,
    rfc3::{self, RpcError},
    status::instance,
};
use cluster::{ApiError, call, gone_is_fine, patch_params};
use pods::{
    action::{Action, Binding, KubeJobRef, PodRef, ShadowStep},
    facts::{ANNOTATION_SUSPENDED, SuspendReason},
    jobs::OUR_NOTE,
    jobspec::USED_CORES_URGENCY,
    record::ANNOTATION_JOB,
};

use crate::{available, flux::start_queues, placeholders, tell, under_way::Outcome};

/// How long to wait after the broker did not say which ranks it gives jobs.
const ASK_AGAIN_AFTER: Duration = Duration::from_secs(1);

/// What actions are carried out with.
#[derive(Clone)]
pub(crate) struct Tools {
    pub(crate) client: Client,
    pub(crate) broker: Arc<rfc3::Client>,
    /// Name of the agent's pod.
    pub(crate) identity: Arc<str>,
    pub(crate) image: Arc<placeholders::ImageCache>,
}

impl Tools {
    /// Carries out `action`, and says how that was answered.
    pub(crate) async fn carry_out(&self, action: Action) -> Outcome {
        match &action {
            Action::Submit(request) => self.submit(&request.jobspec(), request.urgency).await,
            Action::Resubmit { job, request } => {
                let canceled = cancel(&self.broker, *job, &format!("{OUR_NOTE}asked for again on other nodes")).await;
                match canceled {
                    Ok(_) => self.submit(&request.jobspec(), request.urgency).await,
                    Err(error) => by_broker("cancel a job", Err(error)),
                }
            }
            Action::Cancel { job, note, .. } => self.cancel(*job, note).await,
            Action::Finish { job, status, .. } => by_broker("end a job", finish(&self.broker, *job, *status).await),
            Action::Bind(binding) => by_api_server(self.bind(binding).await),
            Action::Tell(tell) => {
                tell::event(&self.client, &self.identity, tell).await;
                match tell.reason.is_condition() {
                    true => by_api_server(tell::condition(&self.client, tell).await),
                    false => Outcome::Done(None),
                }
            }
            Action::Evict { pods, .. } => self.evict_all(pods).await,
            Action::Preempt { gang, victims } => self.preempt(gang, victims).await,
            Action::SuspendJob { job, reason, .. } => {
                by_api_server(self.set_suspended(job, Some(*reason), false).await)
            }
            Action::ResumeJob(job) => by_api_server(self.set_suspended(job, None, false).await),
            Action::Shadow(step) => self.shadow(step).await,
            Action::Placeholder(step) => placeholders::carry_out(&self.client, &self.image, step).await,
            Action::StopQueues(reason) => by_queues(queues::stop(&self.broker, reason).await),
            Action::StartQueues => by_queues(start_queues(&self.broker).await),
        }
    }

    async fn submit(&self, jobspec: &Value, urgency: u8) -> Outcome {
        let name = jobspec.pointer("/attributes/system/job/name").and_then(Value::as_str);
        match submit(&self.broker, jobspec, urgency, true).await {
            Ok(job) => Outcome::Done(Some(job)),
            Err(error @ SubmitError::Refused { .. }) => {
                warn!(name, error = error_chain(&error), "Flux refuses a job for pods");
                Outcome::Refused(error_chain(&error))
            }
            Err(error) => {
                info!(name, error = error_chain(&error), "no answer about a job for pods");
                Outcome::Lost
            }
        }
    }

    async fn cancel(&self, job: JobId, note: &str) -> Outcome {
        by_broker("cancel a job", cancel(&self.broker, job, note).await)
    }

    async fn shadow(&self, step: &ShadowStep) -> Outcome {
        if step.needs_all_ranks() {
            // What the agent tells of ranks is some seconds old.
            match instance(&self.broker).await.map(|now| step.unavailable(&available(Some(&now)))) {
                Ok(none) if none.is_empty() => {}
                Ok(unavailable) => return Outcome::Apart(unavailable),
                // Nothing was changed yet.
                Err(error) => {
                    info!(error = error_chain(&error), "can't get the ranks that Flux gives jobs");
                    return Outcome::Busy(ASK_AGAIN_AFTER);
                }
            }
        }
        let mut outcome = Outcome::Done(None);
        for request in &step.submit {
            // If a later request is refused, the jobs that were submitted show, and a later decision cancels them.
            outcome = self.submit(&request.jobspec(), USED_CORES_URGENCY).await;
            if !matches!(outcome, Outcome::Done(_)) {
                return outcome;
            }
        }
        for job in &step.cancel {
            match self.cancel(*job, &format!("{OUR_NOTE}{}", step.why)).await {
                Outcome::Lost => return Outcome::Lost,
                canceled if step.submit.is_empty() => outcome = canceled,
                // An old job that is left beside a new one shows, and a later decision cancels it.
                _ => {}
            }
        }
        outcome
    }

    async fn bind(&self, binding: &Binding) -> Result<(), ApiError> {
        let PodRef { namespace, name, uid } = &binding.pod;
        let metadata = ObjectMeta {
            name: Some(name.clone()),
            namespace: Some(namespace.clone()),
            uid: Some(uid.clone()),
            annotations: Some([(ANNOTATION_JOB.to_owned(), binding.record.text())].into()),
            ..ObjectMeta::default()
        };
        let target = ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("Node".to_owned()),
            name: Some(binding.node.clone()),
            ..ObjectReference::default()
        };
        let what = format!("bind pod {namespace}/{name}");
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), namespace);
        let (parameters, kube_binding) = (PostParams::default(), KubeBinding { metadata, target });
        let bound = pods.create_subresource::<KubeBinding, Value>("binding", name, &parameters, &kube_binding);
        // Without `gone_is_fine`: a pod that is gone was not bound.
        call(what, bound).await.map(drop)
    }

    async fn evict_all(&self, pods: &[PodRef]) -> Outcome {
        let mut outcome = Outcome::Done(None);
        for pod in pods {
            outcome = match by_api_server(self.evict(pod, false).await) {
                Outcome::Done(_) => outcome,
                other => other,
            };
        }
        outcome
    }

    /// Evicts the pod, unless that is only a dry run.
    ///
    /// # Errors
    /// The API server's; a pod that is gone is no error.
    pub(crate) async fn evict(&self, pod: &PodRef, dry_run: bool) -> Result<(), ApiError> {
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), &pod.namespace);
        let preconditions = Some(Preconditions { uid: Some(pod.uid.clone()), resource_version: None });
        // kube's own `evict` sends the options under a name that no API server knows, so the precondition would be lost.
        let eviction = Eviction {
            metadata: ObjectMeta { name: Some(pod.name.clone()), ..ObjectMeta::default() },
            delete_options: Some(DeleteOptions { preconditions, ..DeleteOptions::default() }),
        };
        // The API server copies it into the delete options.
        let parameters = PostParams { dry_run, ..PostParams::default() };
        let evicted = pods.create_subresource::<Eviction, Value>("eviction", &pod.name, &parameters, &eviction);
        gone_is_fine(call(format!("evict pod {}/{}", pod.namespace, pod.name), evicted).await)
    }

    /// Suspends the Job for this reason, unless that is only a dry run; None resumes it.
    ///
    /// # Errors
    /// The API server's; a Job that is gone is no error.
    pub(crate) async fn set_suspended(
        &self,
        job: &KubeJobRef,
        reason: Option<SuspendReason>,
        dry_run: bool,
    ) -> Result<(), ApiError> {
        let jobs: Api<Job> = Api::namespaced(self.client.clone(), &job.namespace);
        let annotations = json!({ ANNOTATION_SUSPENDED: reason.map(SuspendReason::word) });
        // The API server answers 409 if the object has another uid.
        let metadata = json!({ "uid": job.uid, "annotations": annotations });
        let patch = json!({ "metadata": metadata, "spec": { "suspend": reason.is_some() } });
        let what = format!("suspend or resume Job {}/{}", job.namespace, job.name);
        let parameters = PatchParams { dry_run, ..patch_params() };
        gone_is_fine(call(what, jobs.patch(&job.name, &parameters, &Patch::Merge(patch))).await)
    }
}

fn by_broker(what: &str, answer: Result<bool, RpcError>) -> Outcome {
    match answer {
        Ok(_) => Outcome::Done(None),
        Err(error) => {
            info!(error = error_chain(&error), "can't {what}");
            if matches!(error, RpcError::Service { .. }) { Outcome::Failed } else { Outcome::Lost }
        }
    }
}

fn by_queues<T>(answer: Result<T, queues::QueueError>) -> Outcome {
    match answer {
        Ok(_) => Outcome::Done(None),
        Err(error) => {
            info!(error = error_chain(&error), "can't stop or start the queues");
            Outcome::Failed
        }
    }
}

pub(crate) fn by_api_server(answer: Result<(), ApiError>) -> Outcome {
    match answer {
        Ok(()) => Outcome::Done(None),
        Err(error) => {
            info!(error = error_chain(&error), "the API server has not done what the bridge asked for");
            Outcome::from(&error)
        }
    }
}
