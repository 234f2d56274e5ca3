#!/usr/bin/env bash
# Runs the examples of one concept each, and looks for what each of them shows.
set -uo pipefail

declare -A shows=(
  [activation_checkpoint]='^all 32 gradients are equal, bit for bit$'
  [checkpoint]='^2 ranks ended at step 30, with the parameters of one process$'
  [custom_op]='\(Shard\(1\)\).* -> .*\(Shard\(0\)\).*: as in one process$'
  [device_mesh]='^rank 4 of .* is at \[1, 1\]: tp ranks \[3, 4, 5\], their sum 12; dp ranks \[1, 4\], their sum 5$'
  [dtensor]='^the sum is 570 and the weight.s gradient has column sums 190 in every column$'
  [fully_shard]='^the sharded model equals the one that was trained in one process$'
  [hsdp]='^a step: [34] all-gathers and 2 reduce-scatters among 2 shards, 2 all-reduces between 2 replicas$'
  [tensor_parallel]='^largest difference to one process: outputs below 1e-6, gradient of up.weight below 1e-6$'
  [train_loop]='^epoch 20: loss 0\.00[0-9]*, of unseen samples 0\.00'
  [two_d]='^after 20 steps it equals the model that was trained in one process$'
)
failures=0
for program in "$@"; do
  name=$(basename "$program")
  output=$(timeout 30 "$program" 2>&1)
  code=$?
  if ((code != 0)) || ! grep -qE -- "${shows[$name]}" <<<"$output"; then
    echo "FAILED: $name, exit code $code; expected a line ${shows[$name]}; its output:"
    echo "$output"
    failures=$((failures + 1))
  fi
done
((failures == 0)) && echo "all $# examples passed"
exit $((failures > 0))
