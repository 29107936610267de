//! Events of connection management: copied out of librdmacm's and acknowledged in one go, so that nothing waits for us.

use std::ptr;
use std::sync::Arc;

use rdma_sys as ib;
use rdma_sys::rdma_cm_event_type as kind;
use tracing::warn;

use super::ids::{Channel, Id, RawId, Tag};
use super::sys;

/// An event, copied out of librdmacm's.
pub(super) struct Event {
    pub(super) kind: kind::Type,
    pub(super) status: i32,
    pub(super) tag: Tag,
    pub(super) verbs: *mut ib::ibv_context,
    /// The new id of a connection request.
    pub(super) request: Option<Id>,
    pub(super) private_data: Vec<u8>,
    pub(super) responder_resources: u8,
    pub(super) initiator_depth: u8,
}

impl Event {
    /// Reads, copies and acknowledges the next event.
    pub(super) fn next(channel: &Arc<Channel>) -> Option<Self> {
        let mut event = ptr::null_mut();
        // SAFETY: the channel is open and its descriptor non-blocking; `event` is written by the call.
        if unsafe { ib::rdma_get_cm_event(channel.raw.as_ptr(), &mut event) } != 0 {
            let errno = sys::errno();
            if errno != libc::EAGAIN && errno != libc::EINTR {
                warn!(errno, "reading an RDMA connection event");
            }
            return None;
        }
        // SAFETY: the call succeeded: `event` is valid until it is acknowledged, and so is the id it is about.
        let copy = unsafe { Self::copy(channel, &*event) };
        // SAFETY: from rdma_get_cm_event, acknowledged once and not used after.
        unsafe { ib::rdma_ack_cm_event(event) };
        Some(copy)
    }

    /// # Safety
    /// `event` is an unacknowledged event of this channel.
    unsafe fn copy(channel: &Arc<Channel>, event: &ib::rdma_cm_event) -> Self {
        // SAFETY: an id is alive while an event about it is unacknowledged.
        let (tag, verbs) = unsafe { ((*event.id).context as u64, (*event.id).verbs) };
        let mut copy = Self {
            kind: event.event,
            status: event.status,
            tag: Tag::from_word(tag),
            verbs,
            request: None,
            private_data: Vec::new(),
            responder_resources: 0,
            initiator_depth: 0,
        };
        if event.event == kind::RDMA_CM_EVENT_CONNECT_REQUEST {
            // A request's id is new and ours from here on. It starts with its listener's context word.
            copy.request = ptr::NonNull::new(event.id).map(|id| Id::new(RawId(id), channel));
        }
        let with_params = matches!(
            event.event,
            kind::RDMA_CM_EVENT_CONNECT_REQUEST
                | kind::RDMA_CM_EVENT_CONNECT_RESPONSE
                | kind::RDMA_CM_EVENT_ESTABLISHED
                | kind::RDMA_CM_EVENT_REJECTED
        );
        if with_params {
            // SAFETY: these events of a connected port space carry connection parameters, and private data of the
            // length that they give.
            unsafe {
                let param = event.param.conn;
                copy.responder_resources = param.responder_resources;
                copy.initiator_depth = param.initiator_depth;
                if !param.private_data.is_null() {
                    let len = usize::from(param.private_data_len);
                    copy.private_data = std::slice::from_raw_parts(param.private_data.cast::<u8>(), len).to_vec();
                }
            }
        }
        copy
    }
}
