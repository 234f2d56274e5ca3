#!/usr/bin/env bash
# Runs examples/train_gpt on 2 processes at a small size, and with input that it must refuse.
#   train_gpt_test.sh PROGRAM cpu|cuda      what the program was built for
set -uo pipefail

program=$1
built_for=$2
work=$(mktemp -d "${TEST_TMPDIR:-/tmp}/train_gpt.XXXXXX")
unset BUILD_WORKING_DIRECTORY
small=(--nproc 2 --steps 4 --dim 16 --layers 2 --heads 2 --context 16 --batch 4 --eval-samples 8 --sample-bytes 8)
failures=0

fail() {
  echo "FAILED: $1"
  cat "$work/out" "$work/err"
  failures=$((failures + 1))
}

# Runs the program; at most 60 s, so that a hang is a failure.
run() { timeout 60 "$program" "$@" >"$work/out" 2>"$work/err"; }

expect_output() { grep -qE -- "$1" "$work/out" || fail "no line of the output matches: $1"; }

# The line of the speed over $1 ranks agrees with itself: 67,584 operations a token, by hand, of the small model (dim 16,
# 2 layers, context 16): 6 x (2 x 12 x 16 x 16 + 256 x 16) + 12 x 2 x 16 x 16, whatever is computed again. Tokens are
# rounded to whole ones, operations to tenths of their unit.
expect_cost() {
  awk -v ranks="$1" '
    function within(a, b, error) { return a - b <= error && b - a <= error }
    BEGIN { unit["MFLOP/s"] = 1e6; unit["GFLOP/s"] = 1e9; unit["TFLOP/s"] = 1e12 }
    /^training: / {
      ++lines
      all = $4 * unit[$5]; all_error = 0.051 * unit[$5]
      own = $9 * unit[$10]; own_error = 0.051 * unit[$10]
      right = $3 == "tokens/s," && all > 0 && own > 0 && within(all, $2 * 67584, all_error + 67584) &&
              within(own, all / ranks, own_error + all_error / ranks)
    }
    END { exit !(lines == 1 && right) }' "$work/out" || fail "the run's speed over $1 ranks"
}

# expect_refused MESSAGE ARGUMENT...
expect_refused() {
  local message=$1 code
  shift
  run "$@"
  code=$?
  ((code == 2)) || fail "train_gpt $*: exit code $code, expected 2"
  (($(grep -cF -- "$message" "$work/err") == 1)) || fail "train_gpt $*: stderr does not say once: $message"
}

run "${small[@]}" --svg "$work/curve.svg" || fail "a small run: exit code $?"
expect_output '^fully_shard over 2 ranks \(shm\)'
expect_output '^step 4/4  loss [0-9.]+ .* tokens/s .* ms/step .* MB sent/step  peak [0-9]+ MiB  validation [0-9.]+$'
expect_cost 2
expect_output '^peak memory of a rank: [0-9]+ MiB \(resident\)$'
[[ $(tail -n 1 "$work/out") =~ ^"validation loss "[0-9.]+" nats/byte" ]] || fail "a small run: the last line"
grep -q '</svg>' "$work/curve.svg" || fail "a small run: no loss curve"
grep -o 'validation loss .* before training' "$work/out" >"$work/first"
run "${small[@]}" --svg "$work/curve.svg" || fail "a second run: exit code $?"
grep -o 'validation loss .* before training' "$work/out" | cmp - "$work/first" || fail "two runs of one seed differ"

# Bit-equal where both sum up in the same order: 2 ranks, no clipping.
equal='^parity: 2 ranks .* losses 0\.00e\+00 .* parameters 0\.00e\+00 '
run "${small[@]}" --svg "$work/curve.svg" --check-parity --clip 0 || fail "--check-parity --clip 0: exit code $?"
expect_output "$equal"
run "${small[@]}" --svg "$work/curve.svg" --check-parity --clip 0 --bf16 || fail "--check-parity --bf16: exit code $?"
expect_output "$equal"
run "${small[@]}" --svg "$work/curve.svg" --check-parity --nproc 3 --batch 3 --eval-samples 3 || fail "3 ranks: exit code $?"
expect_output '^parity: 3 ranks against one process'

# Built without memory: the same values, and the same training. (The first run clipped its gradients.)
run "${small[@]}" --svg "$work/curve.svg" --check-parity --clip 0 --meta-init || fail "--meta-init: exit code $?"
expect_output "$equal"
initial=$(grep -o '[0-9.]* before training' "$work/out")
[[ $initial == "$(grep -o '[0-9.]* before training' "$work/first")" ]] || fail "--meta-init: other values"

# Tensor and sequence parallelism, replicas and recomputation against one process.
layouts=('--tp 2' '--nproc 3 --batch 12 --eval-samples 12 --accumulate 2 --checkpoint-activations selective' '--nproc 4 --tp 2 --sp --checkpoint-activations' '--nproc 4 --replicate 2 --tp 2 --bf16 --meta-init')
for layout in "${layouts[@]}"; do
  read -ra layout_options <<<"$layout"
  run "${small[@]}" --svg "$work/curve.svg" --check-parity "${layout_options[@]}" || fail "$layout: exit code $?"
  expect_output '^parity: [234] ranks against one process'
  expect_cost "$(grep -oE '^parity: [234]' "$work/out" | grep -o '[234]')"
done

# The share of what the device can do, here a billion operations a second.
run "${small[@]}" --svg "$work/curve.svg" --peak-tflops 0.001 || fail "--peak-tflops: exit code $?"
expect_output '^step 4/4  .* MiB  MFU [0-9.]+ %  validation [0-9.]+$'
expect_output '^training: .* a rank, MFU [0-9.]+ % of 0\.001 TFLOP/s$'

# Metrics: of the validated steps and each second one; all kinds of files agree.
run "${small[@]}" --svg "$work/curve.svg" --nproc 4 --tp 2 --log-dir "$work/logs" --log-every 2 --eval-every 3 \
  --peak-tflops 0.001 || fail "--log-dir: exit code $?"
python3 tests/debug/check_metrics.py "$work/logs" 2 4 train/loss train/validation_loss train/learning_rate \
  train/gradient_norm train/tokens train/tokens_per_second train/mfu step/seconds step/compute_seconds \
  step/slowest_compute_seconds step/communication_seconds step/data_seconds step/checkpoint_seconds memory/peak_bytes \
  comm/bytes_per_step/dp comm/bytes_per_step/tp >"$work/out" 2>"$work/err" || fail "--log-dir: the metrics"
expect_output '^3 steps, 16 metrics$'
expect_refused 'other hosts reach 0.0.0.0; give a token' "${small[@]}" --metrics-port 0 --metrics-host 0.0.0.0
port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
"$program" "${small[@]}" --svg "$work/curve.svg" --metrics-port "$port" --log-every 1 --steps 2000 >"$work/out" 2>"$work/err" &
pid=$!
for _ in $(seq 300); do
  python3 -c "import sys, urllib.request as r; sys.stdout.write(r.urlopen('http://127.0.0.1:$port/metrics').read().decode())" \
    >"$work/served" 2>/dev/null && grep -q '^tessera_train_loss [0-9.]' "$work/served" && break
  sleep 0.1
done
kill "$pid"
wait "$pid" 2>/dev/null
grep -q '^tessera_train_loss [0-9.]' "$work/served" || fail "--metrics-port: $(cat "$work/served")"
run "${small[@]}" --svg "$work/curve.svg" --nproc 4 --tp 2 --check-numerics --trace "$work/traces" --trace-steps 3-4 --trace-ops \
  --save-every 4 --checkpoint-dir "$work/traced" || fail "--trace: exit code $?"
{ tools/merge_traces "$work/traces" &&
  python3 tests/debug/check_trace.py "$work/traces/trace.json" 4 'forward block0' 'gather ' 'backward ' 'reduce ' \
    'issue all_gather' 'wait reduce_scatter' 'redistribute (' 'checkpoint: write' aten::mm; } >"$work/out" 2>"$work/err" ||
  fail "--trace: the trace"
# What memory is for, and a trace without ops.
run "${small[@]}" --svg "$work/curve.svg" --memory-timeline "$work/memory" --memory-steps 1-3 --check-links \
  --trace "$work/ranges" --trace-steps 1-2 || fail "--memory-timeline"
expect_output '^links: (no link is slow: [0-9.]+ MB/s to|rank [01] sends to) '
python3 tests/debug/check_memory.py "$work/memory" 2 parameters 'optimizer state' gradients 'gathered parameters' \
  activations 'gradients of activations' 'free blocks of units' other >"$work/out" 2>"$work/err" ||
  fail "--memory-timeline: the snapshot"
grep -qE '^ +[0-9]+ +[0-9]+  optimizer state +block0' "$work/memory/memory-rank-1.txt" || fail "--memory-timeline: no table"
tools/merge_traces "$work/ranges" >"$work/out" 2>"$work/err" && tools/draw_trace "$work/ranges/trace.json" 2 "$work/step.svg" &&
  grep -q '<title>forward block0: ' "$work/step.svg" && grep -q '<title>gather block0: ' "$work/step.svg" ||
  fail "tools/draw_trace"
grep -q '"forward block0"' "$work/ranges/rank-1.json" || fail "--trace: no ranges"
grep -q 'aten::' "$work/ranges/rank-1.json" && fail "--trace: ops"
# A step that overflows: the first module that sees it, on each rank, and no optimizer step.
run "${small[@]}" --svg "$work/curve.svg" --lr 1e30 --warmup 0 --check-numerics && fail "--check-numerics: no error"
grep -q "rank 0: --check-numerics: step 2, rank 0: the output of '.*' has " "$work/err" || fail "--check-numerics: $(cat "$work/err")"
expect_refused '--trace-steps 3-5: the run has 4 steps' "${small[@]}" --trace "$work/traces" --trace-steps 3-5
expect_refused '--trace-steps 3-4: cannot begin within --memory-steps 2-3' "${small[@]}" --trace "$work/traces" \
  --trace-steps 3-4 --memory-timeline "$work/memory" --memory-steps 2-3
expect_refused '--log-dir /proc/none: cannot be written to' "${small[@]}" --log-dir /proc/none
expect_refused '--log-every 0: must be at least 1' "${small[@]}" --log-every 0

# A run that goes on from a checkpoint ends as one that never stopped, bit by bit on as many ranks.
saving=("${small[@]}" --svg "$work/curve.svg" --save-every 2 --keep-last 0)
run "${saving[@]}" --checkpoint-dir "$work/a" || fail "--save-every: exit code $?"
cp -r "$work/a" "$work/b" && rm -r "$work/b/step-00000004"
run "${saving[@]}" --checkpoint-dir "$work/b" --resume --async-save || fail "--resume: exit code $?"
expect_output '^resumed from .*/b/step-00000002, 2 steps of 4 are done'
diff -r "$work/a" "$work/b" || fail "--resume: the checkpoints differ"
run "${saving[@]}" --checkpoint-dir "$work/b" --resume || fail "--resume of a finished run: exit code $?"
expect_output '^resumed from .*/b/step-00000004, 4 steps of 4 are done'
expect_output '^training: all steps had been made before$'
grep -o '^validation loss [0-9.]*' "$work/out" >"$work/loss"
# What is damaged is not gone on from, but from the one before, and the next save sets it aside.
printf '{' >"$work/b/step-00000004/tessera.json"
run "${saving[@]}" --checkpoint-dir "$work/b" --resume || fail "--resume with a damaged checkpoint: exit code $?"
expect_output '^resumed from .*/b/step-00000002, 2 steps of 4 are done'
grep -qF '/b/step-00000004 is damaged, and the one before is looked at' "$work/err" || fail "nothing is said of damage"
[[ -d $work/b/step-00000004.aside-0 ]] || fail "the damaged checkpoint is not set aside: $(ls "$work/b")"
rm -r "$work/b/step-00000004.aside-0"
diff -r "$work/a" "$work/b" || fail "--resume with a damaged checkpoint: the checkpoints differ"
rm -r "$work/b/step-00000004"
run "${saving[@]}" --checkpoint-dir "$work/b" --resume --nproc 4 --tp 2 || fail "--resume with --tp 2: exit code $?"
grep -o '^validation loss [0-9.]*' "$work/out" | cmp - "$work/loss" || fail "--resume with --tp 2: another loss"
run "${saving[@]}" --checkpoint-dir "$work/a" --resume --seed 2 && fail "--resume with another seed is taken"
grep -qF 'was saved with --seed 1, not 2' "$work/err" || fail "--resume with another seed: the message"
seq 2000 >"$work/numbers.txt"
run "${saving[@]}" --checkpoint-dir "$work/a" --resume --data "$work/numbers.txt" && fail "--resume takes other data"
grep -qE 'was saved with --data \([0-9]+ bytes, XXH3 [0-9a-f]+\), not \(8893 bytes, XXH3 [0-9a-f]+\); use the same' \
  "$work/err" || fail "--resume with other data: the message"
run "${saving[@]}" --checkpoint-dir "$work/a" --resume --weight-decay 0.2 && fail "--resume with another decay is taken"
grep -qF 'was saved with --weight-decay 0.1, not 0.2' "$work/err" || fail "--resume with another decay: the message"
expect_refused '--max-restarts 2: without --save-every' "${small[@]}" --max-restarts 2
expect_refused '--keep-survivors: goes with --max-restarts' "${small[@]}" --keep-survivors
RANK=0 WORLD_SIZE=1 expect_refused '--keep-survivors: torchrun and other launchers end all ranks' "${small[@]}" \
  --save-every 2 --max-restarts 1 --keep-survivors
expect_refused '--in-memory-every 1: goes with --max-restarts' "${small[@]}" --in-memory-every 1
expect_refused '--min-ranks 3: must be 0 to --nproc, 2' "${small[@]}" --min-ranks 3
expect_refused '--accumulate 3: must divide a rank'"'"'s 2 samples of --batch 4' "${small[@]}" --accumulate 3
expect_refused '--batch 4: must be a multiple of the 3 ranks' "${small[@]}" --nproc 4 --min-ranks 2
expect_refused '--async-save: nothing is saved without --save-every' "${small[@]}" --async-save

# The same bits on any number of ranks, and after going on with another one.
parts=("${small[@]}" --svg "$work/curve.svg" --batch 8 --save-every 2 --keep-last 0 --layout-independent 4)
run "${parts[@]}" --nproc 1 --checkpoint-dir "$work/p1" || fail "--layout-independent on one rank: exit code $?"
for layout in '--nproc 3' '--nproc 4 --replicate 2'; do
  read -ra layout_options <<<"$layout"
  rm -rf "$work/p2"
  cp -r "$work/p1" "$work/p2" && rm -r "$work/p2/step-00000004"
  run "${parts[@]}" "${layout_options[@]}" --checkpoint-dir "$work/p2" --resume ||
    fail "--layout-independent $layout: exit code $?"
  expect_output '^resumed from .*/p2/step-00000002, 2 steps of 4 are done'
  for file in "$work"/p1/step-00000004/*.safetensors; do
    cmp "$file" "$work/p2/step-00000004/${file##*/}" || fail "--layout-independent $layout: other values"
  done
done
expect_refused '--layout-independent 2: must be a power of two, for 3 ranks at least 4' "${parts[@]}" --nproc 3 \
  --layout-independent 2
expect_refused '--batch 6: must be a multiple of --layout-independent 4' "${parts[@]}" --batch 6 --eval-samples 6
run "${parts[@]}" --nproc 4 --tp 2 --checkpoint-dir "$work/tp" || fail "--layout-independent --tp 2: exit code $?"
expect_refused '--layout-independent 4: beside --tp 2, the ranks that see own data must be a power of two, not 3' \
  "${parts[@]}" --nproc 6 --tp 2

# Runs the program with these arguments until it shows a step; sets `pid`.
start() {
  local i
  : >"$work/out"  # now: what an earlier run printed is no step of this one
  "$program" "$@" >"$work/out" 2>"$work/err" &
  pid=$!
  for ((i = 0; i < 100; i++)); do
    grep -q '^step' "$work/out" && return
    sleep 0.1
  done
}

# Prints the process of the program's rank 1.
find_rank_1() {
  local folder
  for folder in /proc/[0-9]*; do
    if grep -qsx "PPid:.$pid" "$folder/status" && grep -qszx 'RANK=1' "$folder/environ"; then
      echo "${folder#/proc/}"
    fi
  done
}

# Waits for it, which must end with the exit code.
expect_end() {
  local code
  wait "$pid"
  code=$?
  ((code == $1)) || fail "$2: exit code $code, expected $1"
}

# A run that a signal stops is saved where it stands, and ends as one that was not stopped.
long=("${small[@]}" --svg "$work/curve.svg" --steps 1500 --eval-every 1500 --save-every 1500 --keep-last 0)
run "${long[@]}" --checkpoint-dir "$work/whole" || fail "1,500 steps: exit code $?"
start "${long[@]}" --checkpoint-dir "$work/stopped"
kill -TERM "$pid"
expect_end 143 'a run that SIGTERM stops'
expect_output '^stopped by signal 15 after step [0-9]+ of 1500, which is saved; --resume goes on$'
run "${long[@]}" --checkpoint-dir "$work/stopped" --resume || fail "--resume of a stopped run: exit code $?"
expect_output '^resumed from '
diff -r "$work/whole/step-00001500" "$work/stopped/step-00001500" || fail "a stopped run ends in other values"

# A run whose rank is killed starts again, and ends as one that was not disturbed; a wrong option does not start again.
start "${long[@]}" --checkpoint-dir "$work/restarted" --save-every 100 --max-restarts 2 --in-memory-every 10
kill -9 "$(find_rank_1)"
expect_end 0 '--max-restarts'
grep -qE '^launch_local: rank 1 \(pid [0-9]+\) was killed by signal 9 \(Killed\); restart 1 of 2 with 2 rank' "$work/err" ||
  fail "--max-restarts: no restart"
expect_output '^(resumed from .*, [0-9]+ steps of 1500 are done|no checkpoint in .*, training starts anew)$'
diff -r "$work/whole/step-00001500" "$work/restarted/step-00001500" || fail "--max-restarts: other values"
start "${long[@]}" --checkpoint-dir "$work/regrouped" --save-every 100 --max-restarts 2 --in-memory-every 10 \
  --keep-survivors
kill -9 "$(find_rank_1)"
expect_end 0 '--keep-survivors'
grep -qE '^launch_local: rank 1 .* killed by signal 9 .*; restart 1 of 2 with 2 rank\(s\), the others stay' "$work/err" ||
  fail "--keep-survivors: no restart"
grep -qE '^rank 0: .*; the process stays, and waits for the launcher$' "$work/err" || fail "--keep-survivors: none stays"
diff -r "$work/whole/step-00001500" "$work/regrouped/step-00001500" || fail "--keep-survivors: other values"
run "${long[@]}" --checkpoint-dir "$work/restarted" --max-restarts 2 --seed 2
(($? == 2)) || fail "--max-restarts with another seed"
grep -qE '^launch_local: rank [01] .* ended with exit code 2.*; a restart would not help$' "$work/err" ||
  fail "--max-restarts with another seed: the message"

start "${long[@]}" --checkpoint-dir "$work/interrupted"
kill -INT "$pid"
expect_end 130 'a run that Ctrl-C stops'
expect_output '^stopped by signal 2 after step [0-9]+ of 1500, which is saved; --resume goes on$'
compgen -G "$work/interrupted/step-*" >/dev/null || fail 'a run that Ctrl-C stops: no checkpoint'

# The launcher tells which rank died, and in which collective of which unit the others wait.
mkdir "$work/flights"
TESSERA_FLIGHT_DIR=$work/flights start "${small[@]}" --svg "$work/curve.svg" --steps 100000 --eval-every 100000
rank_1=$(find_rank_1)
kill -KILL "$rank_1"
expect_end 137 'a run whose rank 1 is killed'
grep -qE '^launch_local: rank 1 \(pid [0-9]+\) was killed by signal 9 ' "$work/err" || fail "a killed rank: who died"
grep -qE "^  rank 0 (waits for [0-9.]+ s in|gave up) [a-z_]+ #[0-9]+ of group 'default' \\(" "$work/err" ||
  fail "a killed rank: what rank 0 waits in"
grep -qE '^  rank 1 .*, and its process has ended' "$work/err" || fail "a killed rank: what it did last"
tools/doctor "$work/flights" >"$work/out" || fail "a killed rank: tools/doctor"
expect_output "^rank 1 was killed by signal 9 .*; rank 0 waits in [a-z_]+ #[0-9]+ of group 'default' "

# A second signal, a second after the first, ends a run at once: here one that waits for its rank 1, which stands still.
start "${long[@]}" --checkpoint-dir "$work/ended"
rank_1=$(find_rank_1)
[[ $rank_1 ]] || fail "rank 1 of process $pid is not to be found"
kill -STOP "$rank_1"
kill -INT "$pid"
sleep 1.3
kill -INT "$pid"
sleep 0.3
kill -CONT "$rank_1"
expect_end 130 'a run that a second Ctrl-C ends'
grep -q '^stopped by signal' "$work/out" && fail 'a run that a second Ctrl-C ends goes on'
compgen -G "$work/ended/step-*" >/dev/null && fail 'a run that a second Ctrl-C ends is saved'

# Output that cannot be written is a failure, and so is a folder for checkpoints that cannot be written, before training.
"$program" "${small[@]}" --svg "$work/curve.svg" >/dev/full 2>"$work/err" && fail "a full disk under stdout is a success"
grep -qF 'stdout cannot be written: No space left on device' "$work/err" || fail "a full disk under stdout: the message"
"$program" "${small[@]}" --svg "$work/curve.svg" >&- 2>"$work/err" && fail "a closed stdout is a success"
grep -qF 'stdout cannot be written: Bad file descriptor' "$work/err" || fail "a closed stdout: the message"
"$program" --version >&- 2>"$work/err" && fail "--version with a closed stdout is a success"
"$program" --version >/dev/full 2>"$work/err" && fail "--version with a full disk under stdout is a success"
expect_refused '--checkpoint-dir /proc/none: cannot be written to' "${small[@]}" --save-every 2 --checkpoint-dir /proc/none

expect_refused "--data $work/none.txt: there is no such file" "${small[@]}" --data "$work/none.txt"
echo 'too short' >"$work/short.txt"
expect_refused "--data $work/short.txt: 10 bytes are too few" "${small[@]}" --data "$work/short.txt"
expect_refused '--batch 5: must be a multiple of the 2 ranks' "${small[@]}" --batch 5
expect_refused '--heads 3: must divide --dim 16' "${small[@]}" --heads 3
expect_refused '--heads 2: must be a multiple of --tp 4' "${small[@]}" --nproc 4 --tp 4
expect_refused '--tp 3 and --replicate 1: their product must divide the 2 ranks' "${small[@]}" --tp 3
expect_refused '--dp 3: with --tp 1 and --replicate 1 it makes 3 ranks, but there are 2' "${small[@]}" --dp 3
expect_refused '--sp: cuts activations over the ranks of --tp, of which there is one' "${small[@]}" --sp
expect_refused '--svg /proc/none/curve.svg: cannot be written' "${small[@]}" --svg /proc/none/curve.svg
expect_refused '--stepps' --stepps 3
expect_refused '--device tpu: must be cpu or cuda' "${small[@]}" --device tpu
expect_refused '--peak-tflops 0: must be above 0, the TFLOP/s that the vendor publishes' "${small[@]}" --peak-tflops 0
expect_refused '--peak-tflops -1: must be above 0' "${small[@]}" --peak-tflops -1
expect_refused '--peak-tflops nan: must be above 0' "${small[@]}" --peak-tflops nan
expect_refused '--peak-tflops = fast' "${small[@]}" --peak-tflops fast
expect_refused '--seed: -1: must not be negative' "${small[@]}" --seed -1
expect_refused '--lr inf: must be above 0 and finite' "${small[@]}" --lr inf
expect_refused '--clip nan: must not be negative or infinite' "${small[@]}" --clip nan

# Both ranks of another launcher's group, without a device for them: exit codes 2, and what they say.
run_ranks_without_device() {
  local port rank
  port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
  for rank in 0 1; do
    (
      export RANK=$rank LOCAL_RANK=$rank WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=$port
      timeout 60 "$program" "${small[@]}" --svg "$work/curve.svg" --device cuda >"$work/out$rank" 2>"$work/err$rank"
      echo $? >"$work/code$rank"
    ) &
  done
  wait
  cat "$work"/out[01] >"$work/out"
  cat "$work"/err[01] >"$work/err"
  [[ $(cat "$work"/code[01] | tr '\n' ' ') == '2 2 ' ]] || fail "--device cuda without a device: $(cat "$work"/code[01])"
}

# Runs with one GPU: what the same runs give on the CPU.
check_on_gpu() {
  local on_gpu=("${small[@]}" --nproc 1 --device cuda --svg "$work/curve.svg") options
  for options in '--clip 0' '--meta-init' '--bf16 --meta-init' '--checkpoint-activations'; do
    read -ra layout_options <<<"$options"
    run "${on_gpu[@]}" --check-parity "${layout_options[@]}" || fail "--device cuda $options: exit code $?"
    expect_output '^parity: 1 ranks against one process'
    expect_output '^peak memory of a rank: [0-9]+ MiB \(allocated by tensors on the GPU\)$'
    expect_cost 1
  done
  run "${on_gpu[@]}" --save-every 2 --keep-last 0 --checkpoint-dir "$work/c" || fail "--device cuda --save-every: $?"
  rm -r "$work/c/step-00000004"
  run "${on_gpu[@]}" --save-every 2 --checkpoint-dir "$work/c" --resume || fail "--device cuda --resume: exit code $?"
  expect_output '^resumed from .*/c/step-00000002, 2 steps of 4 are done'
}

if [[ $built_for == cpu ]]; then
  not_built='--device cuda: this program was built without CUDA; build it with ./bazelw build --config=cuda'
  expect_refused "$not_built" "${small[@]}" --device cuda
  expect_refused "$not_built" "${small[@]}" --device cuda --nproc 1
  run_ranks_without_device
  (($(grep -cF -- "$not_built" "$work/err") == 1)) || fail "--device cuda as ranks: stderr does not say once: $not_built"
elif run "${small[@]}" --nproc 1 --device cuda --svg "$work/curve.svg"; then
  check_on_gpu
else
  no_gpu='no CUDA device is visible: the CUDA runtime says'
  expect_refused "--device cuda with --nproc 1: init_process_group: backend \"nccl\" needs a GPU for each of 1 ranks; \
rank 0: $no_gpu" "${small[@]}" --device cuda --nproc 1
  expect_refused "--device cuda with --nproc 2: init_process_group: backend \"nccl\" needs a GPU for each of 2 ranks; \
ranks 0, 1: $no_gpu" "${small[@]}" --device cuda
  run_ranks_without_device
  for rank in 0 1; do
    grep -qF "rank $rank: init_process_group: backend \"nccl\" needs a GPU for each of 2 ranks; ranks 0, 1: $no_gpu" \
      "$work/err$rank" || fail "--device cuda as rank $rank: the message"
  done
  ((failures == 0)) && echo "skipped: training on a GPU: $(grep -oF "$no_gpu" "$work/err0")..."
fi

((failures == 0)) && echo "all checks passed"
exit $((failures > 0))
