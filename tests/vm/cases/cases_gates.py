"""What a Linux host refuses in Identify data: one field wrong at a time, by farside's test hook, and the kernel's own message.

The last case proves that the hook alone does not make a host refuse: the same bytes as ever change nothing.
"""

import re

from cases.allow import REFUSED, RESET
from cases.registry import FARSIDE, case
from guest import nvmecli
from guest.kmsg import KernelLog
from guest.shell import equal, true

#: What a refused controller leaves behind besides the message that is looked for.
END = (*REFUSED, *RESET, (r"nvme nvme\d+: (failed nvme_keep_alive|rdma connection)", "the host gives the controller up"))


def gate(field: str, offset: int, value: str, message: str, *more: str):
    """One wrong field of Identify Controller (CNS 01h): bytes in hexadecimal, and what the kernel says. `more` is laid over
    other fields, where the host looks at this one only with those."""

    @case(providers=FARSIDE, allow=((message, "the refusal that the case asks for"), *END), name=f"wrong_{field}_is_refused_by_the_host")
    def wrong_field(lab):
        target = lab.serve(start=False)
        for wrong in (f"1:{offset}:{value}", *more):
            target.arguments += ["--test-identify", wrong]
        target.start()
        log = KernelLog.from_now()
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


@case(providers=FARSIDE)
def identify_as_it_is_passes_every_gate(lab):
    target = lab.serve(start=False)
    # The hook on, with the value that is there anyway: SQES of 64 bytes.
    target.arguments = ["--test-identify", "1:512:66"]
    target.start()
    controller = lab.connect(target)
    equal("state", controller.attribute("state"), "live")
    controller.disconnect()
