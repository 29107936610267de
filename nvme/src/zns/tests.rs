use super::*;
use crate::command::tests::command;
use crate::io::{IoCommand, IoLimits, NamespaceView, check};
use crate::status::Status;
use proptest::prelude::*;

/// Zones of 64 blocks, 48 of which can be written.
const GEOMETRY: Geometry = Geometry { zone_blocks: 64, max_open: 2, max_active: 3 };
const EMPTY: Zone = Zone { state: ZoneState::Empty, capacity: 48, written: 0 };

fn zones(count: usize) -> Zones {
    Zones::new(GEOMETRY, vec![EMPTY; count]).unwrap()
}

fn write(zones: &mut Zones, slba: u64, blocks: u32) -> Result<u64, u16> {
    place(zones, zones.zone_of(slba), Some(slba), blocks)
}

fn append(zones: &mut Zones, zone: u32, blocks: u32) -> Result<u64, u16> {
    place(zones, zone, None, blocks)
}

fn place(zones: &mut Zones, zone: u32, slba: Option<u64>, blocks: u32) -> Result<u64, u16> {
    let at = zones.begin_write(zone, slba, blocks).map_err(Status::code)?;
    zones.end_write(zone, blocks, true);
    Ok(at)
}

fn act(zones: &mut Zones, zone: u32, action: ZoneAction) -> Result<bool, u16> {
    let needed = zones.begin_action(zone, action).map_err(Status::code)?;
    if needed {
        zones.end_action(zone, action, true);
    }
    Ok(needed)
}

fn state(zones: &Zones, zone: u32) -> ZoneState {
    zones.get(zone).unwrap().state
}

#[test]
fn writes_go_where_the_write_pointer_is() {
    let mut all = zones(3);
    assert_eq!(write(&mut all, 1, 1), Err(0x1bc), "not at the write pointer");
    assert_eq!(state(&all, 0), ZoneState::Empty, "a refused write opens nothing");
    assert_eq!(write(&mut all, 0, 40), Ok(0));
    assert_eq!(state(&all, 0), ZoneState::ImplicitlyOpened);
    assert_eq!(write(&mut all, 0, 1), Err(0x1bc));
    assert_eq!(write(&mut all, 40, 9), Err(0x1b8), "beyond the capacity");
    assert_eq!(append(&mut all, 0, 9), Err(0x1b8));
    assert_eq!(append(&mut all, 0, 7), Ok(40));
    assert_eq!(write(&mut all, 47, 1), Ok(47));
    assert_eq!((state(&all, 0), all.in_use()), (ZoneState::Full, (0, 0)));
    assert_eq!(write(&mut all, 48, 1), Err(0x1b9));
    assert_eq!(append(&mut all, 0, 1), Err(0x1b9));
    assert_eq!(write(&mut all, 64, 1), Ok(64));
    assert_eq!(write(&mut all, 128, 49), Err(0x1b8));
}

#[test]
fn zones_that_are_lost_or_worn_out_say_so() {
    let offline = Zone { state: ZoneState::Offline, capacity: 0, written: 0 };
    let worn = Zone { state: ZoneState::ReadOnly, ..EMPTY };
    let mut all = Zones::new(GEOMETRY, [EMPTY, worn, offline]).unwrap();
    assert_eq!((write(&mut all, 64, 1), write(&mut all, 128, 1)), (Err(0x1ba), Err(0x1bb)));
    assert_eq!(all.may_read(0, 128), Ok(()), "across zones");
    assert_eq!(all.may_read(127, 2), Err(Status::ZONE_IS_OFFLINE.dnr()));
    use ZoneAction as A;
    for action in [A::Open, A::Close, A::Finish, A::Reset] {
        assert_eq!([1, 2].map(|zone| act(&mut all, zone, action)), [Err(0x1bf); 2], "{action:?}");
    }
    assert_eq!(act(&mut all, 0, A::Offline), Err(0x1bf));
    assert_eq!((act(&mut all, 1, A::Offline), act(&mut all, 1, A::Offline)), (Ok(true), Ok(false)));
    assert_eq!(state(&all, 1), ZoneState::Offline);
    let mark = all.mark();
    all.learn(mark, 1, [Some(worn)]);
    assert_eq!(state(&all, 1), ZoneState::Offline, "given up for good");
}

#[test]
fn a_write_closes_what_a_write_opened_but_not_what_a_host_did() {
    let mut all = zones(6);
    write(&mut all, 0, 1).unwrap();
    assert_eq!(act(&mut all, 1, ZoneAction::Open), Ok(true));
    write(&mut all, 128, 1).unwrap();
    assert_eq!(state(&all, 0), ZoneState::Closed, "two may be open");
    assert_eq!(all.in_use(), (2, 3));
    assert_eq!(write(&mut all, 192, 1), Err(0x1bd), "three may be active");
    assert_eq!(act(&mut all, 3, ZoneAction::Open), Err(0x1bd));
    assert_eq!(act(&mut all, 2, ZoneAction::Open), Ok(true));
    assert_eq!(all.in_use(), (2, 3));
    assert_eq!(write(&mut all, 1, 1), Err(0x1be), "a host opened both");
    assert!(!all.begin_write(0, Some(1), 1).unwrap_err().is_dnr(), "it may work later");
    assert_eq!(act(&mut all, 0, ZoneAction::Open), Err(0x1be));
    assert_eq!(act(&mut all, 1, ZoneAction::Close), Ok(true));
    assert_eq!(write(&mut all, 1, 1), Ok(1));
    assert_eq!(act(&mut all, 0, ZoneAction::Finish), Ok(true));
    assert_eq!((all.in_use(), state(&all, 0)), ((1, 2), ZoneState::Full));
    assert_eq!(act(&mut all, 0, ZoneAction::Reset), Ok(true));
    assert_eq!((all.in_use(), *all.get(0).unwrap()), ((1, 2), EMPTY));
}

#[test]
fn each_action_takes_the_states_that_it_is_for() {
    use ZoneAction as A;
    use ZoneState as S;
    let states = [S::Empty, S::ImplicitlyOpened, S::ExplicitlyOpened, S::Closed, S::Full];
    let expected = [
        (A::Open, [Ok(true), Ok(true), Ok(false), Ok(true), Err(0x1bf)]),
        (A::Close, [Err(0x1bf), Ok(true), Ok(true), Ok(false), Err(0x1bf)]),
        (A::Finish, [Ok(true), Ok(true), Ok(true), Ok(true), Ok(false)]),
        (A::Reset, [Ok(false), Ok(true), Ok(true), Ok(true), Ok(true)]),
        (A::Offline, [Err(0x1bf); 5]),
    ];
    for (action, expected) in expected {
        for (state, expected) in states.into_iter().zip(expected) {
            let geometry = Geometry { max_open: 0, max_active: 0, ..GEOMETRY };
            let mut all = Zones::new(geometry, [Zone { state, written: 3, ..EMPTY }]).unwrap();
            assert_eq!(act(&mut all, 0, action), expected, "{action:?} {state:?}");
        }
    }
}

#[test]
fn all_zones_are_those_that_an_action_is_for() {
    use ZoneAction as A;
    use ZoneState as S;
    let states = [S::Empty, S::ImplicitlyOpened, S::ExplicitlyOpened, S::Closed, S::Full, S::ReadOnly, S::Offline];
    let zone = |state| Zone { state, written: 1, ..EMPTY };
    let geometry = Geometry { max_open: 0, max_active: 0, ..GEOMETRY };
    let all = Zones::new(geometry, states.map(zone)).unwrap();
    let concerned = |action| {
        let mut found = Vec::new();
        let mut from = 0;
        while let Some(zone) = all.next_for(action, from) {
            found.push(zone);
            from = zone + 1;
        }
        found
    };
    let found = [A::Open, A::Close, A::Finish, A::Reset, A::Offline].map(concerned);
    assert_eq!(found, [vec![3], vec![1, 2], vec![1, 2, 3], vec![1, 2, 3, 4], vec![5]]);
    assert_eq!(all.may_open_all(), Ok(()));
    let tight = Zones::new(Geometry { max_open: 2, max_active: 3, ..GEOMETRY }, states.map(zone)).unwrap();
    assert_eq!(tight.may_open_all(), Err(Status::TOO_MANY_OPEN_ZONES));
}

#[test]
fn after_a_failed_write_the_storage_is_asked() {
    let mut all = zones(2);
    all.begin_write(0, Some(0), 8).unwrap();
    let early = all.mark();
    all.end_write(0, 8, false);
    assert!(all.is_unknown(0) && !all.is_unknown(1));
    let said = Zone { state: ZoneState::Closed, written: 5, ..EMPTY };
    all.learn(early, 0, [Some(said)]);
    assert!(all.is_unknown(0), "asked before the write ended");
    all.learn(all.mark(), 0, [Some(said)]);
    assert_eq!((all.is_unknown(0), *all.get(0).unwrap(), all.in_use()), (false, said, (0, 1)));
    all.begin_write(0, Some(5), 1).unwrap();
    all.learn(all.mark(), 0, [Some(EMPTY)]);
    assert_eq!(all.get(0).unwrap().written, 5, "it is being written to");
}

#[test]
fn what_failed_keeps_no_room() {
    let mut all = zones(4);
    all.begin_write(0, Some(0), 8).unwrap();
    all.end_write(0, 8, false);
    assert_eq!((state(&all, 0), all.in_use(), all.is_unknown(0)), (ZoneState::Empty, (0, 0), true));
    all.begin_action(1, ZoneAction::Open).unwrap();
    assert_eq!(all.in_use(), (1, 1));
    all.end_action(1, ZoneAction::Open, false);
    assert_eq!((state(&all, 1), all.in_use(), all.is_unknown(1)), (ZoneState::Empty, (0, 0), true));
    write(&mut all, 128, 3).unwrap();
    act(&mut all, 2, ZoneAction::Close).unwrap();
    all.begin_action(2, ZoneAction::Open).unwrap();
    all.end_action(2, ZoneAction::Open, false);
    assert_eq!((state(&all, 2), all.in_use()), (ZoneState::Closed, (0, 1)));
    // The storage knows better.
    all.learn(all.mark(), 0, [Some(Zone { state: ZoneState::ImplicitlyOpened, written: 2, ..EMPTY })]);
    assert_eq!((all.get(0).unwrap().written, all.in_use()), (2, (1, 2)));
    // Of a write to a zone with data that failed nothing is known but that.
    all.begin_write(0, Some(2), 8).unwrap();
    all.end_write(0, 8, false);
    assert_eq!((state(&all, 0), all.in_use()), (ZoneState::ImplicitlyOpened, (1, 2)));
}

#[test]
fn zones_that_are_not_known_can_be_reset() {
    let mut all = zones(3);
    all.begin_write(1, None, 8).unwrap();
    all.end_write(1, 8, false);
    assert_eq!((all.next_for(ZoneAction::Reset, 0), all.is_meant(ZoneAction::Reset, 1)), (Some(1), true));
    assert_eq!(act(&mut all, 1, ZoneAction::Reset), Ok(true), "there may be something in it");
    assert!(!all.is_unknown(1));
    assert_eq!((act(&mut all, 1, ZoneAction::Reset), all.next_for(ZoneAction::Reset, 0)), (Ok(false), None));
}

#[test]
fn zones_that_are_not_known_may_be_meant() {
    use ZoneAction as A;
    let mut all = zones(3);
    all.begin_write(1, None, 8).unwrap();
    all.end_write(1, 8, false);
    for action in [A::Open, A::Close, A::Finish, A::Offline] {
        assert_eq!((all.next_for(action, 0), all.next_for(action, 2)), (Some(1), None), "{action:?}");
        assert!(!all.is_meant(action, 1), "{action:?}: the storage is asked first");
    }
    // A part of it had landed.
    all.learn(all.mark(), 1, [Some(Zone { state: ZoneState::ImplicitlyOpened, written: 2, ..EMPTY })]);
    let meant = [A::Open, A::Close, A::Finish, A::Offline].map(|action| all.is_meant(action, 1));
    assert_eq!(meant, [false, true, true, false]);
}

#[test]
fn a_failed_write_keeps_no_room_where_the_zone_made_room_meanwhile() {
    let mut all = Zones::new(Geometry { max_open: 1, max_active: 2, ..GEOMETRY }, [EMPTY; 4]).unwrap();
    all.begin_write(0, None, 8).unwrap();
    write(&mut all, 64, 1).unwrap();
    assert_eq!((state(&all, 0), all.in_use()), (ZoneState::Closed, (1, 2)), "it made room");
    assert_eq!(write(&mut all, 128, 1), Err(0x1bd), "two may be active");
    all.end_write(0, 8, false);
    assert_eq!((state(&all, 0), all.in_use()), (ZoneState::Empty, (1, 1)));
    assert_eq!(write(&mut all, 128, 1), Ok(128));
    // One with data keeps it.
    all.begin_write(2, None, 1).unwrap();
    all.begin_write(1, Some(65), 1).unwrap();
    all.end_write(2, 1, false);
    assert_eq!((state(&all, 2), all.in_use()), (ZoneState::Closed, (1, 2)));
}

#[test]
fn what_is_at_work_is_told_until_its_end_is() {
    let mut all = zones(2);
    assert!(!all.is_busy(0) && !all.is_busy(9));
    all.begin_write(0, None, 1).unwrap();
    all.begin_action(1, ZoneAction::Open).unwrap();
    assert!(all.is_busy(0) && all.is_busy(1));
    all.end_write(0, 1, false);
    all.end_action(1, ZoneAction::Open, false);
    assert!(!all.is_busy(0) && !all.is_busy(1));
}

#[test]
fn what_is_learnt_is_counted() {
    let mut all = zones(4);
    let zone = |state| Some(Zone { state, written: 3, ..EMPTY });
    let [open, closed, full] = [ZoneState::ImplicitlyOpened, ZoneState::Closed, ZoneState::Full].map(zone);
    all.learn(all.mark(), 1, [open, closed, full]);
    assert_eq!((state(&all, 0), all.in_use()), (ZoneState::Empty, (1, 2)));
    all.learn(all.mark(), 0, [full, None, Some(EMPTY), closed, closed]);
    let states = [0, 1, 2, 3].map(|zone| state(&all, zone));
    let expected = [ZoneState::Full, ZoneState::ImplicitlyOpened, ZoneState::Empty, ZoneState::Closed];
    assert_eq!((states, all.in_use()), (expected, (1, 2)));
    all.begin_write(1, None, 1).unwrap();
    all.end_write(1, 1, false);
    all.learn(all.mark(), 1, [None]);
    assert!(all.is_unknown(1), "nothing was said of it");
}

#[test]
fn room_is_made_by_zones_that_nobody_is_at() {
    let mut all = zones(4);
    all.begin_write(0, None, 1).unwrap();
    write(&mut all, 64, 1).unwrap();
    write(&mut all, 128, 1).unwrap();
    assert_eq!([0, 1].map(|zone| state(&all, zone)), [ZoneState::ImplicitlyOpened, ZoneState::Closed]);
    // None but such.
    let mut all = zones(4);
    all.begin_write(0, None, 1).unwrap();
    all.begin_write(1, None, 1).unwrap();
    write(&mut all, 128, 1).unwrap();
    assert_eq!(state(&all, 0), ZoneState::Closed);
    // A zone that a host opens is open when that begins.
    let mut all = zones(4);
    write(&mut all, 0, 1).unwrap();
    assert_eq!(all.begin_action(0, ZoneAction::Open), Ok(true));
    assert_eq!((state(&all, 0), all.in_use()), (ZoneState::ExplicitlyOpened, (1, 1)));
    all.begin_write(1, None, 1).unwrap();
    write(&mut all, 128, 1).unwrap();
    assert_eq!([0, 1].map(|zone| state(&all, zone)), [ZoneState::ExplicitlyOpened, ZoneState::Closed]);
}

#[test]
fn geometry_that_hosts_would_not_take_is_refused() {
    let new = |geometry, zones: &[Zone]| Zones::new(geometry, zones.iter().copied()).map(drop);
    let size = Geometry { zone_blocks: 48, ..GEOMETRY };
    assert_eq!(new(size, &[EMPTY]), Err(GeometryError::ZoneSize(48)));
    assert_eq!(new(GEOMETRY, &[]), Err(GeometryError::Count(0)));
    for capacity in [0, 65] {
        let refused = new(GEOMETRY, &[EMPTY, Zone { capacity, ..EMPTY }]);
        assert_eq!(refused, Err(GeometryError::Capacity(capacity)));
    }
    let limits = Geometry { max_open: 4, ..GEOMETRY };
    assert_eq!(new(limits, &[EMPTY]), Err(GeometryError::Limits { open: 4, active: 3 }));
    assert_eq!(new(Geometry { max_open: 4, max_active: 0, ..GEOMETRY }, &[EMPTY]), Ok(()));
}

fn reported(all: &Zones, slba: u64, filter: ZoneFilter, partial: bool, len: usize) -> Vec<u8> {
    let mut into = vec![0xa5; len];
    report(all, slba, filter, partial, &mut into);
    into
}

#[test]
fn reports_match_golden_bytes() {
    let mut all = zones(3);
    write(&mut all, 64, 5).unwrap();
    let bytes = reported(&all, 70, ZoneFilter::All, false, 64 + 128);
    let mut golden = vec![0; 64 + 128];
    golden[0] = 2;
    golden[64..68].copy_from_slice(&[2, 0x20, 0, 0]);
    (golden[72], golden[80], golden[88]) = (48, 64, 69);
    golden[128..132].copy_from_slice(&[2, 0x10, 0, 0]);
    (golden[136], golden[144], golden[152]) = (48, 128, 128);
    assert_eq!(bytes, golden);
    act(&mut all, 2, ZoneAction::Finish).unwrap();
    let full = reported(&all, 0, ZoneFilter::In(ZoneState::Full), false, 128);
    assert_eq!((full[0], full[65], full[80], full[88]), (1, 0xe0, 128, 192));
}

#[test]
fn partial_reports_count_what_is_transferred_and_others_what_there_is() {
    let all = zones(10);
    for (len, whole) in [(64, 0), (127, 0), (128, 1), (188, 1), (192, 2), (64 * 11, 10), (64 * 20, 10)] {
        let count =
            |partial| u64::from_le_bytes(reported(&all, 0, ZoneFilter::All, partial, len)[..8].try_into().unwrap());
        assert_eq!((count(true), count(false)), (whole, 10), "{len}");
        let bytes = reported(&all, 0, ZoneFilter::All, true, len);
        let listed = bytes[64..].chunks(64).filter(|descriptor| descriptor[0] == 2).count();
        assert_eq!(listed as u64, whole);
    }
    assert_eq!(reported(&all, 64 * 9, ZoneFilter::All, false, 64)[0], 1, "from the zone that is named");
    assert_eq!(reported(&all, 0, ZoneFilter::In(ZoneState::Full), false, 128), vec![0; 128]);
}

const VIEW: NamespaceView = NamespaceView {
    nsid: 1,
    blocks: 640,
    block_shift: 9,
    read_only: false,
    compare: true,
    write_zeroes: true,
    deallocate: false,
    verify: true,
    copy: false,
    reservations: true,
    persistent: false,
    zone_shift: Some(6),
};

fn parse(view: &NamespaceView, opcode: u8, data: u32, cdws: [u32; 6]) -> Result<IoCommand, u16> {
    let limits = IoLimits { mdts_bytes: 64 << 10, ..IoLimits::default() };
    check(&command(opcode, 1, data, cdws), view, &limits).map_err(Status::code)
}

#[test]
fn append_names_the_first_block_of_a_zone() {
    let append = |slba, nlb: u32| parse(&VIEW, 0x7d, (nlb + 1) * 512, [slba, 0, nlb, 0, 0, 0]);
    let expected = ZoneCommand::Append { zslba: 128, blocks: 8, fua: false };
    assert_eq!(append(128, 7), Ok(IoCommand::Zone(expected)));
    assert_eq!(append(129, 7), Err(0x02));
    assert_eq!(append(640, 7), Err(0x80));
    assert!(append(0, 127).is_ok());
    assert_eq!(append(0, 128), Err(0x02), "MDTS, as ZASL is 0");
    assert_eq!(parse(&VIEW, 0x7d, 511, [0; 6]), Err(0x0f));
    assert_eq!(parse(&NamespaceView { zone_shift: None, ..VIEW }, 0x7d, 512, [0; 6]), Err(0x01));
    assert_eq!(parse(&NamespaceView { read_only: true, ..VIEW }, 0x7d, 512, [0; 6]), Err(0x20));
}

#[test]
fn management_send_is_parsed_or_refused() {
    let send = |slba, cdw13| parse(&VIEW, 0x79, 0, [slba, 0, 0, cdw13, 0, 0]);
    let zone = |action, zslba| Ok(IoCommand::Zone(ZoneCommand::Send { action, zslba }));
    let actions = [ZoneAction::Close, ZoneAction::Finish, ZoneAction::Open, ZoneAction::Reset, ZoneAction::Offline];
    for (zsa, action) in (1..).zip(actions) {
        assert_eq!(send(64, zsa), zone(action, Some(64)));
        assert_eq!(send(65, zsa | 1 << 8), zone(action, None), "SLBA is not looked at");
    }
    assert_eq!((send(65, 4), send(640, 4)), (Err(0x02), Err(0x80)));
    for cdw13 in [0, 6, 0x10, 0x11, 0xff, 3 | 1 << 9] {
        assert_eq!(send(0, cdw13), Err(0x02), "{cdw13:x}");
    }
    assert_eq!(parse(&NamespaceView { read_only: true, ..VIEW }, 0x79, 0, [0, 0, 0, 4, 0, 0]), Err(0x20));
}

#[test]
fn management_receive_is_parsed_or_refused() {
    let receive = |slba, numd: u32, cdw13| parse(&VIEW, 0x7a, (numd + 1) * 4, [slba, 0, numd, cdw13, 0, 0]);
    let expected =
        ZoneCommand::Receive { slba: 70, len: 4096, filter: ZoneFilter::In(ZoneState::Closed), partial: true };
    assert_eq!(receive(70, 1023, 4 << 8 | 1 << 16), Ok(IoCommand::Zone(expected)));
    assert!(receive(639, 15, 7 << 8).is_ok());
    assert_eq!(receive(640, 15, 0), Err(0x80));
    assert_eq!(receive(0, 14, 0), Err(0x02), "shorter than the header");
    assert_eq!(receive(0, 15, 8 << 8), Err(0x02));
    assert_eq!(receive(0, 15, 1), Err(0x02), "extensions are 0 bytes long");
    assert_eq!(parse(&VIEW, 0x7a, 4, [0, 0, u32::MAX, 0, 0, 0]), Err(0x02));
    assert!(parse(&NamespaceView { read_only: true, ..VIEW }, 0x7a, 64, [0, 0, 15, 0, 0, 0]).is_ok());
}

proptest! {
    /// Whatever hosts do: limits hold, counts are right, and a write is taken at the write pointer alone.
    #[test]
    fn any_commands_keep_the_rules(steps in proptest::collection::vec((0u8..10, 0u32..5, 0u64..64, 1u32..20), 1..200)) {
        let mut all = zones(5);
        for (kind, zone, offset, blocks) in steps {
            let before = *all.get(zone).unwrap();
            let start = all.start(zone);
            match kind {
                0 => {
                    let done = write(&mut all, start + offset, blocks);
                    if done.is_ok() {
                        prop_assert_eq!(offset, before.written);
                    }
                }
                1 | 2 => if let Ok(at) = append(&mut all, zone, blocks) {
                    prop_assert_eq!(at, start + before.written);
                },
                3 => drop(act(&mut all, zone, ZoneAction::Open)),
                4 => drop(act(&mut all, zone, ZoneAction::Close)),
                5 => drop(act(&mut all, zone, ZoneAction::Finish)),
                6 => drop(act(&mut all, zone, ZoneAction::Reset)),
                7 => if all.begin_write(zone, None, blocks).is_ok() {
                    all.end_write(zone, blocks, false);
                },
                8 => if all.begin_action(zone, ZoneAction::Open) == Ok(true) {
                    all.end_action(zone, ZoneAction::Open, false);
                },
                _ => drop(all.may_read(start + offset, blocks)),
            }
            let states: Vec<ZoneState> = (0..5).map(|zone| state(&all, zone)).collect();
            let count = |wanted: &[ZoneState]| states.iter().map(|state| u32::from(wanted.contains(state))).sum::<u32>();
            let open = count(&[ZoneState::ImplicitlyOpened, ZoneState::ExplicitlyOpened]);
            let active = open + count(&[ZoneState::Closed]);
            prop_assert_eq!(all.in_use(), (open, active));
            prop_assert!(open <= 2 && active <= 3);
            for zone in 0..5 {
                let Zone { state, capacity, written } = *all.get(zone).unwrap();
                prop_assert!(written <= capacity);
                prop_assert!(state != ZoneState::Empty || written == 0);
            }
        }
    }

    #[test]
    fn any_command_of_zones_is_parsed_or_refused(opcode in 0x79u8..0x7e, cdws: [u32; 6], data: u32) {
        if let Ok(IoCommand::Zone(zone)) = parse(&VIEW, opcode, data, cdws) {
            prop_assert!(zone.slba() < VIEW.blocks);
        }
    }
}
