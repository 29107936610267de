"""Where things lie: the checkout, the harness' own cache, and what a failure leaves behind.

Everything that the harness downloads or writes is under `.cache/vm` of the checkout, so that removing
that folder removes every trace of it.
"""

import os
from pathlib import Path

VM = Path(__file__).resolve().parent.parent
REPO = VM.parent.parent
CACHE = REPO / ".cache" / "vm"
VENV = CACHE / "venv"
KERNELS = CACHE / "kernels"
APT = CACHE / "apt"
RUNS = CACHE / "runs"
FAILURES = CACHE / "failures"


def farside_binary() -> Path:
    """The target under test; FARSIDE_BIN names another one."""
    return Path(os.environ.get("FARSIDE_BIN", REPO / "target" / "release" / "farside")).resolve()
