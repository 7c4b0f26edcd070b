//! Parses a request's path, query and Accept header.

use std::time::Duration;

use super::{
    admit::Mode,
    error::ApiError,
    resources::{self, Resource},
    table::Include,
};

/// The object or collection that a path names.
#[derive(Clone)]
pub struct Target {
    /// The kind.
    pub resource: &'static Resource,
    /// Set if the path names a namespace.
    pub namespace: Option<String>,
    /// Set if the path names one object.
    pub name: Option<String>,
    /// The part of the object.
    pub subresource: Subresource,
}

/// The part of an object that a path names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Subresource {
    /// The object itself.
    Object,
    /// `status`.
    Status,
    /// `scale`.
    Scale,
    /// `finalize`, of a Namespace.
    Finalize,
    /// `binding`, of what runs on Nodes.
    Binding,
    /// `eviction`, of what runs on Nodes.
    Eviction,
}

impl Subresource {
    /// True if it can be created and nothing else.
    pub fn is_action(self) -> bool {
        matches!(self, Self::Binding | Self::Eviction)
    }
}

impl Target {
    /// Parses a path below `/api/v1` or `/apis/<group>/<version>`.
    pub fn parse(path: &str) -> Option<Self> {
        let parts: Vec<&str> = path.trim_matches('/').split('/').collect();
        let (group, version, rest) = match parts.as_slice() {
            ["api", version, rest @ ..] => ("", *version, rest),
            ["apis", group, version, rest @ ..] => (*group, *version, rest),
            _ => return None,
        };
        let (namespace, rest) = match rest {
            ["namespaces", _] | ["namespaces", _, "status" | "finalize"] if group.is_empty() => (None, rest),
            ["namespaces", namespace, rest @ ..] => (Some((*namespace).to_owned()), rest),
            _ => (None, rest),
        };
        let (plural, name, subresource) = match rest {
            [plural] => (plural, None, None),
            [plural, name] => (plural, Some((*name).to_owned()), None),
            [plural, name, subresource] => (plural, Some((*name).to_owned()), Some(*subresource)),
            _ => return None,
        };
        let resource = resources::find(group, plural).filter(|resource| resource.version == version)?;
        // An object of a namespaced kind has a path only within its namespace.
        if (namespace.is_some() && !resource.namespaced)
            || (resource.namespaced && namespace.is_none() && name.is_some())
        {
            return None;
        }
        let subresource = match subresource {
            None => Subresource::Object,
            Some("status") if resource.status => Subresource::Status,
            Some("scale") if resource.scale().is_some() => Subresource::Scale,
            Some("finalize") if resource.kind == "Namespace" => Subresource::Finalize,
            Some("binding") if resource.runs => Subresource::Binding,
            Some("eviction") if resource.runs => Subresource::Eviction,
            Some(_) => return None,
        };
        Some(Self { resource, namespace, name, subresource })
    }

    /// Namespace and name of the object.
    ///
    /// # Errors
    /// [`ApiError::MethodNotAllowed`] if the path names a collection.
    pub fn object(&self) -> Result<(&str, &str), ApiError> {
        let name = self.name.as_deref().ok_or(ApiError::MethodNotAllowed)?;
        Ok((self.namespace.as_deref().unwrap_or_default(), name))
    }
}

/// True for the parts of a pod that a real server asks a kubelet for.
pub fn needs_kubelet(path: &str) -> bool {
    let parts: Vec<&str> = path.trim_matches('/').split('/').collect();
    matches!(parts[..], ["api", "v1", "namespaces", _, "pods", _, "log" | "exec" | "attach" | "portforward"])
}

/// The query of a request.
#[derive(Debug, Default)]
pub struct Query {
    /// Watch instead of list.
    pub watch: bool,
    /// labelSelector.
    pub labels: String,
    /// fieldSelector.
    pub fields: String,
    /// resourceVersion; empty if it is missing.
    pub resource_version: String,
    /// timeoutSeconds.
    pub timeout: Option<Duration>,
    /// allowWatchBookmarks.
    pub bookmarks: bool,
    /// sendInitialEvents.
    pub initial_events: bool,
    /// dryRun, fieldValidation and gracePeriodSeconds.
    pub mode: Mode,
    /// includeObject of Tables.
    pub include: Include,
}

impl Query {
    /// Parses a query. Ignores unknown parameters, as a real server does, and also `limit` and `continue`: lists are
    /// complete.
    ///
    /// # Errors
    /// [`ApiError::BadRequest`] for an unknown value of a parameter that changes what the request does.
    pub fn parse(text: &str) -> Result<Self, ApiError> {
        let mut query = Self::default();
        for (key, value) in url::form_urlencoded::parse(text.as_bytes()) {
            let is_true = matches!(&*value, "true" | "1");
            match &*key {
                "watch" => query.watch = is_true,
                "labelSelector" => query.labels = value.into_owned(),
                "fieldSelector" => query.fields = value.into_owned(),
                "resourceVersion" => query.resource_version = value.into_owned(),
                "timeoutSeconds" => query.timeout = value.parse().ok().map(Duration::from_secs),
                "allowWatchBookmarks" => query.bookmarks = is_true,
                "sendInitialEvents" => query.initial_events = is_true,
                "dryRun" if value == "All" => query.mode.dry_run = true,
                "dryRun" => {
                    return Err(ApiError::BadRequest(format!("invalid dryRun {value:?}: only All is known")));
                }
                "fieldValidation" => query.mode.strict = value == "Strict",
                "gracePeriodSeconds" => query.mode.grace = value.parse().ok(),
                "includeObject" => {
                    query.include = match &*value {
                        "Object" => Include::Object,
                        "None" => Include::None,
                        _ => Include::Metadata,
                    }
                }
                _ => {}
            }
        }
        Ok(query)
    }
}

/// The representation of objects in the response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// As they are.
    Object,
    /// As rows of a Table.
    Table(Include),
    /// Only their metadata.
    Metadata,
}

impl Form {
    /// The first supported representation in an Accept header. The encoding is always JSON: clients that prefer
    /// protobuf accept JSON too.
    pub fn parse(accept: &str, include: Include) -> Self {
        let known = accept.split(',').find_map(|range| {
            let mut parts = range.split(';').map(str::trim);
            if !matches!(parts.next(), Some("application/json" | "application/*" | "*/*")) {
                return None;
            }
            match parts.find_map(|part| part.strip_prefix("as=")) {
                None => Some(Self::Object),
                Some("Table") if range.contains("v=v1beta1") => None,
                Some("Table") => Some(Self::Table(include)),
                Some("PartialObjectMetadata" | "PartialObjectMetadataList") => Some(Self::Metadata),
                Some(_) => None,
            }
        });
        known.unwrap_or(Self::Object)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_parsed_as_in_kubernetes() {
        use Subresource::{Binding, Eviction, Finalize, Object, Scale, Status};
        let ours = "/apis/distribute.flux-framework.org/v1alpha1";
        for (path, want) in [
            ("/api/v1/nodes".to_owned(), Some(("nodes", None, None, Object))),
            ("/api/v1/nodes/n1".to_owned(), Some(("nodes", None, Some("n1"), Object))),
            ("/api/v1/nodes/n1/status".to_owned(), Some(("nodes", None, Some("n1"), Status))),
            ("/api/v1/namespaces".to_owned(), Some(("namespaces", None, None, Object))),
            ("/api/v1/namespaces/a".to_owned(), Some(("namespaces", None, Some("a"), Object))),
            ("/api/v1/namespaces/a/finalize".to_owned(), Some(("namespaces", None, Some("a"), Finalize))),
            ("/api/v1/configmaps".to_owned(), Some(("configmaps", None, None, Object))),
            ("/api/v1/namespaces/a/configmaps".to_owned(), Some(("configmaps", Some("a"), None, Object))),
            ("/api/v1/namespaces/a/configmaps/b".to_owned(), Some(("configmaps", Some("a"), Some("b"), Object))),
            (
                format!("{ours}/namespaces/a/fluxinstances/b/scale"),
                Some(("fluxinstances", Some("a"), Some("b"), Scale)),
            ),
            ("/api/v1/namespaces/a/pods/b/binding".to_owned(), Some(("pods", Some("a"), Some("b"), Binding))),
            ("/api/v1/namespaces/a/pods/b/eviction".to_owned(), Some(("pods", Some("a"), Some("b"), Eviction))),
            ("/api/v1/namespaces/a/configmaps/b/binding".to_owned(), None),
            (format!("{ours}/namespaces/a/fluxnodes/b/scale"), None),
            (format!("{ours}/fluxnodes/b"), None),
            ("/api/v1/namespaces/a/nodes/b".to_owned(), None),
            ("/api/v2/nodes".to_owned(), None),
            ("/apis/apps/v1/deployments".to_owned(), None),
            ("/".to_owned(), None),
        ] {
            let found = Target::parse(&path);
            let found =
                found.as_ref().map(|t| (t.resource.plural, t.namespace.as_deref(), t.name.as_deref(), t.subresource));
            assert_eq!(found, want, "{path}");
        }
    }

    #[test]
    fn the_first_supported_representation_wins() {
        let table = "application/json;as=Table;v=v1;g=meta.k8s.io";
        for (accept, want) in [
            ("", Form::Object),
            ("application/vnd.kubernetes.protobuf,application/json", Form::Object),
            (table, Form::Table(Include::None)),
            (&format!("{table},application/json"), Form::Table(Include::None)),
            (&format!("application/json,{table}"), Form::Object),
            ("application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1", Form::Metadata),
        ] {
            assert_eq!(Form::parse(accept, Include::None), want, "{accept}");
        }
    }
}
