"""Other addresses, other interfaces, and an RDMA device that is taken away."""

import subprocess

from cases.allow import RECONNECT, REFUSED, RESET
from cases.cases_faults import written
from cases.registry import FARSIDE, case
from guest import network, nvmecli, shell
from guest.fio import MIB, OUTLIVES, Running, fio
from guest.kmsg import KernelLog
from guest.shell import eventually, equal, run, sh, true
from guest.target import NQN, Namespace, Subsystem


def works(lab, target, address: str, **options):
    controller = nvmecli.connect(target.subsystems[0].nqn, address, target.port, **options)
    disk = controller.disk()
    done = fio("some", filename=disk, rw="randwrite", bs="16k", size=8 * MIB, iodepth=16, verify="crc32c")
    done.moved_exactly(write=8 * MIB, read=8 * MIB)
    true("the path's address is the one asked for", f"traddr={address}," in controller.attribute("address") + ",")
    return controller


@case()
def ipv6_is_discovered_and_connected(lab):
    target = lab.serve(addresses=[lab.address_v6])
    (record,) = [r for r in nvmecli.discover(lab.address_v6) if r["subtype"] == "nvme subsystem"]
    equal("adrfam", record["adrfam"], "ipv6")
    equal("traddr", record["traddr"], lab.address_v6)
    works(lab, target, lab.address_v6)


@case()
def ipv4_and_ipv6_are_served_at_once(lab):
    target = lab.serve(addresses=[lab.address, lab.address_v6])
    for address in target.addresses:
        works(lab, target, address).disconnect()


@case(allow=REFUSED)
def a_vlan_interface_is_served(lab):
    ours, far = "192.168.79.1", "192.168.79.2"
    network.add_vlan(79, ours, far if lab.provider == "soft" else None)
    lab.undo(network.delete_vlan, 79)
    lab.undo(nvmecli.disconnect_all)
    gid = "0000:0000:0000:0000:0000:ffff:c0a8:4f01"
    eventually("rxe0 has a GID for the VLAN address", lambda: gid in network.gids("rxe0"))
    address = far if lab.provider == "soft" else ours
    target = lab.serve(addresses=[address])
    works(lab, target, address)
    if lab.provider == "soft":
        # Where no process is, nobody refuses either: the kernel host asks for over a minute.
        listens = sh("ss", "--no-header", "--listening", "--udp", "--numeric", "sport = :4791", netns=lab.netns)
        equal("addresses with RoCE's port open", {line.split()[3] for line in listens.splitlines()}, {f"{far}:4791"})
    else:
        true("nobody listens on the other address", nvmecli.connect_is_refused(target.subsystems[0].nqn, lab.address))


@case(providers=FARSIDE, allow=(*REFUSED, *RESET, (r"Duplicate cntlid \d+ with nvme\d+, subsys", "the refusal that the case asks for")))
def two_targets_of_one_subsystem_need_controller_ids_of_their_own(lab):
    """Two processes, as on two machines, serve the same subsystem: the host refuses a controller ID that it has already."""
    subsystem = Subsystem(NQN + "disk1", [Namespace(1, "null", size=64 * MIB, uuid="6d1a0a2e-6e51-4c0e-9a8e-1f8f5b1b7c02")])
    small = {"reactors": 1, "pool_size": "8M", "receive_slots": 512}
    first = lab.serve(subsystem, **small)
    controller = lab.connect(first)
    elsewhere = [lab.second_address()]
    second = lab.serve(subsystem, addresses=elsewhere, port=4421, **small)
    log = KernelLog.from_now()
    nvmecli.connect_is_refused(subsystem.nqn, second.address, second.port)
    true("the kernel says why", "Duplicate cntlid" in log.close())
    second.stop()
    apart = lab.serve(subsystem, addresses=elsewhere, port=4422, cntlid_min=1000, cntlid_max=1999, **small)
    other = lab.connect(apart)
    equal("controller IDs", [int(c.attribute("cntlid")) for c in (controller, other)], [1, 1000])
    equal("one disk over both", controller.disk(), other.disk())


def second_device(lab) -> str:
    """Another rxe device on a pair of interfaces of its own; returns its address."""
    sh("ip", "link", "add", "veth2", "type", "veth", "peer", "name", "veth3")
    lab.undo(run, "ip", "link", "delete", "veth2", check=False)
    network.raise_link("veth3", "192.168.80.2")
    network.raise_link("veth2", "192.168.80.1")
    network.add_rxe("rxe2", "veth2", "192.168.80.1")
    lab.undo(lambda: (sh("rdma", "link", "delete", "rxe2") if "rxe2" in sh("rdma", "link") else None))
    return "192.168.80.1"


@case(providers=("verbs",), timeout=240, allow=RECONNECT)
def a_device_that_is_deleted_under_fio_does_not_stop_the_other(lab):
    """Deleting rxe2 waits until every process has let go of it: the target must, and must go on serving rxe0."""
    other = second_device(lab)
    namespace = lab.namespace(size=32 * MIB)
    subsystems = [Subsystem(NQN + "disk1", [namespace]), Subsystem(NQN + "disk2", [lab.namespace(size=32 * MIB)])]
    target = lab.serve(*subsystems, addresses=[lab.address, other])
    steady = nvmecli.connect(subsystems[0].nqn, lab.address)
    shaken = nvmecli.connect(subsystems[1].nqn, other, reconnect_delay=1, ctrl_loss_tmo=600)
    load = {"rw": "randwrite", "bs": "16k", "size": 16 * MIB, "iodepth": 8, "verify": "crc32c", "loops": 4} | OUTLIVES
    disks = [steady.disk(), shaken.disk()]
    jobs = [Running(name, filename=disk, **load) for name, disk in zip(("steady", "shaken"), disks)]
    for job in jobs:
        lab.undo(job.stop)
    eventually("both have written", lambda: min(map(written, disks)) >= 4 * MIB, 30)
    true("both go on", all(job.running() for job in jobs))
    deleter = subprocess.Popen(["rdma", "link", "delete", "rxe2"])
    try:
        deleter.wait(5 * shell.patience)
    except subprocess.TimeoutExpired:
        target.kill()
        deleter.wait(60)
        raise AssertionError("rdma link delete was stuck for 5 s: the target holds the device") from None
    equal("status of the deleter", deleter.returncode, 0)
    true("the target lives", target.running)
    jobs[0].wait(120).moved_exactly(write=4 * 16 * MIB, read=4 * 16 * MIB)
    equal("state of the controller on the device that stayed", steady.state, "live")
    network.add_rxe("rxe2", "veth2", "192.168.80.1")
    eventually("the target listens on the device again", lambda: "listening again" in target.log(), 30)
    # The host may have given its controller up with the device, or it goes on trying.
    eventually("the host is back, or its controller is gone", lambda: shaken.live() or not shaken.sysfs.exists(), 60)
    if shaken.sysfs.exists():
        jobs[1].wait(120).moved_exactly(write=4 * 16 * MIB, read=4 * 16 * MIB)
    jobs[1].stop()
    nvmecli.disconnect_all()
    for address in target.addresses:
        works(lab, target, address).disconnect()
