//! The rows, run by several workers that have a cluster each.

use std::{
    any::Any,
    collections::VecDeque,
    panic::{AssertUnwindSafe, catch_unwind},
    path::Path,
    sync::{Mutex, PoisonError},
    thread,
    time::{Duration, Instant},
};

use k8s_openapi::jiff::Timestamp;

use crate::{
    dice::Dice,
    oracle::{Outcome, judge, look},
    packets,
    rows::{Row, Shape},
    scene::{COMMAND, Scene},
    table::{Results, markdown},
    traces,
};

/// From the environment.
pub struct Settings {
    more: u32,
    runs: Option<u32>,
    outage: Duration,
    workers: usize,
    seed: u64,
    rows: Vec<String>,
    table: Option<String>,
    pods: bool,
}

impl Settings {
    /// As the environment says.
    pub fn from_env() -> Self {
        let get =
            |name: &str| std::env::var(format!("FLUX_DISTRIBUTE_CHAOS{name}")).ok().filter(|text| !text.is_empty());
        let number = |name: &str| get(name).map(|text| text.parse::<u64>().unwrap());
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
        Self {
            more: if get("").as_deref() == Some("long") { 5 } else { 1 },
            runs: number("_RUNS").map(|runs| u32::try_from(runs).unwrap()),
            outage: Duration::from_secs(number("_OUTAGE").unwrap_or(60)),
            workers: usize::try_from(number("_WORKERS").unwrap_or(12)).unwrap(),
            seed: number("_SEED").unwrap_or(u64::from(now.subsec_nanos())),
            rows: get("_ROWS").map_or_else(Vec::new, |words| words.split(',').map(str::to_owned).collect()),
            table: get("_TABLE"),
            pods: get("_PODS").is_some(),
        }
    }

    fn takes(&self, row: &Row) -> bool {
        self.rows.is_empty() || self.rows.iter().any(|word| row.name.contains(word.as_str()))
    }

    fn runs(&self, row: &Row) -> u32 {
        self.runs.unwrap_or(row.runs * self.more)
    }
}

/// One at a time, so that all workers end at about the same time.
struct Work {
    row: usize,
    run: u32,
}

struct Suite<'a> {
    settings: &'a Settings,
    rows: Vec<Row>,
    queue: Mutex<VecDeque<Work>>,
    results: Mutex<Vec<Results>>,
    failures: Mutex<Vec<String>>,
}

/// All failures, when all rows have been run.
pub fn run(settings: &Settings, rows: Vec<Row>) -> Vec<String> {
    let rows: Vec<Row> = rows.into_iter().filter(|row| settings.takes(row)).collect();
    let mut queue: Vec<Work> = Vec::new();
    for (row, of) in rows.iter().enumerate() {
        queue.extend((0..settings.runs(of)).map(|run| Work { row, run }));
    }
    // From what rests for an outage, the longest first, to what keeps the processors busy: workers take from both ends.
    queue.sort_by_key(|work| {
        let row = &rows[work.row];
        std::cmp::Reverse((row.takes_outage, row.fresh, row.heals_in))
    });
    eprintln!("chaos: {} rows, seed {}, {} workers", rows.len(), settings.seed, settings.workers);
    packets::clear();
    let begin = Instant::now();
    let suite = Suite {
        settings,
        results: Mutex::new(vec![Results::default(); rows.len()]),
        queue: Mutex::new(queue.into()),
        failures: Mutex::default(),
        rows,
    };
    thread::scope(|scope| {
        for worker in 0..settings.workers {
            let suite = &suite;
            scope.spawn(move || suite.work(worker));
        }
    });
    let results = suite.results.into_inner().unwrap_or_else(PoisonError::into_inner);
    let table = markdown(&suite.rows.iter().zip(results).collect::<Vec<_>>());
    eprintln!("chaos: {:.0} s, seed {}\n{table}", begin.elapsed().as_secs_f64(), settings.seed);
    if let Some(file) = &settings.table {
        std::fs::write(file, &table).unwrap();
    }
    let failures = suite.failures.into_inner().unwrap_or_else(PoisonError::into_inner);
    failures.iter().for_each(|failure| eprintln!("FAILED {failure}"));
    failures
}

impl Suite<'_> {
    fn work(&self, worker: usize) {
        let mut scene: Option<Scene> = None;
        let from_the_end = worker % 2 == 1;
        while let Some(work) = self.next(scene.as_ref().map(|scene| scene.shape), from_the_end) {
            let (row, run) = (&self.rows[work.row], work.run);
            if row.fresh || scene.as_ref().is_some_and(|scene| scene.shape != row.shape) {
                self.close(&mut scene);
            }
            // The lock is not held while a cluster is removed, so that other threads can report.
            let results = || self.results.lock().unwrap_or_else(PoisonError::into_inner);
            match self.once(row, run, &mut scene) {
                Ok(outcome) => {
                    eprintln!("chaos [{worker}] {} #{run}: {outcome:?}", row.name);
                    results()[work.row].outcomes.push(outcome);
                }
                Err(why) => {
                    results()[work.row].failed += 1;
                    self.fail(row.name, run, &why, scene.take());
                }
            }
            if row.fresh {
                self.close(&mut scene);
            }
        }
        self.close(&mut scene);
    }

    /// What fits the cluster that is there, else the next.
    fn next(&self, shape: Option<&Shape>, from_the_end: bool) -> Option<Work> {
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = |work: &Work| Some(self.rows[work.row].shape) == shape;
        let (fitting, end) = if from_the_end {
            (queue.iter().rposition(fits), queue.len().saturating_sub(1))
        } else {
            (queue.iter().position(fits), 0)
        };
        queue.remove(fitting.unwrap_or(end))
    }

    fn once(&self, row: &Row, run: u32, place: &mut Option<Scene>) -> Result<Outcome, String> {
        let done = catch_unwind(AssertUnwindSafe(|| {
            // One that is there has been found well at the end of its last run.
            let scene = place.get_or_insert_with(|| {
                let scene = Scene::set(row.shape, self.settings.outage, self.settings.pods);
                scene.until("a cluster that is well", COMMAND, |scene| look(scene, Timestamp::UNIX_EPOCH));
                scene
            });
            (scene.row, scene.run) = (row.name, run);
            scene.dice = Dice::new(self.settings.seed, row.name, run);
            let before = scene.brokers();
            let hit = (row.inject)(scene);
            judge(scene, row, &before, &hit)
        }));
        done.unwrap_or_else(|panic| Err(words(panic.as_ref())))
    }

    fn fail(&self, row: &str, run: u32, why: &str, scene: Option<Scene>) {
        let name: String = row.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
        let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join("chaos").join(format!("{name}-{run}"));
        let failure = format!("{row} #{run}, seed {}: {why}; see {}", self.settings.seed, directory.display());
        eprintln!("chaos: {failure}");
        self.failures.lock().unwrap_or_else(PoisonError::into_inner).push(failure);
        if let Some(scene) = scene {
            scene.save(&directory);
            self.take_down(scene);
        }
    }

    /// Checks how the job and the cluster ended. A bad end is reported for the last run of that job or cluster.
    fn close(&self, place: &mut Option<Scene>) {
        let Some(mut scene) = place.take() else { return };
        let ended = catch_unwind(AssertUnwindSafe(|| scene.end_job()));
        if let Err(why) = ended.unwrap_or_else(|panic| Err(words(panic.as_ref()))) {
            return self.fail(scene.row, scene.run, &format!("the job does not end well: {why}"), Some(scene));
        }
        self.take_down(scene);
    }

    fn take_down(&self, scene: Scene) {
        let row = scene.row;
        let (state, bridge) = (scene.cluster.state(), scene.cluster.bridge().to_owned());
        let index = || std::fs::read_to_string(format!("/sys/class/net/{bridge}/ifindex")).ok();
        let own = index();
        drop(scene);
        let left = traces::traces(&state, &bridge);
        // Another cluster may have taken the name at once.
        let is_taken = || index().is_some_and(|now| own != Some(now));
        if !left.is_empty() && !is_taken() {
            self.failures.lock().unwrap_or_else(PoisonError::into_inner).push(format!("after {row}: {left:?}"));
        }
    }
}

fn words(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("it broke off").to_owned()
}
