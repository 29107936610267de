"""Runs a list of cases in one guest, and boots another when it died, so that one case cannot take the rest along."""

import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path

from machine import dmesg, paths
from machine.guest import Disk, Guest, GuestDied
from machine.kernels import Kernel
from machine.report import Report
from machine.work import Work, standstill

SCRATCH_SIZE = 8 * 2**30


@dataclass
class Session:
    """Cases of one kernel and one set of kernel options; providers may differ."""

    kernel: Kernel
    work: list[Work]
    report: Report
    append: tuple[str, ...] = ()
    keep: bool = False
    boots: int = field(default=0)
    #: what was put back, once: the machine under the guest, or the emulator, was at fault
    again: set = field(default_factory=set)

    def run(self) -> None:
        left = list(self.work)
        while left:
            guest = self._boot(left[0])
            if guest is None:
                left.pop(0)
                continue
            try:
                while left:
                    work = left.pop(0)
                    whole, once_more = self._run_case(guest, work)
                    if once_more:
                        left.insert(0, work)
                    if not whole:
                        break
            finally:
                self._leave(guest)

    def _leave(self, guest: Guest) -> None:
        guest.stop()
        if not self.keep:
            shutil.rmtree(guest.folder, ignore_errors=True)

    def _boot(self, first: Work) -> Guest | None:
        """One that does not come up is tried once more: the emulator may end before the kernel says a word."""
        return self._try_to_boot(first, last=False) or self._try_to_boot(first, last=True)

    def _try_to_boot(self, first: Work, last: bool) -> Guest | None:
        """That the last one fails is the failure of the case that would be the first."""
        self.boots += 1
        folder = paths.RUNS / f"{self.kernel.series}-{time.time_ns()}"
        folder.mkdir(parents=True)
        scratch = folder / "scratch.img"
        with open(scratch, "wb") as disk:
            disk.truncate(SCRATCH_SIZE)
        guest = Guest("solo", self.kernel, folder, disks=[Disk(scratch)], append=self.append)
        begun = time.monotonic()
        try:
            guest.start()
        except GuestDied as death:
            console = _tail(guest.console) + _tail(guest.shared / "agent.log")
            death = f"{death} (exit status {guest.process and guest.process.returncode})"
            where = self.kernel.series, first.setting, first.case.name
            if last:
                self.report.fail(*where, 0, death, console, guest.shared)
            else:
                self.report.again(*where, "its guest did not boot", death, console, guest.shared)
            self._leave(guest)
            return None
        print(f"boot {self.kernel.series:5} {self.kernel.version} {time.monotonic() - begun:.1f}s", flush=True)
        return guest

    def _once_more(self, work: Work, why: str | None, message: str, extra: list[str], guest: Guest) -> bool:
        """Whether a case that failed is to run again, in a new guest. Only where what is under the guest was at fault."""
        if why is None or work in self.again:
            return False
        self.again.add(work)
        self.report.again(self.kernel.series, work.setting, work.case.name, why, message, extra, guest.shared)
        return True

    def _run_case(self, guest: Guest, work: Work) -> tuple[bool, bool]:
        """Whether the guest can be used further, and whether the case is to run again."""
        series, case, setting = self.kernel.series, work.case, work.setting
        begun = time.monotonic()
        try:
            where = {"provider": work.provider, "network": work.network}
            reply = guest.call("guest.agent:run_case", 2 * case.timeout, name=case.name, **where)
        except GuestDied as death:
            trouble = dmesg.traces(guest.console.read_text(errors="replace"))
            fault = trouble or "ended while" not in str(death) or "Traceback" in "\n".join(_tail(guest.shared / "agent.log"))
            why = None if fault else "the emulator ended"
            if self._once_more(work, why, str(death), _tail(guest.console), guest):
                return False, True
            message = f"{death}" + (f"; its kernel said: {trouble[0]}" if trouble else "")
            self.report.fail(
                series, setting, case.name, time.monotonic() - begun, message, _tail(guest.console), guest.shared
            )
            return False, False
        lines = reply["dmesg"]
        (guest.shared / f"dmesg-{case.name}-{setting.replace('/', '-')}.txt").write_text(dmesg.format_lines(lines))
        bad = dmesg.judge(lines, case.allow, reply["stalled"])
        if bad or reply["status"] == "failed":
            why = standstill(reply["message"], bad, reply["stalled"])
            if self._once_more(work, why, reply["message"], [f"dmesg: {line}" for line in bad], guest):
                return False, True
        if reply["status"] == "failed":
            extra = reply.get("trace", "").splitlines()
            extra += [f"dmesg: {line}" for line in bad]
            self.report.fail(series, setting, case.name, reply["seconds"], reply["message"], extra, guest.shared)
        elif bad:
            message = f"the kernel's log has {len(bad)} lines that no entry of the allow-list names"
            self.report.fail(series, setting, case.name, reply["seconds"], message, bad, guest.shared)
        elif reply["status"] == "skipped":
            self.report.skip(series, setting, case.name, reply["message"])
        else:
            self.report.passed(series, setting, case.name, reply["seconds"])
        # After a trace, a time-out or an unclean end, nothing that follows could be trusted.
        dirty = "no end within" in reply["message"] or "cleaning up" in reply["message"]
        return not dirty and not any(dmesg.TRACES.search(line) for line in bad), False


def _tail(path: Path, lines=40) -> list[str]:
    return path.read_text(errors="replace").splitlines()[-lines:] if path.exists() else []
