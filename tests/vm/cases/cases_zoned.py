"""Zoned block devices behind namespaces, used by the kernel host as such."""

import os
from pathlib import Path

from cases import allow
from cases.registry import EVERYWHERE, FARSIDE, case
from guest.expected import fields
from guest.fio import KIB, MIB, fio
from guest.nvmecli import disconnect_all, nvme, nvme_json
from guest.shell import Failed, at_least, equal, eventually, modprobe, read, run, sh, true
from guest.target import NQN, Namespace, Subsystem, endpoint
from guest.zoned import content, limits, make_zonefs, null_disk, queue, report, zone

ZONE = 4 * MIB
CAPACITY = 3 * MIB
ZONES = 128


def serve(lab, path, **options):
    return lab.serve(Subsystem(NQN + "zoned", [Namespace(1, "device", Path(path), ZONES * ZONE, 4096)]), **options)


def connected(lab):
    """A zoned disk, served; the target, what it serves, and the host's disk."""
    path = null_disk(lab)
    target = serve(lab, path)
    return target, path, lab.connect(target).disk()


def finished(target):
    disconnect_all()
    target.stop()  # before the disk is taken away


def same(what: str, got: bytes, wanted: bytes):
    """As `equal`, without printing them."""
    true(f"{what}, {len(got)} of {len(wanted)} bytes, is what it should be", got == wanted)


def same_zones(path, disk):
    equal("zones of the host's disk", [z.kept for z in report(disk)], [z.kept for z in report(path)])


def write_zone(disk, number: int, offset: int, size: int, check=True):
    """Writes random bytes; returns them, or the failed run."""
    data = Path("/run/zone-data")
    data.write_bytes(os.urandom(size))
    done = run(
        "dd", f"if={data}", f"of={disk}", f"bs={size}", f"seek={number * ZONE + offset}", "oflag=direct,seek_bytes",
        "conv=notrunc", "status=none", check=False,
    )  # fmt: skip
    if check and done.returncode:
        raise Failed(f"a write to zone {number} failed: {done.stderr}")
    return data.read_bytes() if check else done


@case(providers=EVERYWHERE)
def zones_of_a_device_are_zones_of_the_hosts_disk(lab):
    target, path, disk = connected(lab)
    equal("model", read(queue(disk) / "zoned"), "host-managed")
    equal("limits", limits(disk), limits(path))
    at_least("largest append", int(read(queue(disk) / "zone_append_max_bytes")), 64 * KIB)
    equal("zones", len(report(disk)), ZONES)
    same_zones(path, disk)
    written = write_zone(disk, 1, 0, 64 * KIB) + write_zone(disk, 1, 64 * KIB, 128 * KIB)
    equal("write pointer", zone(disk, 1).written * 512, 192 * KIB)
    write_zone(disk, 2, 0, CAPACITY)
    equal("a zone that is written whole", zone(disk, 2).condition, "fu")
    sectors = ZONE // 512
    for command, number, condition in (("open", 3, "oe"), ("finish", 4, "fu"), ("close", 1, "cl"), ("reset", 2, "em")):
        sh("blkzone", command, "--offset", number * sectors, "--count", 1, disk)
        equal(f"condition after blkzone {command}", zone(disk, number).condition, condition)
    same_zones(path, disk)
    same("data of zone 1", content(disk, ZONE, 192 * KIB), written)
    sh("blkzone", "reset", disk)
    equal("conditions after all zones were reset", {z.condition for z in report(disk)}, {"em"})
    same_zones(path, disk)
    finished(target)


WRONG_WRITES = (
    (r"(I/O|critical \w+|protocol) error, dev nvme\S+, sector", "the case writes where it must not"),
    (r"nvme\S+: (I/O Cmd|Write)\(0x1\) @ LBA .*\(sct 0x1 / sc 0xbc\)", "the answer to that: Zone Invalid Write"),
)


@case(providers=EVERYWHERE, allow=WRONG_WRITES)
def writes_against_the_rules_of_zones_fail_and_change_nothing(lab):
    target, path, disk = connected(lab)
    write_zone(disk, 0, 0, 64 * KIB)
    for number, offset, size in ((0, 0, 4 * KIB), (0, 128 * KIB, 4 * KIB), (1, 4 * KIB, 4 * KIB)):
        true(f"a write at {offset} of zone {number} fails", write_zone(disk, number, offset, size, check=False).returncode)
    equal("write pointers", [z.written * 512 for z in report(disk)[:2]], [64 * KIB, 0])
    same_zones(path, disk)
    finished(target)


@case(providers=EVERYWHERE, timeout=240)
def fio_verifies_data_in_zones(lab):
    target, path, disk = connected(lab)
    zoned = {"zonemode": "zbd", "filename": disk, "ioengine": "libaio"}
    whole = {"rw": "write", "bs": "64k", "iodepth": 8, "verify": "crc32c"}
    fio("zones-write", size=12 * ZONE, io_size=12 * CAPACITY, **whole, **zoned).moved_exactly(
        write=12 * CAPACITY, read=12 * CAPACITY
    )
    equal("full zones", [z.condition for z in report(path)].count("fu"), 12)
    same_zones(path, disk)
    sh("blkzone", "reset", disk)
    done = fio(
        "zones-random", rw="randwrite", bs="16k", size=64 * ZONE, io_size=48 * MIB, iodepth=16, max_open_zones=6, **zoned
    )
    done.moved_at_least(write=48 * MIB)
    most = [z for z in report(path) if z.condition in ("oi", "oe", "cl")]
    true(f"no more than 12 active zones, {len(most)} there are", len(most) <= 12)
    same_zones(path, disk)
    fio("zones-read", rw="randread", bs="16k", size=64 * ZONE, io_size=8 * MIB, iodepth=16, **zoned).moved_at_least(read=4 * MIB)
    finished(target)


@case(providers=EVERYWHERE)
def tools_report_append_and_manage_zones(lab):
    target, path, disk = connected(lab)
    # Blocks of 4 KiB: 1024 a zone. Zero's-based limits.
    got = nvme_json("zns", "id-ns", disk)
    fields("zns id-ns", got, {"zoc": 0, "mar": 11, "mor": 7})
    equal("zone size in blocks", got["lbafe"][0]["zsze"], ZONE // 4096)
    data = Path("/run/append-data")
    data.write_bytes(os.urandom(32 * KIB))
    append = ("zns", "zone-append", disk, "--zslba", 1024, "--data", data, "--data-size", 32 * KIB)
    for where in (1024, 1032):
        said = nvme(*append)
        true(f"the append landed at {where}: {said!r}", f"{where:x}" in said.lower() or str(where) in said)
    same("what was appended", content(disk, ZONE, 32 * KIB), data.read_bytes())
    same("the same again behind it", content(disk, ZONE + 32 * KIB, 32 * KIB), data.read_bytes())
    zones = nvme_json("zns", "report-zones", disk)
    equal("zones that are reported", zones["nr_zones"], ZONES)
    equal("write pointer of the second", zones["zone_list"][1]["wp"], 1040)
    nvme("zns", "finish-zone", disk, "--start-lba", 1024)
    equal("condition of the second", zone(disk, 1).condition, "fu")
    refused = run("nvme", *map(str, append), check=False)
    true(f"an append to a full zone is refused as such: {refused.stdout}{refused.stderr}", refused.returncode != 0)
    nvme("zns", "reset-zone", disk, "--select-all")
    equal("conditions", {z.condition for z in report(path)}, {"em"})
    finished(target)


@case(providers=EVERYWHERE, timeout=240)
def a_zonefs_holds_its_files(lab):
    target, path, disk = connected(lab)
    modprobe("zonefs")
    make_zonefs(disk)
    there = Path("/run/zonefs")
    there.mkdir(exist_ok=True)
    sh("mount", "-t", "zonefs", disk, there)
    lab.undo(run, "umount", there, check=False)
    files = there / "seq"
    equal("files", len(list(files.iterdir())), ZONES - 1)
    contents = {}
    for number in (0, 1, 5):
        contents[number] = os.urandom(768 * KIB)
        data = Path("/run/zonefs-data")
        data.write_bytes(contents[number])
        sh("dd", f"if={data}", f"of={files / str(number)}", "bs=64k", "oflag=direct,append", "conv=notrunc", "status=none")
    sh("umount", there)
    sh("mount", "-t", "zonefs", disk, there)
    for number, wanted in contents.items():
        equal(f"size of file {number}", (files / str(number)).stat().st_size, len(wanted))
        same(f"data of file {number}", content(files / str(number), 0, len(wanted)), wanted)
    os.truncate(files / "1", 0)
    equal("a file that was cut is an empty zone", zone(path, 2).condition, "em")
    os.truncate(files / "5", CAPACITY)
    equal("one that was grown whole is a full one", zone(path, 6).condition, "fu")
    sh("umount", there)
    same_zones(path, disk)
    finished(target)


@case(providers=FARSIDE, allow=allow.RECONNECT, timeout=240)
def write_pointers_are_found_again_after_the_target_was_killed(lab):
    target, path, disk = connected(lab)
    written = write_zone(disk, 7, 0, 256 * KIB)
    target.kill()
    target.start()

    def found():
        try:
            return zone(disk, 7).written * 512 == 256 * KIB
        except Failed:  # the host is not connected again yet
            return False

    eventually("the host finds the write pointer again", found, 60)
    written += write_zone(disk, 7, 256 * KIB, 64 * KIB)
    same("data of the zone", content(disk, 7 * ZONE, 320 * KIB), written)
    same_zones(path, disk)
    finished(target)


@case(providers=FARSIDE)
def memory_is_cut_into_zones(lab):
    zones = {"zone_size": "2M", "zone_capacity": "1536K", "max_open_zones": 4, "max_active_zones": 6}
    target = lab.serve(Subsystem(NQN + "zoned", [Namespace(1, "memory", None, 64 * MIB, 4096, zones=zones)]))
    disk = lab.connect(target).disk()
    expected = {"chunk_sectors": 4096, "nr_zones": 32, "max_open_zones": 4, "max_active_zones": 6}
    equal("limits", limits(disk), expected)
    fio(
        "memory-zones", filename=disk, zonemode="zbd", ioengine="libaio", rw="write", bs="64k", size=16 * MIB,
        io_size=12 * MIB, iodepth=8, verify="crc32c",
    ).moved_exactly(write=12 * MIB, read=12 * MIB)  # fmt: skip
    if lab.provider == "verbs":  # the software provider's host would need an address of its own there
        told = lab.host("identify", target.address, "--nqn", NQN + "zoned").wait()["namespaces"][0]["zones"]
        equal("zones that farside identify shows", told, {"zone_blocks": 512, "max_open": 4, "max_active": 6})
    finished(target)


@case(providers=FARSIDE)
def zones_that_no_host_could_use_are_refused(lab):
    conventional = null_disk(lab, zone_nr_conv=2)
    start = lab.serve(start=False)
    start.launch("serve", "--device", conventional, "--listen", endpoint(lab.address, 4430), "--provider", lab.provider)
    eventually("farside has ended", lambda: not start.running)
    equal("exit status", start.process.returncode, 2)
    said = start.log()
    true(f"names the device, the reason and a remedy: {said}", conventional in said and "not written in sequence" in said)
