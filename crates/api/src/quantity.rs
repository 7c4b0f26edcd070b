//! Quantities as Kubernetes writes them: `500m`, `2`, `1.5Gi`, `1e3`.

/// The text is not a quantity, or is negative.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a quantity such as 500m, 2 or 1Gi")]
pub struct NotAQuantity(String);

/// Most digits of a quantity. Kubernetes itself keeps fewer than 20.
const MAX_DIGITS: usize = 30;

/// The quantity in whole units, rounded up as Kubernetes does. A larger one than fits is the largest that does.
///
/// # Errors
/// [`NotAQuantity`].
pub fn whole(text: &str) -> Result<u64, NotAQuantity> {
    scaled(text, 0).ok_or_else(|| NotAQuantity(text.chars().take(80).collect()))
}

/// The quantity in thousandths, rounded up. A larger one than fits is the largest that does.
///
/// # Errors
/// [`NotAQuantity`].
pub fn milli(text: &str) -> Result<u64, NotAQuantity> {
    scaled(text, 3).ok_or_else(|| NotAQuantity(text.chars().take(80).collect()))
}

/// The quantity times ten to the power of `places`.
fn scaled(text: &str, places: i32) -> Option<u64> {
    let text = text.strip_prefix('+').unwrap_or(text);
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, suffix) = text.split_at(end);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let digits = format!("{whole}{fraction}");
    if digits.is_empty() || digits.len() > MAX_DIGITS {
        return None;
    }
    let mantissa: u128 = digits.parse().ok()?;
    let (binary, decimal) = exponents(suffix)?;
    let decimal = decimal + places - i32::try_from(fraction.len()).ok()?;
    let largest = u128::from(u64::MAX);
    // 30 digits and 60 binary places don't fit into 128 bits; then it is larger than any u64, or has too many places.
    let Some(mantissa) = mantissa.checked_mul(1 << binary) else { return Some(u64::MAX) };
    let power = 10_u128.checked_pow(decimal.unsigned_abs());
    let value = match (decimal >= 0, power) {
        _ if mantissa == 0 => 0,
        (true, Some(power)) => mantissa.checked_mul(power).unwrap_or(largest),
        (true, None) => largest,
        (false, Some(power)) => mantissa.div_ceil(power),
        (false, None) => 1,
    };
    u64::try_from(value.min(largest)).ok()
}

/// What a suffix stands for: a power of two, and a power of ten.
fn exponents(suffix: &str) -> Option<(u32, i32)> {
    Some(match suffix {
        "" => (0, 0),
        "n" => (0, -9),
        "u" => (0, -6),
        "m" => (0, -3),
        "k" => (0, 3),
        "M" => (0, 6),
        "G" => (0, 9),
        "T" => (0, 12),
        "P" => (0, 15),
        "E" => (0, 18),
        "Ki" => (10, 0),
        "Mi" => (20, 0),
        "Gi" => (30, 0),
        "Ti" => (40, 0),
        "Pi" => (50, 0),
        "Ei" => (60, 0),
        _ => {
            let exponent: i32 = suffix.strip_prefix(['e', 'E'])?.parse().ok()?;
            (0, Some(exponent).filter(|exponent| exponent.abs() <= 100)?)
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quantity_is_read_as_kubernetes_reads_it() {
        for (text, in_units, in_thousandths) in [
            ("0", 0, 0),
            ("2", 2, 2000),
            ("500m", 1, 500),
            ("0.5", 1, 500),
            (".5", 1, 500),
            ("1.", 1, 1000),
            ("+3", 3, 3000),
            ("1500u", 1, 2),
            ("1n", 1, 1),
            ("1Ki", 1024, 1_024_000),
            ("1.5Gi", 1_610_612_736, 1_610_612_736_000),
            ("1e3", 1000, 1_000_000),
            ("1E3", 1000, 1_000_000),
            ("2E-3", 1, 2),
            ("3E", 3_000_000_000_000_000_000, u64::MAX),
            ("100Ei", u64::MAX, u64::MAX),
            ("1e-100", 1, 1),
            ("0e100", 0, 0),
        ] {
            assert_eq!((whole(text), milli(text)), (Ok(in_units), Ok(in_thousandths)), "{text}");
        }
    }

    #[test]
    fn what_is_no_quantity_is_refused() {
        let long = "1".repeat(400);
        for text in ["", "-1", "m", ".", "1.2.3", "1 Gi", "1gi", "one", "1e", "1e999", "0x10", "1Kib", &long] {
            let error = whole(text).unwrap_err().to_string();
            assert!(error.len() < 200, "{error}");
        }
    }
}
