#!/usr/bin/env bash
# Three hosts of two ranks (tests/comm/hosts.sh), one of which is cut off while they train: all ranks end with an error.
# Once the host is back, without what it had in memory, the job is started again. It goes on from the last in-memory
# checkpoint, since there is no other, and ends with the bits of one that was left alone.
set -euo pipefail
source tests/comm/hosts.sh
enter_namespaces "$0" "$@"
export program=$1
export WORLD_SIZE=6 LOCAL_WORLD_SIZE=2

# Two ranks, from the given one on; fails if one of them does.
cat >"$TEST_TMPDIR/host.sh" <<'END'
RANK=$1 LOCAL_RANK=0 "$program" "${@:2}" &
code=0
RANK=$(($1 + 1)) LOCAL_RANK=1 "$program" "${@:2}" || code=1
wait $! || code=1
exit $code
END

# In a folder that all hosts see; in-memory checkpoints are in one of each host.
start_job() {
  local host
  ends=()
  for host in 0 1 2; do
    mkdir -p "$1/memory$host"
    TESSERA_MEMORY_DIR=$1/memory$host \
      on_host "$host" bash "$TEST_TMPDIR/host.sh" $((2 * host)) "$1" "" 40 0 0 memory >>"$1/output" 2>&1 &
    ends+=($!)
  done
}

# Sets `failed`, the number of hosts on which not all ranks ended well.
await_job() {
  local end
  failed=0
  for end in "${ends[@]}"; do
    wait "$end" || failed=$((failed + 1))
  done
}

expect() {  # what, value, expected
  [[ $2 == "$3" ]] && return
  echo "$1: $2, expected $3"
  cat "$TEST_TMPDIR"/*/output
  exit 1
}

losses() { awk '$1 == "step" { print $2, $3 }' "$1/log" | sort -nu; }

make_hosts 3
returned=$TEST_TMPDIR/returned undisturbed=$TEST_TMPDIR/undisturbed
export MASTER_PORT=29500
start_job "$undisturbed"
await_job
expect "the undisturbed run: hosts with errors" $failed 0

start_job "$returned"
await_text "^step 10 " 1 "$returned/log"
cut_cable 2
await_job
expect "hosts with errors" $failed 3
expect "ranks with errors" "$(grep -c '^rank [0-5]: ' "$returned/output")" 6
mend_cable 2
rm -r "$returned/memory2" "$returned"/step-*
last=$(awk '$1 == "in_memory" { last = $2 } END { print last }' "$returned/log")
start_job "$returned"
await_job
expect "after the return: hosts with errors" $failed 0
expect "the in-memory checkpoint is found" "$(awk '$1 == "resumed" && $2 >= '"$last"' { ++found } END { print found }' \
  "$returned/log")" 1
diff -rq "$returned/step-00000040" "$undisturbed/step-00000040"
diff <(losses "$returned") <(losses "$undisturbed")
