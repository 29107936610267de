"""Judges the guest's kernel log: a kernel's trace is always a failure; a warning, and whatever the kernel's NVMe and RDMA parts
say at any level, must be on the lists below.

Each entry of the list is a message that the same scenario prints whoever the target is (seen with the kernel's own
target, unless it says otherwise), with the reason. A case may allow more for itself alone.
"""

import re

#: worse than this many lines are never ours to judge; kernel level 4 is a warning
WARNING = 4

TRACES = re.compile(
    r"BUG:|WARNING:|Oops|KASAN|UBSAN|general protection fault|kernel panic|Kernel panic|Call Trace"
    r"|Out of memory|oom-kill|soft lockup|hard LOCKUP|rcu.*(stall|self-detected)|blocked for more than|refcount_t|list_(add|del) corruption"
)

#: messages of the boot and of the machine, not of what is tested
ALLOWED_ALWAYS = (
    (r"loading out-of-tree module|module verification failed", "stock kernel without our keys"),
    (r"hrtimer: interrupt took", "software emulation is slow"),
    (r"clocksource: |tsc: |TSC ", "software emulation's clock"),
    (r"perf: interrupt took too long", "software emulation is slow"),
    (r"workqueue: \S+ hogged CPU", "software emulation is slow"),
    (r"sched: DL replenish lagged", "software emulation is slow"),
    (r"device-mapper: core: CONFIG_IMA_DISABLE_HTABLE is disabled", "the module says so once, when it is loaded"),
    (r"\d+ callbacks suppressed", "the kernel limits the rate of a message that it counts here"),
    (r"rcu: INFO: rcu_.* detected expedited stalls.*\b0 jiffies", "no stall at all"),
)

#: of a guest that stood still
ALLOWED_AFTER_A_PAUSE = ((r"nvme nvme\d+: long keepalive RTT", "the answer waited with everything else"),)

ALLOWED_EVERYWHERE = (
    (r"nvme\d*n?\d*: rescanning namespaces", "the host read its namespace list"),
    (r"Removing ctrl: NQN", "a disconnect that was asked for"),
    (r"new ctrl: NQN", "a connect that was asked for"),
    (r"block device autoloading is deprecated", "udev opened the node of a disk that was just disconnected"),
    (r"nvme\d+n\d+: no available path - failing I/O", "udev still read the disk when it was disconnected"),
    (r"Buffer I/O error on dev nvme\d+n\d+, .*async page read", "udev still read the disk when it was disconnected"),
    # A request that was never sent: the round trip is counted from an earlier use of its place.
    (r"nvme nvme\d+: long keepalive RTT \(\d{6,} ms\)", "a keep alive that came due while its controller was removed"),
    (r"nvme nvme\d+: failed nvme_keep_alive_end_io error=4", "a keep alive that came due while its controller was removed"),
    (r"Dev nvme\d+n\d+: unable to read RDB block \d+", "the kernel still looked for partitions when the disk was disconnected"),
)

#: whose lines count at every level
OURS = re.compile(r"^(\[[\d.]+\] )?(nvme|block nvme|rdma|rxe|infiniband)")

#: what these say when all is well, at the level of information
ALLOWED_INFORMATION = (
    (r"nvme nvme\d+: creating \d+ I/O queues", "the host connects"),
    (r"nvme nvme\d+: mapped \d+/\d+/\d+ default/read/poll queues", "the host connects"),
    (r"nvme nvme\d+: Successfully reconnected \(\d+ attempts\)", "a case that allows it to recover"),
    (r"nvme nvme\d+: (re-authenticating controller|qid \d+: (controller )?authenticated)", "the host and we know each other"),
    (r"nvme\d+n\d+: detected capacity change from \d+ to \d+", "a namespace was resized"),
    (r"nvmet(_rdma)?: (creating \w+ controller|adding nsid|enabling port)", "the kernel's own target, where a case asks for it"),
    (r"rdma_rxe: (un)?loaded", "the module, once a boot"),
    (r"infiniband rxe\d+: (set active|set down|added )", "a device was made, or its link went"),
)


def judge(lines: list, allow=(), stalled: float = 0.0) -> list[str]:
    """The lines that make a case fail, out of (level, text) pairs; `stalled` is the guest's longest pause in seconds."""
    paused = ALLOWED_AFTER_A_PAUSE if stalled else ()
    allowed = [re.compile(pattern) for pattern, _ in (*ALLOWED_ALWAYS, *ALLOWED_EVERYWHERE, *paused, *allow)]
    information = [re.compile(pattern) for pattern, _ in ALLOWED_INFORMATION]
    bad = []
    for level, text in lines:
        if any(pattern.search(text) for pattern in allowed):
            continue
        if level > WARNING and any(pattern.search(text) for pattern in information):
            continue
        if level <= WARNING or OURS.search(text) or TRACES.search(text):
            bad.append(text)
    return bad


def traces(text: str) -> list[str]:
    """Lines of a console log that only a kernel in trouble prints."""
    return [line.strip() for line in text.splitlines() if TRACES.search(line)]


def format_lines(lines: list) -> str:
    return "".join(f"<{level}>{text}\n" for level, text in lines)
