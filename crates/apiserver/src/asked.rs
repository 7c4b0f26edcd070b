//! Which calls the nodes have made, in the terms of an RBAC rule: what a manifest's roles must grant, and no more.

use std::{
    collections::BTreeSet,
    net::IpAddr,
    sync::{Mutex, PoisonError},
};

use axum::{
    extract::ConnectInfo,
    http::{Method, request::Parts},
};
use serde::{Deserialize, Serialize};

use super::{
    fault::Peer,
    request::{Query, Subresource, Target},
};

/// Serves the calls, as a JSON list of [`Call`].
pub const CALLS: &str = "/calls";

/// A kind of request, as an RBAC rule names it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Call {
    /// The API group; empty for core, and for a path of no resource.
    pub group: String,
    /// The plural name, with its subresource, such as `fluxnodes/status`; or a path of no resource, such as `/version`.
    pub resource: String,
    /// The object; empty for a collection, and for an object that is to be created.
    pub name: String,
    /// `get`, `list`, `watch`, `create`, `update`, `patch`, `delete` or `deletecollection`.
    pub verb: String,
}

/// The calls of all clients except those with the server's own address, which are the machine's.
#[derive(Debug, Default)]
pub struct Asked {
    own: Option<IpAddr>,
    calls: Mutex<BTreeSet<Call>>,
}

impl Asked {
    /// No calls yet, of a server at `own`. None: no client's address is known, and no call is kept.
    pub fn of_others_than(own: Option<IpAddr>) -> Self {
        Self { own, calls: Mutex::default() }
    }

    /// Keeps the request for a path of no resource.
    pub fn note_path(&self, parts: &Parts) {
        let path = parts.uri.path().to_owned();
        self.note(parts, Call { group: String::new(), resource: path, name: String::new(), verb: "get".to_owned() });
    }

    /// Keeps the request for `target`.
    pub fn note_target(&self, parts: &Parts, target: &Target, query: &Query) {
        // A list or a watch of one name counts as a request for that object, as in a real server.
        let selected = query.fields.strip_prefix("metadata.name=").filter(|name| !name.contains(','));
        let name = target.name.as_deref().or(selected).unwrap_or_default().to_owned();
        let verb = match parts.method {
            Method::GET if query.watch => "watch",
            Method::GET if target.name.is_some() => "get",
            Method::GET => "list",
            Method::POST => "create",
            Method::PUT => "update",
            Method::PATCH => "patch",
            Method::DELETE if target.name.is_some() => "delete",
            _ => "deletecollection",
        };
        let subresource = match target.subresource {
            Subresource::Object => "",
            Subresource::Status => "/status",
            Subresource::Scale => "/scale",
            Subresource::Finalize => "/finalize",
            Subresource::Binding => "/binding",
            Subresource::Eviction => "/eviction",
        };
        let resource = format!("{}{subresource}", target.resource.plural);
        self.note(parts, Call { group: target.resource.group.to_owned(), resource, name, verb: verb.to_owned() });
    }

    fn note(&self, parts: &Parts, call: Call) {
        let peer = parts.extensions.get::<ConnectInfo<Peer>>().map(|info| info.0.ip());
        if self.own.is_some() && peer.is_some() && peer != self.own {
            self.calls.lock().unwrap_or_else(PoisonError::into_inner).insert(call);
        }
    }

    /// The calls so far.
    pub fn calls(&self) -> BTreeSet<Call> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
