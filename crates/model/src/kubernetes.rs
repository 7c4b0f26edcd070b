//! Which Kubernetes versions flux-distribute supports.

use super::status::Obstacle;

/// The oldest supported version: the first that serves ValidatingAdmissionPolicy v1 and whose service account tokens
/// name the pod's node. On older versions the manifest's policies have no effect, and one agent's token could write for
/// every node.
const OLDEST: (u32, u32) = (1, 30);

/// Says why an API server of this version is not supported. None if it is supported, or if `major` and `minor` are not
/// numbers.
pub fn too_old(major: &str, minor: &str) -> Option<Obstacle> {
    // Some clouds append a plus sign, as in `29+`.
    let number = |text: &str| text.trim_end_matches(|c: char| !c.is_ascii_digit()).parse().ok();
    let (major, minor) = (number(major)?, number(minor)?);
    let (oldest_major, oldest_minor) = OLDEST;
    ((major, minor) < OLDEST).then(|| Obstacle::Problem {
        reason: "KubernetesTooOld",
        message: format!(
            "Kubernetes {major}.{minor} has no ValidatingAdmissionPolicy v1, without which any agent's token may speak for every \
             node: upgrade the cluster to Kubernetes {oldest_major}.{oldest_minor} or newer"
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kubernetes_is_supported_from_1_30_on_and_if_its_version_is_unknown() {
        for (major, minor, refused) in [
            ("1", "29", true),
            ("1", "29+", true),
            ("1", "9", true),
            ("0", "99", true),
            ("1", "30", false),
            ("1", "30+", false),
            ("1", "36", false),
            ("2", "0", false),
            ("", "", false),
            ("1", "x", false),
        ] {
            assert_eq!(too_old(major, minor).is_some(), refused, "{major}.{minor}");
        }
        let Some(Obstacle::Problem { message, .. }) = too_old("1", "29+") else {
            panic!("Kubernetes 1.29 is supported")
        };
        assert!(message.starts_with("Kubernetes 1.29 has no") && message.ends_with("1.30 or newer"), "{message}");
    }
}
