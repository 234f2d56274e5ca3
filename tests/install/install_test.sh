#!/usr/bin/env bash
# A program that CMake builds over an installed Tessera trains; and what its user gets wrong is named.
set -euo pipefail
install=$PWD/$1
prefix=$TEST_TMPDIR/prefix
build=$TEST_TMPDIR/build

fail() { echo "FAILED: $*" >&2; exit 1; }
# expect_error <words> <command>...: it fails, and says them.
expect_error() {
  local words=$1 output
  shift
  ! output=$("$@" 2>&1) || fail "no error: $*"
  output=$(tr -s ' \n' ' ' <<<"$output")  # cmake wraps lines
  [[ $output == *"$words"* ]] || fail "$* says \"$output\", not \"$words\""
}

expect_error "usage:" "$install"
"$install" "$prefix"
configure=(cmake -S examples/cmake -B "$build" -DCMAKE_PREFIX_PATH="$prefix")
expect_error "nowhere/include/torch/headeronly/version.h is not there; set Tessera_LIBTORCH" \
  "${configure[@]}" -DTessera_LIBTORCH=/nowhere
mkdir -p "$TEST_TMPDIR/old/include/torch/headeronly"
printf '#define TORCH_VERSION_MAJOR 1\n#define TORCH_VERSION_MINOR 9\n' >"$TEST_TMPDIR/old/include/torch/headeronly/version.h"
expect_error "old is 1.9; set Tessera_LIBTORCH" "${configure[@]}" -DTessera_LIBTORCH="$TEST_TMPDIR/old"

rm -rf "$build"
"${configure[@]}"
cmake --build "$build"
output=$("$build/fully_shard")
echo "$output"
[[ $output == *"the sharded model equals the one that was trained in one process"* ]] || fail "it does not train"
