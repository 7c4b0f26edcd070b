//! Where the packages come from.

use crate::{
    harness::{Cluster, channel},
    instance::is_one_instance,
};

#[test]
fn a_conda_channel_gives_the_same_instance() {
    let Some(channel) = channel() else { return };
    let begin = std::time::Instant::now();
    let cluster = Cluster::start(2, &["--channel", &channel]);
    eprintln!("measured: {:.1} s from nothing to two nodes from the channel {channel}", begin.elapsed().as_secs_f64());
    is_one_instance(&cluster, 2);
    let barrier = cluster.exec("node2", &["flux", "run", "-N2", "flux", "pmi", "barrier"]);
    assert!(barrier.contains("completed pmi barrier on 2 tasks"), "{barrier}");
}
