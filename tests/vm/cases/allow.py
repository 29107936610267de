"""Kernel messages that a case may cause on purpose: (pattern, reason) by scenario.

Each was seen with the kernel's own target in the same scenario, unless it says otherwise. What every case may
print is in `machine/dmesg.py`.
"""

RESET = (
    (r"nvme nvme\d+: resetting controller", "the case asks for a reset"),
    (r"block nvme\S+: no usable path - requeuing I/O", "multipath holds what udev reads until the reset is done"),
    (r"(I/O|recoverable transport) error, dev nvme\d+c\d+n\d+,", "a command on the path that went; multipath sends it again"),
    (r"nvme\S+: .*\(sct 0x3 / sc 0x7[01]\)", "aborted with the connection; multipath sends it again"),
)

REFUSED = (
    (r"nvmet: connect request for invalid subsystem", "the kernel's target refuses, as it should"),
    (r"nvmet: connect by host \S+ for subsystem \S+ not allowed", "the kernel's target refuses, as it should"),
    (r"nvme nvme\d+: Connect Invalid Data Parameter", "the host reports the refusal that the case asks for"),
    (r"nvme nvme\d+: Connect rejected: status 8 \(invalid service ID\)", "nobody listens on that port"),
    (r"nvme nvme\d+: Connect rejected: status 28 \(consumer defined\)", "nobody listens on that address of the port"),
    (r"nvme nvme\d+: Connect for subsystem \S+ is not allowed, hostnqn:", "the host is not on the list"),
    (r"nvme nvme\d+: failed to connect queue: 0 ret=", "the host reports the refusal that the case asks for"),
    (r"nvme nvme\d+: rdma connection establishment failed \(-104\)", "nobody listens where the case connects to"),
)

RECONNECT = (
    *RESET,
    (r"nvme nvme\d+: starting error recovery", "the case takes the target away"),
    (r"nvme nvme\d+: (Reconnecting in|Failed reconnect attempt)", "the case takes the target away"),
    (r"nvme nvme\d+: (RECV|SEND|MEMREG|REG_MR|LOCAL_INV|INV_RKEY)\b.* failed with status", "flushed work"),
    (r"nvme nvme\d+: rdma (connection|resolution).* failed", "the case takes the target away"),
    (r"nvme nvme\d+: Connect rejected: status (8|28|10)", "the case takes the target away"),
    (r"nvme nvme\d+: (failed to connect queue|Connect command failed)", "the case takes the target away"),
    (r"nvme nvme\d+: failed nvme_keep_alive_end_io", "the case takes the target away"),
    (r"nvme nvme\d+: I/O tag \d+ .*(timeout|QID)", "a command that the target did not answer before it went"),
    (r"nvme nvme\d+: Property Set error", "the shutdown notice to a target that is gone"),
    (
        # Errors of the host itself: negative, or 370h to 372h (a path that went).
        r"nvme nvme\d+: ((Property Get error|Failed to get ANA log):|Identify \w+ failed|[Rr]eading (CAP|VS) failed"
        r"|Could not set queue count) ?\(?(-\d+|88[0-2])\b",
        "the connection went while the host set it up",
    ),
    (r"nvme nvme\d+: Failed to configure AEN", "the connection went while the host set it up"),
    (r"nvme nvme\d+: long keepalive RTT", "a keep alive that went with the target ends when rxe has given up on it"),
    (r"nvme nvme\d+: queue \d+: timeout", "a command that the target did not answer before it went"),
    (r"nvmet: ctrl \d+ (fatal error occurred|keep-alive timer)", "the kernel's target noticed"),
    (r"nvmet_rdma: ", "the kernel's target noticed"),
)
