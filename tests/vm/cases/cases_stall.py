"""A disk that stalls for a minute, by the device mapper, under a keep-alive of five seconds."""

import time

from cases.cases_disk import DISK_ERRORS, served
from cases.cases_faults import written
from cases.registry import case
from guest import nvmecli
from guest.fio import MIB, OUTLIVES, Running, fio
from guest.mapped import Mapped
from guest.shell import equal, eventually, run, sha256, true


@case(timeout=240, allow=DISK_ERRORS)
def a_disk_that_stalls_60_s_keeps_the_controller_and_the_data(lab):
    """Keep-alive 5 s: the controller answers keep-alives, a new connect, and commands of other namespaces meanwhile."""
    mapped = Mapped(lab)
    target, controller = served(lab, mapped, keep_alive_tmo=5, reconnect_delay=1, ctrl_loss_tmo=300)
    disk = controller.disk(1)
    job = Running("stall", filename=disk, rw="randwrite", bs="16k", size=48 * MIB, iodepth=8, verify="crc32c", loops=2, **OUTLIVES)
    lab.undo(job.stop)
    lab.undo(mapped.resume)
    eventually("fio writes", lambda: written(disk) > 2 * MIB, 30)
    mapped.stall()
    begun = time.monotonic()
    time.sleep(15)
    equal("state of the controller after three keep-alive periods", controller.state, "live")
    fio("other", filename=controller.disk(2), rw="randwrite", bs="8k", size=2 * MIB, iodepth=4, verify="crc32c")
    # An Abort of a command that is not there: bit 0 of its result says that nothing was aborted.
    said = run("nvme", "admin-passthru", controller.device, "--opcode=8", "--cdw10=0xfff00001", timeout=10)
    true(f"an Abort is answered: {said.stdout}{said.stderr}", "00000001" in said.stdout + said.stderr)
    second = nvmecli.connect_without_tools(target.subsystems[1].nqn, target.address, controller)
    fio("new", filename=second.disk(), rw="randwrite", bs="8k", size=2 * MIB, iodepth=4, verify="crc32c")
    second.delete()
    while time.monotonic() - begun < 60:
        time.sleep(1)
        if lab.is_farside:
            true("the target runs", target.running)
    mapped.resume()
    eventually("the controller is live", controller.live, 60)
    job.wait(120).moved_exactly(write=2 * 48 * MIB, read=2 * 48 * MIB)
    same = sha256(disk, length=64 * MIB, direct=True)
    equal("checksum of the file and of the disk", sha256(mapped.path, length=64 * MIB), same)
