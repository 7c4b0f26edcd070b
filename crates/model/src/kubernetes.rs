//! Which Kubernetes versions flux-distribute supports.

use crate::obstacle::Obstacle;

/// The oldest supported version: the first that serves ValidatingAdmissionPolicy v1 and whose service account tokens
/// name the pod's node. On older versions the manifest's policies have no effect, and one agent's token could write for
/// every node.
const OLDEST: (u32, u32) = (1, 30);

/// Says why a cluster is not supported; returns None if it is. `version`: major and minor as the API server's `/version`
/// gives them, None if the API server does not let agents read it. A cluster that hides its version is not supported:
/// without the policies nothing visibly fails, and only an attacker with a stolen token would find out.
pub fn unsupported(version: Option<(&str, &str)>) -> Option<Obstacle> {
    // Some clouds append a plus sign, as in `29+`.
    let number = |text: &str| text.trim_end_matches(|c: char| !c.is_ascii_digit()).parse::<u32>().ok();
    let known = version.and_then(|(major, minor)| Some((number(major)?, number(minor)?)));
    let (oldest_major, oldest_minor) = OLDEST;
    let (reason, message) = match known {
        Some(known) if known >= OLDEST => return None,
        Some((major, minor)) => (
            "KubernetesTooOld",
            format!(
                "Kubernetes {major}.{minor} has no ValidatingAdmissionPolicy v1, without which any agent's token may write \
                 for every node: upgrade the cluster to Kubernetes {oldest_major}.{oldest_minor} or newer"
            ),
        ),
        None => (
            "KubernetesVersionUnknown",
            format!(
                "the API server does not reveal its version, and before Kubernetes {oldest_major}.{oldest_minor} any agent's \
                 token may write for every node: let ServiceAccount install-flux get /version, as the manifest does"
            ),
        ),
    };
    Some(Obstacle::Problem { reason, message })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kubernetes_is_supported_from_1_30_on_if_its_version_is_known() {
        const OLD: Option<&str> = Some("KubernetesTooOld");
        const UNKNOWN: Option<&str> = Some("KubernetesVersionUnknown");
        for (version, expected) in [
            (Some(("1", "29")), OLD),
            (Some(("1", "29+")), OLD),
            (Some(("1", "9")), OLD),
            (Some(("0", "99")), OLD),
            (Some(("1", "30")), None),
            (Some(("1", "30+")), None),
            (Some(("1", "36")), None),
            (Some(("2", "0")), None),
            (Some(("", "")), UNKNOWN),
            (Some(("1", "x")), UNKNOWN),
            (None, UNKNOWN),
        ] {
            let found = unsupported(version);
            let reason = found.as_ref().map(|found| match found {
                Obstacle::Problem { reason, .. } => *reason,
                Obstacle::Waiting(words) => panic!("{version:?}: {words}"),
            });
            assert_eq!(reason, expected, "{version:?}");
        }
        let Some(Obstacle::Problem { message, .. }) = unsupported(Some(("1", "29+"))) else {
            panic!("Kubernetes 1.29 is supported")
        };
        assert!(message.starts_with("Kubernetes 1.29 has no") && message.ends_with("1.30 or newer"), "{message}");
    }
}
