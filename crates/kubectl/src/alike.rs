//! Things that are alike share a line.

use model::hostlist;

/// Groups of those that have the same key, with their key, in the order in which the first of each comes.
pub(crate) fn alike<T, K: PartialEq>(items: impl IntoIterator<Item = T>, key: impl Fn(&T) -> K) -> Vec<(K, Vec<T>)> {
    let mut groups: Vec<(K, Vec<T>)> = Vec::new();
    for item in items {
        let own = key(&item);
        match groups.iter_mut().find(|(known, _)| *known == own) {
            Some((_, group)) => group.push(item),
            None => groups.push((own, vec![item])),
        }
    }
    groups
}

/// Longest hostlist that is shown, in characters: more than a line of a screen would hide the rest.
const LONGEST: usize = 200;
/// Names that are shown of a longer one.
const FIRST: usize = 3;

/// Names of nodes as a hostlist; of one that is too long, the first names and how many there are more.
pub(crate) fn names<'a>(names: impl Iterator<Item = &'a str>) -> String {
    let names: Vec<&str> = names.collect();
    let list = hostlist::encode(&names);
    if list.chars().count() <= LONGEST || names.len() <= FIRST {
        return list;
    }
    format!("{} and {} more", names.get(..FIRST).unwrap_or(&names).join(","), names.len() - FIRST)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_stand_in_the_order_of_their_first() {
        let groups = alike([3, 2, 5, 4, 1], |number| number % 2);
        assert_eq!(groups, [(1, vec![3, 5, 1]), (0, vec![2, 4])]);
    }

    #[test]
    fn names_without_a_common_end_do_not_fill_the_screen() {
        assert_eq!(
            names((1..=1000).map(|n| format!("n{n}")).collect::<Vec<_>>().iter().map(String::as_str)),
            "n[1-1000]"
        );
        let cloud: Vec<_> = (1..=1000).map(|n| format!("ip-10-0-0-{n}.compute.internal")).collect();
        assert_eq!(
            names(cloud.iter().map(String::as_str)),
            "ip-10-0-0-1.compute.internal,ip-10-0-0-2.compute.internal,ip-10-0-0-3.compute.internal and 997 more"
        );
    }
}
