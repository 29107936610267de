//! What hosts are told of zoned namespaces.

use super::identify::{u32_at, u64_at};
use super::*;
use crate::zns::Geometry;

fn zoned(nsid: u32) -> NamespaceConfig {
    let geometry = Geometry { zone_blocks: 256, max_open: 4, max_active: 0 };
    let zones = Some(ZonedNamespace { geometry, capacity: 1600 });
    NamespaceConfig { zones, deallocate: false, copy: false, ..namespace(nsid) }
}

fn bench() -> Bench {
    let mut bench = Bench::new();
    bench.registry.add_namespace(bench.subsystem, zoned(5)).unwrap();
    bench
}

fn of_set(bench: &mut Bench, ctrl: ControllerId, cns: u32, nsid: u32, csi: u32) -> Result<Vec<u8>, Status> {
    bench.data(ctrl, &command(0x06, nsid, 4096, [cns, csi << 24, 0, 0, 0, 0]))
}

#[test]
fn zoned_namespaces_are_described_by_their_command_set() {
    let mut bench = bench();
    let ctrl = bench.host();
    let descriptors = bench.identify(ctrl, 3, 5).unwrap();
    assert_eq!(descriptors[40..45], [4, 1, 0, 0, 2], "CSI");
    let id = bench.identify(ctrl, 0, 5).unwrap();
    assert_eq!([0, 8].map(|offset| u64_at(&id, offset)), [2048, 1600], "NSZE and NCAP");
    let id = of_set(&mut bench, ctrl, 5, 5, 2).unwrap();
    let mut golden = vec![0; 4096];
    golden[2] = 1;
    golden[4..12].copy_from_slice(&[0xff, 0xff, 0xff, 0xff, 3, 0, 0, 0]);
    golden[2816..2818].copy_from_slice(&[0, 1]);
    assert_eq!(id, golden);
    assert_eq!(of_set(&mut bench, ctrl, 5, 5, 0), Ok(vec![0; 4096]), "no metadata");
    assert_eq!(of_set(&mut bench, ctrl, 5, 1, 2), Err(Status::INVALID_FIELD.dnr()), "it has no zones");
    assert_eq!(of_set(&mut bench, ctrl, 6, 0, 2), Ok(vec![0; 4096]), "ZASL: MDTS holds");
}

#[test]
fn active_namespaces_are_listed_by_command_set() {
    let mut bench = bench();
    let ctrl = bench.host();
    let ids = |list: Vec<u8>| [0, 4, 8, 12].map(|offset| u32_at(&list, offset));
    assert_eq!(ids(bench.identify(ctrl, 2, 0).unwrap()), [1, 3, 5, 0]);
    assert_eq!(ids(of_set(&mut bench, ctrl, 7, 0, 0).unwrap()), [1, 3, 0, 0]);
    assert_eq!(ids(of_set(&mut bench, ctrl, 7, 0, 2).unwrap()), [5, 0, 0, 0]);
}

#[test]
fn host_that_chose_the_nvm_set_alone_sees_no_zones() {
    let mut bench = bench();
    for (cc, zones) in [(ENABLE & !0x70, false), (ENABLE, true)] {
        let ctrl = bench.dial(Dial::admin()).unwrap().ctrl;
        bench.property_set(ctrl, 0x14, cc);
        let list = bench.identify(ctrl, 2, 3).unwrap();
        assert_eq!(u32_at(&list, 0), if zones { 5 } else { 0 });
        assert_eq!(bench.identify(ctrl, 3, 5).is_ok(), zones);
        assert_eq!(bench.identify(ctrl, 0, 5).unwrap() == vec![0; 4096], !zones);
        assert!(bench.identify(ctrl, 3, 1).is_ok());
    }
}

#[test]
fn effects_are_told_by_command_set() {
    let mut bench = bench();
    let ctrl = bench.host();
    let mut page = |csi: u32| bench.data(ctrl, &command(0x02, 0xffff_ffff, 4096, [0x03ff_0005, 0, 0, 0, csi << 24, 0]));
    let listed = |page: Vec<u8>| (0..256).filter(|n| u32_at(&page, 1024 + n * 4) != 0).collect::<Vec<_>>();
    let nvm = listed(page(0).unwrap());
    assert!(nvm.contains(&9) && nvm.contains(&0x19) && !nvm.contains(&0x7d));
    assert_eq!(listed(page(2).unwrap()), [0, 1, 2, 5, 8, 0x0c, 0x0d, 0x0e, 0x11, 0x15, 0x79, 0x7a, 0x7d]);
    assert_eq!(page(1), Err(Status::INVALID_FIELD.dnr()));
}

#[test]
fn sizes_that_zones_do_not_divide_are_refused() {
    let mut bench = bench();
    let odd = NamespaceConfig { blocks: 2047, ..zoned(6) };
    let refused = bench.registry.add_namespace(bench.subsystem, odd);
    assert_eq!(refused, Err(ConfigError::ZoneSize(256)));
    assert!(bench.registry.resize_namespace(bench.subsystem, 5, 2049).is_err());
    assert!(bench.registry.resize_namespace(bench.subsystem, 5, 2304).is_ok());
}
