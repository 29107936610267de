//! What a service manager is told (sd_notify(3)): readiness, the end, and, while every thread of the target turns, that its
//! watchdog need not bite. Without a manager (`NOTIFY_SOCKET`) nothing is said.

use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;

use farside::control::Manager;
use sd_notify::NotifyState;
use tracing::{error, info, warn};

/// Tells the service manager, if there is one.
pub(crate) fn notify(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        warn!("the service manager cannot be told (NOTIFY_SOCKET): {error}");
    }
}

/// Feeds the service manager's watchdog. Ends when dropped.
pub(crate) struct Watchdog {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Watchdog {
    /// Starts to feed it, where the service manager asked for that (`WATCHDOG_USEC`).
    pub(crate) fn start(manager: &Arc<Manager>) -> Result<Option<Self>, String> {
        let Some(limit) = sd_notify::watchdog_enabled().filter(|limit| !limit.is_zero()) else { return Ok(None) };
        let (stop, stopped) = channel();
        let manager = Arc::clone(manager);
        // Three chances within the limit.
        let period = limit / 3;
        let body = move || {
            let mut well = true;
            while stopped.recv_timeout(period) == Err(RecvTimeoutError::Timeout) {
                let turns = manager.target().turns(period);
                match (well, turns) {
                    (_, true) if !well => info!("every thread turns again"),
                    (true, false) => error!(
                        "a thread of the target has done no round for {period:?}: the watchdog of {limit:?} is not fed; \
                         report it with this log"
                    ),
                    _ => {}
                }
                if turns {
                    notify(&[NotifyState::Watchdog]);
                }
                well = turns;
            }
        };
        let thread = std::thread::Builder::new().name("farside-watch".into()).spawn(body);
        let thread = thread.map_err(|error| format!("watchdog thread: {error}"))?;
        Ok(Some(Self { stop: Some(stop), thread: Some(thread) }))
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
