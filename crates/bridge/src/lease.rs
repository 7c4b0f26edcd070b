//! Lease `flux-bridge`: who may write, and for which life of the lead's broker recovery is over.

use std::time::Duration;

use k8s_openapi::{
    api::coordination::v1::{Lease, LeaseSpec},
    apimachinery::pkg::apis::meta::v1::MicroTime,
    jiff::Timestamp,
};
use kube::{
    Api, Client,
    api::{ObjectMeta, PostParams},
};
use tokio::time::Instant;

use api::NAMESPACE;
use cluster::{
    ApiError, call,
    lease::{Sight, metadata_to_write},
    lease_rules::{LeaseStep, next_step},
};

/// Name of the Lease.
const LEASE_BRIDGE: &str = "flux-bridge";
/// Annotation: the life of the lead's broker ([`pods::world::Broker`]) for which recovery is over.
const ANNOTATION_RECOVERED: &str = "distribute.flux-framework.org/broker";
/// How long a holder may be silent.
const DURATION: Duration = Duration::from_secs(15);
/// Longest name of a Node, in characters. A holder's name comes from an object that any agent may write, without a limit.
const LONGEST_NAME: usize = 253;
/// How often the Lease is renewed.
pub(crate) const RENEW_EVERY: Duration = Duration::from_secs(4);

/// The Lease as this process knows it.
pub(crate) struct BridgeLease {
    leases: Api<Lease>,
    identity: String,
    /// Until when it is certainly ours.
    until: Option<Instant>,
    /// What [`ANNOTATION_RECOVERED`] names.
    recovered: Option<String>,
    /// The agent that holds it, if that is not this one.
    holder: Option<String>,
    /// The API server lets no agent read or write it, as before deploy/pods.yaml is applied.
    is_forbidden: bool,
    sight: Sight,
}

impl BridgeLease {
    pub(crate) fn new(client: Client, identity: String) -> Self {
        Self {
            leases: Api::namespaced(client, NAMESPACE),
            identity,
            until: None,
            recovered: None,
            holder: None,
            is_forbidden: false,
            sight: Sight::default(),
        }
    }

    /// True if this agent holds the Lease for long enough to send a write that begins now. A write that arrives later still names what was
    /// decided about: the uid of a pod or Job, or the broker by its connection.
    pub(crate) fn is_ours(&self) -> bool {
        self.until.is_some_and(|until| Instant::now() + RENEW_EVERY / 2 < until)
    }

    /// Why the Lease is not ours.
    pub(crate) fn waits_for(&self) -> Option<String> {
        (!self.is_ours()).then(|| match &self.holder {
            _ if self.is_forbidden => {
                format!("agents may not write Lease {LEASE_BRIDGE}: apply deploy/pods.yaml, which lets them")
            }
            Some(holder) => format!("agent {holder} still holds Lease {LEASE_BRIDGE}"),
            None => format!("this agent does not hold Lease {LEASE_BRIDGE}"),
        })
    }

    /// What [`ANNOTATION_RECOVERED`] names.
    pub(crate) fn recovered(&self) -> Option<&str> {
        self.recovered.as_deref()
    }

    /// Takes or renews the Lease, unless another agent holds it. `recovered`: the life to write into [`ANNOTATION_RECOVERED`]; None keeps what
    /// is there.
    ///
    /// # Errors
    /// The API server's. Another agent that was faster is no error.
    pub(crate) async fn renew(&mut self, recovered: Option<&str>) -> Result<(), ApiError> {
        let renewed = self.take_or_renew(recovered).await;
        self.is_forbidden = renewed.as_ref().is_err_and(|error| error.code() == Some(403));
        renewed
    }

    async fn take_or_renew(&mut self, recovered: Option<&str>) -> Result<(), ApiError> {
        let asked = Instant::now();
        let found = call("get Lease flux-bridge", self.leases.get_opt(LEASE_BRIDGE)).await?;
        let view = found.as_ref().map(|lease| self.sight.view(lease, DURATION));
        let before = found.as_ref().and_then(recovered_in).map(str::to_owned);
        let recovered = recovered.map(str::to_owned).or(before.clone());
        let step = next_step(view.as_ref(), &self.identity);
        let (metadata, create) = match (step, found) {
            (LeaseStep::Yield(_), found) => {
                let holder = found.and_then(|lease| lease.spec?.holder_identity);
                self.holder = holder.map(|name| name.chars().take(LONGEST_NAME).collect());
                (self.until, self.recovered) = (None, before);
                return Ok(());
            }
            (LeaseStep::Renew | LeaseStep::Take, Some(lease)) => (metadata_to_write(lease.metadata), false),
            _ => (ObjectMeta { name: Some(LEASE_BRIDGE.to_owned()), ..ObjectMeta::default() }, true),
        };
        let mut lease = Lease { metadata, spec: Some(self.spec()) };
        if let Some(life) = &recovered {
            lease.metadata.annotations.get_or_insert_default().insert(ANNOTATION_RECOVERED.to_owned(), life.clone());
        }
        let parameters = PostParams::default();
        let written = match create {
            true => call("create Lease flux-bridge", self.leases.create(&parameters, &lease)).await,
            // It names the resourceVersion that was read: of two that take it at once, one gets 409.
            false => call("renew Lease flux-bridge", self.leases.replace(LEASE_BRIDGE, &parameters, &lease)).await,
        };
        match written {
            Ok(lease) => {
                self.sight.view(&lease, DURATION);
                (self.until, self.recovered, self.holder) = (Some(asked + DURATION), recovered, None);
                Ok(())
            }
            Err(error) if error.code() == Some(409) => Ok(()),
            Err(error) => Err(error),
        }
    }

    fn spec(&self) -> LeaseSpec {
        LeaseSpec {
            holder_identity: Some(self.identity.clone()),
            lease_duration_seconds: i32::try_from(DURATION.as_secs()).ok(),
            renew_time: Some(MicroTime(Timestamp::now())),
            ..LeaseSpec::default()
        }
    }
}

fn recovered_in(lease: &Lease) -> Option<&str> {
    lease.metadata.annotations.as_ref()?.get(ANNOTATION_RECOVERED).map(String::as_str)
}
