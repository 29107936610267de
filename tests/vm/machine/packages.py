"""What the harness needs on the machine: Debian packages, and virtme-ng in a virtual environment of its own."""

import os
import shutil
import subprocess
import sys

from machine import paths

#: package -> a file that proves that it is there
DEBIAN = {
    "qemu-system-x86": "/usr/bin/qemu-system-x86_64",
    "busybox-static": "/bin/busybox",
    "kmod": "/sbin/depmod",
    "udev": "/bin/udevadm",
    "file": "/usr/bin/file",
    "nvme-cli": "/usr/sbin/nvme",
    "fio": "/usr/bin/fio",
    "rdma-core": "/usr/share/doc/rdma-core",
    "ibverbs-utils": "/usr/bin/ibv_devinfo",
    "ibverbs-providers": "/usr/share/doc/ibverbs-providers",
    "libibverbs-dev": "/usr/include/infiniband/verbs.h",
    "librdmacm-dev": "/usr/include/rdma/rdma_cma.h",
    "iproute2": "/sbin/ip",
    "iputils-ping": "/bin/ping",
    "xfsprogs": "/sbin/mkfs.xfs",
    "e2fsprogs": "/sbin/mkfs.ext4",
    "dmsetup": "/sbin/dmsetup",
    "python3-venv": "/usr/share/doc/python3-venv",
}
VNG_REQUIREMENT = "virtme-ng>=1.37,<2"


def missing_packages() -> list[str]:
    return [name for name, proof in DEBIAN.items() if not os.path.exists(proof)]


def install(names: list[str]) -> None:
    """Installs Debian packages, as root or by sudo."""
    if not names:
        return
    sudo = [] if os.geteuid() == 0 else ["sudo"]
    if sudo and shutil.which("sudo") is None:
        raise SystemExit(f"needs root or sudo to install: {' '.join(names)}")
    apt = [*sudo, "env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-o", "DPkg::Lock::Timeout=300", "-qq"]
    print("installing", " ".join(names), flush=True)
    subprocess.run([*apt, "update"], check=True, stdout=subprocess.DEVNULL)
    subprocess.run([*apt, "install", "-y", "--no-install-recommends", *names], check=True, stdout=subprocess.DEVNULL)


def install_vng() -> None:
    if vng_ready():
        return
    subprocess.run([sys.executable, "-m", "venv", "--clear", paths.VENV], check=True)
    subprocess.run([paths.VENV / "bin" / "pip", "install", "--quiet", VNG_REQUIREMENT], check=True)


def vng_ready() -> bool:
    vng = paths.VENV / "bin" / "vng"
    return vng.exists() and subprocess.run([vng, "--version"], capture_output=True).returncode == 0
