#!/bin/sh
# The example appliance, built on the public API alone, served and used: a verified load, then a frozen copy that has every block.
set -eu
farside=${FARSIDE_BIN:-target/release/farside}
appliance=${APPLIANCE_BIN:-target/debug/examples/appliance}
folder=$(mktemp -d)
pid=
cleanup() {
    [ -z "$pid" ] || kill "$pid" 2>/dev/null || true
    rm -rf "$folder"
}
trap cleanup EXIT
trap 'exit 130' INT TERM
"$appliance" 127.0.0.1:4420 soft >"$folder/log" 2>&1 &
pid=$!
wait_for() {
    for _ in $(seq 100); do
        grep -q "$1" "$folder/log" && return
        kill -0 "$pid" 2>/dev/null || break
        sleep 0.1
    done
    echo "FAIL appliance: no line with '$1' in its output:"
    cat "$folder/log"
    exit 1
}
wait_for 'nvme connect'
bench() { "$farside" --log warn bench 127.0.0.1 --provider soft "$@"; }
bench --rw randrw --bs 4K --iodepth 16 --runtime 2 --verify --size 64M >"$folder/load"
grep -q ' 0 errors' "$folder/load" || { echo "FAIL appliance: errors under load"; cat "$folder/load"; exit 1; }
kill -USR1 "$pid"
wait_for 'frozen with [1-9]'
# The frozen namespace answers reads and refuses writes.
bench --nsid 2 --rw randread --bs 4K --iodepth 16 --runtime 1 >"$folder/frozen"
grep -q ' 0 errors' "$folder/frozen" || { echo "FAIL appliance: errors on the frozen disk"; cat "$folder/frozen"; exit 1; }
if bench --nsid 2 --rw randwrite --bs 4K --iodepth 1 --runtime 1 >"$folder/refused" 2>&1 && grep -q ' 0 errors' "$folder/refused"; then
    echo "FAIL appliance: the frozen disk took writes"
    exit 1
fi
kill -TERM "$pid"
wait "$pid"
pid=
grep -q '^stopped with [1-9]' "$folder/log" || { echo "FAIL appliance: no end"; cat "$folder/log"; exit 1; }
echo "ok   appliance  a frozen copy of a verified load: $(grep -o 'frozen with.*' "$folder/log")"
