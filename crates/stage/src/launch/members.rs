//! Determines which processes are the broker's: those in its unit or its cgroup. A name, arguments or an environment
//! prove nothing, because any user and any pod can choose them for a process. But only root moves processes into these
//! cgroups, and whatever a process starts there stays there. So we find jobs even after their broker has died, and
//! those of a broker that an older version started.

use std::{collections::BTreeSet, fs, io};

use super::HostPlaces;
use broker::unit::SERVICE;
use host::{BrokerProcesses, cgroup, process::Stat};

/// The unit's cgroup, relative to the mount of each hierarchy.
const UNIT_CGROUP: &str = "flux.slice/flux-broker.service";
/// The kernel's name for flux-shell(1); one runs on each node of a job until the job ends.
const JOB_SHELL: &str = "flux-shell";

impl BrokerProcesses for HostPlaces {
    fn members(&self) -> io::Result<BTreeSet<i32>> {
        let broker = self.record().and_then(|record| Some((self.process(&record)?.pid, record.systemd)));
        let mut members = self.members_with(broker.filter(|(_, systemd)| *systemd).map(|(pid, _)| pid))?;
        members.extend(broker.map(|(pid, _)| pid));
        Ok(members)
    }
}

impl HostPlaces {
    /// How many jobs have a shell here. `unit` is the main process of the broker's unit, if it has one.
    pub(super) fn job_shells(&self, unit: Option<i32>) -> io::Result<usize> {
        Ok(self.members_with(unit)?.into_iter().filter(|pid| is_job_shell(*pid)).count())
    }

    fn members_with(&self, unit: Option<i32>) -> io::Result<BTreeSet<i32>> {
        let mut directories = Vec::new();
        for name in [&self.cgroup, UNIT_CGROUP] {
            directories.extend(cgroup::places_here(name)?.into_iter().map(|place| place.directory));
        }
        // An administrator's drop-in may have moved the unit to another slice.
        if let Some(text) = unit.and_then(|pid| fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()) {
            directories.extend(cgroup::directories(&cgroup::memberships(&text), &cgroup::own_mounts()?, SERVICE));
        }
        Ok(cgroup::members_below(directories))
    }
}

/// True for a job shell, unless it is a zombie: that one delays no job.
fn is_job_shell(pid: i32) -> bool {
    let Ok(line) = fs::read_to_string(format!("/proc/{pid}/stat")) else { return false };
    let name = line.split_once('(').and_then(|(_, rest)| Some(rest.rsplit_once(')')?.0));
    name == Some(JOB_SHELL) && Stat::parse(line.as_bytes()).is_some_and(|stat| !stat.is_dead())
}
