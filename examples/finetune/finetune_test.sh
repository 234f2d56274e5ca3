#!/usr/bin/env bash
# Runs examples/finetune and examples/generate on a few processes, and with input that they must refuse.
#   finetune_test.sh FINETUNE GENERATE
set -uo pipefail

finetune=$1 generate=$2
work=$(mktemp -d "${TEST_TMPDIR:-/tmp}/finetune.XXXXXX")
unset BUILD_WORKING_DIRECTORY
failures=0

fail() {
  echo "FAILED: $1"
  cat "$work/out" "$work/err"
  failures=$((failures + 1))
}

# Runs a program; at most 60 s, so that a hang is a failure.
run() { timeout 60 "$@" >"$work/out" 2>"$work/err"; }

expect_output() { grep -qE -- "$1" "$work/out" || fail "no line of the output matches: $1"; }

# expect_refused CODE MESSAGE COMMAND...
expect_refused() {
  local expected=$1 message=$2 code
  shift 2
  run "$@"
  code=$?
  ((code == expected)) || fail "$*: exit code $code, expected $expected"
  (($(grep -cF -- "$message" "$work/err") == 1)) || fail "$*: stderr does not say once: $message"
}

# The loss that step $1 printed.
loss_of() { sed -nE "s/^step $1\/.*  loss ([0-9.]+) .*/\1/p" "$work/out"; }

# expect_close A B: losses within 0.001 of each other.
expect_close() {
  awk -v a="$1" -v b="$2" 'BEGIN { exit !(a != "" && b != "" && a - b < 1e-3 && b - a < 1e-3) }' ||
    fail "losses $1 and $2 differ"
}

for i in $(seq 400); do echo "line $i says that $((i * i)) is the square of $i"; done >"$work/squares.txt"
small=(--model "$work/tiny-llama" --data "$work/squares.txt" --batch 6 --sequence-length 64 --steps 20 --lr 3e-3)

# The model is made, learns, and comes out as a folder.
run "$finetune" "${small[@]:2}" --out "$work/tuned" --log-dir "$work/logs" --check-numerics || fail "a small run: exit code $?"
python3 tests/debug/check_metrics.py "$work/logs" 10 20 train/loss train/gradient_norm step/data_seconds \
  comm/bytes_per_step/dp >"$work/metrics" 2>&1 || fail "--log-dir: $(cat "$work/metrics")"
expect_output "^made $work/tiny-llama, a random model"
expect_output '^step 20/20  loss [0-9.]+  norm [0-9.]+  [0-9]+ tokens/s$'
first=$(loss_of 1) last=$(loss_of 20)
awk -v a="$first" -v b="$last" 'BEGIN { exit !(b < 0.75 * a) }' || fail "the loss does not fall: $first, $last"
for file in config.json model.safetensors.index.json tokenizer.json tokenizer_config.json; do
  [[ -s $work/tuned/$file ]] || fail "the folder has no $file: $(ls "$work/tuned")"
done

# Other ranks and layouts see the same samples, and so do several passes a step.
for layout in '--nproc 1' '--nproc 3 --accumulate 2 --recompute selective' '--nproc 4 --tp 2 --sp --recompute --accumulate 3'; do
  read -ra options <<<"$layout"
  run "$finetune" "${small[@]}" --out "$work/out.$RANDOM" "${options[@]}" || fail "$layout: exit code $?"
  expect_close "$(loss_of 1)" "$first"
  expect_close "$(loss_of 20)" "$last"
done

# In parts, one process and three write the same bits.
for ranks in 1 3; do
  run "$finetune" "${small[@]:0:4}" --batch 4 --sequence-length 64 --steps 6 --warmup 2 --layout-independent 4 \
    --nproc "$ranks" --out "$work/parts$ranks" || fail "--layout-independent, $ranks processes: exit code $?"
done
cmp "$work"/parts[13]/model-00001-of-00001.safetensors || fail "--layout-independent: another model"

# A run that is killed goes on elsewhere, on another number of ranks, with the same samples.
"$finetune" "${small[@]}" --out "$work/killed" --save-every 5 --checkpoint-dir "$work/run" >"$work/out" 2>"$work/err" &
pid=$!
for _ in $(seq 1500); do
  compgen -G "$work/run/step-*/tessera.json" >/dev/null && break
  sleep 0.02
done
kill -9 "$pid"
wait "$pid" 2>/dev/null
[[ ! -e $work/killed ]] || fail "the killed run has saved a folder"
run "$finetune" "${small[@]}" --out "$work/resumed" --save-every 5 --checkpoint-dir "$work/run" --resume --nproc 3 ||
  fail "--resume: exit code $?"
expect_output '^resumed: (5|10|15) steps are done, the next sample is (30|60|90)$'
expect_close "$(loss_of 20)" "$last"

# A run whose rank 1 is killed starts again, and ends with the same bits.
"$finetune" "${small[@]}" --out "$work/restarted" --save-every 5 --checkpoint-dir "$work/again" --max-restarts 1 \
  --in-memory-every 1 >"$work/out" 2>"$work/err" &
pid=$!
for _ in $(seq 1500); do
  compgen -G "$work/again/step-*/tessera.json" >/dev/null && break
  sleep 0.02
done
for folder in /proc/[0-9]*; do
  if grep -qsx "PPid:.$pid" "$folder/status" && grep -qszx 'RANK=1' "$folder/environ"; then
    kill -9 "${folder#/proc/}"
  fi
done
wait "$pid" || fail "--max-restarts: exit code $?"
grep -qE '^launch_local: rank 1 \(pid [0-9]+\) was killed by signal 9 \(Killed\); restart 1 of 1 with 2 rank' "$work/err" ||
  fail "--max-restarts: no restart"
expect_output '^resumed: [0-9]+ steps are done'
cmp "$work/tuned/model.safetensors" "$work/restarted/model.safetensors" 2>/dev/null ||
  diff -r "$work/tuned" "$work/restarted" || fail "--max-restarts: another model"

# Chats: only what the assistant wrote counts.
for i in $(seq 40); do
  echo "{\"messages\": [{\"role\": \"user\", \"content\": \"square of $i?\"}, {\"role\": \"assistant\", \"content\": \"$((i * i))\"}]}"
done >"$work/chats.jsonl"
run "$finetune" --model "$work/tuned" --data "$work/chats.jsonl" --chat-template chatml --pad --batch 4 \
  --sequence-length 128 --steps 3 --warmup 0 --out "$work/chat" || fail "chats: exit code $?"
expect_output '^step 3/3  loss'

# Adapters, as a folder of PEFT or added to the weights.
run "$finetune" "${small[@]}" --out "$work/adapter" --lora-rank 4 --tp 2 || fail "--lora-rank: exit code $?"
[[ -s $work/adapter/adapter_config.json && -s $work/adapter/adapter_model.safetensors ]] || fail "no adapter"
run "$finetune" "${small[@]}" --out "$work/merged" --lora-rank 4 --merge-lora || fail "--merge-lora: exit code $?"
[[ -s $work/merged/config.json ]] || fail "--merge-lora: no model"
awk -v a="$first" -v b="$(loss_of 20)" 'BEGIN { exit !(b < 0.95 * a) }' || fail "adapters do not learn: $(loss_of 20)"

# A tuned model continues texts, on one process and on three.
run "$generate" --model "$work/tuned" --prompt 'line 7 says' --max-new-tokens 20 || fail "generate: exit code $?"
expect_output '^line 7 says.'
cp "$work/out" "$work/one"
run "$generate" --model "$work/tuned" --prompt 'line 7 says' --max-new-tokens 20 --nproc 3 || fail "generate --nproc 3"
cmp "$work/out" "$work/one" || fail "generate: three processes write another text"

run "$generate" --model "$work/tiny-llama" --adapter "$work/adapter" --prompt 'line 7' --max-new-tokens 5 ||
  fail "generate --adapter: exit code $?"

expect_refused 2 "$work/tuned: exists; give a new folder" "$finetune" "${small[@]}" --out "$work/tuned"
expect_refused 2 '--tp 3: must divide the number of ranks, 2' "$finetune" "${small[@]}" --out "$work/x" --tp 3
expect_refused 2 '--layout-independent 3: must be a power of two' "$finetune" "${small[@]}" --out "$work/x" --layout-independent 3
expect_refused 2 'nowhere.txt: does not exist' "$finetune" --data "$work/nowhere.txt" --out "$work/x"
expect_refused 2 'nowhere: has no config.json' "$finetune" --model "$work/nowhere" --data "$work/squares.txt" --out "$work/x"
expect_refused 1 'nowhere/config.json' "$generate" --model "$work/nowhere"
expect_refused 2 'top_p is 2; it must be above 0 and at most 1' "$generate" --model "$work/tuned" --top-p 2

rm -rf "$work"
((failures == 0)) && echo "all checks passed"
exit $((failures > 0))
