"""Programs besides farside that cases run in a guest, built by cargo when a case of the plan needs them."""

import json
import os
import subprocess
from pathlib import Path

from machine import paths

#: name -> what cargo is asked to build (the dev profile, as `make unit` and `make demo-test` do)
CARGO = {
    "verbs_pair": ("test", "--no-run", "--test", "verbs_pair"),
    "process": ("test", "--no-run", "--test", "process"),
    "appliance": ("build", "--example", "appliance"),
}

#: what was built so far; guests are told of it when they boot
built: dict[str, Path] = {}


def build(names) -> str | None:
    """Builds what is not built yet; returns why that is not possible."""
    for name in names:
        if name not in built:
            why = _build_one(name)
            if why:
                return why
    return None


def _build_one(name: str) -> str | None:
    command = ["cargo", *CARGO[name], "--locked", "--message-format=json"]
    try:
        done = subprocess.run(command, cwd=paths.REPO, capture_output=True, text=True, env=_environment())
    except OSError as error:
        return f"{name} is not built: {error}"
    for line in done.stdout.splitlines():
        message = json.loads(line)
        if message.get("executable") and message["target"]["name"] == name:
            built[name] = Path(message["executable"])
            return None
    return f"{name} is not built: {' '.join(command)} ended with status {done.returncode}: {done.stderr[-300:]}"


def _environment() -> dict:
    """With the libclang that the bindings need; make sets it too, and another one would build everything again."""
    if os.environ.get("LIBCLANG_PATH"):
        return dict(os.environ)
    find = ["sh", "tests/libclang.sh", ".cache/libclang"]
    where = subprocess.run(find, cwd=paths.REPO, capture_output=True, text=True).stdout.strip()
    return dict(os.environ, LIBCLANG_PATH=where)
