//! `kubectl flux tree`: the overlay (TBON), as the roster lays it out, with what Flux does with each rank.

use std::{collections::BTreeMap, process::ExitCode};

use crate::{
    arguments::TreeFormat,
    error::KubectlError,
    observed::Cluster,
    overview::{Attention, Overview, ResourceState, overview},
    screen::print,
};
use api::{Rank, Roster};
use model::drawing::{Drawing, Mark};

/// Prints the tree.
///
/// # Errors
/// There is no roster yet, or the API server or the output fails.
pub(crate) async fn run(cluster: &Cluster, format: TreeFormat) -> Result<ExitCode, KubectlError> {
    let (observed, roster) = futures::try_join!(cluster.observe(), cluster.roster())?;
    let none = || {
        KubectlError::State("no node has a rank yet: `kubectl flux status` shows what the nodes wait for".to_owned())
    };
    let drawing = drawing(&roster.ok_or_else(none)?, &overview(&observed));
    print(&format.draw(&drawing))?;
    Ok(ExitCode::SUCCESS)
}

fn drawing(roster: &Roster, overview: &Overview) -> Drawing {
    let states: BTreeMap<Rank, _> =
        overview.nodes.iter().filter_map(|node| Some((node.rank?, (node.state, node.attention)))).collect();
    let unknown = (ResourceState::Unknown, Attention::Look);
    Drawing::of(roster, |rank| mark(states.get(&rank).copied().unwrap_or(unknown)))
}

fn mark((state, attention): (ResourceState, Attention)) -> Mark {
    let colour = match attention {
        Attention::Nothing => "green",
        Attention::Look => "orange",
        Attention::Act => "red",
    };
    Mark { word: state.word().to_owned(), colour }
}
