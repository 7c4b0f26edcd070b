//! A live change that is killed between two of its steps.

use std::{
    fs,
    io::{self, Read, Write},
    net::Shutdown,
    os::unix::net::{UnixListener, UnixStream},
    path::{Path, PathBuf},
    process::Stdio,
    sync::mpsc::{Receiver, Sender, channel},
    thread,
    time::Duration,
};

use api::BROKER_SOCKET_DIR;
use broker::message::{PREAMBLE, frame_length, parts};

use super::{Row, SELDOM, row};
use crate::{oracle::schedules, scene::Hit};

/// What the lead's agent asks of its broker for a join, one after the other.
const STEPS: [(&str, &str); 10] = [
    ("job-manager.events-journal", ""),
    ("config.load", ""),
    ("module.remove", "sched-fluxion-qmanager"),
    ("module.remove", "sched-fluxion-feasibility"),
    ("module.remove", "sched-fluxion-resource"),
    ("module.remove", "resource"),
    ("module.load", "resource"),
    ("module.load", "sched-fluxion-resource"),
    ("module.load", "sched-fluxion-feasibility"),
    ("module.load", "sched-fluxion-qmanager"),
];

const SCHEDULES_AGAIN: Duration = Duration::from_secs(10);

pub fn rows() -> Vec<Row> {
    vec![Row {
        runs: SELDOM * u32::try_from(STEPS.len()).unwrap(),
        fresh: true,
        heals_in: 90,
        ..row("live change killed at each of its steps", |scene| {
            let step = STEPS[scene.run as usize % STEPS.len()];
            let lead = scene.lead();
            let relay =
                Relay::before(format!("/proc/{}/root{BROKER_SOCKET_DIR}/local", scene.init(&lead)).as_ref(), step);
            let mut join = scene.cluster.command(&["add-node"]).stdout(Stdio::null()).spawn().unwrap();
            let what = format!("{step:?}");
            scene.until(&what, Duration::from_mins(1), |_| relay.held.try_recv().map_err(|error| error.to_string()));
            relay.end();
            scene.agents()[&lead].kill();
            let hit = Hit::none();
            scene.until("scheduling", SCHEDULES_AGAIN, schedules);
            eprintln!("chaos: killed at {step:?}: scheduling is on after {:.1} s", hit.since.elapsed().as_secs_f64());
            assert!(join.wait().unwrap().success());
            scene.nodes += 1;
            hit
        })
    }]
}

/// Stands before a broker's socket and holds one request back, so that its step is not over in a blink.
struct Relay {
    socket: PathBuf,
    itself: PathBuf,
    held: Receiver<()>,
}

impl Relay {
    fn before(socket: &Path, step: (&'static str, &'static str)) -> Self {
        let itself = socket.with_extension("itself");
        fs::rename(socket, &itself).unwrap();
        let listener = UnixListener::bind(socket).unwrap();
        let (tell, held) = channel();
        let broker = itself.clone();
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let Ok(broker) = UnixStream::connect(&broker) else { return };
                let (mut answers, mut to) = (broker.try_clone().unwrap(), client.try_clone().unwrap());
                thread::spawn(move || io::copy(&mut answers, &mut to));
                let tell = tell.clone();
                thread::spawn(move || {
                    let _ = pass_on(client, &broker, step, &tell);
                    broker.shutdown(Shutdown::Both)
                });
            }
        });
        Self { socket: socket.to_owned(), itself, held }
    }

    /// Existing connections stay open.
    fn end(&self) {
        fs::rename(&self.itself, &self.socket).unwrap();
    }
}

/// All requests but that of `step`: topic, and which module.
fn pass_on(mut client: UnixStream, mut broker: &UnixStream, step: (&str, &str), tell: &Sender<()>) -> io::Result<()> {
    loop {
        let mut preamble = [0; PREAMBLE];
        client.read_exact(&mut preamble)?;
        let mut request = vec![0; frame_length(preamble).unwrap()];
        client.read_exact(&mut request)?;
        // A route that is empty, the topic, and the payload, if there is one.
        let words: Vec<_> = parts(&request).unwrap().into_iter().map(String::from_utf8_lossy).collect();
        if words[1] == step.0 && (step.1.is_empty() || words[2].contains(&format!("\"{}\"", step.1))) {
            let _ = tell.send(());
            continue;
        }
        broker.write_all(&[&preamble[..], &request].concat())?;
    }
}
