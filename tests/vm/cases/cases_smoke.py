"""The short list, run on every kernel: find the subsystem, connect, move verified data, reset, disconnect."""

from pathlib import Path

from cases.allow import REFUSED, RESET
from cases.registry import case
from guest import nvmecli
from guest.fio import MIB, fio
from guest.shell import at_least, equal, eventually, quick, sha256, true
from guest.target import NQN, Subsystem

UUID = "6d1a0a2e-6e51-4c0e-9a8e-1f8f5b1b7c01"


@case(list="smoke")
def discovery_lists_the_subsystem_with_its_address(lab):
    target = lab.serve(Subsystem(NQN + "one", [lab.namespace()]), Subsystem(NQN + "two", [lab.namespace()]))
    records = nvmecli.discover(target.address)
    found = {r["subnqn"]: r for r in records if r["subtype"] == "nvme subsystem"}
    equal("subsystems in the discovery page", set(found), {NQN + "one", NQN + "two"})
    for record in found.values():
        equal("trtype", record["trtype"], "rdma")
        equal("adrfam", record["adrfam"], lab.family)
        equal("traddr", record["traddr"], target.address)
        equal("trsvcid", record["trsvcid"].strip(), "4420")
    true("no controller is left after discover", not nvmecli.controllers())


@case(list="smoke")
def connect_shows_the_namespace_as_a_disk_and_disconnect_removes_it(lab):
    namespace = lab.namespace(size=192 * MIB, uuid=UUID)
    target = lab.serve(Subsystem(NQN + "disk1", [namespace]))
    controller = lab.connect(target)
    equal("queues, the admin queue included", controller.attribute("queue_count"), "3")
    disk = controller.disk()
    name = disk.rpartition("/")[2]
    equal("size in 512-byte units", int(open(f"/sys/block/{name}/size").read()), 192 * MIB // 512)
    equal("logical block size", int(open(f"/sys/block/{name}/queue/logical_block_size").read()), 512)
    equal("uuid", open(f"/sys/block/{name}/uuid").read().strip(), UUID)
    controller.disconnect()
    eventually("the disk is gone", lambda: name not in _disks())


@case(list="smoke", timeout=120)
def thirty_seconds_of_mixed_io_verify_and_reach_the_backing_file(lab):
    namespace = lab.namespace(size=64 * MIB)
    target = lab.serve(Subsystem(NQN + "disk1", [namespace]))
    controller = lab.connect(target)
    disk = controller.disk()
    blank = sha256(namespace.path, length=64 * MIB)
    done = fio(
        "mix", filename=disk, rw="randrw", bs="4k", size=64 * MIB, iodepth=16, verify="crc32c",
        verify_backlog=1024, time_based=1, runtime=30, timeout=110,
    )  # fmt: skip
    done.moved_at_least(write=4 * MIB)
    # Half of the mix are reads; the rest of what is read is what was written, read back. Without that it is as much as was written.
    at_least("bytes read by bytes written", round(done.bytes("read") / done.bytes("write"), 2), 1.7)
    host_side = sha256(disk, length=64 * MIB, direct=True)
    true("the file has changed", host_side != blank)
    equal("checksum of the backing file and of the disk", sha256(namespace.path, length=64 * MIB), host_side)


@case(list="smoke", allow=RESET)
def reset_brings_the_controller_back_with_its_data(lab):
    namespace = lab.namespace(size=32 * MIB)
    target = lab.serve(Subsystem(NQN + "disk1", [namespace]))
    controller = lab.connect(target)
    disk = controller.disk()
    fio("fill", filename=disk, rw="write", bs="64k", size=8 * MIB, iodepth=4).moved_exactly(write=8 * MIB)
    before = sha256(disk, length=8 * MIB, direct=True)
    quick("for a reset", controller.reset(), 3)
    equal("queues after the reset", controller.attribute("queue_count"), "3")
    equal("checksum after the reset", sha256(controller.disk(), length=8 * MIB, direct=True), before)


@case(list="smoke", allow=REFUSED)
def connect_to_an_unknown_subsystem_or_a_closed_port_is_refused(lab):
    target = lab.serve()
    nvmecli.connect_is_refused(NQN + "absent", target.address)
    nvmecli.connect_is_refused(target.subsystems[0].nqn, target.address, port=4421)
    lab.connect(target).disconnect()


def _disks() -> set[str]:
    return {entry.name for entry in Path("/sys/block").iterdir()}
