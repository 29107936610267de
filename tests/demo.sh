#!/bin/sh
# The main job on one machine, without RDMA hardware, kernel modules or privileges: a file is served by the software provider
# on 127.0.0.1 and used from 127.0.0.2. Ends by itself; every step says what it does and what came out.
set -eu
farside=${FARSIDE_BIN:-target/release/farside}
folder=$(mktemp -d)
target=
cleanup() {
    [ -z "$target" ] || kill "$target" 2>/dev/null || true
    rm -rf "$folder"
}
trap cleanup EXIT
trap 'exit 130' INT TERM
step() { printf '\n== %s\n$ %s\n' "$1" "$2"; }
nqn=nqn.2026-11.io.farside:demo

step "Serve a new file of 256 MiB" "farside serve --file disk.img --size 256M --provider soft --listen 127.0.0.1 --nqn $nqn"
"$farside" serve --file "$folder/disk.img" --size 256M --provider soft --listen 127.0.0.1 --nqn "$nqn" \
    >"$folder/target.log" 2>&1 &
target=$!
for _ in $(seq 100); do
    grep -q '^connect ' "$folder/target.log" && break
    kill -0 "$target" 2>/dev/null || { cat "$folder/target.log"; exit 1; }
    sleep 0.1
done
sed 's/^/   /' "$folder/target.log"

step "What does it offer?" "farside discover 127.0.0.1 --provider soft"
"$farside" --log warn discover 127.0.0.1 --provider soft

step "What is it?" "farside identify 127.0.0.1 --provider soft"
"$farside" --log warn identify 127.0.0.1 --provider soft

step "Ten seconds of mixed reads and writes, every byte checked" \
    "farside bench 127.0.0.1 --provider soft --rw randrw --bs 4K --iodepth 32 --runtime 10 --verify"
"$farside" --log warn bench 127.0.0.1 --provider soft --rw randrw --bs 4K --iodepth 32 --runtime 10 --verify \
    >"$folder/bench.txt" || { cat "$folder/bench.txt"; exit 1; }
cat "$folder/bench.txt"
grep -q "of the target (process $target)" "$folder/bench.txt" || { echo "   the target's processor is not shown"; exit 1; }

step "Stop" "kill -TERM $target"
kill -TERM "$target"
wait "$target" && status=0 || status=$?
target=
echo "   the target ended with status $status"
[ "$status" = 0 ]
echo "   the file holds $(du -h "$folder/disk.img" | cut -f1) of data"
