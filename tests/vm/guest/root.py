"""A root file system with a page cache. The one that the guest boots from asks the machine anew for each look at a name and
each page of a program, which under emulation is most of what a short command costs. The machine's files do not change
while a guest runs; what changes (/run, /etc, the shared folder) is the old root's own."""

import os
import subprocess
from pathlib import Path

#: of the device that `machine/guest.py` adds
TAG = "cachedroot"
ROOT = Path("/mnt")
#: folders of the old root that stay as they are, with what is mounted in them
KEPT = ("dev", "etc", "proc", "run", "sys", "tmp", "var")


def enter(shared: Path) -> None:
    """Makes the cached root this process' root. `shared` is the folder that both sides write."""
    options = "ro,version=9p2000.L,trans=virtio,access=any,msize=512000,cache=loose"
    _mount("-t", "9p", "-o", options, TAG, ROOT)
    _keep_modules()
    for folder in KEPT:
        _mount("--rbind", f"/{folder}", ROOT / folder)
    _mount("--bind", shared, ROOT / shared.relative_to("/"))
    here = os.getcwd()
    os.chroot(ROOT)
    os.chdir(here)


def _keep_modules() -> None:
    """The machine has no modules of this kernel: they are linked to from where `modprobe` looks."""
    modules = Path("/lib/modules") / os.uname().release
    upper, work = Path("/run/cachedroot.upper"), Path("/run/cachedroot.work")
    for folder in (upper, work):
        folder.mkdir()
    lib = ROOT / "usr/lib"
    _mount("-t", "overlay", "-o", f"lowerdir={lib},upperdir={upper},workdir={work}", "overlay", lib)
    link = lib / "modules" / modules.name
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(modules.resolve())


def _mount(*argv) -> None:
    subprocess.run(["mount", *map(str, argv)], check=True)
