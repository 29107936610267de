//! Keep alive: the only way to notice that a host has vanished.
//!
//! Traffic based keep alive (TBKAS) is advertised, so a command on any queue of a controller counts. The registry sees
//! the admin queue; what the others saw it asks for, and only when a controller would otherwise expire. (NVMe Base 2.x,
//! Keep Alive.)

use core::time::Duration;

use super::{ControllerId, Event, KillReason, Registry};

impl Registry {
    /// When [`Self::handle_timeout`] is to be called, at the latest.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Duration> {
        self.slots
            .iter()
            .filter_map(|slot| slot.tenant.as_ref())
            .filter_map(|controller| controller.deadline(&self.config))
            .chain(self.subsystems.values().filter_map(|subsystem| subsystem.ana.deadline()))
            .min()
    }

    /// Ends the controllers that were silent for too long. `last_activity` tells when the last command arrived on any
    /// queue of a controller, as far as the transport knows. Calling it early or often does no harm.
    pub fn handle_timeout(&mut self, now: Duration, last_activity: &dyn Fn(ControllerId) -> Option<Duration>) {
        self.expire_transitions(now);
        let Self { config, slots, events, .. } = self;
        let expired = |deadline: Option<Duration>| deadline.is_some_and(|at| at <= now);
        for controller in slots.iter_mut().filter_map(|slot| slot.tenant.as_mut()) {
            if !expired(controller.deadline(config)) {
                continue;
            }
            if let Some(seen) = last_activity(controller.id) {
                controller.last_activity = controller.last_activity.max(seen);
            }
            let late = controller.late_queues(now);
            if late.contains(&0) {
                controller.kill(KillReason::AuthenticationTimedOut, events);
                continue;
            }
            // Whoever opened an I/O queue and proved nothing need not be the controller's host: it ends alone.
            events.extend(late.into_iter().map(|qid| Event::CloseQueue { ctrl: controller.id, qid }));
            if expired(controller.deadline(config)) {
                controller.kill(KillReason::KeepAliveExpired, events);
            }
        }
    }
}
