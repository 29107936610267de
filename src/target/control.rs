//! The control thread: listeners and connection management, admission, and the controllers' timers.
//!
//! It sees every connection request first: private data are parsed, a reactor with room is chosen and its receives are
//! reserved, and the request travels there. Later events of the connection follow it. The thread sleeps until one of them, a
//! message, or the next deadline of a controller.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use tracing::{debug, info, warn};

use super::private_data::{QueueLimits, QueueRequest, RejectStatus};
use super::queue::CloseReason;
use super::reactor::LogBudget;
use super::shared::{Control, ControlMessage, Message, Shared, last_activity};
use crate::rdma::{Cm, CmEvent, ConnId, DeviceId, Incoming, ListenOptions, ListenerId, Provider, RdmaError};

/// How often a lost listener is tried again.
const RELISTEN: Duration = Duration::from_secs(1);

/// Connection requests that may wait in the kernel.
const BACKLOG: u32 = 512;

#[derive(Debug)]
struct Listener {
    address: SocketAddr,
    tos: Option<u8>,
    id: Option<ListenerId>,
    device: Option<DeviceId>,
    retry_at: Duration,
}

pub(crate) struct ControlThread<P: Provider> {
    shared: Arc<Shared<P>>,
    cm: P::Cm,
    listeners: Vec<Listener>,
    /// The reactor of each connection.
    reactor_of: HashMap<ConnId, usize>,
    log_budget: LogBudget,
    stopping: bool,
}

impl<P: Provider> ControlThread<P> {
    pub(crate) fn new(shared: Arc<Shared<P>>, cm: P::Cm) -> Self {
        Self {
            shared,
            cm,
            listeners: Vec::new(),
            reactor_of: HashMap::new(),
            log_budget: LogBudget::default(),
            stopping: false,
        }
    }

    /// Adds a listener; its device, unless it stands on a wildcard address.
    pub(crate) fn listen(&mut self, address: SocketAddr, tos: Option<u8>) -> Result<Option<DeviceId>, RdmaError> {
        let listening = self.cm.listen(address, &listen_options(tos))?;
        self.listeners.push(Listener {
            address,
            tos,
            id: Some(listening.id),
            device: listening.device,
            retry_at: Duration::ZERO,
        });
        Ok(listening.device)
    }

    fn unlisten(&mut self, address: SocketAddr) {
        for listener in self.listeners.extract_if(.., |listener| listener.address == address) {
            if let Some(id) = listener.id {
                self.cm.unlisten(id);
            }
        }
    }

    /// The thread's loop, until told to stop.
    pub(crate) fn run(mut self) {
        let clock = self.shared.clock;
        while !self.stopping {
            let now = clock.now();
            self.turn(now);
            let mailbox = &self.shared.control_mail;
            if self.stopping || !mailbox.prepare_sleep() {
                continue;
            }
            self.sleep(clock.now());
            self.shared.control_mail.awake();
        }
        debug!("listeners closed");
    }

    /// One round. Never blocks.
    pub(crate) fn turn(&mut self, now: Duration) {
        while let Some(event) = self.cm.poll_event(now) {
            self.handle(event, now);
        }
        while let Some(message) = self.shared.control_mail.take() {
            match message {
                ControlMessage::Gone(conn) => {
                    self.reactor_of.remove(&conn);
                }
                ControlMessage::Deadline => {}
                ControlMessage::Turns(ticket) => drop(ticket),
                ControlMessage::Listen { address, tos, answer } => {
                    let _ = answer.send(self.listen(address, tos).map(drop));
                }
                ControlMessage::Unlisten { address, answer } => {
                    self.unlisten(address);
                    let _ = answer.send(Ok(()));
                }
                ControlMessage::DeviceReleased(device) => debug!(device = device.0, "device released"),
                ControlMessage::Stop => self.stop(),
                ControlMessage::End => self.stopping = true,
            }
        }
        self.relisten(now);
        self.shared.with_control(|control| {
            let Control { registry, queues, .. } = control;
            registry.handle_timeout(now, &|ctrl| last_activity(queues, ctrl));
        });
    }

    /// When this thread has to look again even if nothing happens.
    pub(crate) fn next_timeout(&self) -> Option<Duration> {
        let registry = self.shared.with_control(|control| control.registry.next_deadline());
        let relisten = self.listeners.iter().filter(|listener| listener.id.is_none()).map(|listener| listener.retry_at);
        relisten.chain(registry).chain(self.cm.next_timeout()).min()
    }

    fn sleep(&self, now: Duration) {
        let timeout = match self.next_timeout() {
            None => PollTimeout::NONE,
            Some(due) => {
                // Rounded up: a timer that is not due yet must not make the thread spin.
                let millis = due.saturating_sub(now).as_millis().saturating_add(1).min(60_000);
                PollTimeout::try_from(millis as i32).unwrap_or(PollTimeout::MAX)
            }
        };
        let fds = [Some(self.shared.control_mail.fd()), self.cm.fd()];
        let mut polled: Vec<PollFd<'_>> = fds.iter().flatten().map(|fd| PollFd::new(*fd, PollFlags::POLLIN)).collect();
        let _ = poll(&mut polled, timeout);
    }

    fn handle(&mut self, event: CmEvent<P::Incoming, P::Outgoing>, now: Duration) {
        match event {
            CmEvent::Request(incoming) => self.admit(incoming, now),
            CmEvent::Established { conn, .. } => self.forward(conn, Message::Established(conn)),
            CmEvent::Disconnected { conn } => {
                self.forward(conn, Message::Disconnected(conn, CloseReason::HostDisconnected));
            }
            CmEvent::Failed { conn, error } => {
                if self.log_budget.allow(now) {
                    warn!(conn = conn.0, "connection failed: {error}");
                }
                self.forward(conn, Message::Disconnected(conn, CloseReason::ConnectionLost));
            }
            CmEvent::Refused { conn, .. } => {
                self.forward(conn, Message::Disconnected(conn, CloseReason::ConnectionLost));
            }
            CmEvent::DeviceRemoved(device) => {
                warn!(device = device.0, "RDMA device removed");
                for reactor in &self.shared.reactors {
                    reactor.mailbox.send(Message::DeviceRemoved(device));
                }
                for listener in self.listeners.iter_mut().filter(|listener| listener.device == Some(device)) {
                    if let Some(id) = listener.id.take() {
                        self.cm.unlisten(id);
                    }
                    listener.retry_at = now + RELISTEN;
                }
            }
            CmEvent::ListenerLost(id) => {
                for listener in self.listeners.iter_mut().filter(|listener| listener.id == Some(id)) {
                    warn!(address = %listener.address, "listener lost; it is tried again every second");
                    self.cm.unlisten(id);
                    listener.id = None;
                    listener.retry_at = now + RELISTEN;
                }
            }
            CmEvent::Resolved(_) => {}
        }
    }

    fn forward(&self, conn: ConnId, message: Message<P>) {
        if let Some(reactor) = self.reactor_of.get(&conn) {
            self.shared.reactors[*reactor].mailbox.send(message);
        }
    }

    /// Decides on a connection request and hands it to a reactor.
    fn admit(&mut self, incoming: P::Incoming, now: Duration) {
        let (peer, local) = (incoming.peer(), incoming.local());
        let options = &self.shared.options;
        let limits = QueueLimits {
            admin_entries: options.admin_queue_depth,
            io_entries: options.queue_depth,
            max_qid: options.io_queues,
        };
        let placed = QueueRequest::parse(incoming.private_data(), &limits).and_then(|request| {
            if self.stopping || self.shared.draining.load(Ordering::Acquire) {
                return Err(RejectStatus::NoResources);
            }
            let reactor = self.place(&request).ok_or(RejectStatus::NoResources)?;
            Ok((request, reactor))
        });
        match placed {
            Ok((request, reactor)) => {
                self.reactor_of.insert(incoming.conn(), reactor);
                self.shared.reactors[reactor].mailbox.send(Message::Accept { incoming, request });
            }
            Err(status) => {
                self.shared.counters.connections_rejected.fetch_add(1, Ordering::Relaxed);
                if self.log_budget.allow(now) {
                    warn!(%peer, %local, "connection rejected: {status}");
                }
                incoming.reject(&status.encode());
            }
        }
    }

    /// Reserves receives on a reactor: I/O queues go round, admin queues go where the fewest queues are; a full reactor is
    /// passed over.
    fn place(&self, request: &QueueRequest) -> Option<usize> {
        let reactors = &self.shared.reactors;
        let first = match usize::from(request.qid).checked_sub(1) {
            Some(io) => io % reactors.len(),
            None => (0..reactors.len()).min_by_key(|at| reactors[*at].queues.load(Ordering::Relaxed))?,
        };
        (0..reactors.len()).map(|step| (first + step) % reactors.len()).find(|at| {
            let port = &reactors[*at];
            let taken = port
                .free_slots
                .fetch_update(Ordering::AcqRel, Ordering::Acquire, |free| free.checked_sub(request.sq_entries));
            if taken.is_ok() {
                port.queues.fetch_add(1, Ordering::AcqRel);
            }
            taken.is_ok()
        })
    }

    fn relisten(&mut self, now: Duration) {
        for listener in self.listeners.iter_mut().filter(|listener| listener.id.is_none() && now >= listener.retry_at) {
            match self.cm.listen(listener.address, &listen_options(listener.tos)) {
                Ok(listening) => {
                    info!(address = %listener.address, "listening again");
                    listener.id = Some(listening.id);
                    listener.device = listening.device;
                }
                Err(error) => {
                    debug!(address = %listener.address, "cannot listen yet: {error}");
                    listener.retry_at = now + RELISTEN;
                }
            }
        }
    }

    fn stop(&mut self) {
        for listener in &mut self.listeners {
            if let Some(id) = listener.id.take() {
                self.cm.unlisten(id);
            }
        }
        self.listeners.clear();
        self.shared.draining.store(true, Ordering::Release);
        for reactor in &self.shared.reactors {
            reactor.mailbox.send(Message::Drain);
        }
    }
}

fn listen_options(tos: Option<u8>) -> ListenOptions {
    ListenOptions { backlog: BACKLOG, tos }
}
