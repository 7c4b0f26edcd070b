//! The broker's log on the host: `<prefix>/log/broker.log`.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read, Seek, SeekFrom},
    os::unix::fs::{OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
};

use crate::files::{absent_is_fine, remove_if_there};

/// A larger log is trimmed; the end of what is cut off is kept as `broker.log.1` until the next time.
pub const MAX_LOG_BYTES: u64 = 8 << 20;

/// Most bytes at the end of a log that anything reads or copies. The broker's user can give its log any length at once, as a file with
/// holes.
pub const MOST_READ: u64 = 2 * MAX_LOG_BYTES;

const TAIL_BYTES: u64 = 64 << 10;
const WHY_CHARS: usize = 300;
/// Logged when a broker has come up (state_machine.c).
const WAS_UP: &str = "quorum->run";
/// Marks of lines that explain a broker's end: lines of level err and above, and two kinds of lower level.
const TELLING: [&str; 5] = [".crit[", ".err[", ".emerg", "rejecting connection", "Config file error"];

/// Path of the broker's log below `prefix`.
pub fn path(prefix: &Path) -> PathBuf {
    directory(prefix).join("broker.log")
}

/// Path of the part that was last cut off from the log at `path`.
pub fn trimmed(path: &Path) -> PathBuf {
    with_suffix(path, ".1")
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    PathBuf::from(name)
}

/// The directory of the log. Brokers run in it, so that a core file (core(5)) does not lie in `/` and is removed with
/// all else.
pub fn directory(prefix: &Path) -> PathBuf {
    prefix.join("log")
}

/// Opens the log for appending. Makes it and its directory if they do not exist.
///
/// # Errors
/// If the directory or file can't be made or opened.
pub fn open(prefix: &Path) -> io::Result<File> {
    let path = path(prefix);
    if let Some(directory) = path.parent().filter(|directory| !directory.is_dir()) {
        fs::create_dir_all(directory)?;
        fs::set_permissions(directory, fs::Permissions::from_mode(0o755))?;
    }
    OpenOptions::new().append(true).create(true).mode(0o640).open(path)
}

/// Size of a log in bytes; 0 if there is none.
pub fn length(path: &Path) -> u64 {
    fs::metadata(path).map_or(0, |metadata| metadata.len())
}

/// The end of a log, from byte `since` on; empty if there is none. If the log is shorter than `since`, it was trimmed:
/// then its whole content is newer, or its age is unknown.
pub fn tail(path: &Path, since: u64) -> String {
    let read = || -> io::Result<String> {
        let mut file = File::open(path)?;
        let length = file.metadata()?.len();
        let since = if since <= length { since } else { 0 };
        file.seek(SeekFrom::Start(since.max(length.saturating_sub(TAIL_BYTES))))?;
        let mut bytes = Vec::new();
        file.take(TAIL_BYTES).read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    };
    read().unwrap_or_default()
}

/// The line of a log's tail that explains why its broker ended: one of [`TELLING`]. If a broker was up and logged no
/// such line, the last line explains nothing, and the text says so.
pub fn explain_end(tail: &str) -> String {
    let lines = || tail.lines().rev().map(str::trim).filter(|line| !line.is_empty());
    // If the broker was up, the last such line is about its end. If it never came up, the first one is the cause and
    // the others follow from it.
    let telling = || lines().filter(|line| TELLING.iter().any(|word| line.contains(word)));
    let was_up = lines().any(|line| line.contains(WAS_UP));
    let line = if was_up { telling().next() } else { telling().next_back() };
    let line = line.map(|line| {
        let after = if was_up { tail.rsplit_once(line) } else { tail.split_once(line) };
        after.and_then(|(_, after)| raised(line, after)).unwrap_or(line)
    });
    let said = line.is_some() || !was_up;
    let line = line.or_else(|| lines().next());
    match line.map(without_level) {
        Some(line) if said => line.chars().take(WHY_CHARS).collect(),
        Some(line) => format!(
            "its log does not say why it ended (was it killed?); the last line is: {}",
            line.chars().take(WHY_CHARS).collect::<String>()
        ),
        None => "the broker's log is empty".to_owned(),
    }
}

/// The line with the exception, if `line` begins a Python traceback and `after` follows it in the log. The indented lines
/// between the two say only where it happened.
fn raised<'a>(line: &str, after: &'a str) -> Option<&'a str> {
    let start = line.strip_suffix("Traceback (most recent call last):")?;
    let is_exception =
        |line: &&str| line.strip_prefix(start).is_some_and(|rest| !rest.is_empty() && !rest.starts_with(' '));
    after.lines().map(str::trim_end).find(is_exception)
}

/// Removes the log level, such as `<6>`, with which a broker marks each line on stderr for systemd's journal.
pub fn without_level(line: &str) -> &str {
    match line.strip_prefix('<').and_then(|rest| rest.split_once('>')) {
        Some((level, rest)) if level.len() == 1 && level.starts_with(|digit: char| digit.is_ascii_digit()) => rest,
        _ => line,
    }
}

/// Keeps a log below `max_bytes` while its writer keeps running: copies its last [`MOST_READ`] bytes to `<path>.1`, and truncates
/// the file, which the writer has open for appending. Lines written between copy and truncation are lost; the alternative
/// would be to restart the broker. Returns true if it was trimmed.
///
/// # Errors
/// If a file can't be read or written. A missing log is no error.
pub fn trim_log(path: &Path, max_bytes: u64) -> io::Result<bool> {
    let length = match fs::metadata(path) {
        Err(error) => return absent_is_fine(Err(error)).map(|()| false),
        Ok(metadata) => metadata.len(),
    };
    if length <= max_bytes {
        return Ok(false);
    }
    let (aside, kept) = (with_suffix(path, ".1.new"), trimmed(path));
    let mut file = OpenOptions::new().read(true).write(true).open(path)?;
    let copy_end = |file: &mut File| -> io::Result<()> {
        let mut copy = OpenOptions::new().write(true).create(true).truncate(true).mode(0o640).open(&aside)?;
        file.seek(SeekFrom::Start(length.saturating_sub(MOST_READ)))?;
        io::copy(&mut file.take(MOST_READ), &mut copy)?;
        fs::rename(&aside, &kept)
    };
    // Truncate even if the copy failed: on a full disk, the log would only grow on.
    let copied = copy_end(&mut file).inspect_err(|_| drop(remove_if_there(&aside)));
    file.set_len(0)?;
    copied.map(|()| true)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn the_error_of_a_python_traceback_says_why_a_broker_ended() {
        let tail = "<6>broker.info[0]: start: none->join 0.4ms\n\
            <3>broker.err[0]: rc1.0: Traceback (most recent call last):\n\
            <3>broker.err[0]: rc1.0:   File \"/usr/lib/flux/cmd/flux-modprobe.py\", line 1, in <module>\n\
            <3>broker.err[0]: rc1.0:     import flux\n\
            <3>broker.err[0]: rc1.0: ImportError: libpython3.11.so.1.0: cannot open shared object file\n\
            <3>broker.err[0]: rc1.0: /etc/flux/rc1 Exited (rc=1) 0.1s\n";
        let expected = "broker.err[0]: rc1.0: ImportError: libpython3.11.so.1.0: cannot open shared object file";
        assert_eq!(explain_end(tail), expected);
    }

    #[test]
    fn one_line_says_why_a_broker_ended() {
        let not_found =
            "broker.crit[nope]: bootstrap: config: initialize: Config file error [bootstrap]: nope not found in hosts";
        let rejecting = "overlay.err[0]: rejecting connection from nodeX (rank 2): slot2 is configured as rank 2: mismatched config?";
        let unsized_curve = "<3>broker.err[1]: curve_cert must be defined for size > 1";
        for (tail, expected) in [
            (format!("<6>broker.info[0]: start\n<2>{not_found}\n"), not_found),
            (format!("{not_found}\n<6>broker.info[0]: goodbye\n\n"), not_found),
            (format!("<3>{rejecting}\n"), rejecting),
            (format!("{unsized_curve}\n<6>broker.info[1]: exiting"), "broker.err[1]: curve_cert must be defined for size > 1"),
            (
                "broker: broker.quorum-timeout: unknown attribute\n".to_owned(),
                "broker: broker.quorum-timeout: unknown attribute",
            ),
            (
                "<3>overlay.err[2]: overlay.hello: Invalid argument\n<6>broker.info[2]: parent-fail: join->shutdown 2ms\n"
                    .to_owned(),
                "overlay.err[2]: overlay.hello: Invalid argument",
            ),
            ("broker: toml: Config file error: key kvs exists\nlast\n".to_owned(), "broker: toml: Config file error: key kvs exists"),
            (
                "job-manager.err[0]: Expected integer\nbroker.err[0]: rc1.0: flux modprobe rc1 Exited (rc=1)\n".to_owned(),
                "job-manager.err[0]: Expected integer",
            ),
            (
                "x.err[0]: old\nbroker.info[0]: quorum-full: quorum->run 0.1s\nbroker.err[0]: new\n".to_owned(),
                "broker.err[0]: new",
            ),
            (
                "<6>broker.info[0]: quorum-full: quorum->run 0.1s\n<6>x.info[0]: later\n".to_owned(),
                "its log does not say why it ended (was it killed?); the last line is: x.info[0]: later",
            ),
            ("\n \n".to_owned(), "the broker's log is empty"),
            ("<60>kept <1>x".to_owned(), "<60>kept <1>x"),
        ] {
            assert_eq!(explain_end(&tail), expected, "{tail}");
        }
        assert_eq!(explain_end(&"é".repeat(1000)).chars().count(), WHY_CHARS);
    }

    #[test]
    fn a_log_is_trimmed_while_its_writer_keeps_running() {
        let directory = tempfile::tempdir().unwrap();
        let mut writer = open(directory.path()).unwrap();
        let path = path(directory.path());
        writeln!(writer, "one").unwrap();
        assert!(!trim_log(&path, 4).unwrap());
        writeln!(writer, "two").unwrap();
        assert!(trim_log(&path, 4).unwrap());
        writeln!(writer, "three").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "three\n");
        assert_eq!(fs::read_to_string(directory.path().join("log/broker.log.1")).unwrap(), "one\ntwo\n");
        assert!(!trim_log(&directory.path().join("absent"), 4).unwrap());
    }

    #[test]
    fn only_the_end_of_a_huge_log_is_kept() {
        let directory = tempfile::tempdir().unwrap();
        let mut writer = open(directory.path()).unwrap();
        let path = path(directory.path());
        writer.set_len(1 << 40).unwrap();
        writeln!(writer, "the end").unwrap();
        assert!(trim_log(&path, MAX_LOG_BYTES).unwrap());
        assert_eq!((length(&path), length(&trimmed(&path))), (0, MOST_READ));
        assert!(tail(&trimmed(&path), 0).ends_with("the end\n"));
    }

    #[test]
    fn the_tail_of_a_large_log_is_its_end() {
        let directory = tempfile::tempdir().unwrap();
        let mut writer = open(directory.path()).unwrap();
        writer.write_all(&vec![b'x'; 100_000]).unwrap();
        writer.write_all(b"\nthe end\n").unwrap();
        assert_eq!(explain_end(&tail(&path(directory.path()), 0)), "the end");
        assert_eq!(tail(&directory.path().join("absent"), 5), "");
    }

    #[test]
    fn lines_of_an_earlier_broker_do_not_explain_the_end() {
        let directory = tempfile::tempdir().unwrap();
        let path = path(directory.path());
        let mut writer = open(directory.path()).unwrap();
        writeln!(writer, "broker.crit[0]: earlier").unwrap();
        let since = length(&path);
        writeln!(writer, "later").unwrap();
        assert_eq!(explain_end(&tail(&path, since)), "later");
        trim_log(&path, 1).unwrap();
        writeln!(writer, "after").unwrap();
        assert_eq!(explain_end(&tail(&path, since)), "after");
    }
}
