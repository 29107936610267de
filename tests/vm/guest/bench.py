"""Speed of one target after the other in one guest: the same device behind each, the same fio, the same host.

Under software emulation only ratios mean anything.
"""

import os
import sys
import time
from pathlib import Path

from guest.fio import fio
from guest.shell import eventually, read, sh
from guest.target import NQN, Namespace, Subsystem

DEVICE = Path("/dev/nullb0")


def prepare() -> None:
    """A block device that answers at once, for every target; fio and the kernel's host are warm."""
    if not DEVICE.exists():
        sh("modprobe", "null_blk", "nr_devices=1", "gb=8", "bs=4096", "irqmode=0", "submit_queues=2", "hw_queue_depth=1024")
    eventually("the null device is there", DEVICE.exists)


def measure(target: str, rows: list[dict], seconds: float, idle_seconds: float) -> dict:
    """Samples by row. `target`: nvmet, verbs, soft, or bound, which is farside on verbs with nothing behind it."""
    lab = sys.modules["__main__"].lab()
    provider = "verbs" if target == "bound" else target
    lab.fresh("bench", provider)
    try:
        namespace = Namespace(1, "device", DEVICE, block_size=4096)
        if target == "bound":
            namespace = Namespace(1, "null", size=8 << 30, block_size=4096)
        served = lab.serve(Subsystem(NQN + "bench", [namespace]))
        controller = lab.connect(served, io_queues=2)
        disk = controller.disk()
        before = packets()
        samples = {row["name"]: sample(disk, row, seconds) for row in rows}
        # What shows that the traffic took the wire that it is said to take.
        sent = packets() - before
        idle = idle_cpu(idle_seconds)
    finally:
        faults = lab.clear()
    return {"samples": samples, "idle_cpu": idle, "packets": sent, "faults": faults}


def sample(disk: str, row: dict, seconds: float) -> dict:
    busy, begun = cpu_busy(), time.monotonic()
    done = fio(
        row["name"], filename=disk, rw=row["rw"], bs=row["bs"], iodepth=row["depth"], numjobs=row["jobs"], time_based=1,
        runtime=seconds, ramp_time=0.3, size="2g", norandommap=1, percentile_list="50:99:99.9:99.99",
    )  # fmt: skip
    used, took = cpu_busy() - busy, time.monotonic() - begun
    return {"job": done.jobs[0], "busy": used / took}


def cpu_busy() -> float:
    """Seconds that the guest's CPUs were not idle."""
    fields = [int(field) for field in read("/proc/stat").splitlines()[0].split()[1:9]]
    idle = fields[3] + fields[4]
    return (sum(fields) - idle) / os.sysconf("SC_CLK_TCK")


def idle_cpu(seconds: float) -> float:
    """CPUs in use while the host is connected and does nothing."""
    time.sleep(0.5)
    before = cpu_busy()
    time.sleep(seconds)
    return (cpu_busy() - before) / seconds


def packets() -> int:
    """RoCE packets that rxe0 sent and received."""
    counters = Path("/sys/class/infiniband/rxe0/ports/1/hw_counters")
    return sum(int(read(counters / name)) for name in ("sent_pkts", "rcvd_pkts"))
