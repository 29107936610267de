"""Connect, reset and disconnect many times: quick each time, and everything that was taken is given back."""

import json
import os
import time
from collections import Counter
from pathlib import Path

from cases.allow import RESET
from cases.registry import case
from guest.fio import MIB, fio
from guest.nvmecli import connect_as
from guest.pulse import clock
from guest.shell import all_quick, at_most, equal, eventually, read, sh, sha256
from guest.target import NQN, Subsystem

CYCLE_SECONDS = 3.0
RSS_SLACK = 3 * MIB


def _descriptors(pid: int) -> dict[str, int]:
    """What the process has open, by kind: a difference names what was not given back."""
    links = [link for entry in Path(f"/proc/{pid}/fd").iterdir() if (link := _while_there(os.readlink, entry))]
    return dict(Counter(sorted(link.split(":[")[0] for link in links)))


def _threads(pid: int) -> list[str]:
    """Its threads by name, without io_uring's workers: the kernel starts them as it likes and ends them when they idle."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    names = [name for task in tasks if (name := _while_there(read, task / "comm"))]
    return sorted(name for name in names if not name.startswith("iou-wrk"))


def _while_there(look, path: Path) -> str | None:
    """None of what ended since it was listed."""
    try:
        return look(path)
    except OSError:
        return None


class Usage:
    """What a target holds: descriptors, RDMA objects, memory. nvmet has no process: only the objects count there."""

    def __init__(self, target):
        self.pid = getattr(target, "process", None) and target.pid
        self.objects = {}
        kinds = ("qp", "cq", "mr", "pd", "cm_id") if self.pid else ("qp", "mr", "cm_id")  # the kernel pools its CQs
        # what the tool calls a pid is the thread that made the object
        tasks = {int(task.name) for task in Path(f"/proc/{self.pid}/task").iterdir()} if self.pid else set()
        for kind in kinds:
            entries = json.loads(sh("rdma", "-j", "resource", "show", kind) or "[]")
            self.objects[kind] = sum(1 for e in entries if not self.pid or e.get("pid") in tasks)
        if self.pid:
            self.descriptors = _descriptors(self.pid)
            self.threads = _threads(self.pid)
            status = Path(f"/proc/{self.pid}/status").read_text()
            self.rss = int(status.split("VmRSS:")[1].split()[0]) * 1024

    def back_to(self, target, slack=RSS_SLACK) -> None:
        """Waits until the target holds what it held then."""

        def same() -> bool:
            now = Usage(target)
            return now.objects == self.objects and (not self.pid or now.descriptors == self.descriptors)

        try:
            eventually("objects and descriptors are back", same, 20)
        except AssertionError:
            now = Usage(target)
            equal("RDMA objects", now.objects, self.objects)
            if self.pid:
                equal("descriptors", now.descriptors, self.descriptors)
        if self.pid:
            now = Usage(target)
            equal("threads", now.threads, self.threads)
            at_most("bytes of RSS", now.rss, self.rss + slack)


def _connects(lab, count: int) -> None:
    namespace = lab.namespace(size=32 * MIB)
    target = lab.serve(Subsystem(NQN + "disk1", [namespace]))

    def cycle(verify: bool) -> float:
        """Seconds until the disk could be used and until it was gone again, without what was done with it. One in ten by the
        tools and verified; the others by the file that the tools write to, at twice the pace."""
        begun = clock()
        controller = lab.connect(target) if verify else connect_as(*who, target.subsystems[0].nqn, target.address, nr_io_queues=2)
        disk = controller.disk()
        took = clock() - begun
        if verify:
            done = fio("some", filename=disk, rw="randwrite", bs="16k", size=MIB, iodepth=8, verify="crc32c")
            done.moved_exactly(write=MIB, read=MIB)
        begun = clock()
        controller.disconnect() if verify else controller.delete()
        return took + clock() - begun

    first = lab.connect(target)
    who = (first.attribute("hostnqn"), first.attribute("hostid"))
    first.disconnect()
    for _ in range(3):
        cycle(True)
    time.sleep(1)
    before = Usage(target)
    all_quick("cycle", [cycle(n % 10 == 0) for n in range(count)], CYCLE_SECONDS)
    before.back_to(target)


def _resets(lab, count: int) -> None:
    namespace = lab.namespace(size=32 * MIB)
    target = lab.serve(Subsystem(NQN + "disk1", [namespace]))
    controller = lab.connect(target)
    disk = controller.disk()
    fio("fill", filename=disk, rw="write", bs="64k", size=8 * MIB, iodepth=8).moved_exactly(write=8 * MIB)
    data = sha256(disk, length=8 * MIB, direct=True)
    for _ in range(3):
        controller.reset()
    time.sleep(1)
    before = Usage(target)
    all_quick("reset", [controller.reset() for _ in range(count)], CYCLE_SECONDS)
    equal("queues after the last reset", controller.attribute("queue_count"), "3")
    before.back_to(target)
    equal("checksum after the last reset", sha256(controller.disk(), length=8 * MIB, direct=True), data)


# Where the two hundred are not.
@case("all", timeout=300, also=("soft", "6.1", "7"))
def twenty_connects_give_everything_back(lab):
    _connects(lab, 20)


@case(timeout=300, allow=RESET, also=("soft",))
def fifty_resets_give_everything_back(lab):
    _resets(lab, 50)


@case(providers=("verbs",), timeout=1200)
def two_hundred_connects_give_everything_back(lab):
    _connects(lab, 200)


@case(timeout=180)
def eight_controllers_of_one_host_work_at_once(lab):
    subsystems = [Subsystem(f"{NQN}disk{n}", [lab.namespace(size=16 * MIB)]) for n in range(8)]
    target = lab.serve(*subsystems)
    for n in range(2):  # each reactor opens the device with its first queue, and keeps it
        lab.connect(target, n, io_queues=2).disconnect()
    time.sleep(1)
    before = Usage(target)
    controllers = [lab.connect(target, n, io_queues=2, nr_write_queues=2) for n in range(8)]
    disks = [c.disk() for c in controllers]
    equal("disks", len(set(disks)), 8)
    if lab.provider != "soft":
        equal("queue pairs in use", Usage(target).objects["qp"] - before.objects["qp"], 8 * 5)
    for controller in controllers:
        equal(f"queues of {controller.name}", controller.attribute("queue_count"), "5")
    done = fio(
        "eight", filename=":".join(disks), rw="randwrite", bs="8k", size=32 * MIB, iodepth=32, verify="crc32c",
    )  # fmt: skip
    done.moved_exactly(write=32 * MIB, read=32 * MIB)
    if lab.is_farside:
        held = target.figures()
        equal("controllers and queues by the target's count", (held.controllers, held.queues), (8, 8 * 5))
        written = sum(held.written(subsystem.nqn) for subsystem in subsystems)
        equal("bytes written by the target's count", written, 32 * MIB)
    for n, disk in enumerate(disks):
        same = sha256(disk, length=16 * MIB, direct=True)
        equal(f"checksum of disk {n}", sha256(subsystems[n].namespaces[0].path, length=16 * MIB), same)
    for controller in controllers:
        controller.disconnect()
    before.back_to(target, slack=8 * MIB)
