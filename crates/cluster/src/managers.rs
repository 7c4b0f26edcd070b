//! Leaves out who manages which fields (`metadata.managedFields`), which our program never looks at. Whoever may write an object may
//! nest fields there so deeply that our client can't read them (serde_json reads 128 levels), and the API server takes them.

use std::mem;

/// Where they begin. In the text of a JSON string, a backslash stands before each of these quotes.
const BEGIN: &[u8] = b"\"managedFields\":[";

/// Empties each list of managers in an answer.
#[derive(Default)]
pub(super) struct Managers {
    /// The end of what has arrived, if it may be the beginning of a list.
    kept: Vec<u8>,
    /// Set within a list.
    inside: Option<Inside>,
}

/// Where in a list what has arrived ends.
struct Inside {
    /// Brackets and braces that are open, that of the list among them.
    open: usize,
    in_string: bool,
    /// After a backslash.
    is_escaped: bool,
}

impl Managers {
    /// What is left of `data`; what may be the beginning of a list comes later.
    pub(super) fn pass(&mut self, data: &[u8]) -> Vec<u8> {
        let mut bytes = mem::take(&mut self.kept);
        bytes.extend_from_slice(data);
        let (mut passed, mut rest) = (Vec::with_capacity(bytes.len()), &bytes[..]);
        loop {
            if let Some(inside) = &mut self.inside {
                let Some(end) = rest.iter().position(|byte| inside.ends_with(*byte)) else { return passed };
                self.inside = None;
                rest = &rest[end..];
            }
            let Some(found) = rest.windows(BEGIN.len()).position(|window| window == BEGIN) else { break };
            let (before, after) = rest.split_at(found + BEGIN.len());
            passed.extend_from_slice(before);
            self.inside = Some(Inside { open: 1, in_string: false, is_escaped: false });
            rest = after;
        }
        let longest = rest.len().min(BEGIN.len() - 1);
        let kept = (0..=longest).rev().find(|length| rest.ends_with(&BEGIN[..*length])).unwrap_or_default();
        let (all, beginning) = rest.split_at(rest.len() - kept);
        passed.extend_from_slice(all);
        self.kept = beginning.to_vec();
        passed
    }

    /// What was kept, at the end of the answer.
    pub(super) fn end(&mut self) -> Vec<u8> {
        mem::take(&mut self.kept)
    }
}

impl Inside {
    /// True if the list ends with this byte, its last bracket.
    fn ends_with(&mut self, byte: u8) -> bool {
        match byte {
            _ if self.is_escaped => self.is_escaped = false,
            b'\\' if self.in_string => self.is_escaped = true,
            b'"' => self.in_string = !self.in_string,
            b'[' | b'{' if !self.in_string => self.open += 1,
            b']' | b'}' if !self.in_string => self.open -= 1,
            _ => {}
        }
        self.open == 0
    }
}
