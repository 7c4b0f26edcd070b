//! Hostlists (RFC 29), such as `node[1-4,7],login`.

use std::collections::HashSet;

use api::MOST_RANKS;

/// Maximum number of hosts in a decoded list. No instance has more ranks: a longer list is a mistake or an attempt
/// to exhaust memory.
const MOST_HOSTS: usize = MOST_RANKS as usize;
/// Longest name of a host, in bytes (RFC 1123).
const LONGEST_HOST: usize = 253;
/// Maximum number of digits in a host's number, including leading zeros.
const MOST_DIGITS: usize = 20;

/// Longest hostlist that is shown to people, in characters.
const LONGEST_SHOWN: usize = 200;
/// Names that are shown of a longer one.
const FIRST_SHOWN: usize = 3;

/// Writes `hosts` as a hostlist in the same order. Folds only neighbours with consecutive numbers.
pub fn encode<S: AsRef<str>>(hosts: impl IntoIterator<Item = S>) -> String {
    let mut groups: Vec<Group> = Vec::new();
    for host in hosts {
        let next = Group::of(host.as_ref());
        match groups.last_mut() {
            Some(last) if last.takes(&next) => last.merge(next),
            _ => groups.push(next),
        }
    }
    groups.iter().map(Group::text).collect::<Vec<_>>().join(",")
}

/// As [`encode`], for people: of a list that is longer than a line of a screen, the first names and how many there are more.
pub fn shortened<S: AsRef<str>>(hosts: impl IntoIterator<Item = S>) -> String {
    let hosts: Vec<S> = hosts.into_iter().collect();
    let list = encode(&hosts);
    if list.chars().count() <= LONGEST_SHOWN || hosts.len() <= FIRST_SHOWN {
        return list;
    }
    format!("{} and {} more", encode(hosts.iter().take(FIRST_SHOWN)), hosts.len() - FIRST_SHOWN)
}

/// Reads a hostlist as a broker writes it, with at most one bracket in each name. Stops after as many hosts as an instance has ranks, and
/// leaves out names that are too long for a host. Text that is not a hostlist is read as a name.
pub fn decode(list: &str) -> Vec<String> {
    let mut hosts = Vec::new();
    items(list).for_each(|item| decode_item(item, MOST_HOSTS, &mut hosts));
    hosts
}

/// Why a text that a person wrote is not a hostlist.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HostlistError {
    /// It names no host.
    #[error("names no host: write a hostlist such as node[1-4,7]")]
    Empty,
    /// A part of it is neither a host's name nor a range.
    #[error("{0:?} is neither a node's name nor a range such as node[1-4,7]")]
    Part(String),
    /// It names a host twice.
    #[error("names {0} twice")]
    Twice(String),
    /// No instance has so many ranks.
    #[error("names more than {MOST_HOSTS} hosts, and no instance has more ranks")]
    TooLong,
}

/// Reads a hostlist that a person wrote: as [`decode`], but refuses what that leaves out or takes for a name.
///
/// # Errors
/// [`HostlistError`] names the part that is wrong.
pub fn parse(list: &str) -> Result<Vec<String>, HostlistError> {
    let mut hosts = Vec::new();
    for item in items(list).map(str::trim) {
        let wrong = || HostlistError::Part(item.to_owned());
        // Each range by itself, so that one without hosts, such as 4-1, is noticed.
        let ranges = match item.split_once('[') {
            Some((prefix, rest)) => {
                let (ranges, suffix) = rest.split_once(']').ok_or_else(wrong)?;
                ranges.split(',').map(|range| format!("{prefix}[{range}]{suffix}")).collect()
            }
            None => vec![item.to_owned()],
        };
        for range in ranges {
            let before = hosts.len();
            decode_item(&range, MOST_HOSTS + 1, &mut hosts);
            match hosts.get(before..) {
                _ if hosts.len() > MOST_HOSTS => return Err(HostlistError::TooLong),
                Some([]) | None => return Err(wrong()),
                Some(new) if !new.iter().all(|host| is_node_name(host)) => return Err(wrong()),
                Some(_) => {}
            }
        }
    }
    let mut known = HashSet::new();
    match hosts.iter().find(|host| !known.insert(host.as_str())) {
        Some(host) => Err(HostlistError::Twice(host.clone())),
        None if hosts.is_empty() => Err(HostlistError::Empty),
        None => Ok(hosts),
    }
}

/// True if Kubernetes accepts the name for a Node (a DNS subdomain of RFC 1123, in lower case).
fn is_node_name(name: &str) -> bool {
    let is_inner = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    let is_label = |label: &str| {
        label.starts_with(is_inner) && label.ends_with(is_inner) && label.chars().all(|c| is_inner(c) || c == '-')
    };
    name.len() <= LONGEST_HOST && name.split('.').all(is_label)
}

/// The parts of a hostlist between commas outside of brackets.
fn items(list: &str) -> impl Iterator<Item = &str> {
    let mut depth = 0_usize;
    let items = list.split(move |c| {
        match c {
            '[' => depth += 1,
            ']' => depth = depth.saturating_sub(1),
            _ => {}
        }
        c == ',' && depth == 0
    });
    items.filter(|item| !item.is_empty())
}

/// Adds the hosts of one part to `hosts`, until these are as many as `most`.
fn decode_item(item: &str, most: usize, hosts: &mut Vec<String>) {
    if hosts.len() >= most {
        return;
    }
    match item.split_once('[').and_then(|(prefix, rest)| Some((prefix, rest.split_once(']')?))) {
        Some((prefix, (_, suffix))) if prefix.len() + suffix.len() > LONGEST_HOST => {}
        Some((prefix, (ranges, suffix))) => {
            for range in ranges.split(',') {
                let (first, last) = range.split_once('-').unwrap_or((range, range));
                let width = first.len();
                if let (Ok(first), Ok(last), ..=MOST_DIGITS) = (first.parse::<u64>(), last.parse::<u64>(), width) {
                    let room = most.saturating_sub(hosts.len());
                    let numbers = (first..=last).take(room);
                    hosts.extend(numbers.map(|number| format!("{prefix}{number:0width$}{suffix}")));
                }
            }
        }
        None if item.len() > LONGEST_HOST => {}
        None => hosts.push(item.to_owned()),
    }
}

/// Hosts that share a prefix. A host whose name doesn't end with a number is a group of its own.
struct Group {
    prefix: String,
    ranges: Vec<Range>,
}

struct Range {
    first: u64,
    last: u64,
    /// Number of digits including leading zeros; 0 if there are no leading zeros.
    width: usize,
}

impl Group {
    fn of(host: &str) -> Self {
        let prefix = host.trim_end_matches(|c: char| c.is_ascii_digit());
        let digits = &host[prefix.len()..];
        let ranges = match digits.parse() {
            Ok(first) => {
                let width = if digits.len() > 1 && digits.starts_with('0') { digits.len() } else { 0 };
                vec![Range { first, last: first, width }]
            }
            // No number, or one that doesn't fit into a u64: keep the name as it is.
            Err(_) => return Self { prefix: host.to_owned(), ranges: Vec::new() },
        };
        Self { prefix: prefix.to_owned(), ranges }
    }

    fn takes(&self, next: &Self) -> bool {
        self.prefix == next.prefix && !self.ranges.is_empty() && !next.ranges.is_empty()
    }

    fn merge(&mut self, next: Self) {
        for range in next.ranges {
            match self.ranges.last_mut() {
                Some(last) if last.last.checked_add(1) == Some(range.first) && last.fits(range.width, range.first) => {
                    last.last = range.last;
                }
                _ => self.ranges.push(range),
            }
        }
    }

    fn text(&self) -> String {
        match self.ranges.as_slice() {
            [] => self.prefix.clone(),
            [one] if one.first == one.last => format!("{}{}", self.prefix, one.text()),
            many => {
                let inner = many.iter().map(Range::text).collect::<Vec<_>>().join(",");
                format!("{}[{inner}]", self.prefix)
            }
        }
    }
}

impl Range {
    /// True if a number with this width continues the range: `08`, `09`, `10` do, as do `9`, `10`; `09`, `010` do not.
    fn fits(&self, width: usize, number: u64) -> bool {
        width == self.width || (width == 0 && self.width > 0 && number.to_string().len() == self.width)
    }

    fn text(&self) -> String {
        let width = self.width;
        if self.first == self.last {
            format!("{:0width$}", self.first)
        } else {
            format!("{:0width$}-{:0width$}", self.first, self.last)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{HostlistError, MOST_HOSTS, decode, encode, parse, shortened};

    #[test]
    fn names_without_a_common_end_do_not_fill_the_screen() {
        assert_eq!(shortened((1..=1000).map(|n| format!("n{n}"))), "n[1-1000]");
        let cloud = (1..=1000).map(|n| format!("ip-10-0-0-{n}.compute.internal"));
        assert_eq!(
            shortened(cloud),
            "ip-10-0-0-1.compute.internal,ip-10-0-0-2.compute.internal,ip-10-0-0-3.compute.internal and 997 more"
        );
    }

    #[test]
    fn a_persons_hostlist_is_read_as_a_brokers_or_refused() {
        for list in ["node[1-4,7],login", "n1", "n[08-11]", "a.b-c[1-2].example.org", "n1, n2"] {
            assert_eq!(parse(list), Ok(decode(&list.replace(' ', ""))), "{list}");
        }
        let part = |text: &str| HostlistError::Part(text.to_owned());
        for (list, expected) in [
            ("", HostlistError::Empty),
            (",", HostlistError::Empty),
            ("n[1-x]", part("n[1-x]")),
            ("n[1-2,x]", part("n[1-2,x]")),
            ("n[4-1]", part("n[4-1]")),
            ("n[1-4", part("n[1-4")),
            ("n1]", part("n1]")),
            ("n[1-2][3-4]", part("n[1-2][3-4]")),
            ("a,Node1", part("Node1")),
            ("a b", part("a b")),
            ("n[1-3],n2", HostlistError::Twice("n2".to_owned())),
            ("n[1-16385]", HostlistError::TooLong),
            ("n[0-18446744073709551615]", HostlistError::TooLong),
        ] {
            assert_eq!(parse(list), Err(expected), "{list}");
        }
        assert_eq!(parse("n[1-16384]").map(|hosts| hosts.len()), Ok(MOST_HOSTS));
    }

    #[test]
    fn a_few_bytes_do_not_stand_for_a_million_long_names() {
        let long = format!("{}[0-1048575]", "a".repeat(254));
        assert!(decode(&long).is_empty());
        assert!(decode(&"a".repeat(254)).is_empty());
        for list in ["n[0-1048575]", "n[0-9999],m[0-9999]", &"n,".repeat(100_000)] {
            assert_eq!(decode(list).len(), MOST_HOSTS, "{list:.20}");
        }
        assert_eq!(decode("n[1-2]x"), ["n1x", "n2x"]);
    }

    #[test]
    fn consecutive_neighbours_are_folded_and_the_order_is_kept() {
        for (hosts, expected) in [
            (vec!["node1"], "node1"),
            (vec!["node1", "node2", "node3"], "node[1-3]"),
            (vec!["node1", "node3", "node2"], "node[1,3,2]"),
            (vec!["login", "node1", "node2"], "login,node[1-2]"),
            (vec!["node08", "node09", "node10"], "node[08-10]"),
            (vec!["node9", "node10"], "node[9-10]"),
            (vec!["node09", "node010"], "node[09,010]"),
            (vec!["a1", "b1", "a2"], "a1,b1,a2"),
            (
                vec!["ip-10-0-0-9.ec2.internal", "ip-10-0-0-10.ec2.internal"],
                "ip-10-0-0-9.ec2.internal,ip-10-0-0-10.ec2.internal",
            ),
            (vec!["n99999999999999999999999"], "n99999999999999999999999"),
            (vec![], ""),
        ] {
            assert_eq!(encode(&hosts), expected);
            assert_eq!(decode(expected), hosts);
        }
    }

    #[test]
    fn a_list_that_would_exhaust_memory_is_cut() {
        assert_eq!(decode("n[0-18446744073709551615]").len(), MOST_HOSTS);
        assert_eq!(decode(&format!("n[{}1-2]", "0".repeat(70_000))), Vec::<String>::new());
    }
}
