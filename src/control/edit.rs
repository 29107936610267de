//! A change asked for, as an edit of the configuration's table. What comes out is checked as a file would be.

use serde_json::{Map, Value as Json};
use toml::{Table, Value};

use super::protocol::{Failure, Request};
use crate::config::{Config, ConfigError, Problem};

/// The configuration after a request; `None` for requests that change none.
pub(super) fn edited(config: &Config, request: &Request) -> Result<Option<Config>, Failure> {
    let text = config.to_toml();
    let mut table: Table = text
        .parse()
        .map_err(|error| Failure::new("running configuration", error, "use `farside ctl apply` with a file"))?;
    match request {
        Request::AddSubsystem { subsystem } => list(&mut table, "subsystem").push(from_json(subsystem)?),
        Request::RemoveSubsystem { nqn } => {
            find_subsystem(&mut table, nqn)?;
            list(&mut table, "subsystem").retain(|one| !has(one, "nqn", nqn));
        }
        Request::AddNamespace { nqn, namespace } => {
            let mut namespace = from_json(namespace)?;
            let namespaces = list(find_subsystem(&mut table, nqn)?, "namespace");
            if let Value::Table(keys) = &mut namespace
                && !keys.contains_key("nsid")
            {
                let taken: Vec<i64> = namespaces.iter().filter_map(|one| one.get("nsid")?.as_integer()).collect();
                let free = (1..).find(|nsid| !taken.contains(nsid)).unwrap_or(1);
                keys.insert("nsid".into(), free.into());
            }
            namespaces.push(namespace);
        }
        Request::RemoveNamespace { nqn, nsid } => {
            let namespaces = list(find_subsystem(&mut table, nqn)?, "namespace");
            let before = namespaces.len();
            namespaces.retain(|one| one.get("nsid").and_then(Value::as_integer) != Some(i64::from(*nsid)));
            if namespaces.len() == before {
                return Err(Failure::new(
                    format!("namespace {nsid} of {nqn}"),
                    "is not there",
                    "see `farside ctl status`",
                ));
            }
        }
        Request::AllowHost { nqn, host } => {
            let subsystem = find_subsystem(&mut table, nqn)?;
            if config.subsystems.iter().any(|one| one.nqn == *nqn && one.allow_any_host) {
                let remedy = "turn that off first: `farside ctl allow-any-host NQN off`";
                return Err(Failure::new(format!("host {host} of {nqn}"), "any host may connect already", remedy));
            }
            list(subsystem, "hosts").push(host.as_str().into());
        }
        Request::RemoveHost { nqn, host } => {
            let subsystem = find_subsystem(&mut table, nqn)?;
            // One with rules of its own goes with them. The list stays, if empty: without one any host could connect.
            let ruled = list(subsystem, "host");
            let mut before = ruled.len();
            ruled.retain(|one| !has(one, "nqn", host));
            let mut after = ruled.len();
            if after == 0 {
                subsystem.remove("host");
            }
            let hosts = list(subsystem, "hosts");
            before += hosts.len();
            hosts.retain(|one| one.as_str() != Some(host));
            after += hosts.len();
            if after == before {
                let (object, remedy) = (format!("host {host} of {nqn}"), "see `farside ctl status`");
                return Err(Failure::new(object, "is not on the list", remedy));
            }
        }
        Request::AllowAnyHost { nqn, allow } => {
            let subsystem = find_subsystem(&mut table, nqn)?;
            if *allow {
                subsystem.remove("hosts");
                subsystem.insert("allow_any_host".into(), true.into());
            } else {
                subsystem.remove("allow_any_host");
                list(subsystem, "hosts");
            }
        }
        Request::AddListener { listener } => {
            let any = config.listeners.is_empty();
            let listeners = list(&mut table, "listener");
            if any {
                listeners.push(Value::Table([("address".to_owned(), "0.0.0.0:4420".into())].into_iter().collect()));
            }
            listeners.push(from_json(listener)?);
        }
        Request::RemoveListener { address } => {
            let wanted = address.parse::<crate::config::ListenAddress>();
            let wanted =
                wanted.map_err(|reason| Failure::new("listener", reason, "name it as `farside ctl config` does"))?;
            if !config.listeners.iter().any(|one| one.to_string() == wanted.to_string()) {
                return Err(Failure::new(format!("listener {wanted}"), "is not there", "see `farside ctl config`"));
            }
            list(&mut table, "listener").retain(|one| !has(one, "address", &wanted.to_string()));
            if list(&mut table, "listener").is_empty() {
                let remedy = "add the other one first, or remove the subsystems";
                return Err(Failure::new(format!("listener {wanted}"), "is the last one", remedy));
            }
        }
        _ => return Ok(None),
    }
    let edited = Config::parse_running(&table.to_string(), &subject(request));
    // Lines are of a text that nobody sees.
    Ok(Some(edited.map_err(|ConfigError(problems)| {
        Failure::from(problems.into_iter().map(|one| Problem { line: None, ..one }).collect::<Vec<_>>())
    })?))
}

/// What a request is about.
fn subject(request: &Request) -> String {
    match request {
        Request::AddSubsystem { .. } => "new subsystem".into(),
        Request::AddNamespace { nqn, .. } => format!("new namespace of {nqn}"),
        Request::AllowHost { nqn, host } => format!("host {host} of {nqn}"),
        Request::AddListener { .. } => "new listener".into(),
        _ => "configuration after that".into(),
    }
}

/// An array of the table, made when it is not there.
fn list<'a>(table: &'a mut Table, key: &str) -> &'a mut Vec<Value> {
    let entry = table.entry(key.to_owned()).or_insert_with(|| Value::Array(Vec::new()));
    if !entry.is_array() {
        *entry = Value::Array(Vec::new());
    }
    entry.as_array_mut().expect("made an array above")
}

fn find_subsystem<'a>(table: &'a mut Table, nqn: &str) -> Result<&'a mut Table, Failure> {
    let found = list(table, "subsystem").iter_mut().find(|one| has(one, "nqn", nqn));
    found.and_then(Value::as_table_mut).ok_or_else(|| {
        Failure::new(format!("subsystem {nqn}"), "is not served", "see `farside ctl status` for those that are")
    })
}

fn has(value: &Value, key: &str, text: &str) -> bool {
    value.get(key).and_then(Value::as_str) == Some(text)
}

fn from_json(object: &Map<String, Json>) -> Result<Value, Failure> {
    Value::try_from(object).map_err(|error| Failure::new("request", error, "leave keys without a value out"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const NQN: &str = "nqn.2024-01.io.example:x";

    fn start() -> Config {
        let text = format!("[[subsystem]]\nnqn = \"{NQN}\"\n[[subsystem.namespace]]\nnull = \"1G\"\n");
        Config::parse(&text, "test").unwrap()
    }

    fn edit(config: &Config, request: Json) -> Result<Config, String> {
        let request: Request = serde_json::from_value(request).unwrap();
        edited(config, &request).map(Option::unwrap).map_err(|failure| failure.to_string())
    }

    #[test]
    fn edits_are_what_they_say() {
        let one = start();
        let two = edit(&one, json!({"op": "add_namespace", "nqn": NQN, "namespace": {"memory": "1M"}})).unwrap();
        assert_eq!(two.subsystems[0].namespaces[1].nsid, 2);
        let gone = edit(&two, json!({"op": "remove_namespace", "nqn": NQN, "nsid": 1})).unwrap();
        let again = edit(&gone, json!({"op": "add_namespace", "nqn": NQN, "namespace": {"null": 4096}})).unwrap();
        let nsids: Vec<u32> = again.subsystems[0].namespaces.iter().map(|one| one.nsid).collect();
        assert_eq!(nsids, [2, 1], "the smallest free one");
        let none = edit(&gone, json!({"op": "remove_namespace", "nqn": NQN, "nsid": 2})).unwrap();
        assert!(none.subsystems[0].namespaces.is_empty());
        let empty = edit(&none, json!({"op": "remove_subsystem", "nqn": NQN})).unwrap();
        assert!(empty.subsystems.is_empty());
        let listed = edit(&one, json!({"op": "allow_any_host", "nqn": NQN, "allow": false})).unwrap();
        assert!(!listed.subsystems[0].allow_any_host && listed.subsystems[0].hosts.is_empty());
        let host = edit(&listed, json!({"op": "allow_host", "nqn": NQN, "host": "nqn.h"})).unwrap();
        assert_eq!(host.subsystems[0].hosts, ["nqn.h"]);
        let any = edit(&host, json!({"op": "allow_any_host", "nqn": NQN, "allow": true})).unwrap();
        assert!(any.subsystems[0].allow_any_host && any.subsystems[0].hosts.is_empty());
        let more = edit(&one, json!({"op": "add_listener", "listener": {"address": "192.0.2.1", "tos": 104}})).unwrap();
        let shown: Vec<String> = more.listeners.iter().map(ToString::to_string).collect();
        assert_eq!(shown, ["0.0.0.0:4420", "192.0.2.1:4420"], "the default one stays");
        let fewer = edit(&more, json!({"op": "remove_listener", "address": "0.0.0.0"})).unwrap();
        assert_eq!(fewer.listeners.len(), 1);
    }

    #[test]
    fn hosts_with_rules_of_their_own_come_and_go_like_others() {
        let ruled = |keys: &str| {
            let text = format!(
                "[[subsystem]]\nnqn = \"{NQN}\"\n{keys}\n[[subsystem.host]]\nnqn = \"nqn.ruled\"\nlimits = {{ iops = 9 }}\n\
                 [[subsystem.namespace]]\nnull = \"1G\"\n"
            );
            Config::parse(&text, "test").unwrap()
        };
        let access = |config: &Config| {
            let subsystem = &config.subsystems[0];
            let ruled = subsystem.host_specs.iter().map(|one| one.nqn.clone()).collect::<Vec<_>>();
            (subsystem.allow_any_host, subsystem.hosts.clone(), ruled)
        };
        let (plain, named) = ("nqn.plain".to_owned(), "nqn.ruled".to_owned());
        let any = |allow: bool| json!({"op": "allow_any_host", "nqn": NQN, "allow": allow});

        let open = ruled("allow_any_host = true");
        let closed = edit(&open, any(false)).unwrap();
        assert_eq!(access(&closed), (false, vec![named.clone()], vec![named.clone()]), "nobody else");
        let open = edit(&ruled("hosts = [\"nqn.plain\"]"), any(true)).unwrap();
        assert_eq!(access(&open), (true, vec![named.clone()], vec![named.clone()]), "everybody, and one by its rules");

        let request = json!({"op": "allow_host", "nqn": NQN, "host": plain});
        let both = edit(&ruled(""), request.clone()).unwrap();
        assert_eq!(access(&both), (false, vec![plain, named.clone()], vec![named.clone()]));
        assert!(edit(&open, request).unwrap_err().contains("any host"));

        let request = json!({"op": "remove_host", "nqn": NQN, "host": named});
        let nobody = edit(&ruled(""), request.clone()).unwrap();
        assert_eq!(access(&nobody), (false, vec![], vec![]), "the last one gone does not let everybody in");
        assert!(edit(&nobody, request).unwrap_err().contains("not on the list"));
    }

    #[test]
    fn what_is_wrong_is_named() {
        let one = start();
        let other = "nqn.2024-01.io.example:other";
        for (request, says) in [
            (json!({"op": "add_namespace", "nqn": other, "namespace": {"null": "1G"}}), other),
            (json!({"op": "add_namespace", "nqn": NQN, "namespace": {"null": "1G", "nsid": 1}}), "nsid"),
            (json!({"op": "add_namespace", "nqn": NQN, "namespace": {"nul": "1G"}}), "nul"),
            (json!({"op": "add_namespace", "nqn": NQN, "namespace": {"null": "1000"}}), "multiple"),
            (json!({"op": "add_namespace", "nqn": NQN, "namespace": {"null": null}}), "request"),
            (json!({"op": "remove_namespace", "nqn": NQN, "nsid": 9}), "namespace 9"),
            (json!({"op": "add_subsystem", "subsystem": {"nqn": NQN}}), "twice"),
            (json!({"op": "add_subsystem", "subsystem": {"nqn": "x"}}), "nqn."),
            (json!({"op": "remove_subsystem", "nqn": other}), other),
            (json!({"op": "allow_host", "nqn": NQN, "host": "nqn.h"}), "any host"),
            (json!({"op": "remove_host", "nqn": NQN, "host": "nqn.h"}), "not on the list"),
            (json!({"op": "add_listener", "listener": {"address": "nowhere"}}), "nowhere"),
            (json!({"op": "remove_listener", "address": "192.0.2.1"}), "192.0.2.1:4420"),
        ] {
            let error = edit(&one, request.clone()).unwrap_err();
            assert!(error.contains(says), "{request}: {error}");
        }
    }
}
