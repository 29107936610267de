#!/bin/sh
# The libclang that rdma-sys' binding generator works with: version 14 (newer ones make it panic).
#
#   libclang.sh VENV                  prints the folder for LIBCLANG_PATH, or nothing when it is not there
#   libclang.sh --install VENV SUDO   installs libclang 14, the RDMA headers and the programs that unit tests and scripts
#                                     run, where they are missing
set -eu

find_one() {
    for folder in /usr/lib/llvm-14/lib "$1"/lib/python3*/site-packages/clang/native; do
        for library in "$folder"/libclang.so "$folder"/libclang.so.1 "$folder"/libclang-14.so.1; do
            if [ -e "$library" ]; then
                echo "$folder"
                return
            fi
        done
    done
}

apt_install() {
    echo "installing $*"
    $sudo env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 -qq update
    $sudo env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 -qq install -y \
        --no-install-recommends "$@" >/dev/null
}

if [ "$1" != --install ]; then
    find_one "$1"
    exit
fi
venv=$2
sudo=${3:-}
missing=
[ -e /usr/include/infiniband/verbs.h ] || missing="$missing libibverbs-dev"
[ -e /usr/include/rdma/rdma_cma.h ] || missing="$missing librdmacm-dev"
command -v cc >/dev/null 2>&1 || missing="$missing gcc libc6-dev"
command -v python3 >/dev/null 2>&1 || missing="$missing python3"
# In folders that are in root's path alone.
has() { PATH="$PATH:/usr/sbin:/sbin" command -v "$1" >/dev/null 2>&1; }
has ip || missing="$missing iproute2"
has mkfs.ext4 || missing="$missing e2fsprogs"
[ -z "$missing" ] || apt_install $missing
[ -n "$(find_one "$venv")" ] && exit
if apt-cache show libclang-14-dev >/dev/null 2>&1 || { $sudo apt-get -qq update && apt-cache show libclang-14-dev >/dev/null 2>&1; }; then
    apt_install libclang-14-dev
else
    # No version 14 in this distribution: the wheel carries the library alone, and clang's own headers come from
    # whatever compiler is there.
    python3 -m venv --clear "$venv" || { apt_install python3-venv && python3 -m venv --clear "$venv"; }
    "$venv/bin/pip" install --quiet libclang==14.0.6
fi
[ -n "$(find_one "$venv")" ] || { echo "no libclang 14 was found or installed" >&2; exit 1; }
