"""The kernel host through nvme-cli and sysfs. Nothing here believes an exit status alone: answers are parsed."""

import ctypes
import errno
import fcntl
import json
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

from guest.shell import Failed, equal, eventually, read, run, sh, write

CLASS = Path("/sys/class/nvme")


def nvme(*argv, timeout=60.0) -> str:
    return sh("nvme", *argv, timeout=timeout)


def nvme_json(*argv, timeout=60.0):
    said = nvme(*argv, "-o", "json", timeout=timeout)
    try:
        return json.loads(said)
    except ValueError:
        raise Failed(f"nvme {' '.join(map(str, argv))} printed no JSON: {said[:500]!r}") from None


@dataclass(frozen=True)
class Controller:
    """One controller of the kernel host, `nvme0`."""

    name: str

    @property
    def sysfs(self) -> Path:
        return CLASS / self.name

    @property
    def device(self) -> str:
        return f"/dev/{self.name}"

    @property
    def state(self) -> str:
        return self.attribute("state")

    def attribute(self, name: str) -> str:
        return _seen(self.sysfs / name)

    def live(self) -> bool:
        return self.state == "live"

    def disk(self, nsid: int = 1, timeout=30.0) -> str:
        """The block device of a namespace, once it is there with its size. With multipath the disk belongs to the
        subsystem (nvme0n1) and the path is nvme0c1n1."""
        name = eventually(f"{self.name} has a disk for namespace {nsid}", lambda: self._disk_name(nsid), timeout)
        device = f"/dev/{name}"
        eventually(f"{device} can be opened", lambda: _opens(device), timeout)
        return device

    def _disk_name(self, nsid: int) -> str | None:
        subsystem = next((p for p in (self.sysfs).glob("subsystem")), None)
        for folder in filter(None, (subsystem_of(self.name), self.sysfs, subsystem)):
            for disk in sorted(Path(folder).glob("nvme*n*")):
                name = disk.name
                if "c" not in name.removeprefix("nvme") and _seen(disk / "nsid") == str(nsid):
                    if int(_seen(disk / "size") or 0) > 0:
                        return name
        return None

    def path(self, nsid: int = 1) -> Path | None:
        """sysfs of a namespace's path through this controller, where multipath is on."""
        found = (path for path in self.sysfs.glob("nvme*c*n*") if _seen(path / "nsid") == str(nsid))
        return next(found, None)

    def ana_state(self, nsid: int = 1) -> str:
        path = self.path(nsid)
        return read(path / "ana_state") if path else ""

    def path_ios(self, nsid: int = 1) -> int:
        """Reads and writes that went by this path."""
        path = self.path(nsid)
        fields = read(path / "stat").split() if path else [0] * 5
        return int(fields[0]) + int(fields[4])

    def generic(self, nsid: int = 1) -> str:
        """The character device of a namespace, /dev/ng0n1."""
        return self.disk(nsid).replace("/dev/nvme", "/dev/ng")

    def reset(self, timeout=10.0) -> float:
        """Resets the controller and waits until it is live again; returns the seconds."""
        begun = time.monotonic()
        nvme("reset", self.device, timeout=timeout)
        eventually(f"{self.name} is live after a reset", self.live, timeout)
        return time.monotonic() - begun

    def begin_reset(self) -> None:
        """Resets the controller when there may be nobody to connect to again: that is an error of the write, not ours."""
        attribute = os.open(self.sysfs / "reset_controller", os.O_WRONLY)
        try:
            os.write(attribute, b"1")
        except OSError as error:
            if error.errno != errno.ENETRESET:
                raise Failed(f"reset of {self.name}: {error.strerror}") from None
        finally:
            os.close(attribute)

    def disconnect(self, timeout=60.0) -> None:
        said = nvme("disconnect", "-d", self.name, timeout=timeout)
        eventually(f"{self.name} is gone", lambda: not self.sysfs.exists(), timeout)
        if "disconnected" not in said.lower() and said.strip():
            raise Failed(f"nvme disconnect said {said!r}")

    def delete(self, timeout=60.0) -> None:
        """Disconnects without the tools (see `connect_without_tools`)."""
        write(self.sysfs / "delete_controller", 1)
        eventually(f"{self.name} is gone", lambda: not self.sysfs.exists(), timeout)


def _seen(attribute: Path) -> str:
    """A sysfs attribute of something that comes and goes: nothing while it is not there. The kernel shows a folder before
    all its attributes."""
    try:
        return read(attribute)
    except OSError:
        return ""


def subsystem_of(controller: str) -> Path | None:
    for folder in Path("/sys/class/nvme-subsystem").glob("nvme-subsys*"):
        if (folder / controller).exists():
            return folder
    return None


def controllers(nqn: str | None = None) -> list[Controller]:
    found = []
    for entry in sorted(CLASS.glob("nvme*"), key=lambda p: int(p.name.removeprefix("nvme"))):
        controller = Controller(entry.name)
        if nqn in (None, controller.attribute("subsysnqn")):
            found.append(controller)
    return found


def connect(nqn: str, address: str, port: int = 4420, io_queues=2, timeout=30.0, **options) -> Controller:
    """`nvme connect`; the new controller is found by what appeared in sysfs, is live and has the queues asked for."""
    argv = connect_arguments(nqn, address, port, io_queues, **options)
    before = set(controllers())
    nvme("connect", *argv, timeout=timeout)
    new = [c for c in controllers() if c not in before]
    equal("new controllers after one connect", len(new), 1)
    (controller,) = new
    equal("subsystem NQN in sysfs", controller.attribute("subsysnqn"), nqn)
    equal("transport in sysfs", controller.attribute("transport"), "rdma")
    eventually(f"{controller.name} is live", controller.live, timeout)
    return controller


def connect_without_tools(nqn: str, address: str, like: Controller, port: int = 4420, io_queues=2) -> Controller:
    """Connects as the host that another controller belongs to. nvme-cli opens every disk of the host before it connects,
    and waits for those that udev holds while they stall."""
    who = (like.attribute("hostnqn"), like.attribute("hostid"))
    return connect_as(*who, nqn, address, port, nr_io_queues=io_queues)


def connect_as(hostnqn: str, hostid: str, nqn: str, address: str, port: int = 4420, **words) -> Controller:
    """Connects as any host, also as a second one, which nvme-cli would not."""
    words = {
        "nqn": nqn, "transport": "rdma", "traddr": address, "trsvcid": port, "hostnqn": hostnqn, "hostid": hostid,
    } | words  # fmt: skip
    try:
        with open("/dev/nvme-fabrics", "r+b", buffering=0) as fabrics:
            fabrics.write(",".join(f"{key}={value}" for key, value in words.items()).encode())
            answer = fabrics.read(200).decode()
    except OSError as error:
        raise Failed(f"connect to {nqn} by /dev/nvme-fabrics: {error.strerror}") from None
    return Controller("nvme" + answer.split("instance=")[1].split(",")[0].strip())


def connect_arguments(nqn: str, address: str, port: int, io_queues, **options) -> list:
    argv = ["-t", "rdma", "-a", address, "-s", port, "-n", nqn, "-i", io_queues]
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        argv += [flag] if value is True else [f"{flag}={value}"]
    return argv


def connect_is_refused(nqn: str, address: str, port: int = 4420, timeout=30.0, **options) -> str:
    """A connect that must fail and leave no controller behind; returns what nvme-cli said."""
    before = set(controllers())
    done = run("nvme", "connect", *connect_arguments(nqn, address, port, 2, **options), check=False, timeout=timeout)
    if done.returncode == 0:
        raise Failed(f"connect to {nqn} was not refused: {done.stdout}")
    eventually("no controller is left after a refused connect", lambda: set(controllers()) <= before, 10)
    return (done.stderr + done.stdout).strip()


def disconnect_all(timeout=150.0) -> None:
    """Without the tools: they open each disk first, and an open waits while the kernel reads partitions. With the target gone
    that is until it is back, or until what the tools were asked for is done (seen on 6.12)."""
    if controllers():
        each = f"for one in {CLASS}/*/delete_controller; do (echo 1 > $one) & done; wait"
        run("sh", "-c", each, check=False, timeout=timeout)
        eventually("all controllers are gone", lambda: not controllers(), timeout)


def discover(address: str, port: int = 4420, timeout=30.0) -> list[dict]:
    """The discovery log page's records."""
    page = nvme_json("discover", "-t", "rdma", "-a", address, "-s", port, timeout=timeout)
    records = page["records"]
    equal("records in the discovery page", len(records), page.get("numrec", len(records)))
    return records


def admin_command(device: str, opcode: int, nsid=0, cdw10=0, cdw11=0, length=0) -> tuple[int, int, bytes]:
    """What the tools do with an admin command, a hundred times quicker: (status, Dword 0, data). The status as nvme-cli prints
    it, 0 for success."""
    data = ctypes.create_string_buffer(max(length, 1))
    address = ctypes.addressof(data) if length else 0
    # struct nvme_passthru_cmd of linux/nvme_ioctl.h; the last two are the time-out and the result.
    command = bytearray(PASSTHROUGH.pack(opcode, 0, 0, nsid, 0, 0, 0, address, 0, length, cdw10, cdw11, 0, 0, 0, 0, 0, 0))
    node = os.open(device, os.O_RDONLY)
    try:
        status = fcntl.ioctl(node, NVME_IOCTL_ADMIN_CMD, command, True)
    except OSError as error:
        raise Failed(f"admin command {opcode:#x} on {device}: {error.strerror}") from None
    finally:
        os.close(node)
    return status, PASSTHROUGH.unpack(command)[-1], data.raw[:length]


PASSTHROUGH = struct.Struct("<BBHIIIQQIIIIIIIIII")
NVME_IOCTL_ADMIN_CMD = 3 << 30 | PASSTHROUGH.size << 16 | ord("N") << 8 | 0x41


def _opens(device: str) -> bool:
    try:
        with open(device, "rb"):
            return True
    except OSError:
        return False
