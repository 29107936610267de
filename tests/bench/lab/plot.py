"""Plots of a run, PNG and SVG, by matplotlib in a virtual environment of its own (tests/bench/setup makes it)."""

import json
import subprocess
import sys
from pathlib import Path

VENV = Path(__file__).resolve().parent.parent.parent.parent / ".cache" / "bench" / "venv"


def draw(raw: dict, folder: Path) -> str:
    """Draws with the environment's Python; what is missing, or nothing."""
    python = VENV / "bin" / "python"
    if not python.exists():
        return "no plots: run tests/bench/setup for matplotlib"
    subprocess.run([python, "-B", __file__, folder / "raw.json"], check=True)
    return ""


def main(file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from lab import results

    raw = json.loads(file.read_text())
    middle = results.medians(raw["samples"])

    def save(figure, name: str) -> None:
        figure.tight_layout()
        for kind in ("png", "svg"):
            figure.savefig(file.parent / f"{name}.{kind}", dpi=110)
        plt.close(figure)

    for part in dict.fromkeys(key[0] for key in middle if key[0] not in ("core", "polling")):
        here = {key[1:]: value for key, value in middle.items() if key[0] == part}
        for what, axis, of in (
            ("iops", "IOPS", lambda value: value["iops"]),
            ("latency", "mean latency, us", lambda value: value["latency_us"].get("mean", 0)),
        ):
            figure, axes = plt.subplots(figsize=(8, 4.5))
            for line, points in by_depth(here, of).items():
                axes.plot(*zip(*sorted(points)), marker="o", label=line)
            axes.set(xlabel="commands under way", ylabel=axis, title=f"{part}: {axis} by depth")
            axes.set_xscale("log", base=2)
            axes.set_ylim(bottom=0)
            axes.legend(fontsize=7)
            save(figure, f"{part}-{what}-by-depth")
        figure, axes = plt.subplots(figsize=(8, 4.5))
        names = ["p50", "p99", "p99.9", "p99.99"]
        for (row, target), value in here.items():
            if "qd1" in row.split("-") and "4k" in row:
                known = [name for name in names if name in value["latency_us"]]
                axes.plot(known, [value["latency_us"][name] for name in known], marker="o", label=f"{target} {row}")
        axes.set(ylabel="latency, us", title=f"{part}: percentiles at depth 1", yscale="log")
        axes.legend(fontsize=7)
        save(figure, f"{part}-percentiles")

    if raw["instructions"]:
        figure, axes = plt.subplots(figsize=(9, 4.5))
        rows = list(raw["instructions"])
        left = [0.0] * len(rows)
        for stage in dict.fromkeys(stage for row in raw["instructions"].values() for stage in row["stages"]):
            if stage == "null NIC and load":
                continue
            costs = [raw["instructions"][row]["stages"].get(stage, {"own": 0, "libc": 0}) for row in rows]
            width = [max(0.0, cost["own"] + cost["libc"]) for cost in costs]
            axes.barh(rows, width, left=left, label=stage)
            left = [one + more for one, more in zip(left, width)]
        axes.set(xlabel="instructions per operation", title="the target's cost by stage")
        axes.invert_yaxis()
        axes.legend(fontsize=7)
        save(figure, "instructions-by-stage")

    curve = sorted((value["iops"], value["cpu_share"]) for key, value in middle.items() if key[0] == "polling")
    if curve:
        figure, axes = plt.subplots(figsize=(8, 4.5))
        axes.plot([rate for rate, _ in curve], [100 * share for _, share in curve], marker="o")
        axes.set(xlabel="IOPS", ylabel="CPU of the target, %", title="CPU by rate", ylim=(0, None))
        save(figure, "cpu-by-rate")


def by_depth(here: dict, of) -> dict:
    """Lines of one target and kind of row, by the depth that the row's name says."""
    lines: dict = {}
    for (row, target), value in here.items():
        words = row.split("-")
        depth = next((int(word[2:]) for word in words if word.startswith("qd") and word[2:].isdigit()), None)
        if depth is not None:
            kind = "-".join(word for word in words if not word.startswith("qd"))
            lines.setdefault(f"{target} {kind}", []).append((depth, of(value)))
    return lines


if __name__ == "__main__":
    main(Path(sys.argv[1]))
