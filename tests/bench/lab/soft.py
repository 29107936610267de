"""The software provider over loopback: `farside serve --null` and `farside bench`, each on its CPU."""

import json
import os
import subprocess
import time
from contextlib import contextmanager

from lab.measure import FOLDER, alternating, farside, output

ROWS = [
    {"name": f"{rw}-4k-qd{depth}-j{jobs}", "rw": rw, "bs": 4096, "depth": depth, "jobs": jobs}
    for rw, depth, jobs in (
        ("randread", 1, 1), ("randread", 32, 1), ("randread", 128, 1), ("randread", 32, 4),
        ("randwrite", 1, 1), ("randwrite", 32, 1), ("randwrite", 128, 1),
    )
]  # fmt: skip
ROWS += [{"name": f"{rw}-128k-qd16-j1", "rw": rw, "bs": 128 << 10, "depth": 16, "jobs": 1} for rw in ("randread", "randwrite")]

ADDRESS, HOST = "127.0.71.1", "127.0.71.2"


@contextmanager
def served(*arguments, reactors=1, cpu="0"):
    """A target of one reactor on CPU 0: its process."""
    command = ["taskset", "-c", cpu, farside(), "serve", "--null", "1T", "--provider", "soft", "--listen", ADDRESS]
    command += ["--reactors", str(reactors), "--control", FOLDER / "bench.sock", *arguments]
    FOLDER.mkdir(parents=True, exist_ok=True)
    target = subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    time.sleep(0.5)
    if target.poll() is not None:
        raise RuntimeError(f"farside serve: {target.stderr.read()[-800:]}")
    try:
        yield target
    finally:
        target.terminate()
        target.wait(10)


def load(row: dict, seconds: float, *more) -> dict:
    """farside bench on the last CPU; its own JSON."""
    return json.loads(
        output(
            "taskset", "-c", os.cpu_count() - 1, farside(), "bench", ADDRESS, "--provider", "soft", "--source", HOST,
            "--rw", row["rw"], "--bs", row["bs"], "--iodepth", row["depth"], "--numjobs", row["jobs"],
            "--runtime", seconds, "--size", "1G", "--json", *more,
        )
    )  # fmt: skip


def cpu_seconds(pid: int) -> float:
    """What a process used so far."""
    fields = open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def sample_of(report: dict, used: float) -> dict:
    side = report["read"] if report["read"]["operations"] else report["write"]
    percentiles = {f"p{float(name):g}": ns / 1000 for name, ns in side["latency_ns"]["percentile"].items()}
    return {
        "iops": side["iops"],
        "bandwidth": side["bytes_per_second"],
        "latency_us": {"mean": side["latency_ns"]["mean"] / 1000, **percentiles},
        "cpu_us": used * 1e6 / side["operations"],
    }


def measure(run, options) -> None:
    def by_farside(row: dict) -> dict:
        with served() as target:
            before = cpu_seconds(target.pid)
            report = load(row, options.seconds)
            return sample_of(report, cpu_seconds(target.pid) - before)

    alternating(run, "soft", ROWS, {"farside": by_farside}, options.rounds, crosses=True)
