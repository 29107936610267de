"""One run's samples: raw JSON, the table, the comparison with the last run."""

import json
import time
from pathlib import Path
from statistics import median

from lab import plot
from lab.measure import FOLDER

#: where there is one, ratios are to the first of these
REFERENCES = ("fio", "nvmet")


class Run:
    def __init__(self, machine: dict, settings: dict):
        self.machine, self.settings = machine, settings
        self.when = time.strftime("%Y%m%d-%H%M%S")
        self.samples: list[dict] = []
        #: row -> instructions by stage
        self.instructions: dict[str, dict] = {}
        self.notes: list[str] = []
        self.skipped: dict[str, str] = {}
        self.seconds: dict[str, float] = {}

    def add(self, part: str, row: str, target: str, turn: int, distance: str, sample: dict) -> None:
        self.samples.append({"part": part, "row": row, "target": target, "round": turn, "distance": distance, **sample})

    def finish(self) -> Path:
        """Writes everything beside the last run, and becomes the last one."""
        last = FOLDER / "last"
        before = json.loads((last / "raw.json").read_text()) if (last / "raw.json").exists() else None
        folder = FOLDER / self.when
        self.write(folder, before)
        last.unlink(missing_ok=True)
        last.symlink_to(folder.name)
        return folder

    def write(self, folder: Path, before: dict | None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        raw = dict(vars(self))
        (folder / "raw.json").write_text(json.dumps(raw, indent=1))
        (folder / "report.md").write_text(report(raw, before))
        missing = plot.draw(raw, folder)
        if missing:
            print(missing)


def comparable(samples: list[dict]) -> list[dict]:
    """Of samples of one part, those that were taken while the CPUs stayed as far apart as in most of them."""
    kept = [one for one in samples if one["distance"] != "moved"]
    states = [one["distance"] for one in kept]
    if not kept:
        return samples
    usual = max(set(states), key=states.count)
    return [one for one in kept if one["distance"] == usual]


def medians(samples: list[dict]) -> dict:
    """(part, row, target) -> medians, spread and number of the samples that can be compared."""
    groups: dict = {}
    for part in dict.fromkeys(one["part"] for one in samples):
        for one in comparable([one for one in samples if one["part"] == part]):
            groups.setdefault((part, one["row"], one["target"]), []).append(one)
    return {key: _median(group) for key, group in groups.items()}


def _median(group: list[dict]) -> dict:
    rates = [one["iops"] for one in group]
    middle = {"iops": median(rates), "count": len(group)}
    middle["spread"] = (max(rates) - min(rates)) / middle["iops"] if middle["iops"] else 0.0
    for key in ("ns", "cpu_us", "cpu_share", "bandwidth"):
        values = [one[key] for one in group if key in one]
        if values:
            middle[key] = median(values)
    names = {name for one in group for name in one.get("latency_us", {})}
    middle["latency_us"] = {
        name: median([one["latency_us"][name] for one in group if name in one.get("latency_us", {})]) for name in names
    }
    return middle


def report(raw: dict, before: dict | None) -> str:
    lines = ["# Benchmark", ""]
    lines += [f"* {key}: {value}" for key, value in raw["machine"].items()]
    lines += [f"* {raw['settings']}", ""]
    lines += [f"* skipped: {part}: {why}" for part, why in raw["skipped"].items()]
    lines += [f"* {note}" for note in raw["notes"]]
    middle = medians(raw["samples"])
    old = medians(before["samples"]) if before else {}
    for part in dict.fromkeys(one["part"] for one in raw["samples"]):
        lines += ["", f"## {part}", "", *_table(part, middle, old)]
    if raw["instructions"]:
        lines += ["", "## instructions per operation, by stage", "", *_stages(raw["instructions"])]
    return "\n".join(lines) + "\n"


def _table(part: str, middle: dict, old: dict) -> list[str]:
    head = ["row", "target", "IOPS", "spread", "ratio", "mean us", "p99 us", "p99.99 us", "CPU us/IO", "last run"]
    rows = []
    here = {key: value for key, value in middle.items() if key[0] == part}
    for (_, row, target), value in here.items():
        reference = next((here[part, row, name] for name in REFERENCES if (part, row, name) in here), None)
        latency = value["latency_us"]
        if part == "core":
            latency = {"mean": value["ns"] / 1000}
        cells = [
            row, target, f"{value['iops']:,.0f}", f"{100 * value['spread']:.0f}%",
            "" if reference is None or reference is value else f"{value['iops'] / reference['iops']:.2f}",
            *(f"{latency[name]:.2f}" if name in latency else "" for name in ("mean", "p99", "p99.99")),
            f"{value['cpu_us']:.2f}" if "cpu_us" in value else f"{100 * value['cpu_share']:.1f}%" if "cpu_share" in value else "",
            _change(value, old.get((part, row, target))),
        ]  # fmt: skip
        rows.append(cells)
    return markdown(head, rows)


def _change(value: dict, old: dict | None) -> str:
    if not old or not old["iops"]:
        return ""
    return f"{100 * (value['iops'] / old['iops'] - 1):+.0f}%"


def _stages(instructions: dict) -> list[str]:
    names = dict.fromkeys(stage for row in instructions.values() for stage in row["stages"])
    rows = []
    for row, split in instructions.items():
        costs = [split["stages"].get(name, {"own": 0, "libc": 0}) for name in names]
        rows.append([row, f"{split['target']:.0f}", *(f"{cost['own'] + cost['libc']:.0f}" for cost in costs)])
    return markdown(["row", "target in all", *names], rows)


def markdown(head: list[str], rows: list[list[str]]) -> list[str]:
    widths = [max(len(str(cell)) for cell in column) for column in zip(head, *rows)]
    line = lambda cells: "| " + " | ".join(str(cell).ljust(width) for cell, width in zip(cells, widths)) + " |"  # noqa: E731
    return [line(head), "|" + "|".join("-" * (width + 2) for width in widths) + "|", *map(line, rows)]
