//! Dumps of the instance's queue on the lead's host.

use hostapi::{Answer, DumpOrder, Dumped, Host, HostError, HostView, Order, RosterCopy};

/// Why the queue was not dumped.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DumpError {
    /// No broker runs on this host.
    #[error("no broker runs on this node; `kubectl -n flux-distribute get fxn -o wide` says why")]
    NoBroker,
    /// The queue is on another node.
    #[error("this node has rank {rank}; the queue is on the lead, node {lead}")]
    NotLead {
        /// Rank of this node.
        rank: u32,
        /// Name of the lead's Node; `?` if the host does not know it.
        lead: String,
    },
    /// The host's copy of the roster, which says how the broker runs, can't be read.
    #[error("the host's etc/roster.json can't be read: `flux-distribute start` in this pod writes it again")]
    LocalRoster,
    /// The host stage failed.
    #[error(transparent)]
    Host(#[from] HostError),
}

/// The order that dumps the queue of the broker of `view`. Everything that it needs is on the host: no API server is asked.
///
/// # Errors
/// The lead's broker does not run here, or the host's copy of the roster can't be read.
pub fn order(view: &HostView) -> Result<DumpOrder, DumpError> {
    let (Some(broker), Some(state)) = (&view.broker, &view.state) else { return Err(DumpError::NoBroker) };
    let copy = view.roster.as_ref().and_then(RosterCopy::roster).ok_or(DumpError::LocalRoster)?;
    if broker.record.rank != 0 {
        let lead = copy.lead().map_or("?", |lead| lead.node.as_str()).to_owned();
        return Err(DumpError::NotLead { rank: broker.record.rank, lead });
    }
    Ok(DumpOrder {
        prefix: state.prefix.clone(),
        digest: broker.record.digest.clone(),
        instance_id: broker.record.instance_id.clone(),
        run_as: copy.settings.run_as.clone(),
    })
}

/// Carries out `order`.
///
/// # Errors
/// [`DumpError::Host`].
pub async fn make(host: &dyn Host, order: DumpOrder) -> Result<Dumped, DumpError> {
    match host.run(Order::Dump(order), &mut |_| {}).await? {
        Answer::Dumped(dumped) => Ok(dumped),
        other => Err(HostError::unexpected(&other).into()),
    }
}
