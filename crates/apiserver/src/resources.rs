//! The table of kinds that the server offers. Every difference between kinds is a column of this table.

use std::{borrow::Cow, sync::LazyLock};

use k8s_openapi::{
    api::{
        admissionregistration::v1::{ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding},
        apps::v1::DaemonSet,
        authentication::v1::TokenReview,
        authorization::v1::{SelfSubjectAccessReview, SubjectAccessReview},
        batch::v1::Job,
        coordination::v1::Lease,
        core::v1::{
            ConfigMap, Namespace, Node, PersistentVolume, PersistentVolumeClaim, Pod, ResourceQuota, Secret,
            ServiceAccount,
        },
        flowcontrol::v1::{FlowSchema, PriorityLevelConfiguration},
        rbac::v1::{ClusterRole, ClusterRoleBinding, Role, RoleBinding},
        scheduling::v1::PriorityClass,
        storage::v1::StorageClass,
    },
    apiextensions_apiserver::pkg::apis::apiextensions::v1::{
        CustomResourceColumnDefinition, CustomResourceDefinition, CustomResourceSubresourceScale,
    },
};
use kube::CustomResourceExt;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::{column::Column, reviews};
use api::{Finding, FluxInstance, FluxNode};

/// Plural and group of a resource, as in messages and `Status.details`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ResourceName {
    /// The API group; empty for core.
    pub group: &'static str,
    /// Plural.
    pub plural: &'static str,
}

impl std::fmt::Display for ResourceName {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.group {
            "" => out.write_str(self.plural),
            group => write!(out, "{}.{group}", self.plural),
        }
    }
}

/// One kind.
pub struct Resource {
    /// The API group; empty for core.
    pub group: &'static str,
    /// The only version that is served.
    pub version: &'static str,
    /// The kind's name.
    pub kind: &'static str,
    /// The plural name, as in paths.
    pub plural: &'static str,
    /// Short names.
    pub short: Vec<String>,
    /// Categories such as `all`.
    pub categories: Vec<String>,
    /// True if its objects live in namespaces.
    pub namespaced: bool,
    /// True if it has the subresource `status`: writes to the object ignore `.status`, and writes to the status all
    /// else.
    pub status: bool,
    /// True if `metadata.generation` counts changes outside metadata and status.
    pub generation: bool,
    /// True if replaces without a resourceVersion are refused.
    pub guarded: bool,
    /// True if its objects run on Nodes: they have the subresources `binding` and `eviction`, and a delete waits for the
    /// kubelet of the Node.
    pub runs: bool,
    /// Set for kinds whose objects are questions, which are answered and never stored: returns the status.
    pub answer: Option<fn(question: &Value) -> Value>,
    /// Fields for selectors, besides name and namespace.
    pub fields: &'static [&'static str],
    /// Columns of its Table, besides the name.
    pub columns: Vec<Column>,
    /// Set for kinds with a CustomResourceDefinition.
    pub custom: Option<Custom>,
    /// Decodes an object into its type; the error says what is wrong. Kinds with [`Custom::rules`] use those instead.
    pub check: fn(&Value) -> serde_json::Result<()>,
    /// The group under which it is stored; differs from `group` only for the second Event kind, which shares its
    /// objects.
    pub stored_in: &'static str,
}

/// The parts of a CustomResourceDefinition that the server uses.
pub struct Custom {
    /// The CustomResourceDefinition's name.
    pub definition: String,
    /// openAPIV3Schema.
    pub schema: Value,
    /// Replaces CEL: returns the violations. The error says why the object can't be decoded into its type.
    pub rules: fn(&Value) -> serde_json::Result<Vec<Finding>>,
    /// The paths of the numbers in the subresource `scale`.
    pub scale: Option<CustomResourceSubresourceScale>,
}

impl Resource {
    /// Plural and group.
    pub fn name(&self) -> ResourceName {
        ResourceName { group: self.group, plural: self.plural }
    }

    /// The `apiVersion` of its objects.
    pub fn api_version(&self) -> String {
        match self.group {
            "" => self.version.to_owned(),
            group => format!("{group}/{}", self.version),
        }
    }

    /// The resource under which its objects are stored.
    pub fn stored(&'static self) -> &'static Self {
        if self.stored_in == self.group { self } else { find(self.stored_in, self.plural).unwrap_or(self) }
    }

    /// Converts a stored object to this kind.
    pub fn to_served<'a>(&self, object: &'a Value) -> Cow<'a, Value> {
        if self.stored_in == self.group {
            Cow::Borrowed(object)
        } else {
            Cow::Owned(self.rename(object, |(old, new)| (old, new)))
        }
    }

    /// Converts an object of this kind for the store.
    pub fn to_stored(&'static self, object: Value) -> Value {
        if self.stored_in == self.group { object } else { self.stored().rename(&object, |(old, new)| (new, old)) }
    }

    fn rename(
        &self,
        object: &Value,
        direction: fn((&'static str, &'static str)) -> (&'static str, &'static str),
    ) -> Value {
        let mut object = object.clone();
        if let Value::Object(fields) = &mut object {
            for (from, to) in EVENT_FIELDS.map(direction) {
                if let Some(value) = fields.remove(from) {
                    fields.insert(to.into(), value);
                }
            }
            fields.insert("apiVersion".into(), self.api_version().into());
        }
        object
    }

    /// `scale` of the CustomResourceDefinition.
    pub fn scale(&self) -> Option<&CustomResourceSubresourceScale> {
        self.custom.as_ref()?.scale.as_ref()
    }

    /// True if its objects contain others, which must be deleted first.
    pub fn is_container(&self) -> bool {
        matches!(self.kind, "Namespace" | "CustomResourceDefinition")
    }
}

static RESOURCES: LazyLock<Vec<Resource>> = LazyLock::new(|| {
    vec![
        Resource { status: true, fields: &["spec.unschedulable"], short: names(&["no"]), ..builtin::<Node>(false) },
        Resource {
            status: true,
            short: names(&["ns"]),
            fields: &["status.phase"],
            columns: columns(&[("Status", "string", ".status.phase"), AGE]),
            ..builtin::<Namespace>(false)
        },
        Resource { short: names(&["cm"]), ..builtin::<ConfigMap>(true) },
        Resource {
            fields: &["type"],
            columns: columns(&[("Type", "string", ".type"), AGE]),
            ..builtin::<Secret>(true)
        },
        Resource { short: names(&["sa"]), ..builtin::<ServiceAccount>(true) },
        Resource {
            status: true,
            runs: true,
            short: names(&["po"]),
            categories: names(&["all"]),
            fields: &["spec.nodeName", "spec.schedulerName", "status.phase"],
            columns: vec![
                Column::new("Status", "string", ".status.phase", 0),
                Column::new("Age", "date", ".metadata.creationTimestamp", 0),
                Column::new("IP", "string", ".status.podIP", 1),
                Column::new("Node", "string", ".spec.nodeName", 1),
            ],
            ..builtin::<Pod>(true)
        },
        Resource {
            short: names(&["ev"]),
            fields: &[
                "involvedObject.kind",
                "involvedObject.namespace",
                "involvedObject.name",
                "involvedObject.uid",
                "involvedObject.apiVersion",
                "involvedObject.resourceVersion",
                "involvedObject.fieldPath",
                "reason",
                "reportingComponent",
                "type",
            ],
            columns: columns(&[
                ("Last Seen", "date", ".metadata.creationTimestamp"),
                ("Type", "string", ".type"),
                ("Reason", "string", ".reason"),
                ("Kind", "string", ".involvedObject.kind"),
                ("Object", "string", ".involvedObject.name"),
                ("Message", "string", ".message"),
            ]),
            ..builtin::<k8s_openapi::api::core::v1::Event>(true)
        },
        Resource {
            short: names(&["ev"]),
            stored_in: "",
            fields: &["regarding.kind", "regarding.namespace", "regarding.name", "regarding.uid", "reason", "type"],
            columns: columns(&[
                ("Last Seen", "date", ".metadata.creationTimestamp"),
                ("Type", "string", ".type"),
                ("Reason", "string", ".reason"),
                ("Kind", "string", ".regarding.kind"),
                ("Object", "string", ".regarding.name"),
                ("Message", "string", ".note"),
            ]),
            ..builtin::<k8s_openapi::api::events::v1::Event>(true)
        },
        Resource {
            guarded: true,
            columns: columns(&[("Holder", "string", ".spec.holderIdentity"), AGE]),
            ..builtin::<Lease>(true)
        },
        Resource {
            status: true,
            generation: true,
            short: names(&["ds"]),
            categories: names(&["all"]),
            ..builtin::<DaemonSet>(true)
        },
        // Without the controller that makes pods of them.
        Resource { status: true, generation: true, categories: names(&["all"]), ..builtin::<Job>(true) },
        Resource {
            status: true,
            generation: true,
            guarded: true,
            short: names(&["crd", "crds"]),
            ..builtin::<CustomResourceDefinition>(false)
        },
        // Pods name them, and nothing provides them.
        builtin::<PersistentVolumeClaim>(true),
        builtin::<PersistentVolume>(false),
        builtin::<StorageClass>(false),
        // The remaining kinds of a real cluster's manifest are only stored: every client with the token may do
        // everything, and nothing is scheduled.
        builtin::<ClusterRole>(false),
        builtin::<ClusterRoleBinding>(false),
        builtin::<Role>(true),
        builtin::<RoleBinding>(true),
        Resource {
            answer: Some(|_| json!({ "allowed": true, "reason": "every client with the token may do everything" })),
            ..builtin::<SelfSubjectAccessReview>(false)
        },
        Resource { answer: Some(reviews::token), ..builtin::<TokenReview>(false) },
        Resource { answer: Some(reviews::access), ..builtin::<SubjectAccessReview>(false) },
        Resource {
            generation: true,
            short: names(&["pc"]),
            columns: columns(&[("Value", "integer", ".value"), AGE]),
            ..builtin::<PriorityClass>(false)
        },
        Resource { status: true, short: names(&["quota"]), ..builtin::<ResourceQuota>(true) },
        Resource { status: true, generation: true, ..builtin::<ValidatingAdmissionPolicy>(false) },
        Resource { generation: true, ..builtin::<ValidatingAdmissionPolicyBinding>(false) },
        Resource { status: true, generation: true, ..builtin::<PriorityLevelConfiguration>(false) },
        Resource { status: true, generation: true, ..builtin::<FlowSchema>(false) },
        custom(&FluxInstance::crd(), model::read::rules),
        custom(&FluxNode::crd(), api::node_rules),
    ]
});

/// All kinds.
pub fn all() -> &'static [Resource] {
    &RESOURCES
}

/// The kind with this group and plural.
pub fn find(group: &str, plural: &str) -> Option<&'static Resource> {
    RESOURCES.iter().find(|resource| resource.group == group && resource.plural == plural)
}

/// The kind of an object.
pub fn of(object: &Value) -> Option<&'static Resource> {
    let (api_version, kind) = (object["apiVersion"].as_str()?, object["kind"].as_str()?);
    RESOURCES.iter().find(|resource| resource.kind == kind && resource.api_version() == api_version)
}

/// The CustomResourceDefinitions of our kinds, as objects to be created.
pub fn definitions() -> Vec<Value> {
    [FluxInstance::crd(), FluxNode::crd()].iter().map(|definition| json!(definition)).collect()
}

/// The names of the same Event fields in core/v1 and in events.k8s.io/v1.
const EVENT_FIELDS: [(&str, &str); 7] = [
    ("involvedObject", "regarding"),
    ("message", "note"),
    ("reportingComponent", "reportingController"),
    ("source", "deprecatedSource"),
    ("count", "deprecatedCount"),
    ("firstTimestamp", "deprecatedFirstTimestamp"),
    ("lastTimestamp", "deprecatedLastTimestamp"),
];

const AGE: (&str, &str, &str) = ("Age", "date", ".metadata.creationTimestamp");

fn columns(columns: &[(&str, &str, &str)]) -> Vec<Column> {
    columns.iter().map(|(name, type_, path)| Column::new(name, type_, path, 0)).collect()
}

fn names(names: &[&str]) -> Vec<String> {
    names.iter().map(ToString::to_string).collect()
}

fn builtin<K: k8s_openapi::Resource + DeserializeOwned>(namespaced: bool) -> Resource {
    Resource {
        group: K::GROUP,
        version: K::VERSION,
        kind: K::KIND,
        plural: K::URL_PATH_SEGMENT,
        short: Vec::new(),
        categories: Vec::new(),
        namespaced,
        status: false,
        generation: false,
        guarded: false,
        runs: false,
        answer: None,
        fields: &[],
        columns: columns(&[AGE]),
        custom: None,
        check: |object| K::deserialize(object).map(drop),
        stored_in: K::GROUP,
    }
}

fn custom(definition: &CustomResourceDefinition, rules: fn(&Value) -> serde_json::Result<Vec<Finding>>) -> Resource {
    let spec = &definition.spec;
    let version = spec.versions.first();
    let subresources = version.and_then(|version| version.subresources.as_ref());
    let schema = version.and_then(|version| version.schema.as_ref());
    // Leaking is fine: the table exists once and as long as the process.
    let forever = |text: &str| -> &'static str { text.to_owned().leak() };
    let group = forever(&spec.group);
    Resource {
        group,
        version: forever(version.map_or("", |version| version.name.as_str())),
        kind: forever(&spec.names.kind),
        plural: forever(&spec.names.plural),
        short: spec.names.short_names.clone().unwrap_or_default(),
        categories: spec.names.categories.clone().unwrap_or_default(),
        namespaced: spec.scope == "Namespaced",
        status: subresources.is_some_and(|subresources| subresources.status.is_some()),
        generation: true,
        guarded: true,
        runs: false,
        answer: None,
        fields: &[],
        columns: match version.and_then(|version| version.additional_printer_columns.as_ref()) {
            Some(columns) => columns.iter().map(column).collect(),
            None => columns(&[AGE]),
        },
        custom: Some(Custom {
            definition: definition.metadata.name.clone().unwrap_or_default(),
            schema: schema.map(|schema| json!(schema.open_api_v3_schema)).unwrap_or_default(),
            rules,
            scale: subresources.and_then(|subresources| subresources.scale.clone()),
        }),
        check: |_| Ok(()),
        stored_in: group,
    }
}

fn column(column: &CustomResourceColumnDefinition) -> Column {
    Column::new(&column.name, &column.type_, &column.json_path, column.priority.unwrap_or_default())
}
