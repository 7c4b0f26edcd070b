//! What the planner writes onto Nodes: annotations and labels of its own.

use std::collections::BTreeMap;

use crate::eligibility::NodeView;

/// A change of one Node's metadata.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NodeChange {
    /// The Node's name.
    pub node: String,
    /// Its uid.
    pub uid: String,
    /// The new value of each annotation; None removes it.
    pub annotations: BTreeMap<String, Option<String>>,
    /// The new value of each label; None removes it.
    pub labels: BTreeMap<String, Option<String>>,
}

impl NodeChange {
    /// One of `node` that changes nothing yet.
    pub fn of(node: &NodeView) -> Self {
        Self { node: node.name.clone(), uid: node.uid.clone(), ..Self::default() }
    }
}

/// Joins the changes of each Node: a second write would name a version that the first one has ended.
pub fn joined(changes: impl IntoIterator<Item = NodeChange>) -> Vec<NodeChange> {
    let mut by_uid = BTreeMap::<String, NodeChange>::new();
    for change in changes {
        let joined = by_uid.entry(change.uid.clone()).or_insert_with(|| NodeChange {
            node: change.node,
            uid: change.uid,
            ..NodeChange::default()
        });
        joined.annotations.extend(change.annotations);
        joined.labels.extend(change.labels);
    }
    by_uid.into_values().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_node_is_written_once() {
        let change = |uid: &str, annotation: &str, label: &str| NodeChange {
            node: format!("node-{uid}"),
            uid: uid.to_owned(),
            annotations: [annotation].iter().filter(|key| !key.is_empty()).map(|key| (key.to_string(), None)).collect(),
            labels: [label].iter().filter(|key| !key.is_empty()).map(|key| (key.to_string(), None)).collect(),
        };
        let joined = joined([change("b", "x", ""), change("a", "", "y"), change("b", "", "z")]);
        assert_eq!(joined, [change("a", "", "y"), change("b", "x", "z")]);
    }
}
