//! Runs. `FARSIDE_SIM_RUNS` says how many, `FARSIDE_SIM_SEED` runs one seed again, with its log (`RUST_LOG` as usual).

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use super::*;
use crate::mutation::{self, Mutation};

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().and_then(|text| text.parse().ok())
}

/// Also what the code under test panics with.
fn guarded(run: impl FnOnce() -> Result<Report, Violation>) -> Result<Report, Violation> {
    catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied());
        Err(format!("panic: {}", text.unwrap_or("?")))
    })
}

#[test]
fn every_run_keeps_its_promises() {
    if let Some(seed) = number("FARSIDE_SIM_SEED") {
        let filter = tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| "info".into());
        let log = tracing_subscriber::fmt().with_env_filter(filter).without_time().with_ansi(false);
        let _ = log.with_writer(std::io::stderr).try_init();
        let plan = Plan::new(&mut Rng::new(seed));
        println!("seed {seed}: {plan:#?}");
        let report = guarded(|| run(seed)).unwrap_or_else(|violation| panic!("seed {seed}: {violation}"));
        println!("{}\nsimulated time {:?}, digest {:x}", report.coverage, report.took, report.digest);
        return;
    }
    let first = number("FARSIDE_SIM_FIRST").unwrap_or(0);
    let runs = number("FARSIDE_SIM_RUNS").unwrap_or(40);
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let begun = Instant::now();
    let (next, failures, all) = (AtomicU64::new(first), Mutex::new(Vec::new()), Mutex::new(Coverage::default()));
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                let mut mine = Coverage::default();
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= first + runs || failures.lock().expect("sound").len() >= 20 {
                        break;
                    }
                    match guarded(|| run(seed)) {
                        Ok(report) => mine.merge(&report.coverage),
                        Err(violation) => failures.lock().expect("sound").push(format!("seed {seed}: {violation}")),
                    }
                }
                all.lock().expect("sound").merge(&mine);
            });
        }
    });
    let failures = failures.into_inner().expect("sound");
    let all = all.into_inner().expect("sound");
    println!("{all}");
    println!("{runs} runs in {:?} on {threads} threads", begun.elapsed());
    println!(
        "kinds of faults that acted, per run: {:.2}",
        all.get("run", "kinds of faults that acted") as f64 / runs as f64
    );
    assert!(failures.is_empty(), "FARSIDE_SIM_SEED=N runs one again:\n{}", failures.join("\n"));
    // So many runs reach everything that they count.
    assert!(runs < 1000 || all.missing().is_empty(), "never reached: {:?}", all.missing());
}

#[test]
fn a_seed_is_a_run() {
    for seed in [1, 2, 3] {
        let digests = [run(seed), run(seed)].map(|report| report.expect("a good run").digest);
        assert_eq!(digests[0], digests[1], "seed {seed}");
    }
}

/// The faults that bring a mutation to light.
fn faults_for(mutation: Mutation) -> &'static [Fault] {
    match mutation {
        Mutation::SkippedRetransmit | Mutation::BufferReusedEarly => &[Fault::Loss, Fault::Reorder, Fault::FullQueues],
        Mutation::DoubleCompletion => &[Fault::Loss, Fault::Duplication, Fault::Delay],
        Mutation::FlushDropped => &[Fault::PowerCut, Fault::TargetReboot, Fault::Reorder],
        Mutation::LostRtu => &[Fault::CmLoss, Fault::Delay, Fault::Congestion],
        Mutation::AckBeforePlacement
        | Mutation::PsnWrap
        | Mutation::SecondBatchOffset
        | Mutation::MissedInvalidate
        | Mutation::StaleRkey => &[Fault::Reorder, Fault::Duplication, Fault::Congestion],
    }
}

/// Runs of each mutation until one is caught; the same runs of the code as it is are good.
#[test]
fn every_mutation_is_caught() {
    const MOST: u64 = 60;
    let mut missed = Vec::new();
    for mutation in Mutation::ALL {
        let faults = faults_for(mutation);
        let caught = (0..MOST).find_map(|seed| {
            let violation = mutation::with(mutation, || guarded(|| run_with(seed, faults))).err()?;
            Some((seed, violation))
        });
        let Some((seed, violation)) = caught else {
            missed.push(mutation);
            continue;
        };
        println!("{mutation:?}: caught by run {} of at most {MOST}: {violation}", seed + 1);
        if let Err(violation) = guarded(|| run_with(seed, faults)) {
            panic!("{mutation:?}, seed {seed}: fails without the mutation too: {violation}");
        }
    }
    assert!(missed.is_empty(), "not caught within {MOST} runs: {missed:?}");
}
