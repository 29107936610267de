"""Commands, waiting and the ways in which a case ends; everything in the guest goes through here."""

import subprocess
import time
from pathlib import Path


#: how much longer than on an idle machine things may take; comes with each request
patience = 1.0


class Failed(AssertionError):
    """What was expected did not happen."""


class Skip(Exception):
    """The case cannot run here; says what is missing."""


def sh(*argv, check=True, timeout=90.0, stdin=None, netns=None) -> str:
    """Runs a command and returns its standard output."""
    return run(*argv, check=check, timeout=timeout, stdin=stdin, netns=netns).stdout


def run(*argv, check=True, timeout=90.0, stdin=None, netns=None) -> subprocess.CompletedProcess:
    command = [str(part) for part in argv]
    if netns:
        command = ["ip", "netns", "exec", netns, *command]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=timeout * patience, input=stdin
        )
    except subprocess.TimeoutExpired:
        raise Failed(f"no end after {timeout:.0f} s: {' '.join(command)}") from None
    if check and done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip())[-1500:]
        raise Failed(f"exit status {done.returncode}: {' '.join(command)}: {said}")
    return done


def equal(what: str, got, want) -> None:
    if isinstance(got, bytes) and isinstance(want, bytes) and got != want:
        at = next((i for i, (a, b) in enumerate(zip(got, want)) if a != b), min(len(got), len(want)))
        some = f"{got[at : at + 8].hex()}, expected {want[at : at + 8].hex()}"
        raise Failed(f"{what}: {len(got)} bytes of {len(want)}, the first difference at {at}: {some}")
    if got != want:
        raise Failed(f"{what}: {got!r}, expected {want!r}")


def true(what: str, holds) -> None:
    if not holds:
        raise Failed(f"not so: {what}")


def at_least(what: str, got, least) -> None:
    if not got >= least:
        raise Failed(f"{what}: {got!r}, expected at least {least!r}")


def at_most(what: str, got, most) -> None:
    if not got <= most:
        raise Failed(f"{what}: {got!r}, expected at most {most!r}")


def quick(what: str, seconds: float, limit: float) -> None:
    """A limit in seconds that is meant for an idle machine."""
    at_most(f"seconds {what}", round(seconds, 2), limit * patience)


def all_quick(what: str, seconds: list[float], limit: float) -> None:
    """As `quick`, of each. A guest whose processors are taken away for a moment shows as one slow cycle: one in twenty may take
    up to twice as long."""
    slow = sorted(seconds, reverse=True)
    spared = len(slow) // 20
    quick(f"of the slowest {what}", slow[0], 2 * limit if spared else limit)
    quick(f"of the slowest {what} but {spared}", slow[spared], limit)


def eventually(what: str, probe, timeout=30.0, interval=0.05):
    """Waits until `probe` returns something true, and returns that."""
    deadline = time.monotonic() + timeout * patience
    while True:
        value = probe()
        if value:
            return value
        if time.monotonic() > deadline:
            raise Failed(f"not within {timeout:.0f} s: {what}")
        time.sleep(interval)


def write(path, text) -> None:
    """Writes a sysfs, procfs or configfs attribute; the error names the file."""
    try:
        with open(path, "w") as attribute:
            attribute.write(str(text))
    except OSError as error:
        raise Failed(f"writing {text!r} to {path}: {error.strerror}") from None


def read(path) -> str:
    return Path(path).read_text().strip()


def tracefs() -> Path:
    """Where the kernel's tracing is set up."""
    tracing = Path("/sys/kernel/tracing")
    if not (tracing / "kprobe_events").exists():
        sh("mount", "-t", "tracefs", "none", tracing)
    return tracing


def modprobe(*modules) -> None:
    for module in modules:
        sh("modprobe", module)


def sha256(path, offset=0, length=None, direct=False) -> str:
    """Checksum of a file or device; `direct` reads past the page cache."""
    dd = ["dd", f"if={path}", "bs=1M", "status=none"]
    if direct:
        dd.append("iflag=direct")
    if offset:
        dd += [f"skip={offset}", "iflag=skip_bytes" + (",direct" if direct else "")]
    if length is not None:
        equal("length in MiB steps", length % 2**20, 0)
        dd.append(f"count={length // 2**20}")
    reader = subprocess.Popen(dd, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    summer = subprocess.run(["sha256sum"], stdin=reader.stdout, capture_output=True, text=True, timeout=300)
    reader.stdout.close()
    error = reader.stderr.read().decode()
    if reader.wait() != 0:
        raise Failed(f"reading {path}: {error}")
    return summer.stdout.split()[0]
