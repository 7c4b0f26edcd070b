//! Finds a running broker whose record is gone, for example because a cleaner of temporary files removed
//! /run/flux-distribute. We recognize it by its unit or cgroup and its command line, and restore its record from the
//! files of its prefix.

use std::{
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use super::{HostPlaces, LaunchError, record::RunRecord, systemd::Systemd};
use api::{Rank, Roster};
use broker::command::{BrokerIdentity, launch};
use host::{Root, cgroup, facts, log, opening::beginning_of, process::Identity, state, trust, users};
use hostapi::LaunchRecord;

/// Most bytes of a command line or an environment that are read: a job may enlarge its own, up to its whole
/// address space (prctl(2), `PR_SET_MM`). Those of a broker of ours have a few thousand bytes.
const LONGEST: u64 = 128 << 10;

/// A broker that runs without a record.
pub(super) enum UnrecordedBroker {
    /// Its record could be restored.
    Known(Box<RunRecord>),
    /// It is a broker, but its instance is uncertain.
    Unknown(UnknownBroker),
}

/// A running broker whose instance is uncertain: it may be a lead, and have jobs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownBroker {
    /// Process id in the host's PID namespace.
    pub pid: i32,
    /// Its unit or cgroup, in words.
    pub place: String,
    /// Why its record can't be restored.
    pub why: Unrestored,
}

/// Why the record of a broker can't be restored. The broker is the subject of the messages.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Unrestored {
    /// It may have ended.
    #[error("its command line can't be read")]
    NoCommandLine,
    /// It has no `--config-path`.
    #[error("its command line names no configuration of ours")]
    NotOurs,
    /// It has no `-Shostname`.
    #[error("its command line has no broker name")]
    NoName,
    /// The roster that the host was last configured with is gone, damaged, or not in a file that only root can write.
    #[error("{} can't be read ({problem})", .path.display())]
    NoRoster {
        /// The roster's file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// The prefix was claimed again.
    #[error("{} belongs to another FluxInstance than its roster", .0.display())]
    AnotherInstance(PathBuf),
    /// The host was configured for another name since.
    #[error("this host's roster has no broker {0}")]
    NotInRoster(String),
    /// The host was configured for another rank since.
    #[error("it was not started for rank {rank}, which {name} has in this host's roster")]
    AnotherRank {
        /// The rank in the roster.
        rank: Rank,
        /// Its broker name.
        name: String,
    },
    /// The rank was given up since.
    #[error("rank {0} has no member in this host's roster")]
    NoMember(Rank),
    /// The host was configured for another package set since.
    #[error("it does not run from the environment that this host's roster names")]
    AnotherEnvironment,
    /// The host was configured for another user since.
    #[error("it does not run as {0}")]
    AnotherUser(String),
}

impl std::fmt::Display for UnknownBroker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "a broker runs on this host as process {} in {}, but its record is gone and {}: once its jobs have ended, \
             end it with `kill {}` on the host",
            self.pid, self.place, self.why, self.pid
        )
    }
}

/// The arguments of a broker's command line; see [`broker::command`].
struct CommandLine(Vec<String>);

impl CommandLine {
    fn of(pid: i32) -> Option<Self> {
        Self::read(Path::new(&format!("/proc/{pid}/cmdline")))
    }

    fn read(file: &Path) -> Option<Self> {
        // A longer line lacks its final NUL here and is none of ours.
        let text = beginning_of(file, LONGEST).ok()?;
        let words = text.strip_suffix(b"\0")?.split(|byte| *byte == 0);
        Some(Self(words.map(|word| String::from_utf8_lossy(word).into_owned()).collect()))
    }

    fn value(&self, option: &str) -> Option<&str> {
        self.0.iter().find_map(|word| word.strip_prefix(option)?.strip_prefix('='))
    }

    fn prefix(&self) -> Option<PathBuf> {
        Some(Path::new(self.value("--config-path")?).parent()?.parent()?.to_owned())
    }
}

impl HostPlaces {
    /// Looks for a broker without its record: the unit's main process, else the first process in the broker's cgroup,
    /// which also contains jobs, that has a broker's command line.
    pub(super) fn find(&self) -> Result<Option<UnrecordedBroker>, LaunchError> {
        let unit = self.systemd.as_ref().map_or(Ok(None), Systemd::process)?.map(|process| (process, true));
        let Some((process, systemd)) = unit.or_else(|| Some((self.find_in_cgroup()?, false))) else { return Ok(None) };
        Ok(Some(match self.known(&process, systemd) {
            Ok(record) => UnrecordedBroker::Known(Box::new(record)),
            Err(why) => {
                let place = if systemd { "its unit".to_owned() } else { format!("cgroup {}", self.cgroup) };
                UnrecordedBroker::Unknown(UnknownBroker { pid: process.pid, place, why })
            }
        }))
    }

    fn find_in_cgroup(&self) -> Option<Identity> {
        let uri = format!("local://{}/local", self.socket_dir.display());
        let is_broker = |process: &Identity| {
            let line = CommandLine::of(process.pid);
            line.is_some_and(|line| line.value("-Slocal-uri") == Some(&uri))
        };
        let members = cgroup::members(&self.cgroups().ok()?).into_iter().filter_map(Identity::of);
        // A process that the broker has just forked still has the broker's command line; the oldest is the broker.
        members.filter(is_broker).min_by_key(|process| (process.start_time, process.pid))
    }

    fn known(&self, process: &Identity, systemd: bool) -> Result<RunRecord, Unrestored> {
        let line = CommandLine::of(process.pid).ok_or(Unrestored::NoCommandLine)?;
        let prefix = line.prefix().ok_or(Unrestored::NotOurs)?;
        // Any user can start a process with such a command line, and put a pipe at the path in it.
        let path = prefix.join("etc/roster.json");
        let roster = read_roster(&path).map_err(|problem| Unrestored::NoRoster { path, problem })?;
        let record = record(&line, &prefix, &roster)?;
        let state = state::load(&Root::host(), &prefix).ok().flatten();
        if state.is_some_and(|state| state.instance_uid != roster.instance_uid) {
            return Err(Unrestored::AnotherInstance(prefix));
        }
        let used = [fs::read_link(format!("/proc/{}/exe", process.pid)).unwrap_or_default().display().to_string()];
        let environment =
            beginning_of(Path::new(&format!("/proc/{}/environ", process.pid)), LONGEST).unwrap_or_default();
        let environment = String::from_utf8_lossy(&environment);
        let mut texts = used.iter().map(String::as_str).chain(line.0.iter().map(String::as_str)).chain([&*environment]);
        let environments = format!("{}/", prefix.join(state::ENVIRONMENTS).display());
        let digest = texts.find_map(|text| text.split_once(&environments)?.1.split(['/', ':', '\0']).next());
        if digest != Some(&record.digest) {
            return Err(Unrestored::AnotherEnvironment);
        }
        let owner = users::resolve_on(&Root::host(), &roster.settings.run_as).ok().map(|user| user.uid);
        if fs::metadata(format!("/proc/{}", process.pid)).ok().map(|process| process.uid()) != owner {
            return Err(Unrestored::AnotherUser(roster.settings.run_as));
        }
        Ok(RunRecord {
            process: Some(process.clone()),
            boot_id: facts::boot_id(&Root::host()),
            systemd,
            // Only what it logs from now on explains its end.
            log_start: log::length(&log::path(&prefix)),
            prefix,
            record,
        })
    }
}

fn read_roster(path: &Path) -> Result<Roster, String> {
    let file = trust::open_file(&Root::host(), path).map_err(|distrust| distrust.problem())?;
    let text = io::read_to_string(file).map_err(|error| error.to_string())?;
    Roster::parse(&text).map_err(|error| error.to_string())
}

/// The launch record of a broker with this command line, according to the roster that its host was last configured
/// with.
fn record(line: &CommandLine, prefix: &Path, roster: &Roster) -> Result<LaunchRecord, Unrestored> {
    let name = line.value("-Shostname").ok_or(Unrestored::NoName)?;
    let entry = roster.ranks.iter().find(|(_, entry)| entry.broker_name == name);
    let (rank, entry) = entry.ok_or_else(|| Unrestored::NotInRoster(name.to_owned()))?;
    // Only the lead gets a statedir.
    if line.value("-Sstatedir").is_some() != (*rank == 0) {
        return Err(Unrestored::AnotherRank { rank: *rank, name: name.to_owned() });
    }
    let member = entry.member.as_ref().ok_or(Unrestored::NoMember(*rank))?;
    let identity = BrokerIdentity {
        prefix,
        rank: *rank,
        broker_name: name,
        node_uid: &member.uid,
        instance_uid: &roster.instance_uid,
        instance_id: &roster.instance_id,
        epoch: roster.epoch,
        loads_live_configuration: roster.declares_nodes(),
    };
    let order = launch(&roster.settings, &identity);
    let mut record = order.record;
    if !order.argv.get(2..).is_some_and(|words| line.0.ends_with(words)) {
        // Another version started it, so this version's fingerprint would be wrong.
        record.launch = String::new();
    }
    Ok(record)
}

#[cfg(test)]
mod tests {
    use super::*;
    use model::fixture::roster;

    const PREFIX: &str = "/opt/flux-distribute";

    fn line(roster: &Roster, rank: u32, name: &str) -> CommandLine {
        let identity = BrokerIdentity {
            prefix: Path::new(PREFIX),
            rank,
            broker_name: name,
            node_uid: "",
            instance_uid: "",
            instance_id: "",
            epoch: 0,
            loads_live_configuration: true,
        };
        let argv = launch(&roster.settings, &identity).argv;
        CommandLine(
            ["/x/libexec/flux/cmd/flux-broker".to_owned()].into_iter().chain(argv.into_iter().skip(2)).collect(),
        )
    }

    #[test]
    fn of_a_jobs_command_line_of_any_length_only_the_beginning_is_read() {
        let words = CommandLine::read(Path::new("/dev/zero")).unwrap().0;
        assert_eq!(words.len() as u64, LONGEST);
    }

    #[test]
    fn a_brokers_record_is_restored_from_its_command_line_and_roster() {
        let roster = roster(4, &[("node1", 2), ("node2", 2)]);
        for (rank, name) in [(0, "node1"), (1, "node2")] {
            let line = line(&roster, rank, name);
            assert_eq!(line.prefix().unwrap(), Path::new(PREFIX));
            let found = record(&line, Path::new(PREFIX), &roster).unwrap();
            assert_eq!((found.rank, found.broker_name.as_str(), found.epoch), (rank, name, roster.epoch));
            assert_eq!(found.node_uid, format!("uid-{name}"));
            assert_eq!((&found.instance_id, &found.digest), (&roster.instance_id, &roster.settings.digest));
            assert_eq!(found.launch.len(), 64);
        }
        // The roster names the rank's next member already; then a name that is not in it; then another version's
        // command line.
        let refused = |name: &str| record(&line(&roster, 1, name), Path::new(PREFIX), &roster).unwrap_err();
        assert_eq!(refused("node1"), Unrestored::AnotherRank { rank: 0, name: "node1".into() });
        assert_eq!(refused("node9"), Unrestored::NotInRoster("node9".into()));
        let mut older = line(&roster, 1, "node2");
        older.0.pop();
        assert_eq!(record(&older, Path::new(PREFIX), &roster).unwrap().launch, "");
    }
}
