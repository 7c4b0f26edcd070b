//! CURVE certificates out of a Secret or from a host.
#![no_main]

use api::certificate::Certificate;

libfuzzer_sys::fuzz_target!(|text: &str| {
    if let Ok(certificate) = Certificate::parse(text) {
        assert!(!format!("{certificate:?}").contains("secret-key"));
        let again = Certificate::parse(certificate.text()).expect("what was read can be read again");
        assert_eq!(again.fingerprint(), certificate.fingerprint());
    }
});
