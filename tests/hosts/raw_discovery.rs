//! The discovery log: what each host is told of, under which names, and when that changes.

use farside::host::raw::RawQueueId;
use farside::host::wire::{self, DISCOVERY_ENTRY, DiscoveryEntry, Sqe};
use farside::target::{Options, RdmaProvider, Referral, Target};

use crate::rig::{DISCOVERY_NQN, HOST_NQN, LIMIT, NQN, OTHER_NQN, Raw, Rig, Setup, small};

/// A host with a persistent discovery controller that is told of changes.
fn watcher<R: Rig>(setup: &Setup<R>, subnqn: &str, hostnqn: &str) -> (Raw<R>, RawQueueId) {
    let mut raw = setup.raw_as(3);
    raw.subnqn = subnqn.into();
    raw.hostnqn = hostnqn.into();
    raw.kato_ms = 120_000;
    let admin = raw.admin_up();
    assert!(raw.call(admin, Sqe::new(0x09).cdw(10, 0x0b).cdw(11, 1 << 31)).status().is_success());
    (raw, admin)
}

/// Generation counter and entries, each with its flags.
fn log<R: Rig>(raw: &mut Raw<R>, admin: RawQueueId) -> (u64, Vec<(DiscoveryEntry, u8)>) {
    let (response, bytes) = raw.call_for(admin, wire::get_log_page(0x70, 0, 0, 32 << 10, false), 32 << 10);
    assert!(response.status().is_success(), "{}", response.status());
    let number = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
    let entries = bytes[DISCOVERY_ENTRY..].chunks(DISCOVERY_ENTRY).take(number(8) as usize);
    (number(0), entries.map(|entry| (DiscoveryEntry::read(entry).expect("an entry"), entry[10])).collect())
}

fn names<R: Rig>(raw: &mut Raw<R>, admin: RawQueueId) -> Vec<(u8, String)> {
    log(raw, admin).1.into_iter().map(|(entry, _)| (entry.subtype, entry.subnqn)).collect()
}

fn target<R: Rig>(setup: &Setup<R>) -> &Target {
    setup.target.as_ref().expect("a target")
}

fn referral(addr: &str, hosts: Option<&[&str]>) -> Referral {
    Referral {
        addr: addr.parse().expect("an address"),
        nqn: None,
        hosts: hosts.map(|hosts| hosts.iter().map(|host| (*host).to_owned()).collect()),
        portid: 9,
        provider: RdmaProvider::RoceV2,
    }
}

pub(crate) fn referrals_are_told_to_those_they_are_for<R: Rig>() {
    let rig = R::new();
    let provider = rig.target();
    let setup =
        Setup::<R>::built(rig, small(), provider, |builder| builder.referral(referral("203.0.113.1:8009", None)));
    let (mut first, admin1) = watcher(&setup, DISCOVERY_NQN, HOST_NQN);
    let (mut second, admin2) = watcher(&setup, DISCOVERY_NQN, "other");
    let referred = |raw: &mut Raw<R>, admin| -> Vec<String> {
        let referrals = log(raw, admin).1.into_iter().filter(|(entry, _)| entry.subtype == 1);
        referrals
            .map(|(entry, flags)| {
                assert_eq!((entry.trtype, entry.portid, entry.cntlid, flags), (1, 9, 0xffff, 0));
                assert_eq!(entry.subnqn, DISCOVERY_NQN);
                entry.address().expect("an address").to_string()
            })
            .collect()
    };
    assert_eq!(referred(&mut first, admin1), ["203.0.113.1:8009"]);
    let before = log(&mut first, admin1).0;
    first.host.send(admin1, &Sqe::new(0x0c).cid(0x900).0).expect("sent");
    let more = referral("[2001:db8::1]:4420", Some(&[HOST_NQN]));
    target(&setup).add_referral(more.clone()).expect("a referral");
    assert!(target(&setup).add_referral(more.clone()).is_err(), "twice");
    assert!(target(&setup).add_referral(referral("0.0.0.0:8009", None)).is_err(), "to nowhere");
    let event = first.host.response(admin1, LIMIT).expect("an event");
    assert_eq!((event.cid(), event.dword0()), (0x900, 0x0070_f002));
    assert_ne!(log(&mut first, admin1).0, before, "the generation counter");
    assert_eq!(referred(&mut first, admin1), ["203.0.113.1:8009", "[2001:db8::1]:4420"]);
    assert_eq!(referred(&mut second, admin2), ["203.0.113.1:8009"]);
    target(&setup).remove_referral(&more).expect("away");
    assert!(target(&setup).remove_referral(&more).is_err(), "away twice");
    assert_eq!(referred(&mut first, admin1), ["203.0.113.1:8009"]);
}

pub(crate) fn a_discovery_name_of_its_own_is_told_and_answered<R: Rig>() {
    const OWN: &str = "nqn.2026-11.io.farside:discovery";
    let options = Options { discovery_nqn: Some(OWN.into()), ..small() };
    let setup = Setup::<R>::with(R::new(), options);
    for subnqn in [DISCOVERY_NQN, OWN] {
        let (mut raw, admin) = watcher(&setup, subnqn, HOST_NQN);
        assert_eq!(raw.identify_controller(admin).subnqn, OWN);
        let (_, entries) = log(&mut raw, admin);
        let itself = entries.first().expect("an entry");
        assert_eq!((itself.0.subtype, itself.0.subnqn.as_str()), (3, OWN));
        assert_eq!(itself.1, 3, "persistent connections are fine, and all its addresses tell the same");
        assert_eq!(itself.0.address(), Some(raw.address));
        raw.host.close(admin);
    }
}

pub(crate) fn each_host_reads_of_what_it_may_use<R: Rig>() {
    let setup = Setup::<R>::start();
    let (mut raw, admin) = watcher(&setup, DISCOVERY_NQN, HOST_NQN);
    let expected = |nqns: &[&str]| -> Vec<(u8, String)> {
        let itself = std::iter::once((3, DISCOVERY_NQN.to_owned()));
        itself.chain(nqns.iter().map(|nqn| (2, (*nqn).to_owned()))).collect()
    };
    assert_eq!(names(&mut raw, admin), expected(&[NQN, OTHER_NQN]));
    for (change, left) in [(false, &[OTHER_NQN][..]), (true, &[NQN, OTHER_NQN])] {
        raw.host.send(admin, &Sqe::new(0x0c).cid(0x901).0).expect("sent");
        target(&setup).set_allow_any_host(NQN, change).expect("a change");
        let event = raw.host.response(admin, LIMIT).expect("an event");
        assert_eq!((event.cid(), event.dword0()), (0x901, 0x0070_f002));
        assert_eq!(names(&mut raw, admin), expected(left));
    }
}
