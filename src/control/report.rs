//! A target's state as JSON.

use std::time::Duration;

use serde_json::{Value, json};

use crate::target::{
    Cause, ControllerStatus, Counters, Disconnect, Draining, Ends, HostStatus, Latencies, Latency, LatencyReport,
    NamespaceStatus, QueueLatency, QueueStatus, Stage, Status, SubsystemStatus, Traffic,
};

/// The answer to [`super::Request::Status`].
pub(super) fn status(status: &Status, counters: &Counters, provider: &str, uptime: std::time::Duration) -> Value {
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "provider": provider,
        "uptime_seconds": uptime.as_secs(),
        "subsystems": status.subsystems.iter().map(subsystem).collect::<Vec<_>>(),
        "listeners": status.listeners.iter().map(ToString::to_string).collect::<Vec<_>>(),
        "controllers": status.controllers.iter().map(controller).collect::<Vec<_>>(),
        "hosts": status.hosts.iter().map(host).collect::<Vec<_>>(),
        "draining": draining(&status.draining),
        "counters": {
            "connections_accepted": counters.connections_accepted,
            "connections_rejected": counters.connections_rejected,
            "authentications": counters.authentications,
            "controllers": counters.controllers,
            "queues": counters.queues,
            "queues_ended": ended(&counters.ends),
            "commands": counters.requests,
            "pool_bytes_used": counters.pool_used,
            "page_bytes_used": counters.pages_used,
            "admin_pool_bytes_used": counters.admin_pool_used,
            "receive_slots_used": counters.slots_used,
        },
    })
}

/// Namespaces that are gone and whose storage is not closed yet.
pub(super) fn draining(all: &[Draining]) -> Value {
    let one = |one: &Draining| json!({ "nqn": one.nqn, "nsid": one.nsid, "backend": one.backend });
    all.iter().map(one).collect()
}

/// Causes that there were, each with its queues.
fn ended(ends: &Ends) -> Value {
    let some = Cause::ALL.iter().filter(|cause| ends.of(**cause) > 0);
    some.map(|cause| (cause.name().to_owned(), Value::from(ends.of(*cause)))).collect()
}

/// The answer to [`super::Request::Latency`].
pub(super) fn latency(report: &LatencyReport) -> Value {
    let stages = |all: &Latencies| -> Value {
        let some = Stage::ALL.iter().map(|stage| (stage.name(), all.stage(*stage)));
        let some = some.filter(|(_, latency)| latency.count() > 0);
        some.map(|(name, latency)| (name.to_owned(), times(latency))).collect()
    };
    let namespaces = report.namespaces.iter();
    let namespaces: Vec<Value> =
        namespaces.map(|(nqn, nsid, all)| json!({ "nqn": nqn, "nsid": nsid, "stages": stages(all) })).collect();
    let hosts = report.hosts();
    let hosts: Vec<Value> = hosts.iter().map(|(host, all)| json!({ "hostnqn": host, "stages": stages(all) })).collect();
    let queue = |queue: &QueueLatency| {
        let QueueLatency { subnqn, hostnqn, cntlid, qid, latencies } = queue;
        let stages = stages(latencies);
        json!({ "subnqn": subnqn, "hostnqn": hostnqn, "cntlid": cntlid, "qid": qid, "stages": stages })
    };
    let queues: Vec<Value> = report.queues.iter().map(queue).collect();
    json!({ "on": report.on, "namespaces": namespaces, "hosts": hosts, "queues": queues })
}

fn times(latency: &Latency) -> Value {
    let micros = |time: Duration| (time.as_nanos() as f64 / 100.0).round() / 10.0;
    json!({
        "count": latency.count(),
        "mean": micros(latency.mean()),
        "p50": micros(latency.quantile(0.5)),
        "p99": micros(latency.quantile(0.99)),
        "p999": micros(latency.quantile(0.999)),
        "max": micros(latency.quantile(1.0)),
    })
}

/// The latest ends of queues.
pub(super) fn disconnects(all: &[Disconnect]) -> Value {
    let one = |one: &Disconnect| {
        let (subnqn, cntlid) = one.controller.clone().unzip();
        json!({
            "ago_seconds": one.ago.as_secs(),
            "peer": one.peer.to_string(),
            "hostnqn": one.hostnqn,
            "subnqn": subnqn,
            "cntlid": cntlid,
            "cause": one.cause.name(),
            "detail": one.detail,
            "queues": one.queues,
        })
    };
    all.iter().map(one).collect()
}

fn subsystem(one: &SubsystemStatus) -> Value {
    json!({
        "nqn": one.nqn,
        "allow_any_host": one.allow_any_host,
        "hosts": one.hosts,
        "namespaces": one.namespaces.iter().map(namespace).collect::<Vec<_>>(),
    })
}

fn namespace(one: &NamespaceStatus) -> Value {
    json!({
        "nsid": one.nsid,
        "backend": one.backend,
        "blocks": one.blocks,
        "block_size": one.block_size,
        "read_only": one.read_only,
        "zones": one.zones.map(|zones| json!({
            "count": zones.count, "size": zones.size, "open": zones.open, "active": zones.active,
        })),
        "reads": one.io.reads,
        "bytes_read": one.io.bytes_read,
        "writes": one.io.writes,
        "bytes_written": one.io.bytes_written,
        "errors": one.io.errors,
    })
}

/// A host with all of its queues, those that ended included.
fn host(one: &HostStatus) -> Value {
    with_traffic(json!({ "hostnqn": one.hostnqn, "queues": one.queues }), &one.io)
}

/// The same words as for a namespace.
fn with_traffic(mut figures: Value, io: &Traffic) -> Value {
    let Traffic { reads, bytes_read, writes, bytes_written, errors } = *io;
    figures["reads"] = reads.into();
    figures["bytes_read"] = bytes_read.into();
    figures["writes"] = writes.into();
    figures["bytes_written"] = bytes_written.into();
    figures["errors"] = errors.into();
    figures
}

fn controller(one: &ControllerStatus) -> Value {
    let queue = |queue: &QueueStatus| {
        let figures = json!({ "qid": queue.qid, "reactor": queue.reactor, "idle_ms": queue.idle.as_millis() as u64 });
        with_traffic(figures, &queue.io)
    };
    json!({
        "subnqn": one.subnqn,
        "cntlid": one.cntlid,
        "hostnqn": one.hostnqn,
        "hostid": one.hostid.to_string(),
        "keep_alive_ms": one.kato.map(|kato| kato.as_millis() as u64),
        "dying": one.dying,
        "queues": one.queues.iter().map(queue).collect::<Vec<_>>(),
    })
}
