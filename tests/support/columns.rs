//! What `kubectl get` prints of a kind, by the columns that its definition names. `tests/renderings.rs` compares it with what kubectl prints.

use std::iter::once;

use k8s_openapi::jiff::Timestamp;
use kube::CustomResourceExt;
use serde::Serialize;
use serde_json::Value;

/// Between the widest cell of a column and the next column.
const GAP: usize = 3;

/// The table of these objects at that time; `is_wide`: as with `-o wide`.
pub fn get<K: CustomResourceExt + Serialize>(objects: &[K], is_wide: bool, now: Timestamp) -> String {
    let crd = serde_json::to_value(K::crd()).unwrap();
    let columns = crd.pointer("/spec/versions/0/additionalPrinterColumns").and_then(Value::as_array).unwrap();
    let columns: Vec<_> =
        columns.iter().filter(|column| is_wide || column["priority"].as_i64().unwrap_or(0) == 0).collect();
    let headings = columns.iter().map(|column| column["name"].as_str().unwrap().to_uppercase());
    let mut rows = vec![once("NAME".to_owned()).chain(headings).collect::<Vec<_>>()];
    rows.extend(objects.iter().map(|object| {
        let object = serde_json::to_value(object).unwrap();
        let name = object["metadata"]["name"].as_str().unwrap().to_owned();
        once(name).chain(columns.iter().map(|column| cell(column, &object, now))).collect()
    }));
    let width = |index: usize| rows.iter().map(|row: &Vec<String>| row[index].chars().count()).max().unwrap() + GAP;
    let widths: Vec<_> = (0..=columns.len()).map(width).collect();
    let line =
        |row: &Vec<String>| row.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}")).collect::<String>();
    rows.iter().map(|row| format!("{}\n", line(row).trim_end())).collect()
}

/// An age is printed as seconds if it is less than two minutes, and as whole hours from then on: no test needs what lies between.
fn cell(column: &Value, object: &Value, now: Timestamp) -> String {
    let value = object.pointer(&column["jsonPath"].as_str().unwrap().replace('.', "/")).unwrap_or(&Value::Null);
    match (column["type"].as_str(), value) {
        (Some("date"), Value::String(time)) => match now.duration_since(time.parse().unwrap()).as_secs() {
            seconds @ ..120 => format!("{seconds}s"),
            seconds => format!("{}h", seconds / 3600),
        },
        (_, Value::Null) => String::new(),
        (_, Value::String(text)) => text.clone(),
        (_, value) => value.to_string(),
    }
}
