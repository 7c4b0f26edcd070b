//! A disk without room, where an agent and a broker write.

use std::{
    process::{Command, Stdio},
    thread::sleep,
    time::Duration,
};

use nix::sys::signal::Signal;

use super::{Row, SELDOM, row};
use crate::{
    processes::send,
    scene::{Hit, Scene},
};

/// What is written to after an installation, in a node's own mount namespace.
const WRITTEN: [&str; 2] = ["/opt/flux-distribute/etc", "/opt/flux-distribute/log"];

pub fn rows() -> Vec<Row> {
    vec![
        Row {
            fresh: true,
            ..row("disk full", |scene| {
                let node = scene.pick_follower();
                let _full = Full::new(scene, &node);
                scene.agents()[&node].kill();
                let pause = scene.dice.time(Duration::from_secs(3), Duration::from_secs(15));
                sleep(pause);
                Hit::nobody()
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
    ]
}

/// A file system without room over each of these directories, with what was in them.
struct Full(i32);

impl Full {
    fn new(scene: &Scene, node: &str) -> Self {
        let full = Self(scene.init(node));
        for path in WRITTEN {
            let script = "cp -a \"$0\" /run/copy && mount -t tmpfs -o size=512k,mode=755 full \"$0\" && cp -a /run/copy/. \"$0\" \
                          && rm -r /run/copy && (dd if=/dev/zero of=\"$0\"/filler bs=4k 2>/dev/null; test -s \"$0\"/filler)";
            assert!(full.run(&["sh", "-c", script, path]), "{path} can't be filled on {node}");
        }
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
        for path in WRITTEN {
            if !self.run(&["rm", "-f", &format!("{path}/filler")]) {
                eprintln!("{path} stays full");
            }
        }
    }
}
