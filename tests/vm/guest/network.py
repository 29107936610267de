"""The guest's RDMA network: a veth pair with rxe on one end, and a name space for the software provider on the other.

    first name space: veth0 192.168.77.1, fd77::1 with rxe0    name space `far`: veth1 192.168.77.2, fd77::2

Host and target on one rxe device never touch the wire; on the software provider every packet crosses the pair.
"""

from contextlib import contextmanager
from pathlib import Path

from guest.shell import eventually, modprobe, run, sh

HOST_V4, FAR_V4 = "192.168.77.1", "192.168.77.2"
SECOND_FAR_V4 = "192.168.77.3"
HOST_V6, FAR_V6 = "fd77::1", "fd77::2"
NETNS = "far"
MTU = 4200
#: two more name spaces, for two farside ends without rxe
EAST, WEST = "east", "west"
EAST_V4, WEST_V4 = "192.168.81.1", "192.168.81.2"


def up() -> None:
    """Builds the network once per boot."""
    modprobe("configfs", "nvme-rdma", "rdma_rxe", "rdma_ucm", "veth", "loop")
    if not Path("/sys/kernel/config/nvmet").parent.is_mount():
        run("mount", "-t", "configfs", "none", "/sys/kernel/config", check=False)
    sh("ip", "link", "set", "lo", "up")
    if Path("/sys/class/net/veth0").exists():
        return
    sh("ip", "link", "add", "veth0", "type", "veth", "peer", "name", "veth1")
    sh("ip", "netns", "add", NETNS)
    sh("ip", "link", "set", "veth1", "netns", NETNS)
    raise_link("veth0", HOST_V4, HOST_V6)
    raise_link("veth1", FAR_V4, FAR_V6, netns=NETNS)
    sh("ip", "link", "set", "lo", "up", netns=NETNS)
    add_rxe("rxe0", "veth0", HOST_V4)


def set_mtu(mtu: int) -> None:
    """The MTU of both ends of the pair, and with it the path MTU that rxe0 offers."""
    if Path("/sys/class/net/veth0/mtu").read_text().strip() == str(mtu):
        return
    sh("ip", "link", "set", "veth0", "mtu", mtu)
    sh("ip", "link", "set", "veth1", "mtu", mtu, netns=NETNS)
    path_mtu = 4096 if mtu > 4096 else 1024
    eventually(f"rxe0 has an active MTU of {path_mtu}", lambda: f"active_mtu:\t\t{path_mtu} " in sh("ibv_devinfo", "-d", "rxe0"))


def raise_link(link: str, v4: str, v6: str | None = None, netns=None) -> None:
    """Addresses without duplicate address detection, so that they can be used at once."""
    sh("ip", "link", "set", link, "up", "mtu", MTU, netns=netns)
    sh("ip", "addr", "replace", f"{v4}/24", "dev", link, netns=netns)
    if v6:
        sh("ip", "-6", "addr", "replace", f"{v6}/64", "dev", link, "nodad", netns=netns)


def add_rxe(name: str, link: str, v4: str) -> None:
    """An rxe device that can be bound by address. An address that was there before the link may never show up as a
    GID: it is then taken off and put back."""
    sh("rdma", "link", "add", name, "type", "rxe", "netdev", link)
    wanted = "0000:0000:0000:0000:0000:ffff:" + "{:02x}{:02x}:{:02x}{:02x}".format(*map(int, v4.split(".")))

    def bound() -> bool:
        return wanted in gids(name)

    for _ in range(5):
        try:
            eventually(f"{name} has a GID for {v4}", bound, 2)
            return
        except AssertionError:
            sh("ip", "addr", "del", f"{v4}/24", "dev", link)
            sh("ip", "addr", "add", f"{v4}/24", "dev", link)
    eventually(f"{name} has a GID for {v4}", bound, 2)


def delete_rxe(name: str, timeout=5.0) -> None:
    sh("rdma", "link", "delete", name, timeout=timeout)


def gids(name: str) -> list[str]:
    found = []
    for gid in Path(f"/sys/class/infiniband/{name}/ports/1/gids").glob("*"):
        try:
            found.append(gid.read_text().strip())
        except OSError:
            pass  # an empty slot
    return found


@contextmanager
def native_pair():
    """Two name spaces on a pair of interfaces of their own, `east0` and `west0`, over which packets travel one by one:
    neither interface passes on what the sender wants to have cut later."""
    sh("ip", "link", "add", "east0", "type", "veth", "peer", "name", "west0")
    try:
        for netns, link, v4 in ((EAST, "east0", EAST_V4), (WEST, "west0", WEST_V4)):
            sh("ip", "netns", "add", netns)
            sh("ip", "link", "set", link, "netns", netns)
            sh("ip", "link", "set", link, "gso_max_segs", 1, netns=netns)
            raise_link(link, v4, netns=netns)
        yield
    finally:
        for netns in (EAST, WEST):
            run("ip", "netns", "delete", netns, check=False)
        run("ip", "link", "delete", "east0", check=False)


def add_vlan(identifier: int, v4: str, peer_v4: str | None = None) -> str:
    """A VLAN interface on veth0, and on veth1 when the peer is to have one; rxe0 gets a GID for the address."""
    name = f"veth0.{identifier}"
    sh("ip", "link", "add", "link", "veth0", "name", name, "type", "vlan", "id", identifier)
    sh("ip", "link", "set", name, "up")
    sh("ip", "addr", "add", f"{v4}/24", "dev", name)
    if peer_v4:
        far = f"veth1.{identifier}"
        sh("ip", "link", "add", "link", "veth1", "name", far, "type", "vlan", "id", identifier, netns=NETNS)
        sh("ip", "link", "set", far, "up", netns=NETNS)
        sh("ip", "addr", "add", f"{peer_v4}/24", "dev", far, netns=NETNS)
    return name


def delete_vlan(identifier: int) -> None:
    run("ip", "link", "delete", f"veth0.{identifier}", check=False)
    run("ip", "link", "delete", f"veth1.{identifier}", check=False, netns=NETNS)
