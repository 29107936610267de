"""The io_uring backends under the null NIC, against fio with io_uring: same file or device, same options, same CPU."""

import os
import shutil
from pathlib import Path

from lab.measure import FOLDER, Missing, alternating, fio, run_core

ROWS = [
    {"name": f"{rw}-4k-qd{depth}", "rw": rw, "bs": 4096, "depth": depth}
    for rw in ("randread", "randwrite")
    for depth in (1, 32, 128)
]
ROWS += [{"name": f"{rw}-128k-qd16", "rw": rw, "bs": 128 << 10, "depth": 16} for rw in ("read", "write")]
ROWS += [{"name": "randwrite-4k-flush-qd1", "rw": "randwrite", "bs": 4096, "depth": 1, "fsync": True}]

SIZE = 1 << 30


def measure(run, options) -> None:
    if shutil.which("fio") is None:
        raise Missing("fio is not there: tests/bench/setup installs it")
    made = None
    path = options.path
    if path is None:
        made = path = FOLDER / "disk.img"
        path.parent.mkdir(parents=True, exist_ok=True)
        # Written out, so that no read finds a hole and no write has to allocate.
        fio(f"--filename={path}", "--rw=write", "--bs=1M", f"--size={SIZE}", "--direct=1", "--end_fsync=1")
    cpu = os.cpu_count() - 1

    def by_fio(row: dict) -> dict:
        return fio(
            f"--filename={path}", f"--rw={row['rw']}", f"--bs={row['bs']}", f"--iodepth={row['depth']}",
            f"--fsync={int(row.get('fsync', False))}", f"--runtime={options.seconds}", "--time_based", "--ramp_time=0.2",
            *fio_ring(), f"--size={size(path)}", cpu=cpu,
        )  # fmt: skip

    def by_farside(row: dict) -> dict:
        flags = ["--fsync"] if row.get("fsync") else []
        return run_core(
            "storage", path, "--rw", row["rw"], "--bs", row["bs"], "--iodepth", row["depth"], "--runtime", options.seconds,
            *flags, cpu=cpu,
        )  # fmt: skip

    try:
        alternating(run, "storage", ROWS, {"fio": by_fio, "farside": by_farside}, options.rounds, crosses=False)
    finally:
        if made:
            made.unlink()


def fio_ring() -> list[str]:
    """What farside does: O_DIRECT, registered buffers and files, no polling for completions."""
    return ["--ioengine=io_uring", "--direct=1", "--fixedbufs=1", "--registerfiles=1", "--norandommap=1", "--thread"]


def size(path: Path) -> int:
    with open(path, "rb") as file:
        return file.seek(0, os.SEEK_END)
