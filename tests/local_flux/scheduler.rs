//! The schedulers that an instance may have: Fluxion where the package set brings it, else flux-core's own.

use std::{
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
};

use crate::{
    harness::{Cluster, bundle, pack},
    needs::{Need, flux_prefix, skips_without},
};

/// The scheduler of an instance.
#[derive(Debug, Clone, Copy)]
pub enum Scheduler {
    Fluxion,
    Simple,
}

impl Scheduler {
    /// A cluster under it with all nodes online. None if the test can't run.
    pub fn up(self, nodes: u32, options: &[&str]) -> Option<Cluster> {
        let bundle = self.bundle()?;
        let cluster = Cluster::start(nodes, &[&["--bundle", bundle.to_str().unwrap()], options].concat());
        self.runs_on(&cluster);
        Some(cluster)
    }

    /// It is what schedules there. A change of the ranks' names takes it away for a moment.
    pub fn runs_on(self, cluster: &Cluster) {
        let module = self.module();
        cluster.until(module, || {
            let loaded = cluster.ask("node1", &["flux", "module", "list"])?;
            loaded.lines().any(|line| line.split_whitespace().next() == Some(module)).then_some(())
        });
    }

    /// A bundle with it. None if the test can't run.
    pub fn bundle(self) -> Option<&'static Path> {
        match self {
            Self::Simple => without_fluxion(),
            Self::Fluxion if skips_without([Need::Fluxion]) => None,
            Self::Fluxion => bundle(),
        }
    }

    fn module(self) -> &'static str {
        match self {
            Self::Fluxion => "sched-fluxion-qmanager",
            Self::Simple => "sched-simple",
        }
    }
}

/// The Flux of this machine without what flux-sched has put there.
fn without_fluxion() -> Option<&'static Path> {
    static BUNDLE: OnceLock<PathBuf> = OnceLock::new();
    bundle()?;
    let made = BUNDLE.get_or_init(|| {
        let directory = tempfile::tempdir().unwrap();
        let run = |command: &mut Command| assert!(command.status().unwrap().success(), "{command:?}");
        run(Command::new("cp").arg("-a").arg(flux_prefix().join(".")).arg(directory.path()));
        run(Command::new("find").arg(directory.path()).args(["-depth", "-path", "*fluxion*", "-delete"]));
        pack(directory.path(), &flux_prefix(), "flux-simple.tar.gz")
    });
    Some(made)
}
