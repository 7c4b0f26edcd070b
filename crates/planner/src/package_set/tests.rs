//! When the planner asks the channels for packages. Runs the resolver against the in-memory API server and a local
//! channel.

#![allow(clippy::unwrap_used, reason = "clippy.toml's exception ends at the tests' own functions")]

#[path = "../../../../tests/support/channel.rs"]
#[allow(dead_code, reason = "each test binary uses its part")]
mod channel;

use std::sync::Arc;

use k8s_openapi::api::core::v1::Namespace;
use kube::{
    Api, Client, Config,
    api::{ObjectMeta, PostParams},
};
use rustls::pki_types::{CertificateDer, pem::PemObject};
use tokio::net::TcpListener;

use self::channel::{Channel, Content, Server};
use super::*;
use api::NAMESPACE;
use apiserver::{Identity, Store, serve};
use base::error_chain;

async fn api() -> Client {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let identity = Identity::new(address.ip()).unwrap();
    let authority = CertificateDer::from_pem_slice(identity.authority().as_bytes()).unwrap();
    let mut config = Config::new(format!("https://{address}").parse().unwrap());
    config.root_cert = Some(vec![authority.to_vec()]);
    config.auth_info.token = Some("sesame".to_owned().into());
    config.default_namespace = NAMESPACE.into();
    tokio::spawn(async move {
        serve(listener, &identity, Arc::new(Store::new()), "sesame".into(), None, std::future::pending()).await
    });
    let client = Client::try_from(config).unwrap();
    let metadata = ObjectMeta { name: Some(NAMESPACE.into()), ..ObjectMeta::default() };
    let namespace = Namespace { metadata, ..Namespace::default() };
    Api::all(client.clone()).create(&PostParams::default(), &namespace).await.unwrap();
    client
}

/// Returns what the planner publishes in the end, or why it publishes nothing.
async fn settled(
    planner: &mut Resolver,
    client: &Client,
    packages: &Packages,
    platforms: &[&str],
) -> Result<PackageSet, String> {
    let platforms = platforms.iter().map(|platform| (*platform).to_owned()).collect::<Vec<_>>();
    let mut looks = tokio::time::interval(Duration::from_millis(20));
    for _ in 0..1000 {
        match planner.published(client, packages, &platforms, None, true, None).await.unwrap() {
            Published::Is(set) if planner.running.is_none() => return Ok(set),
            Published::Failed(reason) | Published::Still(_, reason) => return Err(error_chain(&*reason)),
            _ => looks.tick().await,
        };
    }
    panic!("nothing is published")
}

/// A deleted instance's set, until what it had published is gone.
#[tokio::test]
async fn an_instance_that_has_started_nothing_takes_no_set_that_answers_another_question() {
    let channel = Channel::with_flux();
    let server = Server::start(channel.path()).await;
    let client = api().await;
    let specs = vec!["flux-core".to_owned()];
    let before = Packages { channels: vec![server.url().to_owned()], specs: specs.clone(), ..Packages::default() };
    let first = settled(&mut Resolver::default(), &client, &before, &["linux-64"]).await.unwrap();
    let asked = Packages { channels: vec!["http://127.0.0.1:1/channel".to_owned()], specs, ..Packages::default() };
    let platforms = ["linux-64".to_owned()];
    for may_keep in [false, true] {
        let mut planner = Resolver::default();
        let mut looks = tokio::time::interval(Duration::from_millis(20));
        let mut found = None;
        for _ in 0..1000 {
            looks.tick().await;
            match planner.published(&client, &asked, &platforms, None, may_keep, None).await.unwrap() {
                Published::Pending => assert!(!may_keep),
                Published::Is(set) => assert!(may_keep && set == first),
                Published::Failed(_) => found = Some(None),
                Published::Still(set, _) => found = Some(Some(set)),
            }
            if found.is_some() {
                break;
            }
        }
        assert_eq!(found, Some(Some(first.clone()).filter(|_| may_keep)));
    }
}

fn content() -> [Content; 1] {
    [Content::plain("share/flux", b"newer")]
}

#[tokio::test]
async fn the_channels_are_asked_again_only_on_request() {
    let mut channel = Channel::with_flux();
    let server = Server::start(channel.path()).await;
    let client = api().await;
    let asked = Packages {
        channels: vec![server.url().to_owned()],
        specs: vec!["flux-core".to_owned()],
        ..Packages::default()
    };
    let first = settled(&mut Resolver::default(), &client, &asked, &["linux-64"]).await.unwrap();
    channel.add_release(("flux-core", "1.0", 1), ".conda", &["libflux"], &content());
    channel.list_for("linux-aarch64");

    server.trouble().asked.lock().unwrap().clear();
    let elsewhere = Packages { mirror: Some("http://127.0.0.1:1/mirror".to_owned()), ..asked.clone() };
    let kept = Packages { keep: Some(5), ..asked.clone() };
    for packages in [&asked, &elsewhere, &kept] {
        for platforms in [&["linux-64"][..], &["linux-64", "linux-aarch64"], &["linux-aarch64"], &[]] {
            // Use a new resolver each time, as after a restart of the planner or a change of planner.
            let set = settled(&mut Resolver::default(), &client, packages, platforms).await.unwrap();
            assert_eq!(set, first, "{packages:?} {platforms:?}");
        }
    }
    assert_eq!(*server.trouble().asked.lock().unwrap(), [""; 0]);

    let refreshed = Packages { refresh: Some("2026-11-20".to_owned()), ..asked.clone() };
    let second = settled(&mut Resolver::default(), &client, &refreshed, &["linux-64"]).await.unwrap();
    assert_ne!(second.digest(), first.digest());
    let PackageSet::Lock { lock, .. } = &second else { panic!("not a lock") };
    assert!(lock.contains("flux-core-1.0-1.conda"), "{lock}");

    channel.add_release(("flux-core", "1.0", 2), ".conda", &["libflux"], &content());
    let again = settled(&mut Resolver::default(), &client, &refreshed, &["linux-64"]).await.unwrap();
    assert_eq!(again, second);
    let glibc = Packages { glibc: Some("2.34".to_owned()), ..refreshed.clone() };
    let both = Packages { platforms: vec!["linux-64".to_owned(), "linux-aarch64".to_owned()], ..refreshed.clone() };
    let other = Packages { specs: vec!["libflux".to_owned()], ..refreshed };
    let mut before = second;
    for packages in [glibc, both, other] {
        let set = settled(&mut Resolver::default(), &client, &packages, &["linux-64"]).await.unwrap();
        assert_ne!(set.digest(), before.digest(), "{packages:?}");
        before = set;
    }
}

#[tokio::test]
async fn a_set_from_before_refreshes_existed_still_answers() {
    let question = r#"{"channels":["https://channel/"],"glibc":"2.28","platforms":["linux-64"],"specs":["flux-core"]}"#;
    let packages = Packages {
        channels: vec!["https://channel/".to_owned()],
        specs: vec!["flux-core".to_owned()],
        ..Packages::default()
    };
    let set = PackageSet::Lock { lock: String::new(), question: question.to_owned() };
    assert!(answers(&set, &packages));
    assert!(!answers(&set, &Packages { refresh: Some("now".to_owned()), ..packages }));
}

#[tokio::test]
async fn a_list_is_published_as_a_lock_and_a_lock_unchanged() {
    let client = api().await;
    let url = "https://channel/linux-64/flux-core-0.88.0-h_0.conda";
    let list = format!("# platform: linux-64\n@EXPLICIT\n{url}#{}\n", "a".repeat(64));
    let packages = Packages { lock: Some(list.clone()), ..Packages::default() };
    let first = settled(&mut Resolver::default(), &client, &packages, &["linux-64"]).await.unwrap();
    let PackageSet::Lock { lock, .. } = &first else { panic!("not a lock") };
    assert!(!lock.contains("@EXPLICIT") && lock.contains(url), "{lock}");

    let packages = Packages { lock: Some(lock.clone()), ..Packages::default() };
    let second = settled(&mut Resolver::default(), &client, &packages, &["linux-64"]).await.unwrap();
    assert_eq!(second.digest(), first.digest());

    let other = Packages { lock: Some(list.replace("h_0", "h_1")), ..Packages::default() };
    let third = settled(&mut Resolver::default(), &client, &other, &["linux-64"]).await.unwrap();
    assert_ne!(third.digest(), first.digest());
}
