"""Disks that a case can break: made with the device mapper, so that a target meets stalls and errors."""

from pathlib import Path

from guest.fio import MIB
from guest.shell import eventually, modprobe, run, sh

SECTOR = 512


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
        return f"0 {self.size // SECTOR} linear {self.loop} 0"

    def load(self, table: str) -> None:
        sh("dmsetup", "suspend", "--nolockfs", self.name)
        sh("dmsetup", "load", self.name, "--table", table)
        sh("dmsetup", "resume", self.name)

    def stall(self) -> None:
        """Commands are held until `resume`."""
        stall(self.name)

    def resume(self) -> None:
        sh("dmsetup", "resume", self.name)

    def remove(self) -> None:
        run("dmsetup", "resume", self.name, check=False)
        sh("dmsetup", "remove", "--retry", self.name)


def stall(name: str) -> None:
    sh("dmsetup", "suspend", "--nolockfs", "--noflush", name)


class Stallable:
    """A disk in memory that can be stalled, for a guest that has no lab of its own."""

    def __init__(self, size: int):
        modprobe("dm_mod")
        sh("modprobe", "brd", "rd_nr=1", f"rd_size={size // 2**10}")
        sh("dmsetup", "create", "farstall", "--table", f"0 {size // SECTOR} linear /dev/ram0 0")
        self.device = Path("/dev/mapper/farstall")
        eventually(f"{self.device} is there", self.device.exists)

    def stall(self) -> None:
        stall("farstall")

    def resume(self) -> None:
        sh("dmsetup", "resume", "farstall")

    def remove(self) -> None:
        self.resume()
        sh("dmsetup", "remove", "--retry", "farstall")  # udev may look at it: the target has just closed it
        eventually("brd is gone", lambda: run("modprobe", "-r", "brd", check=False).returncode == 0)

    def written(self) -> int:
        """Bytes that it was given."""
        return int(Path(f"/sys/block/{self.device.resolve().name}/stat").read_text().split()[6]) * SECTOR
