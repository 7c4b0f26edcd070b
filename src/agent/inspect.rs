//! Looks now and then whether what is installed still is what was installed, and mends it: disks and people damage files, and
//! a library that differs on one node fails the jobs of all.
//!
//! A look takes only what processor and disk have left over. It disturbs no broker, and neither does mending.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use tokio::task::JoinHandle;
use tracing::{debug, info, warn};

use super::{act::unexpected, run::Agent};
use crate::{
    chance::jittered,
    error_chain,
    host::{Answer, HostError, Order, Slice, VerifyOrder},
    packages::{Difference, Verified, What},
};

/// From the agent's beginning, or the installation, to the first look, which reads all: what is urgent is done by then.
const FIRST: Duration = Duration::from_secs(20);
/// Between two looks at one environment.
const EVERY: Duration = Duration::from_secs(3600);
/// Each look after the first hashes one of so many parts: every file is hashed once a day.
const PARTS: u32 = 24;
/// What could not be mended is tried again after so long.
const AGAIN: Duration = Duration::from_secs(600);
/// So many differences are named.
const NAMED: usize = 3;

/// What the agent remembers of its looks; all of it can be lost.
#[derive(Default)]
pub(super) struct Inspecting {
    task: Option<JoinHandle<Result<Verified, HostError>>>,
    /// By digest.
    looks: BTreeMap<String, Looks>,
    /// What is to be told, by digest.
    pub(super) damage: BTreeMap<String, String>,
    /// An environment that has to be mended, and not before when.
    to_mend: Option<(String, Instant)>,
}

/// The looks at one environment.
#[derive(Debug, Clone, Copy)]
struct Looks {
    count: u32,
    next: Instant,
}

/// Which files the look after `count` others hashes; None: all.
fn part(count: u32) -> Option<Slice> {
    count.checked_sub(1).map(|number| Slice { number: number % PARTS, of: PARTS })
}

/// What mending can put back.
fn is_damage(difference: &Difference) -> bool {
    difference.what != What::Extra
}

/// `differences` in a few words.
fn named(differences: &[Difference]) -> String {
    let mut names = differences.iter().take(NAMED).map(ToString::to_string).collect::<Vec<_>>();
    if let Some(more) = differences.len().checked_sub(NAMED).filter(|more| *more > 0) {
        names.push(format!("{more} more"));
    }
    names.join(", ")
}

impl Agent {
    /// To be called when nothing else is to be done. A look goes on beside what comes next.
    pub(super) async fn inspect(&mut self) {
        let here = |digest: &String| self.view.environments.contains(digest);
        let sets = self.published.sets().iter().map(|(digest, _)| digest.clone()).filter(here).collect::<Vec<_>>();
        self.inspecting.looks.retain(|digest, _| sets.contains(digest));
        self.inspecting.damage.retain(|digest, _| sets.contains(digest));
        if self.inspecting.task.as_ref().is_some_and(|task| !task.is_finished()) {
            return;
        }
        if let Some(task) = self.inspecting.task.take() {
            match task.await {
                Ok(Ok(verified)) => self.judge(verified),
                Ok(Err(error)) => warn!(error = error_chain(&error), "the packages could not be looked at"),
                Err(error) => warn!(%error, "the packages could not be looked at"),
            }
        }
        let now = Instant::now();
        match self.inspecting.to_mend.take_if(|(_, when)| *when <= now) {
            Some((digest, _)) if sets.contains(&digest) => self.mend(digest).await,
            _ => self.look_if_due(&sets, now),
        }
    }

    fn look_if_due(&mut self, sets: &[String], now: Instant) {
        let Some(prefix) = self.view.state.as_ref().map(|state| state.prefix.clone()) else { return };
        for digest in sets {
            let first = Looks { count: 0, next: now + FIRST };
            let looks = self.inspecting.looks.entry(digest.clone()).or_insert(first);
            if looks.next > now {
                continue;
            }
            let slice = part(looks.count);
            *looks = Looks { count: looks.count.saturating_add(1), next: now + jittered(EVERY) };
            let order = VerifyOrder { prefix, digest: Some(digest.clone()), slice, idle: true };
            let host = self.actor.host.clone();
            self.inspecting.task = Some(tokio::spawn(async move {
                match host.run(Order::Verify(order), &mut |_| {}).await? {
                    Answer::Verified(mut verified) if verified.len() == 1 => Ok(verified.remove(0)),
                    other => Err(HostError::unexpected(&other)),
                }
            }));
            return;
        }
    }

    fn judge(&mut self, verified: Verified) {
        let Verified { digest, files, differences, .. } = verified;
        let (damage, strangers): (Vec<_>, Vec<_>) = differences.into_iter().partition(is_damage);
        if !strangers.is_empty() {
            // Nobody is harmed by it until somebody uses it, and then it was meant.
            info!(digest, strangers = named(&strangers), "files that no package brought are beside what is installed");
        }
        if damage.is_empty() {
            return debug!(digest, files, "the packages are as they were installed");
        }
        let words = format!("package set {digest} is damaged: {}", named(&damage));
        warn!("{words}");
        self.inspecting.damage.insert(digest.clone(), format!("{words}; it is being mended"));
        self.inspecting.to_mend = Some((digest, Instant::now()));
    }

    async fn mend(&mut self, digest: String) {
        let Some(preflight) = self.preflight.clone() else { return };
        let Ok(set) = self.published.packages(&digest) else { return };
        let mended = self.actor.mend(&preflight, &set, &self.spec.packages).await;
        let words = match mended {
            Ok(Answer::Mended(mended)) => {
                let left: Vec<_> = mended.left.into_iter().filter(is_damage).collect();
                if left.is_empty() {
                    let now = k8s_openapi::jiff::Timestamp::now();
                    let what = named(&mended.mended);
                    info!(digest, what, "the packages are mended");
                    // Whoever looks for why a job failed must find it.
                    let words = format!(
                        "package set {digest} was damaged and mended at {now:.0}: {what}; a process that was running then keeps \
                         what it had open until it ends"
                    );
                    self.inspecting.damage.insert(digest, words);
                    return;
                }
                format!("could not be mended: {}", named(&left))
            }
            Ok(other) => unexpected(&other).to_string(),
            Err(error) => format!("could not be mended: {}", error_chain(&error)),
        };
        let words = format!("package set {digest} is damaged and {words}; it is tried again in {} s", AGAIN.as_secs());
        warn!("{words}");
        self.inspecting.to_mend = Some((digest.clone(), Instant::now() + AGAIN));
        self.inspecting.damage.insert(digest, words);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_look_reads_all_and_a_day_s_looks_read_all_again() {
        assert_eq!(part(0), None);
        let parts = (1..=PARTS).map(|count| part(count).map(|slice| slice.number)).collect::<Vec<_>>();
        assert_eq!(parts, (0..PARTS).map(Some).collect::<Vec<_>>());
        assert_eq!(part(PARTS + 1), part(1));
    }

    #[test]
    fn a_few_differences_are_named_and_the_others_counted() {
        let all = ["a", "b", "c", "d", "e"].map(|name| Difference { path: name.into(), what: What::Changed });
        assert_eq!(named(&all[..1]), "changed a");
        assert_eq!(named(&all[..3]), "changed a, changed b, changed c");
        assert_eq!(named(&all), "changed a, changed b, changed c, 2 more");
    }
}
