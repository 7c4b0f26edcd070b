//! Pods beside the job, if FLUX_DISTRIBUTE_CHAOS_PODS is set: a gang of pods on different nodes. No fault may cost a pod, but for one that
//! takes the machine that it runs on.

use std::{collections::BTreeMap, time::Duration};

use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api, ResourceExt,
    api::{DeleteParams, ListParams, PostParams},
};
use serde_json::json;

use crate::scene::Scene;

/// Pods on different nodes.
pub struct Gang {
    name: String,
    /// By name.
    pods: BTreeMap<String, Bound>,
}

/// A pod as it was bound.
struct Bound {
    uid: String,
    node: String,
    /// PID 1 of its node. With another one, the node is another machine, or has lost power.
    init: i32,
}

impl Gang {
    /// Makes a gang of `size` pods with a core each; all of them run when this returns.
    pub fn begin(scene: &Scene, name: String, size: u32) -> Self {
        let labels = json!({ "gang": name });
        let annotations = json!({
            "distribute.flux-framework.org/gang": name,
            "distribute.flux-framework.org/gang-size": size.to_string(),
        });
        let apart = json!([{"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": labels}}]);
        let pods = api(scene);
        for number in 0..size {
            let pod = json!({
                "metadata": {"name": format!("{name}-{number}"), "labels": labels, "annotations": annotations},
                "spec": {
                    "schedulerName": "flux",
                    "restartPolicy": "Never",
                    "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": apart}},
                    "containers": [{
                        "name": "c", "image": "none", "command": ["sleep", "1d"],
                        "resources": {"requests": {"cpu": "1"}},
                    }],
                },
            });
            let pod: Pod = serde_json::from_value(pod).unwrap();
            scene.cluster.wait(pods.create(&PostParams::default(), &pod)).unwrap();
        }
        let pods = scene.until("a gang of pods", Duration::from_mins(1), |scene| {
            let found = list(scene, &name)?;
            let bound =
                found.iter().filter(|pod| is_running(pod)).filter_map(|pod| Some((pod.name_any(), bound(scene, pod)?)));
            let bound: BTreeMap<_, _> = bound.collect();
            if bound.len() == size as usize { Ok(bound) } else { Err(format!("{} run", bound.len())) }
        });
        Self { name, pods }
    }

    /// Number of its pods.
    pub fn size(&self) -> u32 {
        u32::try_from(self.pods.len()).unwrap()
    }

    /// All its pods run where they ran, but for those whose machines are gone, and a job holds their cores.
    pub fn look(&self, scene: &Scene) -> Result<(), String> {
        let found: BTreeMap<_, _> = list(scene, &self.name)?.into_iter().map(|pod| (pod.name_any(), pod)).collect();
        let machines = scene.inits();
        let mut running = 0;
        for (name, bound) in &self.pods {
            let is_same = |pod: &&Pod| pod.uid().as_ref() == Some(&bound.uid) && node_of(pod) == Some(&bound.node);
            if found.get(name).filter(is_same).is_some_and(is_running) {
                running += 1;
            } else if machines.get(&bound.node) == Some(&bound.init) {
                let status = found.get(name).and_then(|pod| pod.status.as_ref());
                return Err(format!("pod {name} of {} is lost: {status:?}", bound.node));
            }
        }
        let jobs = scene.ask(&["flux", "jobs", "-nf", "running", "-o", "{name} {ncores}"])?;
        let of_gang = |line: &str| line.strip_prefix(&format!("default/{} ", self.name))?.parse::<u32>().ok();
        let held: u32 = jobs.lines().filter_map(of_gang).sum();
        if held >= running { Ok(()) } else { Err(format!("{running} pods run on {held} cores: {jobs}")) }
    }

    /// True if machines have taken some of its pods with them.
    pub fn is_incomplete(&self, scene: &Scene) -> bool {
        list(scene, &self.name).map_or(0, |pods| pods.iter().filter(|pod| is_running(pod)).count()) < self.pods.len()
    }

    /// Removes what is left of it.
    pub fn remove(&self, scene: &Scene) {
        let pods = api(scene);
        // Nobody else removes the pods of a machine that is gone.
        let at_once = DeleteParams::default().grace_period(0);
        for pod in list(scene, &self.name).unwrap() {
            let is_there = node_of(&pod).is_some_and(|node| scene.inits().contains_key(node));
            let how = if is_there { DeleteParams::default() } else { at_once.clone() };
            let _ = scene.cluster.wait(pods.delete(&pod.name_any(), &how));
        }
        scene.until("the end of the gang", Duration::from_mins(1), |scene| {
            let left = list(scene, &self.name)?.len();
            if left == 0 { Ok(()) } else { Err(format!("{left} pods are left")) }
        });
    }
}

fn api(scene: &Scene) -> Api<Pod> {
    Api::namespaced(scene.cluster.client(), "default")
}

fn list(scene: &Scene, gang: &str) -> Result<Vec<Pod>, String> {
    let parameters = ListParams::default().labels(&format!("gang={gang}"));
    let found = scene.cluster.wait(api(scene).list(&parameters)).map_err(|error| error.to_string())?;
    Ok(found.items)
}

fn bound(scene: &Scene, pod: &Pod) -> Option<Bound> {
    let node = node_of(pod)?.clone();
    Some(Bound { uid: pod.uid()?, init: *scene.inits().get(&node)?, node })
}

fn node_of(pod: &Pod) -> Option<&String> {
    pod.spec.as_ref()?.node_name.as_ref()
}

fn is_running(pod: &Pod) -> bool {
    pod.status.as_ref().and_then(|status| status.phase.as_deref()) == Some("Running")
}
