#!/bin/sh
# The demonstration once more as a user who may nothing (65534, "nobody"), where root runs this; others have run it as such.
set -eu
skip() {
    echo "SKIPPED the demonstration without privileges: $1"
    [ "${CI:-}" != true ]
    exit
}
[ "$(id -u)" = 0 ] || { echo "the demonstration ran as user $(id -u)"; exit 0; }
command -v setpriv >/dev/null || skip "there is no setpriv program (util-linux)"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
# The source tree may be closed to that user.
cp "${FARSIDE_BIN:-target/release/farside}" "$folder/farside"
cp tests/demo.sh "$folder/demo.sh"
chmod -R a+rX "$folder"
cd "$folder"
FARSIDE_BIN="$folder/farside" TMPDIR=/tmp HOME="$folder" timeout 60 \
    setpriv --reuid 65534 --regid 65534 --clear-groups --inh-caps=-all --no-new-privs sh "$folder/demo.sh"
