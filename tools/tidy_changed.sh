#!/usr/bin/env bash
# tools/tidy_changed.sh [<limit>]: clang-tidy on the library's sources that were changed last, 10 of them unless told
# otherwise. A change of a header counts for the source of its name, or else for no source. The whole tree, tests
# included, takes hours on two cores:
#   ./bazelw build --config=tidy //...
set -euo pipefail
limit=${1-10}
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

# What is not committed yet, then commits from the newest on.
changed=$({
  git diff HEAD --name-only -- '*.cpp' '*.h'
  git log -n 20 --format= --name-only -- '*.cpp' '*.h'
} | sed 's/\.h$/.cpp/' | awk '!seen[$0]++')
sources=()
while read -r source; do
  [[ -f $source && $source != tests/* && $source != third_party/* ]] && sources+=("$source")
done <<<"$changed"
((${#sources[@]})) || { echo "no source was changed in the last commits"; exit; }
((${#sources[@]} <= limit)) || echo "clang-tidy: ${#sources[@]} sources were changed, the last $limit are checked"
sources=("${sources[@]:0:limit}")

# Without those that only a build for CUDA has.
targets=$(./bazelw query --noshow_progress "let users = kind('cc_.* rule', same_pkg_direct_rdeps(set(${sources[*]}))) in
  \$users except attr('target_compatible_with', 'needs_config_cuda', \$users)")
[[ -n $targets ]] || { echo "no target of this build compiles ${sources[*]}"; exit; }
only=$(IFS=,; echo "${sources[*]}")
# shellcheck disable=SC2086 # a label a line
./bazelw build --config=tidy --color=no --curses=no --show_progress_rate_limit=30 --keep_going "--//tools:tidy_only=$only" $targets
