//! What one agent tells Prometheus: counts of what happened in this process, and facts as they were last observed.
//!
//! Whoever knows a fact hands in a plain struct ([`facts`]); nothing here asks anybody. A fact about the whole instance has one
//! teller, the planner or the lead's agent, and is forgotten when that agent is it no longer, so that sums count nothing twice. No
//! label names a node, a job, a user or anything else of which there may be many.

mod facts;
mod series;

use std::{
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use prometheus_client::{
    encoding::{EncodeLabelSet, prometheus_text, text},
    metrics::{counter::Counter, family::Family, histogram::Histogram, info::Info},
    registry::Registry,
};

pub use facts::{InstanceFacts, LeadFacts, NodeFacts, PHASES, Split};
use series::Facts;

/// `Content-Type` of [`Format::OpenMetrics`].
const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Every name begins with it.
const PREFIX: &str = "flux_distribute";
/// Seconds of a planner's round: milliseconds in a small cluster, seconds in one of thousands of nodes.
const ROUNDS: [f64; 10] = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 10.0];
/// Seconds of an installation: from packages that a peer has, to a slow line.
const INSTALLATIONS: [f64; 9] = [5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0, 1280.0];

/// The metrics of one agent. Clones share one state.
#[derive(Clone)]
pub struct Metrics(Arc<Inner>);

struct Inner {
    registry: Registry,
    requests: Family<ByCall, Counter>,
    rounds: Histogram,
    starts: Family<ByReason, Counter>,
    live_changes: Family<ByOutcome, Counter>,
    installations: Family<BySource, Histogram, fn() -> Histogram>,
    fetched: Family<BySource, Counter>,
    facts: Arc<Mutex<Facts>>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByCall {
    verb: &'static str,
    code: u16,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByReason {
    reason: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByOutcome {
    outcome: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct BySource {
    source: &'static str,
}

/// Why a broker is started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// None has run on this host for this instance.
    First,
    /// The one before it belonged to an earlier epoch.
    Epoch,
    /// The one before it has ended without an order of the agent.
    Died,
    /// The host has booted, or the agent has stopped the one before it.
    Again,
}

impl Start {
    const ALL: [Self; 4] = [Self::First, Self::Epoch, Self::Died, Self::Again];

    fn name(self) -> &'static str {
        match self {
            Self::First => "first",
            Self::Epoch => "epoch",
            Self::Died => "died",
            Self::Again => "again",
        }
    }
}

/// Where packages came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Source {
    /// Another node.
    Peer,
    /// `spec.packages.mirror`.
    Mirror,
    /// The channels, or the URLs of a lock.
    Source,
    /// The URL of a bundle.
    Bundle,
    /// They were on the host already.
    Host,
}

impl Source {
    /// Those that bytes are fetched from.
    const REMOTE: [Self; 4] = [Self::Peer, Self::Mirror, Self::Source, Self::Bundle];

    fn name(self) -> &'static str {
        match self {
            Self::Peer => "peer",
            Self::Mirror => "mirror",
            Self::Source => "source",
            Self::Bundle => "bundle",
            Self::Host => "host",
        }
    }
}

/// How the answer to a scrape is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// OpenMetrics 1.0.
    OpenMetrics,
    /// Prometheus' own text format, 0.0.4.
    Text,
}

impl Format {
    /// What a client with this `Accept` header reads. Prometheus names OpenMetrics; whatever names it not, such as a person's curl
    /// before `promtool check metrics`, gets the older format.
    pub fn wanted_by(accept: &str) -> Self {
        if accept.contains("application/openmetrics-text") { Self::OpenMetrics } else { Self::Text }
    }

    /// The answer's `Content-Type`.
    pub fn content_type(self) -> &'static str {
        match self {
            Self::OpenMetrics => OPEN_METRICS,
            Self::Text => prometheus_text::CONTENT_TYPE,
        }
    }
}

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::with_prefix(PREFIX);
        let inner = Inner {
            requests: Family::default(),
            rounds: Histogram::new(ROUNDS),
            starts: Family::default(),
            live_changes: Family::default(),
            installations: Family::new_with_constructor(|| Histogram::new(INSTALLATIONS)),
            fetched: Family::default(),
            facts: Arc::default(),
            registry: Registry::default(),
        };
        let version = Info::new([("version", env!("CARGO_PKG_VERSION"))]);
        registry.register("build", "Version of this agent", version);
        registry.register(
            "api_requests",
            "Requests of this agent to the API server; code 0: no answer",
            inner.requests.clone(),
        );
        registry.register(
            "planner_round_seconds",
            "How long this agent's rounds as the planner took",
            inner.rounds.clone(),
        );
        let help =
            "Starts of this node's broker: the first, of a new epoch, after it died, again after a boot or a stop";
        registry.register("broker_starts", help, inner.starts.clone());
        registry.register(
            "live_changes",
            "Attempts of this agent to load resources into the running instance",
            inner.live_changes.clone(),
        );
        registry.register(
            "installation_seconds",
            "How long installations of packages took on this node, by where most of their bytes came from",
            inner.installations.clone(),
        );
        registry.register("fetched_bytes", "Bytes of packages that this node has fetched", inner.fetched.clone());
        registry.register_collector(Box::new(series::Series(inner.facts.clone())));
        let metrics = Self(Arc::new(Inner { registry, ..inner }));
        metrics.begin_at_zero();
        metrics
    }
}

impl Metrics {
    /// Series with few label values begin at 0, so that `increase()` counts their first event too. It misses an event before the first
    /// scrape, which is why deaths of brokers also have a timestamp.
    fn begin_at_zero(&self) {
        for reason in Start::ALL.map(Start::name) {
            drop(self.0.starts.get_or_create(&ByReason { reason }));
        }
        for outcome in ["done", "failed"] {
            drop(self.0.live_changes.get_or_create(&ByOutcome { outcome }));
        }
        for source in Source::REMOTE.map(Source::name) {
            drop(self.0.fetched.get_or_create(&BySource { source }));
        }
    }

    /// Counts a request to the API server. `code`: the HTTP status of the answer; None if there was none.
    pub fn api_request(&self, verb: &'static str, code: Option<u16>) {
        self.0.requests.get_or_create(&ByCall { verb, code: code.unwrap_or(0) }).inc();
    }

    /// Counts a round of the planner.
    pub fn planner_round(&self, took: Duration) {
        self.0.rounds.observe(took.as_secs_f64());
    }

    /// Counts a start of the broker.
    pub fn broker_start(&self, why: Start) {
        self.0.starts.get_or_create(&ByReason { reason: why.name() }).inc();
        if why == Start::Died {
            self.facts().broker_died = Some(now());
        }
    }

    /// Counts an attempt to load resources into the running instance.
    pub fn live_change(&self, is_done: bool) {
        let outcome = if is_done { "done" } else { "failed" };
        self.0.live_changes.get_or_create(&ByOutcome { outcome }).inc();
    }

    /// Counts an installation that is done, and the bytes that were fetched for it, by source.
    pub fn installation(&self, took: Duration, bytes: &[(Source, u64)]) {
        let fetched = bytes.iter().filter(|(_, bytes)| *bytes > 0);
        for (source, bytes) in fetched.clone() {
            self.0.fetched.get_or_create(&BySource { source: source.name() }).inc_by(*bytes);
        }
        let most = fetched.max_by_key(|(_, bytes)| *bytes).map_or(Source::Host, |(source, _)| *source);
        self.0.installations.get_or_create(&BySource { source: most.name() }).observe(took.as_secs_f64());
    }

    /// What is so on this node now, and in the instance if this is the lead's agent.
    pub fn set_node(&self, node: NodeFacts, lead: Option<LeadFacts>) {
        let mut facts = self.facts();
        (facts.node, facts.lead) = (node, lead);
    }

    /// This agent is the planner, until the guard is dropped.
    pub fn planning(&self) -> Planning {
        self.facts().is_planner = true;
        Planning(self.clone())
    }

    /// What the planner has observed of the instance. None: there is none. Kept only while this agent is the planner.
    pub fn set_instance(&self, instance: Option<InstanceFacts>) {
        let mut facts = self.facts();
        facts.instance = instance.filter(|_| facts.is_planner);
    }

    /// The answer to a scrape.
    pub fn text(&self, format: Format) -> String {
        let (mut answer, registry) = (String::new(), &self.0.registry);
        let written = match format {
            Format::OpenMetrics => text::encode(&mut answer, registry),
            Format::Text => prometheus_text::encode(&mut answer, registry),
        };
        // Writing to a String does not fail.
        debug_assert!(written.is_ok());
        answer
    }

    fn facts(&self) -> MutexGuard<'_, Facts> {
        self.0.facts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Metrics").finish_non_exhaustive()
    }
}

/// While it lives, this agent is the planner.
#[derive(Debug)]
pub struct Planning(Metrics);

impl Drop for Planning {
    fn drop(&mut self) {
        let mut facts = self.0.facts();
        (facts.is_planner, facts.instance) = (false, None);
    }
}

/// Seconds since 1970, by this host's clock.
fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    /// All values but those of histograms, by series.
    fn values(metrics: &Metrics) -> BTreeMap<String, f64> {
        let text = metrics.text(Format::OpenMetrics);
        let samples = text.lines().filter(|line| !line.starts_with('#')).filter_map(|line| line.rsplit_once(' '));
        samples
            .filter(|(series, _)| !series.contains("_bucket"))
            .map(|(series, value)| {
                (series.strip_prefix("flux_distribute_").unwrap().to_owned(), value.parse().unwrap())
            })
            .collect()
    }

    fn lead() -> LeadFacts {
        let amount = |all, allocated| Split { all, allocated };
        LeadFacts {
            ranks_up: 2,
            ranks_down: 1,
            ranks_drained: 1,
            cores: amount(32, 8),
            gpus: amount(4, 0),
            jobs: Some((3, 5)),
            oldest_pending_since: Some(0),
            pending_nodes: Some(7),
        }
    }

    #[test]
    fn what_happened_is_counted_by_its_kind() {
        let metrics = Metrics::default();
        metrics.api_request("get", Some(200));
        metrics.api_request("get", Some(200));
        metrics.api_request("patch", None);
        [Start::First, Start::Died, Start::Died].into_iter().for_each(|why| metrics.broker_start(why));
        metrics.live_change(true);
        metrics.planner_round(Duration::from_millis(3));
        metrics.installation(Duration::from_secs(9), &[(Source::Peer, 90), (Source::Mirror, 10)]);
        metrics.installation(Duration::from_secs(1), &[(Source::Peer, 0), (Source::Source, 0)]);
        let values = values(&metrics);
        for (series, expected) in [
            ("api_requests_total{verb=\"get\",code=\"200\"}", 2.0),
            ("api_requests_total{verb=\"patch\",code=\"0\"}", 1.0),
            ("broker_starts_total{reason=\"died\"}", 2.0),
            ("live_changes_total{outcome=\"done\"}", 1.0),
            ("planner_round_seconds_count", 1.0),
            ("fetched_bytes_total{source=\"peer\"}", 90.0),
            ("fetched_bytes_total{source=\"mirror\"}", 10.0),
            ("installation_seconds_sum{source=\"peer\"}", 9.0),
            ("installation_seconds_sum{source=\"host\"}", 1.0),
        ] {
            assert_eq!(values.get(series), Some(&expected), "{series} of {values:#?}");
        }
    }

    #[test]
    fn counters_with_few_label_values_begin_at_zero() {
        let values = values(&Metrics::default());
        for series in [
            "broker_starts_total{reason=\"died\"}",
            "live_changes_total{outcome=\"failed\"}",
            "fetched_bytes_total{source=\"source\"}",
        ] {
            assert_eq!(values.get(series), Some(&0.0), "{series} of {values:#?}");
        }
    }

    #[test]
    fn an_agent_tells_of_the_instance_only_while_it_leads_or_plans() {
        let metrics = Metrics::default();
        let of = |prefix: &str| values(&metrics).keys().filter(|series| series.starts_with(prefix)).count();
        metrics.set_instance(Some(InstanceFacts::default()));
        assert_eq!((of("members"), of("ranks"), of("broker_up"), values(&metrics)["planner_is_me"]), (0, 0, 0, 0.0));

        metrics.set_node(NodeFacts { broker_up: Some(true) }, Some(lead()));
        let planning = metrics.planning();
        metrics.set_instance(Some(InstanceFacts { dumped_at: Some(5), ..InstanceFacts::default() }));
        assert_eq!((of("members{"), of("ranks{"), of("broker_up")), (PHASES.len(), 3, 1));
        let told = values(&metrics);
        for (series, expected) in [
            ("planner_is_me", 1.0),
            ("ranks{state=\"drained\"}", 1.0),
            ("cores", 32.0),
            ("cores_allocated", 8.0),
            ("jobs{state=\"pending\"}", 5.0),
            ("pending_nodes", 7.0),
            ("dump_timestamp_seconds", 5.0),
        ] {
            assert_eq!(told.get(series), Some(&expected), "{series}");
        }
        assert!(told["oldest_pending_job_seconds"] > 1e9);

        drop(planning);
        metrics.set_node(NodeFacts { broker_up: Some(false) }, None);
        assert_eq!((of("members"), of("ranks"), of("jobs"), of("cores"), of("dump")), (0, 0, 0, 0, 0));
        assert_eq!((values(&metrics)["planner_is_me"], values(&metrics)["broker_up"]), (0.0, 0.0));
        metrics.set_instance(Some(InstanceFacts::default()));
        assert_eq!(of("members"), 0, "a round that ends after the Lease was lost");
    }

    #[test]
    fn what_is_not_known_is_not_told() {
        let metrics = Metrics::default();
        let unknown = LeadFacts { jobs: None, oldest_pending_since: None, pending_nodes: None, ..lead() };
        metrics.set_node(NodeFacts { broker_up: None }, Some(unknown));
        let values = values(&metrics);
        let is_absent = |name: &str| !values.keys().any(|series| series.starts_with(name));
        assert!(["jobs", "oldest", "pending_nodes", "broker_up"].into_iter().all(is_absent), "{values:?}");
    }

    #[test]
    fn openmetrics_is_for_those_who_ask_for_it() {
        let prometheus = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.1";
        for (accept, expected) in [(prometheus, Format::OpenMetrics), ("*/*", Format::Text), ("", Format::Text)] {
            assert_eq!(Format::wanted_by(accept), expected, "{accept}");
        }
        assert!(Metrics::default().text(Format::OpenMetrics).ends_with("# EOF\n"));
        assert!(!Metrics::default().text(Format::Text).contains("EOF"));
    }
}
