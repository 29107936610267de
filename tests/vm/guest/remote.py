"""What the machine calls in either guest of a pair; state lives here between calls, and dies with the guest.

Arguments and results are plain JSON values. The target always serves one subsystem per entry of `subsystems`.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

from guest import network, nvmecli
from guest.fio import OUTLIVES, Running, fio
from guest.lab import Lab, find_disk
from guest.mapped import Stallable
from guest.shell import eventually, modprobe, run, sh, sha256
from guest.target import NQN, Namespace, Subsystem


_jobs: dict[str, Running] = {}
_writers: dict[str, subprocess.Popen] = {}
_targets: list = []
_disk: Stallable | None = None
_address = ""
#: how the MAC addresses of a cable's ends begin
CABLE = "52:54:00:00:00:0"
#: the rxe device over the cable
CABLE_RXE = "rxe1"


def _lab() -> Lab:
    return sys.modules["__main__"].lab()


def up(provider: str, address: str, targets: bool, also: str) -> None:
    """The cable's network interface with an address and an rxe device on it; the lab's own veth pair too. Where targets of the
    software provider are to be, it is in their network name space instead, with an address `also` for a second one."""
    global _address
    _address = address
    modprobe("virtio_net")
    _lab().fresh("pair", provider)
    netns = _lab().netns if targets else None
    if netns and not _cable_of(netns):
        sh("ip", "link", "set", eventually("the cable's interface is there", _cable), "netns", netns)
        for one in (address, also):
            network.raise_link(_cable_of(netns), one, netns=netns)
    elif not netns and not Path(f"/sys/class/infiniband/{CABLE_RXE}").exists():
        link = eventually("the cable's interface is there", _cable)
        network.raise_link(link, address)
        network.add_rxe(CABLE_RXE, link, address)


def _cable_of(netns: str) -> str | None:
    """The cable's interface in a name space."""
    links = json.loads(sh("ip", "-j", "link", netns=netns))
    return next((link["ifname"] for link in links if link.get("address", "").startswith(CABLE)), None)


def reach(address: str) -> None:
    """Waits until the other end answers: the cable is plugged and both ends know each other's address."""
    eventually(f"{address} answers", lambda: run("ping", "-c", 1, "-W", 2, address, check=False).returncode == 0, 30)


def _cable() -> str | None:
    for entry in Path("/sys/class/net").iterdir():
        if (entry / "address").read_text().startswith(CABLE):
            return entry.name
    return None


def identity(nqn: str, host_id: str) -> None:
    """Who this host is in every later connect."""
    Path("/etc/nvme").mkdir(exist_ok=True)
    Path("/etc/nvme/hostnqn").write_text(nqn + "\n")
    Path("/etc/nvme/hostid").write_text(host_id + "\n")


# The target's side.


def serve(subsystems: list, name="disk", port=4420, address="", arguments=(), **options) -> None:
    """`subsystems` is a list of lists of files: {"file": path or null, "size": bytes}, or of devices: {"device": path,
    "size": bytes}; they are called `name`1 and so on.
    `arguments` are further ones of farside. A second target of a guest needs a name and a port of its own."""
    lab = _lab()
    made = []
    for number, files in enumerate(subsystems, 1):
        namespaces = []
        for nsid, entry in enumerate(files, 1):
            kind = "device" if entry.get("device") else "file"
            path = Path(entry[kind]) if entry.get(kind) else lab.file(entry["size"])
            namespaces.append(Namespace(nsid, kind, path, entry["size"], 4096))
        made.append(Subsystem(f"{NQN}{name}{number}", namespaces))
    target = lab.serve(*made, addresses=[address or _address], port=port, start=False, **options)
    _targets.append(target)
    if arguments:
        target.arguments = list(arguments)
    target.start()


def backing_sha256(subsystem=0, namespace=0, length=None) -> str:
    one = _targets[-1].subsystems[subsystem].namespaces[namespace]
    return sha256(one.path, length=length, direct=one.kind == "device")


def stallable_disk(size: int) -> str:
    """A device for the target that can be stalled."""
    global _disk
    _disk = Stallable(size)
    return str(_disk.device)


def disk_stall() -> None:
    _disk.stall()


def disk_resume() -> None:
    _disk.resume()


def disk_written() -> int:
    """Bytes that the target gave to it."""
    return _disk.written()


def target_terminate() -> float:
    return _targets[-1].terminate()


def target_kill() -> None:
    _targets[-1].kill()


def target_start() -> None:
    _targets[-1].start()


def target_running() -> bool:
    return _targets[-1].running


def target_figures() -> dict:
    """What farside says on SIGUSR1; {} of the kernel's target. Written bytes by NQN and by the number of the disk."""
    if not _lab().is_farside:
        return {}
    found = _targets[-1].figures()
    return {
        "controllers": found.controllers, "queues": found.queues, "accepted": found.accepted, "rejected": found.rejected,
        "read": {nqn.removeprefix(NQN): found.bytes_read(nqn, nsid) for nqn, nsid in found.traffic},
        "written": {nqn.removeprefix(NQN): found.written(nqn, nsid) for nqn, nsid in found.traffic},
    }  # fmt: skip


def clear() -> list[str]:
    """Ends what the case left; what could not be ended, and what the targets had to say."""
    global _disk
    for left in (*_jobs.values(), *_writers.values()):
        left.stop() if isinstance(left, Running) else left.kill()
    left = _lab().clear()
    if _disk:
        _disk.remove()
        _disk = None
    for state in (_jobs, _writers, _targets):
        state.clear()
    return left


# The host's side.


def connect(address: str, subsystem=1, io_queues=1, name="disk", port=4420, **options) -> list[str]:
    """[controller, disk]"""
    controller = nvmecli.connect(f"{NQN}{name}{subsystem}", address, port, io_queues=io_queues, **options)
    return [controller.name, controller.disk()]


def connect_timed(address: str, subsystem=1, name="disk", port=4420, **options) -> list:
    """[controller, seconds until it was live]; its disk may come later."""
    begun = time.monotonic()
    controller = nvmecli.connect(f"{NQN}{name}{subsystem}", address, port, io_queues=1, **options)
    return [controller.name, time.monotonic() - begun]


def disk_of(controller: str) -> str:
    return nvmecli.Controller(controller).disk()


def disconnect_all() -> None:
    nvmecli.disconnect_all()


def state(controller: str) -> str:
    return nvmecli.Controller(controller).state


def wait_live(controller: str, seconds: float) -> None:
    eventually(f"{controller} is live", nvmecli.Controller(controller).live, seconds)


def fio_run(name: str, **options) -> dict:
    result = fio(name, timeout=options.pop("timeout", 120), **(OUTLIVES | options))
    return {d: result.bytes(d) for d in ("read", "write", "trim")}


def fio_start(name: str, **options) -> None:
    _jobs[name] = Running(name, **(OUTLIVES | options))


def fio_wait(name: str, seconds: float) -> dict:
    result = _jobs.pop(name).wait(seconds)
    return {d: result.bytes(d) for d in ("read", "write", "trim")}


def fio_running(name: str) -> bool:
    return _jobs[name].running()


def disk_sha256(disk: str, length: int) -> str:
    return sha256(disk, length=length, direct=True)


def netem(options: str) -> None:
    """Delay, loss and so on for what leaves over the cable; empty takes it off."""
    link = _cable()
    modprobe("sch_netem")
    run("tc", "qdisc", "del", "dev", link, "root", check=False)
    if options:
        sh("tc", "qdisc", "add", "dev", link, "root", "netem", *options.split())


def netem_dropped() -> int:
    said = sh("tc", "-s", "qdisc", "show", "dev", _cable(), "root")
    return int(said.partition("dropped ")[2].partition(",")[0])


def link(state: str) -> None:
    sh("ip", "link", "set", _cable(), state)


# Power loss: a disk without a cache on the machine, and a writer that notes what was promised to it.


def power_disk(number: int, make: bool) -> str:
    """Mounts a disk that survives power loss, with a journal that commits by itself once a minute; returns the folder."""
    disk = power_device(number)
    modprobe("ext4")
    folder = Path(f"/run/power{number}")
    folder.mkdir(exist_ok=True)
    if make:
        sh("mkfs.ext4", "-q", "-F", disk)
    sh("mount", "-o", "commit=60", disk, folder)
    return str(folder)


def power_device(number: int) -> str:
    """A disk that survives power loss, as it is."""
    return eventually("the power disk is there", lambda: find_disk(f"disk{number}"))[0]


def sync_power_disk(number: int) -> None:
    sh("sync", "-f", f"/run/power{number}")


def writer_start(name: str, disk: str, mode: str, span: int) -> None:
    """Starts `guest/writer.py`; its notes lie in the shared folder, which outlives every guest."""
    script = Path(__file__).with_name("writer.py")
    notes = _lab().shared / f"{name}.notes"
    errors = open(_lab().shared / f"{name}.err", "wb")
    _writers[name] = subprocess.Popen([sys.executable, script, disk, mode, str(span), notes], stderr=errors)


def writer_noted(name: str) -> int:
    notes = _lab().shared / f"{name}.notes"
    return len(notes.read_text().splitlines()) if notes.exists() else 0


def writer_stop(name: str) -> None:
    _writers[name].kill()


def writer_check(name: str, disk: str) -> dict:
    """Reads every block that was promised: {"promised": blocks, "lost": [block, ..]}."""
    from guest import writer

    return writer.check(disk, _lab().shared / f"{name}.notes")
