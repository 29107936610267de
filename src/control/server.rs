//! The Unix socket: one thread that accepts, and one for each connection.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;

use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};
use tracing::{debug, info, warn};

use super::manager::Manager;
use super::protocol::{Answer, Failure, Request};

/// Bytes of the longest request: a configuration of thousands of namespaces.
const LONGEST: u64 = 16 << 20;

/// Connections at a time.
const CONNECTIONS: usize = 32;

/// A control socket. Closed, and its path removed, when dropped.
#[derive(Debug)]
pub struct ControlServer {
    path: PathBuf,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    stop: AtomicBool,
    connections: Mutex<Connections>,
}

#[derive(Debug, Default)]
struct Connections {
    next: u64,
    streams: HashMap<u64, UnixStream>,
    threads: HashMap<u64, JoinHandle<()>>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Connections> {
        self.connections.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// Where the socket is unless told otherwise: in /run for root, in the user's run-time directory for others.
pub fn default_path() -> Option<PathBuf> {
    if nix::unistd::geteuid().is_root() {
        return Some(PathBuf::from("/run/farside.sock"));
    }
    std::env::var_os("XDG_RUNTIME_DIR").map(|folder| PathBuf::from(folder).join("farside.sock"))
}

/// A path that a target is to be controlled by, taken before there is one. Removed when dropped.
#[derive(Debug)]
pub struct ControlPath {
    path: PathBuf,
    listener: Option<UnixListener>,
}

impl ControlPath {
    /// Binds the socket, for its owner alone. Who connects waits until it is served.
    ///
    /// # Errors
    /// Another target holds the path, or it cannot be bound.
    pub fn bind(path: &Path) -> Result<Self, Failure> {
        let listener = bind(path).map_err(|(reason, remedy)| refused(path, reason, remedy))?;
        Ok(Self { path: path.to_owned(), listener: Some(listener) })
    }
}

impl Drop for ControlPath {
    fn drop(&mut self) {
        if self.listener.take().is_some() {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

fn refused(path: &Path, reason: impl ToString, remedy: &str) -> Failure {
    Failure::new(format!("control socket {}", path.display()), reason.to_string(), remedy)
}

impl ControlServer {
    /// Binds the socket, for its owner alone, and serves it.
    ///
    /// # Errors
    /// Another target holds the path, or it cannot be bound.
    pub fn start(path: &Path, manager: Arc<Manager>) -> Result<Self, Failure> {
        Self::serve(ControlPath::bind(path)?, manager)
    }

    /// Serves a socket.
    ///
    /// # Errors
    /// There is no thread to be had.
    pub fn serve(mut bound: ControlPath, manager: Arc<Manager>) -> Result<Self, Failure> {
        let path = std::mem::take(&mut bound.path);
        let Some(listener) = bound.listener.take() else {
            return Err(refused(&path, "is closed", "bind it once, and serve it once"));
        };
        let shared = Arc::new(Shared::default());
        let accepting = Arc::clone(&shared);
        let spawned = std::thread::Builder::new()
            .name("farside-ctl".into())
            .spawn(move || accept(&listener, &accepting, &manager));
        match spawned {
            Ok(thread) => Ok(Self { path, shared, thread: Some(thread) }),
            Err(error) => {
                let _ = std::fs::remove_file(&path);
                Err(refused(&path, error, "raise the limit of threads (ulimit -u, or TasksMax of its unit)"))
            }
        }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for ControlServer {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        // The thread that accepts wakes up by a connection.
        let woken = UnixStream::connect(&self.path);
        let _ = std::fs::remove_file(&self.path);
        if let Some(thread) = self.thread.take()
            && woken.is_ok()
        {
            let _ = thread.join();
        }
        let (streams, threads) = {
            let mut connections = self.shared.lock();
            (std::mem::take(&mut connections.streams), std::mem::take(&mut connections.threads))
        };
        for stream in streams.into_values() {
            let _ = stream.shutdown(Shutdown::Both);
        }
        for thread in threads.into_values() {
            let _ = thread.join();
        }
    }
}

/// Binds the path; takes the place of a socket that nobody listens on.
fn bind(path: &Path) -> Result<UnixListener, (String, &'static str)> {
    const ELSEWHERE: &str = "choose another path with --control";
    if let Ok(metadata) = std::fs::symlink_metadata(path) {
        if !metadata.file_type().is_socket() {
            return Err(("something else is there".into(), ELSEWHERE));
        }
        match UnixStream::connect(path) {
            Err(error) if error.kind() == ErrorKind::ConnectionRefused => {
                std::fs::remove_file(path).map_err(|error| (error.to_string(), ELSEWHERE))?;
            }
            Ok(_) => return Err(("another target holds it".into(), ELSEWHERE)),
            Err(error) => return Err((error.to_string(), ELSEWHERE)),
        }
    }
    // Nobody may connect before the permissions are right: they are set before it has its name.
    let mut hidden = path.file_name().unwrap_or_default().to_owned();
    hidden.push(format!(".{}", std::process::id()));
    let hidden = path.with_file_name(hidden);
    let bound = UnixListener::bind(&hidden).and_then(|listener| {
        std::fs::set_permissions(&hidden, std::fs::Permissions::from_mode(0o600))?;
        std::fs::rename(&hidden, path)?;
        Ok(listener)
    });
    bound.map_err(|error| {
        let _ = std::fs::remove_file(&hidden);
        (error.to_string(), "choose a path with --control whose folder exists and is yours")
    })
}

fn accept(listener: &UnixListener, shared: &Arc<Shared>, manager: &Arc<Manager>) {
    for stream in listener.incoming() {
        if shared.stop.load(Ordering::Acquire) {
            return;
        }
        let stream = match stream {
            Ok(stream) => stream,
            Err(error) => {
                warn!("control socket: {error}");
                std::thread::sleep(std::time::Duration::from_millis(100));
                continue;
            }
        };
        let mut connections = shared.lock();
        if connections.streams.len() >= CONNECTIONS {
            warn!("control socket: {CONNECTIONS} connections are open; one more is turned away");
            continue;
        }
        let id = connections.next;
        connections.next += 1;
        let (shared_, manager) = (Arc::clone(shared), Arc::clone(manager));
        let Ok(kept) = stream.try_clone() else { continue };
        let body = move || {
            converse(&stream, &manager);
            drop(manager);
            let mut connections = shared_.lock();
            connections.streams.remove(&id);
            connections.threads.remove(&id);
        };
        if let Ok(thread) = std::thread::Builder::new().name("farside-ctl".into()).spawn(body) {
            connections.streams.insert(id, kept);
            connections.threads.insert(id, thread);
        }
    }
}

/// Answers the requests of one connection until it ends.
fn converse(stream: &UnixStream, manager: &Manager) {
    let who = getsockopt(stream, PeerCredentials)
        .map_or_else(|_| "unknown".to_owned(), |peer| format!("uid {} pid {}", peer.uid(), peer.pid()));
    debug!(who, "control connection");
    let mut reader = BufReader::new(stream);
    let mut line = Vec::new();
    loop {
        line.clear();
        match (&mut reader).take(LONGEST).read_until(b'\n', &mut line) {
            Ok(0) | Err(_) => return,
            Ok(_) => {}
        }
        let whole = line.last() == Some(&b'\n');
        let answer = if whole || (line.len() as u64) < LONGEST {
            handle(&line, &who, manager)
        } else {
            let reason = format!("is longer than {LONGEST} bytes");
            Answer::Error(Failure::new("request", reason, "split it into several"))
        };
        let mut text = serde_json::to_vec(&answer).unwrap_or_default();
        text.push(b'\n');
        let mut writer = stream;
        if writer.write_all(&text).is_err() || !whole {
            return;
        }
    }
}

fn handle(line: &[u8], who: &str, manager: &Manager) -> Answer {
    let request: Request = match serde_json::from_slice(line) {
        Ok(request) => request,
        Err(error) => return Answer::Error(Failure::new("request", error, "see farside::control::Request")),
    };
    let reads = matches!(request, Request::Status | Request::Metrics | Request::Latency | Request::Config);
    let answer = manager.handle(&request);
    match &answer {
        Ok(_) if reads => {}
        Ok(_) => info!(who, op = name(&request), "control request done"),
        Err(failure) => warn!(who, op = name(&request), "control request refused: {failure}"),
    }
    answer.map_or_else(Answer::Error, Answer::Ok)
}

/// The request's word.
fn name(request: &Request) -> String {
    let value = serde_json::to_value(request).unwrap_or_default();
    value.get("op").and_then(|op| op.as_str()).unwrap_or("?").to_owned()
}
