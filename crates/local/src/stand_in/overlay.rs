//! The stand-ins' overlay: each follower keeps one connection to the lead, which announces the online ranks.
//! Messages are lines of JSON; an empty line is a sign of life.

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

/// How often each end sends a sign of life.
const ALIVE_EVERY: Duration = Duration::from_secs(1);
/// A peer that is silent for this long is gone: after a power cut, no connection is closed.
const SILENCE: Duration = Duration::from_secs(5);
/// How often a follower tries to connect to its lead.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// A follower's first message.
#[derive(Serialize, Deserialize)]
struct Hello {
    rank: u32,
    name: String,
}

/// A message of the lead.
#[derive(Serialize, Deserialize)]
enum LeadMessage {
    /// The follower is accepted. The number identifies this start of the lead.
    Welcome(u64),
    /// The follower is refused, for this reason.
    Refused(String),
    /// The ranks that are online.
    Online(IdSet),
    /// The instance ends.
    Bye,
}

/// What a follower's connection reports to its broker.
#[derive(Debug, PartialEq)]
pub(super) enum Event {
    /// The lead has accepted this broker.
    Joined,
    /// The ranks that are online, from the lead.
    Online(IdSet),
    /// The connection is lost; the follower tries to reconnect.
    Lost,
    /// The broker must exit with this code, for this reason.
    End(u8, String),
}

/// The lead's side: serves followers on `listener` and updates `online` until it becomes `None`, which ends the
/// instance.
pub(super) async fn lead(listener: TcpListener, names: Vec<String>, start: u64, online: watch::Sender<Option<IdSet>>) {
    // The connection of each rank: a follower may reconnect before its old connection times out.
    let mut held = BTreeMap::<u32, u64>::new();
    let (changed, mut changes) = mpsc::unbounded_channel::<(u32, u64, bool)>();
    let mut connections = tokio::task::JoinSet::new();
    let mut ended = online.subscribe();
    let mut serial = 0;
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                let Ok((stream, _)) = accepted else { sleep(LOOK_EVERY).await; continue };
                serial += 1;
                connections.spawn(follower(stream, names.clone(), (start, serial), online.subscribe(), changed.clone()));
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
            // `wait_for` returns a guard of the watch channel, which must not be held.
            () = async { drop(ended.wait_for(Option::is_none).await) } => break,
        }
    }
    // Give the connections time to send the end.
    let _ = timeout(ALIVE_EVERY, async { while connections.join_next().await.is_some() {} }).await;
}

async fn follower(
    stream: TcpStream,
    names: Vec<String>,
    (start, serial): (u64, u64),
    mut online: watch::Receiver<Option<IdSet>>,
    changed: mpsc::UnboundedSender<(u32, u64, bool)>,
) -> Option<()> {
    let (reader, mut writer) = stream.into_split();
    let mut lines = BufReader::new(reader).lines();
    let mut last_heard = Instant::now();
    let hello: Hello = serde_json::from_str(&next(&mut lines, last_heard).await?).ok()?;
    let expected = names.get(usize::try_from(hello.rank).ok()?);
    if expected != Some(&hello.name) || hello.rank == 0 {
        let reason = format!("rank {} is not {}", hello.rank, hello.name);
        tracing::warn!("rejecting connection: {reason}");
        return send(&mut writer, &LeadMessage::Refused(reason)).await;
    }
    send(&mut writer, &LeadMessage::Welcome(start)).await?;
    let _ = changed.send((hello.rank, serial, true));
    online.mark_changed();
    let mut alive = interval(ALIVE_EVERY);
    loop {
        let sent = tokio::select! {
            line = next(&mut lines, last_heard) => {
                last_heard = Instant::now();
                line.map(drop)
            }
            Ok(()) = online.changed() => {
                let now = online.borrow_and_update().clone();
                let ends = now.is_none();
                let sent = send(&mut writer, &now.map_or(LeadMessage::Bye, LeadMessage::Online)).await;
                sent.filter(|()| !ends)
            }
            _ = alive.tick() => writer.write_all(b"\n").await.ok(),
        };
        if sent.is_none() {
            let _ = changed.send((hello.rank, serial, false));
            return None;
        }
    }
}

/// The follower's side: keeps connecting to `lead` until an [`Event::End`].
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

/// `None` if the connection was lost or could not be made.
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
    let (mut alive, mut last_heard) = (interval(ALIVE_EVERY), Instant::now());
    loop {
        let line = tokio::select! {
            line = next(&mut lines, last_heard) => line?,
            _ = alive.tick() => {
                writer.write_all(b"\n").await.ok()?;
                continue;
            }
        };
        last_heard = Instant::now();
        if line.is_empty() {
            continue;
        }
        match serde_json::from_str(&line).ok()? {
            // As in Flux, the brokers of a lead that restarted must restart too.
            LeadMessage::Welcome(start) if known.is_some_and(|known| known != start) => {
                return Some(Event::End(1, "the lead has started again".to_owned()));
            }
            LeadMessage::Welcome(start) => {
                *known = Some(start);
                let _ = events.send(Event::Joined);
            }
            LeadMessage::Online(online) => drop(events.send(Event::Online(online))),
            LeadMessage::Refused(reason) => {
                return Some(Event::End(1, format!("the lead refuses this broker: {reason}")));
            }
            LeadMessage::Bye => return Some(Event::End(0, "the lead ends the instance".to_owned())),
        }
    }
}

/// `None` if the connection is closed or broken, or the peer has been silent for too long since `last_heard`.
async fn next(lines: &mut Lines<BufReader<OwnedReadHalf>>, last_heard: Instant) -> Option<String> {
    timeout_at(last_heard + SILENCE, lines.next_line()).await.ok()?.ok()?
}

async fn send(writer: &mut OwnedWriteHalf, word: &impl Serialize) -> Option<()> {
    let mut line = serde_json::to_string(word).ok()?;
    line.push('\n');
    writer.write_all(line.as_bytes()).await.ok()
}
