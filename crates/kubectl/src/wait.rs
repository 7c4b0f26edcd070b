//! Waits for what a person has begun, and shows how far it is.

use std::{
    io::{self, IsTerminal},
    time::{Duration, Instant},
};

use indicatif::{ProgressBar, ProgressStyle};
use kube::ResourceExt;
use tokio::signal::unix::{SignalKind, signal};

use crate::{
    alike::lines,
    error::KubectlError,
    observed::Observed,
    screen::{complain, obeys_escapes},
};
use api::{FluxNode, InstancePhase, NodePhase, Want};
use base::words::{many, visible};

/// How often to look.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// indicatif's template: a bar, and below it what is still missing.
const BAR: &str = "[{bar:20}] {pos} of {len}, {elapsed}\n{msg}";

/// How far it is.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// It is over.
    Done,
    /// It goes on.
    Waits {
        /// How many nodes are as they are to be, and how many there are in all; None: not known now.
        counted: Option<(usize, usize)>,
        /// What is still missing, and on which nodes, in lines.
        text: String,
    },
    /// It does not go on by itself, and this is why.
    Stuck(String),
}

/// Waits until `look` finds that it is over. Shows each change of what is waited for: as a bar if stderr is a terminal, else as lines.
///
/// # Errors
/// It is stuck; it is not over after `limit`, and `late` has the words for that; or the API server refuses, or has not answered by then.
pub(crate) async fn until(
    limit: Duration,
    mut look: impl AsyncFnMut() -> Result<Step, KubectlError>,
    late: impl FnOnce(&str) -> String,
) -> Result<(), KubectlError> {
    let (begin, mut shown) = (Instant::now(), Shown::on_stderr());
    loop {
        let (counted, text) = match look().await {
            Ok(Step::Done) => return Ok(()),
            Ok(Step::Stuck(why)) => return Err(KubectlError::State(why)),
            Ok(Step::Waits { text, .. }) if begin.elapsed() > limit => return Err(KubectlError::State(late(&text))),
            Ok(Step::Waits { counted, text }) => (counted, text),
            Err(error) if begin.elapsed() > limit || error.is_denied() || error.is_not_found() => return Err(error),
            // An API server that is away may be there again.
            Err(error) => (None, error.text()),
        };
        shown.now(counted, &text);
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

/// Does this work, until SIGINT or SIGTERM or to its end. A signal before it ends the process as any other.
///
/// # Errors
/// What the work says, or that it was interrupted, with `goes_on`.
pub(crate) async fn unless_interrupted<T>(
    goes_on: &'static str,
    work: impl Future<Output = Result<T, KubectlError>>,
) -> Result<T, KubectlError> {
    let ends = async |kind: SignalKind| {
        let mut ends = signal(kind).ok()?;
        ends.recv().await?;
        Some(KubectlError::Interrupted { signal: kind.as_raw_value(), goes_on })
    };
    tokio::select! {
        // The signals are waited for before the work begins anything.
        biased;
        Some(interrupted) = ends(SignalKind::interrupt()) => Err(interrupted),
        Some(interrupted) = ends(SignalKind::terminate()) => Err(interrupted),
        done = work => done,
    }
}

/// What a person sees while waiting.
enum Shown {
    Bar(ProgressBar),
    Lines { last: String },
}

impl Shown {
    fn on_stderr() -> Self {
        match ProgressStyle::with_template(BAR) {
            Ok(style) if obeys_escapes() && io::stderr().is_terminal() => {
                Self::Bar(ProgressBar::new(0).with_style(style.progress_chars("##.")))
            }
            _ => Self::Lines { last: String::new() },
        }
    }

    fn now(&mut self, counted: Option<(usize, usize)>, text: &str) {
        match self {
            Self::Bar(bar) => {
                if let Some((done, all)) = counted {
                    bar.set_length(all as u64);
                    bar.set_position(done as u64);
                }
                bar.set_message(text.trim_end().to_owned());
                bar.tick();
            }
            Self::Lines { last } => {
                let counted = counted.map_or(String::new(), |(done, all)| format!("{done} of {all}: "));
                let line = format!("{counted}{text}\n");
                if line != *last {
                    complain(&line);
                    *last = line;
                }
            }
        }
    }
}

impl Drop for Shown {
    fn drop(&mut self) {
        // What is said next stands where the bar was.
        if let Self::Bar(bar) = self {
            bar.finish_and_clear();
        }
    }
}

/// Whether all members are online; with `most`, also whether there are at most so many, and all that are to join have. `has_begun`: the planner
/// has taken up what was asked for, so the status is about that. Pure.
pub(crate) fn step(observed: &Observed, has_begun: bool, most: Option<u32>) -> Step {
    let status = observed.instance.status.clone().unwrap_or_default();
    let message = status.message.unwrap_or_default();
    if has_begun && status.phase == InstancePhase::Failed {
        return Step::Stuck(format!("{message}: see `kubectl flux doctor`"));
    }
    // A node that is to join has no rank before its packages are installed. If there is no room for it, the planner gives a reason.
    let joins = |node: &FluxNode| {
        most.is_some() && node.spec.rank.is_none() && node.spec.want == Want::Install && node.spec.reason.is_none()
    };
    let is_size = most.is_none_or(|most| status.size <= most) && !observed.nodes.iter().any(joins);
    if has_begun && is_size && status.phase == InstancePhase::Running && status.online >= status.size {
        return Step::Done;
    }
    let absent = observed.nodes.iter().filter(|node| {
        let phase = node.status.as_ref().map(|status| &status.phase);
        (joins(node) || node.spec.rank.is_some()) && phase != Some(&NodePhase::Online)
    });
    let text = visible(&message) + &lines(absent, |node| (node.name_any(), node.status.as_ref()));
    Step::Waits { counted: Some((status.online as usize, status.size as usize)), text }
}

/// What to say of a limit of so many seconds that is over.
pub(crate) fn late(limit: Duration, text: &str) -> String {
    format!(
        "not over after {}, and it goes on: `kubectl flux status --watch` shows how far it is\n{text}",
        many(limit.as_secs(), "second")
    )
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::fixture::{change, observed};

    #[test]
    fn it_is_over_once_all_members_are_online_and_the_planner_has_begun() {
        let restarting = json!({"phase": "Restarting", "online": 1, "message": "1 of 3 nodes online"});
        let failed = json!({"phase": "Failed", "message": "no lead"});
        let waits = |done, text: &str| Step::Waits { counted: Some((done, 3)), text: text.to_owned() };
        for (what, status, has_begun, most, expected) in [
            ("before", json!({}), false, None, waits(3, "all 3 nodes are online")),
            ("after", json!({}), true, None, Step::Done),
            ("a node still leaves", json!({}), true, Some(2), waits(3, "all 3 nodes are online")),
            ("room for more", json!({}), true, Some(5), Step::Done),
            ("on the way", restarting, true, None, waits(1, "1 of 3 nodes online")),
            ("a failure before", failed.clone(), false, None, waits(3, "no lead")),
            ("a failure", failed, true, None, Step::Stuck("no lead: see `kubectl flux doctor`".to_owned())),
        ] {
            assert_eq!(step(&observed(3, &status, &Value::Null), has_begun, most), expected, "{what}");
        }
    }

    #[test]
    fn those_that_are_waited_for_are_named_with_their_words() {
        let mut seen = observed(4, &json!({"online": 1, "phase": "Starting", "message": "1 of 4"}), &Value::Null);
        for rank in [1, 3] {
            change(&mut seen, rank, &json!({}), &json!({"phase": "Installing", "message": "fetching\u{1b} 3 of 9"}));
        }
        change(&mut seen, 2, &json!({"rank": null}), &json!({"phase": "Waiting"}));
        let text = "1 of 4\n  n[2,4]: Installing fetching? 3 of 9".to_owned();
        assert_eq!(step(&seen, true, None), Step::Waits { counted: Some((1, 4)), text });
    }

    #[test]
    fn a_larger_size_is_reached_once_the_nodes_that_install_have_joined() {
        let mut seen = observed(3, &json!({"size": 2, "online": 2}), &Value::Null);
        let fetches = json!({"phase": "Installing", "message": "fetching"});
        change(&mut seen, 2, &json!({"rank": null, "want": "Install"}), &fetches);
        let text = "all 3 nodes are online\n  n3: Installing fetching".to_owned();
        assert_eq!(step(&seen, true, Some(3)), Step::Waits { counted: Some((2, 2)), text });
        change(&mut seen, 2, &json!({"reason": "spec.size is 2"}), &json!({}));
        assert_eq!(step(&seen, true, Some(3)), Step::Done);
    }
}
