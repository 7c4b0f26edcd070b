//! The broker's log on the host: `<prefix>/log/broker.log`.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read, Seek, SeekFrom},
    os::unix::fs::{OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
};

use crate::files::absent_is_fine;

/// A log that is larger is trimmed; what is cut off is kept once, as `broker.log.1`.
pub const MAX_LOG_BYTES: u64 = 8 << 20;

const TAIL_BYTES: u64 = 64 << 10;
const WHY_CHARS: usize = 300;
/// A broker that is up says so (state_machine.c).
const WAS_UP: &str = "quorum->run";
/// What a broker says before it gives up, besides lines of level err and above.
const TELLING: [&str; 5] = [".crit[", ".err[", ".emerg", "rejecting connection", "Config file error"];

/// The broker's log below `prefix`.
pub fn path(prefix: &Path) -> PathBuf {
    directory(prefix).join("broker.log")
}

/// What was cut off from the log at `path` when it was trimmed last.
pub fn trimmed(path: &Path) -> PathBuf {
    with_suffix(path, ".1")
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    PathBuf::from(name)
}

/// Where brokers are at home: a core that one leaves (core(5)) goes with everything else of ours, and does not lie in `/`.
pub fn directory(prefix: &Path) -> PathBuf {
    prefix.join("log")
}

/// Opens the log for appending; makes it and its directory where they are not there.
///
/// # Errors
/// The file system's.
pub fn open(prefix: &Path) -> io::Result<File> {
    let path = path(prefix);
    if let Some(directory) = path.parent().filter(|directory| !directory.is_dir()) {
        fs::create_dir_all(directory)?;
        fs::set_permissions(directory, fs::Permissions::from_mode(0o755))?;
    }
    OpenOptions::new().append(true).create(true).mode(0o640).open(path)
}

/// How long a log is; 0 where there is none.
pub fn length(path: &Path) -> u64 {
    fs::metadata(path).map_or(0, |metadata| metadata.len())
}

/// The last lines of a log, none of those before `since` (unless it was trimmed meanwhile: then all are newer, or the
/// difference is not known); empty where there is none.
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

/// The line of a log's tail that tells why its broker ended: one of level err or above. Of one that was up and had no such
/// word to say the last line tells nothing: it is said to be the last.
pub fn why(tail: &str) -> String {
    let lines = || tail.lines().rev().map(str::trim).filter(|line| !line.is_empty());
    // What ends a broker that was up stands last. One that never came up was ended by the first trouble; the others follow
    // from it.
    let telling = || lines().filter(|line| TELLING.iter().any(|word| line.contains(word)));
    let was_up = lines().any(|line| line.contains(WAS_UP));
    let line = if was_up { telling().next() } else { telling().next_back() };
    let said = line.is_some() || !was_up;
    let line = line.or_else(|| lines().next());
    match line.map(without_level) {
        Some(line) if said => line.chars().take(WHY_CHARS).collect(),
        Some(line) => format!(
            "nothing of its end (was it killed?); the last line is: {}",
            line.chars().take(WHY_CHARS).collect::<String>()
        ),
        None => "the broker left no word in its log".to_owned(),
    }
}

/// A broker that logs to its own stderr marks each line with its level, `<6>`, for systemd's journal.
pub fn without_level(line: &str) -> &str {
    match line.strip_prefix('<').and_then(|rest| rest.split_once('>')) {
        Some((level, rest)) if level.len() == 1 && level.starts_with(|digit: char| digit.is_ascii_digit()) => rest,
        _ => line,
    }
}

/// Keeps a log below `max_bytes` while its writer lives on: its content goes to `<path>.1`, and the file itself, which the
/// writer has open for appending, is cut to nothing. What is written between copy and cut is lost: lines of a log, against
/// a broker that would have to be restarted. True where it was trimmed.
///
/// # Errors
/// The file system's; a log that is not there is no error.
pub fn trim_log(path: &Path, max_bytes: u64) -> io::Result<bool> {
    let length = match fs::metadata(path) {
        Err(error) => return absent_is_fine(Err(error)).map(|()| false),
        Ok(metadata) => metadata.len(),
    };
    if length <= max_bytes {
        return Ok(false);
    }
    let (aside, kept) = (with_suffix(path, ".1.new"), trimmed(path));
    let file = OpenOptions::new().read(true).write(true).open(path)?;
    let mut copy = OpenOptions::new().write(true).create(true).truncate(true).mode(0o640).open(&aside)?;
    io::copy(&mut &file, &mut copy)?;
    fs::rename(&aside, &kept)?;
    file.set_len(0)?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

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
                "nothing of its end (was it killed?); the last line is: x.info[0]: later",
            ),
            ("\n \n".to_owned(), "the broker left no word in its log"),
            ("<60>kept <1>x".to_owned(), "<60>kept <1>x"),
        ] {
            assert_eq!(why(&tail), expected, "{tail}");
        }
        assert_eq!(why(&"é".repeat(1000)).chars().count(), WHY_CHARS);
    }

    #[test]
    fn a_log_is_trimmed_under_a_writer_that_lives_on() {
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
    fn the_tail_of_a_large_log_is_its_end() {
        let directory = tempfile::tempdir().unwrap();
        let mut writer = open(directory.path()).unwrap();
        writer.write_all(&vec![b'x'; 100_000]).unwrap();
        writer.write_all(b"\nthe end\n").unwrap();
        assert_eq!(why(&tail(&path(directory.path()), 0)), "the end");
        assert_eq!(tail(&directory.path().join("absent"), 5), "");
    }

    #[test]
    fn what_an_earlier_broker_said_explains_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let path = path(directory.path());
        let mut writer = open(directory.path()).unwrap();
        writeln!(writer, "broker.crit[0]: earlier").unwrap();
        let since = length(&path);
        writeln!(writer, "later").unwrap();
        assert_eq!(why(&tail(&path, since)), "later");
        trim_log(&path, 1).unwrap();
        writeln!(writer, "after").unwrap();
        assert_eq!(why(&tail(&path, since)), "after");
    }
}
