//! How a broker is started: its command line and environment, out of the roster. Pure.

use std::{collections::BTreeMap, path::Path};

use serde_json::json;
use sha2::{Digest, Sha256};

use api::{BROKER_RUN_DIR, BROKER_URI, EpochSettings, Rank};
use host::{HOST_PATH, state};
use hostapi::{LaunchOrder, LaunchRecord};

/// How the script for people begins: a file at the host's root that does is ours, whatever is remembered of it.
pub const CONNECT_HEADER: &str = "#!/bin/sh\n# Opens a shell in the Flux instance of this node";
/// What the lead's broker runs with, below the prefix: `model::names::live_configuration`, JSON.
pub const LIVE_CONFIGURATION: &str = "etc/live.json";
/// Searched for more of Flux's rc1 tasks (flux-modprobe(1)), below the prefix.
const MODPROBE: &str = "etc/modprobe";
/// The task that loads [`LIVE_CONFIGURATION`], below the prefix.
pub const RC1_TASK: &str = "etc/modprobe/rc1.d/flux-distribute.py";
/// How long the lead gives its jobs to end once it is to stop (`broker.cleanup-timeout`).
const CLEANUP_SECS: u64 = 45;
/// How long a broker waits for its children to leave (`broker.shutdown-timeout`). One that is cut off or hangs is given up
/// by TCP (`tcp_user_timeout`, 2 minutes), or at the end of this.
const SHUTDOWN_MINUTES: u64 = 5;
/// SIGTERM to SIGKILL, seconds, of a lead whose queue is to be kept: first cleanup, then the wait for the children, and only
/// then rc3 writes the KVS. One that is killed before has lost all since its last checkpoint, pending jobs too.
pub const LEAD_STOP_SECS: u64 = CLEANUP_SECS + SHUTDOWN_MINUTES * 60 + 60;

/// Which broker, where, for whom.
#[derive(Clone, Copy, Debug)]
pub struct BrokerIdentity<'a> {
    /// From preflight.
    pub prefix: &'a Path,
    /// Rank.
    pub rank: Rank,
    /// Its `hostname` attribute.
    pub broker_name: &'a str,
    /// uid of the Node.
    pub node_uid: &'a str,
    /// uid of the FluxInstance.
    pub instance_uid: &'a str,
    /// The Flux instance.
    pub instance_id: &'a str,
    /// Epoch.
    pub epoch: u64,
    /// The lead loads [`LIVE_CONFIGURATION`] at its start.
    pub loads_live_configuration: bool,
}

/// A broker attribute (flux-broker-attributes(7)) on the command line.
struct Attribute {
    name: &'static str,
    /// None: by its mere name.
    value: Option<String>,
    /// Only the lead has use for it.
    lead_only: bool,
}

/// As flux-core's own unit starts a system instance (etc/flux.service.in), without what needs libsystemd. An attribute that
/// a broker does not know is fatal since 0.82: all of these are in the attribute table of 0.82, the first with `hostname`,
/// without which a broker can't be told its name, and are there in 0.88 still. One that is younger needs a look at the
/// version that the package set has.
fn attributes(identity: &BrokerIdentity<'_>) -> Vec<Attribute> {
    let known = |name, value: Option<&str>| Attribute { name, value: value.map(str::to_owned), lead_only: false };
    let lead = |name, value| Attribute { lead_only: true, ..known(name, Some(value)) };
    let state = identity.prefix.join("state").display().to_string();
    let (cleanup, shutdown) = (CLEANUP_SECS.to_string(), format!("{SHUTDOWN_MINUTES}m"));
    vec![
        known("hostname", Some(identity.broker_name)),
        known("rundir", Some(BROKER_RUN_DIR)),
        known("local-uri", Some(BROKER_URI)),
        lead("statedir", &state),
        // A broker says on its own node why it does not come up; nothing is sent to the lead's log.
        known("log-stderr-level", Some("6")),
        known("log-stderr-mode", Some("local")),
        known("log-forward-level", Some("-1")),
        known("broker.rc2_none", None),
        // The default is all ranks: the lead would wait for every spare.
        known("broker.quorum", Some("1")),
        known("broker.quorum-warn", Some("none")),
        known("broker.cleanup-timeout", Some(&cleanup)),
        known("broker.shutdown-timeout", Some(&shutdown)),
        known("broker.exit-norestart", Some("42")),
        known("broker.module-nopanic", Some("1")),
        // Collects what the content store no longer needs, at every clean stop.
        lead("content.dump", "auto"),
        lead("content.restore", "auto"),
    ]
}

/// A task of Flux's rc1 (flux-modprobe(1)), as Python: before the lead's broker looks at its resources, it loads the configuration in
/// which members have their nodes' names. If it came later, jobs might have begun on ranks that are about to be renamed.
pub fn rc1_task(prefix: &Path) -> String {
    let file = json!(prefix.join(LIVE_CONFIGURATION));
    format!(
        r#"# Made by flux-distribute: changes are overwritten.
import json

from flux.modprobe import task


@task("flux-distribute-configuration", ranks="0", before=["resource"], needs=["resource"])
def load_configuration(context):
    # Without it the broker comes up under other names, and the agent loads it then.
    try:
        with open({file}) as file:
            context.rpc("config.load", json.load(file)).get()
    except Exception as error:
        print(f"flux-distribute: can't load the live configuration: {{error}}")
"#
    )
}

/// How the broker of `identity` is started under `settings`.
pub fn launch(settings: &EpochSettings, identity: &BrokerIdentity<'_>) -> LaunchOrder {
    let bin = state::environment(identity.prefix, &settings.digest).join("bin");
    let config = identity.prefix.join("etc/broker.toml");
    let mut argv = vec![
        bin.join("flux").display().to_string(),
        "broker".to_owned(),
        format!("--config-path={}", config.display()),
    ];
    argv.extend(attributes(identity).into_iter().filter(|attribute| identity.rank == 0 || !attribute.lead_only).map(
        |Attribute { name, value, .. }| match value {
            Some(value) => format!("-S{name}={value}"),
            None => format!("-S{name}"),
        },
    ));
    let mut env: BTreeMap<String, String> = [
        ("PATH", format!("{}:{HOST_PATH}", bin.display())),
        // Not the user's home: the shells of Flux's rc scripts would read its start-up files.
        ("HOME", "/".to_owned()),
        ("LANG", "C.UTF-8".to_owned()),
    ]
    .into_iter()
    .map(|(name, value)| (name.to_owned(), value))
    .collect();
    if identity.rank == 0 && identity.loads_live_configuration {
        let modprobe = identity.prefix.join(MODPROBE).display().to_string();
        env.insert("FLUX_MODPROBE_PATH_APPEND".to_owned(), modprobe);
    }

    let record = LaunchRecord {
        rank: identity.rank,
        broker_name: identity.broker_name.to_owned(),
        node_uid: identity.node_uid.to_owned(),
        instance_uid: identity.instance_uid.to_owned(),
        instance_id: identity.instance_id.to_owned(),
        epoch: identity.epoch,
        digest: settings.digest.clone(),
        launch: fingerprint(&argv, &env, &settings.run_as, settings.cpu_weight),
    };
    LaunchOrder {
        prefix: identity.prefix.to_owned(),
        argv,
        env,
        run_as: settings.run_as.clone(),
        cpu_weight: settings.cpu_weight,
        record,
    }
}

/// Every part with its length before it, so that none can pass for a part of its neighbour.
fn fingerprint(argv: &[String], env: &BTreeMap<String, String>, run_as: &str, cpu_weight: u32) -> String {
    let mut hash = Sha256::new();
    let mut add = |part: &str| {
        hash.update((part.len() as u64).to_be_bytes());
        hash.update(part.as_bytes());
    };
    add(&argv.len().to_string());
    argv.iter().for_each(|word| add(word));
    for (name, value) in env {
        add(name);
        add(value);
    }
    add(run_as);
    add(&cpu_weight.to_string());
    hex::encode(hash.finalize())
}

/// What Flux shows of ranks without a member looks like a failure to whoever doesn't know of them.
pub const SPARES_EXPLAINED: &str = "flux-spare-N: a rank that is kept free for a node that may join; Flux lists it as down, and nothing is wrong with it";

/// The script for people on the host. Only the owner of the brokers may use the instance, so root becomes the owner. A shell for
/// a person begins with a greeting; a command's output is left alone.
pub fn connect_script(environment: &Path, run_as: &str) -> String {
    let bin = environment.join("bin");
    let bin = bin.display();
    let become_owner = if run_as == "root" || run_as == "0" {
        String::new()
    } else {
        format!(
            "owner=$(stat -c %u {BROKER_RUN_DIR}) || exit 1\n[ \"$(id -u)\" != 0 ] || exec setpriv --reuid \"$owner\" \
             --regid \"$(stat -c %g {BROKER_RUN_DIR})\" --clear-groups \"$0\" \"$@\"\n"
        )
    };
    format!(
        "{CONNECT_HEADER}, or runs a command in it: flux-connect.sh [COMMAND...]\n\
         {become_owner}export PATH=\"{bin}:$PATH\" FLUX_URI=\"{BROKER_URI}\"\n[ $# -eq 0 ] || exec \"$@\"\n\
         [ ! -t 1 ] || echo \"{SPARES_EXPLAINED}\"\nexec \"${{SHELL:-/bin/sh}}\"\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings() -> EpochSettings {
        EpochSettings {
            max_size: 64,
            topology: "kary:256".to_owned(),
            port: 8050,
            digest: "0123456789abcdef".to_owned(),
            certificate: String::new(),
            run_as: "root".to_owned(),
            config: String::new(),
            cpu_weight: 100,
            checkpoint_period: "1m".to_owned(),
            spare_shape: None,
        }
    }

    fn identity(rank: Rank) -> BrokerIdentity<'static> {
        BrokerIdentity {
            prefix: Path::new("/opt/flux-distribute"),
            rank,
            broker_name: "node1",
            node_uid: "node-uid",
            instance_uid: "instance-uid",
            instance_id: "instance-id",
            epoch: 3,
            loads_live_configuration: true,
        }
    }

    #[test]
    fn the_command_line_is_as_it_was_tried_on_flux() {
        let order = launch(&settings(), &identity(0));
        assert_eq!(
            order.argv,
            [
                "/opt/flux-distribute/envs/0123456789abcdef/bin/flux",
                "broker",
                "--config-path=/opt/flux-distribute/etc/broker.toml",
                "-Shostname=node1",
                "-Srundir=/run/flux-distribute/broker",
                "-Slocal-uri=local:///run/flux-distribute/broker/local",
                "-Sstatedir=/opt/flux-distribute/state",
                "-Slog-stderr-level=6",
                "-Slog-stderr-mode=local",
                "-Slog-forward-level=-1",
                "-Sbroker.rc2_none",
                "-Sbroker.quorum=1",
                "-Sbroker.quorum-warn=none",
                "-Sbroker.cleanup-timeout=45",
                "-Sbroker.shutdown-timeout=5m",
                "-Sbroker.exit-norestart=42",
                "-Sbroker.module-nopanic=1",
                "-Scontent.dump=auto",
                "-Scontent.restore=auto",
            ]
        );
        let path = "/opt/flux-distribute/envs/0123456789abcdef/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
        let env: Vec<(&str, &str)> = order.env.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        let modprobe = ("FLUX_MODPROBE_PATH_APPEND", "/opt/flux-distribute/etc/modprobe");
        assert_eq!(env, [modprobe, ("HOME", "/"), ("LANG", "C.UTF-8"), ("PATH", path)]);
    }

    #[test]
    fn only_the_lead_keeps_state() {
        let order = launch(&settings(), &identity(1));
        assert!(!order.argv.iter().any(|word| word.contains("statedir") || word.contains("content.")));
        assert!(!order.env.contains_key("FLUX_MODPROBE_PATH_APPEND"));
    }

    #[test]
    fn a_start_that_would_differ_is_told_by_its_fingerprint() {
        let of = |settings: &EpochSettings, rank| launch(settings, &identity(rank)).record.launch;
        let first = of(&settings(), 1);
        assert_eq!(first, of(&settings(), 1));
        assert_eq!(first.len(), 64);
        for other in [
            of(&settings(), 0),
            of(&EpochSettings { digest: "other".to_owned(), ..settings() }, 1),
            of(&EpochSettings { run_as: "flux".to_owned(), ..settings() }, 1),
            of(&EpochSettings { cpu_weight: 101, ..settings() }, 1),
        ] {
            assert_ne!(first, other);
        }
        // What Flux reads from its configuration is compared elsewhere.
        assert_eq!(first, of(&EpochSettings { port: 9, ..settings() }, 1));
    }
}
