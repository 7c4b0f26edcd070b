//! A credential of a URL opens a server and is written down nowhere.

use std::process::Command;

use axum::http::StatusCode;
use packages::Access;

use super::*;

/// What a person would type: a user and a password, and conda's token.
const PASSWORD: &str = "pa,ss(w)ord";
const TOKEN: &str = "tk-5ecret";

/// `me` and [`PASSWORD`], as HTTP sends them.
const BASIC: &str = "Basic bWU6cGEsc3ModylvcmQ=";

/// A server that answers only those that have both credentials.
async fn closed_server(channel: &Channel) -> Server {
    let (server, open) = (Server::start(channel.path()).await, Server::start(channel.path()).await);
    let behind = open.url().trim_end_matches('/').to_owned();
    server.hook(move |request| {
        let _keep = &open;
        let user = request.headers().get(header::AUTHORIZATION).is_some_and(|sent| sent == BASIC);
        let Some(path) = request.uri().path().strip_prefix("/t/").and_then(|rest| rest.strip_prefix(TOKEN)) else {
            return answer(StatusCode::FORBIDDEN, &[], "");
        };
        match user {
            true => answer(StatusCode::FOUND, &[(header::LOCATION, &format!("{behind}{path}"))], ""),
            false => answer(StatusCode::UNAUTHORIZED, &[], ""),
        }
    });
    server
}

/// The channel's URL with the credentials in it.
fn with_credentials(server: &Server) -> String {
    server.url().replace("http://", &format!("http://me:{PASSWORD}@")) + &format!("t/{TOKEN}")
}

fn assert_clean(what: &str, text: &str) {
    for secret in [PASSWORD, "me:pa", TOKEN, BASIC] {
        assert!(!text.contains(secret), "{what} has {secret}: {text}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lock_of_a_private_channel_has_no_credentials() {
    let channel = Channel::with_flux();
    let server = closed_server(&channel).await;
    let url = with_credentials(&server);
    let run = |url: String| {
        let output = Command::new(env!("CARGO_BIN_EXE_flux-distribute"))
            .args(["lock", "--spec", "flux-core", "--platform", PLATFORM, "--channel", &url])
            .env("FLUX_DISTRIBUTE_LOG", "trace")
            .output()
            .unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (output.status.code(), text(output.stdout), text(output.stderr))
    };
    let (code, lock, log) = tokio::task::spawn_blocking({
        let url = url.clone();
        move || run(url)
    })
    .await
    .unwrap();
    assert_eq!(code, Some(0), "{log}");
    assert!(lock.contains("flux-core-1.0-0.conda") && lock.contains(server.url()), "{lock}");
    assert_clean("the lock", &lock);
    assert_clean("the log", &log);
}

fn credentials(server: &Server, json: &str) -> Access {
    let host = server.url().trim_start_matches("http://").trim_end_matches('/');
    let json = json.replace("HOST", host);
    Access::from_secret(None, None, Some(json.as_bytes())).unwrap()
}

/// A lock of the channel behind the server, as `flux-distribute lock` makes it.
async fn lock_of(server: &Server, http: &HttpClient) -> PackageSet {
    let asked = asked(server.url(), &["flux-core"]);
    packages::resolve(&asked, &[PLATFORM.to_owned()], http, None, host_file, |_| ()).await.unwrap()
}

#[tokio::test]
async fn a_private_channel_is_read_with_the_secret_which_never_reaches_the_host() {
    let channel = Channel::with_flux();
    let server = Server::start(channel.path()).await;
    let open = Server::start(channel.path()).await;
    let behind = open.url().trim_end_matches('/').to_owned();
    server.hook(move |request| {
        let path = request.uri().path().strip_prefix("/t/").and_then(|rest| rest.strip_prefix(TOKEN));
        match path {
            Some(path) => answer(StatusCode::FOUND, &[(header::LOCATION, &format!("{behind}{path}"))], ""),
            None => answer(StatusCode::FORBIDDEN, &[], ""),
        }
    });
    let access = credentials(&server, &format!(r#"{{"HOST": {{"CondaToken": "{TOKEN}"}}}}"#));
    let allowed = Access { allow_http: true, ..access.clone() };
    assert_clean("Debug", &format!("{allowed:?}"));
    let http = HttpClient::with_access(&allowed, &[]).unwrap();
    let set = lock_of(&server, &http).await;
    let host = Host::new();
    host.fetch_from(&set, &http, &Sources::default()).await.unwrap();
    host.link(&set).await.unwrap();
    assert_clean("the package set", &serde_json::to_string(&set).unwrap());
    for record in fs::read_dir(host.environment(&set).join("conda-meta")).unwrap() {
        let text = fs::read_to_string(record.unwrap().path()).unwrap_or_default();
        assert_clean("conda-meta", &text);
    }

    // Without the spec's word nothing is sent over http, and that is said.
    let http = HttpClient::with_access(&access, &[]).unwrap();
    let error = Host::new().fetch_from(&set, &http, &Sources::default()).await.unwrap_err();
    let words = base::error_chain(&error);
    assert!(words.contains("403") && words.contains("spec.packages.allowHttpCredentials"), "{words}");
    assert!(!error.is_transient());
    let question = asked(server.url(), &["flux-core"]);
    let error = packages::resolve(&question, &[PLATFORM.to_owned()], &http, None, host_file, |_| ()).await.unwrap_err();
    let words = base::error_chain(&error);
    assert!(words.contains("spec.packages.allowHttpCredentials"), "{words}");
    assert_clean("the error", &words);
}

#[tokio::test]
async fn a_redirect_that_would_carry_the_token_to_another_server_is_not_followed() {
    let channel = Channel::with_flux();
    let (server, other) = (Server::start(channel.path()).await, Server::start(channel.path()).await);
    let access = credentials(&server, &format!(r#"{{"HOST": {{"CondaToken": "{TOKEN}"}}}}"#));
    let http = HttpClient::with_access(&Access { allow_http: true, ..access }, &[]).unwrap();
    let set = resolve(&asked(other.url(), &["flux-core"])).await.unwrap();
    let PackageSet::Lock { lock, question } = set else { panic!("not a lock") };
    let set = PackageSet::Lock { lock: lock.replace(other.url(), server.url()), question };
    let elsewhere = other.url().trim_end_matches('/').to_owned();
    server.hook(move |request| {
        let to = format!("{elsewhere}{}", request.uri().path());
        answer(StatusCode::FOUND, &[(header::LOCATION, &to)], "")
    });
    other.trouble().asked.lock().unwrap().clear();
    let error = Host::new().fetch_from(&set, &http, &Sources::default()).await.unwrap_err();
    let words = base::error_chain(&error);
    assert!(words.contains("redirects to another server with the token"), "{words}");
    assert_clean("the error", &words);
    assert_eq!(*other.trouble().asked.lock().unwrap(), [""; 0]);
}

/// URLs of a package with credentials, the last ones hidden: a parser of URLs takes them for a user, and a reader does
/// not.
fn urls_with_credentials() -> [String; 5] {
    [
        format!("https://me:{PASSWORD}@h/c/linux-64/flux-core-1.0-0.conda"),
        format!("https://h/t/{TOKEN}/c/linux-64/flux-core-1.0-0.conda"),
        format!("https:///me:{PASSWORD}@h/c/linux-64/flux-core-1.0-0.conda"),
        format!("https:/me:{PASSWORD}@h/c/linux-64/flux-core-1.0-0.conda"),
        format!("https://me:{PASSWORD}\"@h/c/linux-64/flux-core-1.0-0.conda"),
    ]
}

/// A lock of the package at `url`.
fn yaml_with(url: &str) -> String {
    let sha256 = "0".repeat(64);
    format!(
        "version: 6\nenvironments:\n  default:\n    channels:\n    - url: {url}\n    packages:\n      linux-64:\n      - conda: {url}\n\
         packages:\n- conda: {url}\n  sha256: '{sha256}'\n"
    )
}

#[test]
fn a_lock_with_credentials_is_refused_without_quoting_them() {
    for url in urls_with_credentials() {
        let list = format!("@EXPLICIT\n{url}#{}\n", "0".repeat(64));
        for lock in [list, yaml_with(&url)] {
            let error = locks::check_lock(&lock, &[]).unwrap_err();
            let words = base::error_chain(&error);
            assert!(
                words.contains("has credentials in the URL https://") && words.contains("flux-packages-access"),
                "{words}"
            );
            assert_clean("the error", &words);
        }
    }
}

#[test]
fn no_bundle_is_made_of_a_lock_with_credentials() {
    let desk = tempfile::tempdir().unwrap();
    for url in urls_with_credentials() {
        let (lock, out) = (desk.path().join("lock.yml"), desk.path().join("flux.tar.gz"));
        fs::write(&lock, yaml_with(&url)).unwrap();
        let create = packages::CreateBundle { lock: Some(lock), out, ..packages::CreateBundle::default() };
        let error = create.run().unwrap_err();
        let words = base::error_chain(&error);
        assert!(words.contains("has credentials in the URL https://"), "{words}");
        assert_clean("the error", &words);
        assert_eq!(error.exit_code(), 2);
        assert_eq!(fs::read_dir(desk.path()).unwrap().count(), 1, "nothing was fetched or written");
    }
}

#[test]
fn a_spec_with_credentials_is_refused_with_their_proper_place() {
    let sha256 = "0".repeat(64);
    let with = [
        format!("https://me:{PASSWORD}@h/c"),
        format!("http://h/t/{TOKEN}/c"),
        "https://h/x?sig=tk-5ecret".to_owned(),
        // What a parser of URLs takes for a user, and a reader does not.
        format!("https:///me:{PASSWORD}@h/c"),
        format!("https://me:{PASSWORD}\"@h/c"),
    ];
    for url in with {
        for spec in [
            serde_json::json!({"packages": {"channels": ["https://h/c", url]}}),
            serde_json::json!({"packages": {"mirror": url}}),
            serde_json::json!({"packages": {"bundle": {"url": url, "sha256": sha256}}}),
            serde_json::json!({"packages": {"specs": [format!("{url}::flux-core")]}}),
        ] {
            let found = model::validate(&serde_json::from_value(spec.clone()).unwrap());
            assert_eq!(found.len(), 1, "{spec}: {found:?}");
            let words = found[0].to_string();
            assert_clean("the finding", &words);
            assert!(words.contains("credentials"), "{words}");
            assert!(words.contains("flux-packages-access") || found[0].field.contains("specs"), "{words}");
        }
    }
}
