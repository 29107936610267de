"""Zoned disks of the kernel's own, in memory, and what block layers say of zones."""

import re
import struct
import subprocess
import zlib
from dataclasses import dataclass
from pathlib import Path

from guest import nvmet
from guest.shell import Failed, eventually, read, sh, write

MIB = 2**20
SECTOR = 512


@dataclass(frozen=True)
class Zone:
    """A zone as `blkzone report` prints it, in sectors."""

    start: int
    length: int
    capacity: int
    #: from the start of the zone; of no meaning in a full one
    written: int
    condition: str

    @property
    def kept(self):
        """What has to be the same on both sides."""
        return (self.start, self.length, self.capacity, None if self.condition == "fu" else self.written, self.condition)


def report(disk, count: int | None = None) -> list[Zone]:
    """All zones, or the first ones."""
    said = sh("blkzone", "report", *(["--count", count] if count else []), disk)
    number = r"0x([0-9a-f]+)"
    rows = re.findall(
        rf"start: {number}, len {number}, cap {number}, wptr {number} reset:\d non-seq:\d, zcond:\s*\d+\((\w\w)\)", said
    )
    if not rows:
        raise Failed(f"blkzone reports no zones of {disk}: {said[:400]!r}")
    return [Zone(*(int(field, 16) for field in fields), condition) for *fields, condition in rows]


def zone(disk, number: int) -> Zone:
    return report(disk)[number]


def queue(disk: str) -> Path:
    return Path(f"/sys/block/{disk.rpartition('/')[2]}/queue")


def limits(disk: str) -> dict[str, int]:
    """What the queue limits of a disk say of its zones."""
    names = ("chunk_sectors", "nr_zones", "max_open_zones", "max_active_zones")
    return {name: int(read(queue(disk) / name)) for name in names}


def null_disk(lab, name="farzones", **attributes) -> str:
    """A zoned disk in memory: 128 zones of 4 MiB, 3 MiB of which can be written; it goes when the case ends."""
    nvmet.modprobe_null()
    folder = nvmet.NULL / name
    folder.mkdir()
    wanted = {
        "size": 512, "blocksize": 4096, "memory_backed": 1, "zoned": 1, "zone_size": 4, "zone_capacity": 3,
        "zone_max_open": 8, "zone_max_active": 12,
    }  # fmt: skip
    for key, value in (wanted | attributes).items():
        write(folder / key, value)
    write(folder / "power", 1)

    def remove():
        write(folder / "power", 0)
        folder.rmdir()

    lab.undo(remove)
    path = nvmet.null_path(folder)
    eventually(f"{path} is there", Path(path).exists)
    return path


def content(path, offset: int, size: int) -> bytes:
    """Bytes of a disk or file, past the page cache."""
    dd = ["dd", f"if={path}", f"bs={size}", "count=1", f"skip={offset}", "iflag=direct,skip_bytes,fullblock", "status=none"]
    return subprocess.run(dd, capture_output=True, check=True, timeout=60).stdout


def make_zonefs(disk: str) -> None:
    """An empty zonefs, as its tool writes it: all zones reset, the super block in the first one, which is full then."""
    sh("blkzone", "reset", disk)
    fields = struct.pack("<64s16sQIII", b"farside", bytes(range(16)), 0, 0, 0, 0o640)
    block = bytearray((struct.pack("<II", 0x5A4F4653, 0) + fields).ljust(4096, b"\0"))
    struct.pack_into("<I", block, 4, ~zlib.crc32(bytes(block)) & 0xFFFFFFFF)
    image = Path("/run/zonefs-super")
    image.write_bytes(block)
    sh("dd", f"if={image}", f"of={disk}", "bs=4096", "count=1", "oflag=direct", "conv=notrunc", "status=none")
    sh("blkzone", "finish", "--offset", 0, "--count", 1, disk)
