//! The Nodes of the cluster, as observed at one moment.

use std::{collections::HashMap, slice::Iter};

use super::eligibility::NodeView;

/// All Nodes, with an index by uid and one by name. Made once a round, because nearly every decision looks Nodes up.
#[derive(Debug, Default)]
pub struct Nodes<'a> {
    all: Vec<&'a NodeView>,
    by_uid: HashMap<&'a str, &'a NodeView>,
    by_name: HashMap<&'a str, &'a NodeView>,
}

impl<'a> Nodes<'a> {
    /// The Node with this uid.
    pub fn with_uid(&self, uid: &str) -> Option<&'a NodeView> {
        self.by_uid.get(uid).copied()
    }

    /// The Node with this name.
    pub fn named(&self, name: &str) -> Option<&'a NodeView> {
        self.by_name.get(name).copied()
    }

    /// Their number.
    pub fn len(&self) -> usize {
        self.all.len()
    }

    /// True if there is none.
    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// All of them. They have no order that a decision may depend on.
    pub fn iter(&self) -> Iter<'_, &'a NodeView> {
        self.all.iter()
    }
}

impl<'a> FromIterator<&'a NodeView> for Nodes<'a> {
    fn from_iter<I: IntoIterator<Item = &'a NodeView>>(nodes: I) -> Self {
        let all: Vec<_> = nodes.into_iter().collect();
        let by_uid = all.iter().map(|node| (node.uid.as_str(), *node)).collect();
        let by_name = all.iter().map(|node| (node.name.as_str(), *node)).collect();
        Self { all, by_uid, by_name }
    }
}

impl<'n, 'a> IntoIterator for &'n Nodes<'a> {
    type Item = &'n &'a NodeView;
    type IntoIter = Iter<'n, &'a NodeView>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}
