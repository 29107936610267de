//! Reservation commands: their data fetched like those of any command, then the registry decides, and its answer goes out when
//! the new state holds on every reactor.

use std::time::Duration;

use nvme::completion::Completion;
use nvme::registry::Action;
use nvme::reservation::ReservationCommand;
use nvme::status::Status;

use super::reactor::Reactor;
use super::request::RequestId;
use crate::rdma::Provider;

impl<P: Provider> Reactor<P> {
    pub(crate) fn reserve(&mut self, id: RequestId, at: u32, command: ReservationCommand, now: Duration) {
        let nsid = self.namespaces[at].view.nsid;
        let request = &self.requests[id];
        let (start, len, cid) = (request.data_start as usize, request.data_len as usize, request.cid);
        let Some(association) = &self.queues[request.queue as usize].association else { return };
        let data = request.buffer.as_ref().and_then(|buffer| buffer.as_slice().get(start..start + len));
        let (ctrl, data) = (association.ctrl, data.unwrap_or_default());
        let action = self.shared.with_control(|control| control.registry.reserve(ctrl, nsid, cid, command, data));
        let mut completion = match action {
            Action::Settle { settle, completion } => return self.start_settling(id, settle, completion),
            Action::SendData { data, completion } => {
                let bytes = self.requests[id].buffer.as_mut().and_then(|buffer| buffer.as_mut_slice().get_mut(..len));
                match (bytes, data.get(..len)) {
                    (Some(to), Some(from)) => {
                        to.copy_from_slice(from);
                        completion
                    }
                    _ => Completion::failed(cid, Status::INTERNAL_ERROR),
                }
            }
            Action::Complete(completion) => completion,
            _ => Completion::failed(cid, Status::INTERNAL_ERROR),
        };
        if !completion.status.is_success() {
            completion.status = self.record_failure(id, completion.status, now);
        }
        self.finish(id, completion, now);
    }
}
