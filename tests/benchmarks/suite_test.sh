#!/usr/bin/env bash
# Each benchmark tells its options and refuses what it does not know; the suite runs one and stores what it printed.
set -euo pipefail
suite=$1 out=$TEST_TMPDIR/out log=$TEST_TMPDIR/log

die() { printf '%s\n' "$@"; cat "$log"; exit 1; }

for name in checkpoint collectives dtensor_dispatch fully_shard_step fused_optimizer gpu_step memory two_d_step; do
  program=benchmarks/$name
  "$program" --help >"$log" 2>&1 && grep -q -- --json "$log" || die "$name: no help"
  ! "$program" --no-such-option >"$log" 2>&1 || die "$name: takes an unknown option"
  grep -q no-such-option "$log" || die "$name: does not name the unknown option"
  ! "$program" --rounds several >"$log" 2>&1 || die "$name: takes a word as a number"
done
! benchmarks/fully_shard_step --size huge >"$log" 2>&1 || die "fully_shard_step: takes an unknown size"

# On a simulated GPU: what it measures means nothing, but it is all there, and its numbers and names are JSON.
benchmarks/gpu_step --dim 32 --layers 2 --heads 2 --context 8 --batch 1 --steps 2 --rounds 1 --json >"$out.gpu" 2>"$log" ||
  die "gpu_step fails"
python3 - "$out.gpu" >"$log" 2>&1 <<'EOF' || die "gpu_step: wrong lines"
import json, pathlib, sys
lines = [json.loads(line) for line in pathlib.Path(sys.argv[1]).read_text().splitlines() if line[0] == "{"]
if lines:  # none where --config=cuda finds no GPU
    names = {line["name"].removeprefix("gpu_step/") for line in lines}
    assert names == set("timeline ranks step_ms compute_ms communication_ms overlap host_us_per_unit tokens_per_s".split()), names
    events = [event["event"] for line in lines if "events" in line for event in line["events"]]
    assert events[:3] == ["gather root", "unshard root", "gather block0"] and "reduce_scatter block1" in events, events
EOF

PEER_PYTHON='' "$suite" --quick --only fused_optimizer --out "$out" >"$log" 2>&1 || die "the suite fails"
grep -q 'fused_adamw/192_small_ratio' "$log" || die "the suite shows no measurement"
grep -q '"name": "fused_sgd/4_large_us", "unit": "us", "values": \[[0-9.]*\]' "$out/performance.json" ||
  die "the suite stores no measurement"
! "$suite" --only nothing >"$log" 2>&1 || die "the suite takes an unknown name"
! PEER_PYTHON=/nowhere/python "$suite" --quick --only fused_optimizer --out "$out" >"$log" 2>&1 ||
  die "the suite takes a peer that is not there"
