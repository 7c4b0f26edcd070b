//! The columns that `kubectl get` prints of a kind.

use jiff::Timestamp;
use serde_json::Value;

/// A column in a kind's Table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Column {
    /// Its heading.
    pub name: String,
    type_: String,
    pointer: String,
    /// Not 0: shown by `-o wide` only.
    pub priority: i32,
}

impl Column {
    /// `path` is a JSON path of names and dots, such as `.status.phase`. A `priority` other than 0 means `-o wide`
    /// only.
    pub fn new(name: &str, type_: &str, path: &str, priority: i32) -> Self {
        Self { name: name.into(), type_: type_.into(), pointer: path.replace('.', "/"), priority }
    }

    /// The column's type in the Table: a `date` becomes an age, which is a string.
    pub fn printed_type(&self) -> &str {
        if self.type_ == "date" { "string" } else { &self.type_ }
    }

    pub fn cell(&self, object: &Value, now: Timestamp) -> Value {
        let value = object.pointer(&self.pointer).unwrap_or(&Value::Null);
        match (self.type_.as_str(), value) {
            ("date", Value::String(time)) => match time.parse::<Timestamp>() {
                Ok(time) => Value::String(age(now.duration_since(time).as_secs())),
                Err(_) => Value::String("<invalid>".into()),
            },
            ("string", Value::Array(_) | Value::Object(_)) => Value::String(value.to_string()),
            _ => value.clone(),
        }
    }
}

/// Formats a duration like kubectl: at most two units, the smaller one only for short durations.
pub fn age(seconds: i64) -> String {
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
