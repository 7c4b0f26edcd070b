//! Chance that can be repeated: the same seed, row and run make the same choices.

use std::{
    hash::{DefaultHasher, Hash, Hasher},
    time::Duration,
};

/// splitmix64.
pub struct Dice(u64);

impl Dice {
    pub fn new(seed: u64, row: &str, run: u32) -> Self {
        let mut hasher = DefaultHasher::new();
        (seed, row, run).hash(&mut hasher);
        Self(hasher.finish())
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    pub fn below(&mut self, end: u64) -> u64 {
        self.next() % end.max(1)
    }

    pub fn pick<T: Clone>(&mut self, from: &[T]) -> T {
        let index = usize::try_from(self.below(from.len() as u64)).unwrap();
        from[index].clone()
    }

    pub fn coin(&mut self) -> bool {
        self.below(2) == 0
    }

    pub fn time(&mut self, from: Duration, to: Duration) -> Duration {
        from + Duration::from_millis(self.below(u64::try_from(to.saturating_sub(from).as_millis()).unwrap()))
    }

    /// Lets up to `longest` pass.
    pub fn pause(&mut self, longest: Duration) {
        std::thread::sleep(self.time(Duration::ZERO, longest));
    }
}
