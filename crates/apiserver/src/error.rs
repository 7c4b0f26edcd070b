//! Error responses: Kubernetes `Status` objects with the reasons and codes that clients rely on.

use serde_json::{Value, json};

use super::resources::{Resource, ResourceName};

/// Why a request was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ApiError {
    /// The object doesn't exist.
    #[error("{resource} \"{name}\" not found")]
    NotFound {
        /// Plural and group, such as `leases.coordination.k8s.io`.
        resource: ResourceName,
        /// The object's name.
        name: String,
    },
    /// The object exists already.
    #[error("{resource} \"{name}\" already exists")]
    AlreadyExists {
        /// Plural and group.
        resource: ResourceName,
        /// The object's name.
        name: String,
    },
    /// The object has changed meanwhile, or a precondition is not met.
    #[error("operation cannot be fulfilled on {resource} \"{name}\": {why}")]
    Conflict {
        /// Plural and group.
        resource: ResourceName,
        /// The object's name.
        name: String,
        /// The version or field that differs.
        why: String,
    },
    /// The object can be decoded but violates a rule.
    #[error("{kind} \"{name}\" is invalid: {why}")]
    Invalid {
        /// Kind and group.
        kind: String,
        /// The object's name.
        name: String,
        /// The violated rule, as `field: message` if it concerns a field.
        why: String,
    },
    /// The request can't be understood.
    #[error("{0}")]
    BadRequest(String),
    /// The operation is not possible in the current state.
    #[error("{resource} \"{name}\" is forbidden: {why}")]
    Forbidden {
        /// Plural and group.
        resource: ResourceName,
        /// The object's name.
        name: String,
        /// The reason.
        why: String,
    },
    /// A watch asked for changes that are no longer kept, or for a version that was never issued.
    #[error("too old resource version: {asked} ({oldest}); list again and watch from there")]
    Expired {
        /// The version that the watch asked for.
        asked: u64,
        /// The oldest version that is kept.
        oldest: u64,
    },
    /// The request has no token, or a wrong one.
    #[error("unauthorized: send the token of this server as bearer token")]
    Unauthorized,
    /// The path doesn't support the verb.
    #[error("the server does not allow this method on the requested resource")]
    MethodNotAllowed,
    /// Only a kubelet could answer.
    #[error(
        "this API server has no kubelets to ask: use `flux-distribute local logs NODE`, and `flux-distribute local exec NODE [--agent] -- COMMAND`"
    )]
    NoKubelet,
    /// The body's content type is not supported.
    #[error("the body of the request was in an unknown format - accepted media types include: {0}")]
    UnsupportedMediaType(&'static str),
    /// The server is in an unexpected state.
    #[error("internal error occurred: {0}")]
    Internal(String),
    /// The path doesn't exist. Answered without a `Status`, as real servers do, because it says nothing about any
    /// object.
    #[error("404 page not found")]
    NoSuchPath,
}

impl ApiError {
    /// The [`ApiError::Conflict`] for a replace with a stale resourceVersion, with the message that clients look for.
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

    /// The HTTP status code.
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
            Self::MethodNotAllowed | Self::NoKubelet => (405, "MethodNotAllowed"),
            Self::UnsupportedMediaType(_) => (415, "UnsupportedMediaType"),
            Self::Internal(_) => (500, "InternalError"),
        }
    }

    /// The `Status` object for the response.
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
