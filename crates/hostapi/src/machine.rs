//! Which machine this is: what is below a prefix may be another one's, if nodes share that directory.

use serde::{Deserialize, Serialize};

/// What a machine says of itself. No part of it is certain: images are cloned with their machine-id(5), which may be made anew;
/// nodes of one host share its hardware; hosts are renamed. So [`Machine::may_be`] goes by the majority. A part that is empty is
/// not known.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct Machine {
    /// Its host name, with its domain if the kernel knows one.
    pub name: String,
    /// Made from /etc/machine-id, which is not for everybody to know.
    pub id: String,
    /// Made from the UUID that the firmware tells, which root alone can read.
    pub hardware: String,
}

impl Machine {
    /// Whether both can be one machine: most of what both tell is equal, and between two parts that contradict each other the
    /// host name decides, or the hardware if one has no name.
    pub fn may_be(&self, other: &Self) -> bool {
        let known = |one: &str, other: &str, is_same: fn(&str, &str) -> bool| {
            (!one.is_empty() && !other.is_empty()).then(|| is_same(one, other))
        };
        let is_equal: fn(&str, &str) -> bool = |one, other| one == other;
        let name = known(&self.name, &other.name, is_one_name);
        let hardware = known(&self.hardware, &other.hardware, is_equal);
        let parts = [name, known(&self.id, &other.id, is_equal), hardware];
        let count = |wanted| parts.iter().filter(|part| **part == Some(wanted)).count();
        match count(true).cmp(&count(false)) {
            std::cmp::Ordering::Equal => name.or(hardware).unwrap_or(true),
            order => order.is_gt(),
        }
    }
}

/// The name without its domain.
pub fn first_label(name: &str) -> &str {
    name.split_once('.').map_or(name, |(first, _)| first)
}

/// A host may tell its name with its domain at one time and without at another.
fn is_one_name(one: &str, other: &str) -> bool {
    one == other || [(one, other), (other, one)].into_iter().any(|(short, long)| short == first_label(long))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(name: &str, id: &str, hardware: &str) -> Machine {
        Machine { name: name.into(), id: id.into(), hardware: hardware.into() }
    }

    #[test]
    fn a_machine_is_known_again_by_most_of_what_it_says() {
        let first = machine("n1", "id1", "hw1");
        for (other, is_it, what) in [
            (machine("n1", "id1", "hw1"), true, "itself"),
            (machine("n1", "new", "hw1"), true, "it has a new machine-id"),
            (machine("new", "id1", "hw1"), true, "it was renamed"),
            (machine("n1", "id1", "new"), true, "its disks are in other hardware"),
            (machine("n1", "id1", ""), true, "its firmware can no longer be read"),
            (machine("", "", ""), true, "nothing is known of it"),
            (machine("n2", "id2", "hw2"), false, "another node"),
            (machine("n2", "id1", "hw2"), false, "a clone with the same machine-id"),
            (machine("n2", "id2", "hw1"), false, "two nodes of one host, as with kind"),
            (machine("n1", "id2", ""), true, "it has a new machine-id, and its firmware is unknown"),
            (machine("n2", "id1", ""), false, "a clone without firmware"),
            (machine("n1.site", "id1", "hw2"), true, "it has its domain in its name now, on other hardware"),
        ] {
            assert_eq!(first.may_be(&other), is_it, "{what}");
            assert_eq!(other.may_be(&first), is_it, "{what}");
        }
        let unnamed = |id: &str, hardware: &str| machine("", id, hardware);
        assert!(!unnamed("id1", "hw1").may_be(&unnamed("id1", "hw2")), "two clones whose name is localhost");
        assert!(unnamed("id1", "hw1").may_be(&unnamed("id2", "hw1")), "a new machine-id");
        // As two clones at two sites that share a directory.
        assert!(!machine("n1.here", "id1", "").may_be(&machine("n1.there", "id1", "")));
    }
}
