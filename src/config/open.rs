//! From a checked configuration to a target that can be started: backends are opened here, and claimed.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use super::{Config, PORT, SubsystemSpec};
use crate::backend;
use crate::target::{self, Target, TargetBuilder, TargetError};

impl Config {
    /// Opens everything that is to be served. What was opened is let go when the builder is dropped.
    pub fn open(&self) -> Result<TargetBuilder, TargetError> {
        let mut builder = Target::builder().options(target::Options::from(&self.options));
        if let Some(folder) = self.options.state_folder() {
            builder = builder.state_dir(folder);
        }
        for subsystem in &self.subsystems {
            builder = builder.subsystem(subsystem.open()?);
        }
        if self.listeners.is_empty() {
            return Ok(builder.listen(SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), PORT)));
        }
        for listener in &self.listeners {
            let address = listener.resolve().map_err(|error| TargetError {
                object: format!("listener {listener}"),
                reason: error.to_string(),
                remedy: "name an interface of this machine (ip link)".into(),
            })?;
            builder = builder.listen_with(address, listener.tos);
        }
        Ok(builder)
    }
}

impl SubsystemSpec {
    fn open(&self) -> Result<target::SubsystemSpec, TargetError> {
        let mut namespaces = Vec::with_capacity(self.namespaces.len());
        for namespace in &self.namespaces {
            let opened = backend::open(&namespace.backend)?;
            namespaces.push(target::NamespaceSpec {
                block_size: Some(namespace.backend.lba(&*opened)),
                uuid: namespace.configured_uuid,
                nguid: namespace.nguid(&self.nqn, &opened.info().identity),
                eui64: namespace.eui64,
                read_only: namespace.backend.read_only,
                ..target::NamespaceSpec::new(namespace.nsid, opened)
            });
        }
        Ok(target::SubsystemSpec {
            nqn: self.nqn.clone(),
            serial: Some(self.serial.clone()),
            model: self.model.clone(),
            allow_any_host: self.allow_any_host,
            hosts: self.hosts.clone(),
            namespaces,
        })
    }
}
