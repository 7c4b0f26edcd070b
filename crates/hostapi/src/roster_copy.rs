//! A host's own copy of the roster. Thousands of ranks are a megabyte of text, so that all clones share it, it is parsed at most
//! once, and a stage sends it only if the agent does not have it yet.

use std::sync::{Arc, OnceLock};

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use api::Roster;

/// The text of `<prefix>/etc/roster.json`.
#[derive(Clone, Debug)]
pub struct RosterCopy(Arc<Copied>);

#[derive(Debug)]
struct Copied {
    text: String,
    parsed: OnceLock<Option<Arc<Roster>>>,
}

impl RosterCopy {
    /// The text, whether it can be parsed or not.
    pub fn text(&self) -> &str {
        &self.0.text
    }

    /// The roster; None if this version can't read it.
    pub fn roster(&self) -> Option<&Arc<Roster>> {
        self.0.parsed.get_or_init(|| Roster::parse(self.text()).ok().map(Arc::new)).as_ref()
    }
}

impl From<String> for RosterCopy {
    fn from(text: String) -> Self {
        Self(Arc::new(Copied { text, parsed: OnceLock::new() }))
    }
}

impl PartialEq for RosterCopy {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0) || self.text() == other.text()
    }
}

impl Eq for RosterCopy {}

impl Serialize for RosterCopy {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.text())
    }
}

impl<'de> Deserialize<'de> for RosterCopy {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer).map(Self::from)
    }
}

/// Which content a file has, without reading it. Another file has got its name, or root has written to it, if that differs.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileVersion {
    /// Device and inode number.
    pub inode: (u64, u64),
    /// Time of the last change of content or inode (`st_ctime`, which no program can set): seconds and nanoseconds.
    pub changed: (i64, i64),
    /// Bytes.
    pub length: u64,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Answer, FakeHost, HostView, Order, look_again};

    #[test]
    fn the_copy_is_sent_again_only_if_its_file_has_changed() {
        let version = |length| FileVersion { inode: (1, 2), changed: (3, 4), length };
        let view = |length, text: Option<&str>| HostView {
            roster: text.map(|text| text.to_owned().into()),
            roster_version: Some(version(length)),
            ..HostView::default()
        };
        let answers = [view(1, Some("a")), view(1, None), view(2, Some("b")), HostView::default()];
        let host = FakeHost::answering(answers.map(|view| Ok(Answer::Observed(Box::new(view)))));
        let mut before = HostView::default();
        let again = |length| Order::ObserveAgain { known: version(length) };
        for (expected, order) in
            [(Some("a"), Order::Observe), (Some("a"), again(1)), (Some("b"), again(1)), (None, again(2))]
        {
            before = futures::executor::block_on(look_again(&host, &before)).unwrap();
            assert_eq!(before.roster.as_ref().map(RosterCopy::text), expected);
            assert_eq!(host.take_orders(), [order]);
        }
    }
}
