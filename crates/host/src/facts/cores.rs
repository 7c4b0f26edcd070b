use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
};

use super::{Root, read};

/// One logical CPU, as sysfs describes it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cpu {
    /// Number of the CPU.
    pub cpu: u32,
    /// `topology/core_cpus_list` (or the older `thread_siblings_list`): the CPUs of its core. hwloc counts cores by
    /// these lists.
    pub siblings: Option<String>,
    /// `topology/physical_package_id`.
    pub package: Option<i64>,
    /// `topology/die_id`.
    pub die: Option<i64>,
    /// `topology/core_id`.
    pub core: Option<i64>,
}

#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum Core<'a> {
    Siblings(&'a str),
    Ids(Option<i64>, Option<i64>, i64),
    Alone(u32),
}

impl Cpu {
    fn core(&self) -> Core<'_> {
        match (&self.siblings, self.core) {
            (Some(siblings), _) => Core::Siblings(siblings),
            (None, Some(core)) => Core::Ids(self.package, self.die, core),
            (None, None) => Core::Alone(self.cpu),
        }
    }
}

/// Number of cores that have a CPU which is online and allowed. A set that is None sets no limit.
pub fn count_cores(cpus: &[Cpu], online: Option<&BTreeSet<u32>>, allowed: Option<&BTreeSet<u32>>) -> u32 {
    let usable = |cpu: &&Cpu| [online, allowed].into_iter().flatten().all(|set| set.contains(&cpu.cpu));
    let cores: BTreeSet<_> = cpus.iter().filter(usable).map(Cpu::core).collect();
    u32::try_from(cores.len()).unwrap_or(u32::MAX)
}

/// Parses a CPU list such as `0-3,8`; None if it has another format.
pub fn parse_cpu_list(text: &str) -> Option<BTreeSet<u32>> {
    let mut cpus = BTreeSet::new();
    for range in text.trim().split(',').filter(|range| !range.is_empty()) {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        cpus.extend(first.trim().parse::<u32>().ok()?..=last.trim().parse::<u32>().ok()?);
    }
    Some(cpus)
}

/// Number of physical cores that this host's processes may use.
pub(super) fn cores(root: &Root) -> u32 {
    let online = read(root, "/sys/devices/system/cpu/online").and_then(|list| parse_cpu_list(&list));
    // PID 1's CPUs, not this process's: the pod that started it may be pinned to a few.
    let allowed = read(root, "/proc/1/status")
        .and_then(|status| Some(parse_allowed(&status)?.to_owned()))
        .and_then(|list| parse_cpu_list(&list));
    count_cores(&cpus(root).into_values().collect::<Vec<_>>(), online.as_ref(), allowed.as_ref())
}

fn parse_allowed(status: &str) -> Option<&str> {
    status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))
}

fn cpus(root: &Root) -> BTreeMap<u32, Cpu> {
    let dir = "/sys/devices/system/cpu";
    let Ok(entries) = fs::read_dir(root.path(dir)) else {
        return BTreeMap::new();
    };
    let numbers = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.strip_prefix("cpu")?.parse().ok());
    numbers
        .map(|cpu: u32| {
            let file = |name: &str| read(root, &format!("{dir}/cpu{cpu}/topology/{name}"));
            let id = |name: &str| file(name)?.parse().ok();
            let siblings = file("core_cpus_list").or_else(|| file("thread_siblings_list"));
            if siblings.is_some() {
                // They outweigh the ids, and a host may have hundreds of CPUs.
                return (cpu, Cpu { cpu, siblings, ..Cpu::default() });
            }
            let (package, die, core) = (id("physical_package_id"), id("die_id"), id("core_id"));
            (cpu, Cpu { cpu, siblings, package, die, core })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn by_ids(cpu: u32, package: i64, core: i64) -> Cpu {
        Cpu { cpu, package: Some(package), core: Some(core), ..Cpu::default() }
    }

    fn by_siblings(cpu: u32, siblings: &str) -> Cpu {
        Cpu { siblings: Some(siblings.into()), ..by_ids(cpu, 0, 0) }
    }

    fn set(list: &str) -> BTreeSet<u32> {
        parse_cpu_list(list).unwrap()
    }

    #[test]
    fn cores_are_counted_as_hwloc_counts_them() {
        let threads = [by_ids(0, 0, 0), by_ids(1, 0, 1), by_ids(2, 0, 0), by_ids(3, 0, 1)];
        let packages = [by_ids(0, 0, 0), by_ids(1, 1, 0)];
        let dies = [Cpu { die: Some(0), ..by_ids(0, 0, 0) }, Cpu { die: Some(1), ..by_ids(1, 0, 0) }];
        // Older arm64 kernels restart the core ids in each cluster.
        let clusters = [by_siblings(0, "0"), by_siblings(1, "1")];
        let bare = [Cpu { cpu: 0, ..Cpu::default() }, Cpu { cpu: 1, ..Cpu::default() }];
        let negative = [by_ids(0, -1, 0), by_ids(1, -1, 1)];
        for (what, cpus, online, allowed, expected) in [
            ("hyperthreads count once", &threads[..], Some("0-3"), None, 2),
            ("one thread of a core is enough", &threads, Some("0-1"), None, 2),
            ("a core whose threads are all offline does not count", &threads, Some("0,2"), None, 1),
            ("CPUs that the host's processes may not use do not count", &threads, Some("0-3"), Some("1,3"), 1),
            ("equal core ids of two packages are two cores", &packages, Some("0-1"), None, 2),
            ("equal core ids of two dies are two cores", &dies, Some("0-1"), None, 2),
            ("siblings outweigh ids", &clusters, Some("0-1"), None, 2),
            ("without topology files each CPU is a core", &bare, None, None, 2),
            ("virtual machines without packages", &negative, Some("0-1"), None, 2),
            ("no CPU", &[], None, None, 0),
        ] {
            let online = online.map(set);
            assert_eq!(count_cores(cpus, online.as_ref(), allowed.map(set).as_ref()), expected, "{what}");
        }
    }

    #[test]
    fn cpu_lists_are_parsed_in_the_kernels_format() {
        assert_eq!(set("0-2,8\n"), BTreeSet::from([0, 1, 2, 8]));
        assert_eq!(set("\n"), BTreeSet::new());
        assert_eq!(parse_cpu_list("a"), None);
        assert_eq!(parse_allowed("Name:\tinit\nCpus_allowed_list:\t0-1\n"), Some("\t0-1"));
    }
}
