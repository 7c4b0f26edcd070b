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

    /// True if `newest` is the same Node as `observed`, from which this change was decided, and nobody has changed these annotations
    /// and labels meanwhile.
    pub fn fits(&self, observed: &NodeView, newest: &NodeView) -> bool {
        let is_same =
            |key: &String, of: fn(&NodeView) -> &BTreeMap<String, String>| of(observed).get(key) == of(newest).get(key);
        observed.uid == newest.uid
            && self.annotations.keys().all(|key| is_same(key, |node| &node.annotations))
            && self.labels.keys().all(|key| is_same(key, |node| &node.labels))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_fits_until_somebody_writes_what_it_concerns() {
        let map =
            |entries: &[(&str, &str)]| entries.iter().map(|(key, value)| ((*key).into(), (*value).into())).collect();
        let node = |uid: &str, annotations: &[(&str, &str)], labels: &[(&str, &str)]| NodeView {
            uid: uid.to_owned(),
            annotations: map(annotations),
            labels: map(labels),
            ..NodeView::default()
        };
        let observed = node("u", &[("a", "1")], &[("l", "1")]);
        let removes = |keys: &[&str]| keys.iter().map(|key| ((*key).to_owned(), None)).collect();
        for (annotations, labels, newest, fits) in [
            (&["a"][..], &["l"][..], node("u", &[("a", "1")], &[("l", "1")]), true),
            (&["a"], &[], node("u", &[("a", "1")], &[("l", "2"), ("m", "1")]), true),
            (&[], &["l"], node("u", &[("b", "1")], &[("l", "1")]), true),
            (&["a"], &[], node("u", &[("a", "2")], &[("l", "1")]), false),
            (&["a"], &[], node("u", &[], &[("l", "1")]), false),
            (&[], &["l", "m"], node("u", &[("a", "1")], &[("l", "1"), ("m", "1")]), false),
            (&["a"], &["l"], node("v", &[("a", "1")], &[("l", "1")]), false),
        ] {
            let change =
                NodeChange { annotations: removes(annotations), labels: removes(labels), ..NodeChange::default() };
            assert_eq!(change.fits(&observed, &newest), fits, "{change:?} {newest:?}");
        }
    }
}
