//! Packets that do not arrive: rules of iptables, taken off again when they are dropped.

use std::process::{Command, Stdio};

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
        let mut command = match self.within {
            Some(pid) => {
                let mut command = Command::new("nsenter");
                command.args(["--target", &pid.to_string(), "--net", "iptables"]);
                command
            }
            None => Command::new("iptables"),
        };
        command.args(["-w", "10", verb]).args(&self.rule).stdout(Stdio::null());
        command.status().is_ok_and(|status| status.success())
    }
}

impl Drop for Rule {
    fn drop(&mut self) {
        // A node that is off has taken its namespace along.
        if self.within.is_none_or(super::processes::is_there) && !self.iptables("-D") {
            eprintln!("the rule {:?} could not be taken off", self.rule);
        }
    }
}
