//! Buffers, credits and RDMA: what a command needs before it runs, how its data move, how it is answered.
//!
//! Buffers come first, by the shares of hosts (`share`).
//!
//! Credits: a queue pair's send queue holds one entry per RDMA READ, per RDMA WRITE and per response. A request reserves all
//! of its entries before anything is posted; READs give theirs back one by one when they complete, WRITEs and the response
//! together when the response does. RDMA READs are a second budget, what the peer lets us have outstanding: a command with more
//! descriptors than that proceeds in batches. Both waits are FIFOs per queue.

use std::time::Duration;

use nvme::completion::Completion;
use nvme::sgl::KeyedSgl;
use tracing::warn;

use super::latency::Stage;
use super::limits::Line;
use super::memory::Memory;
use super::queue::{CloseReason, Life, Queue};
use super::reactor::{Device, Reactor};
use super::request::{Direction, HostData, Job, Request, RequestId, State, Tag, TagKind};
use super::share::{Of, Shares};
use crate::mutation::{self, Mutation};
use crate::rdma::{Access, Endpoint, PostError, Provider, QpId, SendOp, SendWr, Sge};

impl<P: Provider> Reactor<P> {
    /// Reserves buffer and credits, waiting in order where they are short, then goes on.
    #[inline(always)]
    pub(crate) fn acquire(&mut self, id: RequestId, now: Duration) {
        if self.requests[id].line != Line::None && !self.has_its_turn(id, now) {
            return;
        }
        if self.requests[id].extra.is_some()
            && let Some(partner) = self.requests.partner(id)
        {
            return self.acquire_pair(id, partner, now);
        }
        let request = &mut self.requests[id];
        if request.needs_buffer() {
            let queue = &self.queues[request.queue as usize];
            request.share = queue.share;
            if !self.shares.take(Of::queue(queue.is_admin()), id, request, &mut self.memory) {
                request.state = State::WaitBuffer;
                return;
            }
        }
        self.reserve_credits(id, now);
    }

    /// Buffers came back: waiting requests go on, in their order, as far as there are enough.
    pub(crate) fn serve_buffer_waits(&mut self, now: Duration) {
        if !self.memory.starved.is_empty() {
            self.feed_starved();
        }
        for of in Of::BOTH {
            while let Some(id) = self.shares.serve(of, &mut self.requests, &mut self.memory) {
                match self.requests.partner(id) {
                    Some(partner) => self.pair_has_buffers(id, partner, now),
                    None => self.reserve_credits(id, now),
                }
            }
        }
    }

    /// A request that waits for buffers waits no more. Who comes next may be content with less.
    pub(crate) fn leave_buffer_line(&mut self, id: RequestId) {
        let request = &self.requests[id];
        if request.state == State::WaitBuffer {
            self.shares.leave_line(id, request.share);
            self.buffers_returned = true;
        }
    }

    #[inline(always)]
    pub(crate) fn reserve_credits(&mut self, id: RequestId, now: Duration) {
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
    #[inline(always)]
    fn launch(&mut self, id: RequestId, now: Duration) {
        if self.timing {
            self.end_stage(id, Stage::Receive, now);
        }
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
        queue.progress = queue.progress.wrapping_add(1);
        queue.read_credits += 1;
        queue.send_credits += 1;
        let request = &mut self.requests[id];
        request.credits -= 1;
        request.reads_pending -= 1;
        if request.reads_pending == 0 && request.read_posted == request.data_len {
            self.withdraw_sink(id);
            if self.timing {
                self.end_stage(id, Stage::ReadFromHost, now);
            }
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
        let Self { devices, queues, requests, memory, shares, .. } = self;
        let (request, list) = requests.with_list(id);
        let at = request.queue;
        request.state = State::Responding;
        let queue = &mut queues[at as usize];
        let Some(device) = devices[queue.device].as_mut() else { return };
        match post_answer(device, queue, id, request, list, memory, shares) {
            Ok(returned) => self.buffers_returned |= returned,
            Err(_) => self.close_queue(at, CloseReason::ConnectionLost, now),
        }
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
    #[inline(always)]
    pub(crate) fn on_sent(&mut self, tag: Tag, now: Duration) {
        let Self { queues, requests, memory, shares, .. } = self;
        let id = tag.index;
        let Some((request, free)) = requests.find_ending(id, tag.generation) else { return };
        let (at, close_after) = (request.queue, request.close_after);
        let Some(queue) = queues.get_mut(at as usize).filter(|queue| queue.life == Life::Live) else { return };
        queue.progress = queue.progress.wrapping_add(1);
        queue.send_credits += u32::from(request.credits);
        let waits = !queue.wait_credits.is_empty();
        self.buffers_returned |= shares.give(request, memory);
        if self.timing {
            self.end_stage(id, Stage::Send, now);
            self.requests.release(id);
        } else {
            request.clear();
            free.push(id);
        }
        if close_after {
            self.close_queue(at, CloseReason::QueueDisconnect, now);
        } else if waits {
            self.serve_credit_waits(at, now);
        }
    }

    /// Gives a request's buffers back to the pools that they came from.
    pub(crate) fn return_buffers(&mut self, id: RequestId) {
        self.buffers_returned |= self.shares.give(&mut self.requests[id], &mut self.memory);
    }
}

/// Posts what answers a command that is `Responding`: its data for the host, if it has any and succeeded, and the response behind
/// them. Whether buffers came back by it.
#[inline(always)]
fn post_answer<P: Provider>(
    device: &mut Device<P>,
    queue: &mut Queue,
    id: RequestId,
    request: &mut Request,
    list: &[KeyedSgl],
    memory: &mut Memory,
    shares: &mut Shares,
) -> Result<bool, PostError> {
    if request.direction == Direction::ToHost && request.completion.status.is_success() {
        post_writes(&mut device.endpoint, queue.qp, device.mr.lkey, id, request, list)?;
    }
    post_response(device, queue, id, request, memory, shares)
}

/// Posts the data for the host: an RDMA WRITE per descriptor that takes some of them.
#[inline]
fn post_writes<E: Endpoint>(
    endpoint: &mut E,
    qp: QpId,
    lkey: u32,
    id: RequestId,
    request: &Request,
    list: &[KeyedSgl],
) -> Result<(), PostError> {
    let Some(buffer) = &request.buffer else { return Ok(()) };
    let tag = Tag { kind: TagKind::Write, generation: request.generation, index: id }.encode();
    let (mut addr, mut left) = (buffer.addr() + u64::from(request.data_start), request.data_len);
    for descriptor in request.descriptors(list) {
        let len = descriptor.len.min(left);
        if len == 0 {
            continue;
        }
        post_write(endpoint, qp, tag, Sge { addr, len, lkey }, descriptor)?;
        addr += u64::from(len);
        left -= len;
    }
    Ok(())
}

/// Posts one RDMA WRITE, unsignaled: the response behind it tells of it too.
#[inline(always)]
pub(super) fn post_write<E: Endpoint>(
    endpoint: &mut E,
    qp: QpId,
    tag: u64,
    sge: Sge,
    to: &KeyedSgl,
) -> Result<(), PostError> {
    let op = SendOp::RdmaWrite { remote: to.addr, rkey: mutation::rkey(to.rkey) };
    endpoint.post_send(qp, &SendWr { tag, op, sge, signaled: false, solicited: false, inline: false })
}

/// Posts the response of a command that is `Responding`. Whether buffers came back by it: those without data on their way to the
/// host.
#[inline(always)]
pub(super) fn post_response<P: Provider>(
    device: &mut Device<P>,
    queue: &mut Queue,
    id: RequestId,
    request: &mut Request,
    memory: &mut Memory,
    shares: &mut Shares,
) -> Result<bool, PostError> {
    let to_host = request.direction == Direction::ToHost && request.completion.status.is_success();
    let returned = (!to_host || mutation::is_on(Mutation::BufferReusedEarly)) && shares.give(request, memory);
    queue.outstanding = queue.outstanding.saturating_sub(1);
    let sqhd = queue.next_sqhd();
    let op = match request.invalidate {
        Some(rkey) if device.invalidate && !mutation::is_on(Mutation::MissedInvalidate) => {
            SendOp::SendInvalidate { rkey }
        }
        _ => SendOp::Send,
    };
    let cqe = request.completion.encode(sqhd, queue.request.qid);
    let tag = Tag { kind: TagKind::Send, generation: request.generation, index: id };
    let sge = memory.completion(id, cqe, device.mr.lkey);
    let wr = SendWr { tag: tag.encode(), op, sge, signaled: true, solicited: true, inline: device.inline };
    device.endpoint.post_send(queue.qp, &wr)?;
    Ok(returned)
}
