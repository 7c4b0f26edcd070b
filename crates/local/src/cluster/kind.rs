//! Nodes of different kinds on one machine: a node may show other hardware facts than the machine has. Only the facts
//! are simulated; a job that is given a GPU finds none.

use std::{fs, os::unix::fs::symlink, path::Path, thread};

use serde::{Deserialize, Serialize};

use super::{io::write, mounts};
use crate::error::{Context, LocalError};

/// How a node differs from the machine.
#[derive(clap::Args, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct Kind {
    /// Show only this many cores [default: the machine's]
    #[arg(long, value_parser = parse_cores)]
    pub(crate) cores: Option<u32>,
    /// Show this many GPUs
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u32).range(..=16))]
    pub(crate) gpus: u32,
    /// A label of the Node (repeatable)
    #[arg(long = "label", value_name = "KEY=VALUE", value_parser = label)]
    pub(crate) labels: Vec<(String, String)>,
    /// The Node's architecture [default: the machine's]
    #[arg(long, value_parser = ["amd64", "arm64"])]
    pub(crate) arch: Option<String>,
    /// Register under this Node's name, like a machine that replaces another one
    #[arg(long, hide = true)]
    #[serde(default)]
    pub(crate) registers_as: Option<String>,
}

/// A `--cores` that no node can show.
#[derive(Debug, thiserror::Error)]
#[error("a node can show 1 to {most} cores: this process may use {machine}, and a node shows at most {MAX_CORES}")]
struct CoresOutOfRange {
    most: u32,
    machine: u32,
}

/// The most cores that a node can show, as the masks in its /sys are written as one word.
const MAX_CORES: u32 = 32;

fn parse_cores(text: &str) -> Result<u32, CoresOutOfRange> {
    let machine = machine_cpus();
    let most = machine.min(MAX_CORES);
    text.parse().ok().filter(|cores| (1..=most).contains(cores)).ok_or(CoresOutOfRange { most, machine })
}

/// Number of CPUs of this machine that this process may use.
pub(crate) fn machine_cpus() -> u32 {
    thread::available_parallelism().map_or(1, |cpus| u32::try_from(cpus.get()).unwrap_or(u32::MAX))
}

/// A `--label` that is not one.
#[derive(Debug, thiserror::Error)]
#[error("it has no =")]
struct NotALabel;

fn label(text: &str) -> Result<(String, String), NotALabel> {
    let (key, value) = text.split_once('=').ok_or(NotALabel)?;
    Ok((key.to_owned(), value.to_owned()))
}

impl Kind {
    /// The name of the Node that `machine` registers as.
    pub(crate) fn node_of<'a>(&'a self, machine: &'a str) -> &'a str {
        self.registers_as.as_deref().unwrap_or(machine)
    }

    /// Mounts the differences over the node's /sys.
    pub(crate) fn mount(&self, root: &Path) -> Result<(), LocalError> {
        if let Some(cores) = self.cores {
            let directory = root.join("sys/devices/system/cpu");
            mounts::kernel("tmpfs", &directory, Some("mode=755"))?;
            for list in ["online", "possible", "present"] {
                write(&directory.join(list), &format!("0-{}\n", cores - 1))?;
            }
            for cpu in 0..cores {
                let topology = directory.join(format!("cpu{cpu}/topology"));
                mounts::make_directory(&topology)?;
                // hwloc reads the masks, other tools the lists.
                for (file, content) in [
                    ("core_cpus", format!("{:x}", 1_u64 << cpu)),
                    ("core_cpus_list", cpu.to_string()),
                    ("core_id", cpu.to_string()),
                    ("package_cpus", format!("{:x}", (1_u64 << cores) - 1)),
                    ("physical_package_id", "0".to_owned()),
                ] {
                    write(&topology.join(file), &format!("{content}\n"))?;
                }
            }
        }
        if self.gpus > 0 {
            // sysfs doesn't allow new directories, and the machine may have no PCI bus.
            let bus = root.join("sys/bus");
            mounts::kernel("tmpfs", &bus, Some("mode=755"))?;
            for number in 0..self.gpus {
                let device = bus.join(format!("pci/devices/0000:00:{number:02x}.0"));
                mounts::make_directory(&device)?;
                write(&device.join("class"), "0x030200\n")?;
                write(&device.join("vendor"), "0x10de\n")?;
                let driver = device.join("driver");
                symlink("../../drivers/nvidia", &driver).context(|| format!("can't make {}", driver.display()))?;
            }
        }
        Ok(())
    }

    /// Writes the kind to the file from which the node's processes read it.
    pub(crate) fn save(&self, path: &Path) -> Result<(), LocalError> {
        let failed = || format!("can't write {}", path.display());
        let text = serde_json::to_vec(self).context(failed)?;
        if let Some(directory) = path.parent() {
            mounts::make_directory(directory)?;
        }
        fs::write(path, text).context(failed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_shows_no_more_cores_than_the_machine_has() {
        assert_eq!(parse_cores("1").unwrap(), 1);
        for text in ["0", "-1", "two", &(u64::from(machine_cpus()) + 1).to_string()] {
            let refused = parse_cores(text).unwrap_err().to_string();
            assert!(refused.contains(&format!("this process may use {}", machine_cpus())), "{text}: {refused}");
        }
    }
}
