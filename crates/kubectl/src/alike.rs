//! Things that are alike share a line.

use crate::screen::word;
use api::FluxNodeStatus;
use base::words::visible;
use model::hostlist::shortened;

/// Groups of those that have the same key, with their key, in the order in which the first of each comes.
pub(crate) fn alike<T, K: PartialEq>(items: impl IntoIterator<Item = T>, key: impl Fn(&T) -> K) -> Vec<(K, Vec<T>)> {
    let mut groups: Vec<(K, Vec<T>)> = Vec::new();
    for item in items {
        let own = key(&item);
        match groups.iter_mut().find(|(known, _)| *known == own) {
            Some((_, group)) => group.push(item),
            None => groups.push((own, vec![item])),
        }
    }
    groups
}

/// A line for the nodes that are in one phase and say the same, each after a line's end. `about` gives a node's name and its status.
pub(crate) fn lines<T>(
    nodes: impl IntoIterator<Item = T>,
    about: impl Fn(&T) -> (String, Option<&FluxNodeStatus>),
) -> String {
    let words = |node: &T| {
        let (_, status) = about(node);
        let message = status.and_then(|status| status.message.as_deref()).unwrap_or_default();
        let phase = status.map_or(String::new(), |status| word(&status.phase));
        visible(format!("{phase} {message}").trim())
    };
    let line = |(words, nodes): (String, Vec<T>)| {
        let names: Vec<_> = nodes.iter().map(|node| about(node).0).collect();
        format!("\n  {}: {words}", visible(&shortened(names.iter().map(String::as_str))))
    };
    alike(nodes, words).into_iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_stand_in_the_order_of_their_first() {
        let groups = alike([3, 2, 5, 4, 1], |number| number % 2);
        assert_eq!(groups, [(1, vec![3, 5, 1]), (0, vec![2, 4])]);
    }
}
