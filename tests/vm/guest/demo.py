"""The steps of `make demo` in the guest; each returns what a person at a terminal would have seen."""

import sys
from pathlib import Path

from guest import nvmecli
from guest.fio import MIB, fio
from guest.nvmecli import nvme
from guest.shell import equal, sh, sha256
from guest.target import NQN, Subsystem

SIZE = 256 * MIB
MOUNT = Path("/run/mnt")


class Demo:
    """What one step leaves to the next."""

    target = controller = disk = namespace = None


def _lab():
    return sys.modules["__main__"].lab()


def serve(provider: str) -> str:
    lab = _lab()
    lab.fresh("demo", provider)
    Demo.namespace = lab.namespace(size=SIZE, block_size=4096)
    Demo.target = lab.serve(Subsystem(NQN + "demo", [Demo.namespace]))
    return Demo.target.log() if lab.is_farside else "the kernel's own target serves a file"


def discover() -> str:
    return nvme("discover", "-t", "rdma", "-a", Demo.target.address, "-s", "4420")


def connect() -> str:
    Demo.controller = nvmecli.connect(NQN + "demo", Demo.target.address)
    Demo.disk = Demo.controller.disk()
    return nvme("list")


def make_file_system() -> str:
    sh("mkfs.ext4", "-q", "-F", Demo.disk)
    MOUNT.mkdir(exist_ok=True)
    sh("mount", Demo.disk, MOUNT)
    sh("sh", "-c", f"cp -r /usr/include/linux {MOUNT}/tree && sync -f {MOUNT}")
    return sh("df", "-h", "--output=source,fstype,size,used,target", MOUNT)


def run_fio() -> str:
    done = fio("demo", filename=MOUNT / "data", rw="randrw", bs="8k", size=32 * MIB, iodepth=32, verify="crc32c")
    written, read = done.bytes("write"), done.bytes("read")
    return f"fio wrote {written >> 20} MiB and read {read >> 20} MiB; every block had the checksum it was written with"


def disconnect() -> str:
    sh("umount", MOUNT)
    host_side = sha256(Demo.disk, length=SIZE, direct=True)
    Demo.controller.disconnect()
    equal("checksum of the served file", sha256(Demo.namespace.path), host_side)
    Demo.target.stop()
    _lab().clear()
    return f"sha256 of the disk as the host read it, and of the file that was served: {host_side}"
