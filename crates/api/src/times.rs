//! Times in the status of our objects. The API server stores them as they were written, and takes some that no client reads: of a
//! day that a month does not have, of a zone a hundred hours away. One of them would make the whole object unreadable.

use schemars::Schema;

/// RFC 3339 in UTC, of a day that exists. It leaves out 29 February of the years that end with 00. With another zone, the end of the
/// year 9999 would come earlier.
const UTC: &str = "^([0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))\
                   |[0-9]{2}(0[48]|[2468][048]|[13579][26])-02-29)T([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\\.[0-9]{1,9})?Z$";

/// Has the API server refuse other times in a schema.
pub(crate) fn only_utc(schema: &mut Schema) {
    if schema.get("format").is_some_and(|format| format == "date-time") {
        schema.insert("pattern".to_owned(), UTC.into());
    }
}
