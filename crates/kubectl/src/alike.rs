//! Things that are alike share a line.

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_stand_in_the_order_of_their_first() {
        let groups = alike([3, 2, 5, 4, 1], |number| number % 2);
        assert_eq!(groups, [(1, vec![3, 5, 1]), (0, vec![2, 4])]);
    }
}
