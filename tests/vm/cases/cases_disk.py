"""Bad disks, made with the device mapper: stalls, errors and a full file system harm only the commands they hit."""

import re
import signal
from pathlib import Path

from cases.allow import RECONNECT
from cases.cases_faults import written
from cases.registry import FARSIDE, case
from guest import nvmecli, shell
from guest.fio import MIB, OUTLIVES, Running, fio
from guest.kmsg import KernelLog
from guest.mapped import Mapped
from guest.nvmecli import nvme_json
from guest.shell import at_least, equal, eventually, run, sh, sha256, true, write
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


#: the host's message of a write (opcode 1) that was not answered; 6.1 and 7 word it in their own way
WRITE_TIMED_OUT = re.compile(r"(I/O tag|I/O|rw) .*(opcode 0x1 .*QID [1-9]|QID [1-9]).* timeout")


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


def exits(pid: int) -> bool:
    """Whether it is on its way out (PF_EXITING), for the kernel if not for those who wait for its end."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[6]) & 0x4 != 0


@case(timeout=240, providers=FARSIDE, allow=DISK_ERRORS)
def the_host_aborts_what_a_stalled_disk_holds_and_recovers(lab):
    """The host's own time-out, 4 s here, ends the connection and makes another while the disk still stalls; the late writes do
    no harm."""
    parameter = "/sys/module/nvme_core/parameters/io_timeout"
    before = Path(parameter).read_text().strip()
    write(parameter, 4)
    lab.undo(write, parameter, before)
    mapped = Mapped(lab)
    target, controller = served(lab, mapped, reconnect_delay=1, ctrl_loss_tmo=300)
    disk = controller.disk(1)
    job = Running("abort", filename=disk, rw="randwrite", bs="16k", size=48 * MIB, iodepth=8, verify="crc32c", loops=2, **OUTLIVES)
    lab.undo(job.stop)
    lab.undo(mapped.resume)
    eventually("fio writes", lambda: written(disk) > 2 * MIB, 30)
    accepted, log = target.figures().accepted, KernelLog.from_now()
    said = []

    def says(*lines: str) -> bool:
        said.extend(text for _, text in log.new())
        return all(any(line in text for text in said) for line in lines)

    mapped.stall()
    eventually("the host times a write out and begins to recover", lambda: says("timeout", "starting error recovery"), 25)
    true(f"it was a write of an I/O queue: {said}", any(WRITE_TIMED_OUT.search(text) for text in said))
    eventually("it has a connection again", lambda: says("Successfully reconnected"), 30)
    # An admin queue and two for I/O.
    at_least("connections by the target's count", target.figures().accepted, accepted + 3)
    at_least("commands under way, which the disk still holds", target.figures().under_way, 8)
    mapped.resume()
    eventually("the controller is live", controller.live, 90)
    job.wait(120).moved_exactly(write=2 * 48 * MIB, read=2 * 48 * MIB)
    true("the target runs", target.running)
    same = sha256(disk, length=64 * MIB, direct=True)
    equal("checksum of the file and of the disk", sha256(mapped.path, length=64 * MIB), same)


#: bytes from the beginning of the disk, on the half that fails
BAD_AT = 48 * MIB


def status_is(lab, controller, direction: str, code: int, called: str, said: str, at=BAD_AT) -> None:
    """The status of a failed read or write is the one that the specification names, wherever the host sees it: in the kernel's
    message (`said`, while fio ran), in nvme-cli's, and in the error log."""
    lba, kind = at // 512, code >> 8
    line = rf"@ LBA {lba}, 8 blocks, .*\(sct 0x{kind:x} / sc 0x{code & 0xFF:x}\)"
    true(f"the kernel says {line!r}, not {said[-600:]!r}", re.search(line, said))
    data = lab.case_folder / "block"
    data.write_bytes(bytes(4096))
    before = {entry["error_count"] for entry in nvme_json("error-log", controller.device)["errors"]}
    done = run("nvme", direction, controller.disk(1), "-s", lba, "-c", 7, "-z", 4096, "-d", data, check=False)
    answer = done.stdout + done.stderr
    found = re.search(rf"{called}.*\(0x([0-9a-f]+)\)", answer)
    true(f"nvme-cli names {called!r}: {answer!r}", found)
    equal(f"status of the {direction}", int(found[1], 16) & 0x7FF, code)
    new = [entry for entry in nvme_json("error-log", controller.device)["errors"] if entry["error_count"] not in before]
    ours = [entry for entry in new if (entry["lba"], entry["nsid"], entry["status_field"] & 0x7FF) == (lba, 1, code)]
    true(f"an entry of the error log has LBA {lba}, namespace 1 and status {code:#x}: {new}", ours)
    true("it is of an I/O queue", ours[0]["sqid"] in (1, 2))


@case(timeout=120, allow=DISK_ERRORS)
def a_disk_error_reaches_the_host_and_nothing_else_is_harmed(lab):
    mapped = Mapped(lab)
    target, controller = served(lab, mapped)
    disk, good = controller.disk(1), controller.disk(2)
    fio("before", filename=disk, rw="write", bs="64k", size=16 * MIB, iodepth=4).moved_exactly(write=16 * MIB)
    half = mapped.size // 1024
    mapped.load(f"0 {half} linear {mapped.loop} 0\n{half} {half} error")
    for direction, code, called in (("read", 0x281, "Unrecovered Read Error"), ("write", 0x280, "Write Fault")):
        log = KernelLog.from_now()
        broken = Running(
            f"bad-{direction}", filename=disk, rw=direction, bs="4k", size=MIB, offset=BAD_AT, iodepth=1,
        )  # fmt: skip
        result = broken.wait(60, status=None)
        true(f"fio reports the {direction} errors", result.errors() > 0)
        equal(f"bytes that the {direction} moved", result.bytes(direction), 0)
        if lab.is_farside:  # the kernel's target has Internal Error for all that a block device may answer
            status_is(lab, controller, direction, code, called, log.close())
    equal("state of the controller", controller.state, "live")
    fio("good", filename=good, rw="randwrite", bs="8k", size=4 * MIB, iodepth=8, verify="crc32c")
    fio("low", filename=disk, rw="randwrite", bs="8k", size=4 * MIB, iodepth=8, verify="crc32c")
    mapped.load(mapped.linear())
    fio("healed", filename=disk, rw="write", bs="64k", size=2 * MIB, offset=BAD_AT, iodepth=4, verify="crc32c")


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
    log = KernelLog.from_now()
    full = Running("full", filename=disk, rw="write", bs="64k", size=96 * MIB, iodepth=1).wait(90, status=None)
    true("fio reports the write that found no room", full.errors() > 0)
    true("what fitted was written", 16 * MIB <= full.bytes("write") < 48 * MIB)
    said = log.close()
    true(f"the kernel says that it was the capacity: {said[-400:]!r}", re.search(r"\(sct 0x0 / sc 0x81\)", said))
    data = lab.case_folder / "block"
    data.write_bytes(bytes(range(1, 129)) * 32)
    done = run("nvme", "write", disk, "-s", 100 * MIB // 512, "-c", 7, "-z", 4096, "-d", data, check=False)
    found = re.search(r"Capacity Exceeded.*\(0x([0-9a-f]+)\)", done.stdout + done.stderr)
    true(f"nvme-cli names it: {done.stdout + done.stderr!r}", found)
    # With Do Not Retry (bit 14): the room does not come back by itself.
    equal("status of a write that finds no room", int(found[1], 16), 0x4081)
    equal("state of the controller", controller.state, "live")
    fio("old", filename=disk, rw="randread", bs="4k", size=16 * MIB, iodepth=8).moved_exactly(read=16 * MIB)
    fio("other", filename=controller.disk(2), rw="randwrite", bs="8k", size=4 * MIB, iodepth=8, verify="crc32c")
    true("the target runs", target.running)




@case(timeout=120, providers=FARSIDE, allow=DISK_ERRORS)
def a_second_signal_does_not_wait_for_the_disk(lab):
    """A write that a stalled disk holds keeps a target that ends for a while; a second signal ends it with status 1."""
    mapped = Mapped(lab)
    target, controller = served(lab, mapped, reconnect_delay=1, ctrl_loss_tmo=0)
    job = Running("held", filename=controller.disk(1), rw="randwrite", bs="16k", size=MIB, iodepth=4, time_based=1, runtime=60)
    lab.undo(job.stop)
    eventually("fio writes", lambda: written(controller.disk(1)) > MIB, 30)
    lab.undo(mapped.resume)
    mapped.stall()
    eventually("the disk holds writes", lambda: target.figures().under_way >= 4)
    target.signal(signal.SIGTERM)
    eventually("the target begins to stop", lambda: "stopping" in target.log())
    true("it waits for the disk", target.running)
    target.signal(signal.SIGINT)
    # The kernel ends a process when its disk lets go of what it holds.
    eventually("the target exits", lambda: exits(target.pid))
    mapped.resume()
    equal("exit status after a second signal", target.process.wait(10 * shell.patience), 1)
