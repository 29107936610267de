"""What can stand behind a namespace, and that nothing is served twice."""

import errno
import hashlib
import os
import re
from pathlib import Path

from cases.registry import EVERYWHERE, FARSIDE, case
from guest.expected import fields
from guest.fio import KIB, MIB, fio
from guest.nvmecli import controllers, disconnect_all, nvme_json
from guest.shell import equal, eventually, modprobe, read, run, sh, sha256, true
from guest.target import NQN, Namespace, Subsystem, endpoint

O_DIRECT = 0o40000


def open_flags(pid: int, path) -> list[int]:
    """Flags of each descriptor that a process holds on a file."""
    flags = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            same = os.path.samestat(entry.stat(), os.stat(path))
        except OSError:
            continue
        if same:
            info = Path(f"/proc/{pid}/fdinfo/{entry.name}").read_text()
            flags.append(int(re.search(r"flags:\s+(\d+)", info)[1], 8))
    return flags


def verified(lab, namespace: Namespace, size=16 * MIB):
    """Serves one namespace, writes and verifies `size` bytes through the host; returns target and disk."""
    target = lab.serve(Subsystem(NQN + "disk1", [namespace]))
    controller = lab.connect(target)
    disk = controller.disk()
    fio("backend", filename=disk, rw="randwrite", bs="8k", size=size, iodepth=16, verify="crc32c").moved_exactly(
        write=size, read=size
    )
    return target, disk


@case(providers=FARSIDE)
def a_file_is_opened_for_direct_io_where_its_file_system_can(lab):
    namespace = lab.namespace(size=32 * MIB)
    target, disk = verified(lab, namespace)
    flags = open_flags(target.pid, namespace.path)
    true("the file is open", flags)
    true("with O_DIRECT", any(f & O_DIRECT for f in flags))
    equal("checksum of the file", sha256(namespace.path, length=32 * MIB), sha256(disk, length=32 * MIB, direct=True))


@case(providers=FARSIDE)
def a_file_system_without_direct_io_is_served_buffered_and_said_so(lab):
    folder = Path("/run/ramfs")
    folder.mkdir(exist_ok=True)
    sh("mount", "-t", "ramfs", "none", folder)
    lab.undo(sh, "umount", folder)
    path = folder / "disk.img"
    path.touch()
    os.truncate(path, 32 * MIB)
    namespace = Namespace(1, "file", path, 32 * MIB)
    target, disk = verified(lab, namespace)
    true("no descriptor has O_DIRECT", not any(f & O_DIRECT for f in open_flags(target.pid, path)))
    true("the start-up text says that it is buffered", re.search(r"buffered|page cache", target.log(), re.IGNORECASE))
    equal("checksum of the file", sha256(path, length=32 * MIB), sha256(disk, length=32 * MIB, direct=True))
    disconnect_all()
    target.stop()  # before the file system is taken away


@case(providers=EVERYWHERE)
def a_loop_block_device_is_served_with_its_own_block_size(lab):
    modprobe("loop")
    path = lab.file(64 * MIB)
    loop = sh("losetup", "--find", "--show", "--direct-io=on", "--sector-size", 4096, path).strip()
    lab.undo(sh, "losetup", "-d", loop)
    namespace = Namespace(1, "device", Path(loop), 64 * MIB, 4096)
    target, disk = verified(lab, namespace)
    name = disk.rpartition("/")[2]
    equal("size", int(Path(f"/sys/block/{name}/size").read_text()) * 512, 64 * MIB)
    equal("logical block size", int(Path(f"/sys/block/{name}/queue/logical_block_size").read_text()), 4096)
    host_side = sha256(disk, length=64 * MIB, direct=True)
    if lab.is_farside:
        equal("error of a second exclusive open", exclusive_open_error(loop), errno.EBUSY)
    disconnect_all()
    target.stop()
    equal("checksum of the file behind the loop device", sha256(path, length=64 * MIB), host_side)


SCSI_DISK = (
    (r"scsi_debug:sdebug_driver_probe: scsi_debug: trim poll_queues", "scsi_debug, when it is loaded"),
    (r"scsi \S+: Power-on or device reset occurred", "a SCSI disk that is new"),
)


@case(providers=FARSIDE, allow=SCSI_DISK)
def the_sizes_that_a_device_prefers_reach_the_host(lab):
    """A SCSI disk of the kernel's own, in memory: blocks of 4 KiB inside, transfers in units of 8 and best of 32 KiB, and
    UNMAP in units of 16 KiB."""
    sh(
        "modprobe", "scsi_debug", "dev_size_mb=64", "sector_size=512", "physblk_exp=3", "opt_xferlen_exp=4", "opt_blks=64",
        "lbpu=1", "unmap_granularity=32",
    )  # fmt: skip
    lab.undo(lambda: eventually("scsi_debug is gone", lambda: run("modprobe", "-r", "scsi_debug", check=False).returncode == 0))
    modprobe("sd_mod")
    device = eventually("the SCSI disk is there", lambda: next(iter(SCSI_DEBUG.glob(DEBUG_DISK)), None))
    names, wanted = ("minimum_io_size", "optimal_io_size", "discard_granularity"), (8 * KIB, 32 * KIB, 16 * KIB)

    def sizes() -> tuple:
        try:
            return tuple(int(read(device / "queue" / name)) for name in names)
        except OSError:  # its driver is still being loaded
            return ()

    eventually(f"the SCSI disk has the sizes {wanted}", lambda: sizes() == wanted)
    path = Path("/dev") / device.name
    eventually(f"{path} is there", path.exists)
    target, disk = verified(lab, Namespace(1, "device", path, 64 * MIB), 2 * MIB)
    got = nvme_json("id-ns", disk)
    true("the fields count (NSFEAT bit 4)", got["nsfeat"] >> 4 & 1)
    # Zero's-based counts of blocks.
    fields("id-ns", got, {"npwg": 15, "npwa": 15, "npdg": 31, "npda": 31, "nows": 63})
    queue = Path(f"/sys/block/{disk.rpartition('/')[2]}/queue")
    seen = tuple(int(read(queue / name)) for name in ("minimum_io_size", "optimal_io_size"))
    equal("minimum and optimal I/O sizes of the host's disk", seen, (8 * KIB, 32 * KIB))
    disconnect_all()
    target.stop()


#: the disk of the first adapter, in sysfs
SCSI_DEBUG = Path("/sys/devices/pseudo_0")
DEBUG_DISK = "adapter*/host*/target*/*/block/sd*"


def exclusive_open_error(path) -> int:
    try:
        os.close(os.open(path, os.O_RDWR | os.O_EXCL))
        return 0
    except OSError as error:
        return error.errno


@case()
def memory_holds_what_was_written(lab):
    target, disk = verified(lab, Namespace(1, "memory", None, 64 * MIB))
    equal("size", int(Path(f"/sys/block/{disk.rpartition('/')[2]}/size").read_text()) * 512, 64 * MIB)


@case()
def null_takes_writes_and_reads_zeroes(lab):
    target = lab.serve(Subsystem(NQN + "disk1", [Namespace(1, "null", None, 2**40)]))
    disk = lab.connect(target).disk()
    equal("size", int(Path(f"/sys/block/{disk.rpartition('/')[2]}/size").read_text()) * 512, 2**40)
    fio("null", filename=disk, rw="write", bs="128k", size=32 * MIB, iodepth=8).moved_exactly(write=32 * MIB)
    done = fio("null", filename=disk, rw="randread", bs="4k", size=8 * MIB, iodepth=32)
    done.moved_exactly(read=8 * MIB)
    zeroes = hashlib.sha256(bytes(8 * MIB)).hexdigest()
    equal("checksum of what was written", sha256(disk, length=8 * MIB, direct=True), zeroes)


@case(providers=FARSIDE)
def a_file_or_device_is_not_served_twice(lab):
    namespace = lab.namespace(size=32 * MIB)
    first, disk = verified(lab, namespace, 4 * MIB)
    before = sha256(disk, length=32 * MIB, direct=True)
    refused_start(lab, "--file", namespace.path, "--listen", endpoint(lab.address, 4430), names=str(namespace.path))
    loop = sh("losetup", "--find", "--show", "--direct-io=on", lab.file(32 * MIB)).strip()
    lab.undo(sh, "losetup", "-d", loop)
    subsystem = Subsystem(NQN + "disk2", [Namespace(1, "device", Path(loop), 32 * MIB)])
    second = lab.serve(subsystem, addresses=[lab.second_address()], port=4421)
    lab.undo(second.stop)
    refused_start(lab, "--device", loop, "--listen", endpoint(lab.address, 4430), names=loop)
    equal("the first disk is as it was", sha256(disk, length=32 * MIB, direct=True), before)
    true("both targets run", first.running and second.running)


@case(providers=FARSIDE)
def the_quick_form_makes_the_file_and_prints_a_connect_line_that_works(lab):
    """What the quick start says, typed as it is printed."""
    path = Path("/run/scratch/quick.img")
    target = lab.serve(start=False)
    target.launch(
        "serve", "--file", path, "--size", "64M", "--listen", endpoint(lab.address, 4420), "--provider", lab.provider
    )
    line = target.wait_serving()
    start_up_table(lab, target.log(), path, line)
    command = line[line.index("nvme connect") :].strip().strip("`").split()
    equal("size of the new file", path.stat().st_size, 64 * MIB)
    sh(*command)
    (controller,) = controllers()
    fio("quick", filename=controller.disk(), rw="randwrite", bs="4k", size=4 * MIB, iodepth=8, verify="crc32c")


def start_up_table(lab, said: str, path: Path, connect: str) -> None:
    """What is served, where, over which device and GID, the memory used, and what to type."""
    where = endpoint(lab.address, 4420)
    nqn = connect.rpartition(" ")[2]
    device = "rxe0" if lab.provider == "verbs" else "udp/veth1"
    gid = re.escape(f"::ffff:{lab.address}" if lab.provider == "verbs" else lab.address)
    for line in (
        rf"subsystem +{re.escape(nqn)}",
        rf"namespace +1 +{path} +64 MiB \(512 B blocks\) +uuid [0-9a-f-]{{36}}",
        rf"listener +{re.escape(where)} +{device} +GID {gid} \(RoCE v2\) +path MTU 4096",
        rf"memory +\d+ MiB registered, \d+ reactors, provider {lab.provider}",
        rf"connect +nvme connect -t rdma -a {re.escape(lab.address)} -s 4420 -n {re.escape(nqn)}",
    ):
        found = re.findall(rf"^{line}$", said, re.MULTILINE)
        equal(f"lines of the start-up table like {line!r} in {said!r}", len(found), 1)
    registered = int(re.search(r"memory +(\d+) MiB registered", said)[1])
    reactors = int(re.search(r"(\d+) reactors", said)[1])
    # README, "Memory": the defaults for each reactor.
    true(f"the memory is that of {reactors} reactors: {registered} MiB", 64 <= registered / reactors <= 128)


def refused_start(lab, *argv, names: str, say: str = "") -> str:
    """A start that must end with status 2 and one line that names the object; returns the line."""
    command = [str(lab.binary), "serve", *map(str, argv)]
    if "--provider" not in command:
        command += ["--provider", lab.provider]
    done = run(*command, check=False, timeout=20, netns=lab.netns)
    said = (done.stderr + done.stdout).strip()
    equal(f"exit status (it said {said!r})", done.returncode, 2)
    equal(f"lines of the message {said!r}", len(done.stderr.strip().splitlines()), 1)
    true(f"the message names {names!r}: {said!r}", names in said)
    true(f"the message says {say!r}: {said!r}", say.lower() in said.lower())
    return said
