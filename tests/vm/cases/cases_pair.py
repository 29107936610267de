"""Two guests on a cable: two kernel hosts at once, a host that loses power, a cable that is pulled, a target that
loses power with promises to keep."""

import time

from cases.allow import RECONNECT
from cases.registry import case
from guest.shell import at_least, equal, eventually, quick, true
from machine.pair import NEAR

MIB = 2**20
PATIENT = {"reconnect_delay": 1, "ctrl_loss_tmo": 600, "keep_alive_tmo": 5}
PAIRED = ("verbs", "nvmet")


def each_on_a_disk_of_its_own(pair, near_disk: str, far_disk: str, size: int, seconds=200) -> None:
    """Both hosts run verified fio at the same time."""
    load = {"rw": "randwrite", "bs": "16k", "size": size, "iodepth": 8, "verify": "crc32c"}
    numbers = [
        (guest, guest.send("guest.remote:fio_run", seconds, name="both", filename=disk, timeout=seconds - 10, **load))
        for guest, disk in ((pair.near, near_disk), (pair.far, far_disk))
    ]
    for guest, number in numbers:
        moved = pair.result(guest, number)
        equal(f"bytes that fio moved in guest {guest.name}", (moved["write"], moved["read"]), (size, size))


def counts_agree(pair, connections: int, controllers: int, queues: int, written: dict) -> dict:
    """The target's own figures are what the hosts did; {} of the kernel's target. Exact, unless a host had to connect again and
    sent once more what was not answered: rxe ends a queue pair that retransmits (see `tests/README.md`)."""
    figures = pair.call(pair.near, "target_figures")
    if not figures:
        return {}
    held = (figures["controllers"], figures["queues"], figures["rejected"])
    equal("controllers, queues and refused connections by the target's count", held, (controllers, queues, 0))
    if figures["accepted"] == connections:
        equal("bytes written by the target's count", figures["written"], written)
    else:
        at_least("connections by the target's count", figures["accepted"], connections)
        for disk, least in written.items():
            at_least(f"bytes written to {disk} by the target's count", figures["written"][disk], least)
    return figures


@case(guests=2, providers=PAIRED, timeout=400, allow=RECONNECT)
def two_kernel_hosts_use_separate_and_shared_namespaces_at_once(pair):
    size = 24 * MIB
    pair.call(pair.near, "serve", 60, subsystems=[[{"size": size}], [{"size": size}]])
    _, near_1 = pair.call(pair.near, "connect", 60, address=NEAR, subsystem=1)
    _, far_2 = pair.call(pair.far, "connect", 60, address=NEAR, subsystem=2)
    each_on_a_disk_of_its_own(pair, near_1, far_2, size)
    figures = counts_agree(pair, 4, 2, 4, {"disk1": size, "disk2": size})
    if figures:
        at_least("bytes read by the target's count", min(figures["read"].values()), size)
    equal("bytes of disk 2", pair.call(pair.near, "backing_sha256", 60, subsystem=1),
          pair.call(pair.far, "disk_sha256", 60, disk=far_2, length=size))  # fmt: skip
    # Shared: what the one host writes the other reads, from disk 1.
    _, far_1 = pair.call(pair.far, "connect", 60, address=NEAR, subsystem=1)
    pair.call(pair.near, "fio_run", 120, name="one", filename=near_1, rw="write", bs="64k", size=size, iodepth=4)
    sums = {
        pair.call(guest, "disk_sha256", 60, disk=disk, length=size)
        for guest, disk in ((pair.near, near_1), (pair.far, far_1))
    }
    equal("checksums of the shared disk, as either host and the file have it",
          sums, {pair.call(pair.near, "backing_sha256", 60)})  # fmt: skip
    counts_agree(pair, 6, 3, 6, {"disk1": 2 * size, "disk2": size})


@case(guests=2, providers=PAIRED, timeout=400, allow=RECONNECT)
def terminated_under_fio_of_two_hosts_it_ends_in_2_s_and_both_verify(pair):
    size = 24 * MIB
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
    """The far guest dies in the middle of its writes; two seconds later the near one connects as the same host."""
    size = 24 * MIB
    who = {"nqn": "nqn.2014-08.org.nvmexpress:uuid:11111111-2222-3333-4444-555555555555",
           "host_id": "11111111-2222-3333-4444-555555555555"}  # fmt: skip
    for guest in (pair.near, pair.far):
        pair.call(guest, "identity", **who)
    pair.call(pair.near, "serve", 60, subsystems=[[{"size": size}]])
    _, disk = pair.call(pair.far, "connect", 60, address=NEAR, **PATIENT)
    pair.call(pair.far, "fio_start", name="doomed", filename=disk, rw="randwrite", bs="64k", size=size, iodepth=16,
              time_based=1, runtime=300)  # fmt: skip
    time.sleep(3)
    pair.far.kill()
    time.sleep(2)
    begun = time.monotonic()
    _, taken = pair.call(pair.near, "connect", 60, address=NEAR, **PATIENT)
    quick("until the new host has its disk", time.monotonic() - begun, 10)
    moved = pair.call(pair.near, "fio_run", 150, name="heir", filename=taken, rw="write", bs="64k", size=size,
                      iodepth=8, verify="crc32c")  # fmt: skip
    equal("bytes written", moved["write"], size)
    before = pair.call(pair.near, "disk_sha256", 60, disk=taken, length=size)
    if pair.is_farside:
        controllers = lambda: pair.call(pair.near, "target_figures")["controllers"]  # noqa: E731
        eventually("the old association is gone by its keep-alive", lambda: controllers() == 1, 30, 0.5)
    else:
        time.sleep(15)
    equal("no late write of the dead host landed", pair.call(pair.near, "disk_sha256", 60, disk=taken, length=size), before)
    equal("checksum of the backing file", pair.call(pair.near, "backing_sha256", 60), before)


@case(guests=2, providers=PAIRED, timeout=400, allow=RECONNECT)
def a_cable_that_is_pulled_for_20_s_is_survived(pair):
    size = 24 * MIB
    pair.call(pair.near, "serve", 60, subsystems=[[{"size": size}]])
    name, disk = pair.call(pair.far, "connect", 60, address=NEAR, **PATIENT)
    pair.call(pair.far, "fio_start", name="load", filename=disk, rw="randwrite", bs="16k", size=size, iodepth=8,
              verify="crc32c", loops=3)  # fmt: skip
    time.sleep(3)
    pair.call(pair.far, "netem", options="loss 100%")
    time.sleep(20)
    at_least("packets that netem dropped", pair.call(pair.far, "netem_dropped"), 1)
    pair.call(pair.far, "netem", options="")
    pair.call(pair.far, "wait_live", 130, controller=name, seconds=120)
    moved = pair.call(pair.far, "fio_wait", 250, name="load", seconds=240)
    equal("bytes written", moved["write"], 3 * size)
    if pair.is_farside:
        true("the target runs", pair.call(pair.near, "target_running"))


#: name of the writer -> how it asks for durability, the disk, the target's port and what that target is started with
WRITERS = {
    "flushed": ("fsync", 1, 4420, ()),
    "through": ("dsync", 2, 4420, ()),
    "dropped": ("fsync", 3, 4421, ("--test-drop-flush",)),
}


@case(guests=2, providers=PAIRED, timeout=600, allow=RECONNECT)
def power_loss_of_the_target_loses_nothing_that_was_promised(pair):
    """Three hosts' writes at once, each on a file system of its own: with fsync, with O_DSYNC, and with fsync to a target that
    answers Flush without doing it. That one has to lose something, or the others prove nothing."""
    writers = {name: how for name, how in WRITERS.items() if pair.is_farside or not how[3]}
    span = 16 * MIB
    entries = {}
    for name, (_, disk, _, _) in writers.items():
        folder = pair.call(pair.near, "power_disk", 60, number=disk, make=True)
        entries[name] = {"file": f"{folder}/disk.img", "size": span}

    def serve() -> None:
        pair.call(pair.near, "serve", 60, subsystems=[[entries["flushed"]], [entries["through"]]])
        if "dropped" in writers:
            _, _, port, arguments = writers["dropped"]
            pair.call(pair.near, "serve", 60, name="dropped", port=port, arguments=arguments,
                      subsystems=[[entries["dropped"]]])  # fmt: skip

    serve()
    paths = {}
    for number, (name, (mode, disk, port, _)) in enumerate(writers.items(), 1):
        pair.call(pair.near, "sync_power_disk", number=disk)
        which = {"name": "dropped"} if port != 4420 else {"subsystem": number}
        paths[name] = pair.call(pair.far, "connect", 60, address=NEAR, port=port, **which, **PATIENT)
        pair.call(pair.far, "writer_start", name=name, disk=paths[name][1], mode=mode, span=span)

    def noted() -> list[int]:
        return [pair.call(pair.far, "writer_noted", name=name) for name in writers]

    eventually("each writer noted 200 blocks", lambda: min(noted()) >= 200, 90, 0.2)
    pair.near.kill()
    for name in writers:
        pair.call(pair.far, "writer_stop", name=name)
    pair.reboot(pair.near)
    for _, disk, _, _ in writers.values():
        pair.call(pair.near, "power_disk", 60, number=disk, make=False)
    serve()
    found = {}
    for name, (controller, disk) in paths.items():
        pair.call(pair.far, "wait_live", 130, controller=controller, seconds=120)
        found[name] = pair.call(pair.far, "writer_check", 120, name=name, disk=disk)
        at_least(f"blocks promised to {name}", found[name]["promised"], 200)
    equal("blocks lost that were flushed", found["flushed"]["lost"], [])
    equal("blocks lost that were written through", found["through"]["lost"], [])
    if "dropped" in found:
        at_least("blocks lost whose flush was dropped", len(found["dropped"]["lost"]), 1)
