//! Label and field selectors from a query.

use std::collections::BTreeMap;

use kube::core::{Expression, Selector, SelectorExt};
use serde_json::Value;

use super::{error::ApiError, resources::Resource};

/// Selects objects for a list or watch.
#[derive(Debug, Default)]
pub struct Filter {
    labels: Selector,
    fields: Vec<FieldTest>,
}

#[derive(Debug, PartialEq, Eq)]
struct FieldTest {
    pointer: String,
    equal: bool,
    value: String,
}

impl Filter {
    /// Parses both selectors of a query.
    ///
    /// # Errors
    /// [`ApiError::BadRequest`] with the part that can't be parsed, or the field that this resource doesn't support.
    pub fn parse(resource: &Resource, labels: &str, fields: &str) -> Result<Self, ApiError> {
        Ok(Self { labels: parse_labels(labels)?, fields: parse_fields(resource, fields)? })
    }

    /// Restricts the filter to the object with this name.
    pub fn and_name(mut self, name: &str) -> Self {
        self.fields.push(FieldTest { pointer: "/metadata/name".into(), equal: true, value: name.into() });
        self
    }

    /// True if the filter selects `object`.
    pub fn matches(&self, object: &Value) -> bool {
        self.fields.iter().all(|test| test.holds(object)) && (self.labels.selects_all() || self.labels_match(object))
    }

    fn labels_match(&self, object: &Value) -> bool {
        let labels: BTreeMap<String, String> = object["metadata"]["labels"]
            .as_object()
            .into_iter()
            .flatten()
            .filter_map(|(key, value)| Some((key.clone(), value.as_str()?.to_owned())))
            .collect();
        self.labels.matches(&labels)
    }
}

impl FieldTest {
    fn holds(&self, object: &Value) -> bool {
        let equal = match object.pointer(&self.pointer) {
            // A missing field counts as its zero value.
            None | Some(Value::Null) => ["", "false"].contains(&self.value.as_str()),
            Some(Value::String(text)) => *text == self.value,
            Some(other) => {
                let text = other.to_string();
                text == self.value
            }
        };
        equal == self.equal
    }
}

fn parse_fields(resource: &Resource, text: &str) -> Result<Vec<FieldTest>, ApiError> {
    let parts = text.split(',').map(str::trim).filter(|part| !part.is_empty());
    parts
        .map(|part| {
            let (field, equal, value) = split_equality(part)
                .ok_or_else(|| ApiError::BadRequest(format!("invalid field selector {part:?}: write field=value")))?;
            if !["metadata.name", "metadata.namespace"].contains(&field) && !resource.fields.contains(&field) {
                return Err(ApiError::BadRequest(format!("field label not supported: {field}")));
            }
            Ok(FieldTest { pointer: format!("/{}", field.replace('.', "/")), equal, value: value.to_owned() })
        })
        .collect()
}

/// Splits `a=b`, `a==b` (true) or `a!=b` (false).
fn split_equality(part: &str) -> Option<(&str, bool, &str)> {
    let (left, right) = part.split_once('=')?;
    Some(match left.strip_suffix('!') {
        Some(left) => (left.trim(), false, right.trim()),
        None => (left.trim(), true, right.strip_prefix('=').unwrap_or(right).trim()),
    })
}

fn parse_labels(text: &str) -> Result<Selector, ApiError> {
    let mut depth = 0;
    let outside_brackets = |letter: char| {
        match letter {
            '(' => depth += 1,
            ')' => depth -= 1,
            _ => {}
        }
        letter == ',' && depth == 0
    };
    let parts: Vec<&str> = text.split(outside_brackets).map(str::trim).filter(|part| !part.is_empty()).collect();
    parts.into_iter().map(parse_label).collect()
}

fn parse_label(part: &str) -> Result<Expression, ApiError> {
    let bad = || ApiError::BadRequest(format!("unable to parse label requirement {part:?}"));
    if let Some(set) = part.strip_suffix(')') {
        let (head, set) = set.split_once('(').ok_or_else(bad)?;
        let values = set.split(',').map(|value| value.trim().to_owned()).collect();
        return match head.split_whitespace().collect::<Vec<_>>()[..] {
            [key, "in"] => Ok(Expression::In(key.into(), values)),
            [key, "notin"] => Ok(Expression::NotIn(key.into(), values)),
            _ => Err(bad()),
        };
    }
    let (key, expression) = match (split_equality(part), part.strip_prefix('!')) {
        (Some((key, true, value)), _) => (key, Expression::Equal(key.into(), value.into())),
        (Some((key, false, value)), _) => (key, Expression::NotEqual(key.into(), value.into())),
        (None, Some(key)) => (key.trim(), Expression::DoesNotExist(key.trim().into())),
        (None, None) => (part, Expression::Exists(part.into())),
    };
    let plain = |letter: char| letter.is_ascii_alphanumeric() || "-_./".contains(letter);
    if key.is_empty() || !key.chars().all(plain) { Err(bad()) } else { Ok(expression) }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::resources;

    fn matches(labels: &str, fields: &str, object: &Value) -> Result<bool, ApiError> {
        let nodes = resources::find("", "nodes").ok_or(ApiError::NoSuchPath)?;
        Filter::parse(nodes, labels, fields).map(|filter| filter.matches(object))
    }

    #[test]
    fn label_selectors_work_as_in_kubernetes() {
        let object = json!({"metadata": {"name": "n", "labels": {"zone": "a", "kubernetes.io/os": "linux"}}});
        for (selector, want) in [
            ("", true),
            ("zone=a", true),
            ("zone==a", true),
            ("zone = b", false),
            ("zone!=a", false),
            ("zone!=b", true),
            ("missing!=b", true),
            ("missing=", false),
            ("zone", true),
            ("missing", false),
            ("!missing", true),
            ("! zone", false),
            ("zone in (a, b)", true),
            ("zone in (b,c),kubernetes.io/os=linux", false),
            ("zone in (a,b),kubernetes.io/os=linux", true),
            ("zone notin (b,c)", true),
            ("zone notin (a)", false),
            ("missing notin (a)", true),
            ("missing in (a)", false),
        ] {
            assert_eq!(matches(selector, "", &object), Ok(want), "{selector:?}");
        }
    }

    #[test]
    fn field_selectors_work_on_the_fields_of_the_resource() {
        let object = json!({"metadata": {"name": "n"}, "spec": {"unschedulable": true}});
        for (selector, want) in [
            ("metadata.name=n", true),
            ("metadata.name!=n", false),
            ("metadata.name==n,spec.unschedulable=true", true),
            ("spec.unschedulable=false", false),
            ("spec.unschedulable!=false", true),
            ("metadata.namespace=", true),
        ] {
            assert_eq!(matches("", selector, &object), Ok(want), "{selector:?}");
        }
    }

    #[test]
    fn malformed_selectors_are_refused() {
        for (labels, fields) in [("a in b", ""), ("a in (b", ""), ("a like (b)", ""), ("=x", ""), ("a b", "")] {
            assert!(matches(labels, fields, &Value::Null).is_err(), "{labels:?}");
        }
        assert!(matches("", "spec.providerID=x", &Value::Null).is_err());
        assert!(matches("", "metadata.name", &Value::Null).is_err());
    }
}
