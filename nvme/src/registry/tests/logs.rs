//! Get Log Page: offsets, lengths, and what each page says.

use super::*;

const INVALID_FIELD: Result<Vec<u8>, Status> = Err(Status::INVALID_FIELD.dnr());

#[test]
fn pages_are_those_that_the_supported_page_lists() {
    let mut bench = Bench::new();
    let io = bench.host();
    let discovery = bench.discovery_host();
    for (ctrl, expected) in [(io, &[0u32, 1, 2, 3, 4, 5, 0x0c, 0x12, 0x13, 0x80][..]), (discovery, &[0, 1, 0x12, 0x70])]
    {
        let supported = bench.log(ctrl, 0, false, 0, 1024).unwrap();
        for lid in 0..=0xffu32 {
            let listed = supported[usize::try_from(lid).unwrap() * 4] == 1;
            assert_eq!(listed, expected.contains(&lid), "{lid:x}");
            let got = bench.log(ctrl, lid, true, 0, 512);
            let refused = Err(Status::INVALID_LOG_PAGE.dnr());
            assert!(if listed { got.is_ok() } else { got == refused }, "{lid:x}");
        }
    }
}

#[test]
fn smart_of_a_discovery_controller_is_an_invalid_log_page() {
    let mut bench = Bench::new();
    let ctrl = bench.discovery_host();
    assert_eq!(bench.log(ctrl, 2, false, 0, 512), Err(Status::INVALID_LOG_PAGE.dnr()));
}

#[test]
fn offsets_are_served_exactly_and_refused_past_the_end() {
    let mut bench = Bench::new();
    let ctrl = bench.discovery_host();
    for n in 0..5 {
        bench.registry.add_subsystem(&subsystem(&format!("nqn.2026-01.io.farside:{n}"))).unwrap();
    }
    let addr = "10.0.0.1:4420".parse().unwrap();
    bench.registry.add_listener(Listener { addr, portid: 1, provider: RdmaProvider::RoceV2 }).unwrap();
    // Header, the discovery subsystem itself, six subsystems.
    let end = 8 * 1024;
    let whole = bench.log(ctrl, 0x70, true, 0, end).unwrap();
    for (offset, len) in [(0, 16), (0, 1024), (1024, 1024), (512, 1024), (4092, 8), (end - 4, 4)] {
        let range = usize::try_from(offset).unwrap()..usize::try_from(offset + len).unwrap();
        assert_eq!(bench.log(ctrl, 0x70, true, offset, len).unwrap(), whole[range]);
    }
    let last = [&whole[whole.len() - 4..], &[0; 4]].concat();
    assert_eq!(bench.log(ctrl, 0x70, true, end - 4, 8), Ok(last), "past the end is zero");
    assert_eq!(bench.log(ctrl, 0x70, true, end, 4), Ok(vec![0; 4]));
    assert_eq!(bench.log(ctrl, 0x70, true, end + 4, 4), INVALID_FIELD);
    assert_eq!(bench.log(ctrl, 0x70, true, 2, 4), INVALID_FIELD);
    let far = command(0x02, 0, 4, [0x70, 0, 0, 1, 0, 0]);
    assert_eq!(bench.data(ctrl, &far), INVALID_FIELD);
}

#[test]
fn lengths_are_bounded_by_mdts_and_by_the_sgl() {
    let mut bench = Bench::new();
    let ctrl = bench.host();
    assert_eq!(bench.log(ctrl, 2, true, 0, 1 << 20).unwrap().len(), 1 << 20);
    assert_eq!(bench.log(ctrl, 2, true, 0, (1 << 20) + 4), INVALID_FIELD);
    let largest = command(0x02, 0, 4096, [0xffff_0002, 0xffff, 0, 0, 0, 0]);
    assert_eq!(bench.data(ctrl, &largest), INVALID_FIELD);
    let short = command(0x02, 0, 508, [0x007f_0002, 0, 0, 0, 0, 0]);
    assert_eq!(bench.data(ctrl, &short), Err(Status::DATA_SGL_LENGTH_INVALID.dnr()));
}

#[test]
fn error_log_has_the_failed_commands_with_the_byte_at_fault() {
    let mut bench = Bench::new();
    let ctrl = bench.host();
    assert_eq!(bench.log(ctrl, 1, false, 0, 64), Ok(vec![0; 64]));
    bench.completed(ctrl, &command(0x09, 0, 0, [0x03, 0, 0, 0, 0, 0])).unwrap_err();
    bench.registry.record_error(
        ctrl,
        &CommandError {
            sqid: 2,
            cid: 5,
            opcode: 2,
            nsid: 1,
            lba: 4096,
            status: Status::LBA_OUT_OF_RANGE.dnr(),
            location: crate::io::error_location(Status::LBA_OUT_OF_RANGE),
        },
    );
    let log = bench.log(ctrl, 1, false, 0, 192).unwrap();
    let newest =
        [2, 0, 0, 0, 0, 0, 0, 0, 2, 0, 5, 0, 0x00, 0x81, 40, 0, 0, 16, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 2];
    assert_eq!(log[..32], newest);
    let older = [1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x34, 0x12, 0x04, 0x80, 40, 0];
    assert_eq!(log[64..80], older);
    assert_eq!(log[128..], [0; 64]);
}

#[test]
fn smart_has_the_counters_of_the_subsystem() {
    let mut bench = Bench::new();
    let ctrl = bench.host();
    let counters = IoCounters { read_commands: 77, ..IoCounters::default() };
    bench.registry.set_io_counters(bench.subsystem, counters);
    let get = |nsid| command(0x02, nsid, 512, [0x007f_0002, 0, 0, 0, 0, 0]);
    assert!(get(0).reads_counters());
    assert!(!command(0x02, 0, 512, [0x007f_0001, 0, 0, 0, 0, 0]).reads_counters());
    let smart = bench.data(ctrl, &get(0xffff_ffff)).unwrap();
    assert_eq!(smart[64], 77);
    assert!(bench.data(ctrl, &get(0)).is_ok());
    assert_eq!(bench.data(ctrl, &get(1)), INVALID_FIELD, "no page of one namespace");
    let smart = bench.data(ctrl, &get(0)).unwrap();
    assert_eq!(smart[176], 1, "the refusal counts as an error log entry");
}

#[test]
fn firmware_and_effects_are_filled() {
    let mut bench = Bench::new();
    let ctrl = bench.host();
    let firmware = bench.log(ctrl, 3, false, 0, 512).unwrap();
    assert_eq!(firmware[0], 1);
    assert_eq!(firmware[8..16], *b"0.1.0   ");
    let effects = bench.log(ctrl, 5, false, 0, 4096).unwrap();
    assert_eq!(effects[1024 + 8 * 4], 3, "Write Zeroes changes content");
    let other = command(0x02, 0, 4, [5, 0, 0, 0, 1 << 24, 0]);
    assert_eq!(bench.data(ctrl, &other), INVALID_FIELD);
    let features = bench.log(ctrl, 0x12, false, 0, 1024).unwrap();
    assert_eq!(features[7 * 4..8 * 4], [1, 0, 0x20, 0]);
}

#[test]
fn discovery_log_lists_what_this_host_may_use() {
    let mut bench = Bench::new();
    let private = SubsystemConfig {
        allow_any_host: false,
        hosts: vec!["someone-else".into()],
        ..subsystem("nqn.2026-01.io.farside:private")
    };
    bench.registry.add_subsystem(&private).unwrap();
    for addr in ["0.0.0.0:4420", "[::]:4420", "192.168.0.1:4421"] {
        let listener = Listener { addr: addr.parse().unwrap(), portid: 2, provider: RdmaProvider::RoceV2 };
        bench.registry.add_listener(listener).unwrap();
    }
    let ctrl = bench.dial(Dial::discovery(0).from("[::ffff:10.0.0.9]:4420")).unwrap().ctrl;
    bench.enable(ctrl);
    let log = bench.log(ctrl, 0x70, false, 0, 8192).unwrap();
    let numrec = u64::from_le_bytes(log[8..16].try_into().unwrap());
    assert_eq!(numrec, 4, "two subsystems at two addresses");
    let text = |field: &[u8]| String::from_utf8_lossy(field).trim_end_matches(['\0', ' ']).to_owned();
    let entry = |n: usize| {
        let entry = &log[1024 * (n + 1)..1024 * (n + 2)];
        (entry[2], text(&entry[256..512]), text(&entry[512..768]), text(&entry[32..64]))
    };
    let expect = |subtype, nqn: &str, addr: &str, port: &str| (subtype, nqn.into(), addr.into(), port.into());
    assert_eq!(entry(0), expect(3, DISCOVERY_NQN, "10.0.0.9", "4420"));
    assert_eq!(entry(1), expect(3, DISCOVERY_NQN, "192.168.0.1", "4421"));
    assert_eq!(entry(2), expect(2, NQN, "10.0.0.9", "4420"));
    assert_eq!(entry(3), expect(2, NQN, "192.168.0.1", "4421"));
    assert!(log[1024 * 5..].iter().all(|&byte| byte == 0));
}

#[test]
fn other_discovery_services_are_told_to_those_they_are_for() {
    let mut bench = Bench::new();
    let referral = |addr: &str, nqn: Option<&str>, hosts: Option<&[&str]>| Referral {
        addr: addr.parse().unwrap(),
        nqn: nqn.map(Into::into),
        hosts: hosts.map(|hosts| hosts.iter().map(|host| (*host).to_owned()).collect()),
        portid: 5,
        provider: RdmaProvider::RoceV2,
    };
    let ctrl = bench.discovery_host();
    let entries = |bench: &mut Bench| {
        let log = bench.log(ctrl, 0x70, false, 0, 8192).unwrap();
        let count = usize::from(log[8]);
        let entries = log[1024..].chunks(1024).take(count).filter(|entry| entry[2] == 1);
        let text = |field: &[u8]| String::from_utf8_lossy(field).trim_end_matches(['\0', ' ']).to_owned();
        entries.map(|entry| (text(&entry[512..768]), text(&entry[256..512]), entry[4])).collect::<Vec<_>>()
    };
    let registry = &mut bench.registry;
    registry.add_referral(referral("10.0.0.7:8009", None, None)).unwrap();
    registry.add_referral(referral("10.0.0.7:8009", Some("nqn.2026-01.io.x:d"), Some(&[HOST, "b"]))).unwrap();
    registry.add_referral(referral("[fd00::8]:8009", None, Some(&["b"]))).unwrap();
    assert_eq!(
        registry.add_referral(referral("10.0.0.7:8009", Some(DISCOVERY_NQN), None)),
        Err(ConfigError::DuplicateReferral("10.0.0.7:8009".parse().unwrap()))
    );
    for addr in ["0.0.0.0:8009", "10.0.0.1:0", "[ff02::1]:8009"] {
        let refused = registry.add_referral(referral(addr, None, None));
        assert_eq!(refused, Err(ConfigError::ReferralAddress(addr.parse().unwrap())));
    }
    let expected = [("10.0.0.7", DISCOVERY_NQN, 5), ("10.0.0.7", "nqn.2026-01.io.x:d", 5)];
    assert_eq!(entries(&mut bench), expected.map(|(addr, nqn, port)| (addr.to_owned(), nqn.to_owned(), port)));
    let addr = "10.0.0.7:8009".parse().unwrap();
    bench.registry.remove_referral(addr, None).unwrap();
    assert_eq!(bench.registry.remove_referral(addr, None), Err(ConfigError::NoSuchReferral(addr)));
    assert_eq!(entries(&mut bench).len(), 1);
    assert_eq!(bench.registry.referrals().count(), 2);
}

#[test]
fn discovery_entries_say_which_of_them_lead_to_the_same() {
    let mut bench = Bench::new();
    let add = |bench: &mut Bench, addr: &str| {
        let listener = Listener { addr: addr.parse().unwrap(), portid: 0, provider: RdmaProvider::RoceV2 };
        bench.registry.add_listener(listener).unwrap();
    };
    let flags = |bench: &mut Bench| {
        let ctrl = bench.dial(Dial::discovery(5000).from("10.0.0.1:4420")).unwrap().ctrl;
        bench.enable(ctrl);
        let log = bench.log(ctrl, 0x70, false, 0, 8192).unwrap();
        log[1024..].chunks(1024).filter(|entry| entry[2] == 3).map(|entry| entry[10]).collect::<Vec<_>>()
    };
    add(&mut bench, "10.0.0.1:4420");
    add(&mut bench, "10.0.0.2:4420");
    assert_eq!(flags(&mut bench), [3, 3]);
    // Through a wildcard each host reads the address that it came by.
    add(&mut bench, "0.0.0.0:8009");
    assert_eq!(flags(&mut bench), [3, 2, 3]);
}

#[test]
fn a_discovery_subsystem_of_its_own_name_answers_to_both() {
    const OWN: &str = "nqn.2026-01.io.farside:discovery";
    let config = RegistryConfig { discovery_nqn: Some(OWN.into()), ..RegistryConfig::default() };
    config.check().unwrap();
    let bad = RegistryConfig { discovery_nqn: Some("x".into()), ..RegistryConfig::default() };
    assert!(matches!(bad.check(), Err(ConfigError::Limit(_))));
    let mut bench = Bench::with(config);
    let listener = Listener { addr: LOCAL.parse().unwrap(), portid: 0, provider: RdmaProvider::RoceV2 };
    bench.registry.add_listener(listener).unwrap();
    let mut cntlids = Vec::new();
    for subnqn in [DISCOVERY_NQN, OWN] {
        let connected = bench.dial(Dial { subnqn, ..Dial::discovery(5000) }).unwrap();
        bench.enable(connected.ctrl);
        cntlids.push(connected.cntlid);
        let identify = bench.identify(connected.ctrl, 1, 0).unwrap();
        let log = bench.log(connected.ctrl, 0x70, false, 0, 8192).unwrap();
        for field in [&identify[768..1024], &log[1024 + 256..1024 + 512]] {
            assert!(field.starts_with(OWN.as_bytes()) && field[OWN.len()] == 0, "{subnqn}");
        }
    }
    assert_ne!(cntlids[0], cntlids[1]);
    let taken = bench.registry.add_subsystem(&subsystem(OWN));
    assert_eq!(taken, Err(ConfigError::DuplicateNqn(OWN.into())));
}

#[test]
fn generation_counter_moves_with_every_change() {
    let mut bench = Bench::new();
    let ctrl = bench.discovery_host();
    let mut last = 0;
    let mut moved = |bench: &mut Bench| {
        let log = bench.log(ctrl, 0x70, true, 0, 16).unwrap();
        let genctr = u64::from_le_bytes(log[..8].try_into().unwrap());
        core::mem::replace(&mut last, genctr) != genctr
    };
    assert!(moved(&mut bench));
    assert!(!moved(&mut bench));
    bench.registry.add_subsystem(&subsystem("nqn.2026-01.io.farside:other")).unwrap();
    assert!(moved(&mut bench));
    bench.registry.allow_host(bench.subsystem, HOST).unwrap();
    assert!(moved(&mut bench));
    bench.registry.resize_namespace(bench.subsystem, 1, 9).unwrap();
    assert!(!moved(&mut bench), "namespaces are not in it");
    let addr = "10.0.0.7:8009".parse().unwrap();
    let referral = Referral { addr, nqn: None, hosts: None, portid: 0, provider: RdmaProvider::RoceV2 };
    bench.registry.add_referral(referral).unwrap();
    assert!(moved(&mut bench));
    bench.registry.remove_referral(addr, None).unwrap();
    assert!(moved(&mut bench));
}
