//! Helpers for sentences in messages.

/// `count` and `thing`, in the plural if needed: `1 node`, `2 nodes`.
pub fn many(count: impl Into<u64>, thing: &str) -> String {
    let count = count.into();
    format!("{count} {thing}{}", if count == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_one_thing_is_singular() {
        for (count, expected) in [(0_u32, "0 nodes"), (1, "1 node"), (2, "2 nodes")] {
            assert_eq!(many(count, "node"), expected);
        }
    }
}
