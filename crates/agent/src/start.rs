//! The start of a broker: by what the API says right now, or by the files of the last start while it says nothing.

use std::time::{Duration, Instant};

use tokio::{
    net::TcpStream,
    time::{sleep, timeout},
};
use tracing::warn;

use super::{
    act::{Actor, Content, StepError},
    copied::host_roster,
    decide::{Assignment, Step, confirmed, held_by},
    published::read_roster,
    run::{Agent, SOON},
};
use api::{Rank, Roster};
use base::chance::chance;
use cluster::ApiError;
use hostapi::Preflight;
use model::roster::parent;

/// A connection to another node is made within milliseconds, or a second if its first packet is lost.
const PARENT_ANSWERS_IN: Duration = Duration::from_secs(2);
/// A broker that has died is not kept waiting for longer, where there is something to start it by.
const WORD_IN: Duration = Duration::from_secs(4);
/// The supervisor of a broker looks after nothing else meanwhile.
const PARENT_PATIENCE: Duration = Duration::from_secs(60);

/// A broker that may be started.
struct Startable {
    assignment: Assignment,
    roster: Roster,
    /// What its files were made from.
    revision: u64,
}

impl Agent {
    pub(super) async fn start(
        &mut self,
        step: &Step,
        preflight: &Preflight,
        decided: &Assignment,
    ) -> Result<(), StepError> {
        let Startable { assignment, roster, revision } = self.make_ready(preflight, decided).await?;
        Actor::can_listen(&roster, &assignment)?;
        self.starts.started(step, self.generation, Instant::now(), chance());
        self.view = self.actor.start(preflight, &roster, &assignment).await?;
        if assignment.rank == 0 {
            self.actor.remember(preflight, &roster, &self.view, revision, false).await?;
        }
        Ok(())
    }

    /// Everything that a broker reads at its start, by what the API says right now. Without its word the files of the last
    /// start are still there.
    async fn make_ready(&mut self, preflight: &Preflight, decided: &Assignment) -> Result<Startable, StepError> {
        // What was heard since they were written is not in them.
        let is_same = |held: Assignment| (held.rank, held.epoch) == (decided.rank, decided.epoch);
        let known = self.published.roster.as_ref();
        let is_of_attempt = |copy: &Roster| known.is_none_or(|known| known.instance_id == copy.instance_id);
        let copy = host_roster(&self.view).filter(|copy| self.view.died.is_some() && is_of_attempt(copy));
        let Some(copy) = copy.filter(|copy| held_by(copy, self.reporter.name()).is_some_and(is_same)) else {
            return self.configure_by_api(preflight, decided, Duration::MAX).await;
        };
        // Asked before the API server, so that its silence later is no word on the network.
        let mut parent_answers = answers(&copy, decided.rank).await;
        loop {
            let word = self.configure_by_api(preflight, decided, WORD_IN).await;
            match next(is_silence(&word), parent_answers, self.memory.stood_still()) {
                Next::Follow => return word,
                Next::WaitForParent => {
                    self.wait_for_parent(&copy, decided.rank).await?;
                    parent_answers = true;
                }
                Next::WaitForApi => {
                    let words =
                        "this agent stood still, and its rank may be another node's by now: waiting for the API server";
                    return Err(StepError::NotYet(words.to_owned()));
                }
                Next::ByCopy => {
                    warn!("no word from the API server: starting the broker with the files that are there");
                    return Ok(Startable { assignment: decided.clone(), revision: copy.revision, roster: copy });
                }
            }
        }
    }

    /// As long as the API server says nothing.
    async fn wait_for_parent(&self, roster: &Roster, rank: Rank) -> Result<(), StepError> {
        warn!(
            "no word from the API server, nor from the parent's broker: this node may be cut off, and its rank another's soon"
        );
        let mut world = self.world.clone();
        world.mark_unchanged();
        let answer = async {
            while !answers(roster, rank).await {
                sleep(SOON).await;
            }
        };
        let is_there = tokio::select! {
            answered = timeout(PARENT_PATIENCE, answer) => answered.is_ok(),
            _ = world.changed() => false,
        };
        let words = || "waiting for the parent's broker, or for the API server's word".to_owned();
        is_there.then_some(()).ok_or_else(|| StepError::NotYet(words()))
    }

    /// The API server has to say its word within `limit`, if its own is longer.
    async fn configure_by_api(
        &mut self,
        preflight: &Preflight,
        decided: &Assignment,
        limit: Duration,
    ) -> Result<Startable, StepError> {
        let late = |_| ApiError::Timeout("get FluxNode, roster and what the broker reads".to_owned());
        let (assignment, roster, content) =
            timeout(limit, self.content_by_api(preflight, decided)).await.map_err(late)??;
        let revision = content.revision;
        self.actor.write(preflight, &assignment, &content, false).await?;
        Ok(Startable { assignment, roster, revision })
    }

    async fn content_by_api(
        &mut self,
        preflight: &Preflight,
        decided: &Assignment,
    ) -> Result<(Assignment, Roster, Content), StepError> {
        let (node, roster) = futures::try_join!(self.reporter.of(self.reporter.name()), read_roster(&self.client))?;
        // One that was deleted contradicts nobody.
        self.published.roster = roster.or_else(|| self.published.roster.take());
        let roster = self.published.roster()?;
        // A new agent may not have heard of the FluxInstance yet.
        let claimed_by = self.view.state.as_ref().map_or(&self.actor.instance_uid, |state| &state.instance_uid);
        let now = node.and_then(|node| confirmed(decided, claimed_by, &node.spec, &roster));
        let assignment = now.ok_or_else(|| {
            StepError::NotYet(match roster.closing {
                Some(_) => "this epoch ends: waiting for the next one".to_owned(),
                None => format!("waiting for the planner: rank {} is not this node's as it was", decided.rank),
            })
        })?;
        let content = self.actor.content(preflight, &roster, &assignment).await?;
        Ok((assignment, roster, content))
    }
}

/// What is to be done for a broker whose files of the last start are there.
#[derive(Debug, PartialEq, Eq)]
enum Next {
    /// What the API server says, be it a word or a refusal.
    Follow,
    /// Cut off, this host would come back as a rank that another one may have by then; and no broker gets in without its
    /// parent anyway.
    WaitForParent,
    /// An agent that stood still has missed what was said.
    WaitForApi,
    /// The broker begins by the files that are there.
    ByCopy,
}

fn next(api_is_silent: bool, parent_answers: bool, stood_still: bool) -> Next {
    match (api_is_silent, parent_answers, stood_still) {
        (false, _, _) => Next::Follow,
        (true, false, _) => Next::WaitForParent,
        (true, true, true) => Next::WaitForApi,
        (true, true, false) => Next::ByCopy,
    }
}

/// A roster of a newer version is a word, though not for us; one that was spoilt says nothing.
fn is_silence(word: &Result<Startable, StepError>) -> bool {
    matches!(word, Err(StepError::Api(error)) if !matches!(error, ApiError::NewerRoster(_)))
}

/// The broker of `rank`'s parent can be reached. The lead has none that could be missing.
async fn answers(roster: &Roster, rank: Rank) -> bool {
    let Some(parent) = parent(roster, rank) else { return true };
    let Some(member) = roster.member(parent) else { return false };
    let connecting = TcpStream::connect((member.address, roster.settings.port));
    timeout(PARENT_ANSWERS_IN, connecting).await.is_ok_and(|connected| connected.is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use api::RosterError;

    #[test]
    fn a_broker_begins_by_its_files_only_where_the_api_is_silent_and_its_parent_is_not() {
        for (api_is_silent, parent_answers, stood_still, expected) in [
            (false, true, false, Next::Follow),
            (false, false, true, Next::Follow),
            (true, false, false, Next::WaitForParent),
            (true, false, true, Next::WaitForParent),
            (true, true, true, Next::WaitForApi),
            (true, true, false, Next::ByCopy),
        ] {
            let found = next(api_is_silent, parent_answers, stood_still);
            assert_eq!(found, expected, "{api_is_silent} {parent_answers} {stood_still}");
        }
    }

    #[test]
    fn a_roster_of_a_newer_version_is_no_silence() {
        let late = ApiError::Timeout("get roster".to_owned());
        let spoilt = ApiError::Content { object: "ConfigMap flux-roster".to_owned(), reason: String::new() };
        let newer = ApiError::NewerRoster(RosterError::Newer(2));
        for (error, silence) in [
            (StepError::Api(late), true),
            (StepError::Api(spoilt), true),
            (StepError::Api(newer), false),
            (StepError::NotYet("waiting for the planner".to_owned()), false),
        ] {
            assert_eq!(is_silence(&Err(error)), silence);
        }
    }
}
