"""The kernel's NVMe target over RDMA, by configfs: a reference that speaks for the cases, not for farside."""

from pathlib import Path

from guest.shell import modprobe, run, sh, write

ROOT = Path("/sys/kernel/config/nvmet")
NULL = Path("/sys/kernel/config/nullb")

_loops: list[str] = []
_nulls: list[Path] = []


def start(subsystems, addresses, port: int, queue_size: int | None = None) -> None:
    modprobe("nvmet", "nvmet-rdma")
    for subsystem in subsystems:
        _make_subsystem(subsystem)
    for number, address in enumerate(addresses, 1):
        folder = ROOT / "ports" / str(number)
        folder.mkdir()
        write(folder / "addr_trtype", "rdma")
        write(folder / "addr_adrfam", "ipv6" if ":" in address else "ipv4")
        write(folder / "addr_traddr", address)
        write(folder / "addr_trsvcid", port)
        largest = folder / "param_max_queue_size"
        if queue_size and largest.exists():  # older kernels know 128 only
            write(largest, queue_size)
        for subsystem in subsystems:
            (folder / "subsystems" / subsystem.nqn).symlink_to(ROOT / "subsystems" / subsystem.nqn)


def stop() -> None:
    for link in ROOT.glob("ports/*/subsystems/*"):
        link.unlink()
    for port in ROOT.glob("ports/*"):
        port.rmdir()
    for host in ROOT.glob("subsystems/*/allowed_hosts/*"):
        host.unlink()
    for namespace in ROOT.glob("subsystems/*/namespaces/*"):
        write(namespace / "enable", 0)
        namespace.rmdir()
    for folder in [*ROOT.glob("subsystems/*"), *ROOT.glob("hosts/*")]:
        folder.rmdir()
    while _loops:
        run("losetup", "-d", _loops.pop(), check=False)
    while _nulls:
        disk = _nulls.pop()
        write(disk / "power", 0)
        disk.rmdir()


def _make_subsystem(subsystem) -> None:
    folder = ROOT / "subsystems" / subsystem.nqn
    folder.mkdir()
    write(folder / "attr_allow_any_host", 0 if subsystem.hosts else 1)
    if subsystem.serial:
        write(folder / "attr_serial", subsystem.serial)
    for nqn in subsystem.hosts:
        host = ROOT / "hosts" / nqn
        host.mkdir(exist_ok=True)
        (folder / "allowed_hosts" / nqn).symlink_to(host)
    for namespace in subsystem.namespaces:
        entry = folder / "namespaces" / str(namespace.nsid)
        entry.mkdir()
        write(entry / "device_path", _device(namespace))
        if namespace.uuid:
            write(entry / "device_uuid", namespace.uuid)
        write(entry / "enable", 1)


def _device(namespace) -> str:
    """The block device behind a namespace. nvmet takes a file's block size from its file system, so files go
    through a loop device that has the block size asked for."""
    if namespace.kind == "device":
        return str(namespace.path)
    if namespace.kind == "file":
        path = Path(namespace.path)
        if not path.exists():
            path.touch()
        if path.stat().st_size == 0:
            sh("truncate", "-s", namespace.size, path)
        loop = sh("losetup", "--find", "--show", "--direct-io=on", "--sector-size", namespace.block_size, path).strip()
        _loops.append(loop)
        return loop
    modprobe_null()
    disk = NULL / f"far{len(_nulls)}"
    disk.mkdir()
    _nulls.append(disk)
    write(disk / "blocksize", namespace.block_size)
    write(disk / "size", namespace.size // 2**20)
    write(disk / "memory_backed", 1 if namespace.kind == "memory" else 0)
    if namespace.kind == "memory":
        write(disk / "discard", 1)
    write(disk / "power", 1)
    return null_path(disk)


def null_path(disk: Path) -> str:
    """The device of a folder in configfs."""
    named = Path(f"/dev/{disk.name}")  # newer kernels name it after the folder
    return str(named) if named.exists() else f"/dev/nullb{(disk / 'index').read_text().strip()}"


def modprobe_null() -> None:
    if not NULL.exists():
        sh("modprobe", "null_blk", "nr_devices=0")


