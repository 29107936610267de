"""Two guests on one cable, for what one guest cannot show: a second kernel host, a cable that is pulled, power loss.

`near` holds the target (and can be a host of its own over its rxe device), `far` is a host only. A case of two
guests is a function on the machine that gets a Pair and calls `guest/remote.py` in either guest.
"""

import shutil
import socket
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path

from guest import shell
from guest.shell import Failed, Skip
from machine import dmesg, paths
from machine.guest import Cable, Disk, Guest, patience
from machine.kernels import Kernel
from machine.report import Report
from machine.work import standstill

SCRATCH_SIZE, POWER_SIZE = 4 * 2**30, 2**28
#: disks of the near guest that keep what they acknowledged, and nothing else, when its power goes
POWER_DISKS = 6
NEAR, FAR, SECOND_NEAR = "192.168.78.1", "192.168.78.2", "192.168.78.3"


@dataclass
class Pair:
    kernel: Kernel
    provider: str
    folder: Path
    near: Guest = None
    far: Guest = None
    #: guest -> kernel log lines since the case began
    dmesg: list = field(default_factory=list)
    #: the longest pause of a guest since the case began, in seconds
    stalled: float = 0.0

    @property
    def is_farside(self) -> bool:
        return self.provider != "nvmet"

    def boot(self) -> None:
        """Boots both guests at once. The near one is the connecting end of the cable: only that end finds the other
        again after a reboot, as QEMU's listening end goes on listening."""
        port = _free_port()
        self.near = self._guest("near", [SCRATCH_SIZE, *[POWER_SIZE] * POWER_DISKS], Cable(port, 1))
        self.far = self._guest("far", [SCRATCH_SIZE], Cable(port, 0))
        self.far.begin()
        _wait_for_listener(port)
        self.near.begin()
        for guest in (self.near, self.far):
            guest.wait_ready()
        self.connect()

    def connect(self) -> None:
        """Both ends of the cable as a case finds them."""
        self._up(self.near)
        self._up(self.far)
        self.call(self.far, "reach", 60, address=NEAR)

    @property
    def second_address(self) -> str:
        """Where a second target can listen: the software provider holds an address alone."""
        return SECOND_NEAR if self.provider == "soft" else NEAR

    @property
    def whole(self) -> bool:
        """Neither guest ended, or was booted again."""
        return all(guest is not None and guest.alive and guest.boots == 1 for guest in (self.near, self.far))

    def clear(self) -> list[str]:
        """Brings the guests that are left back to a clean state; returns what could not be, and the target's faults."""
        # The far one first: to disconnect from a target that has gone takes a minute.
        left = [guest for guest in (self.far, self.near) if guest.alive]
        return [fault for guest in left for fault in self.call(guest, "clear", 150)]

    def reboot(self, guest: Guest) -> None:
        """Power comes back: the same disks, a new boot. Only for the near guest, see `boot`."""
        guest.begin()
        guest.wait_ready()
        self._up(guest)
        other, address = (self.far, NEAR) if guest is self.near else (self.near, FAR)
        if other.alive:
            self.call(other, "reach", 60, address=address)

    def _up(self, guest: Guest) -> None:
        near = guest is self.near
        where = {"address": NEAR if near else FAR, "targets": near, "also": SECOND_NEAR}
        self.call(guest, "up", 60, provider=self.provider, **where)

    def call(self, guest: Guest, function: str, limit: float = 60, **arguments):
        """Calls a function of `guest/remote.py` and returns its value; a failure there is a failure here."""
        shell.patience = patience()
        return self.result(guest, guest.send(f"guest.remote:{function}", 2 * limit, **arguments))

    def result(self, guest: Guest, number: int):
        reply = guest.wait(number)
        self.dmesg += reply["dmesg"]
        self.stalled = max(self.stalled, reply["stalled"])
        if reply["status"] == "skipped":
            raise Skip(reply["message"])
        if reply["status"] != "ok":
            raise Failed(f"in guest {guest.name}: {reply['message']}\n{reply.get('trace', '')}")
        return reply["value"]

    def close(self) -> None:
        for guest in (self.near, self.far):
            if guest is not None:
                guest.stop()

    def _guest(self, name: str, sizes: list[int], cable: Cable) -> Guest:
        disks = []
        for number, size in enumerate(sizes):
            path = self.folder / f"{name}{number}.img"
            with open(path, "wb") as disk:
                disk.truncate(size)
            disks.append(Disk(path, power_safe=number > 0))
        return Guest(name, self.kernel, self.folder, cpus=1, memory="2G", disks=disks, cable=cable)


def run_pair_cases(kernel: Kernel, work: list, report: Report, keep: bool) -> None:
    """`work` as in `machine/work.py`. A pair serves one case after the other until a case failed, or took the power of one of
    them."""
    pair = None
    for one in work:
        if pair is None or pair.provider != one.provider:
            _retire(pair, keep)
            pair = _new(kernel, one.provider)
        passed = _run_case(pair, one.case, report, once_more=True)
        if passed is None:
            _retire(pair, keep)
            pair = _new(kernel, one.provider)
            passed = _run_case(pair, one.case, report)
        if not passed or not pair.whole:
            _retire(pair, keep)
            pair = None
    _retire(pair, keep)


def _run_case(pair: Pair, case, report: Report, once_more=False) -> bool | None:
    """Whether it passed; None when it is to run again, in new guests, where that is allowed: one stood still."""
    begun = time.monotonic()
    message, extra, skipped = None, [], None
    pair.dmesg.clear()
    pair.stalled = 0.0
    try:
        pair.connect() if pair.near else pair.boot()
        case.function(pair)
        message = "; ".join(pair.clear()) or None
    except Skip as skip:
        skipped = str(skip)
    except Exception as failure:  # whatever it is, it is this case's
        message, extra = f"{type(failure).__name__}: {failure}", traceback.format_exc().splitlines()
    bad = dmesg.judge(pair.dmesg, case.allow, pair.stalled)
    for guest in filter(None, (pair.near, pair.far)):
        for console in pair.folder.glob(f"{guest.name}-boot*/console.log"):
            bad += dmesg.traces(console.read_text(errors="replace"))
    seconds = time.monotonic() - begun
    where = pair.kernel.series, pair.provider, case.name
    why = standstill((message or "").removeprefix("Failed: "), bad, pair.stalled) if message or bad else None
    if once_more and skipped is None and why:
        pair.close()
        report.again(*where, why, message or "", extra + bad, pair.folder)
        return None
    if skipped is not None:
        report.skip(*where, skipped)
    elif message or bad:
        message = message or f"the kernel's log has {len(bad)} lines that no entry of the allow-list names"
        pair.close()
        report.fail(*where, seconds, message, extra + bad, pair.folder)
    else:
        report.passed(*where, seconds)
    return skipped is None and not message


def _new(kernel: Kernel, provider: str) -> Pair:
    pair = Pair(kernel, provider, paths.RUNS / f"pair-{kernel.series}-{time.time_ns()}")
    pair.folder.mkdir(parents=True)
    return pair


def _retire(pair: Pair | None, keep: bool) -> None:
    if pair is not None:
        pair.close()
        if not keep:
            shutil.rmtree(pair.folder, ignore_errors=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait_for_listener(port: int, seconds: float = 60) -> None:
    """Until QEMU listens on the port. One that connects too early has a dead cable and does not say so; to connect for a
    try would take the cable's one place."""
    deadline = time.monotonic() + seconds
    wanted = f"0100007F:{port:04X}"
    while True:
        sockets = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        if any(one[1] == wanted and one[3] == LISTEN for one in sockets):
            return
        if time.monotonic() > deadline:
            raise Failed(f"the cable's listening end did not come within {seconds:.0f} s (port {port})")
        time.sleep(0.1)


#: TCP's state in /proc/net/tcp
LISTEN = "0A"
