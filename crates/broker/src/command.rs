//! Builds a broker's command line and environment from the roster. Pure.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use serde_json::json;
use sha2::{Digest, Sha256};

use api::{BROKER_SOCKET_DIR, BROKER_URI, EpochSettings, Rank};
use host::{HOST_PATH, state};
use hostapi::{LaunchOrder, LaunchRecord};

/// First lines of the connect script. Any file at the host's root that begins so is ours, whatever the undo list says.
pub const CONNECT_HEADER: &str = "#!/bin/sh\n# Opens a shell in the Flux instance of this node";
/// The broker's rundir below the prefix (flux-broker-attributes(7)). Flux runs batch scripts from there, and many hosts mount /run noexec.
pub const RUNDIR: &str = "run";
/// Longest rundir that Flux takes, in bytes (flux-core src/broker/rundir.c leaves room for a socket's name).
const LONGEST_RUNDIR: usize = 96;
/// Path below the prefix of the lead's live configuration: the JSON of `plan::names::live_configuration`.
pub const LIVE_CONFIGURATION: &str = "etc/live.json";
/// Directory below the prefix that Flux searches for more rc1 tasks (flux-modprobe(1)).
const MODPROBE: &str = "etc/modprobe";
/// Path below the prefix of [`rc1_tasks`].
pub const RC1_TASKS: &str = "etc/modprobe/rc1.d/flux-distribute.py";
/// How long a stopping lead waits for its jobs to end (`broker.cleanup-timeout`).
const CLEANUP_SECS: u64 = 45;
/// How long a broker waits for its children to leave (`broker.shutdown-timeout`). A child that is cut off or hangs is
/// dropped by TCP (`tcp_user_timeout`, 2 minutes), or at the end of this time.
const SHUTDOWN_MINUTES: u64 = 5;
/// Seconds from SIGTERM to SIGKILL for a lead whose queue must survive: first cleanup, then the wait for the children,
/// and only then rc3 writes the KVS. A lead that is killed earlier loses everything since its last checkpoint,
/// including pending jobs.
pub const LEAD_STOP_SECS: u64 = CLEANUP_SECS + SHUTDOWN_MINUTES * 60 + 60;

/// Identifies a broker: its host, its rank and its instance.
#[derive(Clone, Copy, Debug)]
pub struct BrokerIdentity<'a> {
    /// The prefix on its host.
    pub prefix: &'a Path,
    /// The rank that it runs for.
    pub rank: Rank,
    /// Its `hostname` attribute.
    pub broker_name: &'a str,
    /// uid of the node's Node object.
    pub node_uid: &'a str,
    /// uid of the FluxInstance.
    pub instance_uid: &'a str,
    /// ID of the Flux instance.
    pub instance_id: &'a str,
    /// The epoch in which it runs.
    pub epoch: u64,
    /// True if the lead loads [`LIVE_CONFIGURATION`] at its start.
    pub loads_live_configuration: bool,
}

/// A broker attribute (flux-broker-attributes(7)) on the command line.
struct Attribute {
    name: &'static str,
    /// None for an attribute without a value.
    value: Option<String>,
    /// True if only the lead gets it.
    lead_only: bool,
}

/// The broker's rundir on a host with that prefix. If the prefix is too long for it, the directory of the socket, where it always was before.
pub fn rundir(prefix: &Path) -> PathBuf {
    let below = prefix.join(RUNDIR);
    if below.as_os_str().len() <= LONGEST_RUNDIR { below } else { BROKER_SOCKET_DIR.into() }
}

/// The attributes of flux-core's own unit for a system instance (etc/flux.service.in), without those that need
/// libsystemd. An attribute that a broker does not know is fatal since 0.82. All of these are in the attribute tables
/// of 0.82 (the first version with `hostname`, which we need to name a broker) and 0.88. Before you add a newer one,
/// check which versions of Flux have it.
fn attributes(identity: &BrokerIdentity<'_>) -> Vec<Attribute> {
    let known = |name, value: Option<&str>| Attribute { name, value: value.map(str::to_owned), lead_only: false };
    let lead = |name, value| Attribute { lead_only: true, ..known(name, Some(value)) };
    let state = identity.prefix.join("state").display().to_string();
    let rundir = rundir(identity.prefix).display().to_string();
    let (cleanup, shutdown) = (CLEANUP_SECS.to_string(), format!("{SHUTDOWN_MINUTES}m"));
    vec![
        known("hostname", Some(identity.broker_name)),
        known("rundir", Some(&rundir)),
        known("local-uri", Some(BROKER_URI)),
        lead("statedir", &state),
        // Each broker logs on its own node why it does not come up; nothing is forwarded to the lead's log.
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
        // At every clean stop, drops what the content store no longer needs.
        lead("content.dump", "auto"),
        lead("content.restore", "auto"),
    ]
}

/// The rc1 tasks (flux-modprobe(1)) in Python. Before the lead's resource module starts, one loads the configuration in
/// which members have their nodes' names: later, jobs could already have started on ranks that are about to be renamed. Before
/// the scheduler starts, one removes resources that jobs were being given when the broker died.
pub fn rc1_tasks(prefix: &Path) -> String {
    let file = json!(prefix.join(LIVE_CONFIGURATION)).to_string();
    include_str!("rc1_tasks.py").replace(r#""@LIVE_CONFIGURATION@""#, &file)
}

/// The order to start the broker of `identity` with `settings`.
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
        // Not the user's home, because the shells of Flux's rc scripts would read its start-up files.
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

/// Hashes each part after its length, so that moving text from one part to the next changes the result.
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

/// Tells a user why Flux lists ranks without a member as down.
pub const SPARES_EXPLAINED: &str = "flux-spare-N: a rank that is kept free for a node that may join; Flux lists it as down or offline, and the tree above it as partial, and nothing is wrong with that";

/// Asks the broker of rank 0 for an answer, and exits with [`NO_ANSWER`] if none comes: without rank 0, most flux commands
/// wait without a word.
pub const PING_LEAD: [&str; 6] = ["timeout", "3", "flux", "ping", "--count=1", "0"];
/// The exit code of timeout(1) at its limit.
pub const NO_ANSWER: i32 = 124;

/// What the connect script reports if rank 0 does not answer.
const LEAD_SILENT: &str = "flux-connect.sh: the broker of rank 0 does not answer; flux commands may wait until it does. The \
                           FluxInstance's message says what is wrong: kubectl -n flux-distribute get fxi -o wide, in local \
                           mode flux-distribute local status";

/// The connect script for users of the host. Only the brokers' owner may use the instance, so root becomes that owner: `uid` with
/// primary group `gid`. The script must not look them up: the owner controls what is at the socket's directory, and the host's name
/// service may map the owner's name to another user. The script drops root's environment, because every job of the owner can read that
/// of the new shell. It keeps SHELL, which a shell without it would take from the owner's entry in passwd(5): that often allows no
/// login.
/// The script prints a greeting only before an interactive shell, not before a command's output.
pub fn connect_script(environment: &Path, uid: u32, gid: u32) -> String {
    let bin = environment.join("bin");
    let bin = bin.display();
    let ping = PING_LEAD.join(" ");
    let become_owner = match uid {
        0 => String::new(),
        _ => format!(
            "[ \"$(id -u)\" != 0 ] || exec env -i HOME=/ LANG=\"${{LANG-}}\" PATH=\"$PATH\" SHELL=\"${{SHELL:-/bin/sh}}\" TERM=\"${{TERM-}}\" \\\n    \
             setpriv --reuid {uid} --regid {gid} --clear-groups \"$0\" \"$@\"\n"
        ),
    };
    format!(
        "{CONNECT_HEADER}, or runs a command in it: flux-connect.sh [COMMAND...]\n\
         {become_owner}export PATH=\"{bin}:$PATH\" FLUX_URI=\"{BROKER_URI}\"\n\
         # Without rank 0, most flux commands wait without a word. Any other failure they report themselves.\n\
         {ping} >/dev/null 2>&1\n[ $? != {NO_ANSWER} ] || echo \"{LEAD_SILENT}\" >&2\n\
         [ $# -eq 0 ] || exec \"$@\"\n\
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
            pods: false,
            only_whole_cores: false,
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
    fn a_rundir_is_never_longer_than_flux_takes() {
        let of = |letters: usize| rundir(Path::new(&format!("/{}", "x".repeat(letters)))).display().to_string();
        assert_eq!(of(91).len(), 96);
        assert_eq!(of(92), BROKER_SOCKET_DIR);
    }

    #[test]
    fn the_command_line_is_the_one_that_was_tested_with_flux() {
        let order = launch(&settings(), &identity(0));
        assert_eq!(
            order.argv,
            [
                "/opt/flux-distribute/envs/0123456789abcdef/bin/flux",
                "broker",
                "--config-path=/opt/flux-distribute/etc/broker.toml",
                "-Shostname=node1",
                "-Srundir=/opt/flux-distribute/run",
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
    fn a_user_of_a_node_learns_within_seconds_that_rank_0_is_silent() {
        let directory = tempfile::tempdir().unwrap();
        let (flux, script) = (directory.path().join("bin/flux"), directory.path().join("flux-connect.sh"));
        std::fs::create_dir(directory.path().join("bin")).unwrap();
        std::fs::write(&script, connect_script(directory.path(), 0, 0)).unwrap();
        for (ping, is_silent) in [("exec sleep 60", true), ("exit 1", false), ("exit 0", false)] {
            std::fs::write(&flux, format!("#!/bin/sh\n[ $1 != ping ] || {ping}\necho ran $1\n")).unwrap();
            std::fs::set_permissions(&flux, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
            let output = std::process::Command::new("/bin/sh").arg(&script).args(["flux", "jobs"]).output().unwrap();
            let said = String::from_utf8(output.stderr).unwrap();
            assert_eq!(said, if is_silent { format!("{LEAD_SILENT}\n") } else { String::new() }, "{ping}");
            assert_eq!(output.stdout, b"ran jobs\n", "{ping}");
        }
    }

    /// Root becomes the user whose numbers the script has. The script looks up nothing on the host: that user can cover the socket.
    #[test]
    fn root_becomes_the_brokers_owner_without_a_look_at_what_that_user_can_cover() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        let program = |name: &str, text: &str| {
            std::fs::write(at(name), format!("#!/bin/sh\n{text}\n")).unwrap();
            std::fs::set_permissions(at(name), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        };
        std::fs::create_dir(at("bin")).unwrap();
        program("bin/flux", "[ $1 = ping ] || echo ran $1");
        program("setpriv", "echo setpriv $1 $2 $3 $4 $5 ${SECRET-}");
        for (user, (uid, gid), said) in [
            (0, (998, 997), "setpriv --reuid 998 --regid 997 --clear-groups\n"),
            (0, (0, 0), "ran jobs\n"),
            (998, (998, 997), "ran jobs\n"),
            // Flux itself tells any other user that the instance is not theirs.
            (1000, (998, 997), "ran jobs\n"),
        ] {
            let text = connect_script(directory.path(), uid, gid);
            assert!(!text.contains(&format!("{} ", api::BROKER_SOCKET_DIR)) && !text.contains("stat "), "{text}");
            program("id", &format!("[ \"$*\" = -u ] && echo {user}"));
            std::fs::write(at("flux-connect.sh"), text).unwrap();
            let mut script = std::process::Command::new("/bin/sh");
            script.arg(at("flux-connect.sh")).args(["flux", "jobs"]);
            let path = format!("{}:{}", directory.path().display(), HOST_PATH);
            let output = script.env("PATH", path).env("SECRET", "of root").output().unwrap();
            assert_eq!(String::from_utf8(output.stdout).unwrap(), said, "{user} {uid}");
        }
    }

    #[test]
    fn a_start_that_would_differ_has_another_fingerprint() {
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
        // Settings that Flux reads from its configuration are compared elsewhere.
        assert_eq!(first, of(&EpochSettings { port: 9, ..settings() }, 1));
    }
}
