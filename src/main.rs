//! flux-distribute
fn main() {}
