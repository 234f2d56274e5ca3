#!/usr/bin/env bash
# Two hosts of two ranks, each with a network and processes of its own, connected by a switch at 100 Mbit/s. One is lost,
# by its cable or by its processes' end: the ranks of the other have an error.
set -euo pipefail
program=$1
if [[ ${2:-} != inside ]]; then
  if ! unshare --user --map-root-user --net --mount --pid --fork --mount-proc true; then
    echo "skipped: this machine gives no namespaces"
    exit 0
  fi
  if ! command -v ip >/dev/null; then
    echo "skipped: there is no ip (iproute2)"
    exit 0
  fi
  exec unshare --user --map-root-user --net --mount --pid --fork --mount-proc bash "$0" "$program" inside
fi

mount -t tmpfs none /run
ip netns add switch
ip -n switch link add switch type bridge
ip -n switch link set switch up
for host in 0 1; do
  ip netns add "host$host"
  ip link add "port$host" netns switch type veth peer name eth0 netns "host$host"
  ip -n switch link set "port$host" master switch up
  ip -n "host$host" link set lo up
  ip -n "host$host" link set eth0 up
  ip -n "host$host" address add "10.0.0.$((host + 1))/24" dev eth0
  tc -n "host$host" qdisc add dev eth0 root tbf rate 100mbit burst 32kbit latency 50ms || echo "no rate: there is no tc"
done

export WORLD_SIZE=4 LOCAL_WORLD_SIZE=2 MASTER_ADDR=10.0.0.1 GLOO_SOCKET_IFNAME=eth0 OMP_NUM_THREADS=1
export program TESSERA_TEST_BACKEND MASTER_PORT=29400

# Ends with as many lines "rank <rank>: lost after <ms> ms" as ranks have had the error.
cat >"$TEST_TMPDIR/host.sh" <<'END'
RANK=$1 LOCAL_RANK=0 "$program" '[.lost_host]' &
RANK=$(($1 + 1)) LOCAL_RANK=1 "$program" '[.lost_host]' || true
wait || true
END

await_text() {  # text, how often, file...
  for _ in $(seq 300); do
    [[ $(cat "${@:3}" | grep -c "$1") -ge $2 ]] && return
    sleep 0.1
  done
  echo "\"$1\" did not come $2 times:"
  cat "${@:3}"
  return 1
}

# Four ranks of each backend at the same time. Arguments: "cable" or "processes", the most milliseconds until an error.
run_case() {
  local ends=() outs=() backend host
  for backend in gloo hierarchical; do
    TESSERA_TEST_BACKEND=$backend
    MASTER_PORT=$((MASTER_PORT + 1))
    for host in 0 1; do
      outs+=("$TEST_TMPDIR/$1-$backend-$host")
      ip netns exec "host$host" unshare --pid --fork --kill-child --mount-proc \
        bash "$TEST_TMPDIR/host.sh" $((2 * host)) >"${outs[-1]}" 2>&1 &
      ends+=($!)
    done
  done
  await_text "goes on" 8 "${outs[@]}"
  if [[ $1 == cable ]]; then
    ip -n switch link set port1 down
    await_text "lost after" 8 "${outs[@]}"
    ip -n switch link set port1 up
  else
    kill -KILL "${ends[1]}" "${ends[3]}"  # of host 1, and with them all of its processes
    await_text "lost after" 4 "${outs[@]}"
  fi
  wait "${ends[@]}" || true
  echo "$1:"
  grep -h "lost after" "${outs[@]}"
  [[ $(cat "${outs[@]}" | grep -oP 'lost after \K[0-9]+' | sort -n | tail -1) -le $2 ]]
}

run_case processes 5000
run_case cable 12000
