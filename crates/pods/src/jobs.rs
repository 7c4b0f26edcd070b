//! The jobs of the instance, as its journal shows them.

use std::collections::BTreeMap;

use api::Rank;
use broker::{
    job_id::JobId,
    journal::{Event, JobEvents},
};
use serde_json::Value;

use crate::{
    allocation::{AllocationError, Slot, one_slot_a_rank, slots},
    jobspec::Shape,
    record::JobRecord,
    shadow::Shadow,
    time::{Millis, Moment, SECOND},
};

/// How long a job that has ended is remembered: as long as it may matter how it ended.
pub const REMEMBERED: Millis = 60 * SECOND;
/// Beginning of the note of a cancel that is the bridge's own, and of the reason why it has stopped a queue. An agent stops
/// queues for other reasons, and those stay stopped.
pub const OUR_NOTE: &str = "flux-distribute for pods: ";

/// What a job is, to all who count jobs. Epochs, uninstall and leaving members wait for host jobs only.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum JobClass {
    /// Processes on hosts, that somebody has submitted.
    Host,
    /// It holds cores for a gang of pods.
    Gang(Box<GangJob>),
    /// It holds what pods of other schedulers use of one node or more.
    Shadow(Shadow),
}

/// How many cores of a rank jobs of each class hold.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct HeldCores {
    /// Host jobs.
    pub hosts: u32,
    /// Jobs of gangs.
    pub gangs: u32,
    /// Shadow jobs.
    pub shadows: u32,
}

/// A job that holds cores for a gang.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GangJob {
    /// For which pods it is.
    pub record: JobRecord,
    /// What it asked for.
    pub shape: Shape,
}

/// Says what the job with this jobspec is. `is_own`: the owner of the instance has submitted it. Anybody else's job is a host job,
/// whatever it says of itself.
pub fn classify(jobspec: &Value, is_own: bool) -> JobClass {
    if !is_own {
        return JobClass::Host;
    }
    if let Some(shadow) = Shadow::read(jobspec) {
        return JobClass::Shadow(shadow);
    }
    match JobRecord::read(jobspec).zip(Shape::read(jobspec)) {
        Some((record, shape)) => JobClass::Gang(Box::new(GangJob { record, shape })),
        None => JobClass::Host,
    }
}

/// How far a job is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum JobState {
    /// It has no resources.
    Pending,
    /// It holds these slots; or resources that it did not ask for.
    Allocated(Result<Vec<Slot>, AllocationError>),
    /// It is ending, and may still hold resources.
    Ending,
    /// It has ended, and holds nothing.
    Ended,
}

/// Why a job ends before the bridge ends it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Cause {
    /// Somebody cancelled it.
    Canceled,
    /// No resources of the instance could satisfy it. With Flux's words.
    Denied(String),
    /// The bridge cancelled it.
    Ours,
    /// Anything else. With Flux's words.
    Other(String),
}

/// A job.
#[derive(Debug, Clone, PartialEq)]
pub struct Job {
    /// Its id.
    pub id: JobId,
    /// What it is.
    pub class: JobClass,
    /// When it was submitted.
    pub submitted: Moment,
    /// RFC 30.
    pub urgency: u8,
    /// How far it is.
    pub state: JobState,
    /// It waits, and Flux has stored an R for it: the lead's broker died between that and event `alloc`. As soon as the scheduler gives it
    /// resources, Flux (0.88) says `already allocated`, and does without a scheduler from then on.
    pub is_spoiled: bool,
    /// It may still wait for another job or a moment to begin (RFC 26): the scheduler does not know it yet.
    depends: bool,
    /// Why it ends, and since when, unless the bridge has finished it.
    pub ended_by: Option<(Cause, Moment)>,
    /// When it ended.
    ended: Option<Moment>,
    /// See [`Job::held`].
    held: Vec<Slot>,
}

/// All active jobs, and those that ended a short while ago.
#[derive(Debug, Clone, PartialEq)]
pub struct Jobs {
    /// User id of the instance's owner.
    owner: u32,
    by_id: BTreeMap<JobId, Job>,
}

impl Jobs {
    /// No jobs, of an instance with this owner.
    pub fn of(owner: u32) -> Self {
        Self { owner, by_id: BTreeMap::new() }
    }

    /// Takes an item of the journal: all events of a job in the backlog, one at a time afterwards. Events of a job whose
    /// jobspec was never sent are of no use, and are left out.
    pub fn apply(&mut self, events: &JobEvents) {
        if let Some(jobspec) = &events.jobspec {
            let is_own = events.submitted_by() == Some(self.owner);
            self.by_id.entry(events.id).or_insert_with(|| Job {
                id: events.id,
                class: classify(jobspec, is_own),
                submitted: 0,
                urgency: 0,
                state: JobState::Pending,
                is_spoiled: false,
                depends: true,
                ended_by: None,
                ended: None,
                held: Vec::new(),
            });
        }
        let Some(job) = self.by_id.get_mut(&events.id) else { return };
        for event in &events.events {
            job.apply(event, events);
        }
        let is_half_given = events.r.is_some() && !events.has("alloc");
        job.is_spoiled = job.state == JobState::Pending && (job.is_spoiled || is_half_given);
    }

    /// Forgets the jobs that ended [`REMEMBERED`] ago, except those that list one of the pods for which `is_there` is true:
    /// a cancelled gang is evicted however long that takes.
    pub fn forget(&mut self, now: Moment, is_there: impl Fn(&str) -> bool) {
        self.by_id.retain(|_, job| {
            let listed = || job.of_gang().is_some_and(|job| job.record.members.iter().any(|pod| is_there(&pod.uid)));
            let cancelled = matches!(job.ended_by, Some((Cause::Canceled, _)));
            job.ended.is_none_or(|ended| now < ended.saturating_add(REMEMBERED) || (cancelled && listed()))
        });
    }

    /// Forgets all others than these.
    pub fn keep(&mut self, is_meant: impl Fn(JobId) -> bool) {
        self.by_id.retain(|id, _| is_meant(*id));
    }

    /// All of them, by id: in the order in which they were submitted.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = &Job> {
        self.by_id.values()
    }

    /// The job with this id.
    pub fn get(&self, id: JobId) -> Option<&Job> {
        self.by_id.get(&id)
    }

    /// The shadow jobs.
    pub fn shadows(&self) -> impl Iterator<Item = (&Job, &Shadow)> {
        self.iter().filter_map(|job| match &job.class {
            JobClass::Shadow(shadow) => Some((job, shadow)),
            JobClass::Host | JobClass::Gang(_) => None,
        })
    }

    /// The jobs of gangs.
    pub fn of_gangs(&self) -> impl DoubleEndedIterator<Item = (&Job, &GangJob)> {
        self.iter().filter_map(|job| Some((job, job.of_gang()?)))
    }

    /// How many cores of each rank they hold. A rank without any is left out.
    pub fn held_cores(&self) -> BTreeMap<Rank, HeldCores> {
        let mut held: BTreeMap<Rank, HeldCores> = BTreeMap::new();
        for job in self.iter() {
            for slot in job.held() {
                let of_rank = held.entry(slot.rank).or_default();
                let cores = match job.class {
                    JobClass::Host => &mut of_rank.hosts,
                    JobClass::Gang(_) => &mut of_rank.gangs,
                    JobClass::Shadow(_) => &mut of_rank.shadows,
                };
                *cores = cores.saturating_add(u32::try_from(slot.cores.len()).unwrap_or(u32::MAX));
            }
        }
        held
    }
}

impl Job {
    /// For which gang it is; None if it is for none.
    pub fn of_gang(&self) -> Option<&GangJob> {
        match &self.class {
            JobClass::Gang(gang_job) => Some(gang_job),
            JobClass::Host | JobClass::Shadow(_) => None,
        }
    }

    /// True unless the bridge has submitted it.
    pub fn is_host_job(&self) -> bool {
        self.class == JobClass::Host
    }

    /// It has not ended, and is not about to.
    pub fn is_active(&self) -> bool {
        matches!(self.state, JobState::Pending | JobState::Allocated(_))
    }

    /// It waits for resources: nobody holds it (urgency 0), and it depends on nothing else.
    pub fn is_waiting(&self) -> bool {
        self.state == JobState::Pending && self.urgency > 0 && !self.depends
    }

    /// Its slots, if it holds what it asked for.
    pub fn slots(&self) -> Option<&[Slot]> {
        match &self.state {
            JobState::Allocated(Ok(slots)) => Some(slots),
            _ => None,
        }
    }

    /// The slots that it holds, or may hold while it is ending. A job that is for no gang has one on each of its ranks.
    pub fn held(&self) -> &[Slot] {
        &self.held
    }

    fn apply(&mut self, event: &Event, events: &JobEvents) {
        let at = millis(event.timestamp);
        match event.name.as_str() {
            "submit" => {
                self.submitted = at;
                self.set_urgency(&event.context);
            }
            "urgency" => self.set_urgency(&event.context),
            // All that it depended on has come.
            "depend" => self.depends = false,
            "alloc" => {
                let slots = self.read_r(events);
                if let Err(error) = &slots {
                    self.ended_by = Some((Cause::Other(error.to_string()), at));
                }
                self.held = slots.clone().unwrap_or_default();
                self.state = JobState::Allocated(slots);
            }
            "finish" if self.state != JobState::Ended => self.state = JobState::Ending,
            "exception" => {
                let Some(exception) = event.exception().filter(|exception| exception.severity == 0) else { return };
                let cause = match exception.kind.as_str() {
                    "cancel" if exception.note.starts_with(OUR_NOTE) => Cause::Ours,
                    "cancel" => Cause::Canceled,
                    "alloc" => Cause::Denied(exception.note),
                    kind => Cause::Other(format!("{kind}: {}", exception.note)),
                };
                self.ended_by.get_or_insert((cause, at));
                if self.state != JobState::Ended {
                    self.state = JobState::Ending;
                }
            }
            // `free` says that its resources are free, `clean` that nothing more comes.
            "free" | "clean" => {
                self.state = JobState::Ended;
                self.ended = Some(at);
                self.held.clear();
            }
            _ => {}
        }
    }

    fn set_urgency(&mut self, context: &Value) {
        self.urgency =
            context["urgency"].as_u64().and_then(|urgency| u8::try_from(urgency).ok()).unwrap_or(self.urgency);
    }

    fn read_r(&self, events: &JobEvents) -> Result<Vec<Slot>, AllocationError> {
        let r = events.resources().map_err(|error| AllocationError::Unreadable(base::error_chain(&error)))?;
        let r = r.unwrap_or_default();
        match self.of_gang() {
            Some(GangJob { shape, .. }) => slots(&r, shape.slots, shape.cores),
            None => Ok(one_slot_a_rank(&r)),
        }
    }
}

fn millis(seconds: f64) -> Moment {
    #[allow(clippy::cast_possible_truncation, reason = "a float that is too large becomes the largest integer")]
    let millis = (seconds * 1000.0) as Moment;
    millis
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::fixture::{job_events, request};

    fn job(events: Value) -> Job {
        let mut item = job_events(7, events, Some(request(2, 1).jobspec()));
        item.r = Some(json!({"version": 1, "execution": {"R_lite": [{"rank": "0-1", "children": {"core": "0"}}]}}));
        let mut jobs = Jobs::of(0);
        jobs.apply(&item);
        jobs.get(JobId(7)).unwrap().clone()
    }

    #[test]
    fn only_a_job_of_the_owner_with_our_record_and_form_is_a_gang() {
        let ours = request(2, 1).jobspec();
        assert!(matches!(classify(&ours, true), JobClass::Gang(job) if job.shape.slots == 2));
        assert_eq!(classify(&ours, false), JobClass::Host, "any user can write such a record");
        let mut other_form = ours.clone();
        other_form["resources"] = json!([{"type": "node", "count": 1}]);
        let mut no_record = ours;
        no_record["attributes"]["user"]["k8s"] = json!({"uid": "u-1"});
        for jobspec in [json!({}), json!("x"), other_form, no_record] {
            assert_eq!(classify(&jobspec, true), JobClass::Host, "{jobspec}");
        }
    }

    #[test]
    fn the_state_follows_the_events() {
        let exception = |kind: &str, note: &str, severity: u32| {
            json!({"name": "exception", "type": kind, "note": note,
            "severity": severity})
        };
        let unsatisfiable = "alloc denied due to type=\"unsatisfiable\"";
        use JobState::{Ended, Ending, Pending};
        for (events, state, cause) in [
            (json!([{"name": "submit"}, {"name": "depend"}, {"name": "priority"}]), Pending, None),
            (json!([{"name": "alloc"}, {"name": "finish"}]), Ending, None),
            (json!([{"name": "alloc"}, {"name": "finish"}, {"name": "release"}, {"name": "free"}]), Ended, None),
            (json!([{"name": "alloc"}, {"name": "free"}, {"name": "clean"}]), Ended, None),
            (json!([exception("cancel", "", 0)]), Ending, Some(Cause::Canceled)),
            (
                json!([exception("cancel", &format!("{OUR_NOTE}restart"), 0), {"name": "clean"}]),
                Ended,
                Some(Cause::Ours),
            ),
            (json!([exception("alloc", unsatisfiable, 0)]), Ending, Some(Cause::Denied(unsatisfiable.into()))),
            (json!([exception("exec", "lost", 0)]), Ending, Some(Cause::Other("exec: lost".into()))),
            (json!([exception("warning", "late", 1)]), Pending, None),
            (json!([exception("cancel", "", 0), exception("alloc", "x", 0)]), Ending, Some(Cause::Canceled)),
        ] {
            let job = job(events.clone());
            assert_eq!((&job.state, job.ended_by.map(|(cause, _)| cause)), (&state, cause), "{events}");
        }
    }

    #[test]
    fn an_allocated_job_has_slots_or_says_what_is_wrong_with_its_r() {
        for (entries, is_right) in
            [(json!([{"rank": "0-1", "children": {"core": "0"}}]), true), (json!([]), false), (json!(3), false)]
        {
            let mut events = job_events(7, json!([{"name": "alloc"}]), Some(request(2, 1).jobspec()));
            events.r = Some(json!({"version": 1, "execution": {"R_lite": entries}}));
            let mut jobs = Jobs::of(0);
            jobs.apply(&events);
            let job = jobs.get(JobId(7)).unwrap();
            assert_eq!(job.slots().map(<[_]>::len), is_right.then_some(2), "{entries}");
            assert!(job.is_active());
        }
    }

    #[test]
    fn a_job_of_another_user_is_a_host_job_whatever_it_says_of_itself() {
        let mut jobs = Jobs::of(7);
        for (id, userid) in [(1, json!(7)), (2, json!(8)), (3, json!(null))] {
            let submit = json!([{"name": "submit", "userid": userid}]);
            jobs.apply(&job_events(id, submit, Some(request(1, 1).jobspec())));
        }
        assert_eq!(jobs.of_gangs().map(|(job, _)| job.id).collect::<Vec<_>>(), [JobId(1)]);
    }

    #[test]
    fn urgency_and_times_are_those_of_the_events() {
        let job = job(json!([{"name": "submit", "urgency": 16, "timestamp": 1.5}, {"name": "urgency", "urgency": 20}]));
        assert_eq!((job.submitted, job.urgency), (1500, 20));
    }

    #[test]
    fn a_job_waits_for_resources_once_it_depends_on_nothing_and_is_not_held() {
        let submit = json!({"name": "submit", "urgency": 16});
        let depend = json!({"name": "depend"});
        for (events, expected) in [
            (json!([submit]), false),
            (json!([submit, depend]), true),
            (json!([submit, depend, {"name": "urgency", "urgency": 0}]), false),
            (json!([submit, depend, {"name": "alloc"}]), false),
        ] {
            assert_eq!(job(events.clone()).is_waiting(), expected, "{events}");
        }
    }

    #[test]
    fn a_job_that_ended_is_forgotten_unless_its_cancelled_gang_is_still_there() {
        let finished = json!([{"name": "free", "timestamp": 1.0}]);
        let cancelled =
            json!([{"name": "exception", "type": "cancel", "severity": 0}, {"name": "clean", "timestamp": 1.0}]);
        for (events, now, is_there, expected) in [
            (finished.clone(), 1000 + REMEMBERED - 1, false, true),
            (finished, 1000 + REMEMBERED, true, false),
            (cancelled.clone(), 1000 + REMEMBERED, true, true),
            (cancelled, 1000 + REMEMBERED, false, false),
            (json!([]), Moment::MAX, false, true),
        ] {
            let mut jobs = Jobs::of(0);
            jobs.apply(&job_events(7, events.clone(), Some(request(1, 1).jobspec())));
            jobs.forget(now, |_| is_there);
            assert_eq!(jobs.get(JobId(7)).is_some(), expected, "{events}");
        }
    }

    #[test]
    fn events_of_an_unknown_job_are_left_out() {
        let mut jobs = Jobs::of(0);
        jobs.apply(&job_events(7, json!([{"name": "alloc"}]), None));
        assert_eq!(jobs, Jobs::of(0));
    }
}
