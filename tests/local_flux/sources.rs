//! Where the packages come from.

use crate::{
    harness::{Cluster, is_able},
    instance::is_one_instance,
};

#[test]
fn a_conda_channel_gives_the_same_instance() {
    if !is_able() {
        return;
    }
    let Ok(channel) = std::env::var("FLUX_TEST_CHANNEL") else {
        return eprintln!("skipped: FLUX_TEST_CHANNEL names no channel with flux-core, flux-sched and mpich");
    };
    let begin = std::time::Instant::now();
    let cluster = Cluster::start(2, &["--channel", &channel]);
    eprintln!("measured: {:.1} s from nothing to two nodes from the channel {channel}", begin.elapsed().as_secs_f64());
    is_one_instance(&cluster, 2);
    let barrier = cluster.exec("node2", &["flux", "run", "-N2", "flux", "pmi", "barrier"]);
    assert!(barrier.contains("completed pmi barrier on 2 tasks"), "{barrier}");
}
