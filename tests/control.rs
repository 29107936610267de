//! A running target changed through its control socket, with a host of ours on it over the software provider.

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use farside::config::Config;
use farside::control::{Client, ClientError, ControlServer, Manager, MetricsServer, Request};
use farside::host::wire::IdentifyNamespace;
use farside::host::{Host, HostOptions};
use farside::rdma::soft::Soft;
use serde_json::{Value, json};

const NQN: &str = "nqn.2024-01.io.example:kept";

/// An address in 127/8 that nobody else in this process has, and no other process at this time.
fn own_address() -> Ipv4Addr {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let process = std::process::id() % 100;
    Ipv4Addr::new(127, 140 + process as u8, 1, NEXT.fetch_add(1, Ordering::Relaxed) as u8)
}

struct Setup {
    folder: tempfile::TempDir,
    address: Ipv4Addr,
    manager: Arc<Manager>,
    server: Option<ControlServer>,
}

impl Setup {
    fn start() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let address = own_address();
        let text = format!(
            "[[subsystem]]\nnqn = \"{NQN}\"\n[[subsystem.namespace]]\nmemory = \"8M\"\n\
             [[listener]]\naddress = \"{address}:4420\"\n\
             [options]\nprovider = \"soft\"\nreactors = 2\npool_size = \"8M\"\nreceive_slots = 512\n"
        );
        let config = Config::parse(&text, "test").expect("a configuration");
        let target = config.open().expect("opened").start_on(config.options.provider).expect("started");
        let manager = Arc::new(Manager::new(target, config, Some(folder.path().join("saved.toml"))));
        let server = ControlServer::start(&folder.path().join("socket"), Arc::clone(&manager)).expect("a socket");
        Self { folder, address, manager, server: Some(server) }
    }

    fn client(&self) -> Client {
        Client::connect(&self.folder.path().join("socket")).expect("connected")
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn host(&self, nqn: &str) -> Host<Soft> {
        let provider = Arc::new(Soft::new(1).expect("the software provider"));
        let options =
            HostOptions { source: Some(IpAddr::V4(own_address())), reconnect: None, ..HostOptions::default() };
        Host::connect(provider, SocketAddr::new(self.address.into(), 4420), nqn, options).expect("a host")
    }
}

fn ask(client: &mut Client, request: Value) -> Result<Value, String> {
    let request: Request = serde_json::from_value(request).expect("a request");
    client.request(&request).map_err(|error| match error {
        ClientError::Refused(failure) => failure.to_string(),
        other => panic!("{other}"),
    })
}

fn config_of(client: &mut Client) -> String {
    ask(client, json!({"op": "config"})).expect("told").as_str().expect("text").to_owned()
}

/// Writes and reads back until told to stop, and counts. A lost connection ends it: this host does not come back.
fn keep_busy(mut host: Host<Soft>, stop: &AtomicBool, rounds: &AtomicU64) {
    let disk: IdentifyNamespace = host.namespace(1).expect("its namespace");
    let mut round = 0u64;
    while !stop.load(Ordering::Acquire) {
        let bytes: Vec<u8> = (0..16_384u64).map(|at| (at / 3 + round * 7) as u8).collect();
        let offset = round % 400 * 16_384;
        host.write_at(&disk, offset, &bytes).expect("written");
        let mut back = vec![0; bytes.len()];
        host.read_at(&disk, offset, &mut back).expect("read");
        assert!(back == bytes, "round {round}");
        round += 1;
        rounds.store(round, Ordering::Release);
    }
}

#[test]
fn fifty_subsystems_come_and_go_and_an_untouched_host_never_notices() {
    let setup = Setup::start();
    let mut client = setup.client();
    let before = config_of(&mut client);
    let mut many = before.clone();
    for n in 0..50 {
        let file = setup.path(&format!("disk{n}.img"));
        many += &format!(
            "\n[[subsystem]]\nnqn = \"nqn.2024-01.io.example:n{n}\"\n\
             [[subsystem.namespace]]\nfile = \"{}\"\nsize = \"1M\"\n[[subsystem.namespace]]\nnull = \"1G\"\n",
            file.display()
        );
    }
    let (stop, rounds) = (AtomicBool::new(false), AtomicU64::new(0));
    let host = setup.host(NQN);
    std::thread::scope(|scope| {
        let busy = scope.spawn(|| keep_busy(host, &stop, &rounds));
        let dry = ask(&mut client, json!({"op": "apply", "config": many, "dry_run": true})).expect("a plan");
        assert_eq!(dry["changes"].as_array().map(Vec::len), Some(50));
        assert_eq!(config_of(&mut client), before, "a dry run changed something");
        assert!(!setup.path("disk0.img").exists(), "a dry run made a file");
        for _ in 0..2 {
            ask(&mut client, json!({"op": "apply", "config": many})).expect("fifty more");
            let status = ask(&mut client, json!({"op": "status"})).expect("told");
            assert_eq!(status["subsystems"].as_array().map(Vec::len), Some(51));
            let mut other = setup.host("nqn.2024-01.io.example:n49");
            let disk = other.namespace(1).expect("its namespace");
            other.write_at(&disk, 4096, &[0x77; 4096]).expect("written");
            drop(other);
            let seen = rounds.load(Ordering::Acquire);
            ask(&mut client, json!({"op": "apply", "config": before})).expect("and back");
            assert_eq!(config_of(&mut client), before);
            let deadline = Instant::now() + Duration::from_secs(20);
            while rounds.load(Ordering::Acquire) <= seen {
                assert!(!busy.is_finished() && Instant::now() < deadline, "the untouched host stands still");
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        stop.store(true, Ordering::Release);
        busy.join().expect("the untouched host");
    });
    assert_eq!(std::fs::read(setup.path("disk49.img")).expect("the file")[4096..4100], [0x77; 4]);
}

#[test]
fn refused_change_leaves_configuration_and_target_as_they_were() {
    let setup = Setup::start();
    let mut client = setup.client();
    let before = config_of(&mut client);
    let served = setup.manager.target().status();
    std::fs::write(setup.path("good.img"), vec![0; 1 << 20]).expect("a file");
    std::fs::write(setup.path("odd.img"), vec![0; 1000]).expect("a file");
    let good = setup.path("good.img").display().to_string();
    let add = |keys: Value| json!({"op": "add_namespace", "nqn": NQN, "namespace": keys});
    for (request, says) in [
        (add(json!({"file": "/nowhere/disk.img"})), "/nowhere/disk.img"),
        (add(json!({"file": setup.path("odd.img")})), "multiple"),
        (add(json!({"null": "1G", "nsid": 1})), "twice"),
        (add(json!({"null": "1G", "colour": "red"})), "colour"),
        (json!({"op": "remove_namespace", "nqn": NQN, "nsid": 7}), "namespace 7"),
        (json!({"op": "add_listener", "listener": {"address": "192.0.2.1"}}), "no address of this machine"),
        (json!({"op": "apply", "config": "subsystem = 3"}), "subsystem"),
        (
            json!({"op": "apply", "config": before.replace("receive_slots = 512", "receive_slots = 1024")}),
            "receive_slots",
        ),
        (json!({"op": "log", "level": "loud"}), "loud"),
        (json!({"op": "save", "path": "relative"}), "absolute"),
    ] {
        let error = ask(&mut client, request.clone()).expect_err("refused");
        assert!(error.contains(says), "{request}: {error}");
    }
    // The second of two steps fails when it is taken: the first one is taken back. A file that somebody else has locked.
    let locked = setup.path("locked.img");
    std::fs::write(&locked, vec![0; 1 << 20]).expect("a file");
    let other = farside::backend::BackendSpec::new(farside::backend::Source::File { path: locked.clone(), size: None });
    let holder = farside::backend::open(&other).expect("held");
    let two = format!(
        "{before}\n[[subsystem]]\nnqn = \"nqn.2024-01.io.example:first\"\n[[subsystem.namespace]]\nfile = \"{good}\"\n\
         [[subsystem]]\nnqn = \"nqn.2024-01.io.example:second\"\n[[subsystem.namespace]]\nfile = \"{}\"\n",
        locked.display()
    );
    let error = ask(&mut client, json!({"op": "apply", "config": two})).expect_err("refused");
    assert!(error.contains("locked.img"), "{error}");
    assert_eq!(config_of(&mut client), before);
    assert_eq!(setup.manager.target().status(), served);
    drop(holder);
    ask(&mut client, json!({"op": "apply", "config": two})).expect("nobody holds it any more");
}

#[test]
fn each_change_shows_and_is_saved() {
    let setup = Setup::start();
    let mut client = setup.client();
    let file = setup.path("disk.img");
    let keys = json!({"file": file, "size": "1M"});
    ask(&mut client, json!({"op": "add_namespace", "nqn": NQN, "namespace": keys})).expect("added");
    let mut host = setup.host(NQN);
    assert_eq!(host.active_namespaces().expect("a list"), [1, 2]);
    std::fs::OpenOptions::new().write(true).open(&file).expect("the file").set_len(2 << 20).expect("grown");
    let grown = ask(&mut client, json!({"op": "resize_namespace", "nqn": NQN, "nsid": 2})).expect("resized");
    assert_eq!(grown["bytes"], 2 << 20);
    assert_eq!(host.namespace(2).expect("identified").bytes(), 2 << 20);
    ask(&mut client, json!({"op": "allow_any_host", "nqn": NQN, "allow": false})).expect("closed");
    ask(&mut client, json!({"op": "allow_host", "nqn": NQN, "host": "nqn.2014-08.org.example:h"})).expect("allowed");
    // A name that looks mistyped is taken, with a note that is told once.
    let odd = ask(&mut client, json!({"op": "allow_host", "nqn": NQN, "host": "foo"})).expect("allowed");
    assert!(odd["notes"][0].as_str().is_some_and(|note| note.starts_with("host \"foo\" of ")), "{odd}");
    let away = ask(&mut client, json!({"op": "remove_host", "nqn": NQN, "host": "foo"})).expect("removed");
    assert!(away.get("notes").is_none(), "{away}");
    ask(&mut client, json!({"op": "add_listener", "listener": {"address": format!("{}:4421", setup.address)}}))
        .expect("listening");
    let saved = ask(&mut client, json!({"op": "save"})).expect("saved");
    assert_eq!(saved["path"], setup.path("saved.toml").display().to_string());
    let text = std::fs::read_to_string(setup.path("saved.toml")).expect("the file");
    assert_eq!(text, config_of(&mut client));
    let read = Config::parse(&text, "saved").expect("a sound file");
    assert_eq!(read.subsystems[0].hosts, ["nqn.2014-08.org.example:h"]);
    assert_eq!((read.subsystems[0].namespaces.len(), read.listeners.len()), (2, 2));
    assert!(text.contains("size = \"2M\""), "{text}");
    // Saved over itself, to another place, and into a folder that is not there.
    ask(&mut client, json!({"op": "save", "path": setup.path("copy.toml")})).expect("saved");
    assert_eq!(std::fs::read_to_string(setup.path("copy.toml")).expect("the copy"), text);
    assert!(ask(&mut client, json!({"op": "save", "path": "/nowhere/at/all.toml"})).is_err());
    assert!(!setup.path("saved.toml.new").exists());
}

#[test]
fn socket_is_its_owners_alone_and_lives_through_nonsense() {
    let mut setup = Setup::start();
    let path = setup.path("socket");
    assert_eq!(std::fs::metadata(&path).expect("the socket").permissions().mode() & 0o777, 0o600);
    let error = ControlServer::start(&path, Arc::clone(&setup.manager)).expect_err("taken").to_string();
    assert!(error.contains("another target"), "{error}");
    for nonsense in [&b"\n"[..], b"{\n", b"\xff\xfe\x00\n", b"[1,2]\n", b"{\"op\":\"fly\"}\n"] {
        let mut stream = UnixStream::connect(&path).expect("connected");
        stream.write_all(nonsense).expect("sent");
        stream.shutdown(std::net::Shutdown::Write).expect("no more");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("an answer");
        let answer: Value = serde_json::from_str(&answer).expect("JSON");
        assert_eq!(answer["error"]["object"], "request", "{answer}");
    }
    // Those that say nothing, and those that go in the middle, take nothing from others.
    let _silent: Vec<_> = (0..20).map(|_| UnixStream::connect(&path).expect("connected")).collect();
    UnixStream::connect(&path).expect("connected").write_all(b"{\"op\":").expect("sent");
    assert!(ask(&mut setup.client(), json!({"op": "status"})).is_ok());
    drop(setup.server.take());
    assert!(!path.exists(), "the path stays behind");
    // A socket that a killed target left is taken over.
    drop(std::os::unix::net::UnixListener::bind(&path).expect("a leftover"));
    let again = ControlServer::start(&path, Arc::clone(&setup.manager)).expect("taken over");
    assert!(ask(&mut setup.client(), json!({"op": "status"})).is_ok());
    drop(again);
    std::fs::write(&path, "a file").expect("a file");
    assert!(ControlServer::start(&path, Arc::clone(&setup.manager)).is_err(), "took the place of a file");
    assert_eq!(std::fs::read(&path).expect("the file"), b"a file");
}

#[test]
fn metrics_and_status_count_what_a_host_does() {
    let setup = Setup::start();
    let metrics = MetricsServer::start("127.0.0.1:0".parse().expect("an address"), Arc::clone(&setup.manager))
        .expect("an endpoint");
    let mut host = setup.host(NQN);
    let disk = host.namespace(1).expect("its namespace");
    ask(&mut setup.client(), json!({"op": "histograms", "on": true})).expect("on");
    assert!(setup.manager.target().turns(Duration::from_secs(20)), "the reactors know");
    for _ in 0..3 {
        host.write_at(&disk, 0, &[1; 4096]).expect("written");
    }
    assert!(config_of(&mut setup.client()).contains("histograms = true"), "it is saved");
    let get = |path: &str| {
        let mut stream = TcpStream::connect(metrics.address()).expect("connected");
        write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").expect("sent");
        let mut text = String::new();
        stream.read_to_string(&mut text).expect("an answer");
        text
    };
    let text = get("/metrics");
    assert!(text.starts_with("HTTP/1.1 200"), "{text}");
    assert!(text.contains(&format!("farside_namespace_writes_total{{nqn=\"{NQN}\",nsid=\"1\"}} 3\n")), "{text}");
    assert!(text.contains("\nfarside_controllers 1\n"), "{text}");
    let bucket = format!(
        "farside_namespace_latency_seconds_bucket{{nqn=\"{NQN}\",nsid=\"1\",stage=\"backend\",le=\"+Inf\"}} 3\n"
    );
    assert!(text.contains(&bucket), "{text}");
    assert!(text.contains(",stage=\"total\",quantile=\"0.99\"} "), "{text}");
    assert!(text.contains("farside_queues_ended_total{cause=\"keep_alive_expired\"} 0\n"), "{text}");
    let latency = ask(&mut setup.client(), json!({"op": "latency"})).expect("told");
    assert_eq!(latency["namespaces"][0]["stages"]["backend"]["count"], 3, "{latency}");
    let queues: Vec<_> = latency["queues"].as_array().expect("a list").iter().map(|one| one["qid"].as_u64()).collect();
    assert!(queues.contains(&Some(1)), "{latency}");
    assert!(get("/").starts_with("HTTP/1.1 404"));
    let status = ask(&mut setup.client(), json!({"op": "status"})).expect("told");
    assert_eq!(status["controllers"][0]["subnqn"], NQN);
    assert_eq!(status["subsystems"][0]["namespaces"][0]["bytes_written"], 3 * 4096);
    let host_nqn = status["controllers"][0]["hostnqn"].as_str().expect("a name").to_owned();
    let did = |one: &Value| ["reads", "bytes_read", "writes", "bytes_written", "errors"].map(|key| one[key].as_u64());
    let (nothing, three) = ([Some(0); 5], [Some(0), Some(0), Some(3), Some(3 * 4096), Some(0)]);
    let queues = status["controllers"][0]["queues"].as_array().expect("a list");
    let of = |qid: u64| did(queues.iter().find(|one| one["qid"] == qid).expect("a queue"));
    assert_eq!((of(0), of(1)), (nothing, three), "{status}");
    assert_eq!(status["hosts"][0]["hostnqn"], host_nqn.as_str());
    assert_eq!((&status["hosts"][0]["queues"], did(&status["hosts"][0])), (&json!(2), three), "{status}");
    let by_host = format!("farside_host_written_bytes_total{{hostnqn=\"{host_nqn}\"}} {}\n", 3 * 4096);
    assert!(text.contains(&by_host), "{text}");
    assert!(text.contains(&format!("farside_host_errors_total{{hostnqn=\"{host_nqn}\"}} 0\n")), "{text}");
    let gone = ask(&mut setup.client(), json!({"op": "disconnect", "host": host_nqn})).expect("disconnected");
    assert_eq!(gone["disconnected"], 1);
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        let status = ask(&mut setup.client(), json!({"op": "status"})).expect("told");
        let end = &status["disconnects"][0];
        if end["cause"] == "operator" && status["counters"]["queues_ended"]["operator"] == end["queues"] {
            assert_eq!((&end["subnqn"], &end["hostnqn"]), (&json!(NQN), &json!(host_nqn)));
            // What it did stays counted when its queues are gone.
            if status["hosts"][0]["queues"] == 0 {
                assert_eq!(did(&status["hosts"][0]), three, "{status}");
                break;
            }
        }
        assert!(Instant::now() < deadline, "{status}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Secrets as the tools write them.
const SECRETS: [&str; 2] = [
    "DHHC-1:00:BwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwfLJNij:",
    "DHHC-1:00:CQkJCQkJCQkJCQkJCQkJCQkJCQkJCQkJCQkJCQkJCQlGwA0N:",
];

#[test]
fn secrets_are_read_again_when_a_file_is_applied_and_taken_back_when_that_fails() {
    let setup = Setup::start();
    let mut client = setup.client();
    let key = setup.path("host.key");
    let write = |secret: &str| {
        std::fs::write(&key, secret).expect("a file");
        std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o600)).expect("nobody else's");
    };
    let host = "nqn.2014-08.org.example:h";
    let table = format!("[[subsystem.host]]\nnqn = \"{host}\"\ndhchap_key = \"{}\"\n", key.display());
    let asking = config_of(&mut client).replacen("[[subsystem.namespace]]", &(table + "[[subsystem.namespace]]"), 1);
    let apply = |client: &mut Client, config: &str| ask(client, json!({"op": "apply", "config": config}));
    let asked = || setup.manager.target().host_auth(NQN, host).expect("known").map(|auth| auth.key);
    write(SECRETS[0]);
    apply(&mut client, &asking).expect("applied");
    assert_eq!(asked(), Some(SECRETS[0].parse().expect("a secret")));
    assert_eq!(apply(&mut client, &asking).expect("applied")["changes"], json!([]));
    write(SECRETS[1]);
    // The change behind it fails: a file that somebody else has locked.
    let locked = setup.path("locked.img");
    std::fs::write(&locked, vec![0; 1 << 20]).expect("a file");
    let other = farside::backend::BackendSpec::new(farside::backend::Source::File { path: locked.clone(), size: None });
    let holder = farside::backend::open(&other).expect("held");
    let more = format!(
        "{asking}\n[[subsystem]]\nnqn = \"nqn.2024-01.io.example:more\"\n[[subsystem.namespace]]\nfile = \"{}\"\n",
        locked.display()
    );
    apply(&mut client, &more).expect_err("refused");
    assert_eq!(asked(), Some(SECRETS[0].parse().expect("a secret")));
    drop(holder);
    let changes = apply(&mut client, &asking).expect("applied");
    assert_eq!(changes["changes"], json!([format!("~ host {host} of {NQN}: another secret")]));
    assert_eq!(asked(), Some(SECRETS[1].parse().expect("a secret")));
    write("DHHC-1:00:mistyped:");
    let error = apply(&mut client, &asking).expect_err("no secret");
    assert!(error.contains("host.key") && !error.contains("mistyped:"), "{error}");
    assert_eq!(asked(), Some(SECRETS[1].parse().expect("a secret")));
}
