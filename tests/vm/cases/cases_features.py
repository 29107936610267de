"""What a host can ask of a namespace beside reading and writing: Verify, Copy, write protection."""

from cases.registry import FARSIDE, case
from guest.fio import MIB
from guest.nvmecli import nvme
from guest.shell import equal, eventually, read, run, sh, true
from guest.target import NQN, Subsystem


def fill(disk: str, block: int, byte: int, count=1) -> None:
    with open(disk, "r+b", buffering=0) as device:
        device.seek(block * 4096)
        device.write(bytes([byte]) * 4096 * count)
    sh("blockdev", "--flushbufs", disk)


def content(disk: str, block: int) -> int:
    """The byte that fills a block; read past the page cache."""
    done = run("dd", f"if={disk}", "bs=4096", "count=1", f"skip={block}", "iflag=direct", "status=none", check=False)
    found = set(done.stdout.encode("latin-1", "replace"))
    equal(f"different bytes in block {block}", len(found), 1)
    return found.pop()


@case(providers=FARSIDE)
def verify_copy_and_write_protection_by_the_tools(lab):
    subsystem = Subsystem(NQN + "disk1", [lab.namespace(size=64 * MIB, block_size=4096)])
    target = lab.serve(subsystem, state_dir="/run/scratch/state")
    controller = lab.connect(target)
    disk = controller.disk()
    fill(disk, 0, 0x41)
    fill(disk, 9, 0x42)
    nvme("verify", disk, "-s", 0, "-c", 9)
    nvme("copy", disk, "-d", 100, "-s", "9,0", "-b", "0,0")
    equal("copied blocks", (content(disk, 100), content(disk, 101)), (0x42, 0x41))
    over = run("nvme", "copy", disk, "-d", 100, "-s", "100", "-b", "0", check=False)
    true(f"a copy onto itself is refused ({over.stdout}{over.stderr})", over.returncode != 0)
    name = disk.rpartition("/")[2]
    nvme("set-feature", controller.device, "-n", 1, "-f", "0x84", "-v", 1)
    eventually("the kernel takes the disk as read-only", lambda: read(f"/sys/block/{name}/ro") == "1")
    said = run("dd", "if=/dev/zero", f"of={disk}", "bs=4096", "count=1", "oflag=direct", check=False)
    true(f"a write is refused ({said.stderr})", said.returncode != 0)
    nvme("set-feature", controller.device, "-n", 1, "-f", "0x84", "-v", 0)
    eventually("the disk can be written again", lambda: read(f"/sys/block/{name}/ro") == "0")
    fill(disk, 1, 0x43)
    equal("block 1", content(disk, 1), 0x43)
