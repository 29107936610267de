"""What a case gets: a network that is up, a scratch file system, targets, and a clean state before and after.

One lab lives as long as the guest; `fresh` and `clear` stand at both ends of each case.
"""

import shutil
import time
from pathlib import Path

from guest import network, nvmecli
from guest.host import HostRun
from guest.shell import Skip, eventually, modprobe, read, run, sh
from guest.target import NQN, FarsideTarget, Namespace, NvmetTarget, Options, Subsystem

SCRATCH = Path("/run/scratch")


class Lab:
    def __init__(self, shared: Path, binary: Path, programs: dict):
        self.shared, self.binary, self._programs = shared, binary, programs
        self.provider, self.network = "verbs", "ipv4"
        self.case_folder = shared
        self.targets = []
        self._undo = []
        self._files = 0
        self.ready = False

    # What a case asks for.

    @property
    def is_farside(self) -> bool:
        return self.provider != "nvmet"

    @property
    def netns(self) -> str | None:
        """The network name space of this provider's target, if it is not the guest's own."""
        return network.NETNS if self.provider == "soft" else None

    @property
    def address(self) -> str:
        """Where the target of this provider listens."""
        if self.network == "ipv6":
            return self.address_v6
        return network.FAR_V4 if self.provider == "soft" else network.HOST_V4

    def second_address(self) -> str:
        """Where a second target can listen: the software provider holds an address alone."""
        if self.provider != "soft":
            return self.address
        sh("ip", "addr", "replace", f"{network.SECOND_FAR_V4}/24", "dev", "veth1", netns=network.NETNS)
        return network.SECOND_FAR_V4

    @property
    def family(self) -> str:
        """Address family, as discovery says it."""
        return "ipv6" if ":" in self.address else "ipv4"

    @property
    def address_v6(self) -> str:
        return network.FAR_V6 if self.provider == "soft" else network.HOST_V6

    def skip(self, what: str) -> None:
        raise Skip(what)

    def program(self, name: str) -> Path:
        """A program that the case's declaration names."""
        if name not in self._programs:
            raise Skip(f"{name} was not built")
        return Path(self._programs[name])

    def file(self, size=256 * 2**20, name=None) -> Path:
        """A sparse backing file on the scratch disk."""
        self._files += 1
        path = SCRATCH / (name or f"disk{self._files}.img")
        with open(path, "wb") as backing:
            backing.truncate(size)
        return path

    def namespace(self, nsid=1, size=256 * 2**20, block_size=512, **rest) -> Namespace:
        """A namespace on a new sparse file."""
        return Namespace(nsid, "file", self.file(size), size, block_size, **rest)

    def serve(self, *subsystems, addresses=None, port=4420, start=True, **options):
        """Starts a target. Without subsystems: one, with one namespace on a file of 256 MiB."""
        subsystems = list(subsystems) or [Subsystem(NQN + "disk1", [self.namespace()])]
        addresses = addresses or [self.address]
        if self.provider == "nvmet":
            target = NvmetTarget(subsystems, addresses, port)
        else:
            if not self.binary.exists():
                raise Skip(f"farside is not built: {self.binary} is missing")
            target = FarsideTarget(
                self.binary, self.provider, subsystems, addresses, port, Options(options), self.case_folder
            )
        self.targets.append(target)
        if start:
            target.start()
        return target

    def connect(self, target, subsystem=0, io_queues=2, **options) -> nvmecli.Controller:
        nqn = target.subsystems[subsystem].nqn
        return nvmecli.connect(nqn, target.address, target.port, io_queues, **options)

    def host(self, command: str, address: str, *argv, netns=None) -> HostRun:
        """Starts farside as a host: `discover`, `identify` or `bench`."""
        run = HostRun(self.binary, self.case_folder, self.provider, netns or self.netns, command, address, *argv)
        self.undo(run.stop)
        return run

    def undo(self, function, *argv, **named) -> None:
        """Calls a function when the case ends, whatever its end; last first."""
        self._undo.append(lambda: function(*argv, **named))

    # Around each case.

    def fresh(self, name: str, provider: str, net: str = "ipv4") -> None:
        if not self.ready:
            network.up()
            _mount_scratch()
            self.ready = True
        network.set_mtu(1500 if net == "mtu1500" else network.MTU)
        self.provider, self.network = provider, net
        self.case_folder = self.shared / f"{name}-{time.monotonic_ns()}"
        self.case_folder.mkdir()
        self.targets, self._undo = [], []

    def clear(self) -> list[str]:
        """Brings the guest back to a clean state; what could not be cleaned is a fault of the case."""
        faults = []

        def attempt(function, *argv):
            try:
                function(*argv)
            except Exception as error:  # each step must run whatever the others did
                faults.append(f"cleaning up: {error}")

        for function in reversed(self._undo):
            attempt(function)
        attempt(nvmecli.disconnect_all)
        for target in self.targets:
            attempt(target.stop)
            faults += target.faults()
        for entry in SCRATCH.glob("*"):
            if entry.name != "lost+found":
                attempt(shutil.rmtree if entry.is_dir() else Path.unlink, entry)
        self._files = 0
        return faults


def _mount_scratch() -> None:
    """The scratch disk: ext4 on a virtio disk, so that O_DIRECT, holes and discard are real."""
    modprobe("virtio_blk", "ext4")
    SCRATCH.mkdir(exist_ok=True)
    if SCRATCH.is_mount():
        return
    disk = eventually("the scratch disk is there", lambda: next(iter(find_disk("disk0")), None))
    sh("mkfs.ext4", "-q", "-F", "-E", "nodiscard,lazy_itable_init=1,lazy_journal_init=1", disk)
    sh("mount", "-o", "discard", disk, SCRATCH)


def find_disk(serial: str) -> list[str]:
    """Virtio disks by the serial that the machine gave them."""
    found = []
    for entry in Path("/sys/block").glob("vd*"):
        try:
            if read(entry / "serial") == serial:
                found.append(f"/dev/{entry.name}")
        except OSError:
            pass
    return found


def evidence() -> str:
    """The state of the guest, for the log of a failure."""
    parts = []
    for command in (["ps", "axww", "-o", "pid,stat,wchan:24,args"], ["rdma", "resource"], ["rdma", "link"], ["ip", "addr"]):
        done = run(*command, check=False)
        lines = [line for line in done.stdout.splitlines() if " [" not in line or " D" in line]
        parts.append(f"$ {' '.join(command)}\n" + "\n".join(lines))
    for controller in nvmecli.controllers():
        parts.append(f"{controller.name}: {controller.state} {controller.attribute('address')}")
    return "\n\n".join(parts)
