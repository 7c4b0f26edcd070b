//! A disk without room, where an agent and a broker write.

use std::{
    process::{Command, Stdio},
    thread::sleep,
    time::Duration,
};

use api::{FluxNode, NodePhase};
use nix::sys::signal::Signal;

use super::{Row, SELDOM, row};
use crate::{
    processes::send,
    scene::{Hit, Scene},
};

const PREFIX: &str = "/opt/flux-distribute";
/// The file that takes the room.
const FILLER: &str = "/opt/flux-distribute/filler";

pub fn rows() -> Vec<Row> {
    vec![
        Row {
            fresh: true,
            ..row("disk full", |scene| {
                let node = scene.pick_node();
                let _full = Full::new(scene, &node);
                scene.agents()[&node].kill();
                let pause = scene.dice.time(Duration::from_secs(3), Duration::from_secs(15));
                sleep(pause);
                Hit::none()
            })
        },
        Row {
            runs: SELDOM,
            job_dies: true,
            fresh: true,
            ..row("disk full, a follower's broker killed", |scene| {
                let node = scene.pick_follower();
                let before = scene.brokers()[&node];
                let _full = Full::new(scene, &node);
                send(before.pid, Signal::SIGKILL);
                scene.until("the broker's return", Duration::from_secs(30), |scene| {
                    let now = scene.brokers().get(&node).copied();
                    now.filter(|now| now.pid != before.pid).ok_or_else(|| "it is not there".to_owned())
                });
                Hit::brokers_of([node.clone()])
            })
        },
        Row {
            runs: SELDOM,
            job_dies: true,
            fresh: true,
            ..row("disk full, a follower's broker killed after the roster has changed", |scene| {
                let node = scene.pick_follower();
                let full = Full::new(scene, &node);
                scene.cluster.must(&["add-node"]);
                scene.nodes += 1;
                scene.cluster.all_online(scene.nodes);
                send(scene.brokers()[&node].pid, Signal::SIGKILL);
                scene.until("the file that can't be written", Duration::from_mins(1), |scene| {
                    let found = scene.cluster.wait(scene.cluster.api::<FluxNode>().get(&node));
                    let status = found.map_err(|error| error.to_string())?.status.unwrap_or_default();
                    let told = status.message.unwrap_or_default();
                    let is_told = told.contains(PREFIX) && told.contains("No space");
                    if is_told && status.phase != NodePhase::Online { Ok(()) } else { Err(told) }
                });
                assert!(!scene.brokers().contains_key(&node), "it runs by the roster before");
                drop(full);
                Hit::brokers_of([node])
            })
        },
    ]
}

/// The prefix on a file system without room. Only what holds the environments, to which nothing writes, stays where it is, and
/// the lead's statedir: where that is full Flux itself says "content store: No space left on device" and loses its queue.
const FILL: &str = r#"
mkdir /run/beneath
mount --bind "$0" /run/beneath
mount -t tmpfs -o mode=755 full "$0"
cd /run/beneath
for name in *; do
    case $name in
    envs|state) mkdir "$0/$name"; mount --bind "$name" "$0/$name";;
    *) cp -a "$name" "$0";;
    esac
done
cd /
umount /run/beneath
rmdir /run/beneath
mount -o remount,size=$(($(du -skx "$0" | cut -f 1) + 512))k "$0"
dd if=/dev/zero of="$1" bs=4k 2>/dev/null || test -s "$1"
"#;

/// A node's prefix, until there is room again.
struct Full(i32);

impl Full {
    fn new(scene: &Scene, node: &str) -> Self {
        let full = Self(scene.init(node));
        assert!(full.run(&["sh", "-ec", FILL, PREFIX, FILLER]), "{PREFIX} can't be filled on {node}");
        full
    }

    fn run(&self, words: &[&str]) -> bool {
        let mut command = Command::new("nsenter");
        command.args(["--target", &self.0.to_string(), "--mount"]).args(words).stdin(Stdio::null());
        command.status().is_ok_and(|status| status.success())
    }
}

impl Drop for Full {
    /// There is room again; what was written meanwhile stays.
    fn drop(&mut self) {
        if !self.run(&["rm", "-f", FILLER]) {
            eprintln!("{PREFIX} stays full");
        }
    }
}
