#!/usr/bin/env bash
# Two hosts of two ranks (hosts.sh). One is lost, by its cable or by its processes' end: the ranks of the other have an
# error.
set -euo pipefail
source tests/comm/hosts.sh
enter_namespaces "$0" "$@"
program=$1

make_hosts 2
export WORLD_SIZE=4 LOCAL_WORLD_SIZE=2
export program TESSERA_TEST_BACKEND MASTER_PORT=29400

# Ends with as many lines "rank <rank>: lost after <ms> ms" as ranks have had the error.
cat >"$TEST_TMPDIR/host.sh" <<'END'
RANK=$1 LOCAL_RANK=0 "$program" '[.lost_host]' &
RANK=$(($1 + 1)) LOCAL_RANK=1 "$program" '[.lost_host]' || true
wait || true
END

# Four ranks of each backend at the same time. Arguments: "cable" or "processes", the most milliseconds until an error.
run_case() {
  local ends=() outs=() backend host
  for backend in gloo hierarchical; do
    TESSERA_TEST_BACKEND=$backend
    MASTER_PORT=$((MASTER_PORT + 1))
    for host in 0 1; do
      outs+=("$TEST_TMPDIR/$1-$backend-$host")
      on_host "$host" bash "$TEST_TMPDIR/host.sh" $((2 * host)) >"${outs[-1]}" 2>&1 &
      ends+=($!)
    done
  done
  await_text "goes on" 8 "${outs[@]}"
  if [[ $1 == cable ]]; then
    cut_cable 1
    await_text "lost after" 8 "${outs[@]}"
    mend_cable 1
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
