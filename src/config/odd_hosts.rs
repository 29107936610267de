//! Names of hosts that are taken as they are, and look mistyped.

use nvme::nqn::Nqn;

use super::Config;

impl Config {
    /// Hosts whose NQN has none of the forms that the specification gives one (NVMe Base 2.x, 4.7): a line each, with what to do.
    /// They are taken all the same, as there are hosts with such names.
    pub fn odd_hosts(&self) -> Vec<String> {
        let mut all: Vec<(&str, String)> = Vec::new();
        for subsystem in &self.subsystems {
            all.extend(subsystem.hosts.iter().map(|host| (host.as_str(), subsystem.nqn.clone())));
            for namespace in &subsystem.namespaces {
                let place = || format!("namespace {} of {}", namespace.nsid, subsystem.nqn);
                all.extend(namespace.hosts.iter().flatten().map(|host| (host.as_str(), place())));
            }
        }
        for referral in &self.referrals {
            let place = || format!("the referral to {}", referral.address);
            all.extend(referral.hosts.iter().flatten().map(|host| (host.as_str(), place())));
        }
        let line = |(host, place): (&str, String)| {
            let rule = Nqn::strict(host).err()?;
            Some(format!(
                "host {host:?} of {place}: {rule}; only a host that calls itself exactly so may connect: compare it with \
                 /etc/nvme/hostnqn there"
            ))
        };
        all.into_iter().filter_map(line).collect()
    }
}
