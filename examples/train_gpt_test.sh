#!/usr/bin/env bash
# Runs examples/train_gpt on 2 processes at a small size, and with input that it must refuse.
set -uo pipefail

program=$1
work=$(mktemp -d "${TEST_TMPDIR:-/tmp}/train_gpt.XXXXXX")
unset BUILD_WORKING_DIRECTORY
small=(--nproc 2 --steps 4 --dim 16 --layers 2 --heads 2 --context 16 --batch 4 --eval-samples 8 --sample-bytes 8)
failures=0

fail() {
  echo "FAILED: $1"
  cat "$work/out" "$work/err"
  failures=$((failures + 1))
}

# Runs the program; at most 20 s, so that a hang is a failure.
run() { timeout 20 "$program" "$@" >"$work/out" 2>"$work/err"; }

expect_output() { grep -qE -- "$1" "$work/out" || fail "no line of the output matches: $1"; }

# expect_refused MESSAGE ARGUMENT...
expect_refused() {
  local message=$1 code
  shift
  run "$@"
  code=$?
  ((code == 1)) || fail "train_gpt $*: exit code $code, expected 1"
  (($(grep -cF -- "$message" "$work/err") == 1)) || fail "train_gpt $*: stderr does not say once: $message"
}

run "${small[@]}" --svg "$work/curve.svg" || fail "a small run: exit code $?"
expect_output '^fully_shard over 2 ranks \(shm\)'
expect_output '^step 4/4  loss [0-9.]+ .* tokens/s .* ms/step .* MB sent/step .* MB .* validation [0-9.]+$'
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
layouts=('--tp 2' '--nproc 4 --tp 2 --sp --checkpoint-activations' '--nproc 4 --replicate 2 --tp 2 --bf16 --meta-init')
for layout in "${layouts[@]}"; do
  read -ra layout_options <<<"$layout"
  run "${small[@]}" --svg "$work/curve.svg" --check-parity "${layout_options[@]}" || fail "$layout: exit code $?"
  expect_output '^parity: [24] ranks against one process'
done

# A run that goes on from a checkpoint ends as one that never stopped, bit by bit on as many ranks.
saving=("${small[@]}" --svg "$work/curve.svg" --save-every 2 --keep-last 0)
run "${saving[@]}" --checkpoint-dir "$work/a" || fail "--save-every: exit code $?"
cp -r "$work/a" "$work/b" && rm -r "$work/b/step-00000004"
run "${saving[@]}" --checkpoint-dir "$work/b" --resume --async-save || fail "--resume: exit code $?"
expect_output '^resumed from .*/b/step-00000002, 2 steps of 4 are done'
diff -r "$work/a" "$work/b" || fail "--resume: the checkpoints differ"
run "${saving[@]}" --checkpoint-dir "$work/b" --resume || fail "--resume of a finished run: exit code $?"
expect_output '^resumed from .*/b/step-00000004, 4 steps of 4 are done'
grep -o '^validation loss [0-9.]*' "$work/out" >"$work/loss"
rm -r "$work/b/step-00000004"
run "${saving[@]}" --checkpoint-dir "$work/b" --resume --nproc 4 --tp 2 || fail "--resume with --tp 2: exit code $?"
grep -o '^validation loss [0-9.]*' "$work/out" | cmp - "$work/loss" || fail "--resume with --tp 2: another loss"
run "${saving[@]}" --checkpoint-dir "$work/a" --resume --seed 2 && fail "--resume with another seed is taken"
grep -qF 'was saved with --seed 1, not 2' "$work/err" || fail "--resume with another seed: the message"
expect_refused '--async-save: nothing is saved without --save-every' "${small[@]}" --async-save

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

((failures == 0)) && echo "all checks passed"
exit $((failures > 0))
