//! Counts what goes through one client of the API server, each attempt by itself.

use std::{
    collections::BTreeMap,
    pin::Pin,
    sync::{Arc, Mutex},
    task::{Context, Poll, ready},
};

use api::NAMESPACE;
use bytes::Bytes;
use http::{Method, Request, Uri};
use hyper::body::Frame;
use kube::{
    Client,
    client::{Body, retry::RetryPolicy},
};
use tower::{BoxError, Layer, retry::RetryLayer};

/// What a client has asked and got.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Counts {
    /// Number of requests by verb and object, such as `get configmaps/flux-roster`; one that a busy API server turned away and that was made again counts
    /// each time. The names of nodes are left out.
    pub requests: BTreeMap<String, u64>,
    /// Bytes of the answers' bodies, by the same.
    pub bytes: BTreeMap<String, u64>,
    /// Number of events of watches, by the same. Bookmarks count.
    pub events: BTreeMap<String, u64>,
}

impl Counts {
    /// What was added after `before`.
    pub fn since(&self, before: &Self) -> Self {
        let since = |now: &BTreeMap<String, u64>, then: &BTreeMap<String, u64>| {
            let added = now.iter().map(|(what, count)| (what.clone(), count - then.get(what).unwrap_or(&0)));
            added.filter(|(_, count)| *count > 0).collect()
        };
        Self {
            requests: since(&self.requests, &before.requests),
            bytes: since(&self.bytes, &before.bytes),
            events: since(&self.events, &before.events),
        }
    }

    /// Number of requests.
    pub fn all_requests(&self) -> u64 {
        self.requests.values().sum()
    }

    /// Bytes received.
    pub fn all_bytes(&self) -> u64 {
        self.bytes.values().sum()
    }

    /// Number of events.
    pub fn all_events(&self) -> u64 {
        self.events.values().sum()
    }
}

/// Counts for one client.
#[derive(Debug, Clone, Default)]
pub struct Counter(Arc<Mutex<Counts>>);

impl Counter {
    /// What was counted up to now.
    pub fn counts(&self) -> Counts {
        self.0.lock().unwrap().clone()
    }

    /// A client that does the same as `client`, counted here. It makes a request again that the API server has turned away, as an agent's does; `client`
    /// must not.
    pub fn client(&self, client: &Client) -> Client {
        let (client, counter) = (client.clone(), self.clone());
        let counted = tower::service_fn(move |request: Request<Body>| {
            let (client, counter) = (client.clone(), counter.clone());
            let what = name_of(request.method(), request.uri());
            async move {
                counter.add(|counts| &mut counts.requests, &what, 1);
                let answer = client.send(request).await?;
                Ok::<_, BoxError>(answer.map(|body| Counted { body, counter, what }))
            }
        });
        Client::new(RetryLayer::new(RetryPolicy::server_retry()).layer(counted), NAMESPACE)
    }

    fn add(&self, part: impl FnOnce(&mut Counts) -> &mut BTreeMap<String, u64>, what: &str, count: u64) {
        let mut counts = self.0.lock().unwrap();
        let part = part(&mut counts);
        match part.get_mut(what) {
            Some(known) => *known += count,
            None => drop(part.insert(what.to_owned(), count)),
        }
    }
}

/// A body whose bytes are counted while they arrive.
struct Counted {
    body: Body,
    counter: Counter,
    what: String,
}

impl hyper::body::Body for Counted {
    type Data = Bytes;
    type Error = <Body as hyper::body::Body>::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(context));
        if let Some(data) = frame.as_ref().and_then(|frame| frame.as_ref().ok()?.data_ref()) {
            self.counter.add(|counts| &mut counts.bytes, &self.what, data.len() as u64);
            // Each event is one line.
            let lines = data.split(|byte| *byte == b'\n').count() as u64 - 1;
            if self.what.starts_with("watch") && lines > 0 {
                self.counter.add(|counts| &mut counts.events, &self.what, lines);
            }
        }
        Poll::Ready(frame)
    }
}

/// Verb and object of a request. The names of nodes and their pods are left out.
fn name_of(method: &Method, uri: &Uri) -> String {
    let query = uri.query().unwrap_or_default();
    let group = match uri.path() {
        path if path.starts_with("/api/") => 2,
        path if path.starts_with("/apis/") => 3,
        _ => 0,
    };
    let mut words = uri.path().trim_start_matches('/').split('/').skip(group).collect::<Vec<_>>();
    if words.len() > 2 && words[0] == "namespaces" {
        words.drain(..2);
    }
    let of_nodes = ["fluxnodes", "nodes", "pods", "events"];
    if words.len() > 1 && of_nodes.contains(&words[0]) {
        words.remove(1);
    }
    let is_of_one = words.len() > 1 || uri.path().contains("/fluxnodes/");
    let verb = match *method {
        Method::GET if query.contains("watch=true") || query.contains("watch=1") => "watch",
        Method::GET if is_of_one => "get",
        Method::GET => "list",
        Method::POST => "create",
        Method::PUT => "replace",
        Method::PATCH => "patch",
        Method::DELETE => "delete",
        _ => "other",
    };
    format!("{verb} {}", words.join("/"))
}
