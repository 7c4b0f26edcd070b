//! What is answered when a request cannot be served: Kubernetes `Status` objects with the reason and code that clients
//! decide by.

use serde_json::{Value, json};

use super::resources::Resource;

/// Why a request was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ApiError {
    /// No such object.
    #[error("{resource} \"{name}\" not found")]
    NotFound {
        /// Plural and group, such as `leases.coordination.k8s.io`.
        resource: ResourceName,
        /// Which.
        name: String,
    },
    /// There is one already.
    #[error("{resource} \"{name}\" already exists")]
    AlreadyExists {
        /// Plural and group.
        resource: ResourceName,
        /// Which.
        name: String,
    },
    /// Somebody else was faster, or a precondition does not hold.
    #[error("operation cannot be fulfilled on {resource} \"{name}\": {why}")]
    Conflict {
        /// Plural and group.
        resource: ResourceName,
        /// Which.
        name: String,
        /// What differs.
        why: String,
    },
    /// The object is understood, but not allowed.
    #[error("{kind} \"{name}\" is invalid: {why}")]
    Invalid {
        /// Kind and group.
        kind: String,
        /// Which.
        name: String,
        /// What is wrong with it.
        why: String,
    },
    /// The request itself is wrong.
    #[error("{0}")]
    BadRequest(String),
    /// Not here, not now.
    #[error("{resource} \"{name}\" is forbidden: {why}")]
    Forbidden {
        /// Plural and group.
        resource: ResourceName,
        /// Which.
        name: String,
        /// Why.
        why: String,
    },
    /// A watch asked for a past that is no longer kept, or for a future that never was.
    #[error("too old resource version: {asked} ({oldest}); list again and watch from there")]
    Expired {
        /// What the watch asked for.
        asked: u64,
        /// The oldest that is kept.
        oldest: u64,
    },
    /// No token, or another.
    #[error("unauthorized: send the token of this server as bearer token")]
    Unauthorized,
    /// The verb is not served on this path.
    #[error("the server does not allow this method on the requested resource")]
    MethodNotAllowed,
    /// The body's type is not understood.
    #[error("the body of the request was in an unknown format - accepted media types include: {0}")]
    UnsupportedMediaType(&'static str),
    /// Something that must hold does not.
    #[error("internal error occurred: {0}")]
    Internal(String),
    /// No such path. Answered without a `Status`, as a real server does: it is no evidence about any object.
    #[error("404 page not found")]
    NoSuchPath,
}

/// Plural and group of a resource, as messages and `Status.details` name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ResourceName {
    /// Group, empty for core.
    pub group: &'static str,
    /// Plural.
    pub plural: &'static str,
}

impl std::fmt::Display for ResourceName {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.group {
            "" => out.write_str(self.plural),
            group => write!(out, "{}.{group}", self.plural),
        }
    }
}

impl ApiError {
    /// [`ApiError::Conflict`] of a replace with a stale resourceVersion, in the words that clients look for.
    pub fn stale(resource: &Resource, name: &str) -> Self {
        let why = "the object has been modified; please apply your changes to the latest version and try again";
        Self::Conflict { resource: resource.name(), name: name.into(), why: why.into() }
    }

    /// [`ApiError::Invalid`] for an object of `resource`.
    pub fn invalid(resource: &Resource, name: &str, why: impl Into<String>) -> Self {
        let kind = match resource.group {
            "" => resource.kind.to_owned(),
            group => format!("{}.{group}", resource.kind),
        };
        Self::Invalid { kind, name: name.into(), why: why.into() }
    }

    /// HTTP status code.
    pub fn code(&self) -> u16 {
        self.code_and_reason().0
    }

    fn code_and_reason(&self) -> (u16, &'static str) {
        match self {
            Self::NotFound { .. } | Self::NoSuchPath => (404, "NotFound"),
            Self::AlreadyExists { .. } => (409, "AlreadyExists"),
            Self::Conflict { .. } => (409, "Conflict"),
            Self::Invalid { .. } => (422, "Invalid"),
            Self::BadRequest(_) => (400, "BadRequest"),
            Self::Forbidden { .. } => (403, "Forbidden"),
            Self::Expired { .. } => (410, "Expired"),
            Self::Unauthorized => (401, "Unauthorized"),
            Self::MethodNotAllowed => (405, "MethodNotAllowed"),
            Self::UnsupportedMediaType(_) => (415, "UnsupportedMediaType"),
            Self::Internal(_) => (500, "InternalError"),
        }
    }

    /// The `Status` object.
    pub fn status(&self) -> Value {
        let (code, reason) = self.code_and_reason();
        let mut status = json!({
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
            "message": self.to_string(), "reason": reason, "code": code,
        });
        match self {
            Self::NotFound { resource, name }
            | Self::AlreadyExists { resource, name }
            | Self::Conflict { resource, name, .. }
            | Self::Forbidden { resource, name, .. } => {
                status["details"] = json!({ "name": name, "group": resource.group, "kind": resource.plural });
            }
            Self::Invalid { kind, name, why } => {
                let (kind, group) = kind.split_once('.').unwrap_or((kind, ""));
                // kubectl prints a cause as `field: message`.
                let (field, message) = why.split_once(": ").unwrap_or(("", why));
                let cause = json!({ "reason": "FieldValueInvalid", "field": field, "message": message });
                status["details"] = json!({ "name": name, "group": group, "kind": kind, "causes": [cause] });
            }
            _ => {}
        }
        status
    }
}
