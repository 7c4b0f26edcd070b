use std::fs;

use super::{Root, read};

const NVIDIA: u32 = 0x10de;

/// A device of the PCI bus, as sysfs describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PciDevice {
    /// Class code, such as 0x030200.
    pub class: u32,
    /// Vendor id.
    pub vendor: u32,
    /// The driver that it is bound to. A device passed to a virtual machine has another driver than its own.
    pub driver: Option<String>,
}

impl PciDevice {
    fn is_gpu(&self) -> bool {
        is_display(self.class) && self.vendor == NVIDIA && self.driver.as_deref() == Some("nvidia")
    }
}

/// VGA compatible controller, 3D controller, other display controller (PCI class codes).
fn is_display(class: u32) -> bool {
    matches!(class >> 8, 0x0300 | 0x0302 | 0x0380)
}

/// Counts NVIDIA GPUs among the PCI devices, and AMD GPUs by the `gpu_id`s of their compute driver's nodes (0 is a
/// CPU).
pub fn count_gpus(devices: &[PciDevice], kfd_gpu_ids: &[u64]) -> u32 {
    let nvidia = devices.iter().filter(|device| device.is_gpu()).count();
    let amd = kfd_gpu_ids.iter().filter(|&&id| id != 0).count();
    u32::try_from(nvidia + amd).unwrap_or(u32::MAX)
}

/// Number of GPUs that this host's own drivers hold.
pub(super) fn gpus(root: &Root) -> u32 {
    let devices: Vec<_> = names(root, "/sys/bus/pci/devices")
        .filter_map(|name| {
            let dir = format!("/sys/bus/pci/devices/{name}");
            let hex =
                |file| u32::from_str_radix(read(root, &format!("{dir}/{file}"))?.trim_start_matches("0x"), 16).ok();
            // A host may have hundreds of devices, of which a few are displays.
            let class = hex("class").filter(|class| is_display(*class))?;
            let driver = fs::read_link(root.path(format!("{dir}/driver"))).ok();
            Some(PciDevice {
                class,
                vendor: hex("vendor")?,
                driver: driver.and_then(|link| Some(link.file_name()?.to_str()?.to_owned())),
            })
        })
        .collect();
    let kfd = "/sys/class/kfd/kfd/topology/nodes";
    let ids: Vec<_> =
        names(root, kfd).filter_map(|node| read(root, &format!("{kfd}/{node}/gpu_id"))?.parse().ok()).collect();
    count_gpus(&devices, &ids)
}

fn names(root: &Root, dir: &str) -> impl Iterator<Item = String> + use<> {
    let entries = fs::read_dir(root.path(dir)).into_iter().flatten();
    entries.flatten().filter_map(|entry| entry.file_name().into_string().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_gpus_with_their_own_driver_are_counted() {
        let device = |class, vendor, driver: &str| PciDevice { class, vendor, driver: Some(driver.into()) };
        for (what, device, expected) in [
            ("a graphics card", device(0x03_0000, NVIDIA, "nvidia"), 1),
            ("a compute card", device(0x03_0200, NVIDIA, "nvidia"), 1),
            ("its sound device", device(0x04_0300, NVIDIA, "snd_hda_intel"), 0),
            ("one given to a virtual machine", device(0x03_0200, NVIDIA, "vfio-pci"), 0),
            ("a display of another vendor", device(0x03_0000, 0x1a03, "ast"), 0),
            ("one without driver", PciDevice { driver: None, ..device(0x03_0200, NVIDIA, "") }, 0),
        ] {
            assert_eq!(count_gpus(&[device], &[]), expected, "{what}");
        }
        assert_eq!(count_gpus(&[], &[0, 0, 51234, 8761]), 2);
    }
}
