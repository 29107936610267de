"""The kernel's target and farside, in one guest, in turn: the same block device that answers at once, the same host.

Everything is emulated, so only ratios mean anything. `bound` is farside on verbs without storage: what host, RDMA and the
guest's CPUs allow, as far as farside's own code can show it. There is no SPDK here: its target polls with kernel-bypass
libraries that want what such a guest does not have.
"""

import atexit
import shutil
import sys
import time

from lab.measure import REPO, Missing, farside, fio_sample, summary

sys.path.append(str(REPO / "tests" / "vm"))

TARGETS = ("nvmet", "verbs", "soft", "bound")
KERNEL = "6.12"

ROWS = [
    {"name": f"{rw}-4k-qd{depth}-j1", "rw": rw, "bs": "4k", "depth": depth, "jobs": 1}
    for rw in ("randread", "randwrite")
    for depth in (1, 32, 128)
]
ROWS += [
    {"name": "read-128k-qd16-j1", "rw": "read", "bs": "128k", "depth": 16, "jobs": 1},
    {"name": "write-128k-qd16-j1", "rw": "write", "bs": "128k", "depth": 16, "jobs": 1},
    {"name": "randread-4k-qd32-j4", "rw": "randread", "bs": "4k", "depth": 32, "jobs": 4},
]


def measure(run, options) -> None:
    from machine import guest, kernels, paths

    farside()
    kernel = kernels.available(KERNEL)
    if kernel is None or not (paths.VENV / "bin" / "vng").exists():
        raise Missing(f"kernel {KERNEL} or virtme-ng is not there: tests/vm/setup gets them")
    atexit.register(guest.kill_all)
    folder = paths.RUNS / f"bench-{time.time_ns()}"
    folder.mkdir(parents=True)
    scratch = folder / "scratch.img"
    with open(scratch, "wb") as disk:
        disk.truncate(1 << 30)
    machine = guest.Guest("bench", kernel, folder, disks=[guest.Disk(scratch)])
    machine.start()
    try:
        call(machine, "guest.bench:prepare", 60)
        for turn in range(options.rounds):
            for target in TARGETS:
                take(run, machine, target, turn, options.seconds)
    finally:
        machine.stop()
        shutil.rmtree(folder, ignore_errors=True)


def take(run, machine, target: str, turn: int, seconds: float) -> None:
    limit = 60 + len(ROWS) * (seconds + 10)
    value = call(machine, "guest.bench:measure", limit, target=target, rows=ROWS, seconds=seconds, idle_seconds=2)
    for name, taken in value["samples"].items():
        sample = fio_sample(taken["job"])
        sample["cpu_us"] = taken["busy"] * 1e6 / sample["iops"] if sample["iops"] else 0.0
        run.add("vm", name, target, turn, "guest", sample)
        print(f"{name:24} {target:6} {summary(sample)}", flush=True)
    note = f"vm, {target}, round {turn + 1}: {value['packets']:,} packets over rxe0, idle {100 * value['idle_cpu']:.1f}% of a CPU"
    run.notes.append(note)
    print(note, *value["faults"], flush=True)


def call(machine, function: str, limit: float, **arguments):
    reply = machine.call(function, limit, **arguments)
    if reply["status"] != "ok":
        raise Missing(f"{function} in the guest: {reply['message']}")
    return reply["value"]
