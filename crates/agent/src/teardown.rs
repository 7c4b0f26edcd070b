//! What SIGTERM means. It is not uninstall: a pod ends for many reasons, and only a positive word removes anything.

use std::time::Duration;

use k8s_openapi::api::{apps::v1::DaemonSet, core::v1::Namespace};
use kube::{Api, Client, Resource};
use tokio::{sync::watch, time::timeout};
use tracing::debug;

use super::watch::{Presence, World, look};
use api::{FluxInstance, INSTANCE, NAMESPACE};

/// One question to the API server at SIGTERM: at a teardown the right to ask is soon gone.
pub const LAST_QUESTION: Duration = Duration::from_secs(1);

/// What is known of one object at SIGTERM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Word {
    /// It is there and stays.
    Stays,
    /// It is being deleted, or gone by the API server's positive word.
    Ends,
    /// No word: 401, 403, 429, 5xx, time-out, somebody else's 404.
    None,
}

/// What to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// An ordinary restart: leave at once, everything keeps running.
    Leave,
    /// Take everything off the host.
    Clean,
    /// Wait so long for evidence on the open watches, then leave.
    WaitFor(Duration),
}

/// A FluxInstance that is deleted together with its DaemonSet follows within moments.
const AFTER_DAEMONSET: Duration = Duration::from_secs(5);
/// Rights go before objects in some orders of deletion; watches that are open still tell.
const UNCLEAR: Duration = Duration::from_secs(20);

/// Decides.
pub fn decide(namespace: Word, instance: Word, daemonset: Word) -> Verdict {
    match (namespace, instance, daemonset) {
        (Word::Ends, _, _) | (_, Word::Ends, _) => Verdict::Clean,
        (Word::Stays, Word::Stays, Word::Stays) => Verdict::Leave,
        (Word::Stays, Word::Stays, Word::Ends) => Verdict::WaitFor(AFTER_DAEMONSET),
        _ => Verdict::WaitFor(UNCLEAR),
    }
}

/// True if there is a positive word that the instance is over. `daemonset`: the name of the one that this agent belongs to.
pub async fn evidence(client: &Client, daemonset: &str, mut world: watch::Receiver<World>) -> bool {
    let instances = Api::<FluxInstance>::namespaced(client.clone(), NAMESPACE);
    let daemonsets = Api::<DaemonSet>::namespaced(client.clone(), NAMESPACE);
    let namespaces = Api::<Namespace>::all(client.clone());
    let (instance, daemonset, namespace) = tokio::join!(
        timeout(LAST_QUESTION, look(&instances, INSTANCE)),
        timeout(LAST_QUESTION, look(&daemonsets, daemonset)),
        timeout(LAST_QUESTION, look(&namespaces, NAMESPACE)),
    );
    let seen = world.borrow().clone();
    let verdict = decide(
        word(namespace.ok(), &seen.namespace),
        word(instance.ok(), &seen.instance),
        word(daemonset.ok(), &seen.daemonset),
    );
    debug!(?verdict, "what SIGTERM means");
    match verdict {
        Verdict::Leave => false,
        Verdict::Clean => true,
        Verdict::WaitFor(patience) => {
            timeout(patience, world.wait_for(World::is_over)).await.is_ok_and(|found| found.is_ok())
        }
    }
}

/// The last answer, or else what an open watch has told.
fn word<K: Resource>(asked: Option<Presence<K>>, watched: &Presence<K>) -> Word {
    if watched.is_ending() {
        return Word::Ends;
    }
    match asked.unwrap_or_default() {
        Presence::Unknown => Word::None,
        presence if presence.is_ending() => Word::Ends,
        _ => Word::Stays,
    }
}

#[cfg(test)]
mod tests {
    use super::{Verdict::*, Word::*, *};

    #[test]
    fn only_a_positive_word_cleans() {
        for (namespace, instance, daemonset, expected) in [
            (Stays, Stays, Stays, Leave),
            (Stays, Stays, Ends, WaitFor(AFTER_DAEMONSET)),
            (Stays, Ends, Stays, Clean),
            (Stays, Ends, Ends, Clean),
            (Ends, Stays, Stays, Clean),
            (Ends, None, None, Clean),
            (None, Ends, None, Clean),
            (None, None, None, WaitFor(UNCLEAR)),
            (Stays, None, Ends, WaitFor(UNCLEAR)),
            (None, Stays, Stays, WaitFor(UNCLEAR)),
        ] {
            assert_eq!(decide(namespace, instance, daemonset), expected, "{namespace:?} {instance:?} {daemonset:?}");
        }
    }
}
