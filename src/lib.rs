//! The program `flux-distribute`: its arguments become one call into a crate.
//!
//! The crates below `crates/` hold everything else; this one puts them together, and nothing depends on it.

mod cli;

pub use cli::main;
