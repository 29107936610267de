"""nvme-cli, command by command, with the answers parsed: what farside says of itself must be what it was told."""

import os
import re
import time
import uuid

from cases.allow import REFUSED, RESET
from cases.registry import FARSIDE, case
from guest import nvmecli
from guest.control import SOCKET, Control
from guest.expected import AtLeast, Bits, Text, fields
from guest.fio import KIB, MIB, fio
from guest.lab import find_disk
from guest.nvmecli import nvme, nvme_json
from guest.shell import Failed, at_least, at_most, equal, eventually, read, run, true
from guest.target import NQN, Subsystem

UUID_1 = "6d1a0a2e-6e51-4c0e-9a8e-1f8f5b1b7c01"
UUID_2 = "0a3c8a64-7c57-4b3c-8f11-55fd0b9c9a02"


def two_namespaces(lab):
    """One subsystem with a namespace of 512-byte blocks and one, not next to it, of 4096."""
    return Subsystem(
        NQN + "disk1",
        [lab.namespace(1, 96 * MIB, 512, uuid=UUID_1), lab.namespace(3, 160 * MIB, 4096, uuid=UUID_2)],
        serial="FARSIDE0001",
    )


@case(list="smoke")
def list_and_list_subsys_name_controller_path_and_namespace(lab):
    target = lab.serve(two_namespaces(lab))
    controller = lab.connect(target)
    controller.disk(1), controller.disk(3)
    (device,) = nvme_json("list", "-v")["Devices"]
    (subsystem,) = device["Subsystems"]
    equal("SubsystemNQN", subsystem["SubsystemNQN"], NQN + "disk1")
    (listed,) = subsystem["Controllers"]
    fields("the controller in nvme list -v", listed, {
        "Controller": controller.name, "SerialNumber": "FARSIDE0001", "ModelNumber": Text(), "Firmware": Text(),
        "Transport": "rdma", "Address": f"traddr={target.address},trsvcid=4420",
    })  # fmt: skip
    namespaces = {n["NSID"]: n for n in subsystem["Namespaces"] or listed["Namespaces"]}
    equal("namespaces in nvme list -v", sorted(namespaces), [1, 3])
    fields("namespace 1", namespaces[1], {"PhysicalSize": 96 * MIB, "SectorSize": 512})
    fields("namespace 3", namespaces[3], {"PhysicalSize": 160 * MIB, "SectorSize": 4096})
    (host,) = nvme_json("list-subsys")
    (entry,) = host["Subsystems"]
    equal("NQN in list-subsys", entry["NQN"], NQN + "disk1")
    (path,) = entry["Paths"]
    fields("the path in list-subsys", path, {
        "Name": controller.name, "Transport": "rdma", "State": "live",
        "Address": f"traddr={target.address},trsvcid=4420",
    })  # fmt: skip


@case(list="smoke")
def id_ctrl_says_what_the_host_needs(lab):
    target = lab.serve(two_namespaces(lab))
    controller = lab.connect(target)
    got = nvme_json("id-ctrl", controller.device)
    fields("id-ctrl", got, {
        "sn": lambda v: v.strip() == "FARSIDE0001", "mn": Text(), "fr": Text(), "subnqn": NQN + "disk1",
        "cntlid": int(controller.attribute("cntlid")), "cntrltype": 1, "sqes": 0x66, "cqes": 0x44,
        "mdts": AtLeast(5), "kas": AtLeast(1), "ioccsz": AtLeast(4), "iorcsz": 1, "icdoff": 0,
        "msdbd": AtLeast(1), "maxcmd": AtLeast(32), "nn": AtLeast(3), "oncs": Bits(0b1100), "vwc": Bits(1),
        "sgls": Bits(0b101 | 1 << 20), "aerl": AtLeast(3),
    })  # fmt: skip
    equal("cntlid of a discovery or admin kind", got["cntlid"] in range(1, 0xFFF0), True)
    if lab.is_farside:
        fields("id-ctrl of farside", got, {
            "ver": AtLeast(0x20000), "mdts": 8, "ioccsz": (64 + 4096) // 16, "oncs": Bits(0b1101), "fuses": 1,
            "ctratt": Bits(1 << 6 | 1), "elpe": AtLeast(1), "lpa": Bits(0b110), "npss": 0,
        })  # fmt: skip


@case()
def id_ns_descriptors_and_list_ns_agree_with_the_configuration(lab):
    target = lab.serve(two_namespaces(lab))
    controller = lab.connect(target)
    for nsid, size, shift, uuid in ((1, 96 * MIB, 9, UUID_1), (3, 160 * MIB, 12, UUID_2)):
        disk = controller.disk(nsid)
        got = nvme_json("id-ns", disk)
        blocks = size >> shift
        fields(f"id-ns of namespace {nsid}", got, {"nsze": blocks, "ncap": blocks})
        at_most("nuse", got["nuse"], blocks)
        format_now = got["lbafs"][got["flbas"] & 0xF]
        fields("the LBA format in use", format_now, {"ds": shift, "ms": 0})
        equal("nmic", got["nmic"] & 1, 1)
        described = nvme_json("ns-descs", disk)["ns-descs"]
        equal("uuid in ns-descs", [d["uuid"] for d in described if d["type"] == "uuid"], [uuid])
        equal("csi in ns-descs", [d["csi"] for d in described if d["type"] == "csi"], ["0"])
        equal("namespace id of the node", nvme("get-ns-id", disk).strip().rpartition(":")[2], str(nsid))
    equal("list-ns", [n["nsid"] for n in nvme_json("list-ns", controller.device)["nsid_list"]], [1, 3])
    after_1 = nvme_json("list-ns", controller.device, "-n", 2)["nsid_list"]
    equal("list-ns from 2 on", [n["nsid"] for n in after_1], [3])
    absent = run("nvme", "id-ns", controller.device, "-n", 2, "-o", "json", check=False)
    true("an inactive namespace is all zeroes or refused", '"nsze":0' in absent.stdout or absent.returncode != 0)
    if lab.is_farside:  # the kernel's target answers zeroes
        beyond = run("nvme", "id-ns", controller.device, "-n", 0xFFFFFFF0, "-o", "json", check=False)
        true("a namespace above NN is refused as invalid", "Invalid Namespace" in beyond.stderr + beyond.stdout)


@case()
def smart_log_counts_what_was_done(lab):
    target = lab.serve()
    controller = lab.connect(target)
    disk = controller.disk()
    before = nvme_json("smart-log", controller.device)
    fio("reads", filename=disk, rw="read", bs="64k", size=16 * MIB, iodepth=4).moved_exactly(read=16 * MIB)
    fio("writes", filename=disk, rw="write", bs="64k", size=32 * MIB, iodepth=4).moved_exactly(write=32 * MIB)
    after = nvme_json("smart-log", controller.device)
    moved = {name: int(after[name]) - int(before[name]) for name in before if name.startswith(("data_", "host_"))}
    at_least("read commands counted", moved["host_read_commands"], 16 * MIB // (64 * KIB))
    at_least("write commands counted", moved["host_write_commands"], 32 * MIB // (64 * KIB))
    at_least("units of 512,000 bytes read", moved["data_units_read"], 16 * MIB // 512000)
    at_least("units of 512,000 bytes written", moved["data_units_written"], 32 * MIB // 512000)
    true("no more was written than was", moved["data_units_written"] <= 32 * MIB // 512000 + 2)
    equal("critical warning", after["critical_warning"], 0)


@case()
def error_log_holds_the_command_that_failed(lab):
    """With the opcode, the place of the wrong field, and the status that the host got."""
    target = lab.serve()
    controller = lab.connect(target)
    before = max(e["error_count"] for e in nvme_json("error-log", controller.device)["errors"])
    status, _, _ = nvmecli.admin_command(controller.device, GET_LOG_PAGE, 0, 0xBF | 3 << 16, length=16)
    # status code type 0, Invalid Field, or type 1, Invalid Log Page; bit 14 is Do Not Retry
    true(f"an unknown log page is refused: {status:#x}", status & 0x7FF in (0x02, 0x109))
    errors = nvme_json("error-log", controller.device)["errors"]
    newest = errors[0]
    equal("the error count", newest["error_count"], before + 1)
    got = (newest["sqid"], newest["status_field"] & 0x7FF)
    equal("SQID and status of the newest error", got, (0, status & 0x7FF))
    counts = [e["error_count"] for e in errors if e["error_count"]]
    equal("newest first", counts, sorted(counts, reverse=True))
    if lab.is_farside:
        equal("status with Do Not Retry", (newest["status_field"], status), (INVALID_LOG_PAGE, INVALID_LOG_PAGE))
        raw = nvmecli.admin_command(controller.device, GET_LOG_PAGE, 0, ERROR_LOG | 15 << 16, length=64)[2]
        equal("the whole CID", int.from_bytes(raw[10:12], "little"), newest["cmdid"])
        equal("opcode (byte 31)", raw[31], GET_LOG_PAGE)
        equal("location of the parameter: CDW10", newest["parm_error_location"], 40)


GET_LOG_PAGE, ERROR_LOG = 0x02, 0x01
INVALID_LOG_PAGE = 0x4109


@case(providers=FARSIDE)
def firmware_and_effects_logs_agree_with_identify(lab):
    target = lab.serve()
    controller = lab.connect(target)
    identify = nvme_json("id-ctrl", controller.device)
    firmware = nvme_json("fw-log", controller.device)[controller.name]
    slot = firmware["Active Firmware Slot (afi)"] & 7
    equal("active firmware slot", slot, 1)
    equal("revision in that slot", identify["fr"].strip() in str(firmware), True)
    effects = nvme_json("effects-log", controller.device, "-c", 0)[0]
    admin = {int(re.search(r"ACS_(\d+)", name)[1]): value for name, value in effects["admin_cmd_set"].items()}
    io = {int(re.search(r"IOCS_(\d+)", name)[1]): value for name, value in effects["io_cmd_set"].items()}
    true("admin commands of every fabrics controller", {2, 6, 8, 9, 10, 12, 24} <= set(admin))
    equal("I/O commands", {0, 1, 2, 5, 8, 9} <= set(io), True)
    true("each is marked as supported", all(value & 1 for value in [*admin.values(), *io.values()]))
    for opcode in (1, 8, 9):
        equal(f"opcode {opcode} changes contents", bool(io[opcode] & 2), True)
    for opcode in (0, 2, 5):
        equal(f"opcode {opcode} changes nothing", bool(io[opcode] & 2), False)


def feature(controller, fid: int, select: int, *more) -> tuple[str, int | None]:
    """("ok", value) or ("refused", None) with the refusal checked."""
    done = run("nvme", "get-feature", controller.device, "-f", fid, "-s", select, *more, check=False)
    said = done.stdout + done.stderr
    if done.returncode == 0:
        found = re.search(r"(?:value|capabilities):\s*(?:0x)?([0-9a-fA-F]+)", said)
        return "ok", int(found[1], 16) if found else None
    # Features of a namespace, asked of none.
    reason = "Invalid Namespace" if fid in OF_NAMESPACE else "Invalid Field"
    if reason not in said:
        raise Failed(f"get-feature -f {fid:#x} -s {select}: refused, but with {said.strip()!r}")
    return "refused", None


#: features of a namespace: reservation notification mask and persistence, write protection
OF_NAMESPACE = (0x82, 0x83, 0x84)
CHANGEABLE, OF_A_NAMESPACE = 1 << 2, 1 << 1
#: keep-alive timeout of the cases, in milliseconds
KATO = 7000
#: identifier -> Dword 0 of current, default, saved value and capabilities, with two I/O queues. Every other is refused.
FEATURES = {
    0x01: (7, 7, 7, CHANGEABLE),
    0x02: (0, 0, 0, CHANGEABLE),
    0x04: (0xFFFF, 0xFFFF, 0xFFFF, CHANGEABLE),
    0x05: (0, 0, 0, CHANGEABLE),
    0x06: (1, 1, 1, 0),
    0x07: (0x1_0001, 0x7F_007F, 0x7F_007F, CHANGEABLE),
    0x0A: (0, 0, 0, CHANGEABLE),
    0x0B: (0x900, 0x900, 0x900, CHANGEABLE),
    0x0F: (KATO, 0, 0, CHANGEABLE),
    0x16: (0, 0, 0, CHANGEABLE),
    0x19: (0, 0, 0, CHANGEABLE),
}
#: bytes that go with an answer, or the host has nowhere to put them
FEATURE_DATA = {0x16: 512, 0x81: 16}
GET_FEATURES = 0x0A
HOST_IDENTIFIER, EXTENDED_HOST_IDENTIFIER = 0x81, 1
CAPABILITIES = 3
INVALID_FIELD, INVALID_NAMESPACE = 0x02, 0x0B


def get_feature(controller, fid: int, select: int, nsid=0, cdw11=0) -> tuple[int, int | None]:
    """(status code, Dword 0 or nothing when it is refused)"""
    status, value, _ = nvmecli.admin_command(
        controller.device, GET_FEATURES, nsid, fid | select << 8, cdw11, FEATURE_DATA.get(fid, 0)
    )
    return status & 0x7FF, None if status else value


@case(timeout=240)
def get_feature_answers_each_selector_or_refuses_as_invalid_field(lab):
    """Every identifier with every selector, by what the tools call; and those that exist by the tools. Write protection is there
    where it can outlast a power cycle."""
    target = lab.serve(state_dir="/run/scratch/state")
    controller = lab.connect(target, keep_alive_tmo=KATO // 1000)
    if not lab.is_farside:
        for fid, least in ((0x06, 0), (0x07, 0x1_0001), (0x0B, 0), (0x0F, KATO)):
            at_least(f"feature {fid:#x}", feature(controller, fid, 0)[1], least)
        return
    for fid in range(0x100):
        for select in range(4):
            refused = INVALID_NAMESPACE if fid in OF_NAMESPACE else INVALID_FIELD
            want = (0, FEATURES[fid][select]) if fid in FEATURES else (refused, None)
            if (fid, select) == (HOST_IDENTIFIER, CAPABILITIES):  # only its value has a form that fabrics does not have
                want = (0, 0)
            equal(f"feature {fid:#x}, selector {select}: status and value", get_feature(controller, fid, select), want)
    for fid in OF_NAMESPACE:
        for select, value in enumerate((0, 0, 0, CHANGEABLE | OF_A_NAMESPACE)):
            equal(f"feature {fid:#x} of namespace 1, selector {select}", get_feature(controller, fid, select, 1), (0, value))
    with_extension = nvmecli.admin_command(controller.device, GET_FEATURES, 0, HOST_IDENTIFIER, EXTENDED_HOST_IDENTIFIER, 16)
    identifier = uuid.UUID(controller.attribute("hostid")).bytes
    equal("host identifier (81h): status and data", (with_extension[0], with_extension[2]), (0, identifier))
    for fid, values in FEATURES.items():
        for select, value in enumerate(values):
            equal(f"nvme get-feature -f {fid:#x} -s {select}", feature(controller, fid, select), ("ok", value))
    for fid in (0x03, 0x0C, 0x0E, 0x78, 0x82, 0xC0):
        equal(f"nvme get-feature -f {fid:#x}", feature(controller, fid, 0), ("refused", None))
    equal("nvme get-feature of a namespace", feature(controller, 0x84, 0, "-n", 1), ("ok", 0))


@case()
def set_feature_changes_the_current_value_and_not_the_default(lab):
    target = lab.serve()
    controller = lab.connect(target)
    default = feature(controller, 0x0B, 1)[1] if lab.is_farside else 0x100
    for value in (0x100, 0x000):  # namespace attribute notices on, and off
        nvme("set-feature", controller.device, "-f", 0x0B, "-v", value)
        equal("event configuration after a change", feature(controller, 0x0B, 0), ("ok", value))
        if lab.is_farside:
            equal("its default", feature(controller, 0x0B, 1), ("ok", default))
    bad = run("nvme", "set-feature", controller.device, "-f", 0xFF, "-v", 1, check=False)
    true("an unknown feature cannot be set", bad.returncode != 0 and "Invalid Field" in bad.stdout + bad.stderr)


def controller_property(controller, offset: int) -> int | None:
    done = run("nvme", "get-property", controller.device, f"--offset={offset:#x}", check=False)
    if done.returncode != 0:
        true(f"property {offset:#x} is refused as an invalid field", "Invalid Field" in done.stdout + done.stderr)
        return None
    return int(re.search(r"value: ([0-9a-f]+)", done.stdout)[1], 16)


#: CAP of an I/O controller of farside, by its fields: (lowest bit, bits, value)
CAP_FIELDS = {
    "MQES": (0, 16, 1023), "CQR": (16, 1, 1), "AMS": (17, 2, 0), "TO": (24, 8, 30), "DSTRD": (32, 4, 0), "NSSRS": (36, 1, 0),
    "CSS": (37, 8, 0b0100_0001), "BPS": (45, 1, 0), "CPS": (46, 2, 0), "MPSMIN": (48, 4, 0), "MPSMAX": (52, 4, 0),
    "PMRS": (56, 1, 0), "CMBS": (57, 1, 0), "NSSS": (58, 1, 0), "CRMS": (59, 2, 0b01),
}  # fmt: skip
VERSION_2_0 = 0x2_0000


@case()
def get_property_of_each_offset_is_right_or_refused(lab):
    target = lab.serve()
    controller = lab.connect(target)
    cap = controller_property(controller, 0x00)
    at_least("CAP.MQES", cap & 0xFFFF, 31)
    at_least("CAP.TO in 500 ms", cap >> 24 & 0xFF, 1)
    equal("CAP.CSS: the NVM command set", cap >> 37 & 1, 1)
    equal("CAP.MPSMIN", cap >> 48 & 0xF, 0)
    equal("VS is id-ctrl's", controller_property(controller, 0x08), nvme_json("id-ctrl", controller.device)["ver"])
    cc = controller_property(controller, 0x14)
    equal("CC.EN", cc & 1, 1)
    equal("CC.IOSQES and CC.IOCQES", (cc >> 16 & 0xF, cc >> 20 & 0xF), (6, 4))
    equal("CSTS: ready, nothing else", controller_property(controller, 0x1C), 1)
    for offset in (0x04, 0x0C, 0x10, 0x24, 0x28, 0x30, 0x38, 0x3C, 0x1000):
        equal(f"property {offset:#x}", controller_property(controller, offset), None)
    if lab.is_farside:
        found = {name: cap >> low & (1 << bits) - 1 for name, (low, bits, _) in CAP_FIELDS.items()}
        equal("the fields of CAP", found, {name: value for name, (_, _, value) in CAP_FIELDS.items()})
        equal("CAP", cap, sum(value << low for low, _, value in CAP_FIELDS.values()))
        equal("VS", controller_property(controller, 0x08), VERSION_2_0)
        equal("CRTO: CRWMT, as CAP.TO", controller_property(controller, 0x68), 30)
        equal("NSSR, which CAP.NSSRS says is not there", controller_property(controller, 0x20), None)


@case()
def flush_write_zeroes_trim_and_compare_do_what_they_say(lab):
    namespace = lab.namespace(size=32 * MIB)
    target = lab.serve(Subsystem(NQN + "disk1", [namespace]))
    controller = lab.connect(target)
    disk = controller.disk()
    data = lab.case_folder / "data"
    data.write_bytes(os.urandom(8 * KIB))
    nvme("write", disk, "-s", 16, "-c", 15, "-z", 8 * KIB, "-d", data)
    before = flushes()
    nvme("flush", disk, "-n", 1)
    at_least("flushes that the disk behind the file was given", flushes(), before + 1)
    equal("bytes in the backing file", _bytes(namespace.path, 8 * KIB, 8 * KIB), data.read_bytes())
    back = lab.case_folder / "back"
    nvme("read", disk, "-s", 16, "-c", 15, "-z", 8 * KIB, "-d", back)
    equal("bytes that nvme read brings", back.read_bytes(), data.read_bytes())
    if lab.is_farside:
        nvme("compare", disk, "-s", 16, "-c", 15, "-z", 8 * KIB, "-d", data)
        other = lab.case_folder / "other"
        other.write_bytes(data.read_bytes()[:-1] + bytes([data.read_bytes()[-1] ^ 1]))
        done = run("nvme", "compare", disk, "-s", 16, "-c", 15, "-z", 8 * KIB, "-d", other, check=False)
        true("one wrong bit is a compare failure", "Compare" in done.stdout + done.stderr and done.returncode != 0)
    nvme("write-zeroes", disk, "-s", 16, "-c", 7)
    equal("zeroed half", _bytes(namespace.path, 8 * KIB, 4 * KIB), bytes(4 * KIB))
    equal("other half", _bytes(namespace.path, 12 * KIB, 4 * KIB), data.read_bytes()[4 * KIB :])
    nvme("dsm", disk, "-n", 1, "-d", "-s", 24, "-b", 8)
    back.unlink()  # nvme-cli writes into it without cutting it
    nvme("read", disk, "-s", 24, "-c", 7, "-z", 4 * KIB, "-d", back)
    equal("trimmed blocks read the same as the file", back.read_bytes(), _bytes(namespace.path, 12 * KIB, 4 * KIB))
    done = run("nvme", "read", disk, "-s", 32 * MIB // 512, "-c", 0, "-z", 512, "-d", back, check=False)
    true("a read beyond the end is out of range", "Range" in done.stdout + done.stderr and done.returncode != 0)
    done = run("nvme", "write", disk, "-s", 32 * MIB // 512 - 1, "-c", 1, "-z", 1024, "-d", data, check=False)
    true("a write across the end is out of range", "Range" in done.stdout + done.stderr and done.returncode != 0)
    equal("the file did not grow", os.path.getsize(namespace.path), 32 * MIB)


def flushes() -> int:
    """Flush requests that the scratch disk has completed."""
    (disk,) = find_disk("disk0")
    return int(read(f"/sys/block/{disk.rpartition('/')[2]}/stat").split()[15])


@case(providers=FARSIDE)
def ns_rescan_finds_a_new_size_that_the_host_was_not_told_of(lab):
    namespace = lab.namespace(size=32 * MIB)
    target = lab.serve(Subsystem(NQN + "disk1", [namespace]), start=False)
    target.arguments = ["--control", SOCKET]
    target.start()
    controller = lab.connect(target)
    disk = controller.disk()
    size = lambda: int(read(f"/sys/block/{disk.rpartition('/')[2]}/size")) * 512  # noqa: E731
    # No notices (Asynchronous Event Configuration): the host learns of nothing by itself.
    nvme("set-feature", controller.device, "-f", 0x0B, "-v", 0)
    os.truncate(namespace.path, 48 * MIB)
    Control().ask("resize_namespace", nqn=NQN + "disk1", nsid=1)
    time.sleep(1)
    equal("size before", size(), 32 * MIB)
    nvme("ns-rescan", controller.device)
    eventually("the host has the new size", lambda: size() == 48 * MIB)
    fio("grown", filename=disk, rw="write", bs="64k", offset=32 * MIB, size=16 * MIB, iodepth=4, verify="crc32c").moved_exactly(
        write=16 * MIB, read=16 * MIB
    )


@case(allow=RESET)
def rescan_and_reset_leave_the_namespaces_as_they_were(lab):
    target = lab.serve(two_namespaces(lab))
    controller = lab.connect(target)
    before = [controller.disk(1), controller.disk(3)]
    nvme("ns-rescan", controller.device)
    equal("disks after a rescan", [controller.disk(1), controller.disk(3)], before)
    controller.reset()
    eventually("both disks are there after a reset", lambda: [controller.disk(1), controller.disk(3)] == before)
    fio("after", filename=before[1], rw="randrw", bs="4k", size=4 * MIB, iodepth=8, verify="crc32c")


@case(list="smoke")
def connect_all_connects_every_subsystem(lab):
    subsystems = [Subsystem(f"{NQN}disk{n}", [lab.namespace(size=16 * MIB)]) for n in range(1, 4)]
    target = lab.serve(*subsystems)
    nvme("connect-all", "-t", "rdma", "-a", target.address, "-s", target.port, "-i", 1)
    connected = sorted(c.attribute("subsysnqn") for c in nvmecli.controllers())
    equal("subsystems connected", connected, [s.nqn for s in subsystems])
    for controller in nvmecli.controllers():
        eventually(f"{controller.name} is live", controller.live)
        controller.disk()
    said = nvme("disconnect", "-n", subsystems[0].nqn)
    true("disconnect by NQN says what it did", "disconnected 1 controller" in said)
    eventually("two are left", lambda: len(nvmecli.controllers()) == 2)


@case()
def discovery_pages_of_many_subsystems_are_whole(lab):
    """nvme-cli reads the page in pieces of 4 KiB, each with an offset."""
    nqns = [f"{NQN}disk{n}" for n in range(40)]
    target = lab.serve(*(Subsystem(nqn, [lab.namespace(size=MIB)]) for nqn in nqns))
    records = nvmecli.discover(target.address)
    listed = [r["subnqn"] for r in records if r["subtype"] == "nvme subsystem"]
    equal("subsystems listed", sorted(listed), sorted(nqns))
    equal("addresses", {r["traddr"] for r in records}, {target.address})


@case()
def a_persistent_discovery_controller_identifies_itself(lab):
    target = lab.serve()
    name = "nqn.2014-08.org.nvmexpress.discovery"
    nvme("discover", "-t", "rdma", "-a", target.address, "-s", target.port, "--persistent", "-k", 30)
    (controller,) = nvmecli.controllers(name)
    eventually("it is live", controller.live)
    got = nvme_json("id-ctrl", controller.device)
    fields("id-ctrl of discovery", got, {"subnqn": name, "mn": Text(), "sn": Text(), "fr": Text(), "cntrltype": 2})
    records = nvme_json("discover", "-d", controller.name)["records"]
    true("the page can be read through it", NQN + "disk1" in [r["subnqn"] for r in records])
    controller.disconnect()


@case(allow=REFUSED)
def only_a_host_on_the_list_may_connect(lab):
    ours = read("/etc/nvme/hostnqn") if os.path.exists("/etc/nvme/hostnqn") else None
    allowed = "nqn.2014-08.org.nvmexpress:uuid:3b1f2f0e-2a35-4a55-9a3e-0d2f0f3f0001"
    closed = Subsystem(NQN + "closed", [lab.namespace()], hosts=[allowed])
    target = lab.serve(closed, Subsystem(NQN + "open", [lab.namespace()]))
    true("our own NQN is another", ours != allowed)
    nvmecli.connect_is_refused(closed.nqn, target.address)
    listed = {r["subnqn"] for r in nvmecli.discover(target.address)}
    true("the open one is listed, the closed one is not", NQN + "open" in listed and closed.nqn not in listed)
    controller = lab.connect(target, 0, hostnqn=allowed, hostid="3b1f2f0e-2a35-4a55-9a3e-0d2f0f3f0001")
    controller.disk()


@case()
def host_names_of_other_forms_are_accepted(lab):
    target = lab.serve()
    for nqn in ("nqn.2014-08.org.nvmexpress:uuid:07e4a0a641d54bff96b28a173dcfb6b5", "nqn.2016-06.io.3x:host"):
        controller = lab.connect(target, hostnqn=nqn, hostid="07e4a0a6-41d5-4bff-96b2-8a173dcfb6b5")
        controller.disk()
        controller.disconnect()


def _bytes(path, offset: int, length: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(offset)
        return file.read(length)
