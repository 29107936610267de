"""Judges the guest's kernel log: a kernel's trace is always a failure, a warning must be on the list below.

Each entry of the list is a message that the same scenario prints whoever the target is (seen with the kernel's own
target, unless it says otherwise), with the reason. A case may allow more for itself alone.
"""

import re

#: worse than this many lines are never ours to judge; kernel level 4 is a warning
WARNING = 4

TRACES = re.compile(
    r"BUG:|WARNING:|Oops|KASAN|UBSAN|general protection fault|kernel panic|Kernel panic|Call Trace"
    r"|soft lockup|hard LOCKUP|rcu.*(stall|self-detected)|blocked for more than|refcount_t|list_(add|del) corruption"
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

ALLOWED_EVERYWHERE = (
    (r"nvme\d*n?\d*: rescanning namespaces", "the host read its namespace list"),
    (r"Removing ctrl: NQN", "a disconnect that was asked for"),
    (r"new ctrl: NQN", "a connect that was asked for"),
    (r"block device autoloading is deprecated", "udev opened the node of a disk that was just disconnected"),
    (r"nvme\d+n\d+: no available path - failing I/O", "udev still read the disk when it was disconnected"),
    (r"Buffer I/O error on dev nvme\d+n\d+, .*async page read", "udev still read the disk when it was disconnected"),
)


def judge(lines: list, allow=()) -> list[str]:
    """The lines that make a case fail, out of (level, text) pairs."""
    allowed = [re.compile(pattern) for pattern, _ in (*ALLOWED_ALWAYS, *ALLOWED_EVERYWHERE, *allow)]
    bad = []
    for level, text in lines:
        if any(pattern.search(text) for pattern in allowed):
            continue
        if level <= WARNING or TRACES.search(text):
            bad.append(text)
    return bad


def traces(text: str) -> list[str]:
    """Lines of a console log that only a kernel in trouble prints."""
    return [line.strip() for line in text.splitlines() if TRACES.search(line)]


def format_lines(lines: list) -> str:
    return "".join(f"<{level}>{text}\n" for level, text in lines)
