//! The corpus through every engine of this machine: one test a case and engine.
//!
//! `cargo test -p flashcore-lab --test corpus` runs the quick cases; `-- --include-ignored` runs all of them, and
//! a name after `--` only those that hold it.

use std::sync::{Arc, Mutex, OnceLock};

use flashcore_lab::cases::{Case, Tier, corpus};
use flashcore_lab::check::{Outcome, Prepared};
use flashcore_lab::engine::{self, Engine};
use flashcore_lab::explain::explain;
use libtest_mimic::{Arguments, Failed, Trial};

/// A case whose truth is worked out when the first engine needs it, and kept for the others.
struct Shared {
    case: Mutex<Option<Case>>,
    prepared: OnceLock<Prepared>,
}

impl Shared {
    fn prepared(&self) -> &Prepared {
        self.prepared.get_or_init(|| {
            let case = self.case.lock().expect("no holder panics").take();
            Prepared::new(case.expect("a case is prepared once"))
        })
    }
}

fn check(shared: &Shared, engine: &dyn Engine) -> Result<(), Failed> {
    let prepared = shared.prepared();
    match prepared.check(engine) {
        Outcome::Passed(_) | Outcome::Skipped(_) => Ok(()),
        Outcome::Failed(faults) => Err(explain(prepared, engine, &faults).into()),
    }
}

fn main() {
    let engines: Vec<Arc<dyn Engine>> = engine::all().into_iter().map(Arc::from).collect();
    let mut trials = Vec::new();
    for case in corpus() {
        let (name, tier) = (case.name.clone(), case.tier);
        let shared = Arc::new(Shared { case: Mutex::new(Some(case)), prepared: OnceLock::new() });
        for engine in &engines {
            let (shared, engine) = (Arc::clone(&shared), Arc::clone(engine));
            let name = format!("{name} on {}", engine.name());
            let trial = Trial::test(name, move || check(&shared, &*engine));
            trials.push(trial.with_ignored_flag(tier == Tier::Full));
        }
    }
    libtest_mimic::run(&Arguments::from_args(), trials).exit();
}
