//! The form without a file: one namespace, as in `farside serve --file disk.img --size 1G`.

use std::fs;

use nvme::nqn::Nqn;
use uuid::Uuid;

use super::problem::{ConfigError, Problem};
use super::{Config, ListenAddress, NamespaceSpec, Options, ProviderChoice, SubsystemSpec, derive_nqn, derive_serial};
use crate::backend::{BackendSpec, Source};

/// What the command line says.
#[derive(Clone, Debug)]
pub struct Quick {
    /// What to serve.
    pub source: Source,
    /// The LBA size.
    pub block_size: Option<u32>,
    /// The subsystem's name; one of this machine and the source when none is given.
    pub nqn: Option<String>,
    /// The namespace's UUID.
    pub uuid: Option<String>,
    /// Addresses to listen on.
    pub listen: Vec<String>,
    /// Which RDMA.
    pub provider: ProviderChoice,
}

impl Config {
    /// From the command line. `machine` tells this machine from others: see [`machine_id`].
    pub fn quick(quick: Quick, machine: &str) -> Result<Self, ConfigError> {
        let mut problems = Vec::new();
        let mut problem = |key: &str, reason: String, remedy: &str| {
            let (file, key) = ("command line".to_owned(), key.to_owned());
            problems.push(Problem { file, line: None, key, reason, remedy: remedy.to_owned() });
        };
        let nqn = quick.nqn.unwrap_or_else(|| derive_nqn(machine, &describe(&quick.source)));
        if let Err(rule) = Nqn::strict(&nqn) {
            problem("--nqn", format!("{nqn:?}: {rule}"), "give one of the form nqn.yyyy-mm.reversed.domain:name");
        }
        let configured_uuid = quick.uuid.as_deref().and_then(|text| {
            let uuid = Uuid::try_parse(text).ok().filter(|uuid| !uuid.is_nil());
            if uuid.is_none() {
                problem("--uuid", format!("{text:?} is none"), "give 8-4-4-4-12 hexadecimal digits, not all zero");
            }
            uuid
        });
        let listeners = quick.listen.iter().filter_map(|text| {
            let remedy = "give one of the form 192.0.2.1, 192.0.2.1:4420, [2001:db8::1]:4420 or [fe80::1%eth0]:4420";
            text.parse::<ListenAddress>().map_err(|reason| problem("--listen", reason, remedy)).ok()
        });
        let listeners = listeners.collect();
        if !problems.is_empty() {
            return Err(ConfigError(problems));
        }
        let backend = BackendSpec { block_size: quick.block_size, ..BackendSpec::new(quick.source) };
        let namespace = NamespaceSpec { configured_uuid, ..NamespaceSpec::new(1, backend) };
        let subsystem = SubsystemSpec {
            serial: derive_serial(&nqn),
            nqn,
            model: None,
            allow_any_host: true,
            hosts: Vec::new(),
            host_specs: Vec::new(),
            namespaces: vec![namespace],
            ana: Vec::new(),
            admission: Default::default(),
        };
        let options = Options { provider: quick.provider, ..Options::default() };
        Ok(Self { subsystems: vec![subsystem], listeners, referrals: Vec::new(), options })
    }
}

/// What tells this machine from others, for names that are made up here.
pub fn machine_id() -> String {
    let files = ["/etc/machine-id", "/var/lib/dbus/machine-id", "/proc/sys/kernel/hostname"];
    let found = files.iter().filter_map(|file| fs::read_to_string(file).ok()).map(|text| text.trim().to_owned());
    found.into_iter().find(|text| !text.is_empty()).unwrap_or_default()
}

fn describe(source: &Source) -> String {
    match source {
        Source::File { path, .. } => format!("file {}", absolute(path)),
        Source::Device { path } => format!("device {}", absolute(path)),
        Source::Memory { .. } => "memory".into(),
        Source::Null { .. } => "null".into(),
    }
}

fn absolute(path: &std::path::Path) -> String {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned()).display().to_string()
}
