//! Finds the epoch that an administrator ended with flux-shutdown(1) on the lead. The broker's log shows it: each start
//! writes a line with its epoch, so that a shutdown is attributed to the right epoch. The result is stored in a file,
//! because the log is trimmed and the machine may reboot before the instance is started again.

use std::{
    fs::{self, File},
    io::{self, BufRead, BufReader, Read, Seek, SeekFrom, Write},
    path::Path,
};

use super::BrokerView;
use host::{
    files::{Owner, remove_if_there, write_atomic},
    log,
};
use hostapi::{EpochId, LaunchRecord};

/// Path below the prefix of the last [`EpochId`] that was found.
const SHUTDOWN_FILE: &str = "etc/shutdown.json";
/// Beginning of the line that marks a start.
const MARK: &str = "flux-distribute: starting the broker of epoch ";
/// Text in that line between epoch and instance ID.
const OF_INSTANCE: &str = " of instance ";

/// SIGHUP, SIGINT, SIGQUIT, SIGALRM and SIGTERM end a broker (broker.c, signal_is_deadly); the lead forwards others to
/// jobs.
const DEADLY: [&str; 5] = ["1", "2", "3", "14", "15"];

/// Writes a line to the log which marks that the broker of `record` is about to start.
///
/// # Errors
/// If the log can't be written.
pub fn mark(mut log: &File, record: &LaunchRecord) -> io::Result<()> {
    writeln!(log, "{MARK}{}{OF_INSTANCE}{}", record.epoch, record.instance_id)
}

/// The epoch that was shut down on this host, if no broker has run here since. `prefix` is this process's path.
pub fn find(prefix: &Path, broker: &BrokerView) -> Option<EpochId> {
    let path = prefix.join(SHUTDOWN_FILE);
    let found = fs::read(&path).ok().and_then(|text| serde_json::from_slice(&text).ok());
    if broker.running.is_some() || broker.unknown.is_some() {
        if found.is_some()
            && let Err(error) = remove_if_there(&path)
        {
            tracing::warn!(%error, path = %path.display(), "can't remove the record of an earlier shutdown");
        }
        return None;
    }
    let last = broker.last_record.as_ref().map(LaunchRecord::epoch_id);
    let logged = log_lines(prefix).ok().and_then(|lines| shut_down_in(lines, last));
    if logged.is_some() && logged != found {
        // Needs no lock: two processes that observe at the same time write the same content.
        let text = serde_json::to_vec(&logged).unwrap_or_default();
        if let Err(refusal) = write_atomic(&path, &text, 0o644, Owner::ROOT) {
            tracing::warn!(%refusal, "can't write etc/shutdown.json: forgotten once the log is trimmed");
        }
    }
    logged.or(found)
}

/// The lines of the whole log, beginning with the part that was cut off last.
fn log_lines(prefix: &Path) -> io::Result<impl Iterator<Item = String>> {
    let open = |path: &Path| -> io::Result<Box<dyn Read>> {
        let mut file = match File::open(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Box::new(io::empty())),
            opened => opened?,
        };
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(log::MOST_READ)))?;
        Ok(Box::new(file.take(log::MOST_READ)))
    };
    let path = log::path(prefix);
    let lines = BufReader::new(open(&log::trimmed(&path))?.chain(open(&path)?)).split(b'\n');
    Ok(lines.map_while(Result::ok).map(|line| String::from_utf8_lossy(&line).into_owned()))
}

/// The epoch whose lead was shut down, if no broker came up after that. A broker logs the same lines after a deadly
/// signal, but logs the signal before them (broker.c, signal_cb); a broker that crashed or was killed logs neither.
/// `last` is the epoch of the last broker, if known: a log without a mark is about that one.
fn shut_down_in(lines: impl Iterator<Item = String>, last: Option<EpochId>) -> Option<EpochId> {
    let (mut epoch, mut has_signal, mut is_shut_down) = (last, false, false);
    for line in lines {
        let line = log::without_level(line.trim());
        if let Some(marked) = marked(line) {
            // A mark of the same epoch means another start of that broker; if it comes up, it logs `->join`.
            if epoch.as_ref() != Some(&marked) {
                (epoch, has_signal, is_shut_down) = (Some(marked), false, false);
            }
        }
        let Some(said) = line.strip_prefix("broker.info[0]: ") else { continue };
        match said {
            _ if said.contains("->join") || said.contains("->run") => (has_signal, is_shut_down) = (false, false),
            _ if is_deadly(said) => has_signal = true,
            _ if said.starts_with("shutdown: run->cleanup") => is_shut_down = !has_signal,
            _ => {}
        }
    }
    epoch.filter(|_| is_shut_down)
}

fn marked(line: &str) -> Option<EpochId> {
    let (epoch, instance_id) = line.strip_prefix(MARK)?.split_once(OF_INSTANCE)?;
    Some(EpochId { instance_id: instance_id.to_owned(), epoch: epoch.parse().ok()? })
}

fn is_deadly(said: &str) -> bool {
    said.strip_prefix("signal ").is_some_and(|number| DEADLY.contains(&number.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const BEGIN: &str = "builtins-success: load-builtins->join 1ms";
    const UP: &str = "quorum-full: quorum->run 0.1s";
    const SHUTDOWN: &str = "shutdown: run->cleanup 3.2m";
    const END: &str = "builtins-done: unload-builtins->exit 1ms";

    fn epoch(epoch: u64) -> EpochId {
        EpochId { instance_id: "id".to_owned(), epoch }
    }

    fn mark_of(epoch: u64) -> String {
        format!("{MARK}{epoch}{OF_INSTANCE}id")
    }

    /// Log lines as the broker of rank 0 writes `words`; marks are lines of their own.
    fn logged(words: &[&str]) -> Vec<String> {
        let line = |word: &&str| match word.starts_with(MARK) {
            true => (*word).to_owned(),
            false => format!("<6>broker.info[0]: {word}"),
        };
        words.iter().map(line).collect()
    }

    #[test]
    fn an_end_by_signal_or_crash_is_no_shutdown() {
        for (words, expected) in [
            (vec![BEGIN, UP, SHUTDOWN, END], true),
            (vec![BEGIN, UP, "signal 15", SHUTDOWN, END], false),
            // The lead forwards SIGUSR1 to its jobs.
            (vec![BEGIN, UP, "signal 10", SHUTDOWN, END], true),
            (vec![BEGIN, UP, SHUTDOWN, "signal 15", END], true),
            (vec![BEGIN, UP, SHUTDOWN, END, BEGIN, UP], false),
            (vec![BEGIN, UP, "signal 15", SHUTDOWN, END, BEGIN, UP, SHUTDOWN], true),
            (vec![BEGIN, UP, "panic: run->shutdown 1s"], false),
            (vec![BEGIN, UP], false),
            (vec![], false),
        ] {
            let lines = logged(&words);
            let found = shut_down_in(lines.iter().cloned(), Some(epoch(1)));
            assert_eq!(found, expected.then(|| epoch(1)), "{words:?}");
            let follower = lines.iter().map(|line| line.replace("[0]", "[1]"));
            assert_eq!(shut_down_in(follower, Some(epoch(1))), None, "a follower's end follows from its lead's");
        }
        let quoted = ["<6>x.info[0]: broker.info[0]: shutdown: run->cleanup".to_owned()];
        assert_eq!(shut_down_in(quoted.into_iter(), Some(epoch(1))), None);
    }

    #[test]
    fn log_lines_of_one_epoch_do_not_count_for_another() {
        let (one, two) = (mark_of(1), mark_of(2));
        let first = [&one, BEGIN, UP, SHUTDOWN, END];
        for (after, last, expected) in [
            (vec![], Some(1), Some(1)),
            // After a reboot only the log is left.
            (vec![], None, Some(1)),
            // The agent was killed before it could start the broker of epoch 2.
            (vec![], Some(2), Some(1)),
            // That broker ended before it logged a line, or after.
            (vec![&*two], Some(2), None),
            (vec![&two, "config: Config file error"], Some(2), None),
            (vec![&two, BEGIN, UP], Some(2), None),
            (vec![&two, BEGIN, UP, SHUTDOWN], Some(2), Some(2)),
            // An administrator started the broker of epoch 1 again.
            (vec![&one, BEGIN, UP], Some(1), None),
            (vec![&*one], Some(1), Some(1)),
        ] {
            let lines = logged(&[&first[..], &after].concat());
            let found = shut_down_in(lines.into_iter(), last.map(epoch));
            assert_eq!(found, expected.map(epoch), "{after:?} {last:?}");
        }
        // The mark was cut off, and this boot has no record of a broker.
        assert_eq!(shut_down_in(logged(&[UP, SHUTDOWN]).into_iter(), None), None);
    }

    fn gone(epoch: u64) -> BrokerView {
        let record = LaunchRecord { instance_id: "id".to_owned(), epoch, ..LaunchRecord::default() };
        BrokerView { died: Some(String::new()), last_record: Some(record), ..BrokerView::default() }
    }

    #[test]
    fn a_shutdown_that_was_found_is_remembered_after_the_log_is_trimmed() {
        let prefix = tempfile::tempdir().unwrap();
        fs::create_dir(prefix.path().join("etc")).unwrap();
        let path = log::path(prefix.path());
        let mut writer = log::open(prefix.path()).unwrap();
        mark(&writer, gone(1).last_record.as_ref().unwrap()).unwrap();
        logged(&[BEGIN, UP, SHUTDOWN, END]).iter().for_each(|line| writeln!(writer, "{line}").unwrap());
        // Longer than the part that `tail` reads, and trimmed once.
        (0..20_000).for_each(|_| writer.write_all(b"something else\n").unwrap());
        log::trim_log(&path, 1).unwrap();
        writeln!(writer, "after").unwrap();
        let after_a_reboot = BrokerView::default();
        assert_eq!(find(prefix.path(), &after_a_reboot), Some(epoch(1)));
        log::trim_log(&path, 1).unwrap();
        assert_eq!(find(prefix.path(), &after_a_reboot), Some(epoch(1)), "the log no longer shows it");
        assert_eq!(find(prefix.path(), &gone(1)), Some(epoch(1)));
    }
}
