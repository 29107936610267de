"""farside as the host, over either of its providers, of the kernel's own target on rdma_rxe."""

from cases.registry import FARSIDE, case
from guest import network
from guest.fio import KIB, MIB
from guest.shell import at_least, equal, true
from guest.target import NQN, Namespace, NvmetTarget, Subsystem

UUID = "6d1a0a2e-6e51-4c0e-9a8e-1f8f5b1b7c02"


def kernel_target(lab, *subsystems) -> NvmetTarget:
    """nvmet on rxe0, whichever provider the host has."""
    target = NvmetTarget(list(subsystems), [network.HOST_V4], queue_size=256)
    lab.targets.append(target)
    target.start()
    return target


@case(providers=FARSIDE)
def our_host_discovers_and_identifies_the_kernels_target(lab):
    namespaces = [lab.namespace(1, 96 * MIB, 512, uuid=UUID), lab.namespace(3, 160 * MIB, 4096)]
    one, two = Subsystem(NQN + "one", namespaces, serial="KERNEL0001"), Subsystem(NQN + "two", [lab.namespace()])
    target = kernel_target(lab, one, two)
    records = lab.host("discover", target.address).wait()
    found = {r["subnqn"]: r for r in records if r["subtype"] == "subsystem"}
    equal("subsystems in the discovery log", set(found), {one.nqn, two.nqn})
    for record in found.values():
        equal("address", (record["trtype"], record["traddr"], record["trsvcid"]), ("rdma", target.address, "4420"))
    shown = lab.host("identify", target.address, "--nqn", one.nqn).wait()
    equal("subsystem and serial", (shown["subnqn"], shown["serial"]), (one.nqn, "KERNEL0001"))
    sizes = [(n["nsid"], n["bytes"], n["block_size"]) for n in shown["namespaces"]]
    equal("namespaces", sizes, [(1, 96 * MIB, 512), (3, 160 * MIB, 4096)])
    equal("uuid", shown["namespaces"][0]["uuid"], UUID)


#: bytes of one operation, and how many are under way
SHAPES = (
    (512, 1), (512, 128), (4 * KIB, 1), (4 * KIB, 32), (4 * KIB, 128), (16 * KIB, 16), (64 * KIB, 32), (128 * KIB, 1),
    (260 * KIB, 8), (MIB, 1), (MIB, 8), (MIB, 128),
)  # fmt: skip


@case(providers=FARSIDE)
def our_host_says_that_a_queue_is_deeper_than_the_target_has_them(lab):
    target = NvmetTarget([Subsystem(NQN + "disk1", [lab.namespace()])], [network.HOST_V4], queue_size=64)
    lab.targets.append(target)
    target.start()
    said = lab.host("bench", target.address, "--iodepth", 64, "--runtime", 1).fails()
    true(f"it names both: {said[-400:]}", "up to 64 entries, 65 are asked for" in said)


@case(providers=FARSIDE, timeout=300)
def our_host_verifies_io_of_every_size_and_depth_against_the_kernels_target(lab):
    """Half reads, half writes; each read of what was written is checked, and at the end all of it is."""
    target = kernel_target(lab, Subsystem(NQN + "disk1", [Namespace(1, "memory", None, 256 * MIB, 512)]))
    for size, depth in SHAPES:
        span = max(size * depth * 2 if size * depth < 64 * MIB else size * depth, MIB // 2)
        done = lab.host(
            "bench", target.address, "--rw", "randrw", "--bs", size, "--iodepth", depth, "--size", span,
            "--runtime", "1.5", "--verify",
        ).wait()  # fmt: skip
        what = f"at {size} bytes and depth {depth}"
        equal(f"errors {what}", (done["read"]["errors"], done["write"]["errors"]), (0, 0))
        at_least(f"operations {what}", min(done["read"]["operations"], done["write"]["operations"]), 1)
        at_least(f"blocks verified {what}", done["verified_blocks"], 1)
        equal(f"bytes written {what}", done["write"]["bytes"], done["write"]["operations"] * size)
    true("the kernel's target is still there", lab.host("identify", target.address).wait()["namespaces"])
