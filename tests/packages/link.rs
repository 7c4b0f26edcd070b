//! What is in `envs/` is whole, whatever happened on the way.

use super::*;
use stage::launch::HostPlaces;

#[tokio::test]
async fn a_channel_becomes_an_environment_with_the_final_prefix_in_it() {
    let channel = Channel::with_flux();
    let server = Server::start(channel.path()).await;
    for url in [server.url().to_owned(), channel.file_url()] {
        let host = Host::new();
        let set = resolve(&asked(&url, &["flux-core"])).await.unwrap();
        let fetched = host.fetch(&set).await.unwrap();
        assert_eq!(fetched.archives, 2);
        assert_eq!(fetched.fetched_bytes, fetched.bytes);
        let linked = host.link(&set).await.unwrap();
        assert_eq!(linked.compiled_prefix, None);
        assert!(linked.bytes > 300_000);

        let environment = host.environment(&set);
        let flux = environment.join("bin/flux");
        let text = fs::read_to_string(&flux).unwrap();
        assert_eq!(text, format!("#!/bin/sh\necho {}/etc\n", environment.display()));
        assert!(fs::metadata(flux).unwrap().permissions().mode() & 0o111 != 0);
        let library = fs::read(environment.join("lib/libflux.so")).unwrap();
        let baked = environment.join("etc").into_os_string().into_encoded_bytes();
        assert!(library.windows(baked.len()).any(|w| w == baked), "the binary does not name its prefix");
        assert!(
            !fs::read_to_string(environment.join("conda-meta/flux-core-1.0-0.json")).unwrap().contains(".partial\"")
        );
        assert_eq!(host.envs(), [set.digest()], "nothing but the environment is left");
        assert_eq!(packages::ready(host.prefix()), [set.digest()]);
    }
}

#[tokio::test]
async fn packages_without_flux_never_go_live() {
    let channel = Channel::with_flux();
    let set = resolve(&asked(&channel.file_url(), &["libflux"])).await.unwrap();
    let host = Host::new();
    host.fetch(&set).await.unwrap();
    let refusal = host.link(&set).await.unwrap_err();
    assert!(refusal.message.contains("has no bin/flux") && !refusal.transient, "{refusal}");
    assert!(host.envs().is_empty(), "{:?}", host.envs());
}

#[tokio::test]
async fn a_killed_link_is_finished_by_the_next_one() {
    let channel = Channel::with_flux();
    let set = resolve(&asked(&channel.file_url(), &["flux-core"])).await.unwrap();
    let host = Host::new();
    host.fetch(&set).await.unwrap();
    let envs = host.prefix().join("envs");
    for left in [format!(".{}.partial", set.digest()), ".0123.partial".into(), format!(".{}.unpacked", set.digest())] {
        fs::create_dir_all(envs.join(&left).join("bin")).unwrap();
        fs::write(envs.join(&left).join("bin/flux"), "half").unwrap();
    }
    assert!(packages::ready(host.prefix()).is_empty(), "what is half-done is not ready");
    let linked = host.link(&set).await.unwrap();
    assert_eq!(host.envs(), [set.digest()]);
    // Given again, it changes nothing.
    let flux = host.environment(&set).join("bin/flux");
    let before = fs::metadata(&flux).unwrap().modified().unwrap();
    fs::remove_dir_all(host.pkgs()).unwrap();
    assert_eq!(host.link(&set).await.unwrap(), linked);
    assert_eq!(fs::metadata(&flux).unwrap().modified().unwrap(), before);
}

/// Not a promise of its own: the process that the next test kills.
#[test]
#[ignore = "runs in a child of another test"]
fn linking_child() {
    let Ok(order) = std::env::var("TEST_LINK_ORDER") else { return };
    let order = serde_json::from_str::<LinkOrder>(&order).unwrap();
    packages::link(&order, &HostPlaces::of_host(), &mut |progress| eprintln!("{} {}", progress.what, progress.done))
        .unwrap();
}

#[tokio::test]
async fn a_link_can_be_killed_at_any_step_and_leaves_nothing_live() {
    use std::io::BufRead;
    let channel = Channel::with_flux();
    let set = resolve(&asked(&channel.file_url(), &["flux-core"])).await.unwrap();
    let host = Host::new();
    host.fetch(&set).await.unwrap();
    let order = LinkOrder {
        prefix: host.prefix().to_owned(),
        digest: set.digest(),
        set: set.clone(),
        platform: PLATFORM.to_owned(),
        follow: false,
    };
    for step in ["unpacking packages 1", "unpacking packages 2", "linking packages 2", "syncing"] {
        let mut child = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "link::linking_child", "--ignored", "--nocapture"])
            .env("TEST_LINK_ORDER", serde_json::to_string(&order).unwrap())
            .stdout(std::process::Stdio::null())
            .stderr(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let lines = io::BufReader::new(child.stderr.take().unwrap()).lines();
        let reached = lines.map_while(Result::ok).any(|line| line.starts_with(step));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(reached, "never came to {step}");
        // The last step is so short that the kill may be too late; then all of it is there.
        for digest in packages::ready(host.prefix()) {
            assert!(host.prefix().join("envs").join(&digest).join("share/big").exists());
            fs::remove_dir_all(host.prefix().join("envs").join(digest)).unwrap();
        }
    }
    host.link(&set).await.unwrap();
    assert_eq!(host.envs(), [set.digest()]);
}

#[tokio::test]
async fn no_edit_in_an_environment_reaches_an_archive_or_another_environment() {
    use std::os::unix::fs::MetadataExt;
    let channel = Channel::with_flux();
    let set = resolve(&asked(&channel.file_url(), &["flux-core"])).await.unwrap();
    let host = Host::new();
    host.fetch(&set).await.unwrap();
    host.link(&set).await.unwrap();
    assert_eq!(fs::metadata(host.environment(&set).join("share/flux")).unwrap().nlink(), 1);
}

#[tokio::test]
async fn a_digest_can_not_lead_out_of_the_prefix() {
    let channel = Channel::with_flux();
    let set = resolve(&asked(&channel.file_url(), &["flux-core"])).await.unwrap();
    let host = Host::new();
    for digest in ["../../etc", "", "ABC", "a/b"] {
        let order = LinkOrder {
            prefix: host.prefix().to_owned(),
            digest: digest.to_owned(),
            set: set.clone(),
            platform: PLATFORM.to_owned(),
            follow: false,
        };
        let refused = tokio::task::spawn_blocking(move || packages::link(&order, &HostPlaces::of_host(), &mut |_| ()))
            .await
            .unwrap();
        assert!(!refused.unwrap_err().transient);
    }
    let order = LinkOrder {
        prefix: "relative".into(),
        digest: set.digest(),
        set: set.clone(),
        platform: PLATFORM.to_owned(),
        follow: false,
    };
    let refused =
        tokio::task::spawn_blocking(move || packages::link(&order, &HostPlaces::of_host(), &mut |_| ())).await.unwrap();
    assert!(refused.unwrap_err().message.contains("relative is not an absolute path"));
    let refusal = host.link_for(&set, "linux-aarch64").await.unwrap_err();
    assert!(refusal.message.contains("linux-aarch64"), "{refusal}");
}
