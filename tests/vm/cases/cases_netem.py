"""A bad network between two farside ends: every byte stays right, without a reconnect, and not too slowly.

Target and host are the software provider in two name spaces; netem acts on what arrives at either end.
"""

import time

from cases.registry import case
from guest import network
from guest.fio import KIB, MIB
from guest.host import HostRun
from guest.netem import Netem
from guest.shell import at_least, at_most, equal, eventually, quick, true
from guest.target import NQN, Namespace, Subsystem

#: small operations, many at a time, and large ones, each of many packets
LOADS = ((4 * KIB, 32), (128 * KIB, 8))
#: percent of the packets that get lost -> the share of the lossless speed that must be left
LEAST_SHARE = {0: 1, 0.1: 0.70, 1: 0.30, 5: 0.08}
ROUNDS = 3
#: connections of one load: discovery, admin, I/O
CONNECTIONS = 3
#: ACK timeout 17 (0.54 s), 7 retries, each of which may take twice as long
RETRY_BUDGET = 8 * 2 * 4.096e-6 * 2**17


class Ends:
    """A target in one name space, hosts in the other, and the network between them."""

    def __init__(self, lab):
        self.lab = lab
        pair = network.native_pair()
        pair.__enter__()
        lab.undo(pair.__exit__, None, None, None)
        self.arrivals = [Netem("east0", network.EAST), Netem("west0", network.WEST)]
        subsystem = Subsystem(NQN + "disk1", [Namespace(1, "memory", None, 64 * MIB, 512)])
        self.target = lab.serve(subsystem, addresses=[network.WEST_V4], start=False)
        self.target.netns = network.WEST
        self.target.start()
        lab.undo(self.target.stop)  # before its name space goes

    def netem(self, options: str) -> None:
        for arrival in self.arrivals:
            arrival.set(options)

    def drops(self) -> int:
        """Packets that netem dropped so far, at both ends; at each at least one."""
        counts = [arrival.counters()["drops"] for arrival in self.arrivals]
        at_least("packets that netem dropped, at either end", min(counts), 1)
        return sum(counts)

    def start(self, size: int, depth: int, seconds: float, span=None, keep_alive=5) -> HostRun:
        return self.lab.host(
            "bench", self.target.address, "--rw", "randrw", "--bs", size, "--iodepth", depth, "--size", span or 128 * size,
            "--runtime", seconds, "--keep-alive", keep_alive, "--verify", netns=network.EAST,
        )  # fmt: skip

    def load(self, size: int, depth: int, seconds=5.0, span=None):
        """A load whose every byte is checked: (bytes per second, the whole answer, the host's counters)."""
        before = self.connections()
        run = self.start(size, depth, seconds, span)
        done = checked(run)
        equal("connections of the load", self.connections() - before, CONNECTIONS)
        return done["read"]["bytes_per_second"] + done["write"]["bytes_per_second"], done, run.counters()

    def connections(self) -> int:
        return self.target.figures().accepted


def checked(run: HostRun) -> dict:
    """The answer of a load that had no error, and whose every byte was right."""
    done = run.wait(120)
    equal("errors of the load", (done["read"]["errors"], done["write"]["errors"]), (0, 0))
    at_least("blocks verified", done["verified_blocks"], 1)
    return done


@case(list="all", providers=("soft",), timeout=300)
def loss_costs_speed_but_no_connection_and_no_byte(lab):
    """Rounds of each loss in turn, and sums over them, as the machine may be busier in one round than in another."""
    ends = Ends(lab)
    for size, depth in LOADS:
        moved = dict.fromkeys(LEAST_SHARE, 0.0)
        dropped = dict(moved)
        for _ in range(ROUNDS):
            for percent in LEAST_SHARE:
                ends.netem(f"loss {percent}%" if percent else "")
                speed, _, counters = ends.load(size, depth, 2)
                moved[percent] += speed
                if percent:
                    dropped[percent] += ends.drops()
                print(f"{size} bytes at depth {depth}, {percent} % lost: {speed / MIB:.1f} MiB/s; {counters}", flush=True)
        for percent, least in LEAST_SHARE.items():
            at_least(f"packets that netem dropped at {percent} %", dropped[percent], 5 if percent else 0)
            what = f"share of the lossless speed, {size} bytes at depth {depth}, {percent} % lost"
            at_least(what, moved[percent] / moved[0], least)


@case(list="all", providers=("soft",), timeout=240)
def duplicates_reordering_delay_and_a_slow_link_change_no_byte(lab):
    ends = Ends(lab)
    for size, depth in LOADS:
        ends.netem("duplicate 1%")
        _, _, counters = ends.load(size, depth, 3)
        at_least("packets that the host got twice", counters["duplicates"] + counters["ghosts"], 1)
        ends.netem("delay 2ms reorder 5%")
        _, _, counters = ends.load(size, depth, 3)
        at_least("signs of another order", counters["sequence_naks_sent"] + counters["duplicates"], 1)
        ends.netem("delay 10ms")
        _, done, _ = ends.load(size, depth, 3, 2 * depth * size)
        for way in ("read", "write"):
            at_least(f"least nanoseconds of a {way}", done[way]["latency_ns"]["min"], 20_000_000)
        ends.netem("rate 100mbit")
        speed, _, _ = ends.load(size, depth, 3)
        at_most("bytes per second over a link of 100 Mbit/s in each direction", speed, 2 * 100e6 / 8)
        for arrival in ends.arrivals:
            counters = arrival.counters()
            at_least(f"packets through netem to {arrival.link}", counters["packets"], 100)
            equal("packets that netem was not to drop", counters["drops"], 0)
    ends.target.stop()
    equal("queue pairs of the target that failed", ends.target.counters()["qp_errors"], 0)


@case(list="all", providers=("soft",), timeout=180)
def a_blackhole_of_5_s_heals(lab):
    """Nothing arrives at either end for 5 s, which the retry budget of 8.6 s covers; a slow machine must not make more of it."""
    ends = Ends(lab)
    before = ends.connections()
    ends.netem("loss 0%")
    run = ends.start(*LOADS[0], 15, keep_alive=20)
    eventually("the load runs", lambda: ends.connections() == before + CONNECTIONS, 10, 0.5)
    switches = [arrival.switch() for arrival in ends.arrivals]
    time.sleep(3)
    begun = time.monotonic()
    for options, seconds in (("loss 100%", 5), ("loss 0%", 0)):
        for switch in switches:
            switch.change(options)
        time.sleep(seconds)
    lasted = time.monotonic() - begun
    for switch in switches:
        switch.close()
    print(f"the blackhole lasted {lasted:.2f} s", flush=True)
    at_most("seconds that the blackhole lasted", lasted, RETRY_BUDGET - 0.6)
    ends.drops()
    done = checked(run)
    longest = max(done[way]["latency_ns"]["max"] for way in ("read", "write"))
    at_least("the longest nanoseconds of an operation", longest, 4.5e9)
    # Retransmissions come at least as often as the ACK timeout passes.
    at_most("the longest nanoseconds of an operation", longest, (lasted + 4 * 4.096e-6 * 2**17) * 1e9)
    equal("connections of the load", ends.connections() - before, CONNECTIONS)
    counters = run.counters()
    print(f"host: {counters}", flush=True)
    at_least("times that the target was silent for too long", counters["timeouts"], 2)


@case(list="all", providers=("soft",), timeout=180)
def a_blackhole_that_stays_ends_queue_pair_and_association_in_time(lab):
    ends = Ends(lab)
    # The host's queue pair: within the retry budget, and not before half of it.
    run = ends.start(*LOADS[0], 60, keep_alive=30)
    time.sleep(3)
    true("the load runs", run.running())
    begun = time.monotonic()
    ends.netem("loss 100%")
    said = run.fails()
    seconds = time.monotonic() - begun
    at_least("seconds until the queue pair failed", seconds, RETRY_BUDGET / 2)
    quick("until the queue pair failed", seconds, RETRY_BUDGET + 1)
    true(f"the host says why: {said[-400:]!r}", "retry counter exceeded" in said)
    ends.drops()
    ends.netem("")
    # The association: by its keep-alive of 2 s, which the target lets pass twice.
    expired = ends.target.log().count("keep alive expired")
    run = ends.start(*LOADS[0], 60, keep_alive=2)
    time.sleep(3)
    true("the load runs", run.running())
    ends.netem("loss 100%")
    begun = time.monotonic()
    eventually("the target ends the association", lambda: ends.target.log().count("keep alive expired") > expired, 8)
    at_least("seconds until the keep-alive expired", time.monotonic() - begun, 2)
    run.fails()
    ends.drops()
    ends.netem("")
    ends.load(*LOADS[0], 2)
