"""The target under test, one interface for three kinds.

    nvmet   the kernel's own target, set up by configfs: the reference that proves the cases themselves
    verbs   farside on rdma_rxe, in the first name space
    soft    farside with its own RoCEv2 stack, in the name space `far` at the other end of the veth pair
"""

import errno
import os
import re
import signal
import subprocess
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from uuid import NAMESPACE_DNS, uuid5

from guest import network, nvmet, shell
from guest.shell import Failed, equal, eventually

NQN = "nqn.2026-11.io.example:"
#: the environment of a farside whose log ends with what the software provider counted
LOGGED = os.environ | {"FARSIDE_LOG": "info,farside::rdma::soft=debug"}
KINDS = ("verbs", "soft", "nvmet")


@dataclass
class Namespace:
    """kind: file, device, memory or null. `path` is what file and device need, `size` in bytes what the others need."""

    nsid: int = 1
    kind: str = "file"
    path: Path | None = None
    size: int = 256 * 2**20
    block_size: int = 512
    uuid: str | None = None
    #: zones of memory: further keys of the configuration
    zones: dict = field(default_factory=dict)

    def backing_file(self) -> Path:
        return Path(self.path)


@dataclass
class Subsystem:
    nqn: str
    namespaces: list[Namespace]
    hosts: list[str] = field(default_factory=list)
    serial: str | None = None


@dataclass
class Options:
    """Keys of the configuration's `options` table, as they are written there."""

    values: dict = field(default_factory=dict)

    def toml(self) -> str:
        lines = [f"{key} = {toml_value(value)}\n" for key, value in self.values.items()]
        return "[options]\n" + "".join(lines) if lines else ""


class NvmetTarget:
    """The kernel's target. There is no process: `kill` takes ports and subsystems away from under the host."""

    def __init__(self, subsystems, addresses, port=4420, queue_size: int | None = None):
        self.subsystems, self.addresses, self.port = subsystems, addresses, port
        #: most entries of a queue, if not the kernel's own choice
        self.queue_size = queue_size
        self.address = addresses[0]
        self.running = False
        for subsystem in subsystems:  # it would draw new ones at each start
            subsystem.serial = subsystem.serial or uuid5(NAMESPACE_DNS, subsystem.nqn).hex[:20]
            for namespace in subsystem.namespaces:
                name = f"{subsystem.nqn}/{namespace.nsid}"
                namespace.uuid = namespace.uuid or str(uuid5(NAMESPACE_DNS, name))

    def start(self) -> None:
        self.running = True
        nvmet.start(self.subsystems, self.addresses, self.port, self.queue_size)

    def stop(self, timeout=10.0) -> None:
        if self.running:
            self.running = False
            nvmet.stop()

    def kill(self) -> None:
        self.stop()

    def terminate(self, timeout=10.0) -> float:
        begun = time.monotonic()
        self.stop()
        return time.monotonic() - begun

    def faults(self) -> list[str]:
        return []


class FarsideTarget:
    """farside as a process: `provider` is verbs or soft."""

    def __init__(self, binary: Path, provider: str, subsystems, addresses, port=4420, options=None, folder=Path("/run")):
        self.binary, self.provider, self.port = binary, provider, port
        self.subsystems, self.addresses = subsystems, addresses
        self.address = addresses[0]
        self.options = replace(options or Options())
        self.options.values = {"provider": provider} | self.options.values
        self.folder = folder
        #: network name space of the process, if not the first one
        self.netns = network.NETNS if provider == "soft" else None
        #: further arguments of `farside serve`
        self.arguments: list[str] = []
        self.process: subprocess.Popen | None = None
        self.logs: list[Path] = []

    def config(self) -> str:
        parts = [self.options.toml()]
        for subsystem in self.subsystems:
            parts.append(subsystem_toml(subsystem))
        for address in self.addresses:
            parts.append(f'[[listener]]\naddress = "{endpoint(address, self.port)}"\n')
        return "\n".join(parts)

    def start(self, timeout=30.0) -> None:
        config = self.folder / f"target-{len(self.logs)}.toml"
        config.write_text(self.config())
        self.launch("serve", "--config", config, *self.arguments)
        self.wait_serving(timeout)

    def launch(self, *argv, user: int | None = None) -> None:
        """Starts the program with any arguments, and does not wait."""
        log = self.folder / f"target-{len(self.logs)}-{time.monotonic_ns()}.log"
        self.logs.append(log)
        command = [str(self.binary), *map(str, argv)]
        if self.netns:
            command = ["ip", "netns", "exec", self.netns, *command]
        with open(log, "wb") as output:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, user=user, env=LOGGED
            )

    def wait_serving(self, timeout=30.0) -> str:
        """Waits for the line that a person would copy, and returns it."""

        def line():
            found = re.search(r"^.*nvme connect.*$", self.log(), re.MULTILINE)
            if not found and self.process.poll() is not None:
                raise Failed(f"farside ended with status {self.process.returncode} at start: {self.log()[-1500:]}")
            return found and found[0]

        try:
            return eventually("farside prints its nvme connect line", line, timeout)
        except Failed as failure:
            raise Failed(f"{failure}; it said: {self.log()[-1500:]}") from None

    def log(self) -> str:
        while self.logs:
            try:
                return self.logs[-1].read_text(errors="replace")
            except OSError as error:
                # Kernel 7, now and then, of a file on the machine's folder that grows meanwhile.
                if error.errno != errno.ENODATA:
                    raise
                time.sleep(0.05)
        return ""

    def figures(self) -> "Figures":
        """What the target says of itself when it is asked by SIGUSR1."""
        said = len(self.log())
        self.signal(signal.SIGUSR1)
        count = sum(len(subsystem.namespaces) for subsystem in self.subsystems)
        return eventually("the target prints its figures", lambda: Figures.read(self.log()[said:], count))

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and the process is gone."""
        self.process.kill()
        self.process.wait(10)

    def terminate(self, timeout=10.0) -> float:
        """SIGTERM, must end with status 0; returns the seconds it took."""
        begun = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        try:
            status = self.process.wait(timeout * shell.patience)
        except subprocess.TimeoutExpired:
            self.kill()
            raise Failed(f"farside did not end within {timeout:.0f} s of SIGTERM: {self.log()[-1500:]}") from None
        equal("exit status after SIGTERM", status, 0)
        return time.monotonic() - begun

    def stop(self, timeout=10.0) -> None:
        if self.running:
            self.terminate(timeout)

    def counters(self) -> dict[str, int]:
        """What the software provider counted, once the target has ended."""
        return counters(self.log())

    def faults(self) -> list[str]:
        """What must never be in a log, whatever the case."""
        found = []
        for log in self.logs:
            for line in log.read_text(errors="replace").splitlines():
                if "panicked at" in line or "AddressSanitizer" in line or "assertion failed" in line:
                    found.append(f"{log.name}: {line.strip()}")
        return found


@dataclass
class Figures:
    """The lines that SIGUSR1 and the end of the target print."""

    controllers: int
    queues: int
    under_way: int
    accepted: int
    rejected: int
    #: (NQN, NSID) -> (reads, bytes read, writes, bytes written, errors)
    traffic: dict

    @classmethod
    def read(cls, text: str, namespaces: int) -> "Figures | None":
        """None until all of it is there."""
        held = re.search(
            r"^connected +(\d+) controllers, (\d+) queues, (\d+) commands under way; connections: (\d+) accepted, (\d+) rejected$",
            text, re.MULTILINE,
        )  # fmt: skip
        rows = re.findall(
            r"^traffic +(\S+) namespace (\d+): (\d+) reads of (\d+) bytes, (\d+) writes of (\d+) bytes, (\d+) errors$",
            text, re.MULTILINE,
        )  # fmt: skip
        if not held or len(rows) < namespaces:
            return None
        traffic = {(nqn, int(nsid)): tuple(map(int, counts)) for nqn, nsid, *counts in rows}
        return cls(*map(int, held.groups()), traffic)

    def written(self, nqn: str, nsid=1) -> int:
        return self.traffic[nqn, nsid][3]

    def bytes_read(self, nqn: str, nsid=1) -> int:
        return self.traffic[nqn, nsid][1]


def counters(log: str) -> dict[str, int]:
    """The sums over all "closed" lines of a log that was made with LOGGED."""
    total: dict[str, int] = {}
    lines = [line for line in log.splitlines() if " closed " in line and "counters=" in line]
    if not lines:
        raise Failed(f"the log has no counters: {log[-600:]}")
    for line in lines:
        for name, value in re.findall(r"(\w+): (\d+)", line[line.index("counters=") :]):
            total[name] = total.get(name, 0) + int(value)
    return total


def subsystem_toml(subsystem: Subsystem) -> str:
    lines = ["[[subsystem]]", f'nqn = "{subsystem.nqn}"']
    if subsystem.serial:
        lines.append(f'serial = "{subsystem.serial}"')
    if subsystem.hosts:
        lines += ["allow_any_host = false", f"hosts = {toml_value(subsystem.hosts)}"]
    for namespace in subsystem.namespaces:
        lines += ["[[subsystem.namespace]]", f"nsid = {namespace.nsid}"]
        if namespace.kind in ("file", "device"):
            lines.append(f'{namespace.kind} = "{namespace.path}"')
        else:
            lines.append(f'{namespace.kind} = "{namespace.size}"')
        if namespace.kind == "file":
            lines.append(f'size = "{namespace.size}"')
        lines.append(f"block_size = {namespace.block_size}")
        lines += [f"{key} = {toml_value(value)}" for key, value in namespace.zones.items()]
        if namespace.uuid:
            lines.append(f'uuid = "{namespace.uuid}"')
    return "\n".join(lines) + "\n"


def toml_value(value) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return "[" + ", ".join(toml_value(v) for v in value) + "]"
    return f'"{value}"' if isinstance(value, str) else str(value)


def endpoint(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
