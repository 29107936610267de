//! Buffers, credits and RDMA: what a command needs before it runs, how its data move, how it is answered.
//!
//! Credits: a queue pair's send queue holds one entry per RDMA READ, per RDMA WRITE and per response. A request reserves all
//! of its entries before anything is posted; READs give theirs back one by one when they complete, WRITEs and the response
//! together when the response does. RDMA READs are a second budget, what the peer lets us have outstanding: a command with more
//! descriptors than that proceeds in batches. Both waits are FIFOs per queue.

use std::time::Duration;

use nvme::completion::Completion;
use nvme::sgl::KeyedSgl;
use tracing::warn;

use super::limits::Line;
use super::queue::{CloseReason, Life};
use super::reactor::Reactor;
use super::request::{Direction, HostData, Job, RequestId, State, Tag, TagKind};
use crate::mem::Buffer;
use crate::mutation::{self, Mutation};
use crate::rdma::{Access, Endpoint, PostError, Provider, SendOp, SendWr, Sge};

impl<P: Provider> Reactor<P> {
    /// Reserves buffer and credits, waiting in order where they are short, then goes on.
    pub(crate) fn acquire(&mut self, id: RequestId, now: Duration) {
        if self.requests[id].line != Line::None && !self.has_its_turn(id, now) {
            return;
        }
        let admin = self.queues[self.requests[id].queue as usize].is_admin();
        let waits = if admin { &self.wait_admin_buffer } else { &self.wait_buffer };
        if self.needs_buffer(id) && (!waits.is_empty() || !self.take_buffers(id, admin)) {
            self.requests[id].state = State::WaitBuffer;
            if admin { &mut self.wait_admin_buffer } else { &mut self.wait_buffer }.push_back(id);
            return;
        }
        self.reserve_credits(id, now);
    }

    fn needs_buffer(&self, id: RequestId) -> bool {
        let request = &self.requests[id];
        match request.direction {
            Direction::None => request.scratch_len > 0,
            // A Compare of in-capsule data still needs room for what the namespace holds.
            Direction::FromHost => request.buffer.is_none() || request.scratch_len > 0,
            Direction::ToHost => true,
        }
    }

    /// Takes all the buffers that a request needs, or none.
    fn take_buffers(&mut self, id: RequestId, admin: bool) -> bool {
        let (request, memory) = (&mut self.requests[id], &mut self.memory);
        let (len, scratch) = (request.data_len as usize, request.scratch_len as usize);
        let mut take = |len| if admin { memory.admin_pool.take(len) } else { memory.take_data(len) };
        let mut second = None;
        if scratch > 0 {
            second = take(scratch);
            if second.is_none() {
                return false;
            }
        }
        if request.buffer.is_none() && len > 0 {
            match take(len) {
                Some(buffer) => request.buffer = Some(buffer),
                None => {
                    if let Some(second) = second {
                        memory.give(second);
                    }
                    return false;
                }
            }
        }
        request.second = second;
        true
    }

    /// Buffers came back: the oldest waiters first, until one has to wait on.
    pub(crate) fn serve_buffer_waits(&mut self, now: Duration) {
        if !self.memory.starved.is_empty() {
            self.feed_starved();
        }
        for admin in [true, false] {
            loop {
                let waits = if admin { &mut self.wait_admin_buffer } else { &mut self.wait_buffer };
                let Some(id) = waits.front().copied() else { break };
                if !self.take_buffers(id, admin) {
                    break;
                }
                if admin { &mut self.wait_admin_buffer } else { &mut self.wait_buffer }.pop_front();
                self.reserve_credits(id, now);
            }
        }
    }

    fn reserve_credits(&mut self, id: RequestId, now: Duration) {
        let request = &mut self.requests[id];
        let need = u32::from(request.data_wrs()) + 1;
        let queue = &mut self.queues[request.queue as usize];
        if !queue.wait_credits.is_empty() || queue.send_credits < need {
            request.state = State::WaitCredits;
            queue.wait_credits.push_back(id);
            return;
        }
        queue.send_credits -= need;
        request.credits = need as u8;
        self.launch(id, now);
    }

    /// Send queue entries came back: the oldest waiters first.
    fn serve_credit_waits(&mut self, at: u32, now: Duration) {
        loop {
            let Some(queue) = self.queues.get_mut(at as usize).filter(|queue| queue.life == Life::Live) else { return };
            let Some(id) = queue.wait_credits.front().copied() else { return };
            let request = &mut self.requests[id];
            let need = u32::from(request.data_wrs()) + 1;
            if queue.send_credits < need {
                return;
            }
            queue.wait_credits.pop_front();
            queue.send_credits -= need;
            request.credits = need as u8;
            self.launch(id, now);
        }
    }

    /// Everything is reserved: fetch the host's data, or run.
    fn launch(&mut self, id: RequestId, now: Duration) {
        let request = &mut self.requests[id];
        if request.direction == Direction::FromHost && request.host != HostData::InCapsule {
            request.state = State::ReadingFromHost;
            let at = request.queue;
            if !self.register_sink(id, now) {
                return;
            }
            let queue = &mut self.queues[at as usize];
            if queue.wait_reads.is_empty() {
                self.post_reads(id, now);
            } else {
                queue.wait_reads.push_back(id);
            }
            return;
        }
        if request.job == Job::SendData
            && let Some(buffer) = &mut request.buffer
        {
            let payload = std::mem::take(&mut request.payload);
            let len = payload.len().min(buffer.len());
            buffer.as_mut_slice()[..len].copy_from_slice(&payload[..len]);
        }
        self.execute(id, now);
    }

    /// iWARP counts the answer to our RDMA READ as a remote write: such a device gets a registration of the sink for this
    /// transfer alone. `false` when the queue had to end.
    fn register_sink(&mut self, id: RequestId, now: Duration) -> bool {
        let request = &mut self.requests[id];
        let at = request.queue;
        let Some(device) = self.devices[self.queues[at as usize].device].as_mut() else { return false };
        if !device.sink_per_read {
            return true;
        }
        let Some(buffer) = &request.buffer else { return false };
        match buffer.register(&mut device.endpoint, Access::ReadSink) {
            Ok(mr) => {
                request.sink = Some(mr);
                true
            }
            Err(error) => {
                warn!(reactor = self.index, "{error}");
                self.close_queue(at, CloseReason::ConnectionLost, now);
                false
            }
        }
    }

    pub(crate) fn withdraw_sink(&mut self, id: RequestId) {
        let request = &mut self.requests[id];
        if let Some(mr) = request.sink.take()
            && let Some(device) = self.devices[self.queues[request.queue as usize].device].as_mut()
        {
            device.endpoint.deregister(mr);
        }
    }

    /// The descriptor at a position of the request's host memory.
    fn descriptor(&self, id: RequestId, at: u8) -> Option<KeyedSgl> {
        match self.requests[id].host {
            HostData::One(keyed) if at == 0 => Some(keyed),
            HostData::List(count) if at < count => Some(self.requests.list(id)[usize::from(at)]),
            _ => None,
        }
    }

    /// Posts RDMA READs for as many descriptors as the READ budget has room for. `false` when the request still waits for room.
    fn post_reads(&mut self, id: RequestId, now: Duration) -> bool {
        let resumed = self.requests[id].read_posted > 0;
        loop {
            let request = &self.requests[id];
            let (at, left) = (request.queue, request.data_len - request.read_posted);
            if left == 0 {
                break;
            }
            let Some(descriptor) = self.descriptor(id, request.next_desc) else { break };
            let len = descriptor.len.min(left);
            let queue = &mut self.queues[at as usize];
            if len > 0 && queue.read_credits == 0 {
                queue.wait_reads.push_back(id);
                return false;
            }
            let request = &mut self.requests[id];
            request.next_desc += 1;
            if len == 0 {
                continue;
            }
            let Some(buffer) = &request.buffer else { break };
            let wrong = resumed && mutation::is_on(Mutation::SecondBatchOffset);
            let addr = buffer.addr() + if wrong { 0 } else { u64::from(request.read_posted) };
            request.read_posted += len;
            request.reads_pending += 1;
            queue.read_credits -= 1;
            let op = SendOp::RdmaRead { remote: descriptor.addr, rkey: mutation::rkey(descriptor.rkey) };
            let tag = Tag { kind: TagKind::Read, generation: request.generation, index: id };
            if !self.post(at, op, addr, len, tag, true, now) {
                return true;
            }
        }
        true
    }

    /// An RDMA READ completed.
    pub(crate) fn on_read(&mut self, tag: Tag, now: Duration) {
        let Some(request) = self.requests.find(tag.index, tag.generation) else { return };
        let (at, id) = (request.queue, tag.index);
        let queue = &mut self.queues[at as usize];
        if queue.life != Life::Live {
            return;
        }
        queue.read_credits += 1;
        queue.send_credits += 1;
        let request = &mut self.requests[id];
        request.credits -= 1;
        request.reads_pending -= 1;
        if request.reads_pending == 0 && request.read_posted == request.data_len {
            self.withdraw_sink(id);
            let request = &self.requests[id];
            if let Some(status) = request.abort {
                let completion = Completion::failed(request.cid, status);
                self.finish(id, completion, now);
            } else {
                self.execute(id, now);
            }
        }
        while let Some(queue) = self.queues.get_mut(at as usize).filter(|queue| queue.life == Life::Live)
            && queue.read_credits > 0
            && let Some(next) = queue.wait_reads.pop_front()
        {
            if !self.post_reads(next, now) {
                // It went to the back; it was the oldest.
                let queue = &mut self.queues[at as usize];
                if let Some(back) = queue.wait_reads.pop_back() {
                    queue.wait_reads.push_front(back);
                }
                break;
            }
        }
        self.serve_credit_waits(at, now);
    }

    /// Gives a command its outcome: the answer leaves as soon as the send queue has room.
    pub(crate) fn finish(&mut self, id: RequestId, completion: Completion, now: Duration) {
        let request = &mut self.requests[id];
        request.completion = completion;
        if request.extra.is_some() {
            self.release_extra(id, now);
        }
        let request = &mut self.requests[id];
        if !matches!(request.job, Job::Io { .. }) || !completion.status.is_success() {
            request.direction = Direction::None;
            request.job = Job::Respond;
        }
        if request.credits > 0 {
            self.respond(id, now);
        } else {
            request.direction = Direction::None;
            request.job = Job::Respond;
            self.reserve_credits(id, now);
        }
    }

    /// Posts the data for the host and the response: the WRITEs unsignaled, the SEND behind them, one doorbell for both.
    pub(crate) fn respond(&mut self, id: RequestId, now: Duration) {
        let request = &mut self.requests[id];
        let at = request.queue;
        request.state = State::Responding;
        let to_host = request.direction == Direction::ToHost && request.completion.status.is_success();
        if to_host && !self.post_writes(id, now) {
            return;
        }
        let early = mutation::is_on(Mutation::BufferReusedEarly);
        if self.requests[id].direction == Direction::FromHost || !to_host || early {
            self.return_buffers(id);
        }
        let queue = &mut self.queues[at as usize];
        queue.outstanding = queue.outstanding.saturating_sub(1);
        let sqhd = queue.next_sqhd();
        let qid = queue.request.qid;
        let Some(device) = self.devices[queue.device].as_ref() else { return };
        let request = &self.requests[id];
        let op = match request.invalidate {
            Some(rkey) if device.invalidate && !mutation::is_on(Mutation::MissedInvalidate) => {
                SendOp::SendInvalidate { rkey }
            }
            _ => SendOp::Send,
        };
        let cqe = request.completion.encode(sqhd, qid);
        let tag = Tag { kind: TagKind::Send, generation: request.generation, index: id };
        let sge = self.memory.completion(id, cqe, device.mr.lkey);
        let wr = SendWr { tag: tag.encode(), op, sge, signaled: true, solicited: true, inline: device.inline };
        self.post_wr(at, &wr, now);
    }

    fn post_writes(&mut self, id: RequestId, now: Duration) -> bool {
        let (mut at_desc, mut sent) = (0, 0);
        let request = &self.requests[id];
        let (queue, total, generation) = (request.queue, request.data_len, request.generation);
        let Some(base) = request.buffer.as_ref().map(Buffer::addr) else { return true };
        let base = base + u64::from(request.data_start);
        while sent < total
            && let Some(descriptor) = self.descriptor(id, at_desc)
        {
            at_desc += 1;
            let len = descriptor.len.min(total - sent);
            if len == 0 {
                continue;
            }
            let op = SendOp::RdmaWrite { remote: descriptor.addr, rkey: mutation::rkey(descriptor.rkey) };
            let tag = Tag { kind: TagKind::Write, generation, index: id };
            if !self.post(queue, op, base + u64::from(sent), len, tag, false, now) {
                return false;
            }
            sent += len;
        }
        true
    }

    #[expect(clippy::too_many_arguments, reason = "a work request's fields, in order")]
    fn post(&mut self, at: u32, op: SendOp, addr: u64, len: u32, tag: Tag, signaled: bool, now: Duration) -> bool {
        let Some(device) = self.devices[self.queues[at as usize].device].as_ref() else { return false };
        let lkey = self.requests[tag.index].sink.map_or(device.mr.lkey, |sink| sink.lkey);
        let sge = Sge { addr, len, lkey };
        let wr = SendWr { tag: tag.encode(), op, sge, signaled, solicited: false, inline: false };
        self.post_wr(at, &wr, now)
    }

    /// Puts a work request into its queue pair's list. A refusal ends the queue: credits make sure that there is room.
    fn post_wr(&mut self, at: u32, wr: &SendWr, now: Duration) -> bool {
        let queue = &self.queues[at as usize];
        let Some(device) = self.devices[queue.device].as_mut() else { return false };
        match device.endpoint.post_send(queue.qp, wr) {
            Ok(()) => true,
            Err(PostError::Full | PostError::NoQp | PostError::Device(_)) => {
                self.close_queue(at, CloseReason::ConnectionLost, now);
                false
            }
        }
    }

    /// A response was sent: its data too, since WRITEs go before it on the same queue pair.
    pub(crate) fn on_sent(&mut self, tag: Tag, now: Duration) {
        let Some(request) = self.requests.find(tag.index, tag.generation) else { return };
        let (at, id, close_after) = (request.queue, tag.index, request.close_after);
        let credits = u32::from(request.credits);
        let live = self.queues[at as usize].life == Life::Live;
        if !live {
            return;
        }
        self.queues[at as usize].send_credits += credits;
        self.return_buffers(id);
        self.requests.release(id);
        if close_after {
            self.close_queue(at, CloseReason::QueueDisconnect, now);
            return;
        }
        self.serve_credit_waits(at, now);
    }

    /// Gives a request's buffers back to the pools that they came from.
    pub(crate) fn return_buffers(&mut self, id: RequestId) {
        let request = &mut self.requests[id];
        for buffer in [request.buffer.take(), request.second.take()].into_iter().flatten() {
            self.memory.give(buffer);
            self.buffers_returned = true;
        }
    }
}
