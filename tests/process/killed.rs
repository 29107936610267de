//! What a target promised to keep is kept when it is killed.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use farside::host::raw::{RawHost, RawQueue, RawQueueId, RawResponse};
use farside::host::wire::{self, ReservationReport, Sqe};
use farside::rdma::soft::Soft;
use nix::sys::signal::Signal;

use crate::served::{NQN, Served, own_address};

const LIMIT: Duration = Duration::from_secs(30);
const KEY: u64 = 0x0123_4567_89ab_cdef;

/// A host with an I/O queue, as far as reservations need one.
struct Host {
    raw: RawHost<Soft>,
    io: RawQueueId,
}

impl Host {
    fn connect(address: SocketAddr, identity: u8) -> Self {
        let source: IpAddr = own_address();
        let provider = Arc::new(Soft::new(1).expect("the software provider"));
        let mut raw = RawHost::new(provider, 8 << 20, Some(source)).expect("a host");
        let hostnqn = format!("nqn.2014-08.org.example:{identity}");
        let queue = |raw: &mut RawHost<Soft>, qid: u16, cntlid: u16| {
            let (id, _) = raw.connect(address, RawQueue::new(qid, 32), LIMIT).expect("a connection");
            let data = wire::connect_data(&[identity; 16], cntlid, NQN, &hostnqn);
            let response = call(raw, id, wire::connect(qid, 31, 0), &mut data.to_vec());
            assert!(response.status().is_success(), "Connect: {}", response.status());
            (id, response.dword0() as u16)
        };
        let (admin, cntlid) = queue(&mut raw, 0, 0xffff);
        // CC.EN, and CSTS.RDY.
        assert!(call(&mut raw, admin, wire::property_set(0x14, 0x0046_0001), &mut []).status().is_success());
        let deadline = Instant::now() + LIMIT;
        while call(&mut raw, admin, wire::property_get(0x1c, false), &mut []).dword0() & 1 == 0 {
            assert!(Instant::now() < deadline, "the controller does not become ready");
        }
        let (io, _) = queue(&mut raw, 1, cntlid);
        Self { raw, io }
    }

    fn call(&mut self, sqe: Sqe, data: &mut [u8]) -> RawResponse {
        call(&mut self.raw, self.io, sqe, data)
    }

    fn report(&mut self) -> ReservationReport {
        let mut bytes = vec![0; 4096];
        let response = self.call(wire::reservation_report(1, 4096), &mut bytes);
        assert!(response.status().is_success(), "report: {}", response.status());
        ReservationReport::read(&bytes)
    }
}

/// One command; `data` go there and come back.
fn call(raw: &mut RawHost<Soft>, queue: RawQueueId, sqe: Sqe, data: &mut [u8]) -> RawResponse {
    let mut buffer = raw.take(data.len().max(1)).expect("host memory");
    buffer.as_mut_slice()[..data.len()].copy_from_slice(data);
    let keyed = wire::keyed(buffer.addr(), data.len() as u32, raw.rkey(), false);
    let sqe = if data.is_empty() { sqe } else { sqe.sgl(keyed) };
    let response = raw.call(queue, &sqe.cid(1).0, LIMIT).expect("an answer");
    data.copy_from_slice(&buffer.as_slice()[..data.len()]);
    raw.give(buffer);
    response
}

#[test]
fn reservations_outlive_a_killed_target() {
    let folder = tempfile::tempdir().expect("a folder");
    let address = SocketAddr::new(own_address(), 4420);
    let text = format!(
        "[[subsystem]]\nnqn = \"{NQN}\"\n[[subsystem.namespace]]\nnsid = 1\nfile = \"{0}/disk.img\"\nsize = \"16M\"\n\
         [[listener]]\naddress = \"{address}\"\n[options]\nprovider = \"soft\"\nreactors = 1\npool_size = \"4M\"\n\
         receive_slots = 256\nstate_dir = \"{0}/state\"\n",
        folder.path().display(),
    );
    let start = || Served::start_file("farside.toml", &text, address, |_| ());
    let mut served = start();
    let mut host = Host::connect(address, 1);
    // CPTPL = 11b: keep it through power loss. Then Exclusive Access.
    let register = host.call(wire::reservation_register(1, 0, false, 3), &mut wire::reservation_keys(0, KEY));
    assert!(register.status().is_success(), "register: {}", register.status());
    let acquire = host.call(wire::reservation_acquire(1, 0, 2), &mut wire::reservation_keys(KEY, 0));
    assert!(acquire.status().is_success(), "acquire: {}", acquire.status());
    let before = host.report();
    assert_eq!((before.rtype, before.persist, before.registrants.len()), (2, true, 1));
    // At once, with no time to put anything in order.
    served.signal(Signal::SIGKILL);
    assert!(served.status_within(LIMIT).is_some_and(|status| !status.success()), "it lives");
    drop((host, served));

    let _served = start();
    let mut other = Host::connect(address, 2);
    let after = other.report();
    let who = |report: &ReservationReport| {
        report.registrants.iter().map(|(_, holds, key, host)| (*holds, *key, *host)).collect::<Vec<_>>()
    };
    assert_eq!((after.rtype, after.persist, who(&after)), (2, true, vec![(true, KEY, [1; 16])]));
    assert_eq!(who(&after), who(&before));
    let read = other.call(wire::block_command(2, 1, 0, 1), &mut [0; 512]);
    assert_eq!(read.status().code(), nvme::Status::RESERVATION_CONFLICT.code(), "{}", read.status());
    let mut holder = Host::connect(address, 1);
    assert!(holder.call(wire::block_command(2, 1, 0, 1), &mut [0; 512]).status().is_success());
}
