"""A bad network between the kernel's host on rdma_rxe and farside's software provider.

rxe ends a queue pair that has to retransmit (see `tests/README.md`), so at 1 % and more the host connects again and again; what
must hold is that no byte is wrong and that it is never farside that gives up a connection.
"""

from cases.allow import RECONNECT
from cases.registry import case
from guest import network
from guest.fio import KIB, MIB, Running, fio
from guest.netem import Netem
from guest.shell import at_least, equal, eventually, sh, sha256
from guest.target import NQN, Subsystem

#: the host tries every second and for ever, as for a path that is known to be bad
PATIENT = {"reconnect_delay": 1, "ctrl_loss_tmo": -1, "keep_alive_tmo": 30}
SIZE = 16 * MIB
ALLOW = (*RECONNECT, (r"nvme_fabrics: ctrl_loss_tmo < 0 will reconnect forever", "the case asks for that"))
#: the connection went while the host was setting it up; 880 is its own host path error (370h)
CUT_SHORT = (
    (r"nvme nvme\d+: Identify namespace failed \(880\)", "lost with the connection"),
    (r"nvme nvme\d+: Identify Descriptors failed \(nsid=1, status=0xfffffffc\)", "lost with the connection"),
    (r"nvme nvme\d+: Failed to configure AEN", "lost with the connection"),
)


class Wire:
    """The veth pair between rxe and the software provider, with netem on what arrives at either end."""

    def __init__(self, lab):
        # Packets cross one by one, or netem would lose a whole batch at a time.
        sh("ip", "link", "set", "veth1", "gso_max_segs", 1, netns=network.NETNS)
        lab.undo(sh, "ip", "link", "set", "veth1", "gso_max_segs", 65535, netns=network.NETNS)
        self.arrivals = []
        for link, netns in (("veth0", None), ("veth1", network.NETNS)):
            self.arrivals.append(Netem(link, netns))
            lab.undo(self.arrivals[-1].remove)

    def set(self, options: str) -> None:
        for arrival in self.arrivals:
            arrival.set(options)

    def drops(self) -> list[int]:
        return [arrival.counters()["drops"] for arrival in self.arrivals]


@case(list="all", providers=("soft",), timeout=240, allow=ALLOW)
def a_packet_in_a_thousand_lost_to_a_kernel_host_is_no_io_error(lab):
    wire = Wire(lab)
    namespace = lab.namespace(size=SIZE)
    target = lab.serve(Subsystem(NQN + "disk1", [namespace]))
    controller = lab.connect(target, io_queues=1, **PATIENT)
    disk = controller.disk()
    # Not io_uring: what it submits while the host has no path comes back as EAGAIN from the host's own block layer, and rxe loses
    # its queue pair, and with it the path, at its first retransmission. libaio waits, and sees errors of the target just as well.
    load = {"filename": disk, "rw": "randread", "bs": 4 * KIB, "iodepth": 32, "time_based": 1, "runtime": 10, "ioengine": "libaio"}
    speeds = []
    for options in ("", "loss 0.1%"):
        wire.set(options)
        done = fio("load", timeout=100, **load)
        speeds.append(done.bytes("read") / done.runtime_ms("read") * 1000 / (4 * KIB))
        print(f"{options or 'no loss'}: {speeds[-1]:.0f} IOPS", flush=True)
    print(f"lost on the way to the host and to us: {wire.drops()}", flush=True)
    at_least("packets that netem dropped", sum(wire.drops()), 1)
    wire.set("")
    eventually("the controller is live", controller.live, 60)
    # Before the target ends: an attempt to reconnect to nobody would take over a minute.
    controller.delete()
    target.stop()
    print(f"target: {target.counters()}", flush=True)


@case(list="all", providers=("soft",), timeout=400, allow=ALLOW + CUT_SHORT)
def loss_to_a_kernel_host_makes_no_byte_wrong_and_we_never_give_up(lab):
    wire = Wire(lab)
    namespace = lab.namespace(size=SIZE)
    target = lab.serve(Subsystem(NQN + "disk1", [namespace]))
    controller = lab.connect(target, io_queues=1, **PATIENT)
    disk = controller.disk()
    for options in ("loss 1%", "loss 5%"):
        wire.set(options)
        job = Running("load", filename=disk, rw="randwrite", bs=16 * KIB, size=SIZE, iodepth=8, verify="crc32c", ioengine="libaio")
        lab.undo(job.stop)
        try:
            job.process.wait(40)
            print(f"{options}: done", flush=True)
        except Exception:  # it is as slow as the host's rxe: what it has left is done without loss
            print(f"{options}: not done after 40 s", flush=True)
        at_least("packets that netem dropped", sum(wire.drops()), 1)
        wire.set("")
        job.wait(100).moved_exactly(write=SIZE, read=SIZE)
        eventually("the controller is live", controller.live, 60)
        same = sha256(disk, length=SIZE, direct=True)
        equal("checksum of the backing file and of the disk", sha256(namespace.path, length=SIZE), same)
    print(f"connections: {target.figures().accepted}", flush=True)
    controller.delete()
    target.stop()
    counters = target.counters()
    print(f"target: {counters}", flush=True)
    equal("queue pairs that failed at our end", counters["qp_errors"], 0)
