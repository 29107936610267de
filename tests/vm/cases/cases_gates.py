"""What a Linux host refuses in Identify data: one field wrong at a time, by farside's test hook, and the kernel's own message.

The last case proves that the hook alone does not make a host refuse: the same bytes as ever change nothing.
"""

import re
from contextlib import contextmanager

from cases.allow import REFUSED, RESET
from cases.registry import FARSIDE, case
from guest import nvmecli
from guest.fio import KIB, fio
from guest.kmsg import KernelLog
from guest.shell import at_least, at_most, equal, read, sh, tracefs, true, write

#: the kernel's level of a warning
WARNING = 4

#: What a refused controller leaves behind besides the message that is looked for.
END = (*REFUSED, *RESET, (r"nvme nvme\d+: (failed nvme_keep_alive|rdma connection)", "the host gives the controller up"))


#: every message of a gate
MESSAGES: list[str] = []


def overlaid(lab, *bytes_of_identify: str | None):
    """A target with bytes laid over its Identify data, each `CNS:offset:hexadecimal`."""
    target = lab.serve(start=False)
    for given in filter(None, bytes_of_identify):
        target.arguments += ["--test-identify", given]
    target.start()
    return target


def gate(field: str, offset: int, value: str, message: str, *more: str):
    """One wrong field of Identify Controller (CNS 01h): bytes in hexadecimal, and what the kernel says. `more` is laid over
    other fields, where the host looks at this one only with those."""

    MESSAGES.append(message)

    @case(providers=FARSIDE, allow=((message, "the refusal that the case asks for"), *END), name=f"wrong_{field}_is_refused_by_the_host")
    def wrong_field(lab):
        target, log = overlaid(lab, f"1:{offset}:{value}", *more), KernelLog.from_now()
        nvmecli.connect_is_refused(target.subsystems[0].nqn, target.address)
        said = log.close()
        true(f"the kernel says {message!r}, not {said[-600:]!r}", re.search(message, said))

    return wrong_field


gate("cntlid", 78, "fe7f", r"Mismatching cntlid: Connect \d+ vs Identify 32766, rejecting")
gate("kas", 320, "0000", r"keep-alive support is mandatory for fabrics")
gate("sgls", 536, "01001000", r"Mandatory keyed sgls are not supported!")
gate("ioccsz", 1792, "03000000", r"I/O queue command capsule supported size 3 < 4")
gate("iorcsz", 1796, "00000000", r"I/O queue response capsule supported size 0 < 1")
# Asymmetric namespace access (CMIC bit 3) makes the host look at MNAN.
gate("mnan", 540, "00000000", r"Invalid MNAN value 0", "1:76:0b")
gate("icdoff", 1800, "0100", r"icdoff is not supported!")


MAXCMD_0 = r"[Mm]aximum outstanding commands is 0"


@case(providers=FARSIDE, allow=((MAXCMD_0, "what the case asks for"),))
def maxcmd_0_is_noticed_by_the_host(lab):
    """The host says so, and goes on with the depth of the queues."""
    target, log = overlaid(lab, "1:514:0000"), KernelLog.from_now()
    controller = lab.connect(target)
    said = log.close()
    true(f"the kernel says it, not {said[-600:]!r}", re.search(MAXCMD_0, said))
    equal("state", controller.attribute("state"), "live")


# It patches the running kernel, and a virtual machine in a virtual machine was seen to end by that.
@case("all", providers=FARSIDE)
def without_sgls_bit_20_no_data_travel_in_the_capsule(lab):
    """The host then registers memory for a write that else goes along with its command: the calls of `ib_map_mr_sg` count."""
    calls = []
    for given in (None, f"1:536:{SGLS_WITHOUT_OFFSETS}"):
        target = overlaid(lab, given)
        controller = lab.connect(target)
        controller.disk()
        sh("udevadm", "settle")  # who looks for partitions would be counted too
        with probed("ib_map_mr_sg") as count:
            # The character device: nobody looks at it because it was written to.
            done = fio("small", filename=controller.generic(), ioengine="io_uring_cmd", cmd_type="nvme", direct=0, rw="write",
                       bs="4k", size=WRITES * 4 * KIB, iodepth=4)  # fmt: skip
            calls.append(count())
        done.moved_exactly(write=WRITES * 4 * KIB)
        nvmecli.disconnect_all()
        target.stop()
    at_most(f"registrations for {WRITES} writes in capsules", calls[0], WRITES // 8)
    at_least(f"registrations for {WRITES} writes that may not be", calls[1], WRITES)


WRITES = 256
#: SGLs and keyed descriptors (bits 0 and 2), buffers longer than the data (bit 18), no offsets (bit 20); as on the wire
SGLS_WITHOUT_OFFSETS = "05000400"


@contextmanager
def probed(function: str):
    """Counts the calls of a function of the kernel."""
    tracing = tracefs()
    write(tracing / "kprobe_events", f"p:farside/counted {function}")
    write(tracing / "events/farside/counted/enable", 1)

    def count() -> int:
        lines = read(tracing / "kprobe_profile").splitlines()
        return next(int(line.split()[1]) for line in lines if line.split()[0] == "counted")

    try:
        yield count
    finally:
        write(tracing / "events/farside/counted/enable", 0)
        write(tracing / "kprobe_events", "")


#: what the host says of Identify data that it takes all the same
REMARKS = r"clamping down|Firmware bug|outstanding commands|unsupported|Unsupported|not supported|invalid|Invalid|rejecting|ignoring|mandatory"


@case(providers=FARSIDE)
def identify_as_it_is_passes_every_gate(lab):
    # The hook on, with the value that is there anyway: SQES of 64 bytes.
    target, log = overlaid(lab, "1:512:66"), KernelLog.from_now()
    controller = lab.connect(target)
    equal("state", controller.attribute("state"), "live")
    controller.disk()
    lines = log.new()
    log.close()
    said = [text for _, text in lines if "nvme" in text]
    true(f"the host tells of the new controller: {said}", any("new ctrl" in text for text in said))
    wrong = [text for text in said if any(re.search(message, text) for message in (REMARKS, *MESSAGES))]
    equal("what the host says of our defaults", wrong, [])
    equal("messages of warnings and worse", [
        text for level, text in lines
        if level <= WARNING and f"nvme {controller.name}: " in text and "keepalive RTT" not in text
    ], [])
    controller.disconnect()
