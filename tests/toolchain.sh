#!/bin/sh
# Checks the one prerequisite: a Rust toolchain of at least the version given.
set -eu

minimum=$1
if ! command -v cargo >/dev/null 2>&1; then
    echo "farside needs a Rust toolchain, version $minimum or newer, as its one prerequisite: cargo was not found." >&2
    echo "Install one (rustup or your distribution), then run make again." >&2
    exit 1
fi
have=$(rustc --version | cut -d' ' -f2)
oldest=$(printf '%s\n%s\n' "$minimum" "$have" | sort -V | head -n1)
if [ "$oldest" != "$minimum" ]; then
    echo "farside needs Rust $minimum or newer; this is $have. Update the toolchain, then run make again." >&2
    exit 1
fi
