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
