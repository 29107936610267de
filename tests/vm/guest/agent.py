"""Runs in the guest: takes requests from the shared folder one at a time, and answers each with a file.

    N.request   {"call": "module:function", "timeout": seconds, "arguments": {..}}
    N.reply     {"status": "ok" | "failed" | "skipped", "message": .., "value": .., "seconds": ..,
                 "stalled": the longest pause of the guest since the last reply, in seconds, "dmesg": [..]}

A request `exit`, or no request for ten minutes, ends the guest. `guest.agent:run_case` runs a case in the lab.
"""

import importlib
import json
import signal
import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from guest import pulse, root, shell  # noqa: E402
from guest.kmsg import KernelLog  # noqa: E402
from guest.shell import Failed, Skip  # noqa: E402

IDLE_SECONDS = 600
_lab = None


class OutOfTime(Exception):
    """The alarm of a request."""


def lab(shared: Path | None = None, binary: str = "", programs: dict | None = None):
    """The guest's one lab."""
    global _lab
    if _lab is None:
        from guest.lab import Lab

        _lab = Lab(shared, Path(binary), programs or {})
    return _lab


def run_case(name: str, provider: str, network: str = "ipv4") -> None:
    import cases

    here = lab()
    here.fresh(name, provider, network)
    failure = None
    try:
        cases.CASES[name].function(here)
    except Exception as error:
        failure = error
        if not isinstance(error, Skip):
            _keep_evidence(here, traceback.format_exc())
    faults = here.clear()
    if failure is not None and faults:
        raise Failed(f"{failure}; {'; '.join(faults)}") from failure
    if failure is not None:
        raise failure
    if faults:
        _keep_evidence(here, "\n".join(faults))
        raise Failed("; ".join(faults))


def _keep_evidence(here, failure: str) -> None:
    """Before the case is cleaned up, which may take long or never end."""
    from guest.lab import evidence

    try:
        (here.case_folder / "state.txt").write_text(f"{failure}\n\n{evidence()}")
    except Exception as error:
        print("no evidence:", error, flush=True)


def perform(request: dict) -> dict:
    """Runs one request under its alarm."""

    def ring(*_):
        # once is not enough: a handler up the stack may swallow it
        signal.alarm(10)
        raise OutOfTime(f"no end within {request['timeout']:.0f} s")

    begun = time.monotonic()
    shell.patience = request["patience"]
    signal.signal(signal.SIGALRM, ring)
    signal.alarm(int(request["timeout"]))
    reply = {"status": "ok", "message": "", "value": None}
    try:
        module, _, function = request["call"].partition(":")
        module = sys.modules["__main__"] if module == "guest.agent" else importlib.import_module(module)
        reply["value"] = getattr(module, function)(**request["arguments"])
    except Skip as skip:
        reply |= {"status": "skipped", "message": str(skip)}
    except (Failed, OutOfTime) as failure:
        reply |= {"status": "failed", "message": f"{failure} ({_where(failure)})", "trace": traceback.format_exc()}
        if isinstance(failure, OutOfTime):
            Path("/proc/sysrq-trigger").write_text("w")  # stacks of blocked tasks, into the kernel log
    except Exception as error:
        reply |= {"status": "failed", "message": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
    finally:
        signal.alarm(0)
    reply["seconds"], reply["stalled"] = time.monotonic() - begun, pulse.worst()
    return reply


def _where(error: BaseException) -> str:
    """The case's own line that led to the failure."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/cases/" in f.filename]
    frames = frames or traceback.extract_tb(error.__traceback__)
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}"


def main() -> None:
    shared = Path(sys.argv[1])
    root.enter(shared)
    log = KernelLog()
    pulse.start()
    lab(shared, sys.argv[2], dict(argument.split("=", 1) for argument in sys.argv[3:]))
    _answer(shared, "ready", {"status": "ok", "dmesg": log.new()})
    number, last = 0, time.monotonic()
    while time.monotonic() - last < IDLE_SECONDS:
        path = shared / f"{number}.request"
        if not path.exists():
            time.sleep(0.03)
            continue
        request = json.loads(path.read_text())
        if request["call"] == "exit":
            return
        reply = perform(request)
        time.sleep(0.05)
        reply["dmesg"] = log.new()
        _answer(shared, f"{number}.reply", reply)
        number, last = number + 1, time.monotonic()


def _answer(shared: Path, name: str, value: dict) -> None:
    draft = shared / f"{name}.draft"
    draft.write_text(json.dumps(value))
    draft.rename(shared / name)


if __name__ == "__main__":
    main()
