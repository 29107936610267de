"""netem on what arrives at a link: loss, delay, duplication, reordering, a rate; its own counters prove that it acted.

It stands behind the link's ingress, on an intermediate device (ifb): what leaves over a link may be one large buffer
for many packets (UDP_SEGMENT), which netem would lose as a whole, but what arrives was cut into packets.
"""

import json
import subprocess

from guest.shell import equal, modprobe, run, sh

#: packets that netem may hold: more than any delay or rate here needs
LIMIT = 20000


class Netem:
    """The fault on one link. `limit` of its own, so that it loses nothing that it was not told to lose."""

    def __init__(self, link: str, netns: str | None = None):
        self.link, self.netns, self.ifb = link, netns, f"ifb-{link}"[:15]
        modprobe("ifb", "sch_netem", "sch_ingress", "act_mirred", "cls_matchall")
        sh("ip", "link", "add", self.ifb, "type", "ifb", netns=netns)
        sh("ip", "link", "set", self.ifb, "up", "mtu", 9000, netns=netns)
        self._tc("qdisc", "add", "dev", link, "ingress")
        self._tc("filter", "add", "dev", link, "parent", "ffff:", "protocol", "all", "matchall",
                 "action", "mirred", "egress", "redirect", "dev", self.ifb)  # fmt: skip

    def set(self, options: str) -> None:
        """netem's own words, `loss 1%`; empty for none. The counters begin anew."""
        run("tc", "qdisc", "del", "dev", self.ifb, "root", check=False, netns=self.netns)
        if options:
            self._tc("qdisc", "add", "dev", self.ifb, "root", "netem", "limit", LIMIT, *options.split())

    def switch(self) -> "Switch":
        """For changes that act at once, with the counters going on; netem is there already."""
        return Switch(self)

    def counters(self) -> dict[str, int]:
        """packets (let through), drops"""
        (qdisc,) = json.loads(self._tc("-s", "-j", "qdisc", "show", "dev", self.ifb, "root"))
        return {name: qdisc[name] for name in ("packets", "drops")}

    def remove(self) -> None:
        run("tc", "qdisc", "del", "dev", self.link, "ingress", check=False, netns=self.netns)
        run("ip", "link", "del", self.ifb, check=False, netns=self.netns)

    def _tc(self, *argv) -> str:
        return sh("tc", *argv, netns=self.netns)


class Switch:
    """A tc that waits for its next line: to start one takes an emulated machine more than a second."""

    def __init__(self, netem: Netem):
        self.netem = netem
        words = ["tc", "-batch", "-"]
        if netem.netns:
            words = ["ip", "netns", "exec", netem.netns, *words]
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, text=True)

    def change(self, options: str) -> None:
        self.process.stdin.write(f"qdisc change dev {self.netem.ifb} root netem limit {LIMIT} {options}\n")
        self.process.stdin.flush()

    def close(self) -> None:
        self.process.stdin.close()
        equal("exit status of tc", self.process.wait(10), 0)
