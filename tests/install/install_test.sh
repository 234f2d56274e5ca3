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

# Where it is installed there may be no CUDA, and no folders of the build.
dynamic=$(LC_ALL=C readelf -d "$prefix/lib/libtessera.so")
for name in libtorch_cpu.so libc10.so; do
  [[ $dynamic == *"(NEEDED)"*"[$name]"* ]] || fail "libtessera.so does not need $name: $dynamic"
done
for name in libcud libcupti _solib; do
  [[ $dynamic != *"$name"* ]] || fail "libtessera.so names $name: $dynamic"
done

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

# Headers that no other header includes.
mkdir -p "$TEST_TMPDIR/headers"
cat >"$TEST_TMPDIR/headers/CMakeLists.txt" <<'END'
cmake_minimum_required(VERSION 3.18)
project(headers LANGUAGES CXX)
find_package(Tessera REQUIRED)
add_executable(headers headers.cpp)
target_link_libraries(headers PRIVATE Tessera::tessera)
END
cat >"$TEST_TMPDIR/headers/headers.cpp" <<'END'
#include <torch/nn/modules/linear.h>

#include "fully_shard/forward_method.h"
#include "nn/reset_parameters.h"

int main() {
  torch::nn::Linear linear(2, 3);
  tessera::reset_parameters(*linear);
  const auto twice = [&](at::Tensor x) { return linear(x) * 2; };
  return tessera::forward_method(*linear, twice, linear->weight).numel() == 9 ? 0 : 1;
}
END
cmake -S "$TEST_TMPDIR/headers" -B "$TEST_TMPDIR/headers/build" \
  -DCMAKE_PREFIX_PATH="$prefix" -DCMAKE_BUILD_TYPE=Release
cmake --build "$TEST_TMPDIR/headers/build"
"$TEST_TMPDIR/headers/build/headers" || fail "a program over the other headers: exit code $?"
