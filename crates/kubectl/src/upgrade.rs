//! `kubectl flux upgrade`: what a coordinated restart would bring, and its begin.

use std::{process::ExitCode, time::Duration};

use k8s_openapi::jiff::Timestamp;
use serde_json::json;

use crate::{arguments::Waiting, change::change, error::KubectlError, observed::Cluster, screen::print, wait};
use api::{ANNOTATION_RESTART, CONDITION_RESTART_PENDING, FluxInstanceStatus, INSTANCE, NAMESPACE};
use base::words::visible_lines;
use model::conditions::SHUT_DOWN_REASON;

const GOES_ON: &str = "the restart goes on; `kubectl flux status --watch` shows how far it is";

/// Prints what a coordinated restart would bring. With `now`, begins it. With `--wait`, waits until the next epoch is online.
///
/// # Errors
/// There is no instance; nothing waits for a restart, so that one would only cost jobs; or what [`wait::until`] says.
pub(crate) async fn run(cluster: &Cluster, now: bool, waiting: &Waiting) -> Result<ExitCode, KubectlError> {
    let status = cluster.instance().await?.status.unwrap_or_default();
    let why = why_restart(&status);
    if now {
        if why == Why::Nothing {
            return Err(KubectlError::State(format!(
                "nothing waits for a coordinated restart. To restart all brokers nevertheless, and lose the jobs that run: \
                 kubectl -n {NAMESPACE} annotate fxi {INSTANCE} {ANNOTATION_RESTART}=\"$(date)\" --overwrite"
            )));
        }
        let annotations = json!({ANNOTATION_RESTART: Timestamp::now().to_string()});
        change(cluster, "restart", &json!({"metadata": {"annotations": annotations}})).await?;
    }
    let on = if now { format!("{}\n", cluster.name()) } else { String::new() };
    print(&visible_lines(&(text(&why, now) + &on)))?;
    if waiting.wait && why != Why::Nothing {
        let (limit, before) = (Duration::from_secs(waiting.timeout), status.epoch);
        let look = async || {
            let observed = cluster.observe().await?;
            let has_begun = observed.instance.status.as_ref().is_some_and(|status| status.epoch > before);
            Ok(wait::step(&observed, has_begun, None))
        };
        let goes_on = if now { GOES_ON } else { "nothing was changed" };
        wait::unless_interrupted(goes_on, wait::until(limit, look, |text| wait::late(limit, text))).await?;
        print("all members are online in the next epoch\n")?;
    }
    Ok(ExitCode::SUCCESS)
}

/// What a coordinated restart is for.
#[derive(Debug, PartialEq, Eq)]
enum Why<'a> {
    Nothing,
    /// What differs, and what the restart waits for.
    Pending(&'a str),
    /// An administrator has shut the instance down, so no job runs.
    ShutDown,
}

fn why_restart(status: &FluxInstanceStatus) -> Why<'_> {
    if status.holding("Degraded").is_some_and(|condition| condition.reason == SHUT_DOWN_REASON) {
        return Why::ShutDown;
    }
    status.holding(CONDITION_RESTART_PENDING).map_or(Why::Nothing, |condition| Why::Pending(&condition.message))
}

/// What to print: what would begin, or with `now` what has begun.
fn text(why: &Why, now: bool) -> String {
    const WATCH: &str = "`kubectl flux status --watch` shows how far it is";
    match (why, now) {
        (Why::Nothing, _) => "nothing waits for a coordinated restart\n".to_owned(),
        (Why::Pending(why), false) => {
            format!("{why}\n`kubectl flux upgrade --now` restarts at once; the jobs that run are lost then\n")
        }
        (Why::Pending(why), true) => format!("restarting: {why}\n{WATCH}\n"),
        (Why::ShutDown, false) => "an administrator has shut the instance down (flux shutdown)\n\
             `kubectl flux upgrade --now` starts it again, with its queue\n"
            .to_owned(),
        (Why::ShutDown, true) => format!("starting the instance again, with its queue\n{WATCH}\n"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_instance_that_is_shut_down_starts_again_and_loses_no_jobs() {
        let condition = |type_: &str, reason: &str, message: &str| json!({"type": type_, "status": "True", "reason": reason, "message": message, "lastTransitionTime": "2026-01-01T00:00:00Z"});
        let pending = condition("RestartPending", "Waits", "packages change");
        let shut_down = condition("Degraded", SHUT_DOWN_REASON, model::conditions::SHUT_DOWN_MESSAGE);
        let lost = condition("Degraded", "CoresLost", "x");
        for (conditions, why, before, after) in [
            (json!([]), Why::Nothing, "nothing waits", "nothing waits"),
            (json!([lost]), Why::Nothing, "nothing waits", "nothing waits"),
            (json!([pending]), Why::Pending("packages change"), "packages change\n", "restarting: packages change\n"),
            (json!([pending, shut_down]), Why::ShutDown, "an administrator has shut", "starting the instance again"),
        ] {
            let status: FluxInstanceStatus = serde_json::from_value(json!({"conditions": conditions})).unwrap();
            assert_eq!(why_restart(&status), why);
            assert!(text(&why, false).starts_with(before) && text(&why, true).starts_with(after), "{why:?}");
            if why == Why::ShutDown {
                assert!([false, true].iter().all(|now| !text(&why, *now).contains("lost")));
                assert!(!text(&why, true).contains("annotate") && !text(&why, true).contains("--now"));
            }
        }
    }
}
