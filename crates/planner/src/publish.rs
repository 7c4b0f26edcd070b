//! Writes the roster and `broker.toml`, and deletes the planner's objects of an instance that is gone.

use kube::Client;
use tracing::info;

use api::{
    CONFIGMAP_BROKER, CONFIGMAP_BROKER_KEY, CONFIGMAP_PACKAGES, CONFIGMAP_ROSTER, CONFIGMAP_ROSTER_KEY, MOST_DECLARED,
    Roster, RosterEntry, RosterError,
};
use base::error_chain;
use cluster::{
    ApiError, certificate,
    store::{self, Document},
};
use model::broker_toml;

/// Replaces exactly the roster that was read as `before`, or creates it if that is None. Returns it as it is stored.
///
/// # Errors
/// If the call to the API server fails; with code 409 if another planner wrote the roster first. [`ApiError::UnreadableRoster`]
/// if it could not be read again: many captured nodes can report more cores than all nodes of an instance may have.
pub async fn write_roster(
    client: &Client,
    roster: &Roster,
    before: Option<&Document>,
) -> Result<(Roster, Document), ApiError> {
    let (text, read) = to_text(roster)?;
    info!(revision = roster.revision, epoch = roster.epoch, ranks = roster.ranks.len(), "writing the roster");
    Ok((read, store::write(client, CONFIGMAP_ROSTER, CONFIGMAP_ROSTER_KEY, text, before).await?))
}

/// The roster as it is stored, and as it is read again from that.
fn to_text(roster: &Roster) -> Result<(String, Roster), ApiError> {
    let unreadable = |reason: String| ApiError::UnreadableRoster { reason };
    if roster.declared_ids() > MOST_DECLARED {
        return Err(unreadable(format!("{}{}", RosterError::TooLarge, largest(roster))));
    }
    let text = serde_json::to_string(roster).map_err(|error| unreadable(error.to_string()))?;
    match Roster::parse(&text) {
        Ok(read) => Ok((text, read)),
        Err(error) => Err(unreadable(format!(
            "{}. A number that only grows has reached its end, which the planner can't have written: see docs/threat-model.md, after a \
             break-in",
            error_chain(&error)
        ))),
    }
}

/// What declares the most, as the end of a sentence with the remedy: the spares, or a rank.
fn largest(roster: &Roster) -> String {
    let of_ranks = roster.ranks.values().map(RosterEntry::declared_ids).sum::<u64>();
    if of_ranks <= MOST_DECLARED {
        return ". Most of them are those of spares: set a smaller spec.spares.shape or spec.maxSize".to_owned();
    }
    let largest = roster.ranks.iter().max_by_key(|(_, entry)| entry.declared_ids());
    largest.map_or_else(String::new, |(rank, entry)| {
        let node = entry.member.as_ref().map_or_else(String::new, |member| format!(" (node {})", member.node));
        format!(
            ". Rank {rank}{node} declares the most: {}. Remove nodes whose hardware is not what they report",
            entry.declared_ids()
        )
    })
}

/// Renders `broker.toml` from the roster and writes it if it differs from `before`, which is what is stored. Returns what is stored then.
///
/// # Errors
/// If a call to the API server fails, with code 409 if `before` is not stored any more; [`ApiError::Content`] if the roster can't be rendered.
pub async fn write_broker_toml(
    client: &Client,
    roster: &Roster,
    before: Option<Document>,
) -> Result<Document, ApiError> {
    let text = broker_toml::render(roster).map_err(|error| ApiError::Content {
        object: format!("ConfigMap {CONFIGMAP_BROKER}"),
        reason: error_chain(&error),
    })?;
    // A planner that has just lost its Lease must not overwrite the newer file of its successor.
    let made_from = |document: &Document| broker_toml::made_from(&document.text, &roster.instance_id);
    let is_newer = |document: &Document| made_from(document) > Some((roster.epoch, roster.revision));
    match before {
        Some(before) if before.text == text || is_newer(&before) => Ok(before),
        before => store::write(client, CONFIGMAP_BROKER, CONFIGMAP_BROKER_KEY, text, before.as_ref()).await,
    }
}

/// Deletes the ConfigMaps and the certificate that the planner made for an instance that is gone from every host, so
/// that the next instance gets its own.
///
/// # Errors
/// If a call to the API server fails; with code 409 if one of the objects has changed meanwhile.
pub async fn forget_instance(client: &Client) -> Result<(), ApiError> {
    for map in [CONFIGMAP_ROSTER, CONFIGMAP_BROKER, CONFIGMAP_PACKAGES] {
        store::delete(client, map).await?;
    }
    certificate::forget(client).await
}

#[cfg(test)]
mod tests {
    use model::fixture::roster;

    use super::*;

    #[test]
    fn a_roster_that_could_not_be_read_again_is_not_written_and_names_who_reports_the_most() {
        let names: Vec<String> = (0..260).map(|number| format!("node{number}")).collect();
        let mut nodes: Vec<(&str, u32)> = names.iter().map(|name| (name.as_str(), 65_000)).collect();
        assert!(to_text(&roster(256, &nodes[..256])).is_ok());
        nodes[7].1 = 65_536;
        let error = error_chain(&to_text(&roster(300, &nodes)).unwrap_err());
        assert!(
            error.contains("its ranks, spares among them, declare more than 16777216 ids of cores and GPUs"),
            "{error}"
        );
        let end = Roster { revision: u64::MAX, ..roster(2, &nodes[..2]) };
        let last = error_chain(&to_text(&end).unwrap_err());
        assert!(last.contains("an epoch or revision is 18446744073709551615") && !last.contains("ank "), "{last}");
        assert!(error.contains(". Rank 7 (node node7) declares the most: 65536. Remove nodes"), "{error}");
    }
}
