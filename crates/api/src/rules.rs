//! The CRD's validation of a spec's fields: patterns, limits, CEL rules, and the API server's messages about violations.
//! The crate `model` checks the same with better messages.

use base::redact::SECRET_WORDS;
use schemars::Schema;
use serde_json::{Value, json};

/// The CRD's message if `size` is 0.
pub const LESS_THAN_ONE: &str = "is 0: to uninstall, delete the FluxInstance";
/// The CRD's message if `size` is more than the spec's `maxSize`.
pub const MORE_THAN_MAX_SIZE: &str =
    "is more than maxSize: raise maxSize too, which takes effect at the next coordinated restart";
/// The CRD's message if pruning leaves a selector empty.
pub const EMPTY_SELECTOR: &str = "has neither matchLabels nor matchExpressions: write `selector: {matchLabels: {KEY: VALUE}}`, or leave it out to \
     select all nodes";

/// In the CRD; the same as [`is_subdomain`](crate::is_subdomain).
pub const SUBDOMAIN: &str = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$";
/// In the CRD; what the model's `Topology::parse` takes, without `kary:0`.
pub const TOPOLOGY: &str = "^(flat|kary:0*[1-9][0-9]*|mincrit(:[0-9]+)?|binomial)$";
/// In the CRD; what [`parse_duration`](crate::parse_duration) takes.
pub const DURATION: &str = r"^[0-9]+(\.[0-9]+)?(ms|s|m|h|d)?$";
/// In the CRD; a part of what [`quantity::milli`](crate::quantity::milli) takes: a decimal number, with `m` or without.
pub const CPUS: &str = r"^[0-9]+(\.[0-9]+)?m?$";
/// Longest text for a number of CPUs. `quantity::milli` takes as many digits.
pub const LONGEST_CPUS: u64 = 30;
/// In the CRD; what [`check_prefix`](crate::check_prefix) wants of the first character.
pub const PREFIX: &str = "^/";
/// As long as Linux takes a path (PATH_MAX). The API server refuses a rule on a text that has no limit.
pub const LONGEST_PREFIX: u64 = 4096;
/// In the CRD, in CEL: [`check_prefix_characters`](crate::check_prefix_characters), for a prefix that is new. One that an instance has had since an older version
/// stays valid, or that instance could no longer be changed, not even to remove it.
pub const PREFIX_RULE: &str = "self.matches('^[A-Za-z0-9._/-]+$') || (oldSelf.hasValue() && oldSelf.value() == self)";
/// The message of that rule.
pub const PREFIX_CHARACTERS: &str =
    "has characters other than A-Z, a-z, 0-9, `.`, `_`, `/` and `-`: choose another directory";
/// In the CRD, in CEL: [`check_prefix_place`](crate::check_prefix_place), as [`PREFIX_RULE`].
pub const PREFIX_PLACE_RULE: &str = "!self.matches('^/+([.]/+)*(dev|proc|run|sys|tmp|var/+([.]/+)*(lock|run|tmp))(/|$)') || (oldSelf.hasValue() && oldSelf.value() == self)";
/// The message of that rule.
pub const PREFIX_PLACE: &str = "is in a directory that does not outlast a boot, or that other users can write to: choose another one, such as one below /opt or /var/lib";
/// In the CRD; what the model accepts as a user, except that it also matches numbers that are too large.
pub const USER: &str = "^[A-Za-z0-9_.][-A-Za-z0-9_.]*$";

/// In the CRD; a URL by its scheme.
pub const URL: &str = "^(https?|file)://.+$";
/// In the CRD; a digest in lower-case hex.
pub const SHA256: &str = "^[0-9a-f]{64}$";
/// In the CRD; what `locks::question::check_glibc` takes.
pub const GLIBC: &str = r"^[0-9]+(\.[0-9]+)+$";
/// In the CRD; [`PLATFORMS`].
pub const PLATFORM: &str = "^linux-(64|aarch64)$";
/// The conda platforms that have Flux.
pub const PLATFORMS: [&str; 2] = ["linux-64", "linux-aarch64"];

/// The CRD's message about a URL with credentials.
pub const HAS_CREDENTIALS: &str = "has credentials in the URL, which everyone with read access to the FluxInstance \
    or ConfigMap flux-packages could see: put them into Secret flux-packages-access, key credentials.json";
/// In CEL, the rule behind [`HAS_CREDENTIALS`]: the URL in variable `name` has no user, no `/t/TOKEN/`, and no
/// parameter with one of [`SECRET_WORDS`] in its name. Names that are written with `%` are found by the model alone.
pub fn no_credentials(name: &str) -> String {
    let secret = SECRET_WORDS.join("|");
    format!(
        "!{name}.matches('(?i)^https?:[/\\\\\\\\]*([^/?#]+@|[^?#]*/t/([^/?#.]+(/|$)|[^/?#]+/)|[^#]*[?&][^=&#]*({secret}))')"
    )
}
/// In the CRD. The API server runs no rule on what may be endless.
pub const MOST_CHANNELS: usize = 32;
/// As [`MOST_CHANNELS`], in characters.
pub const LONGEST_URL: usize = 2048;

/// What a requirement of a selector may be.
pub const SELECTOR_OPERATORS: [&str; 4] = ["In", "NotIn", "Exists", "DoesNotExist"];
/// What a toleration may be.
pub const TOLERATION_OPERATORS: [&str; 2] = ["Equal", "Exists"];
/// What a taint may do.
pub const EFFECTS: [&str; 3] = ["NoSchedule", "PreferNoSchedule", "NoExecute"];

/// Adds the allowed operators of a selector to its schema, which Kubernetes leaves open.
pub fn selector_words(schema: &mut Schema) {
    put_words(schema, "/properties/matchExpressions/items/properties/operator", &SELECTOR_OPERATORS);
}

/// Adds the allowed values of a toleration to its schema, which Kubernetes leaves open.
pub fn toleration_words(schema: &mut Schema) {
    let operator = "/items/properties/operator";
    put_words(schema, operator, &TOLERATION_OPERATORS);
    put_words(schema, "/items/properties/effect", &EFFECTS);
    // Kubernetes' own description also names the operators of a feature gate.
    put(
        schema,
        operator,
        "description",
        json!("How the value is compared: Equal (the default), or Exists, which any value matches."),
    );
}

fn put_words(schema: &mut Schema, path: &str, words: &[&str]) {
    put(schema, path, "enum", json!(words));
}

fn put(schema: &mut Schema, path: &str, key: &str, value: Value) {
    // It is missing only in a schema that refers to definitions elsewhere, which a CRD's schema can't do.
    if let Some(Value::Object(field)) = schema.pointer_mut(path) {
        field.insert(key.to_owned(), value);
    }
}
