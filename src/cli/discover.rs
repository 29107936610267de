//! `farside discover`: what an address serves.

use std::process::ExitCode;
use std::sync::Arc;

use clap::Args;
use farside::host::wire::DiscoveryEntry;
use farside::host::{HostError, HostOptions, discover};
use farside::rdma::Provider;

use super::connect::{Connect, WithProvider};

#[derive(Debug, Args)]
pub(crate) struct Discover {
    #[command(flatten)]
    connect: Connect,
    /// Print the log for scripts
    #[arg(long)]
    json: bool,
}

impl Discover {
    pub(crate) fn run(self) -> ExitCode {
        match self.connect.with(1, Work(&self.connect)) {
            Ok(entries) if self.json => {
                println!("{:#}", json(&entries));
                ExitCode::SUCCESS
            }
            Ok(entries) => {
                for entry in &entries {
                    println!("{}", line(entry));
                }
                ExitCode::SUCCESS
            }
            Err(error) => {
                eprintln!("farside: {error}");
                ExitCode::FAILURE
            }
        }
    }
}

struct Work<'a>(&'a Connect);

impl WithProvider for Work<'_> {
    type Output = Vec<DiscoveryEntry>;

    fn run<P: Provider>(self, provider: Arc<P>, options: HostOptions) -> Result<Self::Output, HostError> {
        discover(provider, self.0.address, options)
    }
}

fn subtype(entry: &DiscoveryEntry) -> &'static str {
    match entry.subtype {
        1 => "referral",
        2 => "subsystem",
        3 => "discovery",
        _ => "unknown",
    }
}

fn transport(entry: &DiscoveryEntry) -> &'static str {
    match entry.trtype {
        1 => "rdma",
        2 => "fc",
        3 => "tcp",
        254 => "loop",
        _ => "unknown",
    }
}

fn line(entry: &DiscoveryEntry) -> String {
    let DiscoveryEntry { subnqn, traddr, trsvcid, portid, .. } = entry;
    let address = if traddr.contains(':') { format!("[{traddr}]") } else { traddr.clone() };
    format!("{:<9}  {subnqn}  {} {address}:{trsvcid}  port {portid}", subtype(entry), transport(entry))
}

fn json(entries: &[DiscoveryEntry]) -> serde_json::Value {
    entries
        .iter()
        .map(|entry| {
            serde_json::json!({
                "subtype": subtype(entry),
                "subnqn": entry.subnqn,
                "trtype": transport(entry),
                "traddr": entry.traddr,
                "trsvcid": entry.trsvcid,
                "portid": entry.portid,
                "cntlid": entry.cntlid,
                "asqsz": entry.asqsz,
            })
        })
        .collect()
}
