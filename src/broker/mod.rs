//! The broker: its command line, its unit, and the protocol of its socket (RFC 3).
