//! `farside identify`: a controller and its namespaces.

use std::process::ExitCode;
use std::sync::Arc;

use clap::Args;
use farside::host::wire::{IdentifyController, IdentifyNamespace};
use farside::host::zones::ZonedNamespace;
use farside::host::{Host, HostError, HostOptions};
use farside::rdma::Provider;
use uuid::Uuid;

use super::connect::{Connect, WithProvider, only_subsystem};

#[derive(Debug, Args)]
pub(crate) struct Identify {
    #[command(flatten)]
    connect: Connect,
    /// Subsystem; may be left out where there is only one
    #[arg(long)]
    nqn: Option<String>,
    /// Print it for scripts
    #[arg(long)]
    json: bool,
}

struct Found {
    controller: IdentifyController,
    namespaces: Vec<(IdentifyNamespace, Option<Uuid>, Option<ZonedNamespace>)>,
}

impl Identify {
    pub(crate) fn run(self) -> ExitCode {
        match self.connect.with(1, Work(&self)) {
            Ok(found) => {
                if self.json {
                    println!("{:#}", found.json());
                } else {
                    print!("{}", found.text());
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

struct Work<'a>(&'a Identify);

impl WithProvider for Work<'_> {
    type Output = Found;

    fn run<P: Provider>(self, provider: Arc<P>, options: HostOptions) -> Result<Found, HostError> {
        let address = self.0.connect.address;
        let nqn = match &self.0.nqn {
            Some(nqn) => nqn.clone(),
            None => only_subsystem(&provider, address, &options)?,
        };
        let mut host = Host::connect(provider, address, nqn, HostOptions { queue_depth: 32, ..options })?;
        let mut namespaces = Vec::new();
        for nsid in host.active_namespaces()? {
            let namespace = host.namespace(nsid)?;
            let uuid = host.namespace_uuid(nsid)?.map(Uuid::from_bytes);
            namespaces.push((namespace, uuid, host.zones(nsid)?));
        }
        Ok(Found { controller: host.controller().clone(), namespaces })
    }
}

impl Found {
    fn text(&self) -> String {
        use std::fmt::Write as _;
        let controller = &self.controller;
        let (major, minor) = (controller.version >> 16, controller.version >> 8 & 0xff);
        let mut text = String::new();
        let _ = writeln!(text, "subsystem   {}", controller.subnqn);
        let _ = writeln!(
            text,
            "model       {}  firmware {}  serial {}",
            controller.model, controller.firmware, controller.serial
        );
        let _ = writeln!(text, "controller  {}  NVMe {major}.{minor}", controller.cntlid);
        let most = controller.mdts.map_or_else(|| "unlimited".to_string(), |bytes| format!("{} KiB", bytes >> 10));
        let _ = writeln!(
            text,
            "transfer    {most} at most, {} B in a capsule, {} descriptors",
            controller.in_capsule(),
            controller.msdbd
        );
        let _ = writeln!(
            text,
            "cache       {}",
            if controller.write_cache { "volatile: flush what must last" } else { "none" }
        );
        for (namespace, uuid, zones) in &self.namespaces {
            let uuid = uuid.map_or_else(|| "none".to_string(), |uuid| uuid.to_string());
            let bytes = farside::config::Bytes(namespace.bytes());
            let access = if namespace.nsattr & 1 == 0 { "" } else { "  read only" };
            let IdentifyNamespace { nsid, blocks, block_size, .. } = namespace;
            let _ = writeln!(text, "namespace   {nsid}  {bytes} ({blocks} x {block_size} B){access}  uuid {uuid}");
            if let Some(zones) = zones {
                let limit = |most: Option<u32>| most.map_or_else(|| "any number".to_string(), |most| most.to_string());
                let size = farside::config::Bytes(zones.zone_blocks.saturating_mul(u64::from(*block_size)));
                let (open, active) = (limit(zones.max_open), limit(zones.max_active));
                let _ = writeln!(
                    text,
                    "            {} zones of {size}, {open} open and {active} active at a time",
                    blocks / zones.zone_blocks
                );
            }
        }
        text
    }

    fn json(&self) -> serde_json::Value {
        let controller = &self.controller;
        let namespaces: Vec<serde_json::Value> = self
            .namespaces
            .iter()
            .map(|(namespace, uuid, zones)| {
                serde_json::json!({
                    "nsid": namespace.nsid,
                    "blocks": namespace.blocks,
                    "block_size": namespace.block_size,
                    "bytes": namespace.bytes(),
                    "read_only": namespace.nsattr & 1 != 0,
                    "uuid": uuid.map(|uuid| uuid.to_string()),
                    "zones": zones.map(|zones| serde_json::json!({
                        "zone_blocks": zones.zone_blocks,
                        "max_open": zones.max_open,
                        "max_active": zones.max_active,
                    })),
                })
            })
            .collect();
        serde_json::json!({
            "subnqn": controller.subnqn,
            "model": controller.model,
            "serial": controller.serial,
            "firmware": controller.firmware,
            "cntlid": controller.cntlid,
            "version": controller.version,
            "max_transfer": controller.mdts,
            "in_capsule": controller.in_capsule(),
            "descriptors": controller.msdbd,
            "volatile_write_cache": controller.write_cache,
            "namespaces": namespaces,
        })
    }
}
