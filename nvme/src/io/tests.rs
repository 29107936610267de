use super::*;
use crate::command::tests::{command, sqe};
use crate::sgl::tests::keyed;
use proptest::prelude::*;

const VIEW: NamespaceView = NamespaceView {
    nsid: 1,
    blocks: 1000,
    block_shift: 9,
    read_only: false,
    compare: true,
    write_zeroes: true,
    deallocate: true,
    verify: true,
    copy: true,
    reservations: true,
    persistent: false,
    zone_shift: None,
};
const LIMITS: IoLimits = IoLimits {
    mdts_bytes: 128 * 512,
    verify_bytes: 256 * 512,
    write_zeroes_bytes: 0,
    dsm_ranges: 0,
    dsm_range_blocks: 0,
    dsm_blocks: 0,
    copy_range_bytes: 100 * 512,
    copy_bytes: 300 * 512,
    copy_ranges: 5,
};

fn run(opcode: u8, data: u32, cdws: [u32; 6]) -> Result<IoCommand, u16> {
    check(&command(opcode, 1, data, cdws), &VIEW, &LIMITS).map_err(|status| {
        assert!(status.is_dnr());
        status.code()
    })
}

#[test]
fn read_and_write_carry_real_counts_and_fua() {
    assert_eq!(run(2, 4096, [16, 0, 7, 0, 0, 0]), Ok(IoCommand::Read { slba: 16, blocks: 8, fua: false }));
    assert_eq!(run(1, 512, [999, 0, 1 << 30, 0, 0, 0]), Ok(IoCommand::Write { slba: 999, blocks: 1, fua: true }));
}

#[test]
fn range_is_checked_on_both_sides_of_the_end() {
    assert!(run(2, 512, [999, 0, 0, 0, 0, 0]).is_ok());
    assert_eq!(run(2, 512, [1000, 0, 0, 0, 0, 0]), Err(0x80));
    assert_eq!(run(2, 1024, [999, 0, 1, 0, 0, 0]), Err(0x80));
    assert_eq!(run(2, 512, [u32::MAX, u32::MAX, 0, 0, 0, 0]), Err(0x80), "slba + nlb wraps");
    assert_eq!(run(8, 0, [0, 0, 1000, 0, 0, 0]), Err(0x80));
}

#[test]
fn mdts_is_checked_on_both_sides() {
    assert!(run(2, 128 * 512, [0, 0, 127, 0, 0, 0]).is_ok());
    assert_eq!(run(2, 129 * 512, [0, 0, 128, 0, 0, 0]), Err(0x02));
    // Write Zeroes transfers nothing, so MDTS does not bound it.
    assert!(run(8, 0, [0, 0, 999, 0, 0, 0]).is_ok());
}

#[test]
fn largest_nlb_of_4k_blocks_does_not_overflow() {
    let view = NamespaceView { blocks: 1 << 40, block_shift: 12, ..VIEW };
    let limits = IoLimits { mdts_bytes: u32::MAX, ..LIMITS };
    let read = command(2, 1, 0xff_ffff, [0, 0, 0xffff, 0, 0, 0]);
    // 256 MiB cannot be described by one keyed descriptor of 24 bits.
    assert_eq!(check(&read, &view, &limits), Err(Status::DATA_SGL_LENGTH_INVALID.dnr()));
    assert_eq!(check(&read, &view, &LIMITS), Err(Status::INVALID_FIELD.dnr()));
}

#[test]
fn sgl_shorter_than_the_data_is_refused() {
    assert_eq!(run(1, 4095, [0, 0, 7, 0, 0, 0]), Err(0x0f));
    assert!(run(1, 4096, [0, 0, 7, 0, 0, 0]).is_ok());
    assert!(run(1, 8192, [0, 0, 7, 0, 0, 0]).is_ok());
    assert_eq!(run(9, 15, [0, 4, 0, 0, 0, 0]), Err(0x0f));
}

#[test]
fn in_capsule_read_is_refused() {
    let mut sgl = [0; 16];
    sgl[9] = 2;
    sgl[15] = 1;
    let read = Command::parse(&sqe(2, 1, sgl, [0; 6])).unwrap();
    assert_eq!(check(&read, &VIEW, &LIMITS), Err(Status::SGL_TYPE_INVALID.dnr()));
    let write = Command::parse(&sqe(1, 1, sgl, [0; 6])).unwrap();
    assert!(check(&write, &VIEW, &LIMITS).is_ok());
}

fn fused(opcode: u8, flags: u8, data: u32, cdws: [u32; 6]) -> Command {
    let mut bytes = sqe(opcode, 1, keyed(0x1000, data, 0xcafe, 0x4f), cdws);
    bytes[1] = flags;
    Command::parse(&bytes).unwrap()
}

#[test]
fn compare_and_write_is_the_one_fused_pair() {
    let [first, second] = [0x41, 0x42];
    for opcode in [0u8, 1, 2, 5, 8, 9, 0x0c, 0x19] {
        for flags in [first, second] {
            let half = fused(opcode, flags, 4096, [0; 6]);
            let fits = (opcode, flags) == (5, first) || (opcode, flags) == (1, second);
            let checked = check(&half, &VIEW, &LIMITS);
            assert_eq!(checked.is_ok(), fits, "{opcode:x} {flags:x}");
            assert!(fits || checked == Err(Status::INVALID_FIELD.dnr()));
        }
    }
    let without = NamespaceView { compare: false, ..VIEW };
    assert!(check(&fused(1, second, 512, [0; 6]), &without, &LIMITS).is_err());
}

#[test]
fn halves_of_a_pair_are_about_the_same_blocks() {
    let half = |slba, blocks: u32| IoCommand::Compare { slba, blocks };
    let write = |slba, blocks| IoCommand::Write { slba, blocks, fua: false };
    assert_eq!(check_pair(&half(7, 2), &write(7, 2)), Ok(()));
    for other in [write(7, 1), write(6, 2), write(8, 2)] {
        assert_eq!(check_pair(&half(7, 2), &other), Err(Status::INVALID_FIELD.dnr()));
    }
}

#[test]
fn read_only_refuses_all_writes_and_lets_flush_and_hints_through() {
    let view = NamespaceView { read_only: true, ..VIEW };
    let code = |opcode, data, cdw11| {
        check(&command(opcode, 1, data, [0, cdw11, 0, 0, 0, 0]), &view, &LIMITS).map_err(Status::code)
    };
    assert_eq!(code(1, 512, 0), Err(0x20));
    assert_eq!(code(8, 0, 0), Err(0x20));
    assert_eq!(code(9, 16, 4), Err(0x20));
    assert_eq!(code(9, 16, 3), Ok(IoCommand::DsmHint));
    assert_eq!(code(0, 0, 0), Ok(IoCommand::Flush));
    assert!(code(2, 512, 0).is_ok());
    assert!(code(5, 512, 0).is_ok());
}

#[test]
fn what_the_namespace_lacks_is_an_invalid_opcode() {
    let view = NamespaceView {
        compare: false,
        write_zeroes: false,
        deallocate: false,
        verify: false,
        copy: false,
        reservations: false,
        ..VIEW
    };
    for opcode in [4, 5, 8, 9, 0x0c, 0x0d, 0x0e, 0x11, 0x15, 0x19, 0x80] {
        let refused = check(&command(opcode, 1, 512, [0, 4, 0, 0, 0, 0]), &view, &LIMITS);
        assert_eq!(refused, Err(Status::INVALID_OPCODE.dnr()), "{opcode:x}");
    }
}

#[test]
fn broadcast_and_foreign_nsids_are_refused() {
    for nsid in [0, 2, 0xffff_ffff] {
        assert_eq!(check(&command(0, nsid, 0, [0; 6]), &VIEW, &LIMITS), Err(Status::INVALID_NAMESPACE.dnr()));
    }
}

#[test]
fn write_zeroes_carries_its_wish_and_refuses_the_whole_namespace() {
    assert_eq!(
        run(8, 0, [4, 0, 1 << 30 | 1 << 25 | 1, 0, 0, 0]),
        Ok(IoCommand::WriteZeroes { slba: 4, blocks: 2, deallocate: true, fua: true })
    );
    assert_eq!(run(8, 0, [0, 0, 1 << 23, 0, 0, 0]), Err(0x02));
}

#[test]
fn directives_are_refused() {
    assert_eq!(run(1, 512, [0, 0, 1 << 20, 0, 0, 0]), Err(0x02));
}

#[test]
fn ranges_are_all_checked_before_any_is_given() {
    let mut bytes = [0u8; 48];
    bytes[4] = 8;
    bytes[8] = 10;
    bytes[20..24].copy_from_slice(&1000u32.to_le_bytes());
    let ranges: Vec<_> = parse_ranges(&bytes, 3, &VIEW, &LIMITS).unwrap().collect();
    let expect = |slba, blocks| BlockRange { slba, blocks };
    assert_eq!(ranges, [expect(10, 8), expect(0, 1000), expect(0, 0)]);
    bytes[24] = 1;
    let code = |r: Result<Ranges<'_>, Status>| r.map(|_| ()).map_err(Status::code);
    assert_eq!(code(parse_ranges(&bytes, 3, &VIEW, &LIMITS)), Err(0x80));
    assert_eq!(code(parse_ranges(&bytes, 1, &VIEW, &LIMITS)), Ok(()));
    assert_eq!(code(parse_ranges(&bytes[..47], 3, &VIEW, &LIMITS)), Err(0x0f));
    assert_eq!(code(parse_ranges(&bytes, 4, &VIEW, &LIMITS)), Err(0x0f));
}

proptest! {
    #[test]
    fn what_passes_lies_inside_the_namespace(
        bytes in proptest::collection::vec(any::<u8>(), 64),
        opcode in prop_oneof![Just(0u8), Just(1), Just(2), Just(5), Just(8), Just(9), any::<u8>()],
        low in any::<bool>(),
    ) {
        let mut bytes: [u8; 64] = bytes.try_into().unwrap();
        bytes[0] = opcode;
        bytes[1] = 0x40;
        bytes[39] = 0x40;
        bytes[4..8].copy_from_slice(&1u32.to_le_bytes());
        if low {
            bytes[42..48].fill(0);
            bytes[50] = 0;
        }
        if let Ok(command) = Command::parse(&bytes)
            && let Ok(io) = check(&command, &VIEW, &LIMITS)
        {
            prop_assert!(io.data_len(&VIEW) <= LIMITS.mdts_bytes);
            if let IoCommand::Read { slba, blocks, .. } | IoCommand::Write { slba, blocks, .. } = io {
                prop_assert!(slba.checked_add(u64::from(blocks)).unwrap() <= VIEW.blocks);
            }
        }
    }
}

#[test]
fn commands_that_move_no_data_have_limits_of_their_own() {
    assert_eq!(run(0x0c, 0, [4, 0, 255, 0, 0, 0]), Ok(IoCommand::Verify { slba: 4, blocks: 256 }));
    assert_eq!(run(0x0c, 0, [4, 0, 256, 0, 0, 0]), Err(0x02));
    assert_eq!(run(0x0c, 0, [999, 0, 1, 0, 0, 0]), Err(0x80));
    let limits = IoLimits { write_zeroes_bytes: 4096, verify_bytes: 0, ..LIMITS };
    let code = |opcode, nlb| check(&command(opcode, 1, 0, [0, 0, nlb, 0, 0, 0]), &VIEW, &limits).map_err(Status::code);
    assert!(code(8, 7).is_ok());
    assert_eq!(code(8, 8), Err(0x02));
    assert!(code(0x0c, 999).is_ok(), "no limit");
}

#[test]
fn limits_of_dataset_management_have_both_sides() {
    let ranges =
        |blocks: &[u32]| blocks.iter().flat_map(|n| [[0; 4], n.to_le_bytes(), [0; 4], [0; 4]].concat()).collect();
    let code = |blocks: &[u32], limits: &IoLimits| {
        let bytes: Vec<u8> = ranges(blocks);
        parse_ranges(&bytes, u16::try_from(blocks.len()).unwrap(), &VIEW, limits).map(|_| ()).map_err(Status::code)
    };
    let limits = IoLimits { dsm_ranges: 3, dsm_range_blocks: 100, dsm_blocks: 250, ..LIMITS };
    assert_eq!(code(&[100, 100, 50], &limits), Ok(()));
    assert_eq!(code(&[101], &limits), Err(0x183));
    assert_eq!(code(&[100, 100, 51], &limits), Err(0x183));
    assert_eq!(code(&[1, 1, 1, 1], &limits), Err(0x183));
    assert_eq!(code(&[1000; 256], &LIMITS), Ok(()));
}

/// Source entries of Copy: SLBA and a real count of blocks.
fn sources(ranges: &[(u64, u16)]) -> Vec<u8> {
    let entry = |(slba, blocks): &(u64, u16)| {
        let mut bytes = [0xee; 32];
        bytes[8..16].copy_from_slice(&slba.to_le_bytes());
        bytes[16..18].copy_from_slice(&(blocks - 1).to_le_bytes());
        bytes
    };
    ranges.iter().flat_map(entry).collect()
}

#[test]
fn copy_carries_its_destination_and_refuses_other_formats() {
    assert_eq!(
        run(0x19, 160, [16, 1, 1 << 30 | 4, 0, 0, 0]),
        Ok(IoCommand::Copy { slba: 1 << 32 | 16, ranges: 5, fua: true })
    );
    assert_eq!(run(0x19, 192, [16, 0, 5, 0, 0, 0]), Err(0x183), "more ranges than MSRC says");
    assert_eq!(run(0x19, 31, [16, 0, 0, 0, 0, 0]), Err(0x0f));
    for bit in [8, 12, 20, 26] {
        assert_eq!(run(0x19, 160, [16, 0, 1 << bit, 0, 0, 0]), Err(0x02), "bit {bit}");
    }
    let view = NamespaceView { read_only: true, ..VIEW };
    assert_eq!(check(&command(0x19, 1, 32, [0; 6]), &view, &LIMITS), Err(Status::NAMESPACE_WRITE_PROTECTED.dnr()));
}

#[test]
fn copy_ranges_are_all_checked_and_the_one_at_fault_is_named() {
    let parse = |slba, ranges: &[(u64, u16)]| {
        let count = u16::try_from(ranges.len()).unwrap();
        parse_copy(&sources(ranges), slba, count, &VIEW, &LIMITS).map_err(|(status, at)| (status.code(), at))
    };
    let range = |slba, blocks| BlockRange { slba, blocks };
    assert_eq!(parse(500, &[(0, 100), (400, 100)]), Ok(vec![range(0, 100), range(400, 100)]));
    assert_eq!(parse(500, &[(0, 100), (0, 100), (0, 100)]).map(|ranges| ranges.len()), Ok(3));
    assert_eq!(parse(500, &[(0, 1), (0, 101)]), Err((0x183, 1)), "MSSRL");
    assert_eq!(parse(500, &[(0, 100), (0, 100), (0, 100), (0, 1)]), Err((0x183, 3)), "MCL");
    assert_eq!(parse(500, &[(0, 1), (1000, 1)]), Err((0x80, 1)));
    assert_eq!(parse(500, &[(u64::MAX, 2)]), Err((0x80, 0)));
    assert_eq!(parse(999, &[(0, 2)]), Err((0x80, 0)), "the destination");
    assert_eq!(parse(u64::MAX, &[(0, 2)]), Err((0x80, 0)));
    for (source, refused) in [(489, false), (490, false), (491, true), (500, true), (519, true), (520, false)] {
        let copied = parse(500, &[(0, 10), (source, 10)]);
        assert_eq!(copied.is_err(), refused, "source {source}");
        assert!(!refused || copied == Err((0x187, 1)));
    }
    let short = parse_copy(&sources(&[(0, 1)])[..31], 5, 1, &VIEW, &LIMITS);
    assert_eq!(short, Err((Status::DATA_SGL_LENGTH_INVALID.dnr(), 0)));
}
