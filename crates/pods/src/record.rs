//! What a pod and a job say about each other.
//!
//! The pod's record is a hint and no more: anybody who may write the pod can change it. The job's record is our own: only
//! the owner of the instance can submit such a job.

use std::fmt;

use api::{IdSet, Rank};
use broker::job_id::JobId;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

use crate::time::Moment;

/// Annotation on a bound pod: its [`PodRecord`] as JSON. It is written with the binding.
pub const ANNOTATION_JOB: &str = "distribute.flux-framework.org/job";

/// Longest name of a gang that a pod or its controller makes up, and longest uid, in bytes: that of a label's value.
pub const LONGEST_NAME: usize = 63;

/// True if `text` has the length and the characters of a label's value. Names and uids that users choose go into jobs, and onto the
/// terminals of all who list them.
pub(crate) fn is_label_like(text: &str) -> bool {
    let is_fine = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    (1..=LONGEST_NAME).contains(&text.len()) && text.bytes().all(is_fine)
}

/// Longest text of a [`PodRecord`], in bytes: many times that of all cores of a big node. The admission policy for bindings has the
/// same limit.
pub const LONGEST_RECORD: usize = 4096;

/// What a bound pod says about its cores.
#[derive(Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct PodRecord {
    /// The job that held them when the pod was bound; F58 (RFC 19) in JSON.
    #[serde(deserialize_with = "read_id")]
    pub id: JobId,
    /// Their rank.
    pub rank: Rank,
    /// Which cores.
    pub cores: IdSet,
}

impl PodRecord {
    /// Reads the annotation; None if it is none of ours.
    pub fn read(annotation: &str) -> Option<Self> {
        (annotation.len() <= LONGEST_RECORD).then(|| serde_json::from_str(annotation).ok())?
    }

    /// The annotation's text.
    pub fn text(&self) -> String {
        serde_json::json!({ "id": self.id.to_string(), "rank": self.rank, "cores": self.cores.to_string() }).to_string()
    }
}

fn read_id<'de, D: Deserializer<'de>>(deserializer: D) -> Result<JobId, D::Error> {
    String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
}

/// What makes pods a gang.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum GangKind {
    /// Our annotations.
    Annotated,
    /// A PodGroup of group scheduling.k8s.io, which a field of the pod names.
    PodGroup,
    /// A PodGroup of group scheduling.x-k8s.io (coscheduling), which a label of the pod names.
    Coscheduling,
    /// Fluence's labels.
    Fluence,
    /// A JobSet whose Jobs run all their pods at once.
    JobSet,
    /// A group of a LeaderWorkerSet.
    LeaderWorkerSet,
    /// An Indexed Job with completions = parallelism.
    Job,
    /// Nothing: one pod by itself.
    Pod,
}

/// Names a gang. Two gangs in different namespaces never have one id.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GangId {
    /// What makes it a gang.
    pub kind: GangKind,
    /// Namespace of its pods.
    pub namespace: String,
    /// Name of the Job, the JobSet, the PodGroup, the pod, or the value of annotation or label.
    pub name: String,
    /// uid of the Job, the JobSet or the pod, so that one that is made again under its name is another gang. Empty for other kinds.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub uid: String,
}

impl fmt::Display for GangId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// A pod that a job was submitted for.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct MemberPod {
    /// The pod's name.
    pub name: String,
    /// The pod's uid.
    pub uid: String,
    /// Its place in its gang, if its controller gives it one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub index: Option<u32>,
}

/// What a job of a gang says about its pods: attribute `user.k8s` of its jobspec.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct JobRecord {
    /// The gang.
    pub gang: GangId,
    /// The pods, in the order in which they get its slots. A gang's later pods get slots of pods that have ended.
    pub members: Vec<MemberPod>,
    /// Hardware threads of each core of the nodes where the job may run.
    pub threads: u32,
    /// When the gang came into the queue, in milliseconds since the Unix epoch. A later job of the gang keeps it, unless a pod of the
    /// gang was created after that. 0 if an older version wrote the record.
    #[serde(default)]
    pub queued: Moment,
    /// The job is pinned to this rank, because its pods are there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pinned: Option<Rank>,
}

impl JobRecord {
    /// The record in a jobspec; None for a job that is not ours.
    pub fn read(jobspec: &Value) -> Option<Self> {
        let record = jobspec.pointer("/attributes/user/k8s")?;
        Self::deserialize(record).ok().filter(|record| !record.members.is_empty())
    }

    /// True if it lists the pod with this uid.
    pub fn lists(&self, uid: &str) -> bool {
        self.members.iter().any(|member| member.uid == uid)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_pods_record_is_read_as_it_was_written() {
        let record = PodRecord { id: JobId(34_057_748_480), rank: 3, cores: "0-1".parse().unwrap() };
        let text = record.text();
        assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), json!({"id": "fttZs51", "rank": 3, "cores": "0-1"}));
        assert_eq!(PodRecord::read(&text), Some(record));
    }

    #[test]
    fn a_forged_record_that_makes_no_sense_is_none() {
        for text in [
            "",
            "{}",
            "f1",
            r#"{"id": 1, "rank": 3, "cores": "0"}"#,
            r#"{"id":"f1","rank":-1,"cores":"0"}"#,
            r#"{"id":"f1","rank":0,"cores":"0-99999999999"}"#,
            &format!(r#"{{"id":"f1","rank":0,"cores":"{}"}}"#, "0,".repeat(3000) + "0"),
        ] {
            assert_eq!(PodRecord::read(text), None, "{text}");
        }
    }

    #[test]
    fn a_job_without_a_record_or_with_another_one_is_not_ours() {
        for jobspec in [
            json!({}),
            json!({"attributes": {"user": {}}}),
            json!({"attributes": {"user": {"k8s": {"uid": "u"}}}}),
            json!({"attributes": {"user": {"k8s": {"gang": {"kind": "Pod", "namespace": "a", "name": "b"}, "members": [],
                "threads": 1}}}}),
        ] {
            assert_eq!(JobRecord::read(&jobspec), None, "{jobspec}");
        }
    }
}
