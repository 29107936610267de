"""What a target uses: no processor when idle, and the memory that the README's formula says."""

import json
import os
import time
from pathlib import Path

from cases.registry import FARSIDE, case
from guest.fio import MIB, fio
from guest.shell import at_most, equal, sh, true
from guest.target import NQN, Subsystem

TICKS = os.sysconf("SC_CLK_TCK")
KIB = 2**10


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


@case(providers=FARSIDE, timeout=300)
def an_idle_target_with_a_host_uses_under_half_a_percent_of_a_core(lab):
    target = lab.serve()
    controller = lab.connect(target, keep_alive_tmo=5)
    controller.disk()
    time.sleep(5)

    def minute() -> float:
        before, begun = cpu_seconds(target.pid), time.monotonic()
        time.sleep(60)
        return (cpu_seconds(target.pid) - before) / (time.monotonic() - begun)

    # Where other machines take the processor away, what it uses takes longer: up to three tries.
    shares = []
    while len(shares) < 3 and min(shares, default=1) > 0.005:
        shares.append(minute())
    at_most(f"share of a core, the least of {shares}", min(shares), 0.005)
    equal("state of the controller", controller.state, "live")


def registered(options: dict) -> int:
    """README, "Memory": bytes that are mapped and registered, all reactors together."""
    page = max(4 * KIB, 1 << (options["in_capsule_data"] - 1).bit_length())
    one = options["pool_size"] + options["receive_slots"] * (page + 64 + 32) + 4 * MIB
    return options["reactors"] * -(-one // (2 * MIB)) * 2 * MIB


def resident(options: dict) -> int:
    """README, "Memory": bytes of RSS once hosts are connected."""
    return registered(options) + options["reactors"] * options["receive_slots"] * 1536 + 10 * MIB


@case(providers=("verbs",), timeout=180)
def memory_is_what_the_documented_formula_says(lab):
    """The default sizes, then small ones, with a host that used every size of buffer."""
    default = {"reactors": 2, "pool_size": 64 * MIB, "receive_slots": 4096, "in_capsule_data": 4 * KIB}
    small = {"reactors": 1, "pool_size": 8 * MIB, "receive_slots": 1024, "in_capsule_data": 16 * KIB}
    for options, given in ((default, {}), (small, small)):
        target = lab.serve(Subsystem(NQN + "disk1", [lab.namespace(size=64 * MIB)]), **given)
        controller = lab.connect(target)
        for bs in ("512", "16k", "1m"):
            fio("use", filename=controller.disk(), rw="randrw", bs=bs, size=8 * MIB, iodepth=32)
        entries = json.loads(sh("rdma", "-j", "resource", "show", "mr"))
        tasks = {int(task.name) for task in Path(f"/proc/{target.pid}/task").iterdir()}
        regions = sum(entry["mrlen"] for entry in entries if entry.get("pid") in tasks)
        status = Path(f"/proc/{target.pid}/status").read_text()
        rss = int(status.split("VmRSS:")[1].split()[0]) * KIB
        said = f"registered {regions / MIB:.1f} MiB, resident {rss / MIB:.1f} MiB with {options}"
        (lab.case_folder / f"memory-{options['reactors']}.txt").write_text(said + "\n" + status)
        for what, got, formula in (("registered", regions, registered(options)), ("resident", rss, resident(options))):
            ratio = got / formula
            true(f"{what} is within 10% of the formula: {ratio:.3f} of {formula} bytes; {said}", 0.9 <= ratio <= 1.1)
        controller.disconnect()
        target.stop()
