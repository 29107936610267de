"""fio with verification. fio ends with status 0 after doing nothing at all, so every run's byte counts are checked."""

import json
import signal
import subprocess
import time
from pathlib import Path

from guest import shell
from guest.shell import Failed, at_least, equal, run, true

KIB, MIB = 2**10, 2**20
#: for a job that goes on while its disk has no path: io_uring's requests that may not wait come back as EAGAIN then
OUTLIVES = {"ioengine": "libaio"}


def arguments(name: str, output: Path, **options) -> list[str]:
    """The command line of one job. Options are fio's own; True stands for 1."""
    defaults = {
        "ioengine": "io_uring", "direct": 1, "group_reporting": 1, "randrepeat": 1, "thread": 1,
        "verify_fatal": 1, "exitall_on_error": 1, "time_based": 0,
    }  # fmt: skip
    merged = defaults | options
    if "verify" in merged:
        merged.setdefault("verify_backlog", 0)
    flags = [f"--{key}={int(value) if isinstance(value, bool) else value}" for key, value in merged.items()]
    return ["fio", f"--name={name}", "--output-format=json", f"--output={output}", *flags]


class Result:
    """What one run of fio did: bytes by direction and errors."""

    def __init__(self, text: str):
        start = text.find("{")
        if start < 0:
            raise Failed(f"fio wrote no JSON: {text[-800:]!r}")
        self.noise = text[:start].strip()
        self.jobs = json.loads(text[start:])["jobs"]

    def bytes(self, direction: str) -> int:
        return sum(job[direction]["io_bytes"] for job in self.jobs)

    def errors(self) -> int:
        return sum(abs(job["error"]) + job.get("total_err", 0) for job in self.jobs)

    def runtime_ms(self, direction: str) -> int:
        return max(job[direction]["runtime"] for job in self.jobs)

    def moved_exactly(self, **expected: int) -> None:
        """Bytes of each direction named, and nothing in the others."""
        for direction in ("read", "write", "trim"):
            equal(f"bytes of {direction} that fio reports", self.bytes(direction), expected.get(direction, 0))

    def moved_at_least(self, **expected: int) -> None:
        for direction, least in expected.items():
            at_least(f"bytes of {direction} that fio reports", self.bytes(direction), least)


_count = 0


def fio(name: str, timeout=120.0, **options) -> Result:
    """Runs a job to its end; any error that fio reports is a failure."""
    output = _output()
    done = run(*arguments(name, output, **options), check=False, timeout=timeout)
    text = output.read_text() if output.exists() else ""
    if done.returncode != 0:
        raise Failed(f"fio {name} ended with status {done.returncode}: {done.stderr[-1200:]} {text[:600]}")
    result = Result(text)
    equal("errors that fio reports", result.errors(), 0)
    return result


class Running:
    """A job that runs while something else happens."""

    def __init__(self, name: str, **options):
        self.name, self.output, self.begun = name, _output(), time.monotonic()
        self.process = subprocess.Popen(
            arguments(name, self.output, **options), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def running(self) -> bool:
        return self.process.poll() is None

    def wait(self, timeout: float, status: int | None = 0) -> Result:
        """Waits for the end; `status` None takes any."""
        try:
            said, _ = self.process.communicate(timeout=timeout * shell.patience)
        except subprocess.TimeoutExpired:
            self.stop()
            raise Failed(f"fio {self.name} did not end within {timeout:.0f} s") from None
        if status is not None and self.process.returncode != status:
            text = self.output.read_text() if self.output.exists() else ""
            got = self.process.returncode
            raise Failed(f"fio {self.name}: status {got}, expected {status}: {said[-800:]} {text[:500]}")
        return Result(self.output.read_text())

    def stop(self) -> None:
        """Kills it; what waits for a disk ends when the disk does."""
        if self.running():
            self.process.kill()
        try:
            self.process.wait(30 * shell.patience)
        except subprocess.TimeoutExpired:
            raise Failed(f"fio {self.name} did not end within 30 s of SIGKILL") from None


def verified_load(lab, disk: str, name="load", size=32 * MIB, **more) -> Running:
    """Writes that are read back and compared all the time, until the case ends them."""
    options = {"rw": "randwrite", "bs": "4k", "size": size, "iodepth": 8, "verify": "crc32c", "verify_backlog": 256}
    load = Running(name, filename=disk, do_verify=1, time_based=1, runtime=300, **options, **more)
    lab.undo(load.stop)
    return load


def ended_well(load: Running) -> None:
    """Ends a load as an operator would, and looks at what it found."""
    # Before its jobs have begun it would end without a word.
    time.sleep(max(0.0, load.begun + 10 * shell.patience - time.monotonic()))
    true("fio still runs", load.running())
    load.process.send_signal(signal.SIGINT)
    done = load.wait(60, status=None)
    equal("errors of fio", done.errors(), 0)
    at_least("bytes that it wrote", done.bytes("write"), MIB)
    at_least("bytes that it read back", done.bytes("read"), MIB)


def _output() -> Path:
    global _count
    _count += 1
    return Path(f"/run/fio-{_count}.json")
