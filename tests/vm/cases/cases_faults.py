"""The target goes away under load, politely or not, and comes back: nothing that was acknowledged is lost."""

import signal
import time
from pathlib import Path

from cases.allow import RECONNECT
from cases.registry import FARSIDE, case
from guest.fio import MIB, OUTLIVES, Running, fio
from guest.shell import equal, eventually, quick, sh, sha256, true
from guest.target import NQN, Subsystem

#: the host tries every second, and for longer than any case lasts
PATIENT = {"reconnect_delay": 1, "ctrl_loss_tmo": 300, "keep_alive_tmo": 5}


def loaded(lab, size=64 * MIB, **fio_options):
    """A target with one disk, a host that waits for it, and fio writing what it will verify."""
    namespace = lab.namespace(size=size)
    target = lab.serve(Subsystem(NQN + "disk1", [namespace]))
    controller = lab.connect(target, **PATIENT)
    disk = controller.disk()
    options = {"rw": "randwrite", "bs": "16k", "size": size, "iodepth": 16, "verify": "crc32c", "loops": 2} | OUTLIVES
    job = Running("load", filename=disk, **(options | fio_options))
    lab.undo(job.stop)
    eventually("fio writes", lambda: written(disk) > 4 * MIB, 30)
    true("fio still runs", job.running())
    return namespace, target, controller, disk, job


def written(disk: str) -> int:
    name = disk.rpartition("/")[2]
    return int(Path(f"/sys/block/{name}/stat").read_text().split()[6]) * 512


@case(timeout=300, allow=RECONNECT)
def killed_under_fio_and_restarted_the_host_reconnects_and_verifies(lab):
    namespace, target, controller, disk, job = loaded(lab)
    target.kill()
    eventually("the host noticed", lambda: controller.state != "live", 30)
    target.start()
    eventually("the host reconnected by itself", controller.live, 60)
    done = job.wait(240)
    done.moved_at_least(write=2 * 64 * MIB, read=64 * MIB)
    same = sha256(disk, length=namespace.size, direct=True)
    equal("checksum of the backing file and of the disk", sha256(namespace.path, length=namespace.size), same)


@case(timeout=300, allow=RECONNECT)
def terminated_under_fio_it_ends_in_2_s_and_nothing_acknowledged_is_lost(lab):
    namespace, target, controller, disk, job = loaded(lab)
    quick("from SIGTERM to the end", target.terminate(), 2.0)
    true("fio waits", job.running())
    target.start()
    eventually("the host reconnected by itself", controller.live, 60)
    done = job.wait(240)
    done.moved_at_least(write=2 * 64 * MIB, read=64 * MIB)
    same = sha256(disk, length=namespace.size, direct=True)
    equal("checksum of the backing file and of the disk", sha256(namespace.path, length=namespace.size), same)


@case(providers=FARSIDE, allow=RECONNECT)
def an_idle_target_with_a_host_ends_at_once(lab):
    target = lab.serve()
    # No attempt to reconnect before the host is told to disconnect: where nobody answers connection management any more, as after
    # the software provider's process, an attempt takes over a minute (15 retries of 4.3 s) and the disconnect waits for it.
    disk = lab.connect(target, reconnect_delay=100).disk()
    sh("udevadm", "wait", "--settle", "--timeout=60", disk)  # idle once partitions and labels have been looked for
    quick("from SIGTERM to the end", target.terminate(), 2.0)


@case(providers=FARSIDE)
def a_sigint_ends_it_too(lab):
    target = lab.serve()
    target.signal(signal.SIGINT)
    equal("exit status after SIGINT", target.process.wait(60), 0)


@case(providers=FARSIDE, timeout=180, allow=RECONNECT)
def a_target_that_stops_for_a_while_is_waited_for(lab):
    """SIGSTOP for longer than the host's keep-alive: the host recovers and the data are right."""
    namespace, target, controller, disk, job = loaded(lab, loops=1)
    target.signal(signal.SIGSTOP)
    time.sleep(12)
    target.signal(signal.SIGCONT)
    eventually("the host is live", controller.live, 60)
    job.wait(120).moved_at_least(write=64 * MIB, read=64 * MIB)


@case(timeout=240, allow=RECONNECT)
def five_kills_in_a_row_lose_nothing_that_was_flushed(lab):
    namespace = lab.namespace(size=32 * MIB)
    target = lab.serve(Subsystem(NQN + "disk1", [namespace]))
    controller = lab.connect(target, **PATIENT)
    disk = controller.disk()
    for turn in range(5):
        fio(
            f"turn{turn}", filename=disk, rw="write", bs="64k", size=2 * MIB, offset=turn * 2 * MIB, iodepth=8,
            end_fsync=1, verify="crc32c", do_verify=0, **OUTLIVES,
        ).moved_exactly(write=2 * MIB)  # fmt: skip
        target.kill()
        target.start()
        eventually("the host reconnected", controller.live, 60)
    for turn in range(5):
        fio(
            f"turn{turn}", filename=disk, rw="write", bs="64k", size=2 * MIB, offset=turn * 2 * MIB, iodepth=8,
            verify="crc32c", verify_only=1,
        )  # fmt: skip
