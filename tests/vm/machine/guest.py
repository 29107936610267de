"""One guest: a stock kernel under QEMU's software emulation that runs `guest/agent.py` on the machine's own files.

The machine's root file system is the guest's, copy on write; one shared folder is writable from both sides and
carries requests, replies and logs. A guest is killed by its process group, which is also how power loss is made.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from machine import paths, programs
from machine.kernels import Kernel

BOOT_SECONDS = 180
#: what a reply may take beyond the guest's own limit before the guest counts as stuck
GRACE_SECONDS = 45

#: Everything but the quick string instructions: the emulator takes a step for each byte of them, and the kernel and the C library
#: copy by words or vectors where they are not there (a third off what moves data).
EMULATED = "max,-erms,-fsrm"
#: the machine's files once more, for `guest/root.py`
CACHED_ROOT = (
    "-fsdev local,id=cachedroot,path=/,security_model=none,readonly=on,multidevs=remap "
    "-device virtio-9p-pci,fsdev=cachedroot,mount_tag=cachedroot"
)

_running: set["Guest"] = set()
_lock = threading.Lock()


def patience() -> float:
    """How much longer than on an idle machine things may take now: 1 when the load is our own."""
    return max(1.0, os.getloadavg()[0] / (2 * os.cpu_count()))


class GuestDied(Exception):
    """The guest ended, or did not answer in time; it is gone when this is raised."""


@dataclass
class Disk:
    """A raw virtio disk. `power_safe` keeps the machine's page cache out: what QEMU acknowledged is on the file."""

    path: Path
    power_safe: bool = False

    def options(self, index: int) -> str:
        cache = "none" if self.power_safe else "unsafe"
        drive = f"-drive file={self.path},format=raw,if=none,id=disk{index},cache={cache},discard=unmap"
        return f"{drive} -device virtio-blk-pci,drive=disk{index},serial=disk{index}"


@dataclass
class Cable:
    """One end of an Ethernet cable between two guests: a socket on the loopback interface."""

    port: int
    end: int  # 0 listens, 1 connects

    def options(self) -> str:
        how = "listen" if self.end == 0 else "connect"
        netdev = f"-netdev socket,id=cable,{how}=127.0.0.1:{self.port}"
        return f"{netdev} -device virtio-net-pci,netdev=cable,mac=52:54:00:00:00:0{self.end + 1},host_mtu=4200"


@dataclass(eq=False)
class Guest:
    name: str
    kernel: Kernel
    folder: Path
    cpus: int = 2
    memory: str = "4G"
    disks: list[Disk] = field(default_factory=list)
    cable: Cable | None = None
    append: tuple[str, ...] = ()
    process: subprocess.Popen | None = None
    boots: int = 0
    requests: int = 0
    limits: dict[int, float] = field(default_factory=dict)

    def start(self) -> None:
        """Boots and waits for the agent."""
        self.begin()
        self.wait_ready()

    def begin(self) -> None:
        """Starts to boot; `wait_ready` ends it. Two guests boot at the same time this way."""
        self.boots += 1
        self.requests = 0
        self.shared.mkdir(parents=True)
        agent = [sys.executable, paths.VM / "guest" / "agent.py", self.shared, paths.farside_binary()]
        agent += [f"{name}={path}" for name, path in programs.built.items()]
        # sys.executable may be of a virtual environment; the guest has the same files.
        script = " ".join(shlex.quote(str(part)) for part in agent)
        qemu = [f"-serial file:{self.console}", CACHED_ROOT, *(d.options(i) for i, d in enumerate(self.disks))]
        qemu.append(f"-cpu {EMULATED}")
        if self.cable:
            qemu.append(self.cable.options())
        kernel_options = ["tsc=reliable", "console=ttyS1", "loglevel=5", *self.append]
        command = [
            "vng", "--run", self.kernel.image, "--disable-kvm", "--user", "root", "--cpus", str(self.cpus),
            "--memory", self.memory, f"--rwdir={self.shared}", *(f"--append={o}" for o in kernel_options),
            f"--qemu-opts={' '.join(qemu)}", "--exec", script,
        ]  # fmt: skip
        environment = dict(os.environ, PATH=f"{paths.VENV / 'bin'}:/usr/sbin:/sbin:{os.environ['PATH']}")
        with open(self.shared / "agent.log", "wb") as log:
            self.process = subprocess.Popen(
                [str(part) for part in command], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True, env=environment, cwd=paths.REPO,
            )  # fmt: skip
        with _lock:
            _running.add(self)

    def wait_ready(self) -> None:
        self._wait_for(self.shared / "ready", BOOT_SECONDS * patience(), "boot")

    @property
    def shared(self) -> Path:
        return self.folder / f"{self.name}-boot{self.boots}"

    @property
    def console(self) -> Path:
        return self.shared / "console.log"

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def call(self, function: str, limit: float = 60, **arguments):
        """Runs `module:function` in the guest and returns its reply, a dictionary (see `guest/agent.py`)."""
        return self.wait(self.send(function, limit, **arguments))

    def send(self, function: str, limit: float, **arguments) -> int:
        """Starts a call; `wait` gets its reply. The guest does one call at a time."""
        number, self.requests = self.requests, self.requests + 1
        factor = patience()
        self.limits[number] = limit * factor
        request = {"call": function, "timeout": limit * factor, "patience": factor, "arguments": arguments}
        draft = self.shared / f"{number}.draft"
        draft.write_text(json.dumps(request))
        draft.rename(self.shared / f"{number}.request")
        return number

    def wait(self, number: int) -> dict:
        reply = self.shared / f"{number}.reply"
        self._wait_for(reply, self.limits[number] + GRACE_SECONDS, "reply")
        return json.loads(reply.read_text())

    def stop(self) -> None:
        """Ends the guest in an orderly way, or by force when it does not answer."""
        if self.alive:
            (self.shared / f"{self.requests}.request").write_text(json.dumps({"call": "exit"}))
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                pass
        self.kill()

    def kill(self) -> None:
        """Power loss: every process of the guest ends now."""
        if self.process is not None:
            try:
                os.killpg(self.process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            self.process.wait()
        with _lock:
            _running.discard(self)

    def _wait_for(self, path: Path, seconds: float, what: str) -> None:
        deadline = time.monotonic() + seconds
        while not path.exists():
            if not self.alive:
                if path.exists():
                    return
                self.kill()
                raise GuestDied(f"guest {self.name} ended while a {what} was awaited")
            if time.monotonic() > deadline:
                self.kill()
                raise GuestDied(f"guest {self.name}: no {what} within {seconds:.0f} s")
            time.sleep(0.05)


def kill_all() -> None:
    """Ends every guest of this process; called at exit and on a signal."""
    with _lock:
        guests = list(_running)
    for guest in guests:
        guest.kill()
