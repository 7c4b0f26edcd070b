//! The HTTP layer: authentication, and dispatch to the verbs.

use std::{future::Future, io, net::IpAddr, sync::Arc, time::Duration};

use axum::{
    Router,
    body::{Body, Bytes, to_bytes},
    extract::{Request, State},
    http::{HeaderMap, Method, StatusCode, header, request::Parts},
    middleware::{self, Next},
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use super::{
    asked::{Asked, CALLS},
    discovery,
    error::ApiError,
    fault::{Faults, Peer, Switch, inject},
    patch::Patch,
    request::{Form, Query, Subresource, Target, needs_kubelet},
    selector::Filter,
    store::Store,
    tls::{Identity, TlsListener},
    verbs,
    watch::Watch,
};

/// The largest accepted body, as in a real server.
const MAX_BODY: usize = 3 << 20;

/// Where kubectl looks for the schema of a kind that is not in OpenAPI v3, before it says that the server does not have that kind.
const OPENAPI_V2: &str = "/openapi/v2";

/// In this encoding, an empty body is an empty schema.
const OPENAPI_V2_TYPE: &str = "application/com.github.proto-openapi.spec.v2.v1.0+protobuf";

/// How long open requests may continue after shutdown has begun.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(5);

#[derive(Clone)]
struct App {
    store: Arc<Store>,
    /// sha256 of the token. Comparing digests leaks nothing about the token through timing.
    token: [u8; 32],
    closing: CancellationToken,
    asked: Arc<Asked>,
}

/// A router that serves `store` to clients with `token`.
pub fn router(store: Arc<Store>, token: String) -> Router {
    build(store, &token, CancellationToken::new(), None)
}

/// Serves `store` over TLS on `listener`, as `identity`, until `shutdown`, which also ends open watches. `switch`
/// injects faults for all clients except those with the listener's own address.
///
/// # Errors
/// Those of the listener.
pub async fn serve(
    listener: TcpListener,
    identity: &Identity,
    store: Arc<Store>,
    token: String,
    switch: Option<Switch>,
    shutdown: impl Future<Output = ()> + Send + 'static,
) -> io::Result<()> {
    let closing = CancellationToken::new();
    let own = listener.local_addr()?.ip();
    let router = build(store, &token, closing.clone(), switch.map(|switch| (switch, own)));
    let router = router.into_make_service_with_connect_info::<Peer>();
    let listener = TlsListener::new(listener, identity);
    let begin = closing.clone();
    let server = axum::serve(listener, router).with_graceful_shutdown(async move {
        shutdown.await;
        begin.cancel();
    });
    tokio::select! {
        ended = server.into_future() => ended,
        () = async { closing.cancelled().await; tokio::time::sleep(SHUTDOWN_GRACE).await } => Ok(()),
    }
}

fn build(store: Arc<Store>, token: &str, closing: CancellationToken, faults: Option<(Switch, IpAddr)>) -> Router {
    let asked = Arc::new(Asked::of_others_than(faults.as_ref().map(|(_, own)| *own)));
    let app = App { store, token: Sha256::digest(token.as_bytes()).into(), closing, asked };
    let mut router = Router::new().fallback(handle);
    // The last layer is the outermost, so only authenticated requests are subject to faults.
    if let Some((switch, spared)) = faults {
        router = router.layer(middleware::from_fn_with_state(Faults::new(switch, spared), inject));
    }
    router.layer(middleware::from_fn_with_state(app.clone(), authenticate)).with_state(app)
}

async fn authenticate(State(app): State<App>, request: Request, next: Next) -> Response {
    let open = matches!(request.uri().path(), "/healthz" | "/livez" | "/readyz" | "/version");
    let known = token_of(request.headers()).is_some_and(|token| app.token == *Sha256::digest(token));
    if open || known { next.run(request).await } else { ApiError::Unauthorized.into_response() }
}

fn token_of(headers: &HeaderMap) -> Option<&str> {
    let (scheme, token) = headers.get(header::AUTHORIZATION)?.to_str().ok()?.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then_some(token.trim())
}

async fn handle(State(app): State<App>, request: Request) -> Response {
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let answer = respond(app, request).await.unwrap_or_else(IntoResponse::into_response);
    tracing::debug!(%method, path, code = answer.status().as_u16(), "answered");
    answer
}

async fn respond(app: App, request: Request) -> Result<Response, ApiError> {
    let (parts, body) = request.into_parts();
    let path = parts.uri.path();
    if parts.method == Method::GET {
        if matches!(path, "/healthz" | "/livez" | "/readyz") {
            return Ok("ok".into_response());
        }
        if path == OPENAPI_V2 {
            return Ok([(header::CONTENT_TYPE, OPENAPI_V2_TYPE)].into_response());
        }
        if path == CALLS {
            return Ok(json_response(StatusCode::OK, &json!(app.asked.calls())));
        }
        if let Some(answer) = discovery::answer(path, |resource| app.store.serves(resource)) {
            app.asked.note_path(&parts);
            return Ok(json_response(StatusCode::OK, &answer));
        }
    }
    if needs_kubelet(path) {
        return Err(ApiError::NoKubelet);
    }
    let target = Target::parse(path).filter(|target| app.store.serves(target.resource)).ok_or(ApiError::NoSuchPath)?;
    let query = Query::parse(parts.uri.query().unwrap_or_default())?;
    app.asked.note_target(&parts, &target, &query);
    let too_large = |_| ApiError::BadRequest(format!("the body can't be read, or is larger than {MAX_BODY} bytes"));
    let body = to_bytes(body, MAX_BODY).await.map_err(too_large)?;
    dispatch(app, &parts, target, &query, &body)
}

fn dispatch(app: App, parts: &Parts, target: Target, query: &Query, body: &Bytes) -> Result<Response, ApiError> {
    let store = &app.store;
    let text = |name| parts.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let form = Form::parse(text(header::ACCEPT), query.include);
    let content_type = text(header::CONTENT_TYPE);
    let json_body = || match content_type.split(';').next().unwrap_or_default().trim() {
        "application/json" | "" => Ok(()),
        _ => Err(ApiError::UnsupportedMediaType("application/json")),
    };
    let mut code = StatusCode::OK;
    if target.subresource.is_action() && parts.method != Method::POST {
        return Err(ApiError::MethodNotAllowed);
    }
    let answer = match parts.method {
        Method::GET if query.watch => return watch(app, target, query, form),
        Method::GET if target.name.is_some() => verbs::get(store, &target, form)?,
        Method::GET => verbs::list(store, &target, query, form)?,
        Method::POST => {
            json_body()?;
            code = StatusCode::CREATED;
            match target.subresource {
                Subresource::Binding => verbs::bind(store, &target, query.mode, body)?,
                Subresource::Eviction => verbs::evict(store, &target, query.mode, body)?,
                _ => verbs::create(store, &target, query.mode, body)?,
            }
        }
        Method::PUT => {
            json_body()?;
            verbs::replace(store, &target, query.mode, body)?
        }
        Method::PATCH => verbs::patch(store, &target, query.mode, &Patch::parse(content_type, body)?)?,
        Method::DELETE if target.name.is_some() => verbs::delete(store, &target, query.mode, body)?,
        Method::DELETE => verbs::delete_collection(store, &target, query, body)?,
        _ => return Err(ApiError::MethodNotAllowed),
    };
    Ok(json_response(code, &answer))
}

fn watch(app: App, target: Target, query: &Query, form: Form) -> Result<Response, ApiError> {
    if target.subresource != Subresource::Object {
        return Err(ApiError::MethodNotAllowed);
    }
    let mut filter = Filter::parse(target.resource, &query.labels, &query.fields)?;
    if let Some(name) = &target.name {
        filter = filter.and_name(name);
    }
    let watch = Watch::new(app.store, (target.resource, target.namespace), filter, form, query, app.closing)?;
    Ok(([(header::CONTENT_TYPE, "application/json")], watch.into_body()).into_response())
}

fn json_response(code: StatusCode, answer: &Value) -> Response {
    (code, [(header::CONTENT_TYPE, "application/json")], Body::from(answer.to_string())).into_response()
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let code = StatusCode::from_u16(self.code()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        match self {
            Self::NoSuchPath => (code, "404 page not found\n").into_response(),
            other => json_response(code, &json!(other.status())),
        }
    }
}
