//! Job ids (RFC 19). Pure.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// The digits of F58, without those that look alike (RFC 19).
const DIGITS: &[u8; 58] = b"123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz";
/// Flux's prefix in a UTF-8 locale, and elsewhere. We write the second.
const PREFIXES: [char; 2] = ['ƒ', 'f'];

/// A job's id. Its text is F58 with the prefix `f`, as `flux jobs` shows it. In JSON it is a number, signed as Flux's
/// own (jansson) numbers are: -1 is the id of no job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct JobId(pub u64);

impl JobId {
    /// The id of no job (`FLUX_JOBID_ANY`).
    pub const ANY: Self = Self(u64::MAX);
}

/// The text is not a job id in F58.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a job id such as f2Abc3")]
pub struct NotAJobId(String);

impl fmt::Display for JobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let digit = |place: u64| char::from(DIGITS[usize::try_from(place % 58).unwrap_or_default()]);
        let places = std::iter::successors(Some(self.0), |rest| Some(rest / 58).filter(|rest| *rest > 0));
        let reversed: Vec<char> = places.map(digit).collect();
        write!(f, "{}{}", PREFIXES[1], reversed.iter().rev().collect::<String>())
    }
}

impl FromStr for JobId {
    type Err = NotAJobId;

    /// Reads F58 with either prefix.
    fn from_str(text: &str) -> Result<Self, NotAJobId> {
        let value = |text: &str| {
            let digits = text.strip_prefix(PREFIXES).filter(|digits| !digits.is_empty())?;
            digits.bytes().try_fold(0_u64, |number, digit| {
                let value = DIGITS.iter().position(|known| *known == digit)?;
                number.checked_mul(58)?.checked_add(u64::try_from(value).ok()?)
            })
        };
        value(text).map(Self).ok_or_else(|| NotAJobId(text.chars().take(80).collect()))
    }
}

impl Serialize for JobId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_i64(self.0.cast_signed())
    }
}

impl<'de> Deserialize<'de> for JobId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        i64::deserialize(deserializer).map(|id| Self(id.cast_unsigned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_have_the_text_that_flux_gives_them() {
        // As `flux job id --to=f58plain` of 0.88 writes them.
        for (id, text) in [
            (0, "f1"),
            (1, "f2"),
            (57, "fz"),
            (58, "f21"),
            (34_057_748_480, "fttZs51"),
            (1_000_000_000_000, "fTGZaPXM"),
            (1 << 63, "fNQm6nKp8qFD"),
            (u64::MAX, "fjpXCZedGfVQ"),
        ] {
            assert_eq!(JobId(id).to_string(), text);
            assert_eq!(text.parse(), Ok(JobId(id)));
            assert_eq!(text.replacen('f', "ƒ", 1).parse(), Ok(JobId(id)), "the other prefix");
        }
        assert_eq!("f111".parse(), Ok(JobId(0)), "zeros in front");
    }

    #[test]
    fn what_is_no_id_is_refused() {
        let long = format!("f{}", "1".repeat(500) + "0");
        // Letters that F58 leaves out, other notations of RFC 19, and one more than the largest id.
        for text in
            ["", "f", "ƒ", "fO", "f0", "fI", "fl", "f 2", "F2", "12", "0xf", "f.1.2.3", "fé", "fjpXCZedGfVR", &long]
        {
            let error = text.parse::<JobId>().unwrap_err().to_string();
            assert!(error.len() < 200, "{error}");
        }
    }

    #[test]
    fn in_json_an_id_is_a_signed_number() {
        for (id, json) in
            [(JobId(34_057_748_480), "34057748480"), (JobId::ANY, "-1"), (JobId(1 << 63), "-9223372036854775808")]
        {
            assert_eq!(serde_json::to_string(&id).unwrap(), json);
            assert_eq!(serde_json::from_str::<JobId>(json).unwrap(), id);
        }
        for json in ["\"f1\"", "1.5", "null", "18446744073709551615"] {
            assert!(serde_json::from_str::<JobId>(json).is_err(), "{json}");
        }
    }
}
