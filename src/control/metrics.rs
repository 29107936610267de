//! Metrics in Prometheus' text exposition format, and the HTTP endpoint that serves them.

use std::fmt::{self, Write as _};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use tiny_http::{Header, Method, Response, Server};

use super::manager::Manager;
use super::protocol::Failure;
use crate::target::{Cause, Counters, IoTotals, Latencies, Latency, LatencyReport, Stage, Status, Traffic};

/// The type that scrapers expect.
const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// The metrics as text.
pub(super) fn text(status: &Status, counters: &Counters, latency: &LatencyReport) -> String {
    let mut text = String::new();
    let mut family = |name: &str, kind: &str, help: &str, samples: &[(String, u64)]| {
        let _ = writeln!(text, "# HELP farside_{name} {help}\n# TYPE farside_{name} {kind}");
        for (labels, value) in samples {
            let _ = writeln!(text, "farside_{name}{labels} {value}");
        }
    };
    let mut one = |name: &str, kind: &str, help: &str, value: u64| family(name, kind, help, &[(String::new(), value)]);
    one("connections_accepted_total", "counter", "Connections accepted.", counters.connections_accepted);
    one("connections_rejected_total", "counter", "Connections rejected.", counters.connections_rejected);
    let help = "Times that hosts authenticated, on each queue and each time.";
    one("authentications_total", "counter", help, counters.authentications);
    one("controllers", "gauge", "Controllers.", counters.controllers as u64);
    one("queues", "gauge", "Connected queues.", counters.queues as u64);
    one("commands", "gauge", "Commands under way.", counters.requests as u64);
    one("pool_used_bytes", "gauge", "Data buffers in use.", counters.pool_used as u64);
    one("pages_used_bytes", "gauge", "Receive pages in use.", counters.pages_used as u64);
    one("receive_slots_used", "gauge", "Receive slots in use.", counters.slots_used as u64);
    let ends: Vec<_> =
        Cause::ALL.iter().map(|cause| (format!("{{cause=\"{}\"}}", cause.name()), counters.ends.of(*cause))).collect();
    family("queues_ended_total", "counter", "Queues that ended, by cause.", &ends);
    let namespaces: Vec<&IoTotals> =
        status.subsystems.iter().flat_map(|one| &one.namespaces).map(|namespace| &namespace.io).collect();
    let mut each = |name: &str, help: &str, value: fn(&IoTotals) -> u64| {
        let samples: Vec<_> = namespaces.iter().map(|io| (labels(&io.nqn, io.nsid), value(io))).collect();
        family(name, "counter", help, &samples);
    };
    each("namespace_reads_total", "Read and Compare commands that succeeded.", |io| io.reads);
    each("namespace_read_bytes_total", "Bytes of those.", |io| io.bytes_read);
    each("namespace_writes_total", "Write commands that succeeded.", |io| io.writes);
    each("namespace_written_bytes_total", "Bytes of those.", |io| io.bytes_written);
    each("namespace_errors_total", "Commands that the backend failed.", |io| io.errors);
    let mut each = |name: &str, help: &str, value: fn(&Traffic) -> u64| {
        let label = |host: &str| format!("{{hostnqn=\"{}\"}}", escaped(host));
        let samples: Vec<_> = status.hosts.iter().map(|host| (label(&host.hostnqn), value(&host.io))).collect();
        family(name, "counter", help, &samples);
    };
    each("host_reads_total", "Read and Compare commands of a host that succeeded, on all of its queues.", |io| {
        io.reads
    });
    each("host_read_bytes_total", "Bytes of those.", |io| io.bytes_read);
    each("host_writes_total", "Write commands of a host that succeeded, on all of its queues.", |io| io.writes);
    each("host_written_bytes_total", "Bytes of those.", |io| io.bytes_written);
    each("host_errors_total", "Commands of a host that the backend failed.", |io| io.errors);
    latencies(&mut text, latency);
    text
}

/// Where something was recorded: histograms of namespaces, and quantiles of hosts.
fn latencies(text: &mut String, report: &LatencyReport) {
    let (namespaces, hosts) = ("farside_namespace_latency_seconds", "farside_host_latency_seconds");
    let head = |text: &mut String, name: &str, kind: &str, help: &str| {
        let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
    };
    let some = |all: &Latencies| {
        let all: Vec<(&str, Latency)> =
            Stage::ALL.iter().map(|stage| (stage.name(), all.stage(*stage).clone())).collect();
        all.into_iter().filter(|(_, latency)| latency.count() > 0)
    };
    if report.namespaces.iter().any(|(_, _, all)| !all.is_empty()) {
        head(text, namespaces, "histogram", "How long I/O commands that succeeded took, by stage.");
    }
    for (nqn, nsid, all) in &report.namespaces {
        for (stage, latency) in some(all) {
            let labels = format!("nqn=\"{}\",nsid=\"{nsid}\",stage=\"{stage}\"", escaped(nqn));
            for (bound, count) in latency.cumulative() {
                let _ = writeln!(text, "{namespaces}_bucket{{{labels},le=\"{}\"}} {count}", bound.as_secs_f64());
            }
            let _ = writeln!(text, "{namespaces}_bucket{{{labels},le=\"+Inf\"}} {}", latency.count());
            let _ = writeln!(text, "{namespaces}_sum{{{labels}}} {}", latency.sum().as_secs_f64());
            let _ = writeln!(text, "{namespaces}_count{{{labels}}} {}", latency.count());
        }
    }
    let by_host = report.hosts();
    if by_host.iter().any(|(_, all)| !all.is_empty()) {
        head(text, hosts, "summary", "How long commands of connected I/O queues took, by stage.");
    }
    for (host, all) in &by_host {
        for (stage, latency) in some(all) {
            let labels = format!("hostnqn=\"{}\",stage=\"{stage}\"", escaped(host));
            for quantile in [0.5, 0.99, 0.999] {
                let time = latency.quantile(quantile).as_secs_f64();
                let _ = writeln!(text, "{hosts}{{{labels},quantile=\"{quantile}\"}} {time}");
            }
            let _ = writeln!(text, "{hosts}_sum{{{labels}}} {}", latency.sum().as_secs_f64());
            let _ = writeln!(text, "{hosts}_count{{{labels}}} {}", latency.count());
        }
    }
}

fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

fn labels(nqn: &str, nsid: u32) -> String {
    format!("{{nqn=\"{}\",nsid=\"{nsid}\"}}", escaped(nqn))
}

/// An HTTP endpoint that answers `GET /metrics`. Ends when dropped.
pub struct MetricsServer {
    address: SocketAddr,
    server: Arc<Server>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl fmt::Debug for MetricsServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MetricsServer").field("address", &self.address).finish_non_exhaustive()
    }
}

/// An address that metrics are to be served on, taken before there are any.
pub struct MetricsAddress {
    address: SocketAddr,
    server: Server,
}

impl fmt::Debug for MetricsAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MetricsAddress").field("address", &self.address).finish_non_exhaustive()
    }
}

impl MetricsAddress {
    /// Listens there. Who asks waits until it is served.
    ///
    /// # Errors
    /// The address cannot be bound.
    pub fn bind(address: SocketAddr) -> Result<Self, Failure> {
        let server = Server::http(address).map_err(|error| refused(address, error.to_string()))?;
        Ok(Self { address: server.server_addr().to_ip().unwrap_or(address), server })
    }
}

fn refused(address: SocketAddr, reason: String) -> Failure {
    Failure::new(format!("metrics on {address}"), reason, "choose a free address of this machine with --metrics")
}

impl MetricsServer {
    /// Binds the address and serves it.
    ///
    /// # Errors
    /// The address cannot be bound.
    pub fn start(address: SocketAddr, manager: Arc<Manager>) -> Result<Self, Failure> {
        Self::serve(MetricsAddress::bind(address)?, manager)
    }

    /// Serves an address.
    ///
    /// # Errors
    /// There is no thread to be had.
    pub fn serve(bound: MetricsAddress, manager: Arc<Manager>) -> Result<Self, Failure> {
        let MetricsAddress { address, server } = bound;
        let server = Arc::new(server);
        let stop = Arc::new(AtomicBool::new(false));
        let (stopped, serving) = (Arc::clone(&stop), Arc::clone(&server));
        let body = move || {
            while !stopped.load(Ordering::Acquire) {
                // An error here is the wake-up at the end, or a connection that broke.
                if let Ok(request) = serving.recv() {
                    answer(request, &manager);
                }
            }
        };
        let spawned = std::thread::Builder::new().name("farside-metrics".into()).spawn(body);
        let thread = spawned.map_err(|error| refused(address, error.to_string()))?;
        Ok(Self { address, server, stop, thread: Some(thread) })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for MetricsServer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        self.server.unblock();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn answer(request: tiny_http::Request, manager: &Manager) {
    let found = request.url() == "/metrics" && *request.method() == Method::Get;
    let response = if found {
        Response::from_string(manager.metrics())
    } else {
        Response::from_string("GET /metrics\n").with_status_code(404)
    };
    let header = Header::from_bytes("Content-Type", CONTENT_TYPE).expect("a header of ASCII");
    // The scraper may be gone.
    let _ = request.respond(response.with_header(header));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::target::{HostStatus, NamespaceStatus, SubsystemStatus};

    #[test]
    fn each_family_is_there_once_with_each_namespace() {
        let namespace = |nsid| NamespaceStatus {
            nsid,
            backend: "null".into(),
            blocks: 8,
            block_size: 512,
            zones: None,
            read_only: false,
            io: IoTotals { nqn: "nqn.\"x\"".into(), nsid, reads: u64::from(nsid) * 10, ..IoTotals::default() },
        };
        let subsystem = SubsystemStatus {
            nqn: "nqn.\"x\"".into(),
            allow_any_host: true,
            hosts: Vec::new(),
            namespaces: vec![namespace(1), namespace(2)],
        };
        let host = |hostnqn: &str| HostStatus {
            hostnqn: hostnqn.into(),
            queues: 1,
            io: Traffic { bytes_written: 4096, errors: 2, ..Traffic::default() },
        };
        let hosts = vec![host("nqn.a"), host("nqn.\"b\""), host("nqn.c")];
        let status = Status { subsystems: vec![subsystem], hosts, ..Status::default() };
        let text = text(&status, &Counters { queues: 7, ..Counters::default() }, &LatencyReport::default());
        assert!(text.contains("\nfarside_queues 7\n"), "{text}");
        assert!(text.contains("farside_namespace_reads_total{nqn=\"nqn.\\\"x\\\"\",nsid=\"2\"} 20\n"), "{text}");
        let families: Vec<&str> = text.lines().filter(|line| line.starts_with("# TYPE")).collect();
        assert_eq!(families.len(), 20);
        assert!(text.contains("farside_host_written_bytes_total{hostnqn=\"nqn.\\\"b\\\"\"} 4096\n"), "{text}");
        for family in &families {
            let name = family.split(' ').nth(2).unwrap();
            let samples = text.lines().filter(|line| line.split(['{', ' ']).next() == Some(name)).count();
            let expected = match name {
                name if name.contains("namespace") => 2,
                name if name.contains("_host_") => 3,
                "farside_queues_ended_total" => Cause::ALL.len(),
                _ => 1,
            };
            assert_eq!(samples, expected, "{name}");
        }
    }
}
