//! Sites without internet: a bundle of a lock is a file, and the nodes' network leads nowhere.

use api::{PackageSet, Packages};
use packages::{CreateBundle, HttpClient, native_platform, resolve};

use crate::{
    harness::{Cluster, channel},
    instance::is_one_instance,
};

#[test]
fn a_bundle_of_packages_gives_the_same_instance() {
    let Some(channel) = channel() else { return };
    let channel = if channel.contains("://") { channel } else { format!("file://{channel}") };
    let directory = tempfile::tempdir().unwrap();
    let (lock, out) = (directory.path().join("lock.yml"), directory.path().join("flux.tar.gz"));
    let packages = Packages { channels: vec![channel], ..Packages::default() };
    let platforms = [native_platform().to_owned()];
    let solved = tokio::runtime::Runtime::new().unwrap().block_on(async {
        let http = HttpClient::new().unwrap();
        resolve(&packages, &platforms, &http, None, |path| std::fs::File::open(path), |_| ()).await.unwrap()
    });
    let PackageSet::Lock { lock: text, .. } = solved else { panic!("a bundle was not asked for") };
    std::fs::write(&lock, text).unwrap();
    let begin = std::time::Instant::now();
    CreateBundle { lock: Some(lock), out: out.clone(), ..CreateBundle::default() }.run().unwrap();
    eprintln!("measured: {:.1} s to make the bundle", begin.elapsed().as_secs_f64());

    let begin = std::time::Instant::now();
    let cluster = Cluster::start(2, &["--bundle", out.to_str().unwrap()]);
    eprintln!("measured: {:.1} s from nothing to two nodes from the bundle", begin.elapsed().as_secs_f64());
    // Only what the bridge is connected to.
    let routes = cluster.exec("node1", &["sh", "-c", "cat /proc/net/route"]);
    assert!(!routes.lines().skip(1).any(|route| route.split_whitespace().nth(1) == Some("00000000")), "{routes}");
    is_one_instance(&cluster, 2);
}
