"""Bad disks, made with the device mapper: stalls, errors and a full file system harm only the commands they hit."""

import time
from pathlib import Path

from cases.allow import RECONNECT
from cases.cases_faults import written
from cases.registry import FARSIDE, case
from guest import nvmecli
from guest.fio import MIB, Running, fio
from guest.lab import SCRATCH
from guest.shell import equal, eventually, modprobe, run, sh, true, write
from guest.target import NQN, Namespace, Subsystem

DISK_ERRORS = (
    *RECONNECT,
    (r"(critical (medium|target|space allocation)|I/O) error, dev (nvme|dm-|loop)", "the case makes the disk fail"),
    (r"Buffer I/O error on dev (nvme|dm-)", "the case makes the disk fail"),
    (r"nvme\S+: .*\(sct 0x\d+ / sc 0x\w+\)", "the host decodes the error that the case makes"),
    (r"loop: Write error at byte offset", "the case makes the disk fail"),
    (r"nvme nvme\d+: (I/O|Abort|req|sqid)", "the host's own time-out, which the case waits for"),
    (r"EXT4-fs", "the case makes the disk fail or fills it"),
)


class Mapped:
    """A device mapper disk over a loop device over a scratch file."""

    def __init__(self, lab, size=64 * MIB, name="farbad"):
        modprobe("dm_mod", "loop")
        self.name, self.size = name, size
        self.path = lab.file(size)
        self.loop = sh("losetup", "--find", "--show", "--direct-io=on", self.path).strip()
        lab.undo(run, "losetup", "-d", self.loop, check=False)
        sh("dmsetup", "create", name, "--table", self.linear())
        lab.undo(self.remove)
        self.device = Path(f"/dev/mapper/{name}")
        eventually(f"{self.device} is there", self.device.exists)

    def linear(self) -> str:
        return f"0 {self.size // 512} linear {self.loop} 0"

    def load(self, table: str) -> None:
        sh("dmsetup", "suspend", "--nolockfs", self.name)
        sh("dmsetup", "load", self.name, "--table", table)
        sh("dmsetup", "resume", self.name)

    def stall(self) -> None:
        """Commands are held until `resume`."""
        sh("dmsetup", "suspend", "--nolockfs", "--noflush", self.name)

    def resume(self) -> None:
        sh("dmsetup", "resume", self.name)

    def remove(self) -> None:
        run("dmsetup", "resume", self.name, check=False)
        sh("dmsetup", "remove", "--retry", self.name)


def served(lab, mapped: Mapped, **connect):
    good = lab.namespace(2, 32 * MIB)
    subsystem = Subsystem(NQN + "disk1", [Namespace(1, "device", mapped.device, mapped.size), good])
    # one more subsystem, so that a new connect can be tried: the tools refuse a second one to the first
    target = lab.serve(subsystem, Subsystem(NQN + "disk2", [lab.namespace(1, 32 * MIB)]))
    controller = lab.connect(target, **connect)
    # the mapper disk can only be removed once the target has let go of it
    lab.undo(target.stop)
    lab.undo(nvmecli.disconnect_all)
    return target, controller


@case(timeout=240, providers=FARSIDE, allow=DISK_ERRORS)
def the_host_aborts_what_a_stalled_disk_holds_and_recovers(lab):
    """The host's own time-out, 8 s here, aborts and then resets; the late writes do no harm."""
    parameter = "/sys/module/nvme_core/parameters/io_timeout"
    before = Path(parameter).read_text().strip()
    write(parameter, 8)
    lab.undo(write, parameter, before)
    mapped = Mapped(lab)
    target, controller = served(lab, mapped, reconnect_delay=1, ctrl_loss_tmo=300)
    disk = controller.disk(1)
    job = Running("abort", filename=disk, rw="randwrite", bs="16k", size=48 * MIB, iodepth=8, verify="crc32c", loops=2)
    lab.undo(job.stop)
    lab.undo(mapped.resume)
    eventually("fio writes", lambda: written(disk) > 2 * MIB, 30)
    mapped.stall()
    time.sleep(30)
    mapped.resume()
    eventually("the controller is live", controller.live, 90)
    job.wait(120).moved_at_least(write=2 * 48 * MIB, read=48 * MIB)
    true("the target runs", target.running)


@case(timeout=120, allow=DISK_ERRORS)
def a_disk_error_reaches_the_host_and_nothing_else_is_harmed(lab):
    mapped = Mapped(lab)
    target, controller = served(lab, mapped)
    disk, good = controller.disk(1), controller.disk(2)
    fio("before", filename=disk, rw="write", bs="64k", size=16 * MIB, iodepth=4).moved_exactly(write=16 * MIB)
    half = mapped.size // 1024
    mapped.load(f"0 {half} linear {mapped.loop} 0\n{half} {half} error")
    for direction in ("read", "write"):
        broken = Running(
            f"bad-{direction}", filename=disk, rw=direction, bs="4k", size=MIB, offset=48 * MIB, iodepth=1,
        )  # fmt: skip
        result = broken.wait(60, status=None)
        true(f"fio reports the {direction} errors", result.errors() > 0)
        equal(f"bytes that the {direction} moved", result.bytes(direction), 0)
    equal("state of the controller", controller.state, "live")
    fio("good", filename=good, rw="randwrite", bs="8k", size=4 * MIB, iodepth=8, verify="crc32c")
    fio("low", filename=disk, rw="randwrite", bs="8k", size=4 * MIB, iodepth=8, verify="crc32c")
    mapped.load(mapped.linear())
    fio("healed", filename=disk, rw="write", bs="64k", size=2 * MIB, offset=48 * MIB, iodepth=4, verify="crc32c")


@case(timeout=120, providers=FARSIDE, allow=DISK_ERRORS)
def a_full_file_system_fails_the_writes_that_need_room_and_no_others(lab):
    image = lab.file(48 * MIB, "small.fs")
    mount = Path("/run/small")
    mount.mkdir(exist_ok=True)
    sh("mkfs.ext4", "-q", "-F", "-m", 0, image)
    sh("mount", "-o", "loop", image, mount)
    lab.undo(sh, "umount", mount)
    sparse = mount / "disk.img"
    sparse.touch()
    with open(sparse, "r+b") as file:
        file.truncate(128 * MIB)
    subsystem = Subsystem(NQN + "disk1", [Namespace(1, "file", sparse, 128 * MIB), lab.namespace(2, 32 * MIB)])
    target = lab.serve(subsystem)
    lab.undo(target.stop)
    controller = lab.connect(target)
    lab.undo(nvmecli.disconnect_all)
    disk = controller.disk(1)
    fio("fits", filename=disk, rw="write", bs="64k", size=16 * MIB, iodepth=4).moved_exactly(write=16 * MIB)
    full = Running("full", filename=disk, rw="write", bs="64k", size=96 * MIB, iodepth=1).wait(90, status=None)
    true("fio reports the write that found no room", full.errors() > 0)
    true("what fitted was written", full.bytes("write") < 48 * MIB)
    equal("state of the controller", controller.state, "live")
    fio("old", filename=disk, rw="randread", bs="4k", size=16 * MIB, iodepth=8).moved_exactly(read=16 * MIB)
    fio("other", filename=controller.disk(2), rw="randwrite", bs="8k", size=4 * MIB, iodepth=8, verify="crc32c")
    true("the target runs", target.running)
    true("the scratch disk has room", SCRATCH.exists())
