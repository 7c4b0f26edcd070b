//! Counts what is asked of the API server.

use std::{
    pin::Pin,
    task::{Context, Poll},
};

use hyper::{Method, Request, Response};
use metrics::Metrics;
use tower::Service;

/// Counts the requests that go through `inner`.
#[derive(Clone)]
pub(crate) struct Counted<S> {
    inner: S,
    metrics: Metrics,
}

impl<S> Counted<S> {
    pub(crate) fn new(inner: S, metrics: Metrics) -> Self {
        Self { inner, metrics }
    }
}

impl<S, B, A> Service<Request<B>> for Counted<S>
where
    S: Service<Request<B>, Response = Response<A>>,
    S::Future: Send + 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<S::Response, S::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let verb = verb(request.method(), request.uri().query());
        let counting = Counting { verb, code: None, metrics: self.metrics.clone() };
        let answer = self.inner.call(request);
        Box::pin(async move {
            let answer = answer.await;
            counting.end(answer.as_ref().ok().map(|answer| answer.status().as_u16()));
            answer
        })
    }
}

/// Counts one request at its end: also one that nobody awaits any more, because its time is over.
struct Counting {
    verb: &'static str,
    code: Option<u16>,
    metrics: Metrics,
}

impl Counting {
    fn end(mut self, code: Option<u16>) {
        self.code = code;
    }
}

impl Drop for Counting {
    fn drop(&mut self) {
        self.metrics.api_request(self.verb, self.code);
    }
}

/// The verb as an RBAC rule has it, but that a list is a `get`: the paths of the two differ only by what they mean.
fn verb(method: &Method, query: Option<&str>) -> &'static str {
    let watches = || query.unwrap_or_default().split('&').any(|part| matches!(part, "watch=true" | "watch=1"));
    match *method {
        Method::GET if watches() => "watch",
        Method::GET => "get",
        Method::POST => "create",
        Method::PUT => "update",
        Method::PATCH => "patch",
        Method::DELETE => "delete",
        _ => "other",
    }
}

#[cfg(test)]
mod tests {
    use std::{convert::Infallible, future::pending, time::Duration};

    use metrics::Format;
    use tower::{ServiceExt, service_fn};

    use super::*;

    #[test]
    fn a_requests_verb_follows_from_its_method_and_query() {
        for (method, query, expected) in [
            (Method::GET, None, "get"),
            (Method::GET, Some("limit=500&watch=true"), "watch"),
            (Method::GET, Some("labelSelector=watch"), "get"),
            (Method::POST, None, "create"),
            (Method::PUT, Some("fieldManager=x"), "update"),
            (Method::PATCH, None, "patch"),
            (Method::DELETE, None, "delete"),
            (Method::OPTIONS, None, "other"),
        ] {
            assert_eq!(verb(&method, query), expected, "{method} {query:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn each_answer_is_counted_by_its_code() {
        let metrics = Metrics::default();
        let server = service_fn(async |request: Request<u16>| {
            Ok::<_, Infallible>(Response::builder().status(*request.body()).body(()).unwrap())
        });
        for code in [200, 200, 409] {
            let request = Request::put("/api/v1/nodes/a").body(code).unwrap();
            Counted::new(server, metrics.clone()).oneshot(request).await.unwrap();
        }
        let nobody = service_fn(async |_: Request<u16>| Err::<Response<()>, _>("connection refused"));
        let request = Request::get("/api/v1/nodes/a").body(0).unwrap();
        Counted::new(nobody, metrics.clone()).oneshot(request).await.unwrap_err();
        let silent = service_fn(async |_: Request<u16>| pending::<Result<Response<()>, Infallible>>().await);
        let request = Request::delete("/api/v1/nodes/a").body(0).unwrap();
        let asked = Counted::new(silent, metrics.clone()).oneshot(request);
        assert!(tokio::time::timeout(Duration::from_millis(1), asked).await.is_err());
        let text = metrics.text(Format::Text);
        for counted in [
            "verb=\"delete\",code=\"0\"} 1",
            "verb=\"update\",code=\"200\"} 2",
            "verb=\"update\",code=\"409\"} 1",
            "verb=\"get\",code=\"0\"} 1",
        ] {
            assert!(text.contains(counted), "{counted} in {text}");
        }
    }
}
