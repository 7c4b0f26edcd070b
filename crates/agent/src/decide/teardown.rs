//! What SIGTERM means. It is not an uninstall: a pod ends for many reasons, and only positive evidence removes anything.

use std::time::Duration;

/// What is known of one object at SIGTERM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Evidence {
    /// It exists and is not being deleted.
    Stays,
    /// It is being deleted, or the API server says that it does not exist.
    Ends,
    /// Nothing: 401, 403, 429, 5xx, a time-out, or a 404 that is not the API server's own.
    None,
}

/// What to do at SIGTERM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// An ordinary restart: end at once, everything keeps running.
    Leave,
    /// Remove everything from the host.
    Clean,
    /// Wait this long for evidence on the open watches, then leave.
    WaitFor(Duration),
}

/// A FluxInstance that is deleted together with its DaemonSet follows within moments.
const AFTER_DAEMONSET: Duration = Duration::from_secs(5);
/// Rights go before objects in some orders of deletion; open watches still deliver then.
const UNCLEAR: Duration = Duration::from_secs(20);

/// Decides.
pub fn at_sigterm(namespace: Evidence, instance: Evidence, daemonset: Evidence) -> Verdict {
    match (namespace, instance, daemonset) {
        (Evidence::Ends, _, _) | (_, Evidence::Ends, _) => Verdict::Clean,
        (Evidence::Stays, Evidence::Stays, Evidence::Stays) => Verdict::Leave,
        (Evidence::Stays, Evidence::Stays, Evidence::Ends) => Verdict::WaitFor(AFTER_DAEMONSET),
        _ => Verdict::WaitFor(UNCLEAR),
    }
}

#[cfg(test)]
mod tests {
    use super::{Evidence::*, Verdict::*, *};

    #[test]
    fn only_positive_evidence_cleans() {
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
            assert_eq!(
                at_sigterm(namespace, instance, daemonset),
                expected,
                "{namespace:?} {instance:?} {daemonset:?}"
            );
        }
    }
}
