//! On which ranks jobs hold resources, by what the jobs are. Whoever waits for jobs waits by this.

use api::{IdSet, Rank};
use broker::resource_set::ResourceSet;

use crate::{
    jobs::{JobClass, Jobs},
    record::GangKind,
};

/// The ranks on which jobs hold resources, and how many jobs that are, shadow jobs left out.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Occupied {
    /// Those of host jobs: of all jobs that are not known to be the bridge's.
    pub by_host_jobs: IdSet,
    /// Those of gangs, unless one pod by itself is the gang. A rank may be in both.
    pub by_gangs: IdSet,
    /// Those of gangs, single pods among them.
    pub by_pods: IdSet,
    /// Those of shadow jobs that are for several ranks.
    pub by_shared_jobs: IdSet,
    /// Number of jobs that run. Whoever has listed them sets it.
    pub running: u32,
}

impl Occupied {
    /// The ranks that can't be taken out of the instance now. Shadow jobs are no reason to wait, because their pods are there whatever Flux
    /// does; but a `drained` rank must have left the job that it shares with others, which the scheduler would end for all of them.
    pub fn in_use(&self, drained: &IdSet) -> IdSet {
        let leaving = self.by_shared_jobs.0.intersection(&drained.0);
        self.by_host_jobs.0.union(&self.by_pods.0).chain(leaving).copied().collect()
    }
}

/// Tells apart what jobs hold. `allocated`: what the scheduler has given out. `jobs`: those that may be gangs, asked for after that:
/// a gang that still holds its cores then has had them all the time, so no job that began in between is overlooked. A gang that is ending
/// holds them until they are free.
pub fn occupied(allocated: &ResourceSet, jobs: &Jobs) -> Occupied {
    let mut left = allocated.by_rank();
    let mut found = Occupied::default();
    for job in jobs.iter().filter(|job| !job.is_host_job()) {
        for slot in job.held() {
            if let Some(cores) = left.get_mut(&slot.rank).and_then(|kinds| kinds.get_mut("core")) {
                cores.0.retain(|core| !slot.cores.contains(*core));
            }
            let ranks = match &job.class {
                JobClass::Host => continue,
                JobClass::Shadow(shadow) if shadow.nodes.len() == 1 => continue,
                JobClass::Shadow(_) => &mut found.by_shared_jobs,
                JobClass::Gang(_) => &mut found.by_pods,
            };
            ranks.0.insert(slot.rank);
            if job.of_gang().is_some_and(|gang_job| gang_job.record.gang.kind != GangKind::Pod) {
                found.by_gangs.0.insert(slot.rank);
            }
        }
    }
    left.retain(|_, kinds| kinds.values().any(|ids| !ids.is_empty()));
    Occupied { by_host_jobs: left.into_keys().collect(), ..found }
}

/// What one look at the jobs shows.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Look {
    occupied: Occupied,
    /// Those of `occupied.by_host_jobs` without a listed job that could hold what is held there.
    unexplained: IdSet,
}

impl Look {
    /// `known`: the ranks of jobs that are known to be host jobs.
    pub fn of(occupied: Occupied, known: &IdSet) -> Self {
        let unexplained = occupied.by_host_jobs.0.difference(&known.0).copied().collect();
        Self { occupied, unexplained }
    }

    /// True if another look may tell more: a gang that ended after the question what is held looks like a host job, and so does a
    /// host job that has just begun.
    pub fn is_doubtful(&self) -> bool {
        !self.unexplained.is_empty()
    }

    /// This look, corrected by a later one. A rank stays unexplained only if both looks say so. One that only the later look shows was not
    /// held by an unknown job before, so a gang has ended there meanwhile. Or a host job has begun within this very look, and is left out: nothing
    /// ends because of that, as whoever ends a broker keeps jobs from beginning before it looks (it stops the queues, or drains the ranks), and
    /// no pod gets its cores, because those come from Flux.
    pub fn refined_by(self, next: Self) -> Self {
        let unexplained: IdSet = self.unexplained.0.intersection(&next.unexplained.0).copied().collect();
        let mut occupied = next.occupied;
        let is_explained = |rank: &Rank| !next.unexplained.contains(*rank) || unexplained.contains(*rank);
        occupied.by_host_jobs.0.retain(is_explained);
        Self { occupied, unexplained }
    }

    /// What is known so far.
    pub fn occupied(self) -> Occupied {
        self.occupied
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::{
        fixture::{job_events, request},
        shadow::ShadowRequest,
    };

    fn r(entries: &[(&str, &str)]) -> Value {
        let entry = |(rank, cores): &(&str, &str)| json!({"rank": rank, "children": {"core": cores}});
        json!({"version": 1, "execution": {"R_lite": entries.iter().map(entry).collect::<Vec<_>>()}})
    }

    /// What is held if `allocated` is given out, and jobs of `kind` with two one-core slots each have these.
    fn seen(allocated: &[(&str, &str)], kind: GangKind, gangs: &[&[(&str, &str)]], last: &str) -> [String; 2] {
        let mut jobs = Jobs::of(0);
        for (id, slots) in (1..).zip(gangs) {
            let mut request = request(2, 1);
            request.record.gang.kind = kind;
            let events = json!([{"name": "alloc"}, {"name": last}]);
            let mut item = job_events(id, events, Some(request.jobspec()));
            item.r = Some(r(slots));
            jobs.apply(&item);
        }
        let occupied = occupied(&serde_json::from_value(r(allocated)).unwrap(), &jobs);
        [occupied.by_host_jobs.to_string(), occupied.by_gangs.to_string()]
    }

    #[test]
    fn what_no_gang_is_known_to_hold_is_held_by_host_jobs() {
        use GangKind::{Annotated, Pod};
        for (what, allocated, kind, gangs, last, [host, gang]) in [
            ("nothing runs", &[][..], Pod, &[][..], "", ["", ""]),
            ("host jobs alone", &[("0-1", "0-3")], Pod, &[], "", ["0-1", ""]),
            ("pods alone", &[("1", "0-1")], Pod, &[&[("1", "0-1")][..]], "", ["", ""]),
            ("a gang alone", &[("1-2", "0")], Annotated, &[&[("1-2", "0")]], "", ["", "1-2"]),
            ("both on one rank", &[("1", "0-2"), ("2", "0")], Annotated, &[&[("1-2", "0")]], "", ["1", "1-2"]),
            ("a gang that is ending", &[("1-2", "0")], Annotated, &[&[("1-2", "0")]], "finish", ["", "1-2"]),
            ("a gang that has ended since", &[("1-2", "0")], Annotated, &[&[("1-2", "0")]], "free", ["1-2", ""]),
            ("a gang that began since", &[("1", "0")], Annotated, &[&[("2-3", "0")]], "", ["1", "2-3"]),
            ("an R that is not as asked", &[("1", "0-2")], Annotated, &[&[("1", "0-2")]], "", ["1", ""]),
        ] {
            assert_eq!(seen(allocated, kind, gangs, last), [host, gang], "{what}");
        }
    }

    #[test]
    fn a_rank_with_a_shadow_job_alone_is_in_use_only_if_it_is_drained_and_shares_the_job() {
        for (ranks, drained, expected) in [("1", "1", ""), ("1-3", "", ""), ("1-3", "2,7", "2")] {
            let set = |ranks: &str| ranks.parse::<IdSet>().unwrap();
            let nodes = set(ranks).0.into_iter().map(|rank| (rank, format!("n{rank}"))).collect();
            let request = ShadowRequest { nodes, life: String::new(), cores: 1, duration: 60 };
            let mut item = job_events(7, json!([{"name": "alloc"}]), Some(request.jobspec()));
            item.r = Some(r(&[(ranks, "0")]));
            let mut jobs = Jobs::of(0);
            jobs.apply(&item);
            let occupied = occupied(&serde_json::from_value(r(&[(ranks, "0")])).unwrap(), &jobs);
            assert_eq!(occupied.by_host_jobs, IdSet::default());
            assert_eq!(occupied.in_use(&set(drained)).to_string(), expected, "{ranks}, drained {drained}");
        }
    }

    #[test]
    fn what_no_look_explains_is_a_host_jobs() {
        for (what, looks, expected, is_doubtful) in [
            ("a known host job", &[("1", "1")][..], "1", false),
            ("nothing is known of it", &[("1", "")], "1", true),
            ("nothing is ever known of it", &[("1", ""), ("1", ""), ("1", "")], "1", true),
            ("its gang had ended", &[("1", ""), ("", "")], "", false),
            ("its gang had ended, and another one elsewhere", &[("1", ""), ("2", "")], "", false),
            ("a host job that had just begun", &[("1", ""), ("1", "1")], "1", false),
            ("a known host job beside a gang that had ended", &[("1-2", "1"), ("1", "1")], "1", false),
            (
                "a known host job that has ended, and nothing is known of another rank",
                &[("1-2", "1"), ("2", "")],
                "2",
                true,
            ),
        ] {
            let looks = looks.iter().map(|(held, known)| {
                let by_host_jobs = held.parse().unwrap();
                Look::of(Occupied { by_host_jobs, ..Occupied::default() }, &known.parse().unwrap())
            });
            let look = looks.reduce(Look::refined_by).unwrap();
            assert_eq!(look.is_doubtful(), is_doubtful, "{what}");
            assert_eq!(look.occupied().by_host_jobs.to_string(), expected, "{what}");
        }
    }
}
