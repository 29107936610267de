"""Kernel messages that a case may cause on purpose: (pattern, reason) by scenario.

Each was seen with the kernel's own target in the same scenario, unless it says otherwise. What every case may
print is in `machine/dmesg.py`.
"""

RESET = ((r"nvme nvme\d+: resetting controller", "the case asks for a reset"),)

REFUSED = (
    (r"nvmet: connect request for invalid subsystem", "the kernel's target refuses, as it should"),
    (r"nvmet: connect by host \S+ for subsystem \S+ not allowed", "the kernel's target refuses, as it should"),
    (r"nvme nvme\d+: Connect Invalid Data Parameter", "the host reports the refusal that the case asks for"),
    (r"nvme nvme\d+: Connect rejected: status 8 \(invalid service ID\)", "nobody listens on that port"),
    (r"nvme nvme\d+: Connect for subsystem \S+ is not allowed, hostnqn:", "the host is not on the list"),
    (r"nvme nvme\d+: failed to connect queue: 0 ret=", "the host reports the refusal that the case asks for"),
)
