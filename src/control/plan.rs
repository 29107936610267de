//! The difference between two configurations, as steps that a running target can take.

use std::fmt;

use super::protocol::Failure;
use crate::backend::Source;
use crate::config::{
    Addition, AnaSpec, Bytes, Config, HostSpec, ListenAddress, NamespaceSpec, Options, ReferralSpec, SubsystemSpec,
    ana_state_name,
};
use crate::target::{self, Admission, AnaState, HostAuth, Limits, Target};

/// One step. [`Change::inverse`] takes it back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// A subsystem with all that it has.
    AddSubsystem(SubsystemSpec),
    /// The same, away.
    RemoveSubsystem(SubsystemSpec),
    /// A namespace of the subsystem of this NQN.
    AddNamespace(String, NamespaceSpec),
    /// The same, away.
    RemoveNamespace(String, NamespaceSpec),
    /// A host of the subsystem of this NQN.
    AllowHost(String, String),
    /// The same, away.
    RemoveHost(String, String),
    /// Whether any host may connect to the subsystem of this NQN.
    AllowAnyHost(String, bool),
    /// What is asked of a host of the subsystem of this NQN, from the one to the other.
    Host(String, HostSpec, HostSpec),
    /// Secrets of a host of the subsystem of this NQN whose files have other contents now, from these to those.
    Secrets(String, String, Option<HostAuth>, Option<HostAuth>),
    /// ANA states of the subsystem of this NQN, from these to those.
    Ana(String, Vec<AnaSpec>, Vec<AnaSpec>),
    /// The ANA group of a namespace of the subsystem of this NQN, from the one to the other.
    AnaGroup(String, u32, u32, u32),
    /// Which hosts see a namespace of the subsystem of this NQN, from these to those.
    NamespaceHosts(String, u32, Option<Vec<String>>, Option<Vec<String>>),
    /// What may be done with a namespace of the subsystem of this NQN, from the one to the other.
    NamespaceLimits(String, u32, Limits, Limits),
    /// How many controllers the subsystem of this NQN has, from the one to the other.
    Admission(String, Admission, Admission),
    /// Another discovery service to tell hosts of.
    AddReferral(ReferralSpec),
    /// The same, away.
    RemoveReferral(ReferralSpec),
    /// An address to listen on.
    AddListener(ListenAddress),
    /// The same, away.
    RemoveListener(ListenAddress),
}

impl Change {
    /// What takes it back.
    #[must_use]
    pub fn inverse(&self) -> Self {
        match self.clone() {
            Self::AddSubsystem(spec) => Self::RemoveSubsystem(spec),
            Self::RemoveSubsystem(spec) => Self::AddSubsystem(spec),
            Self::AddNamespace(nqn, spec) => Self::RemoveNamespace(nqn, spec),
            Self::RemoveNamespace(nqn, spec) => Self::AddNamespace(nqn, spec),
            Self::AllowHost(nqn, host) => Self::RemoveHost(nqn, host),
            Self::RemoveHost(nqn, host) => Self::AllowHost(nqn, host),
            Self::AllowAnyHost(nqn, allow) => Self::AllowAnyHost(nqn, !allow),
            Self::Host(nqn, from, to) => Self::Host(nqn, to, from),
            Self::Secrets(nqn, host, from, to) => Self::Secrets(nqn, host, to, from),
            Self::Ana(nqn, from, to) => Self::Ana(nqn, to, from),
            Self::AnaGroup(nqn, nsid, from, to) => Self::AnaGroup(nqn, nsid, to, from),
            Self::NamespaceHosts(nqn, nsid, from, to) => Self::NamespaceHosts(nqn, nsid, to, from),
            Self::NamespaceLimits(nqn, nsid, from, to) => Self::NamespaceLimits(nqn, nsid, to, from),
            Self::Admission(nqn, from, to) => Self::Admission(nqn, to, from),
            Self::AddReferral(referral) => Self::RemoveReferral(referral),
            Self::RemoveReferral(referral) => Self::AddReferral(referral),
            Self::AddListener(listener) => Self::RemoveListener(listener),
            Self::RemoveListener(listener) => Self::AddListener(listener),
        }
    }

    /// What it makes the target use that it did not use before.
    pub(super) fn addition(&self) -> Option<Addition<'_>> {
        match self {
            Self::AddSubsystem(spec) => Some(Addition::Subsystem(spec)),
            Self::AddNamespace(nqn, spec) => Some(Addition::Namespace(nqn, spec)),
            Self::Host(nqn, _, spec) => Some(Addition::Host(nqn, spec)),
            Self::AddListener(listener) => Some(Addition::Listener(listener)),
            _ => None,
        }
    }

    /// The namespaces that come or go with it, and the NQN of their subsystem.
    pub(super) fn namespaces(&self) -> (&str, &[NamespaceSpec]) {
        match self {
            Self::AddSubsystem(spec) | Self::RemoveSubsystem(spec) => (&spec.nqn, &spec.namespaces),
            Self::AddNamespace(nqn, spec) | Self::RemoveNamespace(nqn, spec) => (nqn, std::slice::from_ref(spec)),
            _ => ("", &[]),
        }
    }

    /// What it adds is served.
    pub(super) fn adds(&self) -> bool {
        matches!(self, Self::AddSubsystem(_) | Self::AddNamespace(..))
    }

    /// What it removes was served.
    pub(super) fn removes(&self) -> bool {
        matches!(self, Self::RemoveSubsystem(_) | Self::RemoveNamespace(..))
    }

    /// Takes the step, where it is one that only changes what is there.
    pub(super) fn carry_out(&self, target: &Target) -> Result<(), Failure> {
        match self {
            Self::AddSubsystem(_) | Self::RemoveSubsystem(_) | Self::AddNamespace(..) | Self::RemoveNamespace(..) => {}
            Self::AllowHost(nqn, host) => target.allow_host(nqn, host)?,
            Self::RemoveHost(nqn, host) => target.remove_host(nqn, host)?,
            Self::AllowAnyHost(nqn, allow) => target.set_allow_any_host(nqn, *allow)?,
            Self::Host(nqn, _, to) => {
                let (auth, before) = (to.auth()?, target.host_auth(nqn, &to.nqn)?);
                target.set_host_auth(nqn, &to.nqn, auth)?;
                target.set_host_limits(nqn, &to.nqn, to.limits).inspect_err(|_| {
                    // Of the two calls of this step the first one is taken back.
                    let _ = target.set_host_auth(nqn, &to.nqn, before);
                })?;
            }
            Self::Secrets(nqn, host, _, to) => target.set_host_auth(nqn, host, to.clone())?,
            Self::NamespaceHosts(nqn, nsid, _, to) => target.set_namespace_hosts(nqn, *nsid, to.as_deref())?,
            Self::NamespaceLimits(nqn, nsid, _, to) => target.set_namespace_limits(nqn, *nsid, *to)?,
            Self::Admission(nqn, _, to) => target.set_admission(nqn, *to)?,
            Self::Ana(nqn, from, to) => {
                let to_come = to.iter().map(resolve_state).collect::<Result<Vec<_>, _>>()?;
                target.set_ana_states(nqn, &left_states(from, to), &to_come)?;
            }
            Self::AnaGroup(nqn, nsid, _, group) => target.set_ana_group(nqn, *nsid, *group)?,
            Self::AddReferral(referral) => target.add_referral(referral.referral())?,
            Self::RemoveReferral(referral) => target.remove_referral(&referral.referral())?,
            Self::AddListener(listener) => target.add_listener(resolve(listener)?, listener.tos)?,
            Self::RemoveListener(listener) => target.remove_listener(resolve(listener)?)?,
        }
        Ok(())
    }
}

/// Takes back ANA states that were set, as far as their listeners are there: one that is gone keeps its states.
pub(super) fn take_back_states(target: &Target, nqn: &str, from: &[AnaSpec], to: &[AnaSpec]) -> Result<(), Failure> {
    let mut states = left_states(to, from);
    states.extend(from.iter().filter_map(|one| resolve_state(one).ok()));
    Ok(target.set_ana_states(nqn, &states, &[])?)
}

/// What is not said any more is optimized. A listener that is gone has no state to take back.
fn left_states(from: &[AnaSpec], to: &[AnaSpec]) -> Vec<target::AnaSpec> {
    let kept = |one: &AnaSpec| to.iter().any(|other| other.group == one.group && other.listener == one.listener);
    let left = from.iter().filter(|one| !kept(one)).filter_map(|one| resolve_state(one).ok());
    left.map(|one| target::AnaSpec { state: AnaState::Optimized, ..one }).collect()
}

fn resolve_state(one: &AnaSpec) -> Result<target::AnaSpec, Failure> {
    let listener = one.listener.as_ref().map(resolve).transpose()?;
    Ok(target::AnaSpec { group: one.group, listener, state: one.state })
}

fn resolve(listener: &ListenAddress) -> Result<std::net::SocketAddr, Failure> {
    listener.resolve().map_err(|error| {
        Failure::new(format!("listener {listener}"), error, "name an interface of this machine (ip link)")
    })
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AddSubsystem(spec) => write!(f, "+ subsystem {} ({} namespaces)", spec.nqn, spec.namespaces.len()),
            Self::RemoveSubsystem(spec) => write!(f, "- subsystem {} ({} namespaces)", spec.nqn, spec.namespaces.len()),
            Self::AddNamespace(nqn, spec) => write!(f, "+ namespace {} of {nqn}: {}", spec.nsid, source(spec)),
            Self::RemoveNamespace(nqn, spec) => write!(f, "- namespace {} of {nqn}: {}", spec.nsid, source(spec)),
            Self::AllowHost(nqn, host) => write!(f, "+ host {host} of {nqn}"),
            Self::RemoveHost(nqn, host) => write!(f, "- host {host} of {nqn}"),
            Self::AllowAnyHost(nqn, true) => write!(f, "+ any host of {nqn}"),
            Self::AllowAnyHost(nqn, false) => write!(f, "- any host of {nqn}"),
            Self::Host(nqn, from, to) => {
                write!(f, "~ host {} of {nqn}:", to.nqn)?;
                if from.limits != to.limits {
                    write!(f, " {};", shown(&to.limits))?;
                }
                f.write_str(if to.dhchap_key.is_none() { " no authentication" } else { " authentication" })
            }
            Self::Secrets(nqn, host, ..) => write!(f, "~ host {host} of {nqn}: another secret"),
            Self::NamespaceHosts(nqn, nsid, _, None) => write!(f, "~ namespace {nsid} of {nqn}: all hosts see it"),
            Self::NamespaceHosts(nqn, nsid, _, Some(hosts)) => {
                write!(f, "~ namespace {nsid} of {nqn}: hosts that see it: {}", hosts.join(", "))
            }
            Self::NamespaceLimits(nqn, nsid, _, to) => write!(f, "~ namespace {nsid} of {nqn}: {}", shown(to)),
            Self::Admission(nqn, _, to) => {
                let Admission { controllers, controllers_per_host, duplicates } = to;
                let count =
                    |count: &Option<u16>| count.map_or_else(|| "any number".to_owned(), |count| count.to_string());
                let (all, each) = (count(controllers), count(controllers_per_host));
                write!(f, "~ controllers of {nqn}: {all}, of one host: {each}; a host that comes twice: {duplicates:?}")
            }
            Self::Ana(nqn, _, to) => {
                write!(f, "~ ANA states of {nqn}:")?;
                if to.is_empty() {
                    return f.write_str(" all optimized");
                }
                to.iter().try_for_each(|one| {
                    let listener =
                        one.listener.as_ref().map_or_else(|| "all listeners".to_owned(), ToString::to_string);
                    write!(f, " group {} through {listener} {};", one.group, ana_state_name(one.state))
                })
            }
            Self::AnaGroup(nqn, nsid, from, to) => write!(f, "~ namespace {nsid} of {nqn}: ANA group {from} -> {to}"),
            Self::AddReferral(referral) => write!(f, "+ referral to {}", referral.address),
            Self::RemoveReferral(referral) => write!(f, "- referral to {}", referral.address),
            Self::AddListener(listener) => write!(f, "+ listener {listener}"),
            Self::RemoveListener(listener) => write!(f, "- listener {listener}"),
        }
    }
}

fn shown(limits: &Limits) -> String {
    let Limits { iops, bandwidth, read_bandwidth, write_bandwidth } = *limits;
    let bytes = |what: &str, rate| (rate != 0).then(|| format!("{what} {}/s", Bytes(rate)));
    let commands = (iops != 0).then(|| format!("{iops} commands/s"));
    let parts = [commands, bytes("all", bandwidth), bytes("read", read_bandwidth), bytes("written", write_bandwidth)];
    let parts: Vec<String> = parts.into_iter().flatten().collect();
    if parts.is_empty() { "no limit".into() } else { format!("at most {}", parts.join(", ")) }
}

fn source(spec: &NamespaceSpec) -> String {
    match &spec.backend.source {
        Source::File { path, .. } => format!("file {}", path.display()),
        Source::Device { path } => format!("device {}", path.display()),
        Source::Memory { size } => format!("memory {}", Bytes(*size)),
        Source::Null { size } => format!("null {}", Bytes(*size)),
    }
}

/// The steps from one configuration to another, in the order of [`arrange`].
///
/// # Errors
/// Something differs that only a restart changes.
pub fn plan(old: &Config, new: &Config) -> Result<Vec<Change>, Failure> {
    check_options(&old.options, &new.options)?;
    let (mut gone, mut come) = (Vec::new(), Vec::new());
    for before in &old.subsystems {
        match new.subsystems.iter().find(|after| after.nqn == before.nqn) {
            Some(after) if (&before.serial, &before.model) == (&after.serial, &after.model) => {
                differ(before, after, &mut gone, &mut come);
            }
            _ => gone.push(Change::RemoveSubsystem(before.clone())),
        }
    }
    for after in &new.subsystems {
        let removed = |change: &Change| matches!(change, Change::RemoveSubsystem(spec) if spec.nqn == after.nqn);
        let known = old.subsystems.iter().any(|before| before.nqn == after.nqn);
        if !known || gone.iter().any(removed) {
            come.push(Change::AddSubsystem(after.clone()));
        }
    }
    let left = old.referrals.iter().filter(|one| !new.referrals.contains(one));
    gone.extend(left.cloned().map(Change::RemoveReferral));
    let new_ones = new.referrals.iter().filter(|one| !old.referrals.contains(one));
    come.extend(new_ones.cloned().map(Change::AddReferral));
    let (before, after) = (listeners(old), listeners(new));
    let missing = |all: &[ListenAddress], one: &ListenAddress| !all.iter().any(|other| same_listener(other, one));
    gone.extend(before.iter().filter(|one| missing(&after, one)).cloned().map(Change::RemoveListener));
    // ANA states may name a listener.
    gone.extend(after.iter().filter(|one| missing(&before, one)).cloned().map(Change::AddListener));
    gone.append(&mut come);
    arrange(&mut gone);
    Ok(gone)
}

/// What can fail comes first, and what hosts cannot get over comes last: listeners, what has to go for something to come in its
/// place (an NSID, a file, an identifier may move), what comes, what changes, hosts that go (their controllers do not come back),
/// what is no longer asked of them, and then what merely goes.
pub(super) fn arrange(changes: &mut [Change]) {
    let come: Vec<Change> = changes.iter().filter(|change| change.adds()).cloned().collect();
    changes.sort_by_key(|change| match change {
        Change::RemoveListener(_) | Change::AddListener(_) => 0,
        change if change.removes() && come.iter().any(|one| takes_place(one, change)) => 1,
        change if change.adds() => 2,
        change if change.removes() => 6,
        Change::RemoveHost(..) | Change::AllowAnyHost(_, false) => 4,
        Change::Host(_, _, to) if to.dhchap_key.is_none() => 5,
        _ => 3,
    });
}

/// Whether what comes can only come when the other is gone.
fn takes_place(come: &Change, gone: &Change) -> bool {
    let ((new_nqn, new), (old_nqn, old)) = (come.namespaces(), gone.namespaces());
    let subsystem = matches!(gone, Change::RemoveSubsystem(_)) && matches!(come, Change::AddSubsystem(_));
    let shares = |a: &NamespaceSpec, b: &NamespaceSpec| {
        let identifier = a.configured_uuid.is_some() && a.configured_uuid == b.configured_uuid
            || a.configured_nguid.is_some() && a.configured_nguid == b.configured_nguid
            || a.eui64 != [0; 8] && a.eui64 == b.eui64;
        identifier || (new_nqn == old_nqn && a.nsid == b.nsid) || a.backend.source.is_same(&b.backend.source)
    };
    (subsystem && new_nqn == old_nqn) || new.iter().any(|a| old.iter().any(|b| shares(a, b)))
}

/// What differs inside of a subsystem that stays.
fn differ(before: &SubsystemSpec, after: &SubsystemSpec, gone: &mut Vec<Change>, come: &mut Vec<Change>) {
    let nqn = &before.nqn;
    let kept = |all: &[NamespaceSpec], one: &NamespaceSpec| all.iter().any(|other| same_namespace(other, one));
    let left = before.namespaces.iter().filter(|one| !kept(&after.namespaces, one));
    gone.extend(left.map(|one| Change::RemoveNamespace(nqn.clone(), one.clone())));
    let new = after.namespaces.iter().filter(|one| !kept(&before.namespaces, one));
    come.extend(new.map(|one| Change::AddNamespace(nqn.clone(), one.clone())));
    for after in &after.namespaces {
        let same = before.namespaces.iter().find(|before| same_namespace(before, after));
        let Some(before) = same else { continue };
        if before.ana_group != after.ana_group {
            come.push(Change::AnaGroup(nqn.clone(), after.nsid, before.ana_group, after.ana_group));
        }
        if before.hosts != after.hosts {
            let (from, to) = (before.hosts.clone(), after.hosts.clone());
            come.push(Change::NamespaceHosts(nqn.clone(), after.nsid, from, to));
        }
        if before.limits != after.limits {
            come.push(Change::NamespaceLimits(nqn.clone(), after.nsid, before.limits, after.limits));
        }
    }
    if before.admission != after.admission {
        come.push(Change::Admission(nqn.clone(), before.admission, after.admission));
    }
    if before.ana != after.ana {
        come.push(Change::Ana(nqn.clone(), before.ana.clone(), after.ana.clone()));
    }
    // What is asked of a host holds from before it may connect until after it may not.
    let mut relaxed = Vec::new();
    let mut named: Vec<&String> = before.host_specs.iter().chain(&after.host_specs).map(|one| &one.nqn).collect();
    named.sort_unstable();
    named.dedup();
    for host in named {
        let (from, to) = (rules(before, host), rules(after, host));
        if from != to {
            let list = if to.dhchap_key.is_some() { &mut *come } else { &mut relaxed };
            list.push(Change::Host(nqn.clone(), from, to));
        }
    }
    // Hosts that stay must be on the list before "any" goes, and hosts that go are refused after it went.
    let new = after.hosts.iter().filter(|host| !before.hosts.contains(host));
    come.extend(new.map(|host| Change::AllowHost(nqn.clone(), host.clone())));
    if before.allow_any_host != after.allow_any_host {
        come.push(Change::AllowAnyHost(nqn.clone(), after.allow_any_host));
    }
    let left = before.hosts.iter().filter(|host| !after.hosts.contains(host));
    come.extend(left.map(|host| Change::RemoveHost(nqn.clone(), host.clone())));
    come.append(&mut relaxed);
}

/// What a subsystem asks of a host, whatever its place in the file.
fn rules(subsystem: &SubsystemSpec, host: &str) -> HostSpec {
    let found = subsystem.host_specs.iter().find(|one| one.nqn == *host);
    HostSpec { line: None, ..found.cloned().unwrap_or_else(|| HostSpec::new(host)) }
}

/// Secrets that lie in the same files as before and are not what the target asks for: the files were written since.
///
/// # Errors
/// A file cannot be read, or holds no secret.
pub(super) fn renewed(target: &Target, old: &Config, new: &Config) -> Result<Vec<Change>, Failure> {
    let mut changes = Vec::new();
    for after in &new.subsystems {
        let Some(before) = old.subsystems.iter().find(|before| before.nqn == after.nqn) else { continue };
        for host in &after.host_specs {
            let wanted = rules(after, &host.nqn);
            if wanted.dhchap_key.is_none() || wanted != rules(before, &host.nqn) {
                continue;
            }
            let (from, to) = (target.host_auth(&after.nqn, &host.nqn)?, host.auth()?);
            if from != to {
                changes.push(Change::Secrets(after.nqn.clone(), host.nqn.clone(), from, to));
            }
        }
    }
    Ok(changes)
}

/// Places in a file do not matter, and what can change while it is served.
fn same_namespace(a: &NamespaceSpec, b: &NamespaceSpec) -> bool {
    let bare = |one: &NamespaceSpec| {
        let limits = Limits::default();
        NamespaceSpec { line: None, ana_group: 1, hosts: None, limits, ..one.clone() }
    };
    bare(a) == bare(b)
}

fn same_listener(a: &ListenAddress, b: &ListenAddress) -> bool {
    ListenAddress { line: None, ..a.clone() } == ListenAddress { line: None, ..b.clone() }
}

fn listeners(config: &Config) -> Vec<ListenAddress> {
    if config.listeners.is_empty() { vec![ListenAddress::any()] } else { config.listeners.clone() }
}

/// What is logged may change; everything else is laid out at the start.
fn check_options(old: &Options, new: &Options) -> Result<(), Failure> {
    // These change while it runs.
    let rest = |options: &Options| Options { log: String::new(), histograms: false, ..options.clone() };
    if rest(old) == rest(new) {
        return Ok(());
    }
    let differs = [
        ("provider", old.provider != new.provider),
        ("reactors", old.reactors != new.reactors),
        ("io_queues", old.io_queues != new.io_queues),
        ("queue_depth", old.queue_depth != new.queue_depth),
        ("in_capsule_data", old.in_capsule_data != new.in_capsule_data),
        ("mdts", old.mdts != new.mdts),
        ("pool_size", old.pool_size != new.pool_size),
        ("receive_slots", old.receive_slots != new.receive_slots),
        ("poll", old.poll != new.poll),
        ("subsystem_reset", old.subsystem_reset != new.subsystem_reset),
        ("connect_timeout", old.connect_timeout != new.connect_timeout),
        ("retry_delay", old.retry_delay != new.retry_delay),
        ("discovery_nqn", old.discovery_nqn != new.discovery_nqn),
    ];
    let named: Vec<&str> = differs.iter().filter(|(_, differs)| *differs).map(|(name, _)| *name).collect();
    let object = if named.is_empty() { "options".to_owned() } else { format!("options.{}", named.join(", options.")) };
    Err(Failure::new(object, "cannot change while the target runs", "start the target again with the new file"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(subsystems: &str, rest: &str) -> Config {
        let text = format!("{subsystems}\n{rest}");
        Config::parse(&text, "test").unwrap_or_else(|error| panic!("{error}\n{text}"))
    }

    fn subsystem(name: &str, keys: &str, namespaces: &[&str]) -> String {
        let mut text = format!("[[subsystem]]\nnqn = \"nqn.2024-01.io.example:{name}\"\n{keys}\n");
        for namespace in namespaces {
            text += &format!("[[subsystem.namespace]]\n{namespace}\n");
        }
        text
    }

    fn steps(old: &Config, new: &Config) -> Vec<String> {
        plan(old, new).unwrap().iter().map(ToString::to_string).collect()
    }

    #[test]
    fn ana_changes_leave_the_namespace_where_it_is() {
        let ana = |group: u32, state: &str| format!("[[subsystem.ana]]\ngroup = {group}\nstate = \"{state}\"");
        let old = config(&subsystem("a", &ana(2, "inaccessible"), &["null = \"1G\""]), "");
        let new = config(&subsystem("a", &ana(3, "non-optimized"), &["null = \"1G\"\nana_group = 2"]), "");
        let nqn = "nqn.2024-01.io.example:a";
        let expected = [
            format!("~ namespace 1 of {nqn}: ANA group 1 -> 2"),
            format!("~ ANA states of {nqn}: group 3 through all listeners non-optimized;"),
        ];
        assert_eq!(steps(&old, &new), expected);
        let back: Vec<Change> = plan(&old, &new).unwrap().iter().map(Change::inverse).collect();
        assert_eq!(back.iter().rev().cloned().collect::<Vec<_>>().len(), plan(&new, &old).unwrap().len());
        assert!(plan(&new, &old).unwrap().iter().all(|change| back.contains(change)));
    }

    #[test]
    fn authentication_is_asked_before_a_host_may_connect_and_until_it_may_not() {
        let host = "[[subsystem.host]]\nnqn = \"nqn.h\"\ndhchap_key = \"/k\"";
        let old = config(&subsystem("a", "hosts = []", &["null = \"1G\""]), "");
        let new = config(&subsystem("a", host, &["null = \"1G\""]), "");
        let nqn = "nqn.2024-01.io.example:a";
        let expected = [format!("~ host nqn.h of {nqn}: authentication"), format!("+ host nqn.h of {nqn}")];
        assert_eq!(steps(&old, &new), expected);
        let expected = [format!("- host nqn.h of {nqn}"), format!("~ host nqn.h of {nqn}: no authentication")];
        assert_eq!(steps(&new, &old), expected);
    }

    #[test]
    fn nothing_differs_from_itself() {
        let one = config(&subsystem("a", "", &["null = \"1G\"", "file = \"/x\""]), "");
        let moved = config(&format!("\n\n{}", subsystem("a", "", &["null = \"1G\"", "file = \"/x\""])), "");
        assert!(steps(&one, &moved).is_empty());
        let said =
            config(&subsystem("a", "", &["null = \"1G\"", "file = \"/x\""]), "[[listener]]\naddress = \"0.0.0.0\"");
        assert!(steps(&one, &said).is_empty(), "the default listener, spelt out");
    }

    #[test]
    fn what_goes_comes_last_but_where_something_takes_its_place_and_the_way_back_is_the_inverse() {
        let old = config(
            &(subsystem("a", "", &["null = \"1G\"", "file = \"/x\""]) + &subsystem("b", "", &["null = \"1G\""])),
            "[[listener]]\naddress = \"192.0.2.1\"",
        );
        let new = config(
            &(subsystem("a", "", &["null = \"1G\""]) + &subsystem("c", "", &["file = \"/x\""])),
            "[[listener]]\naddress = \"192.0.2.2\"",
        );
        let changes = plan(&old, &new).unwrap();
        assert_eq!(
            steps(&old, &new),
            [
                "- listener 192.0.2.1:4420",
                "+ listener 192.0.2.2:4420",
                "- namespace 2 of nqn.2024-01.io.example:a: file /x",
                "+ subsystem nqn.2024-01.io.example:c (1 namespaces)",
                "- subsystem nqn.2024-01.io.example:b (1 namespaces)",
            ]
        );
        for change in &changes {
            assert_eq!(change.inverse().inverse(), *change);
        }
    }

    #[test]
    fn hosts_that_stay_are_never_without_a_right() {
        let any = config(&subsystem("a", "", &["null = \"1G\""]), "");
        let listed = config(&subsystem("a", "hosts = [\"nqn.h1\", \"nqn.h2\"]", &["null = \"1G\""]), "");
        let fewer = config(&subsystem("a", "hosts = [\"nqn.h2\"]", &["null = \"1G\""]), "");
        let nqn = "nqn.2024-01.io.example:a";
        assert_eq!(
            steps(&any, &listed),
            [format!("+ host nqn.h1 of {nqn}"), format!("+ host nqn.h2 of {nqn}"), format!("- any host of {nqn}")]
        );
        assert_eq!(steps(&listed, &fewer), [format!("- host nqn.h1 of {nqn}")]);
        assert_eq!(steps(&fewer, &any), [format!("+ any host of {nqn}"), format!("- host nqn.h2 of {nqn}")]);
    }

    #[test]
    fn hosts_go_after_everything_that_can_fail_in_any_subsystem() {
        let guarded = "[[subsystem.host]]\nnqn = \"nqn.h\"\ndhchap_key = \"/k\"";
        let ana = "[[subsystem.ana]]\ngroup = 2\nstate = \"inaccessible\"\nlistener = \"192.0.2.1\"";
        let null = ["null = \"1G\""];
        let old = subsystem("a", guarded, &null) + &subsystem("b", "", &null) + &subsystem("c", "", &null);
        let new =
            subsystem("a", "hosts = []", &null) + &subsystem("b", "hosts = []", &null) + &subsystem("c", ana, &null);
        let name = |name: &str| format!("nqn.2024-01.io.example:{name}");
        let expected = [
            format!("~ ANA states of {}: group 2 through 192.0.2.1:4420 inaccessible;", name("c")),
            format!("- host nqn.h of {}", name("a")),
            format!("- any host of {}", name("b")),
            format!("~ host nqn.h of {}: no authentication", name("a")),
        ];
        let listener = "[[listener]]\naddress = \"192.0.2.1\"";
        assert_eq!(steps(&config(&old, listener), &config(&new, listener)), expected);
    }

    #[test]
    fn what_only_a_restart_changes_is_refused_by_name() {
        let one = subsystem("a", "", &["null = \"1G\""]);
        let old = config(&one, "");
        let error = plan(&old, &config(&one, "[options]\nqueue_depth = 64\npoll = true")).unwrap_err();
        assert_eq!(error.object, "options.queue_depth, options.poll");
        assert!(steps(&old, &config(&one, "[options]\nlog = \"debug\"")).is_empty());
    }
}
