//! Hostlists (RFC 29) and idsets (RFC 22) as brokers write them.
#![no_main]

use api::IdSet;
use model::hostlist;

libfuzzer_sys::fuzz_target!(|text: &str| {
    let hosts = hostlist::decode(text);
    if hosts.len() < 1000 {
        let _ = hostlist::encode(&hosts);
    }
    if let Ok(ids) = text.parse::<IdSet>() {
        assert_eq!(ids.to_string().parse::<IdSet>().expect("what was written can be read"), ids);
    }
});
