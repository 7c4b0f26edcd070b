//! Counts the agents, each of them a candidate for the planner's Lease: if they are few, all watch it.

use std::time::Duration;

use k8s_openapi::api::apps::v1::DaemonSet;
use kube::{Api, Client};
use tokio::{sync::watch, time::sleep};
use tracing::debug;

use api::NAMESPACE;
use base::{chance::jittered, error_chain};
use cluster::{call, lease_rules::Place};

/// Between two counts. A watch would deliver each pod that becomes ready, to every node.
const EVERY: Duration = Duration::from_mins(10);
/// The same while the API server does not tell, or the DaemonSet's controller has not yet.
const AGAIN: Duration = Duration::from_secs(30);

/// Keeps [`Place::agents`] at the number of pods that DaemonSet `name`, ours, is to have.
pub async fn count(client: Client, name: String, place: watch::Sender<Place>) {
    let sets = Api::<DaemonSet>::namespaced(client, NAMESPACE);
    loop {
        let pause = match call(format!("get DaemonSet {name}"), sets.get(&name)).await {
            Ok(set) => {
                let wanted = set.status.map_or(0, |status| status.desired_number_scheduled);
                let agents = u32::try_from(wanted).unwrap_or(0);
                place.send_if_modified(|known| std::mem::replace(&mut known.agents, agents) != agents);
                if agents == 0 { AGAIN } else { EVERY }
            }
            Err(error) => {
                debug!(error = error_chain(&error), "the agents can't be counted");
                AGAIN
            }
        };
        sleep(jittered(pause)).await;
    }
}

#[cfg(test)]
mod tests {
    use http::{Request, Response};
    use kube::client::Body;
    use serde_json::json;
    use tokio::sync::mpsc::unbounded_channel;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn agents_are_counted_a_few_times_an_hour_and_soon_again_while_nobody_tells() {
        let (sender, mut asked) = unbounded_channel();
        let began = tokio::time::Instant::now();
        let mut answers = vec![(200, 9), (200, 9), (200, 0), (500, 0)];
        let service = tower::service_fn(move |_: Request<Body>| {
            sender.send(began.elapsed()).unwrap();
            let (code, agents) = answers.pop().unwrap();
            let counts = json!({"currentNumberScheduled": agents, "desiredNumberScheduled": agents, "numberMisscheduled": 0, "numberReady": 0});
            let set = json!({"metadata": {"name": "install-flux"}, "status": counts}).to_string();
            async move { Response::builder().status(code).body(Body::from(set.into_bytes())) }
        });
        let place = watch::Sender::<Place>::default();
        let counting = tokio::spawn(count(Client::new(service, NAMESPACE), "install-flux".to_owned(), place.clone()));
        let mut times = Vec::new();
        for _ in 0..4 {
            times.push(asked.recv().await.unwrap());
        }
        assert!(times[1] < 2 * AGAIN && times[2] < 4 * AGAIN && times[3] >= EVERY, "{times:?}");
        assert_eq!(place.borrow().agents, 9);
        counting.abort();
    }
}
