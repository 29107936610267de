//! The rows of the report on the core: what each asks, as a plan.

use crate::plan::{Kind, Plan, mix};

pub(crate) struct Row {
    pub(crate) name: &'static str,
    pub(crate) plan: Plan,
    /// Its instructions are held against the record.
    pub(crate) gated: bool,
}

/// Every row, in the order of the report.
pub(crate) fn rows() -> Vec<Row> {
    let row = |name, plan, gated| Row { name, plan, gated };
    let large = |kind| Plan { depth: 8, batch: 8, ..Plan::new(vec![kind]) };
    let queues = |queues, batch| Plan { queues, depth: 1, batch, ..Plan::new(mix()) };
    let namespaces = |namespaces| Plan { namespaces, ..Plan::new(vec![Kind::Read(4096)]) };
    vec![
        row("read-4k", Plan::new(vec![Kind::Read(4096)]), true),
        row("write-4k-in-capsule", Plan::new(vec![Kind::WriteInCapsule(4096)]), true),
        row("write-128k", large(Kind::WriteKeyed(128 << 10)), true),
        row("read-128k", large(Kind::Read(128 << 10)), false),
        row("mix", Plan::new(mix()), true),
        // The same number of commands in a poll, each of another queue pair.
        row("queues-32-batch-32", queues(32, 32), false),
        row("queues-1000-batch-32", queues(1000, 32), true),
        row("queues-1-batch-1", queues(1, 1), false),
        row("queues-1000-batch-1", queues(1000, 1), true),
        row("namespaces-1", namespaces(1), false),
        row("namespaces-1000", namespaces(1000), true),
    ]
}

/// Pairs of rows whose instructions must be within 5% of each other.
pub(crate) const FLAT: [(&str, &str); 3] = [
    ("queues-32-batch-32", "queues-1000-batch-32"),
    ("queues-1-batch-1", "queues-1000-batch-1"),
    ("namespaces-1", "namespaces-1000"),
];

pub(crate) fn find(name: &str) -> Result<Row, String> {
    let names = || rows().iter().map(|row| row.name).collect::<Vec<_>>().join(", ");
    rows().into_iter().find(|row| row.name == name).ok_or_else(|| format!("no row {name}: there are {}", names()))
}
