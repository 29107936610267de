"""farside as a host: one run of `discover`, `identify` or `bench`."""

import json
import subprocess
import time
from pathlib import Path

from guest import shell
from guest.shell import Failed
from guest.target import LOGGED, counters


class HostRun:
    """A run that was started. It ends with an answer, or is expected to fail."""

    def __init__(self, binary: Path, folder: Path, provider: str, netns: str | None, command: str, address: str, *argv):
        words = [str(binary), command, address, "--provider", provider, "--json", *map(str, argv)]
        if netns:
            words = ["ip", "netns", "exec", netns, *words]
        self.name = " ".join(words)
        self.out, self.log = (folder / f"host-{time.monotonic_ns()}.{kind}" for kind in ("json", "log"))
        with open(self.out, "w") as out, open(self.log, "w") as log:
            self.process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=out, stderr=log, env=LOGGED)

    def running(self) -> bool:
        return self.process.poll() is None

    def wait(self, timeout=60.0):
        """The answer of a run that ends well."""
        if (status := self._end(timeout)) != 0:
            raise Failed(f"exit status {status}: {self.name}: {self.said()[-1200:]}")
        return json.loads(self.out.read_text())

    def fails(self, timeout=60.0) -> str:
        """What a run that must fail says."""
        if self._end(timeout) == 0:
            raise Failed(f"it ended well, which it must not: {self.name}")
        return self.said()

    def counters(self) -> dict[str, int]:
        """What the software provider counted, once the run has ended."""
        return counters(self.said())

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def stop(self) -> None:
        if self.running():
            self.process.kill()
        self.process.wait()

    def _end(self, timeout: float) -> int:
        try:
            return self.process.wait(timeout * shell.patience)
        except subprocess.TimeoutExpired:
            self.stop()
            raise Failed(f"no end after {timeout:.0f} s: {self.name}: {self.said()[-600:]}") from None
