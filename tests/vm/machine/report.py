"""One line per case as it ends, the evidence of a failure under `.cache/vm/failures`, and the closing line."""

import os
import shutil
import sys
import threading
from collections import Counter
from pathlib import Path

from machine import paths

CI = os.environ.get("CI") == "true"
#: so many cases may need a second try; more is no accident
MOST_AGAIN = 3
TAIL_LINES = 10


class Report:
    def __init__(self):
        self.counts = Counter()
        self.failed: list[str] = []
        self.skipped: list[str] = []
        self.second: list[str] = []
        self._lock = threading.RLock()

    def passed(self, kernel: str, provider: str, name: str, seconds: float) -> None:
        with self._lock:
            self._line("ok", kernel, provider, name, seconds)

    def skip(self, kernel: str, provider: str, name: str, why: str) -> None:
        """A skip says what is missing; in CI nothing may be missing, so it is a failure there."""
        if CI:
            self.fail(kernel, provider, name, 0, f"skipped, which CI does not allow: {why}", [], None)
            return
        with self._lock:
            self._line("SKIP", kernel, provider, name, None)
            print(f"       missing: {why}", flush=True)
            self.skipped.append(f"{kernel} {provider} {name}: {why}")

    def fail(self, kernel, provider, name, seconds, message: str, extra: list[str], logs: Path | None) -> None:
        """`logs` is the folder that the guest shared; it is kept whole."""
        with self._lock:
            self._line("FAIL", kernel, provider, name, seconds)
            print(f"       {message[:600]}", flush=True)
            self.failed.append(f"{kernel} {provider} {name}: {message[:200]}")
            self._keep(f"{kernel}-{provider.replace('/', '-')}-{name}", message, extra, logs)

    def again(self, kernel, provider, name, why: str, message: str, extra: list[str], logs: Path | None) -> None:
        """A case, or a boot, that gets a second try, and why; what the first one said and left is kept as of a failure."""
        with self._lock:
            print(f"again {kernel:4} {provider:12} {name}: {why}: {message[:600]}", flush=True)
            self.second.append(f"{kernel} {provider} {name}: {why}: {message[:200]}")
            self._keep(f"{kernel}-{provider.replace('/', '-')}-{name}-first", message, extra, logs)

    def _keep(self, called: str, message: str, extra: list[str], logs: Path | None) -> None:
        kept = paths.FAILURES / called
        shutil.rmtree(kept, ignore_errors=True)
        kept.mkdir(parents=True)
        (kept / "message.txt").write_text(message + "\n\n" + "\n".join(extra) + "\n")
        if logs is not None and logs.exists():
            shutil.copytree(logs, kept / "guest", dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.img"))
        for line in "\n".join(extra).splitlines()[-TAIL_LINES:]:
            print(f"       | {line[:200]}", flush=True)
        print(f"       kept: {os.path.relpath(kept, paths.REPO)}", flush=True)

    def close(self) -> int:
        """Prints what failed again, then the closing line; returns the exit status."""
        for line in self.skipped:
            print("SKIP", line)
        for line in self.second:
            print("AGAIN", line)
        for line in self.failed:
            print("FAIL", line)
        passed, failed, skipped = (self.counts[word] for word in ("ok", "FAIL", "SKIP"))
        second = f", {len(self.second)} second tries" if self.second else ""
        print(f"{passed} passed, {failed} failed, {skipped} skipped{second}", flush=True)
        if len(self.second) > MOST_AGAIN:
            print(f"more than {MOST_AGAIN} second tries: the machine is too slow for these tests, or they or the target are at fault")
            return 1
        return 1 if failed or not passed + skipped else 0

    def _line(self, word: str, kernel: str, provider: str, name: str, seconds: float | None) -> None:
        self.counts[word] += 1
        took = "" if seconds is None else f"{seconds:7.1f}s"
        print(f"{word:4} {kernel:5} {provider:12} {name:72} {took}", flush=True)
        sys.stdout.flush()
