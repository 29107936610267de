"""In-band authentication (DH-HMAC-CHAP) with the kernel's host: every hash function and group, both directions, wrong and
missing secrets, and secrets that change under I/O."""

import json
from pathlib import Path

from cases.registry import FARSIDE, case
from guest import nvmecli
from guest.fio import MIB, Running
from guest.nvmecli import nvme
from guest.shell import Skip, equal, eventually, read, run, true, write
from guest.target import NQN, Subsystem, toml_value

HOST = "nqn.2014-08.org.nvmexpress:uuid:0d7a6a0e-4f6c-4f0a-9a49-6a3f5b1b7c02"
HOST_ID = "0d7a6a0e-4f6c-4f0a-9a49-6a3f5b1b7c02"
FOLDER = Path("/run/scratch/keys")
SOCKET = Path("/run/scratch/control.sock")
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


def apply(lab, target, **keys) -> None:
    file = FOLDER / "wanted.toml"
    file.write_text(target.asking(**keys))
    done = run(lab.binary, "ctl", "--control", SOCKET, "apply", file, check=False)
    equal(f"exit status of ctl apply ({done.stdout}{done.stderr})", done.returncode, 0)


def authenticated(lab) -> int:
    done = run(lab.binary, "ctl", "--control", SOCKET, "--json", "status")
    return json.loads(done.stdout)["counters"]["authentications"]


def connect(lab, target, key: str, **more) -> nvmecli.Controller:
    return lab.connect(target, hostnqn=HOST, hostid=HOST_ID, dhchap_secret=key, **more)


@case("all", providers=FARSIDE, timeout=400, allow=AUTHENTICATED)
def every_hash_and_group_authenticates_on_every_queue_both_ways(lab):
    needs_host_support()
    key, file = secret(1, "host")
    other, other_file = secret(2, "controller")
    target = asking(lab, dhchap_key=file, dhchap_controller_key=other_file)
    pairs = [("sha256", group) for group in GROUPS] + [("sha384", "null"), ("sha512", "ffdhe2048")]
    for hash, group in pairs:
        apply(
            lab, target, dhchap_key=file, dhchap_controller_key=other_file,
            dhchap_hashes=[hash], dhchap_groups=[group],
        )  # fmt: skip
        for more in ({}, {"dhchap_ctrl_secret": other}):
            before = authenticated(lab)
            controller = connect(lab, target, key, **more)
            equal(f"queues authenticated with {hash} and {group}", authenticated(lab) - before, 3)
            controller.disk()
            controller.disconnect()
    for hmac in (0, 2, 3):
        key, file = secret(hmac, f"host{hmac}")
        apply(lab, target, dhchap_key=file)
        connect(lab, target, key).disconnect()


@case("all", providers=FARSIDE, timeout=180, allow=REFUSED)
def wrong_and_missing_secrets_are_refused(lab):
    needs_host_support()
    key, file = secret(1, "host")
    wrong, _ = secret(1, "wrong")
    target = asking(lab, dhchap_key=file)
    nqn = target.subsystems[0].nqn
    who = {"hostnqn": HOST, "hostid": HOST_ID}
    nvmecli.connect_is_refused(nqn, target.address, **who)
    nvmecli.connect_is_refused(nqn, target.address, dhchap_secret=wrong, **who)
    # The target has no secret of its own to prove.
    nvmecli.connect_is_refused(nqn, target.address, dhchap_secret=key, dhchap_ctrl_secret=wrong, **who)
    equal("queues authenticated", authenticated(lab) > 0, False)
    connect(lab, target, key).disconnect()
    log = target.log()
    true("no secret is in the target's log", key.split(":")[2] not in log and wrong.split(":")[2] not in log)


@case("all", providers=FARSIDE, timeout=240, allow=AUTHENTICATED)
def secrets_change_under_verified_io(lab):
    needs_host_support()
    key, file = secret(1, "host")
    target = asking(lab, dhchap_key=file, dhchap_groups=QUICK)
    controller = connect(lab, target, key)
    load = Running(
        "rotate", filename=controller.disk(), rw="randwrite", bs="4k", size=32 * MIB, iodepth=8, verify="crc32c",
        do_verify=1, verify_backlog=256, time_based=1, runtime=40,
    )  # fmt: skip
    lab.undo(load.stop)
    for turn in range(3):
        key, file = secret(1, f"host-{turn}")
        before = authenticated(lab)
        apply(lab, target, dhchap_key=file, dhchap_groups=QUICK)
        write(controller.sysfs / "dhchap_secret", key)
        equal("the host's secret", read(controller.sysfs / "dhchap_secret").strip(), key)
        eventually(f"turn {turn}: all queues have authenticated again", lambda: authenticated(lab) == before + 3, 30)
        true("the controller was live all the time", controller.live())
        true("fio still runs", load.running())
    equal("errors of fio", load.wait(120).errors(), 0)
