//! Every roster that is ever published: there must be one history of them, and in each one place for each member.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
};

use api::{CONFIGMAP_ROSTER, CONFIGMAP_ROSTER_KEY, NAMESPACE, Roster, RosterError};
use futures::StreamExt;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::{
    Api, Client,
    runtime::{WatchStreamExt, watcher},
};

/// What was seen.
#[derive(Clone, Default)]
pub struct Rosters(Arc<Mutex<Seen>>);

#[derive(Default)]
struct Seen {
    texts: BTreeMap<(String, u64, u64), String>,
    wrong: Vec<String>,
    last: Option<Roster>,
    moved: Vec<String>,
}

impl Rosters {
    /// Follows them for ever.
    pub async fn follow(self, client: Client) {
        let maps: Api<ConfigMap> = Api::namespaced(client, NAMESPACE);
        let config = watcher::Config::default().fields(&format!("metadata.name={CONFIGMAP_ROSTER}"));
        let mut maps = std::pin::pin!(watcher(maps, config).default_backoff().applied_objects());
        while let Some(map) = maps.next().await {
            if let Some(text) = map.ok().and_then(|map| map.data?.remove(CONFIGMAP_ROSTER_KEY)) {
                self.0.lock().unwrap_or_else(PoisonError::into_inner).take_in(text);
            }
        }
    }

    /// What is wrong with them, once.
    pub fn wrong(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner).wrong)
    }

    /// Members that got another rank while they had one, ranks that declare less than before: in a flat tree of one epoch,
    /// where no machine shrinks, there is no reason for either. Once.
    pub fn moved(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner).moved)
    }
}

impl Seen {
    fn take_in(&mut self, text: String) {
        let roster = match Roster::parse(&text) {
            Ok(roster) => roster,
            // One row gives it a format that no version knows.
            Err(RosterError::Newer(_)) => return,
            Err(_) => return self.wrong.push(format!("a roster that can't be read: {text}")),
        };
        let mut members = BTreeMap::new();
        for (rank, member) in roster.ranks.iter().filter_map(|(rank, entry)| Some((rank, entry.member.as_ref()?))) {
            if let Some(other) = members.insert(member.uid.clone(), rank) {
                self.wrong.push(format!("{} has the ranks {other} and {rank}", member.node));
            }
        }
        if let Some(last) = self.last.as_ref().filter(|last| last.epoch == roster.epoch) {
            for (rank, entry) in &last.ranks {
                let now = entry.member.as_ref().and_then(|member| members.get(&member.uid).copied());
                if now.is_some_and(|now| now != rank) {
                    self.moved.push(format!("{:?} from rank {rank} to {now:?}", entry.member));
                }
                let after = roster.ranks.get(rank).and_then(|after| after.resources.as_ref());
                let covers = |before| after.is_some_and(|after| after.covers(before));
                if !entry.resources.as_ref().is_none_or(covers) {
                    self.moved.push(format!("rank {rank} declares {after:?} after {:?}", entry.resources));
                }
            }
        }
        self.last = Some(roster.clone());
        let key = (roster.instance_id, roster.epoch, roster.revision);
        match self.texts.get(&key) {
            Some(known) if *known != text => self.wrong.push(format!("two rosters {key:?}: {known} and {text}")),
            _ => {
                self.texts.insert(key, text);
            }
        }
    }
}
