//! The stand-ins' overlay: each follower keeps one connection to the lead, which announces who is online.
//! One JSON line at a time; an empty line says that the sender is alive.

use std::{collections::BTreeMap, net::SocketAddr, time::Duration};

use serde::{Deserialize, Serialize};
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines},
    net::{
        TcpListener, TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::{mpsc, watch},
    time::{Instant, interval, sleep, timeout, timeout_at},
};

use api::IdSet;

/// How often each end says that it is alive.
const ALIVE_EVERY: Duration = Duration::from_secs(1);
/// A peer silent for this long is gone: a power cut closes no connection.
const SILENCE: Duration = Duration::from_secs(5);
/// How often a follower looks for its lead.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// What a follower says first.
#[derive(Serialize, Deserialize)]
struct Hello {
    rank: u32,
    name: String,
}

/// What the lead says.
#[derive(Serialize, Deserialize)]
enum Word {
    /// The follower is taken in, by the lead that started under this number.
    Welcome(u64),
    /// It is not, and why.
    Refused(String),
    /// These ranks are online.
    Online(IdSet),
    /// The instance ends.
    Bye,
}

/// What a follower's link comes to know.
#[derive(Debug, PartialEq)]
pub(super) enum Event {
    /// The lead has taken this broker in.
    Joined,
    /// Ranks that are online, by the lead's word.
    Online(IdSet),
    /// The lead does not answer; it is looked for.
    Lost,
    /// The broker has to end, with this exit code and for this reason.
    End(u8, String),
}

/// The lead: serves followers on `listener` and keeps `online` up to date until it turns None, which is the end.
pub(super) async fn lead(listener: TcpListener, names: Vec<String>, start: u64, online: watch::Sender<Option<IdSet>>) {
    // Which connection holds a rank: a follower may come back before its old connection is given up.
    let mut held = BTreeMap::<u32, u64>::new();
    let (told, mut changes) = mpsc::unbounded_channel::<(u32, u64, bool)>();
    let mut connections = tokio::task::JoinSet::new();
    let mut ended = online.subscribe();
    let mut serial = 0;
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                let Ok((stream, _)) = accepted else { sleep(LOOK_EVERY).await; continue };
                serial += 1;
                connections.spawn(follower(stream, names.clone(), (start, serial), online.subscribe(), told.clone()));
            }
            Some((rank, connection, is_there)) = changes.recv() => {
                match (is_there, held.get(&rank)) {
                    (true, _) => { held.insert(rank, connection); }
                    (false, Some(holder)) if *holder == connection => { held.remove(&rank); }
                    (false, _) => continue,
                }
                let now: IdSet = std::iter::once(0).chain(held.keys().copied()).collect();
                online.send_modify(|online| if online.is_some() { *online = Some(now) });
            }
            // What it returns is a guard, which must not be held.
            () = async { drop(ended.wait_for(Option::is_none).await) } => break,
        }
    }
    // Everybody gets the last word.
    let _ = timeout(ALIVE_EVERY, async { while connections.join_next().await.is_some() {} }).await;
}

async fn follower(
    stream: TcpStream,
    names: Vec<String>,
    (start, serial): (u64, u64),
    mut online: watch::Receiver<Option<IdSet>>,
    told: mpsc::UnboundedSender<(u32, u64, bool)>,
) -> Option<()> {
    let (reader, mut writer) = stream.into_split();
    let mut lines = BufReader::new(reader).lines();
    let mut heard = Instant::now();
    let hello: Hello = serde_json::from_str(&next(&mut lines, heard).await?).ok()?;
    let expected = names.get(usize::try_from(hello.rank).ok()?);
    if expected != Some(&hello.name) || hello.rank == 0 {
        let reason = format!("rank {} is not {}", hello.rank, hello.name);
        tracing::warn!("rejecting connection: {reason}");
        return send(&mut writer, &Word::Refused(reason)).await;
    }
    send(&mut writer, &Word::Welcome(start)).await?;
    let _ = told.send((hello.rank, serial, true));
    online.mark_changed();
    let mut alive = interval(ALIVE_EVERY);
    loop {
        let sent = tokio::select! {
            line = next(&mut lines, heard) => {
                heard = Instant::now();
                line.map(drop)
            }
            Ok(()) = online.changed() => {
                let now = online.borrow_and_update().clone();
                let ends = now.is_none();
                let sent = send(&mut writer, &now.map_or(Word::Bye, Word::Online)).await;
                sent.filter(|()| !ends)
            }
            _ = alive.tick() => writer.write_all(b"\n").await.ok(),
        };
        if sent.is_none() {
            let _ = told.send((hello.rank, serial, false));
            return None;
        }
    }
}

/// A follower: holds on to the lead at `lead` until an [`Event::End`].
pub(super) async fn follow(lead: SocketAddr, rank: u32, name: String, events: mpsc::UnboundedSender<Event>) {
    let mut known = None;
    loop {
        if let Some(end) = follow_once(lead, rank, &name, &mut known, &events).await {
            let _ = events.send(end);
            return;
        }
        let _ = events.send(Event::Lost);
        sleep(LOOK_EVERY).await;
    }
}

/// None: the connection is lost, or there was none.
async fn follow_once(
    lead: SocketAddr,
    rank: u32,
    name: &str,
    known: &mut Option<u64>,
    events: &mpsc::UnboundedSender<Event>,
) -> Option<Event> {
    let stream = timeout(SILENCE, TcpStream::connect(lead)).await.ok()?.ok()?;
    let (reader, mut writer) = stream.into_split();
    let mut lines = BufReader::new(reader).lines();
    send(&mut writer, &Hello { rank, name: name.to_owned() }).await?;
    let (mut alive, mut heard) = (interval(ALIVE_EVERY), Instant::now());
    loop {
        let line = tokio::select! {
            line = next(&mut lines, heard) => line?,
            _ = alive.tick() => {
                writer.write_all(b"\n").await.ok()?;
                continue;
            }
        };
        heard = Instant::now();
        if line.is_empty() {
            continue;
        }
        match serde_json::from_str(&line).ok()? {
            // As Flux does: whoever hung on the lead before starts anew.
            Word::Welcome(start) if known.is_some_and(|known| known != start) => {
                return Some(Event::End(1, "the lead has started again".to_owned()));
            }
            Word::Welcome(start) => {
                *known = Some(start);
                let _ = events.send(Event::Joined);
            }
            Word::Online(online) => drop(events.send(Event::Online(online))),
            Word::Refused(reason) => return Some(Event::End(1, format!("the lead refuses this broker: {reason}"))),
            Word::Bye => return Some(Event::End(0, "the lead ends the instance".to_owned())),
        }
    }
}

/// None: closed, broken, or silent since `heard` for too long.
async fn next(lines: &mut Lines<BufReader<OwnedReadHalf>>, heard: Instant) -> Option<String> {
    timeout_at(heard + SILENCE, lines.next_line()).await.ok()?.ok()?
}

async fn send(writer: &mut OwnedWriteHalf, word: &impl Serialize) -> Option<()> {
    let mut line = serde_json::to_string(word).ok()?;
    line.push('\n');
    writer.write_all(line.as_bytes()).await.ok()
}
