//! Tables, the representation that `kubectl get` prints.

use jiff::Timestamp;
use serde_json::{Value, json};

use super::resources::Resource;

/// How much of each object accompanies its row.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Include {
    /// Its metadata.
    #[default]
    Metadata,
    /// The whole object.
    Object,
    /// Nothing.
    None,
}

/// The Table of `objects`. `metadata` belongs to the list, or to the single object.
pub fn table<'a>(
    resource: &Resource,
    objects: impl IntoIterator<Item = &'a Value>,
    metadata: Value,
    include: Include,
    now: Timestamp,
) -> Value {
    let name = json!({ "name": "Name", "type": "string", "format": "name", "description": "", "priority": 0 });
    let others = resource.columns.iter().map(|column| {
        json!({
            "name": column.name, "type": column.printed_type(), "format": "", "description": "",
            "priority": column.priority,
        })
    });
    let rows = objects.into_iter().map(|object| {
        let others = resource.columns.iter().map(|column| column.cell(object, now));
        let cells: Vec<Value> = std::iter::once(object["metadata"]["name"].clone()).chain(others).collect();
        match include {
            Include::Metadata => json!({ "cells": cells, "object": metadata_only(object) }),
            Include::Object => json!({ "cells": cells, "object": object }),
            Include::None => json!({ "cells": cells }),
        }
    });
    json!({
        "kind": "Table", "apiVersion": "meta.k8s.io/v1", "metadata": metadata,
        "columnDefinitions": std::iter::once(name).chain(others).collect::<Vec<_>>(),
        "rows": rows.collect::<Vec<_>>(),
    })
}

/// The PartialObjectMetadata of an object.
pub fn metadata_only(object: &Value) -> Value {
    json!({ "kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": object["metadata"] })
}

#[cfg(test)]
mod tests {
    use super::{super::column::age, *};
    use crate::resources;
    use api::GROUP;

    #[test]
    fn ages_are_formatted_as_kubectl_does() {
        for (seconds, want) in [
            (-5, "<invalid>"),
            (-1, "0s"),
            (0, "0s"),
            (119, "119s"),
            (120, "2m"),
            (150, "2m30s"),
            (3_600, "60m"),
            (10_800, "3h"),
            (11_100, "3h5m"),
            (100_000, "27h"),
            (200_000, "2d7h"),
            (864_000, "10d"),
            (63_072_000, "2y"),
            (63_158_400, "2y1d"),
            (315_360_000, "10y"),
        ] {
            assert_eq!(age(seconds), want, "{seconds}");
        }
    }

    #[test]
    fn the_columns_of_the_definition_become_cells() {
        let Some(nodes) = resources::find(GROUP, "fluxnodes") else { panic!("fluxnodes are served") };
        let now: Timestamp = "2026-01-01T00:05:00Z".parse().unwrap_or_default();
        let object = json!({
            "metadata": { "name": "n1", "creationTimestamp": "2026-01-01T00:00:00Z" },
            "spec": { "rank": 3 },
            "status": {
                "phase": "Online",
                "facts": { "resources": { "cores": 8 } },
                "account": { "hostJobs": 2, "gangs": 0, "otherPods": 1, "overlapping": 0 },
            },
        });
        let table = table(nodes, [&object], json!({}), Include::None, now);
        let names: Vec<&str> =
            table["columnDefinitions"].as_array().into_iter().flatten().filter_map(|c| c["name"].as_str()).collect();
        let shown = ["Name", "Phase", "Lost", "Rank", "Cores", "GPUs"];
        let of_account = ["Host-Jobs", "Gangs", "Other-Pods", "Overlapping"];
        let columns = [&shown[..], &of_account, &["Flux", "Packages", "Age", "Reason", "Message"]].concat();
        assert_eq!(names, columns);
        let cells = json!(["n1", "Online", null, 3, 8, null, 2, 0, 1, 0, null, null, "5m", null, null]);
        assert_eq!(table["rows"][0]["cells"], cells);
        assert_eq!(table["columnDefinitions"][5]["priority"], 1);
        assert_eq!(table["rows"][0].get("object"), None);
    }
}
