"""What an operator meets: start-up text, and bad configuration in one line."""

import os

from cases.cases_backend import refused_start
from cases.registry import FARSIDE, case
from guest.fio import MIB
from guest.shell import equal, run, true
from guest.target import NQN, endpoint


@case(providers=FARSIDE)
def check_accepts_a_good_configuration_and_starts_nothing(lab):
    target = lab.serve(start=False)
    path = lab.case_folder / "good.toml"
    path.write_text(target.config())
    done = run(lab.binary, "check", path, check=False, timeout=20, netns=lab.netns)
    equal(f"exit status of check ({done.stdout}{done.stderr})", done.returncode, 0)


UUID = "6d1a0a2e-6e51-4c0e-9a8e-1f8f5b1b7c03"

GOOD = """
[[subsystem]]
nqn = "{nqn}disk1"
[[subsystem.namespace]]
nsid = 1
file = "{file}"
size = "16M"
[[listener]]
address = "{listen}"
"""

#: what is wrong -> (text replaced, text put there, and of the one line: where or what it is about, the reason, the remedy)
BAD = {
    "unknown_key": (
        "nsid = 1", "nsid = 1\ncolour = 3", "bad.toml:6: subsystem.namespace.colour: ", "is no key", "known here: nsid, size,",
    ),
    "duplicate_nsid": (
        "[[listener]]", '[[subsystem.namespace]]\nnsid = 1\nmemory = "1M"\n[[listener]]',
        "bad.toml:9: subsystem.namespace.nsid: 1 ", "is there twice", "give each namespace its own",
    ),
    "duplicate_nqn": (
        "[[listener]]",
        '[[subsystem]]\nnqn = "{nqn}disk1"\n[[subsystem.namespace]]\nnsid = 1\nmemory = "1M"\n[[listener]]',
        'bad.toml:9: subsystem.nqn: "{nqn}disk1" ', "is there twice", "choose another NQN",
    ),
    "duplicate_uuid": (
        "[[listener]]",
        'uuid = "{uuid}"\n[[subsystem.namespace]]\nnsid = 2\nmemory = "1M"\nuuid = "{uuid}"\n[[listener]]',
        'bad.toml:12: subsystem.namespace.uuid: "{uuid}" ', "is there twice", "give each namespace its own",
    ),
    "bad_nqn": (
        "{nqn}disk1", "disk one", 'bad.toml:3: subsystem.nqn: "disk one": ', "contains a space",
        "give one of the form nqn.yyyy-mm.reversed.domain:name",
    ),
    "missing_file": (
        'size = "16M"', "", "bad.toml:4: namespace 1 of {nqn}disk1: {file} ", "does not exist",
        "check the path, or give a size",
    ),
    "missing_device": (
        'file = "{file}"\nsize = "16M"', 'device = "/dev/nothing"', "bad.toml:4: namespace 1 of {nqn}disk1: /dev/nothing ",
        "No such file", "check the path",
    ),
    "size_not_a_multiple": (
        'size = "16M"', 'size = "1000"', "bad.toml:4: subsystem.namespace.size: 1000 ", "not a multiple of the block size 512",
        "change the size or the block_size",
    ),
    "block_size": (
        'size = "16M"', 'size = "16M"\nblock_size = 513', "bad.toml:8: subsystem.namespace.block_size: ", "513",
        "choose 512 or 4096",
    ),
    "address_not_ours": (
        "{listen}", "203.0.113.7:4420", "bad.toml:8: listener 203.0.113.7:4420: ", "is no address of this machine",
        "see `ip address`",
    ),
    "not_toml": ("nsid = 1", "nsid = = 1", "bad.toml:5: ", "extra `=`", "correct the TOML here"),
    "bad_uuid": (
        'size = "16M"', 'size = "16M"\nuuid = "xyz"', 'bad.toml:8: subsystem.namespace.uuid: "xyz" ', "is none",
        "give 8-4-4-4-12 hexadecimal digits",
    ),
    "nsid_0": (
        "nsid = 1", "nsid = 0", "bad.toml:5: subsystem.namespace.nsid: ", "is out of range", "give a number from 1 to",
    ),
}  # fmt: skip


def _bad_case(kind: str, old: str, new: str, *parts: str) -> None:
    @case(name=f"bad_configuration_{kind}_is_one_line_and_status_2", providers=FARSIDE)
    def bad(lab):
        values = {"nqn": NQN, "file": "/run/scratch/bad.img", "listen": endpoint(lab.address, 4420), "uuid": UUID}
        text = GOOD.replace(old, new)
        true("the text was changed", text != GOOD)
        path = lab.case_folder / "bad.toml"
        path.write_text(text.format(**values))
        what, reason, remedy = (part.format(**values) for part in parts)
        said = refused_start(lab, "--config", path, names=what, say=reason)
        true(f"the reason {reason!r}, then the remedy {remedy!r}: {said!r}", remedy in said.partition(reason)[2])
        true("nothing half started: the file was not made", not os.path.exists(values["file"]))
        done = run(lab.binary, "check", path, check=False, timeout=20, netns=lab.netns)
        equal(f"exit status of check ({done.stderr or said})", done.returncode, 2)
        equal("what check says", done.stderr.strip(), said)


for _kind, _how in BAD.items():
    _bad_case(_kind, *_how)


#: a file that a start is to make
NEW = "/run/scratch/new.img"


@case(providers=FARSIDE)
def a_port_in_use_is_named(lab):
    lab.serve()
    refused_start(
        lab, "--file", NEW, "--size", "16M", "--nqn", NQN + "other", "--listen", endpoint(lab.address, 4420),
        names=lab.address,
    )  # fmt: skip
    true("nothing half started: the file was not left behind", not os.path.exists(NEW))


@case(providers=("verbs",))
def too_little_locked_memory_is_named_with_its_remedy(lab):
    """As a user without CAP_IPC_LOCK and with 1 MiB of lockable memory."""
    import resource
    import subprocess

    done = subprocess.run(
        [
            "setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=-all", "--bounding-set=-all",
            str(lab.binary), "serve", "--memory", "64M", "--listen", endpoint(lab.address, 4420), "--provider", "verbs",
        ],
        capture_output=True, text=True, timeout=30,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_MEMLOCK, (MIB, MIB)),
    )  # fmt: skip
    said = done.stderr.strip()
    equal(f"exit status ({said})", done.returncode, 2)
    equal(f"lines of the message ({said})", len(said.splitlines()), 1)
    true(f"it names the limit: {said}", "memlock" in said.lower() or "RLIMIT_MEMLOCK" in said)


@case(providers=("verbs",))
def no_rdma_device_is_named(lab):
    """In a network name space of its own there is no device for the address."""
    run("ip", "netns", "add", "bare", check=False)
    lab.undo(run, "ip", "netns", "delete", "bare", check=False)
    run("ip", "link", "set", "lo", "up", netns="bare")
    done = run(
        lab.binary, "serve", "--file", NEW, "--size", "16M", "--listen", "127.0.0.1:4420", "--provider", "verbs",
        check=False, timeout=20, netns="bare",
    )  # fmt: skip
    equal(f"exit status ({done.stderr})", done.returncode, 2)
    equal(f"lines of the message ({done.stderr})", len(done.stderr.strip().splitlines()), 1)
    true(f"it names device or address: {done.stderr}", "127.0.0.1" in done.stderr or "device" in done.stderr)
    true("nothing half started: the file was not left behind", not os.path.exists(NEW))
