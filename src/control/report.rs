//! A target's state as JSON.

use serde_json::{Value, json};

use crate::target::{ControllerStatus, Counters, NamespaceStatus, Status, SubsystemStatus};

/// The answer to [`super::Request::Status`].
pub(super) fn status(status: &Status, counters: &Counters, provider: &str, uptime: std::time::Duration) -> Value {
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "provider": provider,
        "uptime_seconds": uptime.as_secs(),
        "subsystems": status.subsystems.iter().map(subsystem).collect::<Vec<_>>(),
        "listeners": status.listeners.iter().map(ToString::to_string).collect::<Vec<_>>(),
        "controllers": status.controllers.iter().map(controller).collect::<Vec<_>>(),
        "counters": {
            "connections_accepted": counters.connections_accepted,
            "connections_rejected": counters.connections_rejected,
            "authentications": counters.authentications,
            "controllers": counters.controllers,
            "queues": counters.queues,
            "commands": counters.requests,
            "pool_bytes_used": counters.pool_used,
            "admin_pool_bytes_used": counters.admin_pool_used,
            "receive_slots_used": counters.slots_used,
        },
    })
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
        "reads": one.io.reads,
        "bytes_read": one.io.bytes_read,
        "writes": one.io.writes,
        "bytes_written": one.io.bytes_written,
        "errors": one.io.errors,
    })
}

fn controller(one: &ControllerStatus) -> Value {
    let queue = |queue: &crate::target::QueueStatus| json!({ "qid": queue.qid, "reactor": queue.reactor, "idle_ms": queue.idle.as_millis() as u64 });
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
