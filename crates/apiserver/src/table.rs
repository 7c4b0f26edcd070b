//! Tables, the representation that `kubectl get` prints.

use jiff::Timestamp;
use serde_json::{Value, json};

use super::resources::Resource;

/// A column in a kind's Table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Column {
    name: String,
    type_: String,
    pointer: String,
    priority: i32,
}

impl Column {
    /// `path` is a JSON path of names and dots, such as `.status.phase`. A `priority` other than 0 means `-o wide`
    /// only.
    pub fn new(name: &str, type_: &str, path: &str, priority: i32) -> Self {
        Self { name: name.into(), type_: type_.into(), pointer: path.replace('.', "/"), priority }
    }

    /// The column's type in the Table: a `date` becomes an age, which is a string.
    fn printed_type(&self) -> &str {
        if self.type_ == "date" { "string" } else { &self.type_ }
    }

    fn cell(&self, object: &Value, now: Timestamp) -> Value {
        let value = object.pointer(&self.pointer).unwrap_or(&Value::Null);
        match (self.type_.as_str(), value) {
            ("date", Value::String(time)) => match time.parse::<Timestamp>() {
                Ok(time) => Value::String(age(now.duration_since(time).as_secs())),
                Err(_) => Value::String("<invalid>".into()),
            },
            ("date", _) => Value::String("<unknown>".into()),
            ("string", Value::Array(_) | Value::Object(_)) => Value::String(value.to_string()),
            _ => value.clone(),
        }
    }
}

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

/// Formats a duration like kubectl: at most two units, the smaller one only for short durations.
fn age(seconds: i64) -> String {
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86_400);
    let two = |big: i64, unit: char, small: i64, small_unit: char| match small {
        0 => format!("{big}{unit}"),
        _ => format!("{big}{unit}{small}{small_unit}"),
    };
    match seconds {
        ..-1 => "<invalid>".into(),
        -1..0 => "0s".into(),
        0..120 => format!("{seconds}s"),
        120..600 => two(minutes, 'm', seconds % 60, 's'),
        600..10_800 => format!("{minutes}m"),
        10_800..28_800 => two(hours, 'h', minutes % 60, 'm'),
        28_800..172_800 => format!("{hours}h"),
        172_800..691_200 => two(days, 'd', hours % 24, 'h'),
        691_200..63_072_000 => format!("{days}d"),
        63_072_000..252_288_000 => two(days / 365, 'y', days % 365, 'd'),
        _ => format!("{}y", days / 365),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
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
            "status": { "phase": "Online", "facts": { "resources": { "cores": 8 } } },
        });
        let table = table(nodes, [&object], json!({}), Include::None, now);
        let names: Vec<&str> =
            table["columnDefinitions"].as_array().into_iter().flatten().filter_map(|c| c["name"].as_str()).collect();
        let columns =
            ["Name", "Phase", "Missed", "Rank", "Cores", "GPUs", "Flux", "Packages", "Age", "Reason", "Message"];
        assert_eq!(names, columns);
        let cells = json!(["n1", "Online", null, 3, 8, null, null, null, "5m", null, null]);
        assert_eq!(table["rows"][0]["cells"], cells);
        assert_eq!(table["columnDefinitions"][5]["priority"], 1);
        assert_eq!(table["rows"][0].get("object"), None);
    }
}
