"""A target that is changed while kernel hosts use it: ANA states, listeners, namespaces that come, go and change their size,
many subsystems at once."""

import os
import time

from cases.allow import RECONNECT
from cases.registry import FARSIDE, case
from guest import nvmecli
from guest.control import SOCKET, Control
from guest.fio import MIB, OUTLIVES, ended_well, verified_load
from guest.shell import equal, eventually, read, true
from guest.target import NQN, Subsystem, endpoint


def moves(what: str, controller, least=20, nsid=1) -> None:
    before = controller.path_ios(nsid)
    eventually(what, lambda: controller.path_ios(nsid) >= before + least, 30)


CHANGING = (
    (r"nvme\d+c\d+n\d+: I/O Cmd\(0x2\) @ .* I/O Error \(sct 0x0 / sc 0x(80|82|0?b)\)", "udev reads what just went"),
    (r"critical target error, dev nvme\d+c\d+n\d+, sector \d+ op 0x0:\(READ\)", "udev reads the end that was cut off"),
    (r"operation not supported error, dev nvme\d+c\d+n\d+, sector \d+ op 0x0:\(READ\)", "udev reads a disk that went"),
    (r"block nvme\d+n\d+: no usable path - requeuing I/O", "the disk that goes"),
    (r"nvme nvme\d+: Identify Descriptors failed \(nsid=\d+, status=0x(400)?b\)", "it went between list and look"),
)


def two_ways(lab):
    """A target with two listeners and a control socket, not started; and the text of each listener's address."""
    target = lab.serve(Subsystem(NQN + "disk1", [lab.namespace(size=64 * MIB)]), start=False)
    addresses = [endpoint(target.address, port) for port in (4420, 4421)]
    text = target.config() + f'[[listener]]\naddress = "{addresses[1]}"\n'
    target.config = lambda: text
    target.arguments = ["--control", SOCKET]
    return target, addresses


def connect_both(lab, target, **options) -> list:
    nqn = target.subsystems[0].nqn
    return [lab.connect(target, **options), nvmecli.connect(nqn, target.address, 4421, 2, **options)]


#: from (change, optimized) to (optimized, inaccessible): the first refused command comes before the host has read the log again
MOVED = ((r"block nvme\S+: no usable path - requeuing I/O", "the good path moved, and the host holds its I/O until it knows where to"),)


@case(providers=FARSIDE, timeout=240, allow=MOVED)
def multipath_follows_the_ana_states_under_verified_io(lab):
    target = lab.serve(Subsystem(NQN + "disk1", [lab.namespace(size=64 * MIB)]), start=False)
    second = endpoint(target.address, 4421)
    plain = target.config() + f'[[listener]]\naddress = "{second}"\n'
    first = endpoint(target.address, 4420)

    def config(*states: str) -> str:
        tables = "".join(
            f'[[subsystem.ana]]\ngroup = 1\nlistener = "{address}"\nstate = "{state}"\n'
            for address, state in zip((first, second), states)
        )
        return plain.replace("[[subsystem.namespace]]", tables + "[[subsystem.namespace]]", 1)

    target.config = lambda: config("optimized", "optimized")
    target.arguments = ["--control", SOCKET]
    target.start()
    control = Control()
    paths = [lab.connect(target), nvmecli.connect(target.subsystems[0].nqn, target.address, 4421, 2)]
    disk = paths[0].disk()
    load = verified_load(lab, disk, **OUTLIVES)
    for states in (
        ("optimized", "non-optimized"),
        ("non-optimized", "optimized"),
        ("inaccessible", "optimized"),
        ("change", "optimized"),
        ("optimized", "inaccessible"),
        ("optimized", "persistent-loss"),
        ("optimized", "optimized"),
    ):
        control.ask("apply", config=config(*states))
        for path, state in zip(paths, states):
            eventually(f"{path.name} is {state}", lambda path=path, state=state: path.ana_state() == state)
        if "optimized" in states and states != ("optimized", "optimized"):
            used = paths[states.index("optimized")]
            before = used.path_ios()
            eventually(f"I/O goes through {used.name}", lambda used=used, before=before: used.path_ios() > before + 20)
        true("fio still runs", load.running())
    ended_well(load)


@case(providers=FARSIDE, timeout=240, allow=RECONNECT)
def a_listener_is_taken_away_and_brought_back_under_verified_io(lab):
    target, addresses = two_ways(lab)
    target.start()
    control = Control()
    paths = connect_both(lab, target, reconnect_delay=1, ctrl_loss_tmo=120)
    load = verified_load(lab, paths[0].disk(), **OUTLIVES)
    for gone, address in enumerate(addresses):
        left = paths[1 - gone]
        control.ask("remove_listener", address=address)
        true("connections of a listener that goes stay", paths[gone].live())
        paths[gone].begin_reset()
        eventually(f"{paths[gone].name} finds nobody", lambda gone=gone: paths[gone].state == "connecting", 30)
        moves(f"I/O goes through {left.name}", left)
        ports = {record["trsvcid"].strip() for record in nvmecli.discover(target.address, 4421 - gone)}
        equal("ports that discovery tells of", ports, {str(4421 - gone)})
        control.ask("add_listener", listener={"address": address})
        eventually(f"{paths[gone].name} is back", paths[gone].live, 60)
        eventually("and can be used", lambda gone=gone: paths[gone].ana_state() == "optimized", 30)
    ended_well(load)


#: the path that was closed opens after the other one closes
SWAPPED = ((r"block nvme\d+n\d+: no usable path - requeuing I/O", "neither path is for the group while the two change places"),)


@case(providers=FARSIDE, timeout=180, allow=SWAPPED)
def a_namespace_in_a_new_ana_group_appears_by_itself(lab):
    target, addresses = two_ways(lab)
    target.start()
    control = Control()
    paths = connect_both(lab, target)
    paths[0].disk()
    more = f'[[subsystem.namespace]]\nnsid = 5\nfile = "{lab.file(32 * MIB)}"\nana_group = 7\n'
    control.ask("apply", config=target.config() + more)
    disk = paths[0].disk(5)
    for path in paths:
        eventually(f"{path.name} reaches it", lambda path=path: path.ana_state(5) == "optimized")
        equal("its ANA group", read(path.path(5) / "ana_grpid"), "7")
    load = verified_load(lab, disk, size=16 * MIB, **OUTLIVES)
    for used, other in (paths, paths[::-1]):
        closed = addresses[paths.index(other)]
        state = f'[[subsystem.ana]]\ngroup = 7\nlistener = "{closed}"\nstate = "inaccessible"\n'
        control.ask("apply", config=target.config() + more + state)
        eventually("the other path is not for it", lambda other=other: other.ana_state(5) == "inaccessible")
        moves(f"I/O goes through {used.name}", used, nsid=5)
        equal("the first namespace's states", [path.ana_state(1) for path in paths], ["optimized"] * 2)
    ended_well(load)


@case(providers=FARSIDE, timeout=240, allow=CHANGING)
def namespaces_come_go_and_change_size_20_times_a_second_under_verified_io(lab):
    other = lab.file(64 * MIB)
    target = lab.serve(Subsystem(NQN + "disk1", [lab.namespace(size=64 * MIB)]), start=False)
    target.arguments = ["--control", SOCKET]
    target.start()
    control = Control()
    controller = lab.connect(target)
    nqn = target.subsystems[0].nqn
    control.ask("add_namespace", nqn=nqn, namespace={"nsid": 2, "file": str(other)})
    third = {"nsid": 3, "memory": "8M"}
    loads = [
        verified_load(lab, controller.disk(1), "steady"),
        verified_load(lab, controller.disk(2), "resized", size=16 * MIB),
    ]
    time.sleep(2)
    begun, pace = time.monotonic(), 0.05
    for turn in range(200):
        os.truncate(other, (32 if turn % 2 == 0 else 64) * MIB)
        control.ask("resize_namespace", nqn=nqn, nsid=2)
        if turn % 2 == 0:
            control.ask("add_namespace", nqn=nqn, namespace=third)
        else:
            control.ask("remove_namespace", nqn=nqn, nsid=3)
        time.sleep(max(0.0, begun + (turn + 1) * pace - time.monotonic()))
        true("the host stays", controller.live())
    control.ask("add_namespace", nqn=nqn, namespace=third)
    os.truncate(other, 48 * MIB)
    control.ask("resize_namespace", nqn=nqn, nsid=2)
    name = controller.disk(2).rpartition("/")[2]
    eventually("the host has the last size", lambda: int(read(f"/sys/block/{name}/size")) * 512 == 48 * MIB, 30)
    controller.disk(3, timeout=30)
    control.ask("remove_namespace", nqn=nqn, nsid=3)
    gone = lambda: controller.path(3) is None  # noqa: E731
    eventually("the third is gone", gone, 30)
    for load in loads:
        ended_well(load)


@case(providers=FARSIDE, timeout=240)
def fifty_subsystems_come_and_go_and_an_untouched_host_never_notices(lab):
    target = lab.serve(Subsystem(NQN + "disk1", [lab.namespace(size=64 * MIB)]), start=False)
    target.arguments = ["--control", SOCKET]
    target.start()
    control = Control()
    controller = lab.connect(target)
    load = verified_load(lab, controller.disk())
    before, accepted = control.ask("config"), control.counters()["connections_accepted"]
    many = before + "".join(
        f'\n[[subsystem]]\nnqn = "{NQN}many{number}"\n[[subsystem.namespace]]\nnull = "1G"\n' for number in range(50)
    )
    for _ in range(3):
        equal("changes there", len(control.ask("apply", config=many)["changes"]), 50)
        equal("records of discovery", len(nvmecli.discover(target.address)), 52)
        equal("changes back", len(control.ask("apply", config=before)["changes"]), 50)
        true("the host is live", controller.live())
    # Discovery made one connection each time; the host none.
    equal("connections since", control.counters()["connections_accepted"] - accepted, 3)
    equal("configuration", control.ask("config"), before)
    ended_well(load)
