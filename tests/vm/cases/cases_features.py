"""What a host can ask of a namespace beside reading and writing: Verify, Copy, Compare, write protection, reservations, and
the ANA states of two ways to it."""

from pathlib import Path

from cases.allow import RECONNECT
from cases.registry import FARSIDE, case
from guest import nvmecli
from guest.fio import MIB, Running
from guest.nvmecli import nvme, nvme_json
from guest.shell import at_least, equal, eventually, read, run, sh, true
from guest.target import NQN, Subsystem, endpoint


def fill(disk: str, block: int, byte: int, count=1) -> None:
    with open(disk, "r+b", buffering=0) as device:
        device.seek(block * 4096)
        device.write(bytes([byte]) * 4096 * count)
    sh("blockdev", "--flushbufs", disk)


def content(disk: str, block: int) -> int:
    """The byte that fills a block; read past the page cache."""
    done = run("dd", f"if={disk}", "bs=4096", "count=1", f"skip={block}", "iflag=direct", "status=none", check=False)
    found = set(done.stdout.encode("latin-1", "replace"))
    equal(f"different bytes in block {block}", len(found), 1)
    return found.pop()


@case("all", providers=FARSIDE)
def verify_copy_and_write_protection_by_the_tools(lab):
    target = lab.serve(Subsystem(NQN + "disk1", [lab.namespace(size=64 * MIB, block_size=4096)]))
    controller = lab.connect(target)
    disk = controller.disk()
    fill(disk, 0, 0x41)
    fill(disk, 9, 0x42)
    nvme("verify", disk, "-s", 0, "-c", 9)
    nvme("copy", disk, "-d", 100, "-s", "9,0", "-b", "0,0")
    equal("copied blocks", (content(disk, 100), content(disk, 101)), (0x42, 0x41))
    over = run("nvme", "copy", disk, "-d", 100, "-s", "100", "-b", "0", check=False)
    true(f"a copy onto itself is refused ({over.stdout}{over.stderr})", over.returncode != 0)
    name = disk.rpartition("/")[2]
    nvme("set-feature", controller.device, "-n", 1, "-f", "0x84", "-v", 1)
    eventually("the kernel takes the disk as read-only", lambda: read(f"/sys/block/{name}/ro") == "1")
    said = run("dd", "if=/dev/zero", f"of={disk}", "bs=4096", "count=1", "oflag=direct", check=False)
    true(f"a write is refused ({said.stderr})", said.returncode != 0)
    nvme("set-feature", controller.device, "-n", 1, "-f", "0x84", "-v", 0)
    eventually("the disk can be written again", lambda: read(f"/sys/block/{name}/ro") == "0")
    fill(disk, 1, 0x43)
    equal("block 1", content(disk, 1), 0x43)


def report(disk: str) -> dict:
    return nvme_json("resv-report", disk, "-e")


@case("all", providers=FARSIDE, timeout=180, allow=RECONNECT)
def reservations_by_the_tools_survive_a_killed_target(lab):
    state = Path("/run/scratch/state")
    target = lab.serve(Subsystem(NQN + "disk1", [lab.namespace(size=64 * MIB)]), state_dir=str(state))
    disk = lab.connect(target, ctrl_loss_tmo=60, reconnect_delay=1).disk()
    for rtype in range(1, 7):
        nvme("resv-register", disk, "-k", "0xabc", "-r", 0)
        nvme("resv-acquire", disk, "-c", "0xabc", "-t", rtype, "-a", 0)
        found = report(disk)
        equal("type in the report", found["rtype"], rtype)
        equal("registrants", len(found["regctlext"]), 1)
        equal("key", int(str(found["regctlext"][0]["rkey"]), 0), 0xABC)
        nvme("resv-release", disk, "-c", "0xabc", "-t", rtype, "-a", 0)
        nvme("resv-register", disk, "-c", "0xabc", "-r", 1)
    equal("registrants at the end", len(report(disk).get("regctlext", [])), 0)
    refused = run("nvme", "resv-acquire", disk, "-c", "0x1", "-t", "1", "-a", "2", "-p", "0x2", check=False)
    true(f"preempt and abort without a registration is refused ({refused.stdout}{refused.stderr})", refused.returncode != 0)
    nvme("resv-register", disk, "-k", "0xabc", "-r", 0, "-p", 3)
    nvme("resv-acquire", disk, "-c", "0xabc", "-t", 2, "-a", 0)
    target.kill()
    target.start()
    eventually("the host is back", lambda: nvmecli.controllers()[0].live(), 60)
    found = report(disk)
    equal("after SIGKILL: type, persistence", (found["rtype"], found["ptpls"]), (2, 1))
    fill(disk, 0, 0x44)
    nvme("resv-release", disk, "-c", "0xabc", "-t", 2, "-a", 1)


def path_state(controller) -> str:
    """ANA state of the path of namespace 1 through a controller."""
    found = list(Path(f"/sys/class/nvme/{controller.name}").glob("nvme*c*n1/ana_state"))
    return read(found[0]) if found else ""


def path_ios(controller) -> int:
    stat = next(Path(f"/sys/class/nvme/{controller.name}").glob("nvme*c*n1/stat"))
    fields = read(stat).split()
    return int(fields[0]) + int(fields[4])


@case("all", providers=FARSIDE, timeout=240)
def multipath_follows_the_ana_states_under_verified_io(lab):
    target = lab.serve(Subsystem(NQN + "disk1", [lab.namespace(size=64 * MIB)]), start=False)
    second = endpoint(target.address, 4421)
    plain = target.config() + f'[[listener]]\naddress = "{second}"\n'
    first = endpoint(target.address, 4420)

    def config(*states: str) -> str:
        tables = "".join(
            f'[[subsystem.ana]]\ngroup = 1\nlistener = "{address}"\nstate = "{state}"\n'
            for address, state in zip((first, second), states)
        )
        return plain.replace("[[subsystem.namespace]]", tables + "[[subsystem.namespace]]", 1)

    target.config = lambda: config("optimized", "optimized")
    socket = Path("/run/scratch/control.sock")
    target.arguments = ["--control", socket]
    target.start()
    paths = [lab.connect(target), nvmecli.connect(target.subsystems[0].nqn, target.address, 4421, 2)]
    disk = paths[0].disk()
    load = Running(
        "walk", filename=disk, rw="randwrite", bs="4k", size=32 * MIB, iodepth=8, verify="crc32c", do_verify=1,
        verify_backlog=256, time_based=1, runtime=60, continue_on_error="none",
    )  # fmt: skip
    lab.undo(load.stop)
    words = {"non-optimized": "non-optimized", "persistent-loss": "persistent-loss"}
    for states in (
        ("optimized", "non-optimized"),
        ("non-optimized", "optimized"),
        ("inaccessible", "optimized"),
        ("change", "optimized"),
        ("optimized", "inaccessible"),
        ("optimized", "persistent-loss"),
        ("optimized", "optimized"),
    ):
        file = lab.case_folder / "states.toml"
        file.write_text(config(*states))
        done = run(lab.binary, "ctl", "--control", socket, "apply", file, check=False)
        equal(f"exit status of ctl apply ({done.stdout}{done.stderr})", done.returncode, 0)
        for path, state in zip(paths, states):
            wanted = words.get(state, state)
            eventually(f"{path.name} is {wanted}", lambda path=path, wanted=wanted: path_state(path) == wanted)
        if "optimized" in states and states != ("optimized", "optimized"):
            used = paths[states.index("optimized")]
            before = path_ios(used)
            eventually(f"I/O goes through {used.name}", lambda used=used, before=before: path_ios(used) > before + 20)
        true("fio still runs", load.running())
    done = load.wait(120)
    equal("errors of fio", done.errors(), 0)
    at_least("bytes written", done.bytes("write"), MIB)
