#!/usr/bin/env bash
# benchmarks/slow_link.sh: slow_link on two hosts of two ranks, which are network namespaces with 100 Mbit/s between them.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
program=$(realpath "${1:-bazel-bin/benchmarks/slow_link}")
source tests/comm/hosts.sh
enter_namespaces "$0" "$program"
make_hosts 2
export WORLD_SIZE=4 LOCAL_WORLD_SIZE=2 MASTER_PORT=29400 program

# Two ranks, from the given one on.
ranks='RANK=$0 LOCAL_RANK=0 "$program" $1 & RANK=$(($0 + 1)) LOCAL_RANK=1 "$program" $1; wait'
for backend in gloo hierarchical gloo hierarchical; do
  MASTER_PORT=$((MASTER_PORT + 1))
  (on_host 1 bash -c "$ranks" 2 "$backend") &
  (on_host 0 bash -c "$ranks" 0 "$backend")
  wait
done
