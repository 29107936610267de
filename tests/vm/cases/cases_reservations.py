"""Reservations between two kernel hosts, by the tools: every type, what it keeps whom from, preemption, hosts that left, and a
target that is killed."""

from pathlib import Path

from cases.allow import RECONNECT
from cases.registry import FARSIDE, case
from guest import nvmecli
from guest.fio import MIB
from guest.nvmecli import nvme, nvme_json
from guest.shell import equal, eventually, run, true
from guest.target import NQN, Subsystem

#: two hosts of one guest need a kernel that does not take their disks for one
TWO_HOSTS = ("nvme_core.multipath=N",)
HOSTS = tuple(f"{digit * 8}-{digit * 4}-4{digit * 3}-8{digit * 3}-{digit * 12}" for digit in "ab")
KEYS = (0xA11CE, 0xB0B)
WRITE_EXCLUSIVE, EXCLUSIVE, WRITE_REGISTRANTS, REGISTRANTS, WRITE_ALL, ALL = range(1, 7)
FOR_REGISTRANTS = (WRITE_REGISTRANTS, REGISTRANTS, WRITE_ALL, ALL)
KEEPS_FROM_READING = (EXCLUSIVE, REGISTRANTS, ALL)
ACQUIRE, PREEMPT, PREEMPT_AND_ABORT = range(3)
REGISTER, UNREGISTER, REPLACE = range(3)
RELEASE, CLEAR = range(2)

CONFLICTS = (
    (r"reservation conflict error, dev nvme\d+n\d+", "a host that the reservation keeps out"),
    (r"nvme\d+n\d+: I/O Cmd\(0x[12]\) @ .* I/O Error \(sct 0x0 / sc 0x83\)", "a host that the reservation keeps out"),
    (r"critical nexus error, dev nvme\d+n\d+", "a host that the reservation keeps out"),
    (r"nvme\d+n\d+: .*[Rr]eservation [Cc]onflict", "a host that the reservation keeps out"),
    (r"Found shared namespace \d+, but multipathing not supported", "the case boots without multipath"),
    (r"Support for shared namespaces without CONFIG_NVME_MULTIPATH", "the case boots without multipath"),
    (
        r"IO command:\w\w has unusual effects:",
        "two hosts share the namespace: 6.12 goes on looking into the effects log of a controller that left",
    ),
    (r"Shared namespace support requires core.nvme_multipath=Y", "the case boots without multipath"),
)


class Registrant:
    """One of the hosts, with its key and its disk."""

    def __init__(self, lab, target, number: int, **options):
        self.key, self.hostid = KEYS[number], HOSTS[number]
        nqn, hostnqn = target.subsystems[0].nqn, f"nqn.2014-08.org.nvmexpress:uuid:{HOSTS[number]}"
        self.connect = lambda: nvmecli.connect_as(hostnqn, self.hostid, nqn, target.address, nr_io_queues=1, **options)
        self.arrive()

    def arrive(self) -> None:
        self.controller = self.connect()
        self.disk = self.controller.disk()

    def register(self, action=REGISTER, key=None, persist: int | None = None) -> None:
        keys = {REGISTER: ["-k", self.key], UNREGISTER: ["-c", self.key], REPLACE: ["-c", self.key, "-k", key]}[action]
        more = [] if persist is None else ["-p", persist]
        nvme("resv-register", self.disk, *keys, "-r", action, *more)
        self.key = key or self.key

    def acquire(self, rtype: int, action=ACQUIRE, other=0, fails=False) -> None:
        argv = ["resv-acquire", self.disk, "-c", self.key, "-p", other, "-t", rtype, "-a", action]
        self._call(argv, fails)

    def release(self, rtype: int, action=RELEASE, fails=False) -> None:
        self._call(["resv-release", self.disk, "-c", self.key, "-t", rtype, "-a", action], fails)

    def _call(self, argv, fails: bool) -> None:
        done = run("nvme", *argv, check=False)
        said = done.stdout + done.stderr
        true(f"{argv} {'is refused' if fails else 'succeeds'} ({said})", (done.returncode != 0) == fails)
        if fails:
            true(f"as a conflict ({said})", "conflict" in said.lower())

    def may(self, write: bool) -> bool:
        ends = ["if=/dev/zero", f"of={self.disk}", "oflag=direct"] if write else [f"if={self.disk}", "of=/dev/null", "iflag=direct"]
        return run("dd", *ends, "bs=4096", "count=1", "status=none", check=False).returncode == 0

    def report(self) -> tuple[int, dict[str, tuple[int, int]]]:
        """Type, and by host its key and whether it holds the reservation."""
        found = nvme_json("resv-report", self.disk, "-e")
        entries = found.get("regctlext", [])
        return found["rtype"], {
            str(one["hostid"]).replace("-", "").lower(): (int(str(one["rkey"]), 0), int(one["rcsts"]) & 1) for one in entries
        }


def reported(host: Registrant) -> str:
    return host.hostid.replace("-", "")


def two_hosts(lab, **options):
    target = lab.serve(Subsystem(NQN + "disk1", [lab.namespace(size=16 * MIB)]), **options)
    return target, *(Registrant(lab, target, number, reconnect_delay=1, ctrl_loss_tmo=60) for number in (0, 1))


def keeps_out(rtype: int, host: Registrant, registered: bool) -> None:
    favoured = registered and rtype in FOR_REGISTRANTS
    equal(f"type {rtype}, registered {registered}: may write", host.may(write=True), favoured)
    equal(f"type {rtype}, registered {registered}: may read", host.may(write=False), favoured or rtype not in KEEPS_FROM_READING)


@case(providers=FARSIDE, timeout=240, append=TWO_HOSTS, allow=CONFLICTS)
def reservations_of_every_type_between_two_hosts(lab):
    _, one, two = two_hosts(lab)
    for rtype in range(WRITE_EXCLUSIVE, ALL + 1):
        one.register()
        one.acquire(rtype)
        true("the holder may write and read", one.may(write=True) and one.may(write=False))
        keeps_out(rtype, two, registered=False)
        two.acquire(rtype, PREEMPT_AND_ABORT, other=one.key, fails=True)
        two.register()
        keeps_out(rtype, two, registered=True)
        of_all = rtype in (WRITE_ALL, ALL)
        equal("report", two.report(), (rtype, {reported(one): (one.key, 1), reported(two): (two.key, int(of_all))}))
        # Who is preempted is registered no more.
        two.acquire(rtype, PREEMPT, other=one.key)
        equal("after a preempt", two.report(), (rtype, {reported(two): (two.key, 1)}))
        keeps_out(rtype, one, registered=False)
        one.register()
        one.acquire(rtype, PREEMPT_AND_ABORT, other=two.key)
        equal("after a preempt and abort", one.report(), (rtype, {reported(one): (one.key, 1)}))
        one.release(rtype)
        true("nothing is kept from anybody", two.may(write=True) and two.may(write=False))
        two.register()
        two.acquire(rtype)
        one.release(0, CLEAR)
        equal("after a clear", one.report(), (0, {}))


@case(providers=FARSIDE, timeout=240, append=TWO_HOSTS, allow=(*CONFLICTS, *RECONNECT))
def reservations_of_hosts_that_left_hold_and_survive_a_killed_target(lab):
    target, one, two = two_hosts(lab, state_dir=str(Path("/run/scratch/state")))
    one.register(persist=3)
    one.acquire(WRITE_EXCLUSIVE)
    one.controller.delete()
    keeps_out(WRITE_EXCLUSIVE, two, registered=False)
    held = two.report()
    equal("the host that left holds it", held, (WRITE_EXCLUSIVE, {reported(one): (one.key, 1)}))
    for _ in range(2):
        target.kill()
        target.start()
        eventually("the other host is back", two.controller.live, 60)
        equal("after SIGKILL", two.report(), held)
        keeps_out(WRITE_EXCLUSIVE, two, registered=False)
    one.arrive()
    true("it is still its own", one.may(write=True))
    one.register(REPLACE, key=0xCAFE)
    one.controller.delete()
    two.register()
    two.acquire(REGISTRANTS, PREEMPT_AND_ABORT, other=one.key)
    equal("after a preempt of a host that left", two.report(), (REGISTRANTS, {reported(two): (two.key, 1)}))
    one.arrive()
    keeps_out(REGISTRANTS, one, registered=False)
    one.acquire(REGISTRANTS, PREEMPT_AND_ABORT, other=two.key, fails=True)
    two.register(UNREGISTER)
    equal("the last registration took the reservation along", two.report(), (0, {}))
    true("the disk is anybody's", one.may(write=True))
