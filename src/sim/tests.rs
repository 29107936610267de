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
    // Not every fault comes to act; a run in which fewer than three did is none of those that were asked for.
    let last = first + runs + runs / 2 + 8;
    let (next, failures, all) = (AtomicU64::new(first), Mutex::new(Vec::new()), Mutex::new(Coverage::of_everything()));
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let enough = all.lock().expect("sound").get("run", ENOUGH_FAULTS) >= runs;
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if enough || seed >= last || failures.lock().expect("sound").len() >= 20 {
                        break;
                    }
                    match guarded(|| run(seed)) {
                        Ok(report) => all.lock().expect("sound").merge(&report.coverage),
                        Err(violation) => failures.lock().expect("sound").push(format!("seed {seed}: {violation}")),
                    }
                }
            });
        }
    });
    let failures = failures.into_inner().expect("sound");
    let all = all.into_inner().expect("sound");
    let (good, enough) = (all.get("run", "runs"), all.get("run", ENOUGH_FAULTS));
    println!("{all}");
    println!(
        "{good} runs in {:?} on {threads} threads; {:.2} kinds of faults acted in each, in {enough} of them three listed ones",
        begun.elapsed(),
        all.get("run", "kinds of faults that acted") as f64 / good as f64
    );
    assert!(failures.is_empty(), "FARSIDE_SIM_SEED=N runs one again:\n{}", failures.join("\n"));
    assert!(enough >= runs, "of {good} runs {enough} had three listed kinds of faults, {runs} were to");
    // So many runs reach everything that there is to reach.
    assert!(runs < 1000 || all.missing().is_empty(), "never reached: {:?}", all.missing());
}

/// Three kinds of those that count, whatever comes on top.
#[test]
fn every_plan_has_three_listed_kinds_of_faults() {
    let mut drawn = Vec::new();
    for seed in 0..1000 {
        let plan = Plan::new(&mut Rng::new(seed));
        let kinds = Fault::listed_kinds(&plan.faults);
        assert!((LEAST_FAULTS..=6).contains(&kinds), "seed {seed}: {:?}", plan.faults);
        drawn.extend(plan.faults);
    }
    assert!(Fault::ALL.iter().all(|fault| drawn.contains(fault)), "one is never drawn");
    let reboots = [Fault::HostReboot, Fault::TargetReboot, Fault::Loss, Fault::Congestion];
    assert_eq!(Fault::listed_kinds(&reboots), 2, "who reboots makes no other kind, and congestion is not listed");
}

/// What no run reaches is told, not just absent.
#[test]
fn a_fault_that_never_acts_is_missed() {
    let report = run_with(1, &[Fault::Loss, Fault::Reorder, Fault::Delay]).expect("a good run");
    let missing = report.coverage.missing();
    for never in ["fault: PowerCut", "fault: DiskStall", "event: power cut", "target: request Orphan"] {
        assert!(missing.iter().any(|one| one == never), "{never} is not in {missing:?}");
    }
    assert!(!missing.iter().any(|one| one == "fault: Loss"), "{missing:?}");
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
