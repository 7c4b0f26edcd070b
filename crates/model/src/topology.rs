//! The shape of the TBON (the overlay tree), as flux-core's topology.c derives it from `tbon.topo` and the instance's
//! size.

use api::Rank;

/// The prototype of this project ran with `-Stbon.fanout=256`, which is flat up to 257 ranks.
const PROTOTYPE_FANOUT: u32 = 256;
/// Largest instance that is `flat` by default; a larger one is `mincrit`. Also flux-core's own limit of the lead's children with
/// `mincrit`: with one more it puts routers between.
const FLAT_LIMIT: u32 = 1024;

/// Why a text is not a topology.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TopologyError {
    /// It names none of Flux's shapes.
    #[error("{0:?} is none of flat, kary:K, mincrit, mincrit:K, binomial")]
    Shape(String),
    /// What follows the shape's name is not a number.
    #[error("{text:?}: {number:?} is not a number of ranks")]
    Number {
        /// The whole text.
        text: String,
        /// What should be a number.
        number: String,
    },
}

/// The shape of a tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Topology {
    /// `kary:K`; `kary:0` is flat.
    Kary(u32),
    /// `mincrit:K`: K routers under the lead, and all other ranks under these.
    Mincrit(u32),
    /// `binomial`.
    Binomial,
}

impl Topology {
    /// The name for a tree in which all ranks are children of the lead, in the spec and in messages. Flux has no such
    /// name.
    pub const FLAT: &str = "flat";

    /// Parses `tbon.topo` for an instance of `size` ranks. Also accepts [`Self::FLAT`], as `kary:0`.
    ///
    /// # Errors
    /// If `text` is not a topology.
    pub fn parse(text: &str, size: u32) -> Result<Self, TopologyError> {
        let (scheme, argument) = text.split_once(':').map_or((text, None), |(s, a)| (s, Some(a)));
        let number = |number: &str| {
            let wrong = |_| TopologyError::Number { text: text.to_owned(), number: number.to_owned() };
            number.parse().map_err(wrong)
        };
        match (scheme, argument) {
            (Self::FLAT, None) => Ok(Self::Kary(0)),
            ("kary", Some(k)) => Ok(Self::Kary(number(k)?)),
            ("mincrit", Some(k)) => Ok(Self::Mincrit(number(k)?)),
            ("mincrit", None) => Ok(Self::Mincrit(mincrit_routers(size))),
            ("binomial", None) => Ok(Self::Binomial),
            _ => Err(TopologyError::Shape(text.to_owned())),
        }
    }

    /// The topology of an instance of `size` ranks if the spec names none.
    pub fn default_for(size: u32) -> &'static str {
        if size <= FLAT_LIMIT { Self::FLAT } else { "mincrit" }
    }

    /// Translates the spec's `text` into Flux's `tbon.topo` for an instance of `size` ranks.
    pub fn for_flux(text: &str, size: u32) -> &str {
        match text {
            Self::FLAT if size <= PROTOTYPE_FANOUT + 1 => "kary:256",
            Self::FLAT => "kary:0",
            other => other,
        }
    }

    /// True if all other ranks of `size` are children of the lead, whatever the topology's name.
    pub fn is_flat(self, size: u32) -> bool {
        match self {
            Self::Kary(0) | Self::Mincrit(0) => true,
            Self::Kary(k) => size <= k.saturating_add(1),
            Self::Mincrit(k) => size <= k.saturating_add(1),
            Self::Binomial => size <= 2,
        }
    }

    /// The parent of `rank`; None for rank 0.
    pub fn parent(self, rank: Rank) -> Option<Rank> {
        if rank == 0 {
            return None;
        }
        Some(match self {
            Self::Kary(0) | Self::Mincrit(0) => 0,
            Self::Kary(k) => (rank - 1) / k,
            Self::Mincrit(k) if rank <= k => 0,
            Self::Mincrit(k) => (rank - k - 1) % k + 1,
            // The parent of a rank is the rank without its lowest set bit.
            Self::Binomial => rank & (rank - 1),
        })
    }

    /// The ranks above `rank`, from its parent to rank 0.
    pub fn ancestors(self, rank: Rank) -> impl Iterator<Item = Rank> {
        std::iter::successors(self.parent(rank), move |above| self.parent(*above))
    }

    /// True if `rank` has a child among `size` ranks, so that its broker needs `bind` and its children need `connect`.
    pub fn is_interior(self, rank: Rank, size: u32) -> bool {
        let first_child = match self {
            _ if rank == 0 => 1,
            Self::Kary(0) | Self::Mincrit(0) => return false,
            Self::Kary(k) => rank.saturating_mul(k).saturating_add(1),
            Self::Mincrit(k) if rank <= k => rank.saturating_add(k),
            Self::Mincrit(_) => return false,
            Self::Binomial if rank % 2 == 1 => return false,
            Self::Binomial => rank + 1,
        };
        first_child < size
    }
}

/// The number of routers, as flux-core's mincrit_choose_k() computes it with its limit of 1024.
fn mincrit_routers(size: u32) -> u32 {
    if size <= FLAT_LIMIT + 1 {
        return 0;
    }
    (2..).find(|k| (size - 1 - k).div_ceil(*k) <= FLAT_LIMIT).unwrap_or(2)
}

#[cfg(test)]
mod tests {
    use super::Topology;

    #[test]
    fn parents_are_the_same_as_in_flux_core() {
        for (topology, expected) in [
            ("kary:2", vec![0, 0, 1, 1, 2, 2, 3]),
            ("kary:256", vec![0, 0, 0, 0, 0, 0, 0]),
            ("flat", vec![0, 0, 0, 0, 0, 0, 0]),
            ("kary:1", vec![0, 1, 2, 3, 4, 5, 6]),
            ("binomial", vec![0, 0, 2, 0, 4, 4, 6]),
            ("mincrit:2", vec![0, 0, 1, 2, 1, 2, 1]),
            ("mincrit", vec![0, 0, 0, 0, 0, 0, 0]),
        ] {
            let topology = Topology::parse(topology, 8).unwrap();
            let parents: Vec<_> = (1..8).map(|rank| topology.parent(rank).unwrap()).collect();
            assert_eq!(parents, expected, "{topology:?}");
            for rank in 0..8 {
                let has_child = (1..8).any(|child| topology.parent(child) == Some(rank));
                assert_eq!(topology.is_interior(rank, 8), has_child, "{topology:?} rank {rank}");
            }
        }
    }

    #[test]
    fn large_instances_get_routers() {
        assert_eq!(Topology::parse("mincrit", 1025).unwrap(), Topology::Mincrit(0));
        assert_eq!(Topology::parse("mincrit", 1026).unwrap(), Topology::Mincrit(2));
        assert_eq!(Topology::parse("mincrit", 3000).unwrap(), Topology::Mincrit(3));
        assert_eq!(Topology::default_for(64), "flat");
        assert_eq!(Topology::default_for(1024), "flat");
        assert_eq!(Topology::default_for(1025), "mincrit");
    }

    #[test]
    fn a_flat_tree_is_flat_under_every_name() {
        for (text, size, flat) in [
            ("flat", 1024, true),
            ("kary:0", 1024, true),
            ("kary:256", 257, true),
            ("kary:256", 258, false),
            ("kary:2", 3, true),
            ("kary:2", 4, false),
            ("mincrit", 64, true),
            ("mincrit", 2000, false),
            ("binomial", 4, false),
        ] {
            let topology = Topology::parse(text, size).unwrap();
            assert_eq!(topology.is_flat(size), flat, "{text} of {size}");
            assert_eq!((1..size).all(|rank| topology.parent(rank) == Some(0)), flat, "{text} of {size}");
        }
    }

    #[test]
    fn broker_toml_gets_fluxs_own_name_for_flat() {
        for (text, size, expected) in
            [("flat", 64, "kary:256"), ("flat", 258, "kary:0"), ("kary:2", 64, "kary:2"), ("mincrit", 2000, "mincrit")]
        {
            assert_eq!(Topology::for_flux(text, size), expected);
            let read = |text| Topology::parse(text, size).unwrap();
            assert_eq!(read(text).is_flat(size), read(expected).is_flat(size));
        }
    }

    #[test]
    fn an_invalid_topology_is_refused() {
        for text in ["", "kary", "kary:x", "kary:-1", "binomial:2", "ring", "mincrit:"] {
            assert!(Topology::parse(text, 8).is_err(), "{text}");
        }
    }
}
