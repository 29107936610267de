"""What all parts need: the programs, the machine's state, samples that can be compared."""

import json
import os
import platform
import subprocess
from functools import cache
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent.parent.parent
#: where everything goes that a run leaves behind
FOLDER = REPO / ".cache" / "bench"
#: round trips of a cache line above this are those of far cores, nanoseconds
FAR = 150


class Missing(Exception):
    """What a part needs is not there."""


def output(*command, **options) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, command))}: {done.stderr.strip()[-800:]}")
    return done.stdout


@cache
def core() -> Path:
    """The benchmark of the core, built once; FARSIDE_BENCH_CORE names another."""
    if "FARSIDE_BENCH_CORE" in os.environ:
        return Path(os.environ["FARSIDE_BENCH_CORE"])
    text = output("cargo", "bench", "--bench", "core", "--no-run", "--locked", "--message-format=json", cwd=REPO)
    for line in text.splitlines():
        message = json.loads(line)
        if message.get("reason") == "compiler-artifact" and message["target"]["name"] == "core" and message.get("executable"):
            return Path(message["executable"])
    raise RuntimeError("cargo built no benchmark called core")


@cache
def farside() -> Path:
    path = Path(os.environ.get("FARSIDE_BIN", REPO / "target" / "release" / "farside"))
    if not path.exists():
        raise Missing(f"{path} is not built: cargo build --release")
    return path


def run_core(*arguments, cpu=0) -> dict:
    return json.loads(output(core(), "--cpu", cpu, *arguments))


def distance() -> dict:
    """How far apart CPU 0 and 1 are now; nothing on a machine of one."""
    if os.cpu_count() < 2:
        return {}
    round_trip = run_core("distance")["round_trip_ns"]
    return {"round_trip_ns": round(round_trip), "distance": "far" if round_trip > FAR else "near"}


def alternating(run, part: str, rows, targets: dict, rounds: int, crosses: bool) -> None:
    """Every row by every target in turn, `rounds` times; for what crosses CPUs with their distance before and after each.
    `targets`: name -> function of the row that measures it."""
    for turn in range(rounds):
        for row in rows:
            for target, function in targets.items():
                before = distance() if crosses else {}
                sample = function(row)
                after = distance() if crosses else {}
                same = before.get("distance") == after.get("distance")
                where = before.get("distance", "one") if same else "moved"
                run.add(part, row["name"], target, turn, where, sample)
                print(f"{row['name']:24} {target:10} {where:6} {summary(sample)}", flush=True)


def summary(sample: dict) -> str:
    latency = sample.get("latency_us", {})
    return f"{sample['iops']:12,.0f} IOPS  mean {latency.get('mean', 0):9.1f} us  p99 {latency.get('p99', 0):9.1f} us"


def fio(*flags, cpu=None) -> dict:
    """One job of fio, as a sample."""
    command = ["fio", "--name=job", "--output-format=json", "--group_reporting", *flags]
    if cpu is not None:
        command.append(f"--cpus_allowed={cpu}")
    text = output(*command)
    return fio_sample(json.loads(text[text.index("{") :])["jobs"][0])


def fio_sample(job: dict) -> dict:
    """A job of fio's JSON as a sample; reads, or where there are none, writes."""
    side = job["read"] if job["read"]["total_ios"] else job["write"]
    completion = side["clat_ns"].get("percentile", {})
    percentiles = {name: completion[key] / 1000 for name, key in PERCENTILES.items() if key in completion}
    share = (job["usr_cpu"] + job["sys_cpu"]) / 100
    return {
        "iops": side["iops"],
        "bandwidth": side["bw_bytes"],
        "latency_us": {"mean": side["lat_ns"]["mean"] / 1000, **percentiles},
        "cpu_us": share * 1e6 / side["iops"] if side["iops"] else 0.0,
    }


PERCENTILES = {"p50": "50.000000", "p99": "99.000000", "p99.9": "99.900000", "p99.99": "99.990000"}


def machine() -> dict:
    cpu = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), "?")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=REPO)
    return {
        "cpu": cpu,
        "cpus": os.cpu_count(),
        "kernel": platform.release(),
        "load": os.getloadavg()[0],
        "commit": commit.stdout.strip(),
        "rustc": output("rustc", "--version").strip(),
    }
