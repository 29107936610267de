"""Programs of this repository besides farside itself, on a stock kernel: the verbs provider's own tests on rdma_rxe, and the
example appliance with a kernel host."""

import os
import re
import signal
from pathlib import Path

from cases.registry import FARSIDE, case
from guest import network
from guest.fio import MIB, fio
from guest.shell import at_least, equal, eventually, modprobe, read, run, sh, sha256, true, write
from guest.target import FarsideTarget, Subsystem

APPLIANCE_NQN = "nqn.2026-11.io.farside:appliance"

#: what the verbs provider's tests may leave out, a reason in each
LEFT_OUT_WITHOUT_A_BOND = {"FARSIDE_TEST_FAILOVER=bond0/veth3 would allow to make a bond's other slave the active one"}

WRONG_ON_PURPOSE = (
    (r"rxe4: qp#\d+ (make_send_cqe|do_complete): non-flush error status = \d+", "the tests use wrong keys and break connections"),
)


def rust_tests(lab, program, *names, wrapper=(), **environment) -> tuple[int, str]:
    """Runs tests of ours that cargo built; how many passed, and all that they said."""
    argv = [lab.program(program), *names, "--test-threads=1", "--nocapture"]
    done = run(*wrapper, "env", *(f"{key}={value}" for key, value in environment.items()), *argv, check=False, timeout=240)
    (lab.case_folder / f"{program}-{len(names)}.log").write_text(done.stdout + "\n--\n" + done.stderr)
    said = done.stdout + done.stderr
    failed = re.findall(r"^thread '(.*)' .*panicked at.*\n.*", said, re.MULTILINE)
    equal(f"exit status of {program} ({failed or said[-800:]})", done.returncode, 0)
    result = re.search(r"^test result: ok\. (\d+) passed; 0 failed; 0 ignored", done.stdout, re.MULTILINE)
    true(f"{program} prints its result: {done.stdout[-300:]!r}", result)
    return int(result[1]), said


def verbs_pair(lab, *names, **environment) -> tuple[int, set]:
    """Runs the verbs provider's tests; how many passed, and what they said they skipped."""
    passed, said = rust_tests(lab, "verbs_pair", *names, **environment)
    return passed, set(re.findall(r"SKIPPED: (.*)", said))


def veth(lab, name: str) -> str:
    """A pair of interfaces `name` and `name`p, both up; returns the first."""
    sh("ip", "link", "add", name, "type", "veth", "peer", "name", f"{name}p")
    lab.undo(run, "ip", "link", "delete", name, check=False)
    for link in (name, f"{name}p"):
        sh("ip", "link", "set", link, "up", "mtu", network.MTU)
    return name


def rxe(lab, name: str, link: str, address: str) -> None:
    """The tests take the lowest address that there is, so this one is to be lower than the lab's own."""
    sh("ip", "addr", "add", f"{address}/24", "dev", link)
    network.add_rxe(name, link, address)
    lab.undo(lambda: sh("rdma", "link", "delete", name) if f"link {name}/" in sh("rdma", "link") else None)


@case(providers=("verbs",), timeout=300, programs=("verbs_pair",), allow=WRONG_ON_PURPOSE)
def the_verbs_provider_passes_its_own_tests_on_rxe(lab):
    """Every operation, events, storms, and a device that is removed and added again three times."""
    link = veth(lab, "veth4")
    sh("ip", "-6", "addr", "add", "fd07::1/64", "dev", link, "nodad")
    rxe(lab, "rxe4", link, "10.77.0.1")
    passed, skipped = verbs_pair(lab, FARSIDE_TEST_REMOVE=f"rxe4/{link}")
    at_least("tests that passed", passed, 15)
    equal("what was left out", skipped, LEFT_OUT_WITHOUT_A_BOND)


@case(providers=("verbs",), timeout=120, programs=("verbs_pair",))
def an_address_that_a_bond_changes_ends_listeners_and_connections(lab):
    modprobe("bonding")
    slaves = [veth(lab, name) for name in ("veth6", "veth8")]
    sh("ip", "link", "add", "bond7", "type", "bond", "mode", "active-backup", "fail_over_mac", "active", "miimon", 100)
    lab.undo(run, "ip", "link", "delete", "bond7", check=False)
    for slave in slaves:
        sh("ip", "link", "set", slave, "down")
        sh("ip", "link", "set", slave, "master", "bond7")
    sh("ip", "link", "set", "bond7", "up", "mtu", network.MTU)
    write("/sys/class/net/bond7/bonding/active_slave", slaves[0])
    rxe(lab, "rxe7", "bond7", "10.76.0.1")
    name = "a_changed_address_ends_listeners_and_connections"
    passed, skipped = verbs_pair(lab, name, FARSIDE_TEST_FAILOVER=f"bond7/{slaves[1]}")
    equal("tests that passed, and what was left out", (passed, skipped), (1, set()))
    equal("the active slave", read("/sys/class/net/bond7/bonding/active_slave"), slaves[1])


@case(providers=("soft",), timeout=300, programs=("process",))
def four_hosts_of_large_writes_overflow_no_socket_at_the_stock_limit(lab):
    """1 MiB at queue depth 32 from each, over loopback in the guest, with the limit that was stock before 6.18."""
    limit = Path("/proc/sys/net/core/rmem_max")
    lab.undo(write, limit, read(limit))
    write(limit, 212992)
    name = "four_hosts_of_large_writes_overflow_no_socket_at_the_stock_limit"
    alone = ("unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")  # rdma_rxe has the port here
    passed, said = rust_tests(lab, "process", name, "--ignored", wrapper=alone)
    equal("tests that passed", passed, 1)
    true("drops were counted for the target and four hosts", re.search(r"drops: \[(Some\(0\)(, )?){5}\]", said))


@case(providers=FARSIDE, programs=("appliance",))
def the_example_appliance_serves_a_kernel_host(lab):
    """Built on the public API alone: a disk, a frozen copy of it that takes no writes, and trim that gives blocks back."""
    target = FarsideTarget(
        lab.program("appliance"), lab.provider, [Subsystem(APPLIANCE_NQN, [])], [lab.address], folder=lab.case_folder
    )
    lab.targets.append(target)
    target.launch(f"{lab.address}:4420", lab.provider)
    target.wait_serving()
    controller = lab.connect(target)
    disk, frozen = controller.disk(1), controller.disk(2)
    size = 16 * MIB
    load = {"rw": "randwrite", "bs": "16k", "size": size, "iodepth": 16, "verify": "crc32c"}
    fio("first", filename=disk, **load).moved_exactly(write=size, read=size)
    first = sha256(disk, length=size, direct=True)
    target.signal(signal.SIGUSR1)
    eventually("the appliance froze the disk", lambda: f"frozen with {size // 4096} blocks" in target.log())
    equal("checksum of the frozen disk", sha256(frozen, length=size, direct=True), first)
    equal("the frozen disk is read-only", read(f"/sys/block/{Path(frozen).name}/ro"), "1")
    done = run("dd", "if=/dev/zero", f"of={frozen}", "bs=4k", "count=1", "oflag=direct", check=False)
    true(f"a write to the frozen disk fails: {done.stderr}", done.returncode != 0)
    fio("second", filename=disk, randseed=7, **load).moved_exactly(write=size, read=size)
    true("the disk has changed", sha256(disk, length=size, direct=True) != first)
    sh("blkdiscard", disk)
    equal("bytes of the disk after trim that are not zero", _nonzero(disk, size), 0)
    equal("checksum of the frozen disk", sha256(frozen, length=size, direct=True), first)
    controller.disconnect()
    target.terminate()
    true("every block was given back", "stopped with 0 blocks" in target.log())


def _nonzero(disk: str, length: int) -> int:
    reader = os.open(disk, os.O_RDONLY)
    try:
        found = 0
        while length:
            piece = os.read(reader, min(length, MIB))
            found += len(piece) - piece.count(0)
            length -= len(piece)
        return found
    finally:
        os.close(reader)
