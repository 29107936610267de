"""Two guests on a cable: two kernel hosts at once, a host that loses power, a cable that is pulled, a target that
loses power with promises to keep."""

import time
from dataclasses import dataclass

from cases.allow import RECONNECT
from cases.registry import case
from guest.shell import Failed, at_least, equal, eventually, quick, true
from machine.pair import NEAR, POWER_SIZE

KIB = 2**10
MIB = 2**20
PATIENT = {"reconnect_delay": 1, "ctrl_loss_tmo": 600, "keep_alive_tmo": 5}
PAIRED = ("verbs", "nvmet")


def both_write_and_verify(pair, near: dict, far: dict, size: int, seconds=200) -> None:
    """Both hosts run verified fio at the same time: `near` and `far` say on which disk, and where."""
    load = {"rw": "randwrite", "bs": "16k", "size": size, "iodepth": 8, "verify": "crc32c", "timeout": seconds - 10}
    numbers = [
        (guest, guest.send("guest.remote:fio_run", seconds, name="both", **load, **place))
        for guest, place in ((pair.near, near), (pair.far, far))
    ]
    for guest, number in numbers:
        moved = pair.result(guest, number)
        equal(f"bytes that fio moved in guest {guest.name}", (moved["write"], moved["read"]), (size, size))


def counts_agree(pair, connections: int, controllers: int, queues: int, written: dict) -> dict:
    """The target's own figures are what the hosts did; {} of the kernel's target. Exact, unless a host had to connect again and
    sent once more what was not answered: rxe ends a queue pair that retransmits (see `tests/README.md`)."""
    figures = {}

    def held() -> bool:
        figures.clear()
        figures.update(pair.call(pair.near, "target_figures"))
        return not figures or (figures["controllers"], figures["queues"], figures["rejected"]) == (controllers, queues, 0)

    try:
        eventually("the target's counts", held)  # a host may be about to connect again
    except Failed:
        counted = (figures["controllers"], figures["queues"], figures["rejected"])
        equal("controllers, queues and refused connections by the target's count", counted, (controllers, queues, 0))
        raise
    if not figures:
        return {}
    if figures["accepted"] == connections:
        equal("bytes written by the target's count", figures["written"], written)
    else:
        at_least("connections by the target's count", figures["accepted"], connections)
        for disk, least in written.items():
            at_least(f"bytes written to {disk} by the target's count", figures["written"][disk], least)
    return figures


@case(guests=2, providers=PAIRED, timeout=400, allow=RECONNECT)
def two_kernel_hosts_use_separate_and_shared_namespaces_at_once(pair):
    half = 16 * MIB
    pair.call(pair.near, "serve", 60, subsystems=[[{"size": 2 * half}], [{"size": half}]])
    _, near_1 = pair.call(pair.near, "connect", 60, address=NEAR, subsystem=1)
    _, far_2 = pair.call(pair.far, "connect", 60, address=NEAR, subsystem=2)
    both_write_and_verify(pair, {"filename": near_1}, {"filename": far_2}, half)
    figures = counts_agree(pair, 4, 2, 4, {"disk1": half, "disk2": half})
    if figures:
        at_least("bytes read by the target's count", min(figures["read"].values()), half)
    equal("bytes of disk 2", pair.call(pair.near, "backing_sha256", 60, subsystem=1),
          pair.call(pair.far, "disk_sha256", 60, disk=far_2, length=half))  # fmt: skip
    # Shared: each writes and verifies a half of disk 1 at the same time, and both have the whole.
    _, far_1 = pair.call(pair.far, "connect", 60, address=NEAR, subsystem=1)
    both_write_and_verify(pair, {"filename": near_1}, {"filename": far_1, "offset": half}, half)
    sums = {
        pair.call(guest, "disk_sha256", 60, disk=disk, length=2 * half)
        for guest, disk in ((pair.near, near_1), (pair.far, far_1))
    }
    equal("checksums of the shared disk, as either host and the file have it",
          sums, {pair.call(pair.near, "backing_sha256", 60)})  # fmt: skip
    counts_agree(pair, 6, 3, 6, {"disk1": 3 * half, "disk2": half})


@case(guests=2, providers=PAIRED, timeout=400, allow=RECONNECT)
def terminated_under_fio_of_two_hosts_it_ends_in_2_s_and_both_verify(pair):
    size = 16 * MIB
    pair.call(pair.near, "serve", 60, subsystems=[[{"size": size}], [{"size": size}]])
    jobs = []
    for guest, subsystem in ((pair.near, 1), (pair.far, 2)):
        name, disk = pair.call(guest, "connect", 60, address=NEAR, subsystem=subsystem, **PATIENT)
        pair.call(guest, "fio_start", name="load", filename=disk, rw="randwrite", bs="16k", size=size, iodepth=8,
                  verify="crc32c", loops=3)  # fmt: skip
        jobs.append((guest, name))
    time.sleep(4)
    for guest, _ in jobs:
        true(f"fio runs in guest {guest.name}", pair.call(guest, "fio_running", name="load"))
    quick("from SIGTERM to the end", pair.call(pair.near, "target_terminate", 60), 2.0)
    pair.call(pair.near, "target_start", 60)
    for guest, name in jobs:
        pair.call(guest, "wait_live", 90, controller=name, seconds=80)
    for guest, _ in jobs:
        moved = pair.call(guest, "fio_wait", 250, name="load", seconds=240)
        equal(f"bytes written in guest {guest.name}", moved["write"], 3 * size)
        at_least(f"bytes verified in guest {guest.name}", moved["read"], size)


@case(guests=2, providers=PAIRED, timeout=400, allow=RECONNECT)
def a_host_that_loses_power_is_replaced_by_another_with_its_identity(pair):
    """The far guest dies while the target's disk holds its writes; two seconds later the near one connects as the same host."""
    size = 24 * MIB
    who = {"nqn": "nqn.2014-08.org.nvmexpress:uuid:11111111-2222-3333-4444-555555555555",
           "host_id": "11111111-2222-3333-4444-555555555555"}  # fmt: skip
    for guest in (pair.near, pair.far):
        pair.call(guest, "identity", **who)
    device = pair.call(pair.near, "stallable_disk", 60, size=size)
    pair.call(pair.near, "serve", 60, subsystems=[[{"device": device, "size": size}]])
    _, disk = pair.call(pair.far, "connect", 60, address=NEAR, **PATIENT)
    pair.call(pair.far, "fio_start", name="doomed", filename=disk, rw="randwrite", bs="64k", size=size, iodepth=16,
              time_based=1, runtime=300)  # fmt: skip
    given = lambda: pair.call(pair.near, "disk_written")  # noqa: E731
    eventually("the host writes", lambda: given() > 4 * MIB, 60, 0.5)
    pair.call(pair.near, "disk_stall")
    time.sleep(1)
    before_stall = given()
    pair.far.kill()
    time.sleep(2)
    name, seconds = pair.call(pair.near, "connect_timed", 60, address=NEAR, **PATIENT)
    quick("until the new host's controller is live", seconds, 3)
    # What the disk holds of the dead host comes now, and whatever the new host does after it.
    pair.call(pair.near, "disk_resume")
    taken = pair.call(pair.near, "disk_of", 60, controller=name)
    moved = pair.call(pair.near, "fio_run", 150, name="heir", filename=taken, rw="write", bs="64k", size=size,
                      iodepth=8, verify="crc32c")  # fmt: skip
    at_least("bytes that the disk was given late", given() - before_stall - size, 64 * KIB)
    equal("bytes written and verified", (moved["write"], moved["read"]), (size, size))
    before = pair.call(pair.near, "disk_sha256", 60, disk=taken, length=size)
    if pair.is_farside:
        controllers = lambda: pair.call(pair.near, "target_figures")["controllers"]  # noqa: E731
        eventually("the old association is gone by its keep-alive", lambda: controllers() == 1, 30, 0.5)
    else:
        time.sleep(15)
    equal("no late write of the dead host landed", pair.call(pair.near, "disk_sha256", 60, disk=taken, length=size), before)
    equal("checksum of the backing device", pair.call(pair.near, "backing_sha256", 60, length=size), before)


@case(guests=2, timeout=400, allow=RECONNECT)
def a_cable_that_is_pulled_for_20_s_is_survived(pair):
    size = 16 * MIB
    pair.call(pair.near, "serve", 60, subsystems=[[{"size": size}]])
    name, disk = pair.call(pair.far, "connect", 60, address=NEAR, **PATIENT)
    pair.call(pair.far, "fio_start", name="load", filename=disk, rw="randwrite", bs="16k", size=size, iodepth=8,
              verify="crc32c", loops=2)  # fmt: skip
    time.sleep(3)
    pair.call(pair.far, "netem", options="loss 100%")
    time.sleep(20)
    at_least("packets that netem dropped", pair.call(pair.far, "netem_dropped"), 1)
    pair.call(pair.far, "netem", options="")
    pair.call(pair.far, "wait_live", 130, controller=name, seconds=120)
    moved = pair.call(pair.far, "fio_wait", 250, name="load", seconds=240)
    equal("bytes written", moved["write"], 2 * size)
    if pair.is_farside:
        true("the target runs", pair.call(pair.near, "target_running"))


@dataclass(frozen=True)
class Writer:
    """A host's writes to a disk of their own."""

    #: how they ask for durability
    mode: str
    #: the near guest's disk
    disk: int
    #: which subsystem of which target it is, counted from 1
    subsystem: int
    #: the target answers Flush and FUA without doing them
    dropped: bool = False
    #: what is served: a file on a file system, or the disk itself
    device: bool = False


WRITERS = {
    "flushed": Writer("fsync", 1, 1),
    "through": Writer("dsync", 2, 2),
    "flushed-device": Writer("fsync", 3, 3, device=True),
    "through-device": Writer("dsync", 4, 4, device=True),
    "flush-dropped": Writer("fsync", 5, 1, dropped=True),
    "through-dropped": Writer("dsync", 6, 2, dropped=True),
}
#: port and arguments of the targets, by whether they drop flushes
TARGETS = {False: ("disk", 4420, ()), True: ("dropped", 4421, ("--test-drop-flush",))}


@case(guests=2, timeout=600, allow=RECONNECT)
def power_loss_of_the_target_loses_nothing_that_was_promised(pair):
    """Six writers at once, with fsync and with O_DSYNC: to files, to disks, and to files of a target that answers Flush and FUA
    without doing them. Those two have to lose something, or the others prove nothing. (A disk itself, which the target writes past
    the page cache and the machine past its own, has nothing to lose.)"""
    writers = {name: writer for name, writer in WRITERS.items() if pair.is_farside or not writer.dropped}
    span = 16 * MIB
    entries = {}
    for name, writer in writers.items():
        if writer.device:
            entries[name] = {"device": pair.call(pair.near, "power_device", 60, number=writer.disk), "size": POWER_SIZE}
        else:
            folder = pair.call(pair.near, "power_disk", 60, number=writer.disk, make=True)
            entries[name] = {"file": f"{folder}/disk.img", "size": span}

    def address(dropped: bool) -> str:
        return pair.second_address if dropped else NEAR

    def serve() -> None:
        for dropped, (name, port, arguments) in TARGETS.items():
            subsystems = [[entries[one]] for one, writer in writers.items() if writer.dropped == dropped]
            if subsystems:
                pair.call(pair.near, "serve", 60, name=name, port=port, address=address(dropped), arguments=arguments,
                          subsystems=subsystems)  # fmt: skip

    serve()
    paths = {}
    for name, writer in writers.items():
        if not writer.device:
            pair.call(pair.near, "sync_power_disk", number=writer.disk)
        served, port, _ = TARGETS[writer.dropped]
        paths[name] = pair.call(pair.far, "connect", 60, address=address(writer.dropped), name=served, subsystem=writer.subsystem, port=port,
                                **PATIENT)  # fmt: skip
        pair.call(pair.far, "writer_start", name=name, disk=paths[name][1], mode=writer.mode, span=span)

    def noted() -> list[int]:
        return [pair.call(pair.far, "writer_noted", name=name) for name in writers]

    eventually("each writer noted 200 blocks", lambda: min(noted()) >= 200, 90, 0.2)
    pair.near.kill()
    for name in writers:
        pair.call(pair.far, "writer_stop", name=name)
    pair.reboot(pair.near)
    for writer in writers.values():
        if not writer.device:
            pair.call(pair.near, "power_disk", 60, number=writer.disk, make=False)
    for name, writer in writers.items():
        if writer.device:  # it may be called otherwise now
            entries[name]["device"] = pair.call(pair.near, "power_device", 60, number=writer.disk)
    serve()
    found = {}
    for name, (controller, disk) in paths.items():
        pair.call(pair.far, "wait_live", 130, controller=controller, seconds=120)
        found[name] = pair.call(pair.far, "writer_check", 120, name=name, disk=disk)
        at_least(f"blocks promised to {name}", found[name]["promised"], 200)
    for name, writer in writers.items():
        if writer.dropped:
            at_least(f"blocks lost by {name}", len(found[name]["lost"]), 1)
        else:
            equal(f"blocks lost by {name}", found[name]["lost"], [])
