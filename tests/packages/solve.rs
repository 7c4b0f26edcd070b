//! What the planner asks and gets.

use super::*;

#[tokio::test]
async fn a_lock_names_its_channel_and_no_local_path() {
    let channel = Channel::with_flux();
    let set = resolve(&asked(&channel.file_url(), &["flux-core"])).await.unwrap();
    let PackageSet::Lock { lock, question } = &set else { panic!("not a lock") };
    assert!(lock.contains(&channel.path().display().to_string()), "{lock}");
    assert!(!lock.contains("/proc/"), "{lock}");
    let asked = asked(&channel.file_url(), &["flux-core"]);
    assert_eq!(*question, locks::question::question(&asked, &[PLATFORM.to_owned()]));
    assert!(locks::estimate_bytes(&set, PLATFORM) > 4 * 300_000);
}

#[tokio::test]
async fn solving_twice_gives_the_same_digest() {
    let channel = Channel::with_flux();
    let asked = asked(&channel.file_url(), &["flux-core"]);
    assert_eq!(resolve(&asked).await.unwrap().digest(), resolve(&asked).await.unwrap().digest());
}

#[test]
fn the_question_changes_only_with_the_fields_that_solving_uses() {
    let ask = |packages: &Packages, platforms: &[&str]| {
        locks::question::question(packages, &platforms.iter().map(|p| (*p).to_owned()).collect::<Vec<_>>())
    };
    let default = ask(&Packages::default(), &["linux-64"]);
    assert_eq!(default, ask(&Packages::default(), &["linux-64", "linux-64"]));
    assert_eq!(ask(&Packages::default(), &["a", "b"]), ask(&Packages::default(), &["b", "a"]));
    assert_ne!(default, ask(&Packages::default(), &["linux-64", "linux-aarch64"]));
    let pinned = Packages { platforms: vec!["linux-64".to_owned()], ..Packages::default() };
    assert_eq!(default, ask(&pinned, &["linux-aarch64"]));
    assert_ne!(default, ask(&asked("https://host/channel", &[]), &["linux-64"]));
    let glibc = Packages { glibc: Some("2.34".to_owned()), ..Packages::default() };
    assert_ne!(default, ask(&glibc, &["linux-64"]));
}

#[tokio::test]
async fn a_missing_channel_is_named_in_a_transient_error() {
    let unused = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/lost", unused.local_addr().unwrap());
    drop(unused);
    let there = Channel::with_flux();
    let mut asked = asked(&there.file_url(), &["flux-core"]);
    asked.channels.push(url.clone());
    let error = resolve(&asked).await.unwrap_err();
    assert!(error.to_string().contains(&url), "{error}");
    assert!(!error.to_string().contains(&there.file_url()), "{error}");
    assert!(error.is_transient());
}

#[tokio::test]
async fn unsatisfiable_specs_are_named_in_a_permanent_error() {
    let mut channel = Channel::with_flux();
    channel.add("newer", ".conda", &["__glibc >=2.40"], &[Content::plain("x", b"x")]);
    let url = channel.file_url();
    for (specs, named) in [
        (&["flux-core", "flux-nonsense"][..], "flux-nonsense"),
        (&["flux-core >=7"][..], "flux-core"),
        (&["newer"][..], "__glibc"),
    ] {
        let error = resolve(&asked(&url, specs)).await.unwrap_err();
        assert!(error.to_string().contains(named), "{error}");
        assert!(!error.is_transient(), "{error}");
    }
    let newer = Packages { glibc: Some("2.41".to_owned()), ..asked(&url, &["newer"]) };
    resolve(&newer).await.unwrap();
}

#[tokio::test]
async fn an_invalid_question_is_refused_by_name() {
    let channel = Channel::with_flux();
    for (packages, named) in [
        (asked("conda-forge", &[]), "conda-forge"),
        (asked("ftp://host/channel", &[]), "ftp://host/channel"),
        (asked(&channel.file_url(), &["flux-core >=>1"]), "flux-core >=>1"),
        (asked(&channel.file_url(), &["https://host/x-1.0-0.conda"]), "https://host/x-1.0-0.conda"),
        (Packages { platforms: vec!["win-64".to_owned()], ..Packages::default() }, "win-64"),
        (Packages { glibc: Some("new!".to_owned()), ..Packages::default() }, "new!"),
        (Packages { lock: Some("nonsense: [".to_owned()), ..Packages::default() }, "packages.lock"),
    ] {
        let error = resolve(&packages).await.unwrap_err();
        assert!(error.to_string().contains(named), "{error}");
        assert!(!error.is_transient(), "{error}");
    }
}

#[tokio::test]
async fn a_valid_lock_is_used_as_it_is() {
    let channel = Channel::with_flux();
    let PackageSet::Lock { lock, .. } = resolve(&asked(&channel.file_url(), &["flux-core"])).await.unwrap() else {
        panic!("not a lock")
    };
    let given = |lock: String| Packages { lock: Some(lock), ..Packages::default() };
    let PackageSet::Lock { lock: taken, .. } = resolve(&given(lock.clone())).await.unwrap() else {
        panic!("not a lock")
    };
    assert_eq!(taken, lock);
    let without = lock.lines().filter(|l| !l.contains("sha256:")).map(|l| format!("{l}\n")).collect::<String>();
    let error = resolve(&given(without)).await.unwrap_err();
    assert!(error.to_string().contains("has no sha256"), "{error}");
    let other = Packages { platforms: vec!["linux-aarch64".to_owned()], ..given(lock) };
    let error = resolve(&other).await.unwrap_err();
    assert!(error.to_string().contains("no packages for platform linux-aarch64; it has linux-64"), "{error}");
}
