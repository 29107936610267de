"""In-band authentication (DH-HMAC-CHAP) with the kernel's host: every hash function and group, both directions, wrong and
missing secrets, and secrets that change under I/O."""

from pathlib import Path

from cases.registry import FARSIDE, case
from guest import nvmecli
from guest.control import SOCKET, Control
from guest.fio import MIB, ended_well, fio, verified_load
from guest.nvmecli import nvme
from guest.shell import Skip, equal, eventually, read, true, write
from guest.target import NQN, Subsystem, toml_value

HOST = "nqn.2014-08.org.nvmexpress:uuid:0d7a6a0e-4f6c-4f0a-9a49-6a3f5b1b7c02"
HOST_ID = "0d7a6a0e-4f6c-4f0a-9a49-6a3f5b1b7c02"
FOLDER = Path("/run/scratch/keys")
GROUPS = ("null", "ffdhe2048", "ffdhe3072", "ffdhe4096", "ffdhe6144", "ffdhe8192")
# What two small processors of a guest compute in no time.
QUICK = ["ffdhe2048"]

AUTHENTICATED = (
    (r"nvme nvme\d+: qid \d+: authenticated", "the host says so"),
    (r"nvme nvme\d+: qid \d+: (auth|controller auth|no key|authentication).*", "the host says how it goes"),
    (r"nvme nvme\d+: re-authentication (done|failed).*", "the host was given another secret"),
)
REFUSED = (
    *AUTHENTICATED,
    (r"nvme nvme\d+: Connect.*", "the host reports the refusal that the case asks for"),
    (r"nvme nvme\d+: failed to connect queue: 0 ret=.*", "the host reports the refusal that the case asks for"),
)


def secret(hmac: int, name: str) -> tuple[str, Path]:
    """A new secret, and the file that farside reads it from."""
    said = nvme("gen-dhchap-key", "-m", hmac, "-l", {0: 32, 1: 32, 2: 48, 3: 64}[hmac], "-n", HOST).strip()
    true(f"a secret ({said})", said.startswith("DHHC-1:"))
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / name
    path.write_text(said + "\n")
    path.chmod(0o600)
    return said, path


def needs_host_support() -> None:
    options = Path("/dev/nvme-fabrics").read_text()
    if "dhchap_secret" not in options:
        raise Skip("this kernel's host has no in-band authentication (CONFIG_NVME_HOST_AUTH)")


def asking(lab, **keys):
    """A target that asks the host for its secret."""
    target = lab.serve(Subsystem(NQN + "disk1", [lab.namespace(size=64 * MIB)]), start=False)
    plain = target.config()

    def config(**keys) -> str:
        table = f'[[subsystem.host]]\nnqn = "{HOST}"\n'
        table += "".join(f"{key} = {toml_value(value if isinstance(value, list) else str(value))}\n" for key, value in keys.items())
        return plain.replace("[[subsystem.namespace]]", table + "[[subsystem.namespace]]", 1)

    target.config = lambda: config(**keys)
    target.asking = config
    target.arguments = ["--control", SOCKET]
    target.start()
    return target


def connect(lab, target, key: str, **more) -> nvmecli.Controller:
    return lab.connect(target, io_queues=1, hostnqn=HOST, hostid=HOST_ID, dhchap_secret=key, **more)


@case(providers=FARSIDE, timeout=400, allow=AUTHENTICATED)
def every_hash_and_group_authenticates_on_every_queue_both_ways(lab):
    needs_host_support()
    key, file = secret(1, "host")
    other, other_file = secret(2, "controller")
    target = asking(lab, dhchap_key=file, dhchap_controller_key=other_file)
    control = Control()
    both = {"dhchap_ctrl_secret": other}
    # Larger groups take a guest's processor seconds for each queue: one of each is enough.
    pairs = [("sha256", group, both) for group in GROUPS] + [("sha384", "null", {}), ("sha512", "ffdhe2048", {})]
    for hash, group, more in pairs:
        asked = {"dhchap_hashes": [hash], "dhchap_groups": [group]}
        control.ask("apply", config=target.asking(dhchap_key=file, dhchap_controller_key=other_file, **asked))
        before = control.counters()["authentications"]
        controller = connect(lab, target, key, **more)
        queues = control.counters()["authentications"] - before
        equal(f"queues authenticated with {hash} and {group}: the admin queue and one for I/O", queues, 2)
        controller.disk()
        controller.disconnect()
    for hmac in (0, 2, 3):
        key, file = secret(hmac, f"host{hmac}")
        control.ask("apply", config=target.asking(dhchap_key=file, dhchap_groups=QUICK))
        connect(lab, target, key).disconnect()


@case(providers=FARSIDE, timeout=180, allow=REFUSED)
def wrong_and_missing_secrets_are_refused(lab):
    needs_host_support()
    key, file = secret(1, "host")
    wrong, _ = secret(1, "wrong")
    target = asking(lab, dhchap_key=file, dhchap_groups=QUICK)
    nqn = target.subsystems[0].nqn
    who = {"hostnqn": HOST, "hostid": HOST_ID}
    nvmecli.connect_is_refused(nqn, target.address, **who)
    nvmecli.connect_is_refused(nqn, target.address, dhchap_secret=wrong, **who)
    # The target has no secret of its own to prove.
    nvmecli.connect_is_refused(nqn, target.address, dhchap_secret=key, dhchap_ctrl_secret=wrong, **who)
    equal("authentications", Control().counters()["authentications"], 0)
    connect(lab, target, key).disconnect()
    log = target.log()
    true("no secret is in the target's log", key.split(":")[2] not in log and wrong.split(":")[2] not in log)


@case(providers=FARSIDE, timeout=240, allow=AUTHENTICATED)
def secrets_change_under_verified_io(lab):
    needs_host_support()
    key, file = secret(1, "host")
    target = asking(lab, dhchap_key=file, dhchap_groups=QUICK)
    control = Control()
    controller = connect(lab, target, key)
    load = verified_load(lab, controller.disk())
    authentications = lambda: control.counters()["authentications"]  # noqa: E731
    for turn in range(3):
        before = authentications()
        # The same file: it is read again.
        key, _ = secret(1, "host")
        control.ask("apply", config=target.asking(dhchap_key=file, dhchap_groups=QUICK))
        write(controller.sysfs / "dhchap_secret", key)
        equal("the host's secret", read(controller.sysfs / "dhchap_secret").strip(), key)
        eventually(f"turn {turn}: both queues have authenticated again", lambda: authentications() == before + 2, 60)
        true("the controller was live all the time", controller.live())
    ended_well(load)


@case(providers=FARSIDE)
def a_host_that_knows_no_authentication_connects_where_none_is_asked(lab):
    """Also the kernel that is built without it: another host of the same subsystem has a secret."""
    target = lab.serve(Subsystem(NQN + "disk1", [lab.namespace(size=64 * MIB)]), start=False)
    key, file = secret(1, "host")
    table = f'allow_any_host = true\n[[subsystem.host]]\nnqn = "{HOST}"\ndhchap_key = "{file}"\n'
    text = target.config().replace("[[subsystem.namespace]]", table + "[[subsystem.namespace]]", 1)
    target.config = lambda: text
    target.arguments = ["--control", SOCKET]
    target.start()
    controller = lab.connect(target)
    fio("plain", filename=controller.disk(), rw="randwrite", bs="4k", size=4 * MIB, verify="crc32c")
    equal("authentications", Control().counters()["authentications"], 0)
