//! The host stage: a child of the agent that has entered the host's namespaces. It reads one order from stdin, writes
//! JSON lines to stdout and its log to stderr.

use std::{
    fs::File,
    io::{self, BufRead, StdoutLock, Write},
    os::fd::AsFd,
    path::Path,
    process::ExitCode,
    thread,
};

use super::{
    claim, configure, dump, flux,
    launch::{self, BrokerView},
    observe, observe_again, preflight,
    remove::{self, Brokers},
    runnable, takeover,
};
use host::{
    Root, boundary, cgroup, detach,
    lock::{HostLock, WAIT},
    state, statedir,
};
use hostapi::{Answer, BEAT, Order, Progress, Refusal, RemoveOrder, Reply, StopOrder};

/// Exit code after a panic, or if the stage could not write its answer (sysexits(3) EX_SOFTWARE).
const BROKEN: u8 = 70;

/// The subcommand `stage`.
pub fn main() -> ExitCode {
    detach::reset_umask();
    let _ = tracing_subscriber::fmt()
        .with_env_filter(
            tracing_subscriber::EnvFilter::try_from_env(base::redact::LOG_VARIABLE)
                .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("info")),
        )
        .with_writer(base::redact::Stderr)
        .with_ansi(false)
        // A removal outlives the agent: its stderr may be closed then, and a failed write is not worth an error.
        .log_internal_errors(false)
        .try_init();
    install_panic_hook();
    let reply = match stay_alive().and_then(|()| read_order()).and_then(|order| {
        carry_out(&Root::host(), order, &mut |step| {
            let _ = say(&Reply::Progress(step));
        })
    }) {
        Ok(answer) => Reply::Done(Box::new(answer)),
        Err(refusal) => Reply::Failed(refusal),
    };
    let mut stdout = io::stdout().lock();
    let said = write(&mut stdout, &reply);
    // Keep the lock: a thread that still runs for a moment must not write anything after the answer.
    std::mem::forget(stdout);
    match said {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::from(BROKEN),
    }
}

/// Starts the thread that writes [`Reply::Alive`] until stdout is closed: a removal continues without the agent.
fn stay_alive() -> Result<(), Refusal> {
    let beat = || {
        while say(&Reply::Alive).is_ok() {
            thread::sleep(BEAT);
        }
    };
    let begun = thread::Builder::new().spawn(beat);
    begun.map(drop).map_err(|error| Refusal::transient(format!("the host stage can't start a thread: {error}")))
}

fn read_order() -> Result<Order, Refusal> {
    let mut text = Vec::new();
    // One line, not to the end of stdin: the end is a signal of its own (`LinkOrder::follow`).
    io::stdin()
        .lock()
        .read_until(b'\n', &mut text)
        .map_err(|error| Refusal::new(format!("the host stage can't read its order: {error}")))?;
    // Only the column: serde's message could quote the order, and with it a secret.
    serde_json::from_slice(&text)
        .map_err(|error| Refusal::new(format!("the host stage can't parse its order (column {})", error.column())))
}

fn say(reply: &Reply) -> io::Result<()> {
    write(&mut io::stdout().lock(), reply)
}

fn write(stdout: &mut StdoutLock<'_>, reply: &Reply) -> io::Result<()> {
    let mut line = serde_json::to_vec(reply)?;
    line.push(b'\n');
    stdout.write_all(&line)?;
    stdout.flush()
}

/// Fails if the agent that sent the order has ended. The stage may have waited long for the host's lock, and another agent may have
/// decided otherwise meanwhile: the order could stop a broker that has jobs by now, or start one that must not run.
fn still_wanted() -> Result<(), Refusal> {
    // A write fails if nobody reads any more.
    say(&Reply::Alive).map_err(|_| Refusal::transient("the process that gave this order has ended"))
}

/// From now on, a panic ends the process with an answer that names its place but not its message, which may hold a secret.
fn install_panic_hook() {
    std::panic::set_hook(Box::new(|panic| {
        let place = panic.location().map_or_else(String::new, |at| format!(" at {}:{}", at.file(), at.line()));
        let refusal = Refusal::new(format!("the host stage has a bug{place}; please report it"));
        // Not through `say`: the panicking thread may hold the lock of stdout.
        if let (Ok(mut line), Ok(stdout)) =
            (serde_json::to_vec(&Reply::Failed(refusal)), io::stdout().as_fd().try_clone_to_owned())
        {
            line.push(b'\n');
            let _ = File::from(stdout).write(&line);
        }
        std::process::exit(i32::from(BROKEN));
    }));
}

/// Carries out an order on the host at `root`. An order that only looks takes no lock; the host's lock is taken here, or by the order's
/// function once the prefix is known.
///
/// # Errors
/// If the order was refused or failed; each order's function names its cases.
pub fn carry_out(root: &Root, order: Order, progress: &mut dyn FnMut(Progress)) -> Result<Answer, Refusal> {
    let brokers = HostBrokers;
    let observed = || Ok(Answer::Observed(Box::new(observe(root, &brokers)?)));
    match order {
        Order::Observe => observed(),
        Order::ObserveAgain { known } => Ok(Answer::Observed(Box::new(observe_again(root, &brokers, Some(known))?))),
        Order::Preflight(order) => preflight::preflight(root, &brokers, &order).map(Answer::Preflight),
        Order::Claim(order) => claim(root, &order).map(|()| Answer::Done),
        Order::Link(order) => {
            let _lock = HostLock::take(root, &order.prefix, WAIT)?;
            let stdin = io::stdin();
            let more = order.follow.then(|| stdin.as_fd());
            runnable::link_and_try(root, &order, more, progress).map(Answer::Linked)
        }
        Order::Collect(order) => {
            let _lock = HostLock::take(root, &order.prefix, WAIT)?;
            let mut collected = packages::collect(&order, &launch::HostPlaces::of_host())?;
            collected
                .environments
                .iter()
                .try_for_each(|digest| runnable::forget_trial(&root.path(&order.prefix), digest))?;
            if order.is_queue_up {
                let (dumps, bytes) = statedir::prune_dumps(&root.path(&order.prefix));
                (collected.dumps, collected.bytes) = (dumps, collected.bytes + bytes);
            }
            Ok(Answer::Collected(collected))
        }
        Order::Verify(order) => {
            if order.idle {
                boundary::use_idle_priority();
            }
            packages::verify(&order, progress).map(Answer::Verified)
        }
        // Takes the lock once everything is prepared.
        Order::Mend(order) => packages::mend(&order, &launch::HostPlaces::of_host(), progress).map(Answer::Mended),
        Order::Configure(order) => configure(root, &order).map(|()| Answer::Done),
        Order::Start(order) => {
            let _lock = HostLock::take(root, &order.prefix, WAIT)?;
            still_wanted()?;
            launch::start(&order)?;
            observed()
        }
        Order::Stop(order) => {
            let _lock = HostLock::take_if_there(root, state::find(root)?.as_ref())?;
            still_wanted()?;
            brokers.stop(&order)?;
            observed()
        }
        Order::Flux(order) => flux(root, &order).map(Answer::Ran),
        Order::Dump(order) => dump::dump(root, &order).map(Answer::Dumped),
        Order::Takeover(order) => takeover(root, &brokers, &order).map(|()| Answer::Done),
        Order::Remove(order) => remove_outside_the_pod(root, &order).map(|()| Answer::Done),
    }
}

struct HostBrokers;

impl Brokers for HostBrokers {
    fn observe(&self, prefix: Option<&Path>) -> BrokerView {
        launch::observe(prefix)
    }

    fn stop(&self, order: &StopOrder) -> Result<(), Refusal> {
        launch::stop(order)
    }

    fn forget(&self) -> Result<(), Refusal> {
        launch::forget()
    }
}

/// Cgroup that a removal moves to, so that the end of the pod or of its grace period does not kill it half-way.
const REMOVAL_CGROUP: &str = "flux-distribute-removal";

/// Runs the removal in a cgroup of its own, so that the pod's end can't kill it. If there is none, the next run resumes
/// it.
fn remove_outside_the_pod(root: &Root, order: &RemoveOrder) -> Result<(), Refusal> {
    if let Err(error) = cgroup::enter(REMOVAL_CGROUP, NORMAL_WEIGHT) {
        tracing::warn!(%error, "can't move the removal out of the pod's cgroup: the pod's end may interrupt it");
    }
    let removed = remove::remove(root, &HostBrokers, order);
    if let Err(error) = cgroup::leave(REMOVAL_CGROUP) {
        tracing::warn!(%error, "can't remove the cgroup of the removal");
    }
    removed
}

/// The kernel's default cpu.weight (cgroups(7)).
const NORMAL_WEIGHT: u32 = 100;
