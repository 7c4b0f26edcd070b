//! The agent's end of a host stage's stdout.

use std::{
    io,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use tokio::{
    io::{AsyncBufReadExt, AsyncRead, BufReader},
    time::timeout,
};

use hostapi::{BEAT, HostError, Progress, Reply};

/// After this time without any line, the stage counts as stopped (SIGSTOP, a frozen cgroup) and may never be woken.
/// Long enough for a machine that is slow in everything.
const SILENCE: Duration = Duration::from_mins(1);

/// Reads up to the stage's last reply; None if stdout ended without one. Fails if the stage is silent for [`SILENCE`],
/// or makes no progress within `patience` while `may_wait` is false. The stage's own lines count that time: if this
/// agent was suspended, the time it missed must not count against the stage.
pub(super) async fn read_stage_reply(
    stdout: Option<impl AsyncRead + Unpin>,
    patience: Duration,
    may_wait: &AtomicBool,
    progress: &mut (dyn FnMut(Progress) + Send),
) -> Result<Option<Reply>, HostError> {
    let Some(stdout) = stdout else { return Ok(None) };
    let mut lines = BufReader::new(stdout).lines();
    let mut without_progress = Duration::ZERO;
    loop {
        let line = match timeout(SILENCE, lines.next_line()).await {
            Ok(line) => line,
            // The agent may have been suspended itself; lines written meanwhile may need a moment to arrive.
            Err(_) => match timeout(BEAT, lines.next_line()).await {
                Ok(line) => line,
                Err(_) => return Err(failed("was silent and was killed", None)),
            },
        };
        let Some(line) = line.map_err(|error| failed("output can't be read", Some(error)))? else { return Ok(None) };
        // No source: serde's error would quote the line, which may hold a secret.
        match serde_json::from_str(&line).map_err(|_| failed("wrote a line that is no reply", None))? {
            Reply::Alive if may_wait.load(Ordering::Relaxed) => without_progress = Duration::ZERO,
            Reply::Alive if without_progress > patience => return Err(failed("made no progress and was killed", None)),
            Reply::Alive => without_progress += BEAT,
            Reply::Progress(step) => {
                progress(step);
                without_progress = Duration::ZERO;
            }
            reply => return Ok(Some(reply)),
        }
    }
}

pub(super) fn failed(what: &str, source: Option<io::Error>) -> HostError {
    HostError::Stage { what: what.to_owned(), source }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWriteExt;

    use super::*;
    use hostapi::Answer;

    /// The result for a stage that writes each of `lines` after the given number of seconds, and then nothing.
    async fn result(patience: u64, may_wait: bool, lines: &[(u64, Reply)]) -> Result<Option<Reply>, HostError> {
        let (stdout, mut stage) = tokio::io::duplex(1 << 16);
        let writing = async {
            for (after, reply) in lines {
                tokio::time::sleep(Duration::from_secs(*after)).await;
                let line = serde_json::to_string(reply).unwrap() + "\n";
                stage.write_all(line.as_bytes()).await.unwrap();
            }
            std::future::pending::<()>().await;
        };
        let (may_wait, mut ignored) = (AtomicBool::new(may_wait), |_| {});
        tokio::select! {
            result = read_stage_reply(Some(stdout), Duration::from_secs(patience), &may_wait, &mut ignored) => result,
            () = writing => unreachable!("it waits for ever"),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_silent_or_stuck_stage_is_killed_and_a_working_or_waiting_one_is_not() {
        let beats = |count| vec![(1, Reply::Alive); count];
        let progress = || (0, Reply::Progress(Progress::begun("linking")));
        let done = || (1, Reply::Done(Box::new(Answer::Done)));
        for (patience, may_wait, lines, expected) in [
            (1800, false, beats(5), "was silent"),
            (1800, true, beats(5), "was silent"),
            (60, false, beats(70), "made no progress"),
            (60, false, [beats(50), vec![progress()], beats(50), vec![done()]].concat(), "done"),
            (60, true, [beats(200), vec![done()]].concat(), "done"),
            (1800, false, [beats(1700), vec![done()]].concat(), "done"),
            // All at once, as if the agent had been suspended.
            (60, false, [vec![(0, Reply::Alive); 50], vec![done()]].concat(), "done"),
            (60, false, vec![(59, Reply::Alive), (59, Reply::Alive), done()], "done"),
        ] {
            match result(patience, may_wait, &lines).await {
                Ok(Some(Reply::Done(_))) => assert_eq!(expected, "done", "{} lines", lines.len()),
                Err(error) => assert!(error.to_string().contains(expected), "{error}, not {expected}"),
                other => panic!("{other:?}"),
            }
        }
    }
}
