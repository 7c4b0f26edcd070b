//! What the agent hears of a host stage.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use tokio::{
    io::{AsyncBufReadExt, AsyncRead, BufReader},
    time::timeout,
};

use super::boundary::failed;
use hostapi::{BEAT, HostError, Progress, Reply};

/// A stage that is silent for so long is stopped, by SIGSTOP or a frozen cgroup, and perhaps nobody ever wakes it. Long for
/// a machine on which everything is late.
const SILENCE: Duration = Duration::from_secs(60);

/// What the stage says last. It must get on within `patience`, except while it `may_wait` for what is coming, and never be
/// silent. Its own words count the time, so that an agent that stood still meanwhile condemns nobody.
pub(super) async fn hear(
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
            // What was said while this process stood still may be heard a moment after the time is over.
            Err(_) => match timeout(BEAT, lines.next_line()).await {
                Ok(line) => line,
                Err(_) => return Err(failed("stands still, and is ended", None)),
            },
        };
        let Some(line) = line.map_err(|error| failed("can't be heard", Some(error)))? else { return Ok(None) };
        // The cause would quote the line, and with it what may be secret.
        match serde_json::from_str(&line).map_err(|_| failed("said what is no reply", None))? {
            Reply::Alive if may_wait.load(Ordering::Relaxed) => without_progress = Duration::ZERO,
            Reply::Alive if without_progress > patience => return Err(failed("does not get on, and is ended", None)),
            Reply::Alive => without_progress += BEAT,
            Reply::Progress(step) => {
                progress(step);
                without_progress = Duration::ZERO;
            }
            reply => return Ok(Some(reply)),
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWriteExt;

    use super::*;
    use hostapi::Answer;

    /// What is heard of a stage that says each of `lines` after so many seconds, and then nothing any more.
    async fn heard(patience: u64, may_wait: bool, lines: &[(u64, Reply)]) -> Result<Option<Reply>, HostError> {
        let (stdout, mut stage) = tokio::io::duplex(1 << 16);
        let said = async {
            for (after, reply) in lines {
                tokio::time::sleep(Duration::from_secs(*after)).await;
                let line = serde_json::to_string(reply).unwrap() + "\n";
                stage.write_all(line.as_bytes()).await.unwrap();
            }
            std::future::pending().await
        };
        let (may_wait, mut ignored) = (AtomicBool::new(may_wait), |_| {});
        tokio::select! {
            heard = hear(Some(stdout), Duration::from_secs(patience), &may_wait, &mut ignored) => heard,
            () = said => unreachable!("it waits for ever"),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_stage_that_is_stopped_or_does_not_get_on_is_ended_and_one_that_works_or_waits_is_heard() {
        let beats = |count| vec![(1, Reply::Alive); count];
        let progress = || (0, Reply::Progress(Progress::begun("linking")));
        let done = || (1, Reply::Done(Box::new(Answer::Done)));
        for (patience, may_wait, lines, expected) in [
            (1800, false, beats(5), "stands still"),
            (1800, true, beats(5), "stands still"),
            (60, false, beats(70), "does not get on"),
            (60, false, [beats(50), vec![progress()], beats(50), vec![done()]].concat(), "done"),
            (60, true, [beats(200), vec![done()]].concat(), "done"),
            (1800, false, [beats(1700), vec![done()]].concat(), "done"),
            // All at once, as after the agent stood still.
            (60, false, [vec![(0, Reply::Alive); 50], vec![done()]].concat(), "done"),
            (60, false, vec![(59, Reply::Alive), (59, Reply::Alive), done()], "done"),
        ] {
            match heard(patience, may_wait, &lines).await {
                Ok(Some(Reply::Done(_))) => assert_eq!(expected, "done", "{} lines", lines.len()),
                Err(error) => assert!(error.to_string().contains(expected), "{error}, not {expected}"),
                other => panic!("{other:?}"),
            }
        }
    }
}
