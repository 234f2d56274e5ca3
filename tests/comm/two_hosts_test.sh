#!/usr/bin/env bash
# Four ranks, of which the last two believe to be on another host, since they are in a pid namespace of their own.
set -euo pipefail
program=$1
if ! unshare --user --map-root-user --pid --fork --mount-proc true; then
  echo "skipped: this machine gives no pid namespace"
  exit 0
fi
export WORLD_SIZE=4 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 OMP_NUM_THREADS=1 program
MASTER_PORT=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
export MASTER_PORT

# Two ranks, from the given one on; fails if one of them does.
cat >"$TEST_TMPDIR/host.sh" <<'EOF'
RANK=$1 LOCAL_RANK=0 "$program" '[.two_hosts]' &
first=$!
RANK=$(($1 + 1)) LOCAL_RANK=1 "$program" '[.two_hosts]' && wait "$first"
EOF

unshare --user --map-root-user --pid --fork --mount-proc bash "$TEST_TMPDIR/host.sh" 2 &
other=$!
bash "$TEST_TMPDIR/host.sh" 0 && wait "$other"
