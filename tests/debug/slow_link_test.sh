#!/usr/bin/env bash
# Three hosts of one rank each, with networks of their own, connected by a switch. Rank 1's host sends at 20 Mbit/s, the
# others as fast as they can: measure_links names it.
set -euo pipefail
program=$1
export PATH=$PATH:/usr/sbin
if [[ ${2:-} != inside ]]; then
  if ! unshare --user --map-root-user --net --mount --pid --fork --mount-proc true; then
    echo "skipped: this machine gives no namespaces"
    exit 0
  fi
  if ! command -v ip >/dev/null || ! command -v tc >/dev/null; then
    echo "skipped: there is no ip or tc (iproute2)"
    exit 0
  fi
  exec unshare --user --map-root-user --net --mount --pid --fork --mount-proc bash "$0" "$program" inside
fi

mount -t tmpfs none /run
ip netns add switch
ip -n switch link add switch type bridge
ip -n switch link set switch up
for host in 0 1 2; do
  ip netns add "host$host"
  ip link add "port$host" netns switch type veth peer name eth0 netns "host$host"
  ip -n switch link set "port$host" master switch up
  ip -n "host$host" link set lo up
  ip -n "host$host" link set eth0 up
  ip -n "host$host" address add "10.0.0.$((host + 1))/24" dev eth0
done
if ! tc -n host1 qdisc add dev eth0 root tbf rate 20mbit burst 32kbit latency 400ms; then
  echo "skipped: this kernel limits no rates"
  exit 0
fi

export WORLD_SIZE=3 LOCAL_WORLD_SIZE=1 LOCAL_RANK=0 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 GLOO_SOCKET_IFNAME=eth0
export OMP_NUM_THREADS=1
for rank in 0 1 2; do
  RANK=$rank ip netns exec "host$rank" "$program" '[.slow_link]' >"$TEST_TMPDIR/rank$rank" 2>&1 &
done
wait
grep -h . "$TEST_TMPDIR/rank0"
grep -qE '^links: rank 1 sends at [12]\.[0-9] MB/s; the median of all links is [0-9]+ MB/s$' "$TEST_TMPDIR/rank0"
