//! `kubectl flux tree`: the overlay (TBON), as the roster lays it out, with what Flux does with each rank.

use std::collections::BTreeMap;

use crate::{
    arguments::TreeFormat,
    error::KubectlError,
    observed::Cluster,
    overview::{Overview, State, overview},
    screen::print,
};
use api::{Rank, Roster};
use model::drawing::{Drawing, Mark};

/// Prints the tree.
///
/// # Errors
/// There is no roster yet, or the API server or the output fails.
pub(crate) async fn run(cluster: &Cluster, format: TreeFormat) -> Result<(), KubectlError> {
    let (observed, roster) = futures::try_join!(cluster.observe(), cluster.roster())?;
    let none =
        || KubectlError::State("no node has a rank yet: `kubectl flux status` shows what they wait for".to_owned());
    let drawing = drawing(&roster.ok_or_else(none)?, &overview(&observed));
    let text = match format {
        TreeFormat::Text => drawing.text(),
        TreeFormat::Dot => drawing.dot(),
        TreeFormat::Svg => drawing.svg(),
    };
    Ok(print(&text)?)
}

fn drawing(roster: &Roster, overview: &Overview) -> Drawing {
    let states: BTreeMap<Rank, State> =
        overview.nodes.iter().filter_map(|node| Some((node.rank?, node.state))).collect();
    Drawing::of(roster, |rank| mark(states.get(&rank).copied().unwrap_or(State::Unknown)))
}

fn mark(state: State) -> Mark {
    let colour = match state {
        State::Down => "red",
        State::Drained | State::Draining => "orange",
        State::Unknown | State::NoRank => "gray",
        State::Free | State::Allocated => "green",
    };
    Mark { word: state.word().to_owned(), colour }
}
