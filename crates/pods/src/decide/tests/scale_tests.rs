//! What a round costs with as many pods as a large instance has.

use std::time::{Duration, Instant};

use super::{bed::Bed, gang};
use crate::action::Action;

/// Much more than a round takes, even in a debug build on a busy machine.
const LIMIT: Duration = Duration::from_secs(10);

fn timed(bed: &mut Bed, what: &str) -> Vec<Action> {
    let begin = Instant::now();
    let actions = bed.decide().actions;
    eprintln!("{what}: {:?}, {} actions", begin.elapsed(), actions.len());
    assert!(begin.elapsed() < LIMIT, "{what}");
    actions
}

#[test]
fn a_round_with_a_thousand_gangs_is_short() {
    let mut bed = Bed::new(&[16; 256]);
    bed.create((0..1500).flat_map(|n| gang(&format!("g{n}-"), 4)));
    bed.deliver(usize::MAX, usize::MAX);
    let submits = timed(&mut bed, "1500 gangs are new");
    assert_eq!(submits.len(), 1500);
    submits.iter().for_each(|action| bed.carry_out(action));
    bed.schedule();
    bed.deliver(usize::MAX, usize::MAX);
    let binds = timed(&mut bed, "1024 of them are allocated");
    assert_eq!(binds.len(), 4096);
    binds.iter().for_each(|action| bed.carry_out(action));
    bed.deliver(usize::MAX, usize::MAX);
    assert_eq!(timed(&mut bed, "and run, while 476 wait").len(), 0);
    bed.restart_broker(|_| true, false);
    let pins = timed(&mut bed, "the broker restarts");
    assert!(pins.iter().all(|action| matches!(action, Action::Submit(_))) && pins.len() >= 1024);
}
