//! Identify: every structure, and the gates of the Linux host one by one.

use super::*;

fn u16_at(data: &[u8], offset: usize) -> u16 {
    u16::from_le_bytes(data[offset..offset + 2].try_into().unwrap())
}

pub(super) fn u32_at(data: &[u8], offset: usize) -> u32 {
    u32::from_le_bytes(data[offset..offset + 4].try_into().unwrap())
}

pub(super) fn u64_at(data: &[u8], offset: usize) -> u64 {
    u64::from_le_bytes(data[offset..offset + 8].try_into().unwrap())
}

#[test]
fn controller_passes_every_gate_of_the_linux_host() {
    let mut bench = Bench::new();
    let connected = bench.dial(Dial::admin()).unwrap();
    bench.enable(connected.ctrl);
    let id = bench.identify(connected.ctrl, 1, 0).unwrap();
    assert_eq!(id.len(), 4096);
    assert_eq!(u16_at(&id, 78), connected.cntlid, "CNTLID is that of Connect");
    assert_eq!(u16_at(&id, 320), 10, "KAS, 1 s");
    assert_eq!(u32_at(&id, 1792), (64 + 4096) / 16, "IOCCSZ");
    assert_eq!(u32_at(&id, 1796), 1, "IORCSZ");
    assert_eq!(u16_at(&id, 1800), 0, "ICDOFF");
    assert_eq!(u16_at(&id, 514), 1024, "MAXCMD is the I/O depth");
    assert_eq!(u32_at(&id, 536), 0x14_0005, "SGLS: supported, keyed, longer, offset");
    assert_eq!(u32_at(&id, 516), 1024, "NN");
    assert_eq!(u32_at(&id, 540), 1024, "MNAN is set and not above NN");
    assert_eq!(id[76], 0xb, "CMIC: ports, controllers, ANA");
    assert_eq!((id[342], id[343]), (10, 0x1f), "ANATT ANACAP");
    assert_eq!((u32_at(&id, 344), u32_at(&id, 348)), (128, 128), "ANAGRPMAX NANAGRPID");
    assert_eq!(id[525], 5, "VWC: present, no broadcast");
    assert_eq!(u32_at(&id, 92), 0x900, "OAES");
    assert_eq!(u32_at(&id, 96), 0x41, "CTRATT: 128-bit host identifier, TBKAS");
}

#[test]
fn controller_says_what_it_is() {
    let mut bench = Bench::new();
    let ctrl = bench.host();
    let id = bench.identify(ctrl, 1, 0).unwrap();
    assert_eq!(id[4..24], *b"0123456789          ");
    assert_eq!(id[24..64], *b"farside                                 ");
    assert_eq!(id[64..72], *b"0.1.0   ");
    assert_eq!(id[77], 8, "MDTS 1 MiB");
    assert_eq!(u32_at(&id, 80), 0x2_0000, "VER");
    assert_eq!(id[111], 1, "CNTRLTYPE");
    assert_eq!(id[256..265], [0, 0, 3, 3, 3, 0x26, 127, 0, 0], "OACS ACL AERL FRMW LPA ELPE NPSS AVSCC");
    assert_eq!((id[512], id[513]), (0x66, 0x44), "SQES CQES");
    assert_eq!(u16_at(&id, 520), 0x1bd, "ONCS");
    assert_eq!(u16_at(&id, 522), 1, "FUSES: compare and write");
    assert_eq!(id[531], 3, "NWPC");
    assert_eq!((u16_at(&id, 532), u16_at(&id, 534)), (255, 1), "ACWU OCFS");
    assert_eq!(id[768..768 + NQN.len()], *NQN.as_bytes());
    assert_eq!(id[768 + NQN.len()], 0, "SUBNQN is terminated");
    assert_eq!(id[1802..1807], [0, 16, 1, 0, 0], "FCATT MSDBD OFCS DCTYPE");
}

#[test]
fn in_capsule_data_can_be_off_or_small() {
    for (icd, ioccsz, msdbd, offset_bit) in
        [(0, 4, 1, 0), (16, 5, 1, 1), (32, 6, 1, 1), (240, 19, 1, 1), (256, 20, 16, 1), (16384, 1028, 16, 1)]
    {
        let config = RegistryConfig { in_capsule_data_size: icd, ..RegistryConfig::default() };
        let mut bench = Bench::with(config);
        let ctrl = bench.host();
        let id = bench.identify(ctrl, 1, 0).unwrap();
        assert_eq!(u32_at(&id, 1792), ioccsz);
        assert_eq!(id[1803], msdbd);
        assert_eq!(u32_at(&id, 536) >> 20, offset_bit);
        assert_eq!(bench.registry.msdbd(), usize::from(msdbd));
    }
}

#[test]
fn optional_commands_are_those_of_the_namespaces() {
    let mut bench = Bench::new();
    let ctrl = bench.host();
    for nsid in [1, 3] {
        bench.registry.remove_namespace(bench.subsystem, nsid).unwrap();
    }
    assert_eq!(u16_at(&bench.identify(ctrl, 1, 0).unwrap(), 520), 0x1bd, "all may come");
    let plain = NamespaceConfig {
        compare: false,
        write_zeroes: false,
        deallocate: false,
        verify: false,
        copy: false,
        reservations: false,
        ..namespace(1)
    };
    bench.registry.add_namespace(bench.subsystem, plain).unwrap();
    let id = bench.identify(ctrl, 1, 0).unwrap();
    assert_eq!((u16_at(&id, 520), u16_at(&id, 522), u16_at(&id, 534)), (0x10, 0, 0));
}

#[test]
fn namespace_structure_tells_size_format_and_limits() {
    let mut bench = Bench::new();
    let limits = NamespaceLimits { npwg: 8, npwa: 8, npdg: 16, npda: 16, nows: 256, noiob: 0 };
    let four_k = NamespaceConfig {
        block_size: 4096,
        blocks: 100,
        read_only: true,
        limits,
        nguid: [0; 16],
        eui64: [5; 8],
        ..namespace(7)
    };
    bench.registry.add_namespace(bench.subsystem, four_k).unwrap();
    let ctrl = bench.host();
    let id = bench.identify(ctrl, 0, 7).unwrap();
    assert_eq!([0, 8, 16].map(|offset| u64_at(&id, offset)), [100; 3], "NSZE NCAP NUSE");
    assert_eq!(id[24..34], [0x10, 0, 0, 0, 0, 0, 1, 0xfe, 0, 9], "NSFEAT to DLFEAT");
    assert_eq!([64, 66, 68, 70, 72].map(|offset| u16_at(&id, offset)), [7, 7, 15, 15, 255]);
    assert_eq!(id[99], 1, "NSATTR: write protected");
    assert_eq!(id[104..128], [[0; 8], [0; 8], [5; 8]].concat(), "NGUID EUI64");
    assert_eq!(id[128..132], [0, 0, 12, 0], "LBA format 0");
    let id = bench.identify(ctrl, 0, 1).unwrap();
    assert_eq!(id[24], 0);
    assert_eq!(id[130], 9);
}

#[test]
fn inactive_namespaces_are_zeroes_and_invalid_ones_refused() {
    let mut bench = Bench::new();
    let ctrl = bench.host();
    for cns in [0, 5, 8] {
        assert_eq!(bench.identify(ctrl, cns, 2), Ok(vec![0; 4096]), "{cns:x}");
        assert_eq!(bench.identify(ctrl, cns, 1024), Ok(vec![0; 4096]));
        for nsid in [0, 1025, 0xffff_fffe, 0xffff_ffff] {
            assert_eq!(bench.identify(ctrl, cns, nsid), Err(Status::INVALID_NAMESPACE.dnr()));
        }
    }
    for nsid in [0, 2, 0xffff_ffff] {
        assert_eq!(bench.identify(ctrl, 3, nsid), Err(Status::INVALID_NAMESPACE.dnr()));
    }
}

#[test]
fn descriptors_agree_with_the_structure_and_leave_out_zeroes() {
    let mut bench = Bench::new();
    let ctrl = bench.host();
    let list = bench.identify(ctrl, 3, 1).unwrap();
    let nguid = bench.identify(ctrl, 0, 1).unwrap()[104..120].to_vec();
    let mut golden = vec![2, 16, 0, 0];
    golden.extend(nguid);
    golden.extend([3, 16, 0, 0]);
    golden.extend(1u128.to_be_bytes());
    golden.extend([4, 1, 0, 0, 0]);
    golden.resize(4096, 0);
    assert_eq!(list, golden);
}

#[test]
fn active_lists_start_above_the_given_identifier() {
    let mut bench = Bench::new();
    let ctrl = bench.host();
    for cns in [2, 7] {
        let mut ids = |nsid| {
            let list = bench.identify(ctrl, cns, nsid).unwrap();
            [0, 4, 8].map(|offset| u32_at(&list, offset))
        };
        assert_eq!(ids(0), [1, 3, 0]);
        assert_eq!(ids(1), [3, 0, 0]);
        assert_eq!(ids(3), [0, 0, 0]);
        assert_eq!(ids(0xffff_fffd), [0, 0, 0]);
        for nsid in [0xffff_fffe, 0xffff_ffff] {
            assert_eq!(bench.identify(ctrl, cns, nsid), Err(Status::INVALID_NAMESPACE.dnr()));
        }
    }
}

#[test]
fn an_active_list_of_more_than_1024_is_cut() {
    let config = RegistryConfig { max_namespaces: 2000, ..RegistryConfig::default() };
    let mut bench = Bench::with(config);
    for nsid in 10..1200 {
        bench.registry.add_namespace(bench.subsystem, namespace(nsid)).unwrap();
    }
    let ctrl = bench.host();
    let list = bench.identify(ctrl, 2, 3).unwrap();
    assert_eq!((u32_at(&list, 0), u32_at(&list, 4092)), (10, 1033));
    let rest = bench.identify(ctrl, 2, 1033).unwrap();
    assert_eq!(u32_at(&rest, 0), 1034);
}

#[test]
fn command_set_structures_are_for_the_sets_that_there_are() {
    let mut bench = Bench::new();
    let ctrl = bench.host();
    for cns in [5, 6, 7] {
        assert!(bench.identify(ctrl, cns, 1).is_ok());
        for csi in [1, 3, 0xff] {
            let other = command(0x06, 1, 4096, [cns, csi << 24, 0, 0, 0, 0]);
            assert_eq!(bench.data(ctrl, &other), Err(Status::INVALID_FIELD.dnr()));
        }
    }
    let independent = bench.identify(ctrl, 8, 1).unwrap();
    assert_eq!(independent[..16], [0, 1, 0xfe, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0], "ready, cached");
    let uncached = NamespaceConfig { volatile_write_cache: false, ..namespace(9) };
    bench.registry.add_namespace(bench.subsystem, uncached).unwrap();
    assert_eq!(bench.identify(ctrl, 8, 9).unwrap()[0], 0x20);
}

#[test]
fn io_command_sets_are_for_this_controller() {
    let mut bench = Bench::new();
    let ctrl = bench.host();
    let mut get = |cntid: u32| bench.data(ctrl, &command(0x06, 0, 4096, [cntid << 16 | 0x1c, 0, 0, 0, 0, 0]));
    let sets = get(0xffff).unwrap();
    assert_eq!((u64_at(&sets, 0), u64_at(&sets, 8)), (5, 0));
    assert!(get(1).is_ok());
    assert_eq!(get(2), Err(Status::INVALID_FIELD.dnr()));
}

#[test]
fn other_structures_are_refused() {
    let mut bench = Bench::new();
    let ctrl = bench.host();
    for cns in (0..=0xff).filter(|cns| ![0, 1, 2, 3, 5, 6, 7, 8, 0x1c].contains(cns)) {
        assert_eq!(bench.identify(ctrl, cns, 1), Err(Status::INVALID_FIELD.dnr()), "{cns:x}");
    }
}

#[test]
fn an_sgl_shorter_than_the_structure_is_refused_and_a_longer_one_is_not() {
    let mut bench = Bench::new();
    let ctrl = bench.host();
    let mut get = |len| bench.data(ctrl, &command(0x06, 0, len, [1, 0, 0, 0, 0, 0]));
    assert_eq!(get(4095), Err(Status::DATA_SGL_LENGTH_INVALID.dnr()));
    assert_eq!(get(0), Err(Status::DATA_SGL_LENGTH_INVALID.dnr()));
    assert_eq!(get(8192).unwrap().len(), 4096);
}

#[test]
fn discovery_controller_fills_its_strings_and_has_no_namespaces() {
    let mut bench = Bench::new();
    let ctrl = bench.discovery_host();
    let id = bench.identify(ctrl, 1, 0).unwrap();
    assert!(id[4..72].iter().all(|byte| matches!(byte, b' '..=b'~')), "SN MN FR are ASCII");
    assert_eq!(id[111], 2, "CNTRLTYPE");
    assert_eq!(u32_at(&id, 92), 1 << 31, "OAES");
    assert_eq!(u32_at(&id, 516), 0, "NN");
    assert_eq!(id[768..768 + DISCOVERY_NQN.len()], *DISCOVERY_NQN.as_bytes());
    assert_eq!(u32_at(&id, 536) & 4, 4, "SGLS keyed");
    assert_eq!(id[1806], 1, "DCTYPE");
    for cns in [0, 2, 3, 5, 6, 7, 8, 0x1c] {
        assert_eq!(bench.identify(ctrl, cns, 1), Err(Status::INVALID_FIELD.dnr()));
    }
}

#[test]
fn overrides_lie_over_their_structure_alone() {
    let over = |cns, offset, bytes: &[u8]| IdentifyOverride { cns, offset, bytes: bytes.to_vec() };
    let identify_overrides = vec![over(1, 320, &[0, 0]), over(1, 4095, &[7, 7]), over(0, 9999, &[1])];
    let mut bench = Bench::with(RegistryConfig { identify_overrides, ..RegistryConfig::default() });
    let ctrl = bench.host();
    let id = bench.identify(ctrl, 1, 0).unwrap();
    assert_eq!((u16_at(&id, 320), id[4095], id.len()), (0, 7, 4096));
    assert_eq!(bench.identify(ctrl, 0, 2), Ok(vec![0; 4096]));
}
