//! What identifies an object.

use super::resources::{Resource, ResourceName};

/// Identifies an object.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    /// Its kind.
    pub resource: ResourceName,
    /// Empty for cluster-scoped kinds.
    pub namespace: String,
    /// Its name.
    pub name: String,
}

impl Key {
    /// `namespace` is empty for cluster-scoped kinds.
    pub fn new(resource: &Resource, namespace: &str, name: &str) -> Self {
        Self { resource: resource.name(), namespace: namespace.into(), name: name.into() }
    }

    /// True for an object of `resource`, and of `namespace` if that is given.
    pub fn is_in(&self, resource: &Resource, namespace: Option<&str>) -> bool {
        self.resource == resource.name() && namespace.is_none_or(|namespace| self.namespace == namespace)
    }
}
