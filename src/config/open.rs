//! From a checked configuration to a target that can be started: backends are opened here, and claimed.

use std::net::SocketAddr;

use super::{Config, ListenAddress, NamespaceSpec, PORT, SubsystemSpec};
use crate::backend;
use crate::rdma::soft::SoftOptions;
use crate::target::{self, Target, TargetBuilder, TargetError};

impl Config {
    /// Opens everything that is to be served. What was opened is let go when the builder is dropped.
    pub fn open(&self) -> Result<TargetBuilder, TargetError> {
        let options = &self.options;
        let soft = SoftOptions { dcqcn: options.dcqcn, raw_headers: options.raw_headers, ..SoftOptions::default() };
        let mut builder = Target::builder().options(target::Options::from(options)).soft(soft);
        if let Some(folder) = self.options.state_folder() {
            builder = builder.state_dir(folder);
        }
        for subsystem in &self.subsystems {
            builder = builder.subsystem(subsystem.open()?);
        }
        for referral in &self.referrals {
            builder = builder.referral(referral.referral());
        }
        if self.listeners.is_empty() {
            return Ok(builder.listen(SocketAddr::new(ListenAddress::any().ip, PORT)));
        }
        for listener in &self.listeners {
            let address = resolve(listener)?;
            builder = builder.listen_with(address, listener.tos);
        }
        Ok(builder)
    }
}

fn resolve(listener: &ListenAddress) -> Result<SocketAddr, TargetError> {
    listener.resolve().map_err(|error| TargetError {
        object: format!("listener {listener}"),
        reason: error.to_string(),
        remedy: "name an interface of this machine (ip link)".into(),
    })
}

impl SubsystemSpec {
    /// Opens what it is to serve.
    pub(crate) fn open(&self) -> Result<target::SubsystemSpec, TargetError> {
        self.open_with(|namespace| namespace.open(&self.nqn))
    }

    /// The same, where something else opens its namespaces.
    pub(crate) fn open_with<E: From<TargetError>>(
        &self,
        open: impl FnMut(&NamespaceSpec) -> Result<target::NamespaceSpec, E>,
    ) -> Result<target::SubsystemSpec, E> {
        let namespaces = self.namespaces.iter().map(open).collect::<Result<Vec<_>, _>>()?;
        let mut ana = Vec::with_capacity(self.ana.len());
        for one in &self.ana {
            let listener = one.listener.as_ref().map(resolve).transpose()?;
            ana.push(target::AnaSpec { group: one.group, listener, state: one.state });
        }
        let limits = self.host_specs.iter().map(|host| (host.nqn.clone(), host.limits)).collect();
        let mut auth = Vec::new();
        for host in &self.host_specs {
            auth.extend(host.auth()?.map(|auth| (host.nqn.clone(), auth)));
        }
        Ok(target::SubsystemSpec {
            nqn: self.nqn.clone(),
            serial: Some(self.serial.clone()),
            model: self.model.clone(),
            allow_any_host: self.allow_any_host,
            hosts: self.hosts.clone(),
            namespaces,
            ana,
            auth,
            limits,
            admission: self.admission,
        })
    }
}

impl NamespaceSpec {
    /// Opens what stands behind it.
    pub(crate) fn open(&self, nqn: &str) -> Result<target::NamespaceSpec, TargetError> {
        let opened = backend::open(&self.backend)?;
        Ok(target::NamespaceSpec {
            block_size: Some(self.backend.lba(&*opened)),
            uuid: self.configured_uuid,
            nguid: self.nguid(nqn, &opened.info().identity),
            eui64: self.eui64,
            read_only: self.backend.read_only,
            ana_group: self.ana_group,
            hosts: self.hosts.clone(),
            limits: self.limits,
            ..target::NamespaceSpec::new(self.nsid, opened)
        })
    }
}
