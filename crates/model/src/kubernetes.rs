//! Which Kubernetes can be served.

use super::status::Obstacle;

/// The first that serves ValidatingAdmissionPolicies as v1, and whose tokens say on which node their pod runs. Older ones leave the
/// policies of the manifest out, and without them one agent's token may speak for every node.
const OLDEST: (u32, u32) = (1, 30);

/// Why an API server of that version can't be served; None also if what it says of itself is no version.
pub fn too_old(major: &str, minor: &str) -> Option<Obstacle> {
    // Clouds write `29+`.
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
    fn kubernetes_is_served_from_1_30_on_and_what_is_no_version_is_no_reason_to_refuse_it() {
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
        let Some(Obstacle::Problem { message, .. }) = too_old("1", "29+") else { panic!("served") };
        assert!(message.starts_with("Kubernetes 1.29 has no") && message.ends_with("1.30 or newer"), "{message}");
    }
}
