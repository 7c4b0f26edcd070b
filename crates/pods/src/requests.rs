//! What a pod asks of a node, as kube-scheduler computes it (component-helpers, resource/helpers.go, `PodRequests`).

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::{
    api::core::v1::{Container, ContainerStatus, Pod, PodSpec, PodStatus},
    apimachinery::pkg::api::resource::Quantity,
};

use api::quantity::{self, NotAQuantity};

/// Most host ports, and most extended resources, that count of one pod. `check_fields` refuses a pod for Flux that has more; a pod for another
/// scheduler may have any number, and each decision compares all pods of a node with those that wait.
const MOST_COUNTED: usize = 500;

/// Reason of condition PodResizePending: the node could never take it.
pub(crate) const INFEASIBLE: &str = "Infeasible";
/// Reason of condition PodResizePending: there is no room now.
const DEFERRED: &str = "Deferred";

/// What a pod asks of a node, or what several ask together.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Requests {
    /// Thousandths of a hardware thread.
    pub cpu: u64,
    /// Bytes.
    pub memory: u64,
    /// Bytes of local ephemeral storage.
    pub ephemeral: u64,
    /// All other resources by name: those of device plugins, in pieces, and huge pages, in bytes.
    pub extended: BTreeMap<String, u64>,
    /// Ports of the node.
    pub ports: BTreeSet<HostPort>,
}

/// So much CPU and memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Size {
    /// Thousandths of a hardware thread.
    pub cpu: u64,
    /// Bytes.
    pub memory: u64,
}

impl Size {
    /// Both together.
    pub fn saturating_add(self, other: Self) -> Self {
        Self { cpu: self.cpu.saturating_add(other.cpu), memory: self.memory.saturating_add(other.memory) }
    }

    /// What is left without `other`.
    pub fn saturating_sub(self, other: Self) -> Self {
        Self { cpu: self.cpu.saturating_sub(other.cpu), memory: self.memory.saturating_sub(other.memory) }
    }
}

/// A port of the node that a container listens on.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct HostPort {
    /// The port's number.
    pub port: i32,
    /// `TCP`, `UDP` or `SCTP`.
    pub protocol: String,
    /// The address; empty for all.
    pub ip: String,
}

impl HostPort {
    /// True if a pod with one of `taken` and a pod with this port can't be on one node: same port and protocol, at an address that both have.
    /// Looks up two entries, however many there are.
    pub fn conflicts_with_any(&self, taken: &BTreeSet<Self>) -> bool {
        let at = |ip: &str| Self { ip: ip.to_owned(), ..self.clone() };
        // The one for all addresses comes first.
        let is_same = |first: &Self| (first.port, &first.protocol) == (self.port, &self.protocol);
        let first = taken.range(at("")..).next().filter(|first| is_same(first));
        first.is_some_and(|first| first.ip.is_empty() || self.ip.is_empty()) || taken.contains(self)
    }
}

/// A quantity of the pod can't be read. The API server refuses such pods.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("can't read the request for {resource}")]
pub struct UnreadableRequest {
    /// Name of the resource.
    pub resource: String,
    /// What is wrong.
    pub source: NotAQuantity,
}

impl Requests {
    /// The requests of `pod`: what its containers and sidecars ask together, or what one of its init containers asks
    /// beside the sidecars before it, whichever is larger; the pod's own requests in their place; and its overhead. For a
    /// container that was resized, the largest of what it asks, was allocated and has.
    ///
    /// # Errors
    /// [`UnreadableRequest`].
    pub fn of(pod: &Pod) -> Result<Self, UnreadableRequest> {
        Self::read(pod, resize_pending(pod) == Some(INFEASIBLE))
    }

    /// What of the CPU and memory kubelet has not granted yet, because it has deferred a resize of the pod until there is room.
    ///
    /// # Errors
    /// [`UnreadableRequest`].
    pub fn deferred(pod: &Pod) -> Result<Size, UnreadableRequest> {
        if resize_pending(pod) != Some(DEFERRED) {
            return Ok(Size::default());
        }
        Ok(Self::of(pod)?.size().saturating_sub(Self::read(pod, true)?.size()))
    }

    /// Reads the requests. `only_granted`: of a container whose resize waits, what kubelet has granted counts, not what the spec asks for.
    fn read(pod: &Pod, only_granted: bool) -> Result<Self, UnreadableRequest> {
        let Some(spec) = &pod.spec else { return Ok(Self::default()) };
        let mut amounts = of_containers(spec, pod.status.as_ref(), only_granted)?;
        let own = spec.resources.as_ref().and_then(|own| own.requests.as_ref());
        for (name, amount) in Amounts::read(own)?.0 {
            if matches!(name.as_str(), "cpu" | "memory") || name.starts_with("hugepages-") {
                amounts.0.insert(name, amount);
            }
        }
        amounts.add(&Amounts::read(spec.overhead.as_ref())?);
        Ok(Self { ports: host_ports(spec), ..amounts.into() })
    }

    /// The CPU and memory.
    pub fn size(&self) -> Size {
        Size { cpu: self.cpu, memory: self.memory }
    }

    /// Adds `other`.
    pub fn add(&mut self, other: &Self) {
        self.combine(other, u64::saturating_add);
    }

    /// The least that satisfies both, one at a time.
    pub fn max(&self, other: &Self) -> Self {
        let mut largest = self.clone();
        largest.combine(other, u64::max);
        largest
    }

    /// Takes the amounts of both together by `rule`, and the ports of both.
    fn combine(&mut self, other: &Self, rule: fn(u64, u64) -> u64) {
        self.cpu = rule(self.cpu, other.cpu);
        self.memory = rule(self.memory, other.memory);
        self.ephemeral = rule(self.ephemeral, other.ephemeral);
        for (name, amount) in &other.extended {
            let combined = self.extended.entry(name.clone()).or_default();
            *combined = rule(*combined, *amount);
        }
        self.ports.extend(other.ports.iter().cloned());
    }
}

/// The number of cores that a pod holds which asks for `cpu` thousandths of a hardware thread, on nodes whose cores have
/// `threads` of them. At least one: Flux gives nothing less, so a pod that asks for nothing holds a core too.
pub fn cores(cpu: u64, threads: u32) -> u32 {
    u32::try_from(cpu.div_ceil(1000 * u64::from(threads.max(1)))).unwrap_or(u32::MAX).max(1)
}

/// Amounts by resource: `cpu` in thousandths, everything else in whole units.
#[derive(Debug, Clone, Default)]
pub(crate) struct Amounts(pub(crate) BTreeMap<String, u64>);

impl Amounts {
    pub(crate) fn read(list: Option<&BTreeMap<String, Quantity>>) -> Result<Self, UnreadableRequest> {
        let read = |(name, quantity): (&String, &Quantity)| {
            let amount = if name == "cpu" { quantity::milli(&quantity.0) } else { quantity::whole(&quantity.0) };
            let unreadable = |source| UnreadableRequest { resource: name.clone(), source };
            amount.map(|amount| (name.clone(), amount)).map_err(unreadable)
        };
        Ok(Self(list.into_iter().flatten().map(read).collect::<Result<_, _>>()?))
    }

    fn add(&mut self, other: &Self) {
        for (name, amount) in &other.0 {
            let sum = self.0.entry(name.clone()).or_default();
            *sum = sum.saturating_add(*amount);
        }
    }

    /// Adds what `other` has of the resources that are in this one.
    fn add_to_own(&mut self, other: &Self) {
        for (name, amount) in &mut self.0 {
            *amount = amount.saturating_add(other.0.get(name).copied().unwrap_or_default());
        }
    }

    fn raise_to(&mut self, other: &Self) {
        for (name, amount) in &other.0 {
            let largest = self.0.entry(name.clone()).or_default();
            *largest = (*largest).max(*amount);
        }
    }
}

impl From<Amounts> for Requests {
    fn from(Amounts(mut amounts): Amounts) -> Self {
        let mut take = |name: &str| amounts.remove(name).unwrap_or_default();
        let (cpu, memory, ephemeral) = (take("cpu"), take("memory"), take("ephemeral-storage"));
        let extended = amounts.into_iter().filter(|(_, amount)| *amount > 0).take(MOST_COUNTED).collect();
        Self { cpu, memory, ephemeral, extended, ports: BTreeSet::new() }
    }
}

/// Why kubelet has not resized the pod: the reason of condition PodResizePending.
pub(crate) fn resize_pending(pod: &Pod) -> Option<&str> {
    let conditions = pod.status.as_ref()?.conditions.as_ref()?;
    conditions.iter().find(|condition| condition.type_ == "PodResizePending")?.reason.as_deref()
}

/// An init container that runs beside the others until the pod ends.
fn is_sidecar(container: &Container) -> bool {
    container.restart_policy.as_deref() == Some("Always")
}

/// Costs no more than there are requests: anybody may create a pod with thousands of containers, and of each pod that changes this is computed
/// again.
fn of_containers<'a>(
    spec: &PodSpec,
    status: Option<&'a PodStatus>,
    only_granted: bool,
) -> Result<Amounts, UnreadableRequest> {
    let by_name = |statuses: Option<&'a Vec<ContainerStatus>>| -> BTreeMap<&str, &ContainerStatus> {
        statuses.into_iter().flatten().map(|status| (status.name.as_str(), status)).collect()
    };
    let own = by_name(status.and_then(|status| status.container_statuses.as_ref()));
    let init = by_name(status.and_then(|status| status.init_container_statuses.as_ref()));
    let of = |container: &Container, statuses: &BTreeMap<&str, &ContainerStatus>| {
        let requests = container.resources.as_ref().and_then(|resources| resources.requests.as_ref());
        let status = statuses.get(container.name.as_str());
        let allocated = status.and_then(|status| status.allocated_resources.as_ref());
        let actual = status.and_then(|status| status.resources.as_ref()?.requests.as_ref());
        let mut amounts = match only_granted && (allocated.is_some() || actual.is_some()) {
            true => Amounts::default(),
            false => Amounts::read(requests)?,
        };
        amounts.raise_to(&Amounts::read(allocated)?);
        amounts.raise_to(&Amounts::read(actual)?);
        Ok(amounts)
    };
    let mut sum = Amounts::default();
    for container in &spec.containers {
        sum.add(&of(container, &own)?);
    }
    let (mut sidecars, mut largest) = (Amounts::default(), Amounts::default());
    for container in spec.init_containers.iter().flatten() {
        let mut amounts = of(container, &init)?;
        if is_sidecar(container) {
            sum.add(&amounts);
            sidecars.add(&amounts);
        } else {
            // What only the sidecars ask for is in the sum already.
            amounts.add_to_own(&sidecars);
            largest.raise_to(&amounts);
        }
    }
    sum.raise_to(&largest);
    Ok(sum)
}

/// At most [`MOST_COUNTED`].
fn host_ports(spec: &PodSpec) -> BTreeSet<HostPort> {
    let sidecars = spec.init_containers.iter().flatten().filter(|container| is_sidecar(container));
    let ports = spec.containers.iter().chain(sidecars).flat_map(|container| container.ports.iter().flatten());
    let ports = ports.filter_map(|port| {
        Some(HostPort {
            port: port.host_port.filter(|port| *port > 0)?,
            protocol: port.protocol.clone().unwrap_or_else(|| "TCP".into()),
            ip: port.host_ip.clone().filter(|ip| ip != "0.0.0.0" && ip != "::").unwrap_or_default(),
        })
    });
    ports.take(MOST_COUNTED).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn requests(spec: Value, status: Value) -> Result<Requests, UnreadableRequest> {
        let pod = json!({"metadata": {"name": "p"}, "spec": spec, "status": status});
        Requests::of(&serde_json::from_value(pod).unwrap())
    }

    fn asks(cpu: &str, memory: &str) -> Value {
        json!({"name": "c", "resources": {"requests": {"cpu": cpu, "memory": memory}}})
    }

    fn sidecar(cpu: &str, memory: &str) -> Value {
        let mut container = asks(cpu, memory);
        container["restartPolicy"] = json!("Always");
        container
    }

    #[test]
    fn a_pod_asks_what_kube_scheduler_computes() {
        for (what, spec, cpu, memory) in [
            ("nothing", json!({"containers": [{"name": "c"}]}), 0, 0),
            ("two containers", json!({"containers": [asks("1", "1Ki"), asks("500m", "1Ki")]}), 1500, 2048),
            (
                "a larger init container",
                json!({"containers": [asks("1", "1Ki")], "initContainers": [asks("500m", "9Ki"), asks("2", "1")]}),
                2000,
                9216,
            ),
            (
                "a sidecar runs beside the containers",
                json!({"containers": [asks("1", "1Ki")], "initContainers": [sidecar("500m", "1Ki")]}),
                1500,
                2048,
            ),
            (
                "an init container runs beside the sidecars before it",
                json!({"containers": [asks("1", "0")], "initContainers":
                    [asks("3", "0"), sidecar("1", "0"), asks("3", "0"), sidecar("1", "0")]}),
                4000,
                0,
            ),
            (
                "the pod's own requests replace those of its containers",
                json!({"containers": [asks("1", "1Ki")], "resources": {"requests": {"cpu": "3", "example.com/x": "1"}}}),
                3000,
                1024,
            ),
            (
                "overhead",
                json!({"containers": [asks("1", "1Ki")], "overhead": {"cpu": "250m", "memory": "1Ki"}}),
                1250,
                2048,
            ),
        ] {
            let requests = requests(spec, Value::Null).unwrap();
            assert_eq!((requests.cpu, requests.memory), (cpu, memory), "{what}");
            assert_eq!(requests.extended, BTreeMap::new(), "{what}");
        }
    }

    #[test]
    fn a_resized_container_counts_by_its_largest_size() {
        let status = |allocated: &str, actual: &str, conditions: Value| {
            let requests = json!({"requests": {"cpu": actual}});
            json!({"conditions": conditions, "containerStatuses": [{"name": "c", "image": "", "imageID": "", "ready": true,
                "restartCount": 0, "allocatedResources": {"cpu": allocated}, "resources": requests}]})
        };
        let infeasible = json!([{"type": "PodResizePending", "status": "True", "reason": "Infeasible"}]);
        let deferred = json!([{"type": "PodResizePending", "status": "True", "reason": "Deferred"}]);
        for (status, expected) in [
            (status("1", "1", json!([])), 2000),
            (status("3", "1", json!([])), 3000),
            (status("1", "4", json!([])), 4000),
            (status("1", "1500m", infeasible), 1500),
            (status("1", "1500m", deferred), 2000),
        ] {
            let requests = requests(json!({"containers": [asks("2", "0")]}), status.clone()).unwrap();
            assert_eq!(requests.cpu, expected, "{status}");
        }
        for (reason, expected) in [("Deferred", 500), ("Infeasible", 0)] {
            let pending = json!([{"type": "PodResizePending", "status": "True", "reason": reason}]);
            let pod = json!({"metadata": {}, "spec": {"containers": [asks("2", "0")]}, "status": status("1", "1500m", pending)});
            let deferred = Requests::deferred(&serde_json::from_value(pod).unwrap()).unwrap();
            assert_eq!(deferred, Size { cpu: expected, memory: 0 }, "{reason}");
        }
    }

    #[test]
    fn storage_devices_huge_pages_and_ports_are_counted() {
        let container = json!({"name": "c", "resources": {"requests": {"ephemeral-storage": "1Gi", "nvidia.com/gpu": "2",
            "hugepages-2Mi": "4Mi", "example.com/none": "0"}}, "ports": [{"containerPort": 80},
            {"containerPort": 81, "hostPort": 81}, {"containerPort": 82, "hostPort": 82, "hostIP": "10.0.0.1", "protocol": "UDP"},
            {"containerPort": 83, "hostPort": 83, "hostIP": "0.0.0.0"}]});
        let requests = requests(json!({"containers": [container]}), Value::Null).unwrap();
        assert_eq!(requests.ephemeral, 1 << 30);
        assert_eq!(requests.extended, [("hugepages-2Mi".into(), 4 << 20), ("nvidia.com/gpu".into(), 2)].into());
        let ports: Vec<_> = requests.ports.iter().map(|p| (p.port, p.protocol.as_str(), p.ip.as_str())).collect();
        assert_eq!(ports, [(81, "TCP", ""), (82, "UDP", "10.0.0.1"), (83, "TCP", "")]);
    }

    #[test]
    fn thousands_of_containers_beside_a_sidecar_that_asks_for_much_cost_little() {
        let asked: serde_json::Map<_, _> = (0..10_000).map(|number| (format!("a/{number}"), json!("1"))).collect();
        let sidecar = json!({"name": "s", "restartPolicy": "Always", "resources": {"requests": asked}});
        let init = |number: u32| json!({"name": format!("i{number}"), "resources": {"requests": {"cpu": "1"}}});
        let init: Vec<_> = std::iter::once(sidecar).chain((0..20_000).map(init)).collect();
        let spec = json!({"containers": [{"name": "c"}], "initContainers": init});
        // If each init container copied what the sidecar asks for, this would take minutes.
        assert_eq!(requests(spec, Value::Null).unwrap().cpu, 1000);
    }

    #[test]
    fn of_a_pod_for_another_scheduler_500_ports_and_500_resources_count() {
        let ports: Vec<_> = (1..=600).map(|port| json!({"containerPort": port, "hostPort": port})).collect();
        let asked: serde_json::Map<_, _> = (0..600).map(|number| (format!("a/{number}"), json!("1"))).collect();
        let spec = json!({"containers": [{"name": "c", "ports": ports, "resources": {"requests": asked}}]});
        let found = requests(spec, Value::Null).unwrap();
        assert_eq!((found.ports.len(), found.extended.len()), (500, 500));
    }

    #[test]
    fn ports_conflict_on_one_address_or_on_all() {
        let port = |port, protocol: &str, ip: &str| HostPort { port, protocol: protocol.into(), ip: ip.into() };
        for (one, other, expected) in [
            (port(80, "TCP", ""), port(80, "TCP", ""), true),
            (port(80, "TCP", "10.0.0.1"), port(80, "TCP", ""), true),
            (port(80, "TCP", "10.0.0.1"), port(80, "TCP", "10.0.0.2"), false),
            (port(80, "TCP", ""), port(80, "UDP", ""), false),
            (port(80, "TCP", ""), port(81, "TCP", ""), false),
        ] {
            let among = |one: &HostPort, other: &HostPort| {
                let others = [(0, ""), (9999, "")].map(|(port, ip)| HostPort { port, ip: ip.into(), ..other.clone() });
                one.conflicts_with_any(&others.into_iter().chain([other.clone()]).collect())
            };
            assert_eq!((among(&one, &other), among(&other, &one)), (expected, expected), "{one:?} {other:?}");
        }
    }

    #[test]
    fn a_pod_holds_whole_cores_and_never_none() {
        for (cpu, threads, expected) in [
            (0, 2, 1),
            (1, 1, 1),
            (1000, 1, 1),
            (1001, 1, 2),
            (2000, 2, 1),
            (2001, 2, 2),
            (16_000, 2, 8),
            (4000, 0, 4),
            (u64::MAX, 1, u32::MAX),
        ] {
            assert_eq!(cores(cpu, threads), expected, "{cpu} {threads}");
        }
    }

    #[test]
    fn a_request_that_is_no_quantity_is_named() {
        let error = requests(json!({"containers": [asks("many", "1")]}), Value::Null).unwrap_err();
        assert_eq!(error.to_string(), "can't read the request for cpu");
    }
}
