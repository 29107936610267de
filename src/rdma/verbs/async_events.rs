//! Asynchronous events of an endpoint's own context: nobody else reads them.

use std::mem::MaybeUninit;

use rdma_sys as ib;
use tracing::{debug, info, warn};

use super::endpoint::Endpoint;
use crate::rdma::{EndpointEvent, QpId};

impl Endpoint {
    pub(super) fn next_async(&mut self) -> Option<EndpointEvent> {
        loop {
            let mut event = MaybeUninit::<RawAsyncEvent>::zeroed();
            let raw = event.as_mut_ptr().cast::<ib::ibv_async_event>();
            // SAFETY: the context is open and its descriptor non-blocking; the event has the size that C writes.
            if unsafe { ib::ibv_get_async_event(self.context.raw(), raw) } != 0 {
                return None;
            }
            // SAFETY: written by the call, and zeros before: any bits are a value of this type.
            let copy = unsafe { event.assume_init_read() };
            let said = self.handle_async(&copy);
            // SAFETY: from ibv_get_async_event, acknowledged once.
            unsafe { ib::ibv_ack_async_event(raw) };
            if said.is_some() {
                return said;
            }
        }
    }

    fn handle_async(&mut self, event: &RawAsyncEvent) -> Option<EndpointEvent> {
        use ib::ibv_event_type as event_type;
        const QP_ERRORS: [u32; 4] = [
            event_type::IBV_EVENT_QP_FATAL as u32,
            event_type::IBV_EVENT_QP_REQ_ERR as u32,
            event_type::IBV_EVENT_QP_ACCESS_ERR as u32,
            event_type::IBV_EVENT_PATH_MIG_ERR as u32,
        ];
        const BROKEN: [u32; 3] = [
            event_type::IBV_EVENT_CQ_ERR as u32,
            event_type::IBV_EVENT_SRQ_ERR as u32,
            event_type::IBV_EVENT_DEVICE_FATAL as u32,
        ];
        const COMM_EST: u32 = event_type::IBV_EVENT_COMM_EST as u32;
        const LAST_WQE: u32 = event_type::IBV_EVENT_QP_LAST_WQE_REACHED as u32;
        const SRQ_LIMIT: u32 = event_type::IBV_EVENT_SRQ_LIMIT_REACHED as u32;
        const PORT: [u32; 7] = [
            event_type::IBV_EVENT_PORT_ACTIVE as u32,
            event_type::IBV_EVENT_PORT_ERR as u32,
            event_type::IBV_EVENT_LID_CHANGE as u32,
            event_type::IBV_EVENT_PKEY_CHANGE as u32,
            event_type::IBV_EVENT_SM_CHANGE as u32,
            event_type::IBV_EVENT_CLIENT_REREGISTER as u32,
            event_type::IBV_EVENT_GID_CHANGE as u32,
        ];
        let kind = event.kind;
        let of_qp = || -> Option<QpId> {
            // SAFETY: an event of this kind names a queue pair; it is one of ours and lives, as destroying it waits until
            // its events are acknowledged.
            let number = unsafe { (*(event.element as *const ib::ibv_qp)).qp_num };
            self.by_number.get(&number).copied()
        };
        match kind {
            COMM_EST => {
                let qp = self.qps.get(of_qp()?.0 as usize)?;
                // The peer's first message overtook its last CM message. The CM wants to know.
                // SAFETY: the id is ours.
                unsafe { ib::rdma_notify(qp.id.raw(), event_type::IBV_EVENT_COMM_EST) };
                None
            }
            LAST_WQE => of_qp().map(EndpointEvent::LastReceive),
            SRQ_LIMIT => {
                if let Some(shared) = self.srq.as_mut() {
                    shared.armed = false;
                }
                Some(EndpointEvent::ReceivesLow)
            }
            kind if QP_ERRORS.contains(&kind) => of_qp().map(EndpointEvent::QpError),
            kind if BROKEN.contains(&kind) => {
                warn!(device = self.device.name(), reactor = self.reactor, event = kind, "RDMA device failed");
                Some(EndpointEvent::DeviceFailed)
            }
            kind if PORT.contains(&kind) => {
                let mtu = self.device.mtu();
                info!(device = self.device.name(), gid = self.device.gid(), mtu, event = kind, "RDMA port changed");
                self.device.look_for_gid();
                Some(EndpointEvent::PortChanged)
            }
            _ => {
                debug!(device = self.device.name(), event = kind, "asynchronous event");
                None
            }
        }
    }
}

/// `struct ibv_async_event` with its kind as a number: the bindings have an enum there, which a newer library's kinds
/// would be no value of.
#[repr(C)]
#[derive(Clone, Copy)]
struct RawAsyncEvent {
    element: u64,
    kind: u32,
    padding: u32,
}

const _: () = assert!(size_of::<RawAsyncEvent>() == size_of::<ib::ibv_async_event>());
