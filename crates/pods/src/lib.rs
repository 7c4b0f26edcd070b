//! Pods and gangs of pods as Flux jobs: what `schedulerName: flux` means. Pure: no clock, no I/O, no Kubernetes client.
//!
//! **What it promises.** [`decide::decide`] looks at a [`world::World`] and says what to do. The pods are the truth about what
//! runs, and Flux about what was given; the bridge keeps nothing of its own that it could lose. Hence:
//!
//! - a gang is one job of equal slots ([`jobspec`]); its pods are bound when it has all of them, and none before;
//! - a bound pod's cores are held by a job until the pod has ended, or is gone and can't run any more;
//! - a pod is bound once, after everything was checked that kubelet would refuse it by ([`mod@check`]);
//! - a gang that runs in part is completed, and its other pods stay;
//! - what pods of other schedulers use of a node is held by jobs too ([`shadow`]);
//! - what host jobs use of a node is requested by a pod ([`placeholder`]), so that other schedulers don't give it away;
//! - nothing that happens to a broker or an agent evicts a pod; only a `flux cancel` and a gang that can't be completed do;
//! - annotations are hints. The node of a pod is its spec.nodeName, its cores are its requests, and a job is for the pods that
//!   its own record lists, or for those of its gang that take their place.
//!
//! **What the effect layer provides.** Every field of [`world::World`]. Pods by [`pod::PodView::of`], which is cheap to keep;
//! Nodes by [`target::Target::of`]; jobs by [`jobs::Jobs::apply`] from the journal's events `submit`, `urgency`, `alloc`,
//! `finish`, `exception`, `free` and `clean`, and [`jobs::Jobs::forget`] now and then. It decides after every change, after
//! [`decide::Decision::wake`], and while it holds Lease `flux-bridge`; without the Lease it does nothing.
//!
//! **How results come back.** By the next world, never by memory. An action that was begun is in [`world::World::under_way`]
//! until what it did shows: the job in the journal, the node in the pod, the condition, the Job's spec. It leaves `under_way`
//! as well if it has certainly failed; if the answer was lost, only after the object has been read again, or the journal's
//! backlog. What was not begun before the next decision is dropped. At most eight bindings are under way at a time.
//! [`decide::Memory`] may be lost at any time.
//!
//! **What it must not know:** how to talk to a broker or an API server, and what time it is.

pub mod action;
pub mod allocation;
pub mod check;
pub mod constraint;
pub mod decide;
pub mod facts;
#[cfg(test)]
mod fixture;
pub mod gangs;
#[cfg(test)]
mod gangs_tests;
pub mod jobs;
pub mod jobspec;
pub mod node_rules;
pub mod occupied;
pub mod place;
#[cfg(test)]
mod place_tests;
pub mod placeholder;
pub mod pod;
#[cfg(test)]
mod pod_tests;
pub mod record;
pub mod requests;
pub mod shadow;
pub mod target;
pub mod time;
pub mod unsupported;
pub mod usage;
pub mod world;
