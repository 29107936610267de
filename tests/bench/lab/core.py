"""The target between a null NIC and a null backend: nanoseconds, and instructions by stage."""

import os
import shutil

from lab.measure import run_core

ROWS = (
    "read-4k", "write-4k-in-capsule", "write-128k", "read-128k", "mix", "queues-32-batch-32", "queues-1000-batch-32",
    "queues-1-batch-1", "queues-1000-batch-1", "namespaces-1", "namespaces-1000",
)  # fmt: skip


def measure_row(name: str, operations: int) -> dict:
    ns = run_core("core", name, "--operations", operations)["ns"]
    return {"iops": 1e9 / ns, "ns": ns}


def measure(run, options) -> None:
    operations = 200_000 if options.seconds < 2 else 2_000_000
    for turn in range(options.rounds):
        for name in ROWS:
            sample = measure_row(name, operations)
            run.add("core", name, "farside", turn, "one", sample)
            print(f"{name:24} {sample['ns']:8.1f} ns", flush=True)
    if shutil.which("valgrind") is None:
        run.skipped["instructions"] = "valgrind is not there: tests/bench/setup installs it"
        return
    for name in ROWS:
        run.instructions[name] = run_core("split", name, cpu=os.cpu_count() - 1)
        print(f"{name:24} {run.instructions[name]['target']:8.1f} instructions", flush=True)

