//! The instructions gate: rows against each other, and against what was recorded.
//!
//! A record belongs to one compiler version and one kind of machine: another compiler makes other code. Without a record of this
//! compiler only pairs of rows are compared, and the gate says how to make one. Instructions of the C library depend on the
//! processor and are not compared with the record.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

use crate::callgrind::{self, Stages, target};
use crate::rows::{FLAT, rows};

/// Aimed at: instructions of a 4 KiB read, or in-capsule write, in all.
const AIM: f64 = 700.0;
const AIMED: [&str; 2] = ["read-4k", "write-4k-in-capsule"];

/// How much more than recorded is a failure.
const RISE: f64 = 0.03;

/// How far apart the rows of a pair of [`FLAT`] may be.
const SPREAD: f64 = 0.05;

type Measured = BTreeMap<&'static str, Stages>;

/// Measures the rows that matter, prints a table and the JSON, and tells what is wrong. `record`: writes the record.
pub(crate) fn run(file: &Path, record: bool, cpu: usize) -> Result<(), String> {
    let compiler = compiler()?;
    let mut measured = Measured::new();
    for row in rows() {
        let paired = FLAT.iter().any(|(one, many)| row.name == *one || row.name == *many);
        if row.gated || paired {
            measured.insert(row.name, callgrind::measure(row.name, cpu)?);
        }
    }
    print_table(&measured);
    let mut records = read_records(file)?;
    if record {
        let figures: BTreeMap<_, _> =
            measured.iter().map(|(row, stages)| (*row, (target(stages).own * 10.0).round() / 10.0)).collect();
        records.insert(compiler.clone(), json!(figures));
        let text = serde_json::to_string_pretty(&records).map_err(|error| error.to_string())?;
        std::fs::write(file, text + "\n").map_err(|error| format!("{}: {error}", file.display()))?;
        println!("recorded for {compiler} in {}", file.display());
    }
    for row in AIMED {
        if let Some(have) = measured.get(row).map(|stages| target(stages).all()).filter(|have| *have > AIM) {
            println!("NOTE: {row}: {have:.0} instructions per operation; the aim is {AIM:.0}");
        }
    }
    let mut wrong = spreads(&measured);
    match records.get(&compiler) {
        Some(record) => wrong.extend(rises(&measured, record)),
        None => println!(
            "NOTE: {} has no record for {compiler}: only pairs were checked; `make bench-record` makes one",
            file.display()
        ),
    }
    if wrong.is_empty() { Ok(()) } else { Err(wrong.join("\n")) }
}

fn spreads(measured: &Measured) -> Vec<String> {
    let all = |row: &str| measured.get(row).map(|stages| target(stages).all());
    let mut wrong = Vec::new();
    for (one, many) in FLAT {
        if let (Some(few), Some(many_cost)) = (all(one), all(many))
            && many_cost > few * (1.0 + SPREAD)
        {
            wrong.push(format!(
                "{many}: {many_cost:.0} instructions per operation, {one}: {few:.0}; more than 5% apart"
            ));
        }
    }
    wrong
}

fn rises(measured: &Measured, record: &Value) -> Vec<String> {
    let mut wrong = Vec::new();
    for (row, stages) in measured {
        let have = target(stages).own;
        match record[row].as_f64() {
            Some(was) if have > was * (1.0 + RISE) => wrong.push(format!(
                "{row}: {have:.1} instructions per operation, recorded {was:.1} ({:+.1}%): find the reason, or record anew \
                 by `make bench-record` and say why in the commit",
                (have / was - 1.0) * 100.0
            )),
            Some(_) => {}
            None => wrong.push(format!("{row}: not in the record; run `make bench-record`")),
        }
    }
    wrong
}

fn read_records(file: &Path) -> Result<serde_json::Map<String, Value>, String> {
    match std::fs::read_to_string(file) {
        Ok(text) => serde_json::from_str(&text).map_err(|error| format!("{}: {error}", file.display())),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(serde_json::Map::new()),
        Err(error) => Err(format!("{}: {error}", file.display())),
    }
}

/// Version and target of the compiler: "rustc 1.88.0 x86_64-unknown-linux-gnu".
fn compiler() -> Result<String, String> {
    let output = Command::new("rustc").arg("-vV").output().map_err(|error| format!("rustc: {error}"))?;
    let text = String::from_utf8_lossy(&output.stdout);
    let field = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
    match (field("release:"), field("host:")) {
        (Some(release), Some(host)) => Ok(format!("rustc {release} {host}")),
        _ => Err("`rustc -vV` does not say release and host".into()),
    }
}

fn print_table(measured: &Measured) {
    println!("instructions per operation, those of the C library in brackets");
    for (row, stages) in measured {
        let all = target(stages);
        println!("{row:<22} {:7.1} ({:.1})", all.all(), all.libc);
        for (stage, cost) in stages.iter().filter(|(_, cost)| cost.all() >= 0.5) {
            println!("    {stage:<22} {:7.1} ({:.1})", cost.all(), cost.libc);
        }
    }
}

/// The split of one row, for the report.
pub(crate) fn split(row: &str, cpu: usize) -> Result<(), String> {
    let stages = callgrind::measure(row, cpu)?;
    let all: BTreeMap<_, _> =
        stages.iter().map(|(stage, cost)| (*stage, json!({ "own": cost.own, "libc": cost.libc }))).collect();
    println!("{}", json!({ "row": row, "stages": all, "target": target(&stages).all() }));
    Ok(())
}
