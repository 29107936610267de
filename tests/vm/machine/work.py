"""What there is to do: a case with the setting that it runs in."""

import re
from dataclasses import dataclass

from cases.allow import RECONNECT
from cases.registry import NETWORKS, Case
from machine import dmesg


#: seconds without a processor after which cases get a second try; rxe gives up on acknowledgements within one or two
STANDSTILL = 1.0
#: what a pause can bring about: something took too long
TOO_LATE = re.compile(r"^(in guest \w+: )?(\w+: )?(not within|no end (after|within)|seconds |fio \w+: no end)")


@dataclass(frozen=True)
class Work:
    """A case, and where its target runs."""

    case: Case
    provider: str
    network: str = NETWORKS[0]

    @property
    def setting(self) -> str:
        """As it stands in the report: `soft`, `soft/ipv6`."""
        return self.provider if self.network == NETWORKS[0] else f"{self.provider}/{self.network}"


def standstill(message: str, bad: list[str], stalled: float) -> str | None:
    """Why a case that failed gets a second try: its guest stood still, and that alone can be the cause, as nothing was late or lost but
    time and connections. A kernel's trace, a wrong byte, count or status is a failure whatever else happened."""
    late = not message or TOO_LATE.search(message)
    lost = [re.compile(pattern) for pattern, _ in RECONNECT]
    if stalled <= STANDSTILL or not late or any(dmesg.TRACES.search(line) for line in bad):
        return None
    if not all(any(pattern.search(line) for pattern in lost) for line in bad):
        return None
    return f"the guest stood still for {stalled:.1f} s"
