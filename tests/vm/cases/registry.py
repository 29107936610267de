"""How a case is declared. Read on both sides: the machine plans with it, the guest runs it.

A case is a function of one argument, the lab (`guest/lab.py`), whose name says the behaviour. A case of two
guests runs on the machine instead and gets a pair (`machine/pair.py`). A case passes by returning.
"""

from dataclasses import dataclass
from typing import Callable

LISTS = ("smoke", "full", "all")
FARSIDE = ("verbs", "soft")
EVERYWHERE = ("verbs", "soft", "nvmet")
#: what the veth pair is like: which address the target has, and the MTU
NETWORKS = ("ipv4", "ipv6", "mtu1500")


@dataclass(frozen=True)
class Case:
    name: str
    topic: str
    function: Callable
    list: str
    providers: tuple[str, ...]
    timeout: int
    guests: int
    #: dmesg lines that this case alone may cause: (pattern, reason)
    allow: tuple[tuple[str, str], ...]
    #: boot with these kernel options; cases of other options get another boot
    append: tuple[str, ...]
    #: what it runs besides farside (`machine/programs.py`)
    programs: tuple[str, ...]
    #: settings beyond those of its list: "soft" on the main kernel, or the series of another kernel with verbs
    also: tuple[str, ...]

    def in_list(self, name: str) -> bool:
        return LISTS.index(self.list) <= LISTS.index(name)


CASES: dict[str, Case] = {}


def case(list="full", providers=EVERYWHERE, timeout=120, guests=1, allow=(), append=(), name=None, programs=(), also=()):
    """Registers a function as a case. `list` is the shortest list that it is in; `name` stands for the function's own
    where one function makes several cases."""

    def register(function):
        topic = function.__module__.removeprefix("cases.cases_")
        called = name or function.__name__
        if called in CASES:
            raise ValueError(f"two cases are called {called}")
        CASES[called] = Case(
            called, topic, function, list, tuple(providers), timeout, guests, tuple(allow), tuple(append),
            tuple(programs), tuple(also),
        )  # fmt: skip
        return function

    return register
