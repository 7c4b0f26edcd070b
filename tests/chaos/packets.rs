//! Packets that do not arrive: rules of iptables, taken off again when they are dropped.

use std::{
    path::Path,
    process::{Command, Stdio},
};

/// One rule in a network namespace.
pub struct Rule {
    /// The process in whose network namespace it is; None: the machine's.
    within: Option<i32>,
    rule: Vec<String>,
}

impl Rule {
    /// `rule` begins with the chain.
    pub fn new(within: Option<i32>, rule: &[&str]) -> Self {
        let rule = Self { within, rule: rule.iter().map(|word| (*word).to_owned()).collect() };
        assert!(rule.iptables("-I"), "iptables does not take {:?}", rule.rule);
        rule
    }

    fn iptables(&self, verb: &str) -> bool {
        iptables(self.within, verb).args(&self.rule).stdout(Stdio::null()).status().is_ok_and(|status| status.success())
    }
}

/// Takes off what a suite that was killed has left: a later bridge of the same name would suffer from it.
pub fn clear() {
    let shown = iptables(None, "-S").arg("INPUT").output().expect("iptables");
    for rule in String::from_utf8_lossy(&shown.stdout).lines() {
        let words: Vec<_> = rule.split_whitespace().collect();
        let bridge = words.iter().skip_while(|word| **word != "-i").nth(1);
        let is_left = |bridge: &&str| bridge.starts_with("fxd") && !Path::new("/sys/class/net").join(bridge).exists();
        if bridge.is_some_and(is_left) {
            iptables(None, "-D").args(&words[1..]).status().expect("iptables");
        }
    }
}

/// In the network namespace of a process, or in the machine's. It waits for its turn.
fn iptables(place: Option<i32>, verb: &str) -> Command {
    let mut command = match place {
        None => Command::new("iptables"),
        Some(pid) => {
            let mut command = Command::new("nsenter");
            command.args(["--target", &pid.to_string(), "--net", "iptables"]);
            command
        }
    };
    command.args(["-w", "10", verb]);
    command
}

impl Drop for Rule {
    fn drop(&mut self) {
        // A node that is off has taken its namespace along.
        if self.within.is_none_or(super::processes::is_there) && !self.iptables("-D") {
            eprintln!("the rule {:?} could not be taken off", self.rule);
        }
    }
}
