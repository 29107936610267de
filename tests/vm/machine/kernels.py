"""Stock Debian kernels, downloaded and unpacked, never installed.

A package source list, list folder and download folder of our own are used, so that the machine's package
sources, its kernel and /lib/modules stay as they were. The mirrors are those that the machine's own
sources name: other suites of the same archive are reached at the same place.

A kernel lies in `.cache/vm/kernels/SERIES/` as `boot/vmlinuz-VERSION` and `lib/modules/VERSION`. vng takes the
modules from beside the image, so nothing has to be linked into /lib/modules.
"""

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from machine import paths

#: series -> (suites that may hold it, package name patterns of one version; the group is the version)
SERIES = {
    "6.1": (("bookworm", "bookworm-security"), (r"linux-image-(6\.1\.0-\d+)-amd64",)),
    "6.12": (("bookworm-backports",), (r"linux-image-(6\.12\.\d+)\+deb12-amd64-unsigned",)),
    "7": (
        ("trixie-backports",),
        (r"linux-binary-(7\.\d+\.\d+)\+deb13-amd64", r"linux-modules-(7\.\d+\.\d+)\+deb13-amd64"),
    ),
}


@dataclass(frozen=True)
class Kernel:
    series: str
    version: str
    image: Path


def available(series: str) -> Kernel | None:
    """The unpacked kernel of a series, or None when `fetch` has not run."""
    root = paths.KERNELS / series
    images = sorted((root / "boot").glob("vmlinuz-*"))
    if not images or not (root / "ready").exists():
        return None
    image = images[-1]
    return Kernel(series, image.name.removeprefix("vmlinuz-"), image)


def fetch(series_names=tuple(SERIES)) -> list[Kernel]:
    """Downloads and unpacks the series that are not there yet."""
    missing = [name for name in series_names if available(name) is None]
    if missing:
        _update_lists()
        names = _package_names()
        for series in missing:
            _fetch_one(series, names)
    return [available(name) for name in series_names]


def _fetch_one(series: str, names: list[str]) -> None:
    patterns = SERIES[series][1]
    version, packages = _newest(patterns, names)
    print(f"kernel {series}: {version}", flush=True)
    root, debs = paths.KERNELS / series, paths.KERNELS / f"{series}.debs"
    for folder in (root, debs):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    subprocess.run(["apt-get", *_apt_options(), "-qq", "download", *packages], cwd=debs, check=True)
    for deb in sorted(debs.glob("*.deb")):
        subprocess.run(["dpkg", "-x", deb, root], check=True)
    shutil.rmtree(debs)
    _one_layout(root)
    (kernel_image,) = (root / "boot").glob("vmlinuz-*")
    release = kernel_image.name.removeprefix("vmlinuz-")
    subprocess.run(["depmod", "-b", root, release], check=True)
    (root / "ready").touch()


def _one_layout(root: Path) -> None:
    """Newer packages keep the image and the modules under usr/lib/modules/VERSION: bring them to one layout."""
    merged = root / "usr" / "lib" / "modules"
    if merged.is_dir():
        (root / "lib").mkdir(exist_ok=True)
        (root / "boot").mkdir(exist_ok=True)
        shutil.move(merged, root / "lib" / "modules")
        for image in (root / "lib" / "modules").glob("*/vmlinuz"):
            shutil.move(image, root / "boot" / f"vmlinuz-{image.parent.name}")
    shutil.rmtree(root / "usr", ignore_errors=True)


def _newest(patterns, names: list[str]) -> tuple[str, list[str]]:
    """The newest version that every pattern has a package of."""
    found = [{m[1]: m[0] for m in (re.fullmatch(p, name) for name in names) if m} for p in patterns]
    common = set(found[0]).intersection(*found[1:])
    if not common:
        raise SystemExit(f"no kernel package matches {' + '.join(patterns)}: do the package sources name a Debian mirror?")
    version = max(common, key=lambda v: [int(part) for part in re.split(r"[.-]", v)])
    return version, [table[version] for table in found]


def _package_names() -> list[str]:
    search = ["apt-cache", *_apt_options(), "search", "--names-only", "^linux-(image|binary|modules)-[0-9]"]
    lines = subprocess.run(search, check=True, capture_output=True, text=True).stdout.splitlines()
    return [line.split(" ", 1)[0] for line in lines]


def _update_lists() -> None:
    (paths.APT / "lists" / "partial").mkdir(parents=True, exist_ok=True)
    (paths.APT / "cache" / "archives" / "partial").mkdir(parents=True, exist_ok=True)
    archive, security = _mirrors()
    keyring = "/usr/share/keyrings/debian-archive-keyring.gpg"
    lines = []
    for suite in sorted({suite for suites, _ in SERIES.values() for suite in suites}):
        uri = security if suite.endswith("-security") else archive
        if uri:
            lines.append(f"deb [signed-by={keyring}] {uri} {suite} main\n")
    (paths.APT / "sources.list").write_text("".join(lines))
    subprocess.run(["apt-get", *_apt_options(), "-qq", "update"], check=True)


def _apt_options() -> list[str]:
    options = {
        "Dir::Etc::SourceList": paths.APT / "sources.list",
        "Dir::Etc::SourceParts": "/dev/null",
        "Dir::State::Lists": paths.APT / "lists",
        "Dir::Cache": paths.APT / "cache",
        "Acquire::IndexTargets::deb::DEP-11::DefaultEnabled": "false",
        "APT::Sandbox::User": "root" if os.geteuid() == 0 else "",
    }
    return [part for key, value in options.items() for part in ("-o", f"{key}={value}")]


def _mirrors() -> tuple[str, str | None]:
    """(Debian archive, Debian security archive or None) as the machine's own sources name them."""
    uris = []
    etc = Path("/etc/apt")
    for source in [etc / "sources.list", *sorted((etc / "sources.list.d").glob("*"))]:
        if not source.is_file():
            continue
        for line in source.read_text().splitlines():
            one_line = re.match(r"\s*deb\s+(?:\[[^]]*\]\s*)?(\S+)\s", line)
            if one_line:
                uris.append(one_line[1])
            elif line.startswith("URIs:"):
                uris.extend(line.split()[1:])
    archive = next((u for u in uris if re.search(r"/debian/?$", u)), None)
    if archive is None:
        raise SystemExit("no Debian archive among the machine's package sources; the kernels come from there")
    return archive, next((u for u in uris if re.search(r"/debian-security/?$", u)), None)
