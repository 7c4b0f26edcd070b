use std::{fs::File, io::Read, path::Path};

use super::Root;

/// Directories that may hold the libc.so.6 of the host's own architecture. We read it and never load it: this binary is
/// static.
const DIRECTORIES: [&str; 7] = [
    #[cfg(target_arch = "x86_64")]
    "/lib/x86_64-linux-gnu",
    #[cfg(target_arch = "x86_64")]
    "/usr/lib/x86_64-linux-gnu",
    #[cfg(not(target_arch = "x86_64"))]
    "/lib/aarch64-linux-gnu",
    #[cfg(not(target_arch = "x86_64"))]
    "/usr/lib/aarch64-linux-gnu",
    "/lib64",
    "/usr/lib64",
    "/lib",
    "/usr/lib",
    "/run/current-system/sw/lib",
];

/// Bytes to read; more than any libc.so.6 has.
const LIMIT: u64 = 32 << 20;

/// Version of the host's glibc, such as `2.36`; None if it has none.
pub fn glibc(root: &Root) -> Option<String> {
    DIRECTORIES.iter().find_map(|dir| {
        let mut content = Vec::new();
        let file = File::open(root.path(Path::new(dir).join("libc.so.6"))).ok()?;
        file.take(LIMIT).read_to_end(&mut content).ok()?;
        glibc_version(&content)
    })
}

/// Finds the version in the banner that libc.so.6 prints when it is executed:
/// `GNU C Library (Debian GLIBC 2.36-9+deb12u10) stable release version 2.36.`
pub fn glibc_version(content: &[u8]) -> Option<String> {
    let banner = &content[find(content, b"GNU C Library")?..];
    let line = banner.split(|&byte| byte == b'\n' || byte == 0).next()?;
    let rest = &line[find(line, b" version ")? + b" version ".len()..];
    let length = rest.iter().position(|byte| !byte.is_ascii_digit() && *byte != b'.').unwrap_or(rest.len());
    let version = std::str::from_utf8(&rest[..length]).ok()?.trim_end_matches('.');
    (!version.is_empty()).then(|| version.to_owned())
}

fn find(content: &[u8], what: &[u8]) -> Option<usize> {
    content.windows(what.len()).position(|window| window == what)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_is_read_from_the_banner() {
        for (banner, expected) in [
            ("\0x\0GNU C Library (Debian GLIBC 2.36-9+deb12u10) stable release version 2.36.\nCopyright", Some("2.36")),
            ("GNU C Library (GNU libc) stable release version 2.28.\n", Some("2.28")),
            ("GNU C Library (Ubuntu EGLIBC 2.19-0ubuntu6) stable release version 2.19, by Roland", Some("2.19")),
            ("GNU C Library (GNU libc) development release version 2.40.9000.\n", Some("2.40.9000")),
            ("musl libc", None),
            ("GNU C Library", None),
        ] {
            assert_eq!(glibc_version(banner.as_bytes()).as_deref(), expected, "{banner}");
        }
    }
}
