//! A configuration in the making: what other targets' forms have in common, and our text of it.

use std::fmt::Write as _;

/// A value with the path that it came from.
#[derive(Clone, Debug)]
pub(super) struct From<T> {
    pub(super) value: T,
    pub(super) path: String,
}

impl<T> From<T> {
    pub(super) fn new(value: T, path: impl Into<String>) -> Self {
        Self { value, path: path.into() }
    }
}

#[derive(Debug, Default)]
pub(super) struct Draft {
    pub(super) subsystems: Vec<Subsystem>,
    pub(super) listeners: Vec<From<String>>,
    pub(super) referrals: Vec<From<String>>,
    /// Keys of `[options]`.
    pub(super) options: Vec<(&'static str, From<toml::Value>)>,
}

#[derive(Debug, Default)]
pub(super) struct Subsystem {
    pub(super) path: String,
    pub(super) nqn: String,
    pub(super) serial: Option<From<String>>,
    pub(super) model: Option<From<String>>,
    pub(super) allow_any_host: bool,
    pub(super) hosts: Vec<Host>,
    pub(super) namespaces: Vec<Namespace>,
    pub(super) ana: Vec<Ana>,
}

/// A host that may connect; with the files of its secrets if it has to authenticate.
#[derive(Debug)]
pub(super) struct Host {
    pub(super) nqn: From<String>,
    pub(super) key: Option<From<String>>,
    pub(super) controller_key: Option<From<String>>,
}

#[derive(Debug)]
pub(super) struct Ana {
    pub(super) path: String,
    pub(super) group: i64,
    pub(super) listener: String,
    pub(super) state: String,
}

#[derive(Debug)]
pub(super) struct Namespace {
    pub(super) path: String,
    pub(super) nsid: Option<From<i64>>,
    pub(super) source: Source,
    pub(super) block_size: Option<From<i64>>,
    pub(super) read_only: bool,
    pub(super) uuid: Option<From<String>>,
    pub(super) nguid: Option<From<String>>,
    pub(super) eui64: Option<From<String>>,
    pub(super) ana_group: Option<From<i64>>,
    /// Those that see it; `None`: all.
    pub(super) hosts: Option<Vec<String>>,
    /// Keys of its `limits`.
    pub(super) limits: Vec<(&'static str, i64)>,
}

#[derive(Clone, Debug)]
pub(super) enum Source {
    /// A file or a device.
    Path(From<String>),
    Memory(From<i64>),
    Null(From<i64>),
}

impl Draft {
    /// An option that the other target has in several places, and this one has once.
    pub(super) fn one_option(
        &mut self,
        key: &'static str,
        values: &[From<i64>],
        differs: &str,
        report: &mut super::Report,
    ) {
        let Some(first) = values.first() else { return };
        for other in values.iter().filter(|other| other.value != first.value) {
            report.note(&other.path, format!("{differs}; {} of {} is used", first.value, first.path));
        }
        self.options.push((key, From::new(first.value.into(), &first.path)));
    }

    /// The text, and for each of its lines the path that it came from.
    pub(super) fn to_toml(&self) -> (String, Vec<String>) {
        let mut out = Lines::default();
        for subsystem in &self.subsystems {
            out.subsystem(subsystem);
        }
        for listener in &self.listeners {
            out.line("[[listener]]", &listener.path);
            out.key("address", &*listener.value, &listener.path);
        }
        for referral in &self.referrals {
            out.line("[[referral]]", &referral.path);
            out.key("address", &*referral.value, &referral.path);
        }
        if !self.options.is_empty() {
            out.line("[options]", "");
        }
        for (key, value) in &self.options {
            out.key(key, value.value.clone(), &value.path);
        }
        (out.text, out.paths)
    }
}

#[derive(Default)]
struct Lines {
    text: String,
    paths: Vec<String>,
}

impl Lines {
    fn line(&mut self, line: &str, path: &str) {
        if line.starts_with('[') && !self.text.is_empty() {
            self.text.push('\n');
            self.paths.push(String::new());
        }
        self.text.push_str(line);
        self.text.push('\n');
        self.paths.push(path.to_owned());
    }

    fn key(&mut self, key: &str, value: impl Into<toml::Value>, path: &str) {
        let mut value: toml::Value = value.into();
        if let toml::Value::String(text) = &mut value {
            // One line each, so that a line has one path; what it was is refused further on.
            *text = text.replace(|c: char| c.is_control(), "\u{fffd}");
        }
        let mut line = String::new();
        let _ = write!(line, "{key} = {value}");
        self.line(&line, path);
    }

    fn some<T: Clone + Into<toml::Value>>(&mut self, key: &str, value: Option<&From<T>>) {
        if let Some(value) = value {
            self.key(key, value.value.clone(), &value.path);
        }
    }

    fn subsystem(&mut self, one: &Subsystem) {
        self.line("[[subsystem]]", &one.path);
        self.key("nqn", one.nqn.clone(), &one.path);
        self.some("serial", one.serial.as_ref());
        self.some("model", one.model.as_ref());
        let (keyed, plain): (Vec<&Host>, Vec<&Host>) = one.hosts.iter().partition(|host| host.key.is_some());
        if one.allow_any_host {
            self.key("allow_any_host", true, &one.path);
        } else {
            let hosts: Vec<toml::Value> = plain.iter().map(|host| host.nqn.value.clone().into()).collect();
            let path = plain.first().map_or(&one.path, |host| &host.nqn.path);
            self.key("hosts", hosts, path);
        }
        for host in keyed {
            self.line("[[subsystem.host]]", &host.nqn.path);
            self.key("nqn", host.nqn.value.clone(), &host.nqn.path);
            self.some("dhchap_key", host.key.as_ref());
            self.some("dhchap_controller_key", host.controller_key.as_ref());
        }
        for ana in &one.ana {
            self.line("[[subsystem.ana]]", &ana.path);
            self.key("group", ana.group, &ana.path);
            self.key("listener", ana.listener.clone(), &ana.path);
            self.key("state", ana.state.clone(), &ana.path);
        }
        for namespace in &one.namespaces {
            self.namespace(namespace);
        }
    }

    fn namespace(&mut self, one: &Namespace) {
        self.line("[[subsystem.namespace]]", &one.path);
        self.some("nsid", one.nsid.as_ref());
        match &one.source {
            Source::Path(path) if is_device(&path.value) => self.key("device", path.value.clone(), &path.path),
            Source::Path(path) => self.key("file", path.value.clone(), &path.path),
            Source::Memory(size) => self.key("memory", size.value, &size.path),
            Source::Null(size) => self.key("null", size.value, &size.path),
        }
        self.some("block_size", one.block_size.as_ref());
        if one.read_only {
            self.key("read_only", true, &one.path);
        }
        self.some("uuid", one.uuid.as_ref());
        self.some("nguid", one.nguid.as_ref());
        self.some("eui64", one.eui64.as_ref());
        self.some("ana_group", one.ana_group.as_ref());
        if let Some(hosts) = &one.hosts {
            let hosts: Vec<toml::Value> = hosts.iter().map(|host| host.clone().into()).collect();
            self.key("hosts", hosts, &one.path);
        }
        if !one.limits.is_empty() {
            let limits: toml::Table =
                one.limits.iter().map(|(key, rate)| ((*key).to_owned(), (*rate).into())).collect();
            self.key("limits", limits, &one.path);
        }
    }
}

/// Other targets do not say whether a path is a device; below /dev it is one, but for shared memory.
fn is_device(path: &str) -> bool {
    path.starts_with("/dev/") && !path.starts_with("/dev/shm/")
}

/// An address as a listener has it.
pub(super) fn address(ip: &str, port: &str) -> String {
    if ip.contains(':') { format!("[{ip}]:{port}") } else { format!("{ip}:{port}") }
}

/// An identifier that is all zero stands for none.
pub(super) fn non_zero(id: Option<From<String>>) -> Option<From<String>> {
    id.filter(|id| id.value.bytes().any(|byte| !matches!(byte, b'0' | b'-')))
}
