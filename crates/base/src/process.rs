//! How this process prints, and how it passes on the way in which another one ended.

use std::{
    io::{self, Write},
    os::unix::process::ExitStatusExt,
    process::{ExitCode, ExitStatus},
};

/// Writes to stdout, and flushes it.
///
/// # Errors
/// stdout can't be written; [`io::ErrorKind::BrokenPipe`] if its reader has gone away, as `head` does.
pub fn print(text: &str) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(text.as_bytes())?;
    stdout.flush()
}

/// Exit code as in a shell: 128 + signal if it was killed.
pub fn code(status: ExitStatus) -> i32 {
    status.code().or_else(|| status.signal().map(|signal| 128 + signal)).unwrap_or(255)
}

/// The exit code with which to pass on how a program ended: 128 + signal if it was killed, as in a shell.
pub fn exit_code(status: ExitStatus) -> ExitCode {
    ExitCode::from(u8::try_from(code(status)).unwrap_or(u8::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_is_passed_on_as_a_shell_does() {
        for (wait, expected) in [(0, 0), (7 << 8, 7), (9, 137)] {
            assert_eq!(code(ExitStatus::from_raw(wait)), expected);
        }
    }
}
