//! Builds the text of the broker's unit, for hosts with systemd. Pure.

use std::{
    fmt::Write,
    path::{Path, PathBuf},
};

use super::command::LEAD_STOP_SECS;
use host::{core_dump, log, users::User};
use hostapi::LaunchOrder;

/// The broker's unit.
pub const SERVICE: &str = "flux-broker.service";
/// Drop-in that sets the slice's weight, because the slice itself may belong to other software.
pub const SLICE_DROP_IN: &str = "flux.slice.d/50-flux-distribute.conf";

/// Seconds from SIGTERM to SIGKILL for a follower, whatever stops the unit (the host does at its shutdown). The lead
/// needs more time, to write its queue.
const TIMEOUT_STOP_SECS: u64 = 120;

/// systemd can't start a service as this user.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error(
    "systemd starts nothing as user {uid}, which has no entry in the host's /etc/passwd, and the host has no setpriv; add an entry, or set spec.broker.runAs to a user that has one"
)]
pub struct UnknownUser {
    /// uid of the user.
    pub uid: u32,
}

/// The unit for the broker that `order` describes. systemd refuses a user without an entry in /etc/passwd (status
/// 217/USER), so the host's setpriv(1), at the path `setpriv`, becomes that user and then the broker, in the same
/// process.
///
/// Restart=no, because only the agent may restart the broker: it checks first whether the rank still belongs to this
/// node. A host that was cut off for long would push another node out of its rank. Type=exec, because conda's Flux
/// can't notify systemd. IgnoreSIGPIPE=no, because jobs would inherit the default.
///
/// # Errors
/// [`UnknownUser`] if the user has no entry and there is no setpriv.
pub fn service(order: &LaunchOrder, user: &User, setpriv: Option<&Path>) -> Result<String, UnknownUser> {
    let mut text = String::from(
        "# Made by flux-distribute; gone with the next boot.
[Unit]
Description=Flux message broker
Documentation=man:flux-broker(1)
After=network.target
StartLimitIntervalSec=0

[Service]
Type=exec
",
    );
    let mut argv = order.argv.clone();
    if user.uid != 0 && !user.known {
        let setpriv = setpriv.ok_or(UnknownUser { uid: user.uid })?;
        let (user, group) = (format!("--reuid={}", user.uid), format!("--regid={}", user.gid));
        let become_user = [setpriv.display().to_string(), user, group, "--clear-groups".to_owned(), "--".to_owned()];
        argv.splice(0..0, become_user);
    }
    let words: Vec<String> = argv.iter().map(|word| command_word(word)).collect();
    let _ = writeln!(text, "ExecStart={}", words.join(" "));
    for (name, value) in &order.env {
        let _ = writeln!(text, "Environment={}", quoted(&format!("{name}={value}")));
    }
    if user.uid != 0 && user.known {
        let _ = writeln!(text, "User={}", user.uid);
    }
    let escaped = |path: PathBuf| path.display().to_string().replace('%', "%%");
    let (log, home) = (escaped(log::path(&order.prefix)), escaped(log::directory(&order.prefix)));
    let _ = write!(
        text,
        "WorkingDirectory=-{home}
UMask=0022
StandardInput=null
StandardOutput=append:{log}
StandardError=append:{log}
IgnoreSIGPIPE=no
Slice=flux.slice
CPUWeight={weight}
KillMode=mixed
TimeoutStopSec={stop}
Delegate=yes
OOMPolicy=continue
OOMScoreAdjust=0
TasksMax=infinity
LimitNOFILE=1048576
LimitMEMLOCK=infinity
LimitCORE={core}:infinity
Restart=no
SuccessExitStatus=42
",
        core = core_dump::SOFT_LIMIT,
        weight = order.cpu_weight,
        stop = if order.record.rank == 0 { LEAD_STOP_SECS } else { TIMEOUT_STOP_SECS },
    );
    Ok(text)
}

/// Drop-in with the weight of flux.slice, because that slice competes with kubepods.
pub fn slice(cpu_weight: u32) -> String {
    format!("# Made by flux-distribute; gone with the next boot.\n[Slice]\nCPUWeight={cpu_weight}\n")
}

/// Quotes a word for ExecStart, in which systemd also expands `$`.
fn command_word(word: &str) -> String {
    let plain = |character: char| character.is_ascii_alphanumeric() || "/.,:=_+@-".contains(character);
    if !word.is_empty() && word.chars().all(plain) { word.to_owned() } else { quoted(&word.replace('$', "$$")) }
}

fn quoted(text: &str) -> String {
    let mut out = String::from("\"");
    for character in text.chars() {
        match character {
            '\\' => out.push_str("\\\\"),
            '"' => out.push_str("\\\""),
            '%' => out.push_str("%%"),
            '\n' => out.push_str("\\n"),
            '\t' => out.push_str("\\t"),
            other => out.push(other),
        }
    }
    out.push('"');
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use hostapi::LaunchRecord;

    fn order(argv: &[&str], run_as: &str) -> LaunchOrder {
        LaunchOrder {
            prefix: "/opt/flux-distribute".into(),
            argv: argv.iter().map(|word| (*word).to_owned()).collect(),
            env: [("LANG".to_owned(), "C.UTF-8".to_owned()), ("ODD".to_owned(), "a \"b\" 5% $HOME \\".to_owned())]
                .into(),
            run_as: run_as.to_owned(),
            cpu_weight: 500,
            record: LaunchRecord { rank: 1, broker_name: "node1".to_owned(), epoch: 1, ..LaunchRecord::default() },
        }
    }

    #[test]
    fn the_unit_is_the_one_that_was_tested() {
        let argv = ["/opt/flux-distribute/envs/0123/bin/flux", "broker", "-Shostname=node1", "-Sbroker.rc2_none"];
        let flux = User { uid: 998, gid: 997, groups: vec![44], known: true, ..User::root() };
        let expected = r#"# Made by flux-distribute; gone with the next boot.
[Unit]
Description=Flux message broker
Documentation=man:flux-broker(1)
After=network.target
StartLimitIntervalSec=0

[Service]
Type=exec
ExecStart=/opt/flux-distribute/envs/0123/bin/flux broker -Shostname=node1 -Sbroker.rc2_none
Environment="LANG=C.UTF-8"
Environment="ODD=a \"b\" 5%% $HOME \\"
User=998
WorkingDirectory=-/opt/flux-distribute/log
UMask=0022
StandardInput=null
StandardOutput=append:/opt/flux-distribute/log/broker.log
StandardError=append:/opt/flux-distribute/log/broker.log
IgnoreSIGPIPE=no
Slice=flux.slice
CPUWeight=500
KillMode=mixed
TimeoutStopSec=120
Delegate=yes
OOMPolicy=continue
OOMScoreAdjust=0
TasksMax=infinity
LimitNOFILE=1048576
LimitMEMLOCK=infinity
LimitCORE=1:infinity
Restart=no
SuccessExitStatus=42
"#;
        assert_eq!(service(&order(&argv, "flux"), &flux, None).unwrap(), expected);
        assert!(!service(&order(&argv, "root"), &User::root(), None).unwrap().contains("User="));
        let mut lead = order(&argv, "root");
        lead.record.rank = 0;
        assert!(service(&lead, &User::root(), None).unwrap().contains("\nTimeoutStopSec=405\n"));
        assert!(slice(500).ends_with("[Slice]\nCPUWeight=500\n"));
    }

    #[test]
    fn setpriv_becomes_a_user_without_an_entry() {
        let bare = User { uid: 54321, gid: 54321, ..User::root() };
        let order = order(&["/env/bin/flux", "broker"], "54321");
        let text = service(&order, &bare, Some(Path::new("/usr/bin/setpriv"))).unwrap();
        let expected =
            "ExecStart=/usr/bin/setpriv --reuid=54321 --regid=54321 --clear-groups -- /env/bin/flux broker\n";
        assert!(text.contains(expected) && !text.contains("User="), "{text}");
        assert_eq!(service(&order, &bare, None), Err(UnknownUser { uid: 54321 }));
    }

    #[test]
    fn words_reach_the_broker_unchanged() {
        for (word, expected) in [
            ("-Stbon.topo=kary:256", "-Stbon.topo=kary:256"),
            ("a b", r#""a b""#),
            ("", r#""""#),
            (";", r#"";""#),
            ("$HOME", r#""$$HOME""#),
            ("100%h", r#""100%%h""#),
            (r#"say "x\y""#, r#""say \"x\\y\"""#),
            ("two\nlines", r#""two\nlines""#),
            ("'q'", r#""'q'""#),
        ] {
            assert_eq!(command_word(word), expected);
        }
    }
}
