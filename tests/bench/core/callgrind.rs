//! Instructions per operation, by stage, counted by callgrind.
//!
//! A row runs twice with different numbers of operations; the difference is what the operations cost, whatever start and end of
//! the process did. Inlined code counts for the file that it was written in; code of the standard library and of other crates
//! counts for the function of ours that it is part of, and C library calls for their caller.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::process::{Command, Stdio};

use crate::plan::warmup;

/// Instructions by stage: those of this program, and those of the C library on its behalf.
pub(crate) type Stages = BTreeMap<&'static str, Cost>;

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Cost {
    pub(crate) own: f64,
    pub(crate) libc: f64,
}

impl Cost {
    pub(crate) fn all(&self) -> f64 {
        self.own + self.libc
    }
}

/// The stage that is no part of the target.
pub(crate) const NIC: &str = "null NIC and load";

/// Stages by the start of a source file's path in this repository; the first that fits.
const STAGES: [(&str, &str); 17] = [
    ("tests/bench/", NIC),
    ("nvme/", "parse and check"),
    ("src/target/capsule.rs", "capsule"),
    ("src/target/accept.rs", "capsule"),
    ("src/target/fused.rs", "capsule"),
    ("src/target/straight.rs", "straight way"),
    ("src/target/request.rs", "request slots"),
    ("src/target/data.rs", "buffers, credits, RDMA"),
    ("src/target/memory.rs", "memory"),
    ("src/mem/", "memory"),
    ("src/target/execute.rs", "execute"),
    ("src/target/namespace.rs", "execute"),
    ("src/target/queue.rs", "queue"),
    ("src/target/shared.rs", "queue"),
    ("src/backend/", "backend"),
    ("src/target/", "reactor"),
    ("src/", "reactor"),
];

const ELSEWHERE: &str = "other";

/// Operations of the shorter and of the longer run; with their warm-up more are done, and counted.
const SHORT: u64 = 10_000;
const LONG: u64 = 100_000;

/// Instructions per operation of a row of this very program.
pub(crate) fn measure(row: &str, cpu: usize) -> Result<Stages, String> {
    let (short, long) = (profile(row, SHORT, cpu)?, profile(row, LONG, cpu)?);
    let mut stages = Stages::new();
    let done = |operations| operations + warmup(operations);
    let operations = (done(LONG) - done(SHORT)) as f64;
    for (stage, cost) in long {
        let before = short.get(stage).copied().unwrap_or_default();
        let per = |long: f64, short: f64| (long - short) / operations;
        stages.insert(stage, Cost { own: per(cost.own, before.own), libc: per(cost.libc, before.libc) });
    }
    Ok(stages)
}

/// What the target costs: everything but the NIC.
pub(crate) fn target(stages: &Stages) -> Cost {
    let mut sum = Cost::default();
    for (_, cost) in stages.iter().filter(|(stage, _)| **stage != NIC) {
        sum = Cost { own: sum.own + cost.own, libc: sum.libc + cost.libc };
    }
    sum
}

fn profile(row: &str, operations: u64, cpu: usize) -> Result<Stages, String> {
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    let out = std::env::temp_dir().join(format!("farside-callgrind.{}.{operations}", std::process::id()));
    let status = Command::new("valgrind")
        // Valgrind counts each step of a repeated string instruction; vector instructions are what can be compared.
        .env(
            "GLIBC_TUNABLES",
            "glibc.cpu.x86_rep_stosb_threshold=100000000:glibc.cpu.x86_rep_movsb_threshold=100000000",
        )
        .args(["--tool=callgrind", "-q"])
        .arg(format!("--callgrind-out-file={}", out.display()))
        .arg(&program)
        .args(["--cpu", &cpu.to_string(), "core", row, "--operations", &operations.to_string()])
        .stdout(Stdio::null())
        .status()
        .map_err(|error| format!("valgrind: {error}; `tests/bench/setup` installs it"))?;
    if !status.success() {
        return Err(format!("{row} under valgrind: {status}"));
    }
    let text = std::fs::read_to_string(&out).map_err(|error| format!("{}: {error}", out.display()))?;
    let _ = std::fs::remove_file(&out);
    Ok(read(&text, &program))
}

/// Names are written once, as `(id) name`, and then as `(id)`.
#[derive(Default)]
struct Names(HashMap<String, String>);

impl Names {
    fn take(&mut self, value: &str) -> String {
        let (id, name) = value.split_once(' ').unwrap_or((value, ""));
        if !name.is_empty() {
            self.0.insert(id.into(), name.into());
        }
        self.0.get(id).cloned().unwrap_or_default()
    }
}

/// Reads a profile (the format is in the Valgrind manual, "Callgrind Format Specification").
fn read(text: &str, program: &Path) -> Stages {
    let program = program.to_string_lossy();
    let (mut files, mut objects) = (Names::default(), Names::default());
    let mut stages = Stages::new();
    let (mut object, mut called_object) = (String::new(), None);
    // The stage of the function, and of the line that costs are given for.
    let (mut function, mut stage) = (ELSEWHERE, ELSEWHERE);
    let mut call = false;
    for line in text.lines() {
        if let Some((key, value)) = line.split_once('=').filter(|(key, _)| key.chars().all(char::is_alphabetic)) {
            match key {
                "ob" => object = objects.take(value),
                "cob" => called_object = Some(objects.take(value)),
                "fl" => {
                    function = stage_of(&files.take(value)).unwrap_or(ELSEWHERE);
                    stage = function;
                }
                "fi" | "fe" => stage = stage_of(&files.take(value)).unwrap_or(stage),
                "fn" => stage = function,
                "cfi" | "cfl" => {
                    files.take(value);
                }
                "calls" => call = true,
                _ => {}
            }
            continue;
        }
        let Some(cost) = cost_of(line) else { continue };
        let here = object == program;
        let entry = stages.entry(stage).or_default();
        if std::mem::take(&mut call) {
            // What the call cost in all: of interest where it leaves this program.
            let leaves = called_object.take().is_some_and(|called| called != program);
            entry.libc += if here && leaves { cost } else { 0.0 };
        } else if here {
            entry.own += cost;
        }
    }
    stages
}

/// `LINE COST`, where LINE is a number, `+n`, `-n` or `*`.
fn cost_of(line: &str) -> Option<f64> {
    let (position, cost) = line.split_once(' ')?;
    let positional = position.starts_with(|first: char| first.is_ascii_digit() || "+-*".contains(first));
    if positional { cost.trim().parse().ok() } else { None }
}

fn stage_of(file: &str) -> Option<&'static str> {
    let root = env!("CARGO_MANIFEST_DIR");
    let file = file.strip_prefix(root).map_or(file, |rest| rest.trim_start_matches('/'));
    if file.starts_with('/') {
        return None;
    }
    STAGES.iter().find(|(start, _)| file.starts_with(start)).map(|(_, stage)| *stage)
}
