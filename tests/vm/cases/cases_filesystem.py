"""File systems on the disk: made, filled, checked after a reconnect, and trimmed."""

import os
from pathlib import Path

from cases.registry import case
from guest.fio import MIB
from guest.shell import at_most, equal, sh, true, write
from guest.target import NQN, Subsystem

MOUNT = Path("/run/mnt")
#: a tree of many small files that every machine of ours has
TREE = Path("/usr/include/linux")


def checksums(folder: Path) -> list[str]:
    listing = sh("sh", "-c", f"cd {folder} && find . -type f -print0 | sort -z | xargs -0 sha256sum", timeout=120)
    return listing.splitlines()


def _survives(lab, make, check):
    namespace = lab.namespace(size=512 * MIB, block_size=4096)
    target = lab.serve(Subsystem(NQN + "disk1", [namespace]))
    controller = lab.connect(target)
    disk = controller.disk()
    sh(*make, disk, timeout=120)
    MOUNT.mkdir(exist_ok=True)
    lab.undo(lambda: MOUNT.is_mount() and sh("umount", MOUNT))
    sh("mount", disk, MOUNT)
    sh("sh", "-c", f"tar -C {TREE} -cf - . | tar -C {MOUNT} -xf -", timeout=180)
    sh("sync", "-f", MOUNT, timeout=120)
    before = checksums(TREE)
    true("the tree has many files", len(before) > 300)
    sh("umount", MOUNT)
    controller.disconnect()
    write("/proc/sys/vm/drop_caches", 3)

    controller = lab.connect(target)
    disk = controller.disk()
    sh(*check, disk, timeout=120)
    sh("mount", disk, MOUNT)
    equal("checksums after the reconnect", checksums(MOUNT), before)
    sh("umount", MOUNT)


@case(timeout=300)
def ext4_holds_a_source_tree_over_a_reconnect(lab):
    _survives(lab, ["mkfs.ext4", "-q", "-F"], ["e2fsck", "-f", "-n"])


@case(timeout=300)
def xfs_holds_a_source_tree_over_a_reconnect(lab):
    _survives(lab, ["mkfs.xfs", "-q", "-f"], ["xfs_repair", "-n"])


@case(timeout=240)
def fstrim_frees_the_blocks_of_a_sparse_backing_file(lab):
    namespace = lab.namespace(size=512 * MIB, block_size=4096)
    controller = lab.connect(lab.serve(Subsystem(NQN + "disk1", [namespace])))
    disk = controller.disk()
    sh("mkfs.ext4", "-q", "-F", disk)
    MOUNT.mkdir(exist_ok=True)
    lab.undo(lambda: MOUNT.is_mount() and sh("umount", MOUNT))
    sh("mount", disk, MOUNT)
    sh("dd", "if=/dev/zero", f"of={MOUNT}/big", "bs=1M", "count=96", "status=none", "conv=fsync", timeout=150)
    full = allocated(namespace.path)
    true("the file takes the room of what was written", full >= 96 * MIB)
    (MOUNT / "big").unlink()
    sh("sync", "-f", MOUNT)
    sh("fstrim", MOUNT, timeout=60)
    sh("umount", MOUNT)
    os.sync()
    at_most("bytes allocated after fstrim", allocated(namespace.path), full - 90 * MIB)


def allocated(path) -> int:
    return os.stat(path).st_blocks * 512
