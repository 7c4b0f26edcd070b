//! `kubectl flux tree`: the overlay (TBON), as the roster lays it out, with what Flux does with each rank.

use std::{collections::BTreeMap, process::ExitCode};

use crate::{
    alike::names,
    arguments::TreeFormat,
    error::KubectlError,
    observed::Cluster,
    overview::{Attention, Overview, ResourceState, overview},
    screen::print,
};
use api::{IdSet, Rank, Roster};
use base::words::visible;
use model::tree;

/// Prints the tree.
///
/// # Errors
/// There is no roster yet, or the API server or the output fails.
pub(crate) async fn run(cluster: &Cluster, format: TreeFormat) -> Result<ExitCode, KubectlError> {
    let (observed, roster) = futures::try_join!(cluster.observe(), cluster.roster())?;
    let none = || {
        KubectlError::State("no node has a rank yet: `kubectl flux status` shows what the nodes wait for".to_owned())
    };
    let branches = Branches::of(&roster.ok_or_else(none)?, &overview(&observed));
    let text = match format {
        TreeFormat::Text => branches.text(),
        TreeFormat::Dot => branches.dot(),
    };
    print(&text)?;
    Ok(ExitCode::SUCCESS)
}

/// The members, and which rank connects to which.
struct Branches {
    members: BTreeMap<Rank, Member>,
    children: BTreeMap<Rank, Vec<Rank>>,
}

struct Member {
    node: String,
    state: ResourceState,
    attention: Attention,
}

impl Branches {
    fn of(roster: &Roster, overview: &Overview) -> Self {
        let states: BTreeMap<Rank, _> =
            overview.nodes.iter().filter_map(|node| Some((node.rank?, (node.state, node.attention)))).collect();
        let entries = roster.ranks.iter().filter_map(|(rank, entry)| Some((*rank, entry.member.as_ref()?)));
        let members: BTreeMap<Rank, Member> = entries
            .map(|(rank, member)| {
                let unknown = (ResourceState::Unknown, Attention::Look);
                let (state, attention) = states.get(&rank).copied().unwrap_or(unknown);
                (rank, Member { node: visible(&member.node), state, attention })
            })
            .collect();
        let mut children: BTreeMap<Rank, Vec<Rank>> = BTreeMap::new();
        for rank in members.keys().copied() {
            if let Some(parent) = tree::parent(roster, rank) {
                children.entry(parent).or_default().push(rank);
            }
        }
        Self { members, children }
    }

    /// One line a rank, below its parent's; neighbours without children that are alike share a line.
    fn text(&self) -> String {
        let mut text = String::new();
        // Ranks still to write, the next one last: a tree may be as deep as it has ranks.
        let mut left = vec![(0, 0)];
        while let Some((rank, depth)) = left.pop() {
            let below = self.children.get(&rank).map(Vec::as_slice).unwrap_or_default();
            let mut ranks = vec![rank];
            if below.is_empty() {
                while let Some((next, _)) = left.last().copied().filter(|next| self.is_like(rank, depth, *next)) {
                    ranks.push(next);
                    left.pop();
                }
            }
            text.push_str(&self.line(&ranks, depth));
            left.extend(below.iter().rev().map(|rank| (*rank, depth + 1)));
        }
        text
    }

    fn is_like(&self, rank: Rank, depth: usize, (next, next_depth): (Rank, usize)) -> bool {
        let state = |rank: Rank| self.members.get(&rank).map(|member| member.state);
        next_depth == depth && !self.children.contains_key(&next) && state(next) == state(rank)
    }

    fn line(&self, ranks: &[Rank], depth: usize) -> String {
        let members = || ranks.iter().filter_map(|rank| self.members.get(rank));
        let names = names(members().map(|member| member.node.as_str()));
        let state = members().next().map_or("no member", |member| member.state.word());
        let ranks: IdSet = ranks.iter().copied().collect();
        format!("{:indent$}{ranks} {names} {state}\n", "", indent = 2 * depth)
    }

    fn dot(&self) -> String {
        let colour = |attention: Attention| match attention {
            Attention::Nothing => "green",
            Attention::Look => "orange",
            Attention::Act => "red",
        };
        let quoted = |text: &str| text.replace('\\', "\\\\").replace('"', "\\\"");
        let nodes = self.members.iter().map(|(rank, Member { node, state, attention })| {
            let (node, state, colour) = (quoted(node), state.word(), colour(*attention));
            format!("  {rank} [label=\"{rank}\\n{node}\\n{state}\", color={colour}];\n")
        });
        let edges = self
            .children
            .iter()
            .flat_map(|(parent, children)| children.iter().map(move |child| format!("  {parent} -> {child};\n")));
        format!("digraph flux {{\n  node [shape=box];\n{}}}\n", nodes.chain(edges).collect::<String>())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn branches(states: &[(Rank, &str, ResourceState)], parents: &[(Rank, Rank)]) -> Branches {
        let members = states.iter().map(|(rank, node, state)| {
            let attention = if *state == ResourceState::Down { Attention::Act } else { Attention::Nothing };
            (*rank, Member { node: (*node).to_owned(), state: *state, attention })
        });
        let mut children: BTreeMap<Rank, Vec<Rank>> = BTreeMap::new();
        for (child, parent) in parents {
            children.entry(*parent).or_default().push(*child);
        }
        Branches { members: members.collect(), children }
    }

    #[test]
    fn leaves_that_are_alike_share_a_line() {
        use ResourceState::{Allocated, Down, Free};
        let tree = branches(
            &[
                (0, "n1", Free),
                (1, "n2", Allocated),
                (2, "n3", Free),
                (3, "n4", Free),
                (4, "n5", Down),
                (5, "n6", Free),
            ],
            &[(1, 0), (2, 0), (3, 1), (4, 1), (5, 1)],
        );
        assert_eq!(
            tree.text(),
            "0 n1 free\n  1 n2 allocated\n    3 n4 free\n    4 n5 down\n    5 n6 free\n  2 n3 free\n"
        );
        let flat =
            branches(&[(0, "n1", Free), (1, "n2", Free), (2, "n3", Free), (3, "n4", Down)], &[(1, 0), (2, 0), (3, 0)]);
        assert_eq!(flat.text(), "0 n1 free\n  1-2 n[2-3] free\n  3 n4 down\n");
    }

    #[test]
    fn a_name_can_add_nothing_to_the_graph() {
        let tree = branches(&[(0, "a\"]; x [label=\"", ResourceState::Down)], &[]);
        assert_eq!(
            tree.dot(),
            "digraph flux {\n  node [shape=box];\n  0 [label=\"0\\na\\\"]; x [label=\\\"\\ndown\", color=red];\n}\n"
        );
    }
}
